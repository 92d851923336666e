"""Merge of an adapter into its base model, tensor by tensor: the model is never in memory as a whole.

    stored tensor ── has its module a part in the adapter? peft's own merge of it, in float32 ──► cast ──► shard

The model is built without weights and wrapped by peft; a module gets its weights only while it is merged. So every form
of LoRA that peft merges is merged here, and modules without tensors of their own on disk are refused by name. Each
merged tensor is compared with a second computation as it is written (oracle.py), and the files with the model that
the written config makes (written.py): what is wrong is an error, and leaves no output.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.inputs.basemodel import DTYPES, FLOAT_DTYPES, Tensor
from honed.job.plan_file import Precision
from honed.system import durable, installed, quote
from honed.system.error import DivergedError, HonedError, ModelError, PrecisionError
from honed.worker.model import (
    adapter,
    beginning,
    config_file,
    dtypes,
    leftover,
    names,
    tokenizer_files,
    written,
)
from honed.worker.model.config import skeleton
from honed.worker.model.oracle import Oracle
from honed.worker.model.stored import Base

#: Largest size of one file of weights, in bytes.
MAX_SHARD_BYTES = 4 * 1024**3
#: Files copied from the base model's directory: no weights, nothing of other tools.
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
NOT_COPIED = re.compile(
    r"config\.json|honed\.json|TENSORS\.json|.*\.index\.json|adapter_config\.json|README.*|requirements\.txt"
)
#: safetensors' name for a dtype, by torch's name.
WORDS = {torch_word: word for word, (torch_word, _) in DTYPES.items()}

#: Called with the numbers of written and of all tensors; may raise, to stop.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Merged:
    """Summary of a written checkpoint."""

    num_tensors: int
    num_changed: int
    num_shards: int
    dtypes: str  #: in words
    is_untied: bool
    changes: tuple[str, ...] = ()  #: of the base's files

    def __str__(self) -> str:
        untied = "; weights that the base shares are now stored separately" if self.is_untied else ""
        files = "one file" if self.num_shards == 1 else f"{self.num_shards} files"
        return f"merged: {self.num_changed} of {self.num_tensors} tensors changed, {self.dtypes}, {files}{untied}"


def merge(
    base_dir: Path,
    adapter_dir: Path,
    target: Path,
    *,
    dtype: str,
    config: Any,
    chat_template: str | None = None,
    trained: Precision | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda _number, _count: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Merged:
    """Write the base model with the adapter in it to `target`, a whole checkpoint in `dtype` (see dtypes.py).

    `config` is the base model's, as it is loaded; `trained` is the precision of the adapter's training, if it is known
    better than from the adapter's manifest. Raises ModelError for an adapter that does not belong to the base model or
    cannot be merged into its files, and for a merge that is found to be wrong; PrecisionError where a parameter leaves
    the dtype's range.
    """
    from transformers import AutoConfig

    durable.make_dir(target)
    base = Base(base_dir, str(config.model_type))
    with base.opened():
        empty = skeleton(config, dtype, trust_remote_code=trust_remote_code)
        mixture = _Mixture(base, adapter_dir, empty, dtype, trained or beginning.of_adapter(adapter_dir))
        is_untied = mixture.is_untied()
        values = {"dtype": dtype} | ({"tie_word_embeddings": False} if is_untied else {})
        changes = config_file.write_merged(
            base_dir, target, config, values, architecture=mixture.architecture, with_code=trust_remote_code
        )
        changes += _copy_files(base_dir, adapter_dir, target, chat_template, with_code=trust_remote_code)
        opened = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
        own = skeleton(opened, dtype, trust_remote_code=trust_remote_code)
        _untie(mixture, own)
        units = list(mixture.units())
        tensors = [mixture.tensor(name) for unit in units for name in unit]
        shards = _shards(tensors, max_shard_bytes)
        digests = _write(target, units, shards, mixture, progress)
        mixture.check_all_used()
    _check(target, tensors)
    _check_digests(target, digests, lambda: progress(len(tensors), len(tensors)))
    written.check(target, own, [name for name in base.tensors if mixture.is_copied(name)])
    floats = {tensor.name: tensor.dtype for tensor in tensors if tensor.dtype in FLOAT_DTYPES}
    precisions = dtypes.summary(floats, dtype)
    return Merged(len(tensors), mixture.num_changed, len(shards), precisions, is_untied, tuple(changes))


def _untie(mixture: _Mixture, own: Any) -> None:
    """Have the tensors stored that the written config does not tie. Raises ModelError if it ties what must differ."""
    kept = set(getattr(own, "all_tied_weights_keys", None) or {})
    mixture.untie([target for target in mixture.ties if target not in kept])
    if differing := list(mixture.differing(kept & set(mixture.ties))):
        raise ModelError(
            f"{mixture.architecture} has no way to store {quote.first(differing, 3)} apart from the weights that they "
            "share with other layers, and the adapter changes them",
            hint="remove such modules from target_modules, or use base model and adapter separately",
        )


# --- The model without weights, and the adapter -----------------------------------------------------------------------


def _fill(model: Any) -> None:
    """Give a model on meta a placeholder of one number for every parameter.

    peft moves an adapter to its module's device, and would lose it on meta.
    """
    placeholders: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            placeholder = placeholders.setdefault(id(parameter), _placeholder(parameter.shape))
            module.register_parameter(name, placeholder)


def _placeholder(shape: Any) -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(()).expand(shape), requires_grad=False)


def _is_placeholder(parameter: Any) -> bool:
    return not any(parameter.stride())


def _is_absent(parameter: Any) -> bool:
    return _is_placeholder(parameter) or parameter.device.type == "meta"


def _base_layer(part: Any) -> Any:
    return part.original_module if hasattr(part, "token_adapter") else part.get_base_layer()


class _Begun:
    """The base's tensors as the training began with them: some adapters change the base first."""

    def __init__(self, read: Callable[[str], Any], init: str, loaded: beginning.Loaded) -> None:
        self._read = read
        self._init = init
        self._loaded = loaded
        self._last: tuple[str, Any] = ("", None)

    def tensor(self, part: Any, path: str, leaf: str) -> Any:
        """Return a tensor of a module in the adapter."""
        import torch

        layer = _base_layer(part)
        own = getattr(layer, leaf)
        if not _is_placeholder(own):
            return own.data  # peft saves the embeddings beside some adapters
        if self._last[0] == f"{path}.{leaf}":
            return self._last[1]
        read = self._read(f"{path}.{leaf}").reshape(own.shape)
        if leaf != "weight" or self._init not in beginning.REPEATED or not hasattr(part, "lora_A"):
            return read
        setattr(layer, leaf, torch.nn.Parameter(read.to(torch.float32, copy=True), requires_grad=False))
        with torch.no_grad():
            beginning.repeat(part, self._init, path, self._loaded)
        self._last = (f"{path}.{leaf}", getattr(layer, leaf).data)
        setattr(layer, leaf, own)
        return self._last[1]


class _Mixture:
    """The base model with the adapter, one parameter at a time, under the names of the base model's files."""

    def __init__(self, base: Base, adapter_dir: Path, model: Any, dtype: str, loaded: Precision | None) -> None:
        self._base = base
        self.architecture = type(model).__name__
        self._shapes = {name: tuple(item.shape) for name, item in model.named_parameters(remove_duplicate=False)}
        self.ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._places = names.read(model, base.tensors)
        self._stored = {parameter: name for name, parameter in self._places.whole.items()}
        shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
        self._first = {
            item: first for first, made in self._places.built(shapes, model).items() for item in made
        }  #: of every parameter that is built with others
        self._rule = dtypes.rule(model, base.tensors.values(), self._places, dtype)
        planned = beginning.Loaded() if loaded is None else beginning.planned(loaded, model)
        _fill(model)
        init, is_rslora = _attach(model, adapter_dir)
        self._begun = _Begun(self._read, init, planned)
        self._model = model
        self._parts = dict(_parts(model, adapter_dir))
        self._shapes |= {name: tuple(buffer.shape) for name, buffer in _saved_buffers(self._parts)}
        self._oracle = Oracle(model, lambda item: not _is_absent(item), is_rslora=is_rslora)
        self._last: tuple[str, dict[str, Any]] = ("", {})
        self._check_stored(adapter_dir)
        self.num_changed = 0
        self.names = list(base.tensors)

    def untie(self, ties: Collection[str]) -> None:
        """Store tensors apart that are tied in the base, and not in the merged model."""
        for target in ties:
            for parameter in (target, self.ties[target]):
                name = self._stored.get(parameter, parameter)
                if parameter not in self._first:
                    self._places.whole[name] = self._stored[parameter] = parameter
                if name not in self.names and parameter not in self._first:
                    self.names.append(name)

    def is_untied(self) -> bool:
        """Return True if the adapter makes tensors differ that are tied in the base."""
        return any(True for _ in self.differing(self.ties))

    def differing(self, ties: Iterable[str]) -> Iterator[str]:
        """Yield those of the ties whose two tensors the adapter makes differ."""
        import torch

        for target in ties:
            both = (target, self.ties[target])
            if any(map(self._is_changed, both)) and not torch.equal(*(self._current(one).float() for one in both)):
                yield target

    def units(self) -> Iterator[list[str]]:
        """Yield the stored names, those of a group together: its parameters are merged once."""
        seen: set[str] = set()
        for name in self.names:
            first = self._places.first.get(name)
            if first is None:
                yield [name]
            elif first not in seen:
                seen.add(first)
                yield list(self._places.groups[first].members)

    def tensor(self, name: str) -> Tensor:
        """Return the name, dtype and shape of the tensor that will be written under a stored name."""
        stored = self._base.tensors.get(name)
        parameter = self._places.whole.get(name, "")
        if stored is None:
            return Tensor(name, self._rule.of(parameter), self._shapes[parameter])
        dtype = self._rule.of_stored(stored, self._places, is_quantized=self._base.is_quantized(name))
        return Tensor(name, dtype, self._shapes.get(parameter) or stored.shape)

    def is_copied(self, name: str) -> bool:
        """Return True for a stored tensor that the model's class ignores."""
        return self._places.parameter(name) is None

    def changed(self, unit: list[str]) -> dict[str, Any]:
        """Return the merged tensors of a unit by their stored names; none if the adapter does not change it."""
        changed = self._changes(unit)
        if not changed:
            return {}
        self.num_changed += len(unit)
        if self._places.first.get(unit[0]) is None:
            return {unit[0]: self._changed(changed[0])}
        return self._split(unit)

    def check(self, unit: list[str], written: Mapping[str, Any]) -> None:
        """Compare what was written for a unit with base plus adapter. Raises ModelError."""
        changed = self._changes(unit)
        first = self._places.first.get(unit[0])
        if first is None:
            made = {changed[0]: written[unit[0]]}
        else:
            made = self._places.groups[first].convert(first, written.__getitem__, self._model)
        for parameter in changed:
            self._oracle.check(parameter, made[parameter], self._expected(parameter))

    def check_all_used(self) -> None:
        """Raise ModelError if a tensor of the adapter is in nothing that was written."""
        self._oracle.check_all_used()

    def _changes(self, unit: list[str]) -> list[str]:
        """Return the parameters of a unit that the adapter changes."""
        first = self._places.first.get(unit[0])
        if first is None:
            parameter = self._places.whole.get(unit[0], "")
            parameters = [parameter] if parameter in self._shapes else []
        else:
            parameters = [item for item, other in self._first.items() if other == first]
        return [item for item in parameters if self._is_changed(item)]

    def unchanged(self, name: str) -> Any:
        """Return a tensor of the base by its stored name."""
        return self._base.read(name) if name in self._base.tensors else self._read(self._places.whole[name])

    def _current(self, parameter: str) -> Any:
        return self._changed(parameter) if self._is_changed(parameter) else self._read(parameter)

    def _part(self, parameter: str) -> str | None:
        """Return the name of the module in the adapter that a parameter belongs to; None if there is none."""
        parts = parameter.split(".")
        return next((path for end in range(len(parts), 0, -1) if (path := ".".join(parts[:end])) in self._parts), None)

    def _is_changed(self, parameter: str) -> bool:
        path = self._part(parameter)
        if path is None:
            return self._trained(parameter) is not None
        leaves = {wrapper.parameter_name for wrapper in _wrappers(self._parts[path])}
        return not leaves or parameter.removeprefix(f"{path}.") in leaves

    def _trained(self, parameter: str) -> Any:
        """Return the adapter's replacement for a parameter, such as a bias; None where it has none."""
        module, _, leaf = parameter.rpartition(".")
        with contextlib.suppress(AttributeError):
            weight = getattr(self._model.get_submodule(module), leaf)
            return None if _is_absent(weight) else weight
        return None

    def _changed(self, parameter: str) -> Any:
        path = self._part(parameter)
        if path is None:
            return self._trained(parameter).data
        if self._last[0] != path:
            self._last = (path, self._merge_module(path))
        return self._last[1][parameter.removeprefix(f"{path}.")]

    def _expected(self, parameter: str) -> Iterator[tuple[Any, Any]]:
        """Return what is expected in a changed parameter, by the other computation, in blocks."""
        from peft.utils.other import ModulesToSaveWrapper

        path = self._part(parameter)
        if path is None:
            return self._oracle.trained(self._trained(parameter))
        part, leaf = self._parts[path], parameter.removeprefix(f"{path}.")
        if isinstance(part, ModulesToSaveWrapper):
            return self._oracle.trained(_saved(part)[leaf])
        for wrapper in _wrappers(part):
            part = wrapper if wrapper.parameter_name == leaf else part
        return self._oracle.wrapped(part, leaf, lambda: self._begun.tensor(self._parts[path], path, leaf))

    def _merge_module(self, path: str) -> dict[str, Any]:
        """Return a module's merged tensors by their names in it."""
        import torch
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        part = self._parts[path]
        if isinstance(part, ModulesToSaveWrapper):
            return {name: item.data for name, item in _saved(part).items()}
        layer = _base_layer(part)
        wrappers = _wrappers(part)
        leaves = {wrapper.parameter_name for wrapper in wrappers}
        own = {leaf: item for leaf, item in layer.named_parameters(recurse=False) if not wrappers or leaf in leaves}
        for leaf in own:
            begun = self._begun.tensor(part, path, leaf)
            copied = begun.to(torch.float32, copy=True)  # mapped memory must not be written to
            setattr(layer, leaf, torch.nn.Parameter(copied, requires_grad=False))
        with torch.no_grad():
            for wrapper in wrappers or [part.token_adapter if isinstance(part, TrainableTokensWrapper) else part]:
                wrapper.merge()
                wrapper.merged_adapters.clear()  # else a second merge does nothing, without a word
        values = {leaf: getattr(layer, leaf).data for leaf in own}
        for leaf, parameter in own.items():
            setattr(layer, leaf, parameter)
        return values

    def _split(self, unit: list[str]) -> dict[str, Any]:
        """Split merged parameters that are stored as several tensors, such as experts, into these by stored name."""
        from transformers.core_model_loading import revert_weight_conversion

        first = self._places.first[unit[0]]
        group = [item for item, other in self._first.items() if other == first]
        tensors = revert_weight_conversion(self._model, {item: self._current(item) for item in group})
        if tensors.keys() != set(unit):
            raise ModelError(
                f"{self._base.path}: {first} would be stored as {quote.first(sorted(tensors), 3)}, not as it is in the "
                f"base: {quote.first(unit, 3)}",
                hint="remove such modules from target_modules, or use base model and adapter separately",
            )
        return dict(tensors)

    def _read(self, parameter: str) -> Any:
        stored = self._stored.get(self._stored_as(parameter))
        if stored is not None and stored in self._base.tensors:
            return self._base.read(stored)
        first = self._first[self._stored_as(parameter)]
        return self._places.groups[first].convert(first, self._base.read, self._model)[self._stored_as(parameter)]

    def _stored_as(self, parameter: str) -> str:
        """Return the parameter itself, or one that it is tied to, whichever the files contain."""
        source = self.ties.get(parameter, parameter)
        alike = [parameter, source, *(target for target, other in self.ties.items() if other == source)]
        return next((item for item in alike if self._is_stored(item)), parameter)

    def _is_stored(self, parameter: str) -> bool:
        return parameter in self._first or self._stored.get(parameter, "") in self._base.tensors

    def _check_stored(self, adapter_dir: Path) -> None:
        changed = [name for name in self._shapes if self._is_changed(name)]
        if not changed:
            raise ModelError(f"{adapter_dir}: the adapter does not change {self.architecture}", hint=adapter.OTHER_BASE)
        for name in changed:
            if not self._is_stored(self._stored_as(name)):
                raise ModelError(
                    f"{self._base.path}: none of its files contains {name} under a name that transformers "
                    f"{installed.version('transformers')} uses, so the adapter's part for it cannot be merged",
                    hint="remove such modules from target_modules, or use base model and adapter separately",
                )


def _attach(model: Any, adapter_dir: Path) -> tuple[str, bool]:
    """Wrap the model's modules in place, load the adapter; return how it was initialized, and whether it is rsLoRA."""
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
    state = {
        name: item.to(torch.float32) if item.is_floating_point() else item
        for name, item in adapter.read(adapter_dir).items()
    }
    adapter.wrap(model, config, state, adapter_dir)
    return str(init).lower(), bool(config.use_rslora)


def _wrappers(part: Any) -> list[Any]:
    """Return peft's wrappers of parameters that are no module's weight, such as stacked experts; they are nested."""
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = []
    while isinstance(part, ParamWrapper):
        wrappers.append(part)
        part = part.base_layer
    return wrappers


def _saved(part: Any) -> dict[str, Any]:
    """Return the adapter's parameters and buffers of a module in modules_to_save, by their names in it."""
    module = part.modules_to_save["default"]
    from honed.worker.model import published  # not before the worker has hidden packages: it imports transformers

    return {**dict(module.named_parameters()), **dict(published.buffers(module))}


def _saved_buffers(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the buffers of the modules in modules_to_save, such as the statistics of batch norms."""
    from peft.utils.other import ModulesToSaveWrapper

    from honed.worker.model import published

    for path, part in parts.items():
        if isinstance(part, ModulesToSaveWrapper):
            yield from (
                (f"{path}.{name}", buffer) for name, buffer in published.buffers(part.modules_to_save["default"])
            )


def _parts(model: Any, adapter_dir: Path) -> Iterator[tuple[str, Any]]:
    """Yield the modules that peft wrapped, by their former names. Raises ModelError for one that is not merged here."""
    from peft.tuners.lora import layer as lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper

    kinds = (
        lora.Linear,
        lora.Embedding,
        lora._ConvNd,
        lora.ParamWrapper,
        ModulesToSaveWrapper,
        TrainableTokensWrapper,
    )
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            yield name, module
        elif name.endswith(".token_adapter"):
            continue  # of a wrapper that was yielded
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
    for tensor in tensors:
        if shards[-1] and num_bytes + tensor.num_bytes > max_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return shards


def _write(
    target: Path, units: list[list[str]], shards: list[list[Tensor]], mixture: _Mixture, progress: Progress
) -> dict[str, str]:
    """Write all tensors, in the order of the units, and compare those that the adapter changes.

    Return the digests of what was in memory.
    """
    from honed.worker.model import tensorfile

    count, number = sum(map(len, shards)), 0
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    values = _cast(units, {item.name: item for shard in shards for item in shard}, mixture)
    for index, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        with (target / file).open("wb") as stream, ThreadPoolExecutor(1) as pool:
            stream.write(_header(shard))
            for item in shard:
                progress(number, count)
                name, value = next(values)
                assert name == item.name
                data = tensorfile.data(value)
                digest = pool.submit(tensorfile.digest, data)
                stream.write(data)
                digests[name] = digest.result()
                number += 1
        weight_map |= dict.fromkeys((item.name for item in shard), file)
    for _ in values:  # the last comparison
        raise AssertionError
    progress(count, count)
    if len(shards) > 1:
        total = sum(item.num_bytes for shard in shards for item in shard)
        index_data = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index_data, indent=1) + "\n")
    return digests


def _cast(units: list[list[str]], planned: Mapping[str, Tensor], mixture: _Mixture) -> Iterator[tuple[str, Any]]:
    """Yield every stored name and its tensor, as it is on disk; what is done with it is done before the comparison."""
    for unit in units:
        values = mixture.changed(unit)
        for name in unit:
            value = values[name] if name in values else mixture.unchanged(name)
            cast = _rounded(planned[name], value, is_copied=mixture.is_copied(name))
            if name in values:
                values[name] = cast
            yield name, cast
        if values:
            mixture.check(unit, values)


def _header(shard: list[Tensor]) -> bytes:
    """Return the beginning of a safetensors file; the library would need all of the file's tensors at once."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in shard:
        begin, end = end, end + item.num_bytes
        entries[item.name] = {"dtype": WORDS[item.dtype], "shape": list(item.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _rounded(planned: Tensor, value: Any, *, is_copied: bool) -> Any:
    """Return a tensor in its dtype. Raises PrecisionError if a number leaves the dtype's range."""
    import torch

    assert tuple(value.shape) == planned.shape, planned.name
    cast = value.to(getattr(torch, planned.dtype))
    if not is_copied and cast.is_floating_point() and not _is_finite(cast):
        if _is_finite(value):
            raise PrecisionError(
                f"{planned.name}: up to {value.abs().max():.3g}, which {planned.dtype} cannot hold",
                hint="dtype: bfloat16",
            )
        raise DivergedError(f"{planned.name}: not a number", hint="the adapter or the base model is damaged")
    return cast


def _is_finite(tensor: Any) -> bool:
    """Return True if no number is infinite or none; a minimum is much faster than torch.isfinite of each."""
    return not tensor.numel() or all(bool(item.isfinite()) for item in tensor.aminmax())


def _copy_files(
    base_dir: Path, adapter_dir: Path, target: Path, chat_template: str | None, *, with_code: bool
) -> list[str]:
    """Copy the files without weights; the tokenizer's are the adapter's own if it has one. Return their changes."""
    for path in sorted(base_dir.iterdir()):
        is_wanted = path.suffix in COPIED_SUFFIXES and not NOT_COPIED.fullmatch(path.name) and path.is_file()
        if is_wanted and (path.suffix != ".py" or with_code) and not tokenizer_files.is_one(path.name):
            shutil.copyfile(path, target / path.name)
    return tokenizer_files.merged(base_dir, adapter_dir, target, chat_template, with_code=with_code)


def _check(target: Path, planned: list[Tensor]) -> None:
    """Read the written files' headers. Raises PrecisionError, naming the tensors that are not as planned."""
    try:
        tensors_written = {tensor.name: tensor for tensor in basemodel.inspect(target).tensors}
    except HonedError as error:
        raise PrecisionError(f"the merged checkpoint is incomplete: {error.said}", hint=error.hint) from error
    wrong = [item.name for item in planned if tensors_written.get(item.name) != item]
    if wrong:
        raise PrecisionError(
            f"the merged checkpoint differs from the plan: {quote.first(wrong, 5, separator='; ')}",
            hint="this is a bug: please report it",
        )


def _check_digests(target: Path, digests: Mapping[str, str], beat: Callable[[], None]) -> None:
    """Read the written files back. Raises ModelError, naming the tensors that are not what was in memory."""
    from safetensors import safe_open

    from honed.worker.model import tensorfile

    wrong = []
    for path in leftover.files(target):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                beat()
                if tensorfile.digest(tensorfile.data(file.get_tensor(name))) != digests[name]:
                    wrong.append(name)
    if wrong:
        raise ModelError(
            f"the merged checkpoint does not have on disk what was written: {quote.first(wrong, 5)}",
            hint="requeue the job; if this happens again, check the disk of output_dir",
        )
