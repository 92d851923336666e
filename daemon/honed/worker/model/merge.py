"""Merge of an adapter into its base model, tensor by tensor: the model is never in memory as a whole.

    stored tensor ── has its module a part in the adapter? peft's own merge of it, in float32 ──► cast ──► shard

The model is built without weights and wrapped by peft; a module gets its weights only while it is merged. So every form
of LoRA that peft merges is merged here, and modules without tensors of their own on disk are refused by name. The
written files are read again, to check that every parameter is in the requested dtype, and no other.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.inputs.basemodel import DTYPES, FLOAT_DTYPES, QUANTIZATION_STATE, Tensor
from honed.job.event import EventWriter
from honed.system import durable, installed, quote
from honed.system.error import DivergedError, HonedError, ModelError, PrecisionError, TimeLimitError
from honed.worker.assignment import Assignment
from honed.worker.model import adapter
from honed.worker.model.card import Facts
from honed.worker.stop import Stop

#: Largest size of one file of weights, in bytes.
MAX_SHARD_BYTES = 4 * 1024**3
#: Seconds between progress events.
TELL_INTERVAL_SEC = 1.0
#: Files copied from the base model's directory: no weights, nothing of other tools.
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
NOT_COPIED = re.compile(
    r"config\.json|honed\.json|TENSORS\.json|.*\.index\.json|adapter_config\.json|README.*|requirements\.txt"
)
TOKENIZER = re.compile(
    r"tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|.*\.model"
    r"|tekken\.json|chat_template\.jinja|.*\.tiktoken"
)
#: safetensors' name for a dtype, by torch's name.
WORDS = {torch_word: word for word, (torch_word, _) in DTYPES.items()}

#: Called with the numbers of written and of all tensors; may raise, to stop.
Progress = Callable[[int, int], None]


def tell(job: Assignment, events: EventWriter, stop: Stop) -> dict[str, str]:
    """Run a merge job from beginning to end. Returns the artifacts; any exception ends the attempt."""
    from honed.worker.model import export, load
    from honed.worker.run import versions

    started = time.time()
    deadline = None if job.spec.time_limit_sec is None else time.monotonic() + job.spec.time_limit_sec
    events.emit("started", pid=os.getpid(), versions=versions(job.backend), backend=job.backend)
    told_at = -TELL_INTERVAL_SEC

    def progress(number: int, count: int) -> None:
        nonlocal told_at
        stop.check()
        if deadline is not None and time.monotonic() > deadline:
            raise TimeLimitError(f"time limit of {job.spec.time_limit_sec:g} s reached", hint="increase time_limit_sec")
        if time.monotonic() - told_at >= TELL_INTERVAL_SEC or number == count:
            told_at = time.monotonic()
            events.emit("step", step=number, num_steps=count)

    events.emit("stage", stage="prepare")
    job.check_inputs()
    assert job.spec.adapter is not None
    adapter_dir, dtype = Path(job.spec.adapter), job.precision.load_dtype
    config = load.load_config(job)

    events.emit("stage", stage="merge")
    events.log("info", f"merging {adapter_dir} into {job.base_model_path}, in {dtype}")
    with export.beside(job.output_dir) as place:
        merged = merge(
            job.base_model_path,
            adapter_dir,
            place,
            dtype=dtype,
            config=config,
            chat_template=job.spec.chat_template,
            trust_remote_code=job.spec.trust_remote_code,
            progress=progress,
        )
        events.log("info", str(merged))

        stop.check()
        events.emit("stage", stage="export")
        facts = Facts(started=started, versions=versions(job.backend), step=merged.num_tensors, metrics={})
        export.finish(job, place, facts)
    artifacts = {"output_dir": str(job.output_dir)}
    num_bytes = durable.num_bytes_below(job.output_dir)
    events.emit("artifact", name="output_dir", path=artifacts["output_dir"], num_bytes=num_bytes)
    return artifacts


@dataclass(frozen=True)
class Merged:
    """Summary of a written checkpoint."""

    num_tensors: int
    num_changed: int
    num_shards: int
    dtype: str
    is_untied: bool

    def __str__(self) -> str:
        untied = "; the head is now stored separately from the embeddings" if self.is_untied else ""
        files = "one file" if self.num_shards == 1 else f"{self.num_shards} files"
        return f"merged: {self.num_changed} of {self.num_tensors} tensors changed, all in {self.dtype}, {files}{untied}"


def merge(
    base_dir: Path,
    adapter_dir: Path,
    target: Path,
    *,
    dtype: str,
    config: Any,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda _number, _count: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Merged:
    """Write the base model with the adapter in it to `target`, a whole checkpoint with every parameter in `dtype`.

    `config` is the base model's, as it is loaded. Raises ModelError for an adapter that does not belong to the base
    model or cannot be merged into its files, PrecisionError where a parameter leaves the dtype's range.
    """
    durable.make_dir(target)
    base = _Base(base_dir, str(config.model_type))
    with base.opened():
        mixture = _Mixture(base, adapter_dir, _skeleton(config, trust_remote_code=trust_remote_code))
        tensors = [mixture.tensor(name, dtype) for name in mixture.names]
        value = mixture.value
        shards = _shards(tensors, max_shard_bytes)
        _write(target, shards, value, dtype, progress)
    _write_config(base_dir, target, config, dtype, architecture=mixture.architecture, is_untied=mixture.is_untied)
    _copy_files(base_dir, adapter_dir, target, chat_template, with_code=trust_remote_code)
    _check(target, tensors, dtype)
    return Merged(len(tensors), mixture.num_changed, len(shards), dtype, mixture.is_untied)


# --- The base model's files -------------------------------------------------------------------------------------------


class _Base:
    """The stored tensors by name. The files are memory-mapped, so that a tensor takes memory only while it is used."""

    def __init__(self, path: Path, model_type: str) -> None:
        info = basemodel.inspect(path, model_type=model_type)
        self.path = path
        self.tensors = {each.name: each for each in info.tensors if not QUANTIZATION_STATE.search(each.name)}
        self._state = {each.name for each in info.tensors} - set(self.tensors)
        self._quantization = info.quantization
        self._places = self._index()
        self._files: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        single = self.path / "model.safetensors"
        if single.exists():
            return dict.fromkeys([*self.tensors, *self._state], single)
        index = json.loads((self.path / "model.safetensors.index.json").read_bytes())
        return {name: self.path / file for name, file in index["weight_map"].items()}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the files open inside the context."""
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            for path in sorted(set(self._places.values())):
                self._files[path] = stack.enter_context(safe_open(path, framework="pt"))
            yield
        self._files.clear()

    def read(self, name: str) -> Any:
        """Read a tensor; bitsandbytes' quantized ones are returned in float32."""
        if self.tensors[name].dtype not in ("uint8", "int8") or self._quantization is None:
            return self._get(name)
        module = name.removesuffix(".weight")
        if f"{module}.SCB" in self._state:
            return self._get(name).float() * self._get(f"{module}.SCB").float()[:, None] / 127.0
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = {each: self._get(each) for each in self._state if each.startswith(f"{name}.")}
        return (
            dequantize_4bit(self._get(name), QuantState.from_dict(state, device="cpu")).float()
            if state
            else self._get(name)
        )

    def is_float(self, name: str) -> bool:
        """Return True if the tensor is a parameter: a floating tensor, or a quantized one."""
        return self.tensors[name].dtype in FLOAT_DTYPES or (
            self._quantization is not None
            and name.endswith(".weight")
            and self.tensors[name].dtype in ("uint8", "int8")
        )

    def _get(self, name: str) -> Any:
        return self._files[self._places[name]].get_tensor(name)


# --- The model without weights, and the adapter -----------------------------------------------------------------------


def _skeleton(config: Any, *, trust_remote_code: bool) -> Any:
    """Build the model as it is loaded, with a placeholder of one number for each parameter.

    It is not on the meta device: peft moves an adapter to its module's device, and would lose it there.
    """
    import torch

    from honed.worker.model.transformers_backend import model_class

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    placeholders: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            placeholder = placeholders.setdefault(id(parameter), _placeholder(parameter.shape))
            module.register_parameter(name, placeholder)
    return model


def _placeholder(shape: Any) -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(()).expand(shape), requires_grad=False)


def _is_placeholder(parameter: Any) -> bool:
    return not any(parameter.stride())


class _Mixture:
    """The base model with the adapter, one tensor at a time, under the names of the base model's files."""

    def __init__(self, base: _Base, adapter_dir: Path, model: Any) -> None:
        self._base = base
        self.architecture = type(model).__name__
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
        self._ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._names, self._fused = _parameter_names(model, base.tensors)
        self._stored = {parameter: name for name, parameter in self._names.items()}
        self._init = _attach(model, adapter_dir)
        self._model = model
        self._parts = dict(_parts(model, adapter_dir))
        self._last: tuple[str, dict[str, Any]] = ("", {})
        self._last_split: tuple[str, dict[str, Any]] = ("", {})
        self._check_stored(adapter_dir)
        self.num_changed = 0
        extra = self._untied()
        self.is_untied = bool(extra)
        self._names |= extra
        self.names = [*base.tensors, *(name for name in extra if name not in base.tensors)]

    def tensor(self, name: str, dtype: str) -> Tensor:
        """Return the name, dtype and shape of the tensor that will be written under a stored name."""
        stored = self._base.tensors.get(name)
        shape = self._shapes.get(self._names.get(name, ""))
        if stored is None:
            assert shape is not None
            return Tensor(name, dtype, shape)
        return Tensor(name, dtype if self._base.is_float(name) else stored.dtype, shape or stored.shape)

    def value(self, name: str) -> Any:
        fused = self._fused.get(name)
        if fused is not None and self._is_changed(fused.parameter):
            self.num_changed += 1
            return self._split(fused.parameter)[name]
        parameter = self._names.get(name)
        if parameter is None or not self._is_changed(parameter):
            return self._base.read(name) if name in self._base.tensors else self._read(str(parameter))
        self.num_changed += 1
        return self._changed(parameter)

    def _part(self, parameter: str) -> str | None:
        """Return the name of the module in the adapter that a parameter belongs to; None if there is none."""
        parts = parameter.split(".")
        return next(
            (place for end in range(len(parts), 0, -1) if (place := ".".join(parts[:end])) in self._parts), None
        )

    def _is_changed(self, parameter: str) -> bool:
        place = self._part(parameter)
        if place is None:
            return self._trained(parameter) is not None
        leaves = {each.parameter_name for each in _wrappers(self._parts[place])}
        return not leaves or parameter.removeprefix(f"{place}.") in leaves

    def _trained(self, parameter: str) -> Any:
        """Return the adapter's replacement for a parameter, such as a bias; None where it has none."""
        module, _, leaf = parameter.rpartition(".")
        with contextlib.suppress(AttributeError):
            found = getattr(self._model.get_submodule(module), leaf)
            return None if _is_placeholder(found) or found.device.type == "meta" else found.data
        return None

    def _changed(self, parameter: str) -> Any:
        place = self._part(parameter)
        if place is None:
            return self._trained(parameter)
        if self._last[0] != place:
            self._last = (place, self._merge_module(place))
        return self._last[1][parameter.removeprefix(f"{place}.")]

    def _merge_module(self, place: str) -> dict[str, Any]:
        """Return a module's merged tensors by their names in it."""
        import torch
        from peft.utils.other import ModulesToSaveWrapper

        part = self._parts[place]
        if isinstance(part, ModulesToSaveWrapper):
            return {name: each.data for name, each in part.modules_to_save["default"].named_parameters()}
        layer = part.get_base_layer()
        wrappers = _wrappers(part)
        leaves = {each.parameter_name for each in wrappers}
        own = {leaf: each for leaf, each in layer.named_parameters(recurse=False) if not wrappers or leaf in leaves}
        for leaf, parameter in own.items():
            if _is_placeholder(parameter):
                # A copy: mapped memory must not be written to.
                read = self._read(f"{place}.{leaf}").to(torch.float32, copy=True)
                setattr(layer, leaf, torch.nn.Parameter(read.reshape(parameter.shape), requires_grad=False))
        with torch.no_grad():
            self._begin_as_in_training(part)
            for each in wrappers or [part]:
                each.merge()
        values = {leaf: getattr(layer, leaf).data for leaf in own}
        for leaf, parameter in own.items():
            setattr(layer, leaf, parameter)
        return values

    def _begin_as_in_training(self, layer: Any) -> None:
        """Take the first weights out of the base again, as PiSSA and OLoRA did, then restore the trained ones."""
        if self._init not in ("pissa", "olora"):
            return
        trained = {name: each.data for name, each in layer.named_parameters() if ".base_layer" not in f".{name}"}
        layer.pissa_init("default", "pissa") if self._init == "pissa" else layer.olora_init("default")
        for name, each in layer.named_parameters():
            if name in trained:
                each.data = trained[name]

    def _split(self, parameter: str) -> dict[str, Any]:
        """Split a merged parameter that is stored as several tensors, such as experts, into these by stored name."""
        from transformers.core_model_loading import revert_weight_conversion

        if self._last_split[0] != parameter:
            self._last_split = (parameter, {})  # releases the previous one first
            self._last_split = (parameter, revert_weight_conversion(self._model, {parameter: self._changed(parameter)}))
        return self._last_split[1]

    def _read(self, parameter: str) -> Any:
        stored = self._stored.get(self._stored_as(parameter))
        if stored is not None:
            return self._base.read(stored)
        members = {name: each for name, each in self._fused.items() if each.parameter == parameter}
        converter = copy.deepcopy(next(iter(members.values())).converter)
        for name, each in members.items():
            converter.add_tensor(parameter, name, each.pattern, self._base.read(name))
        return converter.convert(parameter, model=self._model, config=self._model.config)[parameter]

    def _stored_as(self, parameter: str) -> str:
        """Return the parameter itself, or one that it is tied to, whichever the files contain."""
        if parameter in self._stored:
            return parameter
        source = self._ties.get(parameter, parameter)
        alike = [source, *(target for target, other in self._ties.items() if other == source)]
        return next((each for each in alike if each in self._stored), parameter)

    def _check_stored(self, adapter_dir: Path) -> None:
        changed = [name for name in self._shapes if self._is_changed(name)]
        if not changed:
            raise ModelError(f"{adapter_dir}: the adapter does not change {self.architecture}", hint=adapter.OTHER_BASE)
        fused = {each.parameter for each in self._fused.values()}
        for name in changed:
            if self._stored_as(name) not in self._stored and name not in fused:
                raise ModelError(
                    f"{self._base.path}: none of its files contains {name} under a name that transformers "
                    f"{installed.version('transformers')} uses, so the adapter's part for it cannot be merged",
                    hint="remove such modules from target_modules, or use base model and adapter separately",
                )

    def _untied(self) -> dict[str, str]:
        """Return tied tensors that the adapter makes differ, which are stored separately: stored name → parameter."""
        import torch

        found: dict[str, str] = {}
        for target, source in self._ties.items():
            if self._is_changed(target) or self._is_changed(source):
                values = [
                    self._changed(each).float() if self._is_changed(each) else self._read(each).float()
                    for each in (target, source)
                ]
                if not torch.equal(*values):
                    found |= {self._stored.get(each, each): each for each in (target, source)}
        return found


@dataclass(frozen=True)
class _Member:
    """A stored tensor that is one of several from which a parameter is built, in transformers' own terms."""

    parameter: str
    pattern: str
    converter: Any


def _parameter_names(model: Any, stored: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, _Member]]:
    """Map stored names to the parameters loaded from them alone, and to their parts in combined parameters.

    Both follow transformers' own rules; tensors that it ignores are in neither.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    whole, fused = {}, {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if pattern is not None and renamed in parameters:
            fused[name] = _Member(renamed, pattern, by_pattern[pattern])
        elif renamed in parameters:
            whole[name] = renamed
    return whole, fused


def _attach(model: Any, adapter_dir: Path) -> str:
    """Wrap the model's modules in place, load the adapter, and return how its weights were initialized."""
    import peft
    import torch

    config = peft.PeftConfig.from_pretrained(adapter_dir)
    if config.peft_type != peft.PeftType.LORA:
        raise ModelError(f"{adapter_dir}: a {config.peft_type} adapter; only LoRA can be merged")
    init, config.init_lora_weights = config.init_lora_weights, False  # nothing is drawn: the weights are loaded
    if isinstance(init, str) and init.startswith(("pissa_niter", "corda", "loftq", "lora_ga")):
        raise ModelError(
            f"{adapter_dir}: init_lora_weights: {init} changed the base model at the start of training, which cannot "
            "be reproduced",
            hint="train with init_lora_weights: true, gaussian, pissa or olora",
        )
    config.inference_mode = True
    state = {name: each.to(torch.float32) for name, each in adapter.read(adapter_dir).items()}
    adapter.wrap(model, config, state, adapter_dir)
    return str(init).lower()


def _wrappers(part: Any) -> list[Any]:
    """Return peft's wrappers of parameters that are no module's weight, such as stacked experts; they are nested."""
    from peft.tuners.lora.layer import ParamWrapper

    found = []
    while isinstance(part, ParamWrapper):
        found.append(part)
        part = part.base_layer
    return found


def _parts(model: Any, adapter_dir: Path) -> Iterator[tuple[str, Any]]:
    """Yield the modules that peft wrapped, by their former names. Raises ModelError for one that is not merged here."""
    from peft.tuners.lora import layer as lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for name, module in model.named_modules():
        if isinstance(module, lora.Linear | lora.Embedding | lora._ConvNd | lora.ParamWrapper | ModulesToSaveWrapper):
            yield name, module
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ModelError(
                f"{adapter_dir}: {name}: merging peft's {type(module).__name__} is not supported",
                hint="use base model and adapter separately, or remove the module from the adapter",
            )


# --- The written checkpoint -------------------------------------------------------------------------------------------


def _shards(tensors: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Divide tensors into files of at most `max_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[Tensor]] = [[]]
    num_bytes = 0
    for each in tensors:
        if shards[-1] and num_bytes + each.num_bytes > max_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(each)
        num_bytes += each.num_bytes
    return shards


def _write(
    target: Path, shards: list[list[Tensor]], value: Callable[[str], Any], dtype: str, progress: Progress
) -> None:
    count, number = sum(map(len, shards)), 0
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        with (target / file).open("wb") as stream:
            stream.write(_header(shard))
            for each in shard:
                progress(number, count)
                stream.write(_bytes(each, value(each.name), dtype))
                number += 1
        weight_map |= dict.fromkeys((each.name for each in shard), file)
    progress(count, count)
    if len(shards) > 1:
        total = sum(each.num_bytes for shard in shards for each in shard)
        index_data = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index_data, indent=1) + "\n")


def _header(shard: list[Tensor]) -> bytes:
    """Return the beginning of a safetensors file; the library would need all of the file's tensors at once."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in shard:
        begin, end = end, end + each.num_bytes
        entries[each.name] = {"dtype": WORDS[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(planned: Tensor, value: Any, dtype: str) -> memoryview:
    """Return a tensor in its dtype, as it is on disk. Raises PrecisionError if a number leaves the dtype's range."""
    import torch

    assert tuple(value.shape) == planned.shape, planned.name
    cast = value.to(getattr(torch, planned.dtype))
    if planned.dtype == dtype and not torch.isfinite(cast).all():
        if torch.isfinite(value).all():
            raise PrecisionError(
                f"{planned.name}: up to {value.abs().max():.3g}, which {dtype} cannot hold", hint="dtype: bfloat16"
            )
        raise DivergedError(f"{planned.name}: not a number", hint="the adapter or the base model is damaged")
    return memoryview(cast.contiguous().reshape(-1).view(torch.uint8).numpy())


def _write_config(base_dir: Path, target: Path, config: Any, dtype: str, *, architecture: str, is_untied: bool) -> None:
    raw = json.loads((base_dir / "config.json").read_bytes())
    for key in ("quantization_config", "compression_config", "torch_dtype", "_name_or_path"):
        raw.pop(key, None)
    raw |= {
        "dtype": dtype,
        "model_type": config.model_type,
        "architectures": raw.get("architectures") or [architecture],
    }
    levels = [raw, *(each for key, each in raw.items() if key.endswith("_config") and isinstance(each, dict))]
    for level in levels[1:]:
        if level.keys() & {"dtype", "torch_dtype"}:
            level.pop("torch_dtype", None)
            level["dtype"] = dtype
    if is_untied:
        for level in (raw, *(level for level in levels[1:] if "tie_word_embeddings" in level)):
            level["tie_word_embeddings"] = False
    (target / "config.json").write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_files(base_dir: Path, adapter_dir: Path, target: Path, chat_template: str | None, *, with_code: bool) -> None:
    """Copy the tokenizer and other files without weights; the tokenizer is the adapter's own if it has one."""
    has_own = any(all((adapter_dir / name).is_file() for name in row) for row in basemodel.TOKENIZER_FILES)
    for path in sorted(base_dir.iterdir()):
        is_wanted = path.suffix in COPIED_SUFFIXES and not NOT_COPIED.fullmatch(path.name) and path.is_file()
        if is_wanted and (path.suffix != ".py" or with_code) and not (has_own and TOKENIZER.fullmatch(path.name)):
            shutil.copyfile(path, target / path.name)
    if has_own:
        for path in sorted(adapter_dir.iterdir()):
            if TOKENIZER.fullmatch(path.name) and path.is_file():
                shutil.copyfile(path, target / path.name)
    if chat_template is not None:
        shutil.copyfile(chat_template, target / "chat_template.jinja")


def _check(target: Path, planned: list[Tensor], dtype: str) -> None:
    """Read the written files' headers. Raises PrecisionError, naming the tensors that are not as planned."""
    try:
        found = {each.name: each for each in basemodel.inspect(target).tensors}
    except HonedError as error:
        raise PrecisionError(f"the merged checkpoint is incomplete: {error.said}", hint=error.hint) from error
    wrong = [
        f"{each.name} is {each.dtype}" for each in found.values() if each.dtype != dtype and each.dtype in FLOAT_DTYPES
    ]
    wrong += [f"{each.name} differs from the plan" for each in planned if found.get(each.name) != each]
    if wrong:
        raise PrecisionError(
            f"merged in {dtype}, but {quote.first(wrong, 5, separator='; ')}", hint="this is a bug: please report it"
        )
