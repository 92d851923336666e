"""Casts of full fine-tuning's weights to the dtype in which they are saved: at the end, and for every use before it.

Float32 master weights hold more than a checkpoint stores. Predictions, scores and the guard use the weights that the
model's user will have. The master weights are put back bit for bit, so that training is not affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from honed.job.plan_file import Precision
from honed.system import quote
from honed.worker.model import division
from honed.worker.model.dtypes import Rule

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
def as_saved(model: Any, precision: Precision, rule: Rule | None, optimizer: Any = None) -> Iterator[None]:
    """Have the model hold the numbers that will be saved; afterwards restore its own, in the same storage.

    `rule` has the dtype of each in the output; there is none beside an adapter. `optimizer` keeps the remainders of
    compensated weights, once there are any. Needs as much memory as weights of `computed_dtype`, at moments at which
    there are no gradients.
    """
    import torch

    from honed.worker.train.optimizer import master

    division.reshard(model)
    kept: list[tuple[Any, Any]] = []
    is_compensated = precision.master_weights == "compensated"
    # A weight without a remainder is the same number in float32.
    is_same = precision.save_dtype == "float32" and not is_compensated
    is_kept = rule is not None and bool(overflowing(model, rule))
    if rule is None or not _is_cast(precision) or is_same or (is_kept and not is_compensated):
        yield
        return
    computed = getattr(torch, computed_dtype(precision))
    divided: dict[int, Callable[[Any], Any]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_put_back, kept)
        for name, tensor, dtype in _targets(model, rule):
            # What the base alone keeps wider is loaded in the dtype of the config.
            used = torch.float32 if name in rule.family or rule.wanted == "float32" else computed
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


def cast(model: Any, precision: Precision, rule: Rule, optimizer: Any = None) -> str:
    """Cast what was trained, remainders included, to its saved dtype, in place; return the reason where it was not."""
    import torch

    from honed.worker.train.optimizer import master

    if names := overflowing(model, rule) if _is_cast(precision) else ():
        return (
            f"the output is saved in {precision.load_dtype}: {quote.first(names, MAX_NAMED)} grew beyond 65504, "
            "the largest number in float16; set save_dtype: bfloat16 or float32 to avoid this"
        )
    for _, tensor, dtype in _targets(model, rule):
        if tensor.dtype != dtype:
            tensor.data = master(tensor, optimizer).to(dtype)
    _set_dtype(model.config, getattr(torch, str(precision.save_dtype)))
    return ""


def _set_dtype(config: Any, dtype: Any) -> None:
    """Set the dtype in a config and its sub-configs, which other programs read for vision and audio models."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", None) or ():
        if (inner := getattr(config, name, None)) is not None:
            _set_dtype(inner, dtype)


def overflowing(model: Any, rule: Rule) -> list[str]:
    """Return the names of the weights that exceed float16's range, of those that are saved in it."""
    import torch

    if rule.wanted != "float16":
        return []
    largest = torch.finfo(torch.float16).max
    return [
        name
        for name, parameter in model.named_parameters()
        if rule.of(name) == "float16"
        and parameter.numel()
        and bool(division.gathered((parameter.abs() > largest).any()))
    ]


def _is_cast(precision: Precision) -> bool:
    return precision.save_dtype is not None and precision.save_dtype != precision.load_dtype


def _targets(model: Any, rule: Rule) -> Iterator[tuple[str, Any, Any]]:
    """Yield every parameter and stored buffer of floating point, with its name and its dtype in the output."""
    import torch

    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)
    for name, tensor in [*model.named_parameters(), *buffers]:
        if tensor.is_floating_point() and tensor.device.type != "meta":
            yield name, tensor, getattr(torch, rule.of(name))
