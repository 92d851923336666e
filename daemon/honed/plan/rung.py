"""The rungs of full fine-tuning: ways to keep the weights and optimizers to step them, from the best to the smallest.

    master_weights   weights           optimizer      bytes a parameter (weight, gradient, states)
    float32          float32           AdamW          4 + 4 + 8   = 16
    float32          float32           8-bit AdamW    4 + 4 + 2   = 10
    compensated      bfloat16 + rest   8-bit AdamW    2 + 2 + 2+2 =  8   float32, half of it beside the weight
    none             bfloat16          8-bit AdamW    2 + 2 + 2   =  6   updates that are too small are lost

Autocast computes with float32 weights in half precision, and copies each matrix for the length of a pass
(activation.py counts that). A job takes the first rung that fits into its device's whole memory, or the one it names,
and keeps it for its life: plan.json stores it, and each new plan of the job uses it again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from honed.job.plan_file import Precision
from honed.spec.optimizer import ADAMW, ADAMW_8BIT, COMPENSATED, asked_optim

if TYPE_CHECKING:
    from honed.spec.spec import JobSpec

MasterWeights = Literal["float32", "compensated", "none"]
#: Number of gradients summed in bfloat16 per step from which on a warning is given; figures in docs/precision.md.
MANY_ACCUMULATED = 16
#: Optimizers that keep what bfloat16 weights lose: a pattern of `optim`, and one of `optim_args` that enables it.
_KEEPS_WEIGHTS = (
    (re.compile("adamw_torch_[48]bit"), re.compile(r"bf16_stochastic_round=(true|yes|on|y|t|1)", re.IGNORECASE)),
    (re.compile("adamw_anyprecision"), re.compile(r"use_kahan_summation=(true|yes|on|y|t|1)", re.IGNORECASE)),
    (re.compile("stable_adamw"), re.compile(r"^(?!.*kahan_sum=)")),
)


@dataclass(frozen=True)
class Rung:
    """One way to keep and step the weights."""

    master_weights: MasterWeights
    optim: str | None  #: as in training.optim; None: the job's own
    save_dtype: str | None = None  #: of the output, where an earlier plan chose the rung; None: as trained
    is_pinned: bool = False  #: True if an earlier plan of this job chose it


def candidates(spec: JobSpec, *, can_half: bool, has_8bit: bool) -> tuple[Rung, ...]:
    """Return the rungs that a job may be trained on, the best first; empty where its request cannot be met.

    `can_half`: True if the weights may be bfloat16 on this device; `has_8bit`: True if bitsandbytes runs on it.
    """
    asked = asked_optim(spec)
    small = ADAMW_8BIT if has_8bit else ADAMW
    rungs: list[Rung] = []
    if spec.master_weights in ("auto", "float32"):
        rungs += [Rung("float32", item) for item in ([asked] if asked else dict.fromkeys((ADAMW, small)))]
    if spec.master_weights in ("auto", "compensated") and can_half and (asked is None or asked in COMPENSATED):
        rungs.append(Rung("compensated", asked or small))
    if spec.master_weights in ("auto", "none") and can_half:
        # Requested by name, it is AdamW where that fits, as in other tools.
        wanted = dict.fromkeys((ADAMW, small)) if spec.master_weights == "none" else (small,)
        rungs += [Rung("none", item) for item in ([asked] if asked else wanted)]
    return tuple(rungs)


def pinned(precision: Precision | None) -> Rung | None:
    """Return the rung that an earlier plan chose; None without one, and for adapters.

    Plans made before rungs existed show theirs by the dtype, and their outputs keep the trained dtype.
    """
    if precision is None or precision.adapter_dtype is not None:
        return None
    by_dtype: MasterWeights = "float32" if precision.load_dtype == "float32" else "none"
    kept = cast("MasterWeights", precision.master_weights or by_dtype)
    return Rung(kept, precision.optim, precision.save_dtype, is_pinned=True)


def accumulates(rung: Rung, num_accumulated: int) -> str:
    """Return a warning about gradients that are summed in the weights' bfloat16; empty where little is lost."""
    if rung.master_weights == "float32" or num_accumulated < MANY_ACCUMULATED:
        return ""
    return (
        f"training.gradient_accumulation_steps: {num_accumulated} gradients are added in bfloat16 for each step, "
        f"with an error of about {0.1 * num_accumulated**0.5:.1g} % (docs/precision.md): use a larger "
        "per_device_train_batch_size with fewer of them, or master_weights: float32"
    )


def loses(optim: str, optim_args: str | None) -> str:
    """Return a warning about bfloat16 weights without a master copy; empty where the optimizer keeps what they lose."""
    for name, asked in _KEEPS_WEIGHTS:
        if name.fullmatch(optim) and asked.search(optim_args or ""):
            if "stochastic" in asked.pattern:
                return ""
            return (
                f"{optim} compensates the rounding of weights, but its moments are bfloat16: too coarse for an "
                "adam_beta2 of 0.999"
            )
    return (
        f"bfloat16 weights without a master copy, updated by {optim}: updates below 1/256 of a weight are lost in "
        "rounding, so at usual learning rates most weights never change (see docs/precision.md)"
    )
