"""Imports of a worker, and their speed: most of the time before the first step goes into modules."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from honed.worker.assignment import Assignment

#: Optimizers of torch's own.
PLAIN_OPTIMIZERS = frozenset({None, "adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"})


def hide_unused(job: Assignment) -> None:
    """Hide installed packages that the job does not use from transformers, TRL and peft, which would import them.

    wandb leaves directories in /tmp, and bitsandbytes imports torch's compiler. Packages stay hidden for the whole
    process: call this only in a worker's own.
    """
    for name in hidden(job):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # import takes None as a missing package


def hidden(job: Assignment) -> list[str]:
    """Return the packages that a job does not use although they may be installed."""
    hidden = [] if "wandb" in job.spec.report_to else ["wandb"]
    is_plain = job.precision.quantization == "none" and job.spec.training.optim in PLAIN_OPTIMIZERS
    if is_plain and job.backend == "transformers" and job.spec.kind != "merge":
        hidden.append("bitsandbytes")
    return hidden


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Disable garbage collection while thousands of modules are imported, and exempt them from it afterwards."""
    was_enabled, num_before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:
            gc.freeze()
        if was_enabled:
            gc.enable()
