"""Checks of a base model on disk, in milliseconds and without torch: its config, its weights' headers, its tokenizer.

    config.json                                       the model's architecture
    model.safetensors | model.safetensors.index.json  its weights, whole or in shards
    tokenizer.json | tokenizer.model | …              its tokenizer
    chat_template.jinja | tokenizer_config.json       its chat template, if it has one

A safetensors file begins with 8 bytes, the length of a JSON header that names every tensor's dtype, shape and place,
so a truncated file, or one of another format, is detected before any weight is read. No weight is ever read here.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from honed.inputs import lookalike, modality
from honed.inputs.modality import Senses
from honed.run import snapshot
from honed.spec.export import EXPORTS
from honed.spec.problem import shown
from honed.system.error import ModelError, said

#: Bytes; the safetensors library refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000
#: Dimensions of a tensor; torch takes 64.
MAX_DIMENSIONS = 64
#: Bytes; a config.json has a few thousand, a tokenizer_config.json with many added tokens a few million.
MAX_CONFIG_BYTES = 64 * 1024 * 1024

#: safetensors' name of a dtype → torch's name, and bits per element.
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}
BITS: dict[str, int] = dict(DTYPES.values())

#: The dtypes in which a whole model may be stored and loaded.
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")

#: Any one of these groups of files is a tokenizer.
TOKENIZER_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("vocab.txt",),
    ("tekken.json",),
)
#: The files of which a vision or audio model's processor needs one.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
NO_PROCESSOR = f"neither {PROCESSOR_FILES[0]} nor {PROCESSOR_FILES[1]}"

#: Keys of a config.json, or of a nested config, that only a vision or audio model has.
VISION_KEYS = (
    "vision_config",
    "visual",
    "vision_tower",
    "mm_vision_tower",
    "vit_config",
    "image_token_id",
    "image_token_index",
)
AUDIO_KEYS = (
    "audio_config",
    "speech_config",
    "audio_token_id",
    "audio_token_index",
    "audio_encoder_config",
    "num_mel_bins",
)

#: Names of the helper tensors that bitsandbytes stores beside a quantized weight; they are not parameters.
QUANTIZATION_STATE = re.compile(
    r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*|SCB|weight_format)$"
)

#: A decoder layer's number in a weight's name; `_DEPTH_KEYS` are config.json's keys for the number of layers.
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
#: One of the two matrices that LoRA adds to a module.
_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class UncachedError(ModelError):
    """A hub id that is not (completely) in the local cache, and may be fetched; the rest of the job may be valid."""

    def __init__(self, message: str, missing: snapshot.Missing, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors header."""

    name: str
    dtype: str  #: torch's name
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return (self.num_elements * BITS[self.dtype] + 7) // 8


@dataclass(frozen=True)
class BaseModelInfo:
    """The facts about a base model that are known before it is loaded."""

    path: Path
    model_type: str  #: the spec's if it names one, else config.json's
    architectures: tuple[str, ...]
    config: dict[str, Any]
    num_parameters: int
    stored_dtypes: dict[str, int]  #: parameters per dtype, by torch's names
    num_weight_bytes: int  #: as stored
    tensors: tuple[Tensor, ...]  #: empty for pickled weights, whose contents cannot be known without running them
    is_quantized: bool
    quantization_method: str | None  #: bitsandbytes, gptq, awq, …
    chat_template: str | None
    has_vision: bool
    has_audio: bool
    is_pickled: bool

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def quantization(self) -> str | None:
        """The bitsandbytes quantization of the stored checkpoint: 4bit, 8bit, or None."""
        if self.quantization_method != "bitsandbytes":
            return None
        return "8bit" if (self.config.get("quantization_config") or {}).get("load_in_8bit") else "4bit"

    @property
    def lacks_processor(self) -> bool:
        """True for a vision or audio model without its processor's files: it takes only text."""
        return (self.has_vision or self.has_audio) and not has_processor(self.path)

    @property
    def speaks(self) -> bool:
        """True if the model also generates speech, so that only its thinker is trained (Qwen-Omni)."""
        return isinstance(self.config.get("thinker_config"), dict)

    @cached_property
    def senses(self) -> Senses:
        """The model's handling of media, from its processor's files; read when first asked for."""
        return modality.look(self.path, self.config)

    @property
    def stored_dtype(self) -> str:
        """The floating dtype of most parameters; without one in the weights that of config.json, else float32."""
        floats = {dtype: count for dtype, count in self.stored_dtypes.items() if dtype in FLOAT_DTYPES}
        if floats and not self.is_quantized:
            return max(floats, key=lambda dtype: floats[dtype])
        return _config_dtype(self.config) or (max(floats, key=lambda dtype: floats[dtype]) if floats else "float32")


@dataclass(frozen=True)
class AdapterInfo:
    """The facts about an adapter that are known before it is loaded."""

    path: Path
    config: dict[str, Any]  #: adapter_config.json
    num_parameters: int
    num_bytes: int
    tensors: tuple[Tensor, ...] = ()


def inspect(path: Path, *, model_type: str | None = None, allow_pickle: bool = False) -> BaseModelInfo:
    """Inspect a checkpoint's directory. `model_type` overrides config.json's.

    Raises ModelError, with the file and the remedy, for anything that would keep the model from loading.
    """
    config = _config(path)
    model_type = model_type or _model_type(config)
    if model_type is None:
        raise ModelError(
            f"{path / 'config.json'}: no model_type, so the architecture is unknown",
            hint="set it in the job file, as in `model_type: qwen3`, or add it to config.json",
        )
    _check_dtype(path, config)
    tensors, num_weight_bytes, is_pickled = _weights(path, allow_pickle=allow_pickle)
    _check_tokenizer(path)
    method = _quantization_method(path, config)
    has_vision, has_audio = _has_any(config, VISION_KEYS), _has_any(config, AUDIO_KEYS)
    stored_dtypes = _count(tensors)
    if is_pickled:
        dtype = _config_dtype(config) or "float32"
        stored_dtypes = {dtype: num_weight_bytes * 8 // BITS[dtype]}
    return BaseModelInfo(
        path=path,
        model_type=model_type,
        architectures=_architectures(config),
        config=config,
        num_parameters=sum(stored_dtypes.values()) if is_pickled else _num_parameters(tensors, config),
        stored_dtypes=stored_dtypes,
        num_weight_bytes=num_weight_bytes,
        tensors=tensors,
        is_quantized=method is not None,
        quantization_method=method,
        chat_template=chat_template(path, has_processor=has_vision or has_audio),
        has_vision=has_vision,
        has_audio=has_audio,
        is_pickled=is_pickled,
    )


def read_model_type(path: Path) -> str | None:
    """Return the `model_type` of a checkpoint's config.json, None if it has none. Raises ModelError."""
    return _model_type(_config(path))


def _model_type(config: dict[str, Any]) -> str | None:
    model_type = config.get("model_type")
    return model_type if isinstance(model_type, str) and model_type else None


def inspect_adapter(path: Path) -> AdapterInfo:
    """Inspect an adapter's directory. Raises ModelError for anything that would keep the adapter from loading."""
    _check_dir(path, "adapter")
    if not (path / "adapter_config.json").exists() and (other := lookalike.refuse(path, "adapter")) is not None:
        raise other
    config = _json(path / "adapter_config.json", hint="an adapter is a directory written by peft's save_pretrained")
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ModelError(
            f"{path / 'adapter_config.json'}: peft_type {shown(kind)} is not supported: only LoRA adapters "
            "(including DoRA and rsLoRA) can be trained and merged",
            hint="use a LoRA adapter; a job with a lora: section and no adapter creates one",
        )
    weights = path / "adapter_model.safetensors"
    if not weights.exists() and (path / "adapter_model.bin").exists():
        raise ModelError(
            f"{path / 'adapter_model.bin'}: pickled weights are not loaded, because loading them can run arbitrary "
            "code",
            hint="load the adapter with peft and save it again: save_pretrained writes adapter_model.safetensors",
        )
    tensors, num_bytes = read_header(weights, hint="the adapter is incomplete: copy it again")
    return AdapterInfo(path, config, sum(tensor.num_elements for tensor in tensors), num_bytes, tensors)


def check_fits(adapter: AdapterInfo, model: BaseModelInfo) -> None:
    """Raise ModelError for an adapter whose shapes or layers belong to another base model, as far as headers show.

    The worker compares names, since transformers renames many stored weights on loading.
    """
    check_whole(adapter)
    _check_depth(adapter, model)
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for tensor in model.tensors if not model.is_quantized else ():
        shapes.setdefault(_bare(tensor.name), set()).add(tensor.shape)
    for tensor in adapter.tensors:
        if (name := _MATRIX.fullmatch(tensor.name)) is None:
            continue
        alike = shapes.get(_bare(f"{name['module']}.weight"), set())
        base = next(iter(alike)) if len(alike) == 1 else ()
        number, at = (tensor.shape[-1], 1) if name["matrix"] == "A" else (tensor.shape[0], 0)
        if len(base) == len(tensor.shape) == 2 and number not in base:
            raise ModelError(
                f"{adapter.path / 'adapter_model.safetensors'}: trained on another base model: {tensor.name} "
                f"{'takes' if at else 'gives'} {number} {'inputs' if at else 'outputs'}, but {name['module']} of "
                f"{model.path} has {base[at]}",
                hint="set base_model to the model that the adapter was trained on",
            )


def check_whole(adapter: AdapterInfo) -> None:
    """Raise ModelError for a LoRA adapter whose matrices differ from its adapter_config.json: peft detects that only
    after the model is loaded."""
    config, where = adapter.config, adapter.path / "adapter_model.safetensors"
    if config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "SEQ_2_SEQ_LM"):
        raise ModelError(
            f"{adapter.path / 'adapter_config.json'}: task_type {config['task_type']}: not an adapter of a causal "
            "language model",
            hint="use one that was trained as CAUSAL_LM",
        )
    if not isinstance(config.get("r"), int):
        return
    patterns = config.get("rank_pattern") or {}
    names = {tensor.name for tensor in adapter.tensors}
    for tensor in adapter.tensors:
        name = _MATRIX.fullmatch(tensor.name)
        if name is None or len(tensor.shape) != 2 or ".experts" in tensor.name:  # peft stacks the experts' matrices
            continue
        other = "B" if name["matrix"] == "A" else "A"
        if f"base_model.model.{name['module']}.lora_{other}.weight" not in names:
            raise ModelError(
                f"{where}: {name['module']} has lora_{name['matrix']} but no lora_{other}",
                hint="the adapter is incomplete: copy it again",
            )
        expected = next(
            (rank for pattern, rank in patterns.items() if _fits(rf"(.*\.)?({pattern})$", name["module"])),
            config["r"],
        )
        rank = tensor.shape[0 if name["matrix"] == "A" else 1]
        if rank != expected:
            raise ModelError(
                f"{where}: {name['module']} has rank {rank}, but adapter_config.json says {expected}",
                hint="the two belong to different adapters: copy the adapter's complete directory again",
            )


def _fits(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _bare(name: str) -> str:
    """Return a weight's name from its layer's number on, with its part: checkpoints differ in the prefix."""
    layer = _LAYER.search(name)
    return f"{modality.part(name)} {name[layer.start() :]}" if layer else name


def _check_depth(adapter: AdapterInfo, model: BaseModelInfo) -> None:
    """Raise ModelError for an adapter on a layer that the language model does not have, by config.json's count."""
    config = model.config.get("thinker_config") or model.config
    config = next(
        (inner for key in ("text_config", "llm_config") if isinstance(inner := config.get(key), dict)), config
    )
    num_layers = next((config[key] for key in _DEPTH_KEYS if type(config.get(key)) is int), None)
    layers = {
        int(match[1])
        for tensor in adapter.tensors
        if modality.part(tensor.name) == "language" and (match := _LAYER.search(tensor.name))
    }
    if num_layers is not None and layers and max(layers) >= num_layers:
        raise ModelError(
            f"{adapter.path / 'adapter_model.safetensors'}: trained on another base model: it changes layer "
            f"{max(layers)}, but {model.path} has only {num_layers} layers, counted from 0",
            hint="set base_model to the model that the adapter was trained on",
        )


def read_names(path: Path) -> frozenset[str]:
    """Return the names of all tensors that a checkpoint is loaded from; empty if its weights are pickled."""
    if not any(_is_there(path / name) for name in ("model.safetensors", "model.safetensors.index.json")):
        return frozenset()
    tensors, _, _ = _weights(path, allow_pickle=False)
    return frozenset(tensor.name for tensor in tensors)


def resolve(
    base_model: str,
    *,
    cache_dir: Path,
    allow_hub: bool,
    revision: str | None = None,
    jobs: Mapping[str, Path] | None = None,
) -> Path:
    """Return the directory that `base_model` means: a path, a hub id in the local cache, or `job:NAME` among `jobs`.

    `cache_dir` is an HF_HOME. Raises ModelError if there is no such directory, as UncachedError if `allow_hub` allows
    fetching it.
    """
    if base_model.startswith("job:"):
        return _resolve_job(base_model.removeprefix("job:"), jobs or {})
    if base_model.startswith("/"):
        return Path(base_model)
    if is_hub_id(base_model):
        return _resolve_hub_id(base_model, revision or "main", cache_dir, allow_hub=allow_hub)
    raise ModelError(
        f"base_model: {shown(base_model)} is not a path, a hub id or job:NAME",
        hint="a path begins with /; a hub id looks like Qwen/Qwen3-1.7B",
    )


def is_hub_id(base_model: str) -> bool:
    is_job_or_path = base_model.startswith(("job:", "/"))
    return not is_job_or_path and HUB_ID.fullmatch(base_model) is not None and ".." not in base_model


def _resolve_job(name: str, jobs: Mapping[str, Path]) -> Path:
    """Return a job's output directory, or the checkpoint exported in it if the output itself is an adapter."""
    if name in jobs:
        dirs = (jobs[name] / item.name for item in EXPORTS if item.is_base_model)
        exported = next((directory for directory in dirs if directory.is_dir()), None)
        return exported if exported and not (jobs[name] / "config.json").exists() else jobs[name]
    raise ModelError(
        f"base_model: the output of job {name!r} does not exist yet",
        hint="submit this job again once that one has succeeded, or use the path of its output",
    )


def _resolve_hub_id(hub_id: str, revision: str, cache_dir: Path, *, allow_hub: bool) -> Path:
    if ".." in revision or revision.startswith("/"):
        raise ModelError(f"revision: {shown(revision)} is not a revision", hint="use a branch, a tag or a commit")
    snapshot_path = snapshot.find(cache_dir, hub_id, revision)
    if snapshot_path is not None:
        return snapshot_path
    commit = snapshot.commit_of(cache_dir, hub_id, revision)
    how = "only partly" if snapshot.read(cache_dir, hub_id, commit) else "not"
    where = f"base_model: {hub_id} at {revision} is {how} in the local cache {cache_dir}"
    fetch = f"HF_HOME={cache_dir} hf download {hub_id}" + (f" --revision {revision}" if revision != "main" else "")
    if allow_hub:
        raise UncachedError(
            where, snapshot.Missing(hub_id, revision), hint="honed fetches it before it accepts the job"
        )
    raise ModelError(
        f"{where}; jobs may not fetch from the hub here (policy.hub)",
        hint=f"fetch it first, `{fetch}`, or use the path of a directory",
    )


def read_header(path: Path, *, hint: str) -> tuple[tuple[Tensor, ...], int]:
    """Return the tensors that a safetensors file names, and the file's size in bytes. Raises ModelError with `hint`.

    The header is checked against the file: each tensor has its shape's length, none overlap, and all of them are there.
    """
    with _open_regular(path, hint) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ModelError(f"{path}: the file is empty", hint=hint)
        if size < 8:
            raise ModelError(
                f"{path}: {size} bytes are too few for a safetensors file; the file was truncated", hint=hint
            )
        begins = file.read(len(lookalike.LFS_POINTER))
        _check_fetched(path, begins)
        length = int.from_bytes(begins[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise ModelError(f"{path}: not a safetensors file: it claims a header of {length} bytes", hint=hint)
        if 8 + length > size:
            raise ModelError(
                f"{path}: truncated: its header should have {length} bytes, but the file has {size}", hint=hint
            )
        file.seek(8)
        header = file.read(length)
    return _parse_header(path, header, size - 8 - length, hint), size


def _check_fetched(path: Path, data: bytes) -> None:
    if data.startswith(lookalike.LFS_POINTER):
        raise ModelError(
            f"{path}: a Git LFS pointer (a few lines of text), not the file itself",
            hint=f"fetch the files that it points to: git -C {shlex.quote(str(path.parent))} lfs pull",
        )


def _parse_header(path: Path, header: bytes, num_data_bytes: int, hint: str) -> tuple[Tensor, ...]:
    try:
        entries = modality.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
        places = sorted((_offsets(entry["data_offsets"]), name) for name, entry in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: its safetensors header cannot be read ({_brief(error)})", hint=hint) from error
    end = 0
    for (begin, stop), name in places:
        if begin != end or stop - begin != tensors[name].num_bytes:
            raise ModelError(
                f"{path}: the offsets of {shown(name)} in the header do not match its shape or the other tensors",
                hint=hint,
            )
        end = stop
    if end > num_data_bytes:
        raise ModelError(
            f"{path}: truncated: its header describes {end} bytes of weights, but the file has {num_data_bytes}",
            hint=hint,
        )
    if end < num_data_bytes:
        raise ModelError(f"{path}: {num_data_bytes - end} bytes more than its header describes", hint=hint)
    return tuple(tensors.values())


def _offsets(given: Any) -> tuple[int, int]:
    begin, end = given
    if not all(type(offset) is int for offset in (begin, end)):
        raise ValueError(f"data_offsets {shown(given)}")
    return begin, end


def _tensor(name: str, entry: dict[str, Any]) -> Tensor:
    shape = tuple(entry["shape"])
    # Multiplying a hundred thousand large numbers takes minutes.
    if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"shape {shown(entry['shape'])}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {shown(entry['dtype'])}")
    return Tensor(name, DTYPES[entry["dtype"]][0], shape)


def _config(path: Path) -> dict[str, Any]:
    _check_dir(path, "base_model")
    if not (path / "config.json").exists() and (other := lookalike.refuse(path)) is not None:
        raise other
    return _json(path / "config.json", hint="a base model is a directory written by save_pretrained; copy it again")


def _check_dir(path: Path, key: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelError(
            f"{key}: no such directory: {path}", hint="the path must exist on the machine that trains"
        ) from None
    except OSError as error:
        raise ModelError(f"{key}: {path}: {error.strerror}", hint="make it readable for the job's submitter") from error
    if not stat.S_ISDIR(mode):
        raise lookalike.refuse_file(path, key)


def _open_regular(path: Path, hint: str) -> BinaryIO:
    """Open a file for reading; pipes and devices, on which a read could block for ever, are refused."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file", hint=hint) from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}", hint="make it readable for the job's submitter") from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ModelError(f"{path}: not a regular file", hint=hint)


def _json(path: Path, *, hint: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    with _open_regular(path, hint) as file:
        data = file.read(max_bytes + 1)
    _check_fetched(path, data)
    if not data.strip():
        raise ModelError(f"{path}: the file is empty", hint=hint)
    if len(data) > max_bytes:
        raise ModelError(f"{path}: longer than {max_bytes} bytes", hint=hint)
    try:
        value = modality.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {_brief(error)}", hint=hint) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}", hint=hint)
    return value


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {said(error)}"[:200]


def _check_dtype(path: Path, config: dict[str, Any]) -> None:
    """Check the dtypes in config.json: transformers' own error is `module 'torch' has no attribute 'bfloat61'`."""
    for key, value in _dtype_entries(config):
        if value is not None and not (isinstance(value, str) and value in BITS):
            raise ModelError(
                f"{path / 'config.json'}: {key}: {shown(value)} is not a dtype",
                hint="correct it there; most models use bfloat16, float16 or float32",
            )


def _dtype_entries(config: dict[str, Any]) -> list[tuple[str, Any]]:
    nested = [
        (f"{name}.", section)
        for name, section in config.items()
        if name.endswith("_config") and name != "quantization_config" and isinstance(section, dict)
    ]
    keys = ("dtype", "torch_dtype")
    return [(at + key, section[key]) for at, section in [("", config), *nested] for key in keys if key in section]


def _config_dtype(config: dict[str, Any]) -> str | None:
    return next((value for _, value in _dtype_entries(config) if value in FLOAT_DTYPES), None)


def _weights(path: Path, *, allow_pickle: bool) -> tuple[tuple[Tensor, ...], int, bool]:
    """Return the tensors, their bytes, and True if they are pickled; searched in transformers' own order."""
    index_path = path / "model.safetensors.index.json"
    again = "the download or copy is incomplete: fetch this file again"
    if _is_there(path / "model.safetensors"):
        tensors, num_bytes = read_header(path / "model.safetensors", hint=again)
        return _checked(path / "model.safetensors", tensors), num_bytes, False
    if _is_there(index_path):
        tensors, num_bytes = _shards(index_path, again)
        return _checked(index_path, tensors), num_bytes, False
    pickles = [file for file in sorted(path.glob("*.bin")) if file.name.startswith(("pytorch_model", "model"))]
    if pickles and allow_pickle:
        return (), sum(file.stat().st_size for file in pickles), True
    if pickles:
        raise ModelError(
            f"{pickles[0]}: pickled weights are not loaded, because loading them can run arbitrary code",
            hint="convert them to safetensors: load the model on a machine where you trust it, and save it with "
            "save_pretrained; or ask the administrator to set policy.pickle",
        )
    raise ModelError(f"{path}: no weights: neither model.safetensors nor {index_path.name}", hint=_other_weights(path))


def _is_there(path: Path) -> bool:
    """Return True if the name exists, even as a dangling link, which has an error message of its own."""
    return path.exists() or path.is_symlink()


def _other_weights(path: Path) -> str:
    if any(path.glob("*.gguf")):
        return "GGUF is for inference; use the checkpoint it was converted from"
    shard = next(iter(sorted(path.glob("*.safetensors"))), None)
    if shard is not None:
        return (
            f"{shard.name} exists, but the index that lists its contents does not: copy the complete directory "
            f"{path.name} again"
        )
    return "the download or copy is incomplete: fetch the model again"


def _checked(path: Path, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not any(tensor.num_elements for tensor in tensors):
        raise ModelError(f"{path}: lists no weights", hint="fetch the model again")
    return tensors


def _shards(index_path: Path, hint: str) -> tuple[tuple[Tensor, ...], int]:
    weight_map = _json(index_path, hint=hint).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_path}: no weight_map that gives a shard for each tensor", hint=hint)
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    for shard in sorted(set(weight_map.values())):
        if "/" in shard or shard in (".", ".."):
            raise ModelError(
                f"{index_path}: shard {shown(shard)} is outside the directory", hint="shards must be plain file names"
            )
        if not (index_path.parent / shard).exists():
            shards = set(weight_map.values())
            gone = sum(not (index_path.parent / item).exists() for item in shards if "/" not in item)
            more = f" ({gone} of {len(shards)} are missing)" if gone > 1 else ""
            raise ModelError(f"{index_path.parent / shard}: this shard of the weights is missing{more}", hint=hint)
        header, size = read_header(index_path.parent / shard, hint=hint)
        tensors |= {tensor.name: tensor for tensor in header}
        num_bytes += size
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        shard = weight_map[missing[0]]
        raise ModelError(
            f"{index_path.parent / shard}: {shown(missing[0])} is not in it, although the index lists it", hint=hint
        )
    return tuple(tensors.values()), num_bytes


def _count(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in tensors:
        if not QUANTIZATION_STATE.search(tensor.name):
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.num_elements
    return counts


def _num_parameters(tensors: tuple[Tensor, ...], config: dict[str, Any]) -> int:
    """Count the parameters: bitsandbytes packs two 4-bit parameters into every uint8 that it stores."""
    quantization = config.get("quantization_config") or {}
    packed = 2 if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit") else 1
    return sum(count * (packed if dtype == "uint8" else 1) for dtype, count in _count(tensors).items())


def _quantization_method(path: Path, config: dict[str, Any]) -> str | None:
    entry = config.get("quantization_config") or config.get("compression_config")
    if entry is None:
        return None
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if isinstance(method, str):
        return method
    if isinstance(entry, dict) and (entry.get("load_in_4bit") or entry.get("load_in_8bit")):
        return "bitsandbytes"
    raise ModelError(
        f"{path / 'config.json'}: quantization_config has no quant_method",
        hint="add it (bitsandbytes, gptq, awq, …), or use the unquantized checkpoint",
    )


def _architectures(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _has_any(config: dict[str, Any], keys: tuple[str, ...]) -> bool:
    nested = [value for value in config.values() if isinstance(value, dict)]
    return any(level.get(key) is not None for level in (config, *nested) for key in keys)


def has_processor(path: Path) -> bool:
    return any((path / name).exists() for name in PROCESSOR_FILES)


def takes_media(path: Path) -> bool:
    """Return True for a vision or audio model, with its processor's files or without."""
    return has_processor(path) or _has_any(_config(path), VISION_KEYS + AUDIO_KEYS)


def _check_tokenizer(path: Path) -> None:
    files = next((row for row in TOKENIZER_FILES if all((path / name).exists() for name in row)), None)
    if files is None and any(path.glob("*.tiktoken")):
        return
    if files is None:
        raise ModelError(
            f"{path}: no tokenizer: no tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            hint="copy the tokenizer's files from the model's source",
        )
    for name in files:
        with _open_regular(path / name, "copy the tokenizer again") as file:
            _check_tail(path / name, file)


def _check_tail(path: Path, file: BinaryIO) -> None:
    """Check by its end that a tokenizer's file is complete: parsing 30 MB of tokenizer.json would take a second."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise ModelError(f"{path}: the file is empty", hint="copy the tokenizer again")
    _check_fetched(path, file.read(len(lookalike.LFS_POINTER)))
    file.seek(max(0, size - 64))
    if path.suffix == ".json" and not file.read().rstrip().endswith(b"}"):
        raise ModelError(f"{path}: truncated: the JSON does not end", hint="copy the tokenizer again")


def end_ids(path: Path) -> list[int]:
    """Return the tokens at which a base model's answers end: by its generation_config.json, else by its config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            settings = modality.loads((path / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        inner = settings.get("text_config") if isinstance(settings, dict) else None
        for level in (settings, inner):
            value = level.get("eos_token_id") if isinstance(level, dict) else None
            ids = [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
            if ids:
                return ids
    return []


def chat_template(path: Path, *, has_processor: bool) -> str | None:
    """Return the template that the tokenizer will have, in transformers' own order; None without one.

    chat_template.json is read by processors alone: a text model's tokenizer ignores it.
    """
    readers: list[tuple[str, Callable[[Path], str | None]]] = [
        ("chat_template.jinja", _template_text),
        ("tokenizer_config.json", _template_entry),
    ]
    if has_processor:
        readers.append(("chat_template.json", _template_entry))
    for name, read in readers:
        template = read(path / name) if (path / name).exists() else None
        if template:
            return template
    return None


def _template_text(path: Path) -> str | None:
    try:
        with _open_regular(path, "copy the tokenizer again") as file:
            return file.read(MAX_CONFIG_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8: {error}", hint="copy the tokenizer again") from error


def _template_entry(path: Path) -> str | None:
    """Return the template of a JSON file: a string, or the one named `default` in a list."""
    match _json(path, hint="copy the tokenizer again").get("chat_template"):
        case str() as template:
            return template
        case list() as named:
            default = [
                item.get("template") for item in named if isinstance(item, dict) and item.get("name") == "default"
            ]
            return default[-1] if default and isinstance(default[-1], str) else None
        case _:
            return None
