"""A loaded base model is what its files have: a fixed sample of each tensor is compared, by its published name.

A loader that finds no place for a tensor, or no tensor for a place, may leave it as it was initialised and only log
that. Names alone do not show it: conversions fuse and rename. So elements are compared, in the dtype in which the model
was loaded. A matrix that bitsandbytes has quantized is compared within the error of its blocks or rows.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from honed.inputs.basemodel import FLOAT_DTYPES, QUANTIZATION_STATE
from honed.system import quote
from honed.system.error import ModelError
from honed.worker.model import published

#: Places along the first dimension that are compared, and elements along the last one at each of them.
NUM_PLACES, NUM_ELEMENTS = 3, 16
#: Elements of a 4-bit matrix that share one constant of the second quantization: 256 blocks of 64.
_GROUP = 256 * 64
#: The largest error of NF4, relative to the largest element of a block (half the distance of its two lowest codes), and
#: of rounding to 8 bits, relative to that of a row; with some room for half precision.
_NF4_ERROR, _INT8_ERROR = 0.16, 0.6 / 127
_HINT = "copy the model again; if it is whole, its files do not fit this version of transformers: see `honectl doctor`"


def check(model: Any, directory: Path) -> int:
    """Raise ModelError, naming the tensors, where a model differs from its files; return how many were compared.

    Weights that are pickled are not compared. A padding token's row that the loader has set to zero is put back.
    """
    with _files(directory) as files:
        names = {name for name in files if not QUANTIZATION_STATE.search(name)}
        turned = {f"{name}.weight" for name, module in model.named_modules() if _is_turned(module)}
        padding = {
            module.weight.data_ptr(): module.padding_idx
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None
        }
        compared, wrong = 0, []
        for name, tensor in _held(model):
            stored = _stored_name(name, names, str(model.base_model_prefix))
            is_turned = stored is not None and name in turned
            is_same = None
            if stored is not None:
                if tensor.data_ptr() in padding:
                    _put_row(tensor, padding[tensor.data_ptr()], files[stored].get_slice(stored))
                is_same = _is_same(tensor, files[stored].get_slice(stored), model.dtype, is_turned=is_turned)
            compared += is_same is not None
            if is_same is False:
                wrong.append(name)
    if wrong:
        raise ModelError(
            f"{directory}: after loading, {len(wrong)} of {compared} tensors differ from the files: "
            f"{quote.first(sorted(wrong), 5)}",
            hint=_HINT,
        )
    return compared


@contextlib.contextmanager
def _files(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the open safetensors file of each stored tensor; none if the weights are pickled."""
    from safetensors import safe_open

    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.is_file():
        paths = [single]
    else:
        weight_map = json.loads(index.read_bytes())["weight_map"] if index.is_file() else {}
        paths = [directory / name for name in sorted(set(weight_map.values()))]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        yield {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _held(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model's tensors by published name.

    In the conversion, a placeholder of one element stands for a quantized matrix, whose packed form cannot be cut.
    """
    state = dict(published.state(model))
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and quantizer.pre_quantized:  # stored by a module's names, and read by no way back
        yield from state.items()
        return
    parameters = dict(model.named_parameters())
    placeholders = {
        name: torch.zeros(()).expand(shape)
        for name in state
        if (shape := _unpacked_shape(parameters.get(name))) is not None
    }
    quantized = {each.untyped_storage().data_ptr(): parameters[name] for name, each in placeholders.items()}
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
    """Tell whether a module stands for GPT-2's Conv1D, whose matrix bitsandbytes transposes."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"


def _stored_name(name: str, stored: set[str], prefix: str) -> str | None:
    """Return a tensor's name in the files, which may have the prefix of a model without a head, or lack it."""
    candidates = (name, f"{prefix}.{name}", re.sub(rf"^{re.escape(prefix)}\.", "", name))
    return next((each for each in candidates if each in stored), None)


def _is_same(tensor: Any, stored: Any, dtype: Any, *, is_turned: bool) -> bool | None:
    """Compare a sample; return None where the two cannot be compared, as where the files are quantized otherwise.

    `dtype`: of the model.
    """
    shape = tuple(stored.get_shape())
    is_float = stored.get_dtype() in ("F64", "F32", "F16", "BF16")
    unpacked = _unpacked_shape(tensor)

    def rows(start: int, end: int) -> Any:
        found = stored[:, start:end].T if is_turned else stored[start:end]
        return found.to(dtype).float()  # it was cast before it was quantized

    if unpacked is not None:
        if not is_float or (shape[::-1] if is_turned else shape) != unpacked or len(shape) != 2:
            return None
        return _is_near_8bit(tensor, rows) if type(tensor).__name__ == "Int8Params" else _is_near_4bit(tensor, rows)
    if shape != tuple(tensor.shape) or not (is_float and str(tensor.dtype).removeprefix("torch.") in FLOAT_DTYPES):
        return None
    return all(
        torch.equal(torch.nan_to_num(stored[place].to(tensor.dtype)), torch.nan_to_num(tensor[place].cpu()))
        for place in _places(shape)
    )


def _put_row(tensor: Any, index: int, stored: Any) -> None:
    """Put back a row of a token embedding: some families initialise that of the padding token after each load."""
    if tuple(stored.get_shape()) == tuple(tensor.shape) and tensor.dim() == 2 and index < len(tensor):
        with torch.no_grad():
            tensor[index].copy_(stored[index : index + 1][0].to(tensor.dtype))


def _places(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield where a tensor of a shape is compared: at its begin, its middle and its end."""
    if not shape or 0 in shape:
        return
    for number in range(NUM_PLACES):
        starts = [(size - 1) * number // (NUM_PLACES - 1) for size in shape]
        last = max(0, min(starts[-1], shape[-1] - NUM_ELEMENTS))
        yield (*(slice(start, start + 1) for start in starts[:-1]), slice(last, last + NUM_ELEMENTS))


def _is_near_4bit(tensor: Any, rows: Callable[[int, int], Any]) -> bool | None:
    """Compare the first group of blocks of a 4-bit matrix."""
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
    unpacked = dequantize_4bit(packed, first).reshape(-1, size).cpu().float()
    wanted = rows(0, num_rows).reshape(-1)[:count].reshape(-1, size)
    peaks = wanted.abs().amax(1, keepdim=True)
    # The second quantization rounds the blocks' constants by the largest distance from their mean.
    rounded = 0.01 * (peaks - peaks.mean()).abs().max() if state.nested else 0.0
    bound = peaks * _NF4_ERROR + rounded + 1e-6
    return bool(((unpacked - wanted).abs() <= bound).all())


def _is_near_8bit(tensor: Any, rows: Callable[[int, int], Any]) -> bool:
    """Compare the first, the middle and the last row of an 8-bit matrix."""
    for row in (0, tensor.shape[0] // 2, tensor.shape[0] - 1):
        wanted = rows(row, row + 1)[0]
        unpacked = tensor.data[row].cpu().float() * float(tensor.SCB[row]) / 127
        if bool(((unpacked - wanted).abs() > float(wanted.abs().max()) * _INT8_ERROR + 1e-6).any()):
            return False
    return True
