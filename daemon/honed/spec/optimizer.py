"""Optimizers by their names in `training.optim`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from honed.spec.spec import JobSpec


#: The default optimizer, and the one that needs a quarter of its memory.
ADAMW, ADAMW_8BIT = "adamw_torch_fused", "adamw_8bit"


#: The names of AdamW in `training.optim` that support remainders (master_weights: compensated).
COMPENSATED = frozenset({"adamw_torch", ADAMW, ADAMW_8BIT, "adamw_bnb_8bit"})


#: The optimizers that step parts of weights (parallel: fsdp) as they do whole ones.
DIVIDABLE = re.compile(r"adamw_torch(_fused)?|sgd|adagrad|rmsprop")


EIGHT_BIT = frozenset({ADAMW_8BIT, "adamw_bnb_8bit"})


#: Elements of a weight that a compensated step widens at once; a multiple of the blocks of 8-bit states.
SLICE_ELEMENTS = 2**22


def asked_optim(spec: JobSpec) -> str | None:
    """Return the optimizer that the job names; None if it names none."""
    return spec.training.optim if "optim" in spec.training.model_fields_set else None
