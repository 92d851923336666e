"""What was loaded, held against what was planned: parameters counted by dtype and role.

Roles: `adapter` (what peft added), `quantized` (bitsandbytes' storage, whose dtype says nothing), `norm` (families keep
some in float32), `base` (the rest, which must be in the planned dtype). Parameters on the meta device are passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from honed.error import PrecisionError
from honed.precision import Precision

_ADAPTER = re.compile(r"\blora_|\bmodules_to_save\b|\btrainable_tokens_")
_NORM = re.compile(r"norm|\bln_|layernorm", re.IGNORECASE)
#: The classes in which bitsandbytes keeps quantized weights.
_QUANTIZED = ("Params4bit", "Int8Params")


def role(name: str, parameter: Any) -> str:
    """One of adapter, quantized, norm, base; meta for a parameter that is not there."""
    if parameter.device.type == "meta":
        return "meta"
    if type(parameter).__name__ in _QUANTIZED or not parameter.is_floating_point():
        return "quantized"
    if _ADAPTER.search(name):
        return "adapter"
    return "norm" if _NORM.search(name) else "base"


def count(model: Any) -> Counter[tuple[str, str]]:
    """Parameters by role and dtype."""
    found: Counter[tuple[str, str]] = Counter()
    for name, parameter in model.named_parameters():
        found[role(name, parameter), str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return found


def check(model: Any, precision: Precision) -> str:
    """One line that says what was loaded. Raises PrecisionError, naming the parameters that are not as planned."""
    kept = [
        *(getattr(model, "_keep_in_fp32_modules", None) or []),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or []),
    ]
    wrong = [
        f"{name} is {_dtype(parameter)}"
        for name, parameter in model.named_parameters()
        if _is_planned(name, parameter, precision)
        and _dtype(parameter) != _planned(parameter, precision)
        and not any(module in name for module in kept)
    ]
    if wrong:
        raise PrecisionError(
            f"planned {precision.load_dtype}, but {'; '.join(wrong[:5])}"
            + (f" and {len(wrong) - 5} more" if wrong[5:] else ""),
            hint="name the dtype in the job file, or use backend: transformers",
        )
    found = count(model)
    is_quantized = any(kind == "quantized" for kind, _ in found)
    if is_quantized != (precision.quantization != "none"):
        loaded = "quantized" if is_quantized else "not quantized"
        raise PrecisionError(
            f"planned quantization {precision.quantization}, but the loaded model is {loaded}",
            hint="quantization: none, or backend: transformers",
        )
    return ", ".join(f"{kind} {dtype} {number:,}" for (kind, dtype), number in sorted(found.items()))


def check_arguments(arguments: Any, precision: Precision) -> None:
    """Raises PrecisionError where the trainer's final flags are not the planned ones: a backend may flip them."""
    planned, final = (precision.bf16, precision.fp16), (bool(arguments.bf16), bool(arguments.fp16))
    if planned != final:
        raise PrecisionError(
            f"planned bf16={planned[0]} fp16={planned[1]}, but the trainer has bf16={final[0]} fp16={final[1]}",
            hint="backend: transformers does not change them",
        )


def _dtype(parameter: Any) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _is_planned(name: str, parameter: Any, precision: Precision) -> bool:
    """Whether the plan says which dtype this parameter has: what is trained beside a base, and what is loaded."""
    if parameter.requires_grad and precision.adapter_dtype is not None:
        return parameter.device.type != "meta"
    return role(name, parameter) == "base"


def _planned(parameter: Any, precision: Precision) -> str:
    return precision.adapter_dtype if parameter.requires_grad and precision.adapter_dtype else precision.load_dtype
