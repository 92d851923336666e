"""A loaded base model is what its files have: a fixed sample of every tensor is compared, by its published name.

A loader that finds no place for a tensor, or no tensor for a place, may leave it as it was initialised and only log
that. Names alone do not show it: conversions fuse and rename. So elements are compared, in the dtype in which the model
was loaded. A matrix that bitsandbytes has quantized is compared within the error of its blocks or rows.
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from honed.inputs.basemodel import DTYPES, FLOAT_DTYPES, QUANTIZATION_STATE
from honed.system import quote
from honed.system.error import ModelError
from honed.worker.model import leftover, published, tensorfile

#: Places along the first dimension that are compared, and elements along the last one at each of them.
NUM_PLACES, NUM_ELEMENTS = 3, 16
#: Elements of a 4-bit matrix that share one constant of the second quantization: 256 blocks of 64.
_GROUP = 256 * 64
#: The largest error of NF4, relative to the largest element of a block (half the distance of its two lowest codes), and
#: of rounding to 8 bits, relative to that of a row; with some room for half precision.
_NF4_ERROR, _INT8_ERROR = 0.16, 0.6 / 127
#: Dtypes that are compared.
_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
#: The layer that a tensor belongs to, by its name.
_LAYER = re.compile(r".*?\.\d+(?=\.)")
_HINT = "copy the model again; if it is whole, its files do not fit this version of transformers: see `honectl doctor`"


@dataclass(frozen=True)
class Compared:
    """The samples of a base's files, as they are stored."""

    samples: Mapping[str, Any]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The digest of the samples of every layer, and of every tensor outside of the layers."""
        parts: dict[str, list[Any]] = {}
        for name in sorted(self.samples):
            layer = _LAYER.match(name)
            parts.setdefault(layer[0] if layer else name, []).append(self.samples[name].view(torch.uint8))
        return {part: tensorfile.digest(tensorfile.data(torch.cat(values))) for part, values in parts.items()}


def check(model: Any, directory: Path) -> Compared:
    """Raise ModelError, naming the tensors, where a model differs from its files; return what was compared.

    Weights that are pickled are not compared. A padding token's row that the loader has set to zero is put back.
    """
    files = _Files(directory)
    is_quantized = getattr(model, "hf_quantizer", None) is not None
    turned = {f"{name}.weight" for name, module in model.named_modules() if _is_turned(module)} if is_quantized else ()
    padding = _padding(model)
    samples: dict[str, Any] = {}
    pairs: list[tuple[str, Any, Any]] = []
    wrong = []
    for name, tensor in _held(model):
        if (stored_name := _stored_name(name, files.names, str(model.base_model_prefix))) is None:
            continue
        stored = files.tensor(stored_name)
        if tensor.data_ptr() in padding:
            _put_row(tensor, padding[tensor.data_ptr()], stored)
        if _unpacked_shape(tensor) is not None:
            if (is_near := _is_near(tensor, stored, model.dtype, is_turned=name in turned)) is None:
                continue
            wrong += [] if is_near else [name]
            samples[name] = _sample(stored)
        elif stored.shape == tensor.shape and tensor.dtype in _FLOATS:
            samples[name] = _sample(stored)
            pairs.append((name, _sample(tensor), samples[name].to(tensor.dtype)))
    if wrong := [*wrong, *_differing(pairs)]:
        raise ModelError(
            f"{directory}: after loading, {len(wrong)} of {len(samples)} tensors differ from the files: "
            f"{quote.first(sorted(wrong), 5)}",
            hint=_HINT,
        )
    return Compared(samples)


def _padding(model: Any) -> dict[int, int]:
    """Return the row of the padding token by the place of every embedding that has one."""
    return {
        module.weight.data_ptr(): module.padding_idx
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None
    }


def _differing(pairs: Sequence[tuple[str, Any, Any]]) -> list[str]:
    """Return the names of those pairs of samples that are not equal; those of one dtype are compared together."""
    kinds: dict[Any, list[tuple[str, Any, Any]]] = {}
    for pair in pairs:
        kinds.setdefault((pair[1].device, pair[1].dtype), []).append(pair)
    wrong = []
    for several in kinds.values():
        held, stored = (torch.cat([item[index] for item in several]).cpu() for index in (1, 2))
        is_same = (held == stored) | (held.isnan() & stored.isnan())
        if not is_same.all():
            parts = is_same.split([len(stored) for _, _, stored in several])
            wrong += [item[0] for item, part in zip(several, parts, strict=True) if not part.all()]
    return wrong


class _Files:
    """The floating-point tensors of a checkpoint, mapped into memory; none if the weights are pickled.

    This is what safetensors does, at a tenth of its time for every tensor.
    """

    def __init__(self, directory: Path) -> None:
        self._stored = leftover.stored(directory)
        self._maps: dict[Path, mmap.mmap] = {}
        for path in {item.path for item in self._stored.values()}:
            with path.open("rb") as file:  # a private map is writable, as torch wants it
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.names = {
            name
            for name, item in self._stored.items()
            if DTYPES[item.dtype][0] in FLOAT_DTYPES and not QUANTIZATION_STATE.search(name)
        }

    def tensor(self, name: str) -> Any:
        entry, dtype = self._stored[name], getattr(torch, DTYPES[self._stored[name].dtype][0])
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        count = (entry.end - entry.begin) // dtype.itemsize
        return torch.frombuffer(self._maps[entry.path], dtype=dtype, count=count, offset=entry.begin).view(entry.shape)


def _held(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model's tensors by published name.

    In the conversion, a placeholder of one element stands for a quantized matrix, whose packed form cannot be cut.
    """
    state = dict(published.state(model))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        yield from published.renamed(model, state).items()
        return
    if quantizer.pre_quantized:  # stored by a module's names, and read by no way back
        yield from state.items()
        return
    parameters = dict(model.named_parameters())
    placeholders = {
        name: torch.zeros(()).expand(shape)
        for name in state
        if (shape := _unpacked_shape(parameters.get(name))) is not None
    }
    quantized = {
        placeholder.untyped_storage().data_ptr(): parameters[name] for name, placeholder in placeholders.items()
    }
    converted = published.convert(model, state | placeholders)
    for name, tensor in converted.tensors.items():
        if placeholders and name in converted.copies:
            continue  # it may be made of placeholders
        matrix = quantized.get(tensor.untyped_storage().data_ptr())
        if matrix is None:
            yield name, tensor
        elif tensor.shape == _unpacked_shape(matrix):  # else a part of it
            yield name, matrix


def _unpacked_shape(parameter: Any) -> tuple[int, ...] | None:
    """Return the shape of a matrix that bitsandbytes has quantized; None for any other parameter."""
    match type(parameter).__name__:
        case "Params4bit" if parameter.quant_state is not None:
            return tuple(parameter.quant_state.shape)
        case "Int8Params" if parameter.SCB is not None:
            return tuple(parameter.shape)
    return None


def _is_turned(module: Any) -> bool:
    """Return whether a module stands for GPT-2's Conv1D, whose matrix bitsandbytes transposes."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"


def _stored_name(name: str, stored: set[str], prefix: str) -> str | None:
    """Return a tensor's name in the files, which may have the prefix of a model without a head, or lack it."""
    candidates = (name, f"{prefix}.{name}", re.sub(rf"^{re.escape(prefix)}\.", "", name))
    return next((candidate for candidate in candidates if candidate in stored), None)


def _is_near(tensor: Any, stored: Any, dtype: Any, *, is_turned: bool) -> bool | None:
    """Compare a quantized matrix with its file; return None where that is quantized otherwise.

    `dtype`: of the model.
    """
    matrix = stored.T if is_turned else stored
    if matrix.dim() != 2 or tuple(matrix.shape) != _unpacked_shape(tensor):
        return None

    def rows(start: int, end: int) -> Any:
        return matrix[start:end].to(dtype).float()  # it was cast before it was quantized

    return _is_near_8bit(tensor, rows) if type(tensor).__name__ == "Int8Params" else _is_near_4bit(tensor, rows)


def _put_row(tensor: Any, index: int, stored: Any) -> None:
    """Put back a row of a token embedding: some families initialise that of the padding token after every load."""
    if stored.shape == tensor.shape and tensor.dim() == 2 and index < len(tensor):
        with torch.no_grad():
            tensor[index].copy_(stored[index])


def _sample(tensor: Any) -> Any:
    """Return a fixed sample of a tensor's elements: at its begin, its middle and its end."""
    return torch.take(tensor.detach(), _places(tuple(tensor.shape)).to(tensor.device))


@functools.lru_cache(maxsize=1024)
def _places(shape: tuple[int, ...]) -> Any:
    """Return where a tensor of a shape is compared, as numbers of its elements in order."""
    if 0 in shape:
        return torch.empty(0, dtype=torch.long)
    indices: list[int] = []
    for number in range(NUM_PLACES if shape else 1):
        position, first = 0, 0
        for size in shape:
            first = (size - 1) * number // (NUM_PLACES - 1)
            position = position * size + first
        last = shape[-1] if shape else 1
        begin = max(0, min(first, last - NUM_ELEMENTS))
        indices += range(position - first + begin, position - first + min(begin + NUM_ELEMENTS, last))
    return torch.tensor(indices)


def _is_near_4bit(tensor: Any, rows: Callable[[int, int], Any]) -> bool | None:
    """Compare the first group of blocks of a 4-bit matrix."""
    if (unpacked := _unpacked_4bit(tensor)) is None:
        return None
    state, count = tensor.quant_state, unpacked.numel()
    wanted = rows(0, -(-count // state.shape[1])).reshape(-1)[:count].reshape(unpacked.shape)
    peaks = wanted.abs().amax(1, keepdim=True)
    # The second quantization rounds the blocks' constants by the largest distance from their mean.
    rounded = 0.01 * (peaks - peaks.mean()).abs().max() if state.nested else 0.0
    bound = peaks * _NF4_ERROR + rounded + 1e-6
    return bool(((unpacked - wanted).abs() <= bound).all())


def _unpacked_4bit(tensor: Any) -> Any:
    """Return the first group of blocks of a 4-bit matrix, a block a row; None if it is packed in another way."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = tensor.quant_state
    width, size = state.shape[1], state.blocksize
    num_rows = min(state.shape[0], -(-_GROUP // width))
    count = min(num_rows * width, _GROUP) // size * size
    if count == 0 or state.quant_type != "nf4" or tensor.dtype != torch.uint8:
        return None
    inner = state.state2
    nested: dict[str, Any] = {}
    if state.nested:
        constants = QuantState(absmax=inner.absmax[:1], blocksize=inner.blocksize, code=inner.code, dtype=inner.dtype)
        nested = {"offset": state.offset, "state2": constants}
    first = QuantState(
        absmax=state.absmax[: count // size],
        shape=torch.Size([count]),
        code=state.code,
        blocksize=size,
        quant_type="nf4",
        dtype=torch.float32,
        **nested,
    )
    packed = tensor.data.reshape(-1)[: count // 2].reshape(-1, 1)
    return dequantize_4bit(packed, first).reshape(-1, size).cpu().float()


def _is_near_8bit(tensor: Any, rows: Callable[[int, int], Any]) -> bool:
    """Compare the first, the middle and the last row of an 8-bit matrix."""
    for row in (0, tensor.shape[0] // 2, tensor.shape[0] - 1):
        wanted = rows(row, row + 1)[0]
        unpacked = tensor.data[row].cpu().float() * float(tensor.SCB[row]) / 127
        if bool(((unpacked - wanted).abs() > float(wanted.abs().max()) * _INT8_ERROR + 1e-6).any()):
            return False
    return True


def numbers(tensor: Any) -> list[float]:
    """Return a fixed sample of a weight's numbers, quantized or not; none if it is packed in another way."""
    match type(tensor).__name__:
        case "Params4bit":
            values = _unpacked_4bit(tensor)
            values = torch.empty(0) if values is None else values
        case "Int8Params":
            middle = tensor.shape[0] // 2
            values = tensor.data[middle].float() * float(tensor.SCB[middle])
        case _:
            values = tensor
    return [float(item) for item in _sample(values).float().cpu()]
