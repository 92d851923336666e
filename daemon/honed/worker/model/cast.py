"""Casts of full fine-tuning's weights to the dtype in which they are saved: at the end, and for each use before it.

Float32 master weights hold more than a checkpoint stores. Predictions, scores and the guard use the weights that the
model's user will have. The master weights are put back bit for bit, so that training is not affected.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from honed.job.plan_file import Precision
from honed.system import quote
from honed.worker.model import division

#: Weights that a warning names.
MAX_NAMED = 3


def computed_dtype(precision: Precision) -> str:
    """Return the dtype in which a forward pass outside of training computes.

    It is the saved dtype if training computes in it, which shows that the device can; else the rounded numbers are
    widened again.
    """
    if precision.master_weights == "compensated" and _is_cast(precision):
        return "float32"  # in which the remainders reach beyond bfloat16
    autocast = "bfloat16" if precision.bf16 else "float16" if precision.fp16 else precision.load_dtype
    return autocast if autocast == precision.save_dtype else precision.load_dtype


@contextlib.contextmanager
def as_saved(model: Any, precision: Precision, optimizer: Any = None) -> Iterator[None]:
    """Have the model hold the numbers that will be saved; afterwards restore its own, in the same storage.

    `optimizer` keeps the remainders of compensated weights, once there are any. Needs as much memory as weights of
    `computed_dtype`, at moments at which there are no gradients.
    """
    import torch

    from honed.worker.train.optimizer import master

    division.settle(model)
    kept: list[tuple[Any, Any]] = []
    is_compensated, is_kept = precision.master_weights == "compensated", bool(overflowing(model, precision))
    # A weight without a remainder is the same number in float32.
    is_same = precision.save_dtype == "float32" and not is_compensated
    if not _is_cast(precision) or is_same or (is_kept and not is_compensated):
        yield
        return
    computed = getattr(torch, computed_dtype(precision))
    divided: dict[int, Callable[[Any], Any]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_put_back, kept)
        for tensor, dtype in _targets(model, str(precision.save_dtype)):
            used = torch.float32 if dtype == torch.float32 else computed
            if division.part_of(tensor) is not tensor:
                divided[id(tensor)] = functools.partial(_rounded, dtype=dtype, used=used)
                continue
            numbers = tensor.data if is_kept else master(tensor, optimizer).to(dtype)
            kept.append((tensor, tensor.data))
            tensor.data = numbers.to(used)
        if divided:
            stack.enter_context(division.cast_in_use(model, divided))
        yield


def _put_back(kept: list[tuple[Any, Any]]) -> None:
    for tensor, data in kept:
        tensor.data = data


def _rounded(numbers: Any, *, dtype: Any, used: Any) -> Any:
    return numbers.to(dtype).to(used)


def cast(model: Any, precision: Precision, optimizer: Any = None) -> str:
    """Cast what was trained, remainders included, to the saved dtype, in place; return the reason where it was not."""
    import torch

    from honed.worker.train.optimizer import master

    if not _is_cast(precision):
        return ""
    if names := overflowing(model, precision):
        return (
            f"the output is saved in {precision.load_dtype}: {quote.first(names, MAX_NAMED)} grew beyond 65504, "
            "the largest number in float16; set save_dtype: bfloat16 or float32 to avoid this"
        )
    for tensor, dtype in _targets(model, str(precision.save_dtype)):
        tensor.data = master(tensor, optimizer).to(dtype)
    _tell(model.config, getattr(torch, str(precision.save_dtype)))
    return ""


def _tell(config: Any, dtype: Any) -> None:
    """Set the dtype in a config and its sub-configs, which other programs read for vision and audio models."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", None) or ():
        if (inner := getattr(config, name, None)) is not None:
            _tell(inner, dtype)


def overflowing(model: Any, precision: Precision) -> list[str]:
    """Return the names of the weights that exceed float16's range, if that is the saved dtype."""
    import torch

    if precision.save_dtype != "float16":
        return []
    largest = torch.finfo(torch.float16).max
    return [
        name
        for name, each in model.named_parameters()
        if each.numel() and bool(division.gathered((each.abs() > largest).any()))
    ]


def _is_cast(precision: Precision) -> bool:
    return precision.save_dtype is not None and precision.save_dtype != precision.load_dtype


def _targets(model: Any, save_dtype: str) -> Iterator[tuple[Any, Any]]:
    """Yield every parameter and stored buffer of floating point, with its dtype in the output.

    Weights that transformers loads in float32 whatever is requested are also saved in it.
    """
    import torch

    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if save_dtype == "float16":
        wide |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)
    for name, tensor in [*model.named_parameters(), *buffers]:
        if tensor.is_floating_point() and tensor.device.type != "meta":
            is_wide = any(re.search(rf"(^|\.){re.escape(each)}(\.|$)", name) for each in wide)
            yield tensor, torch.float32 if is_wide else getattr(torch, save_dtype)
