"""Optimizers by their names in `training.optim`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from honed.spec.spec import JobSpec


#: What steps a job that names no optimizer, and what takes a quarter of its memory.
ADAMW, ADAMW_8BIT = "adamw_torch_fused", "adamw_8bit"


#: AdamW by its names in `training.optim`, which remainders can be kept beside.
COMPENSATED = frozenset({"adamw_torch", ADAMW, ADAMW_8BIT, "adamw_bnb_8bit"})


EIGHT_BIT = frozenset({ADAMW_8BIT, "adamw_bnb_8bit"})


def asked_optim(spec: JobSpec) -> str | None:
    """The optimizer that the job names."""
    return spec.training.optim if "optim" in spec.training.model_fields_set else None
