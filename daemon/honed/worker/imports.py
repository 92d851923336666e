"""Imports of a worker, and their speed: before the first step most of its time goes into modules."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from honed.worker.assignment import Assignment

#: Optimizers of torch's own.
PLAIN_OPTIMIZERS = frozenset({None, "adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"})


def hide_unused(job: Assignment) -> None:
    """Whatever is installed is imported by transformers, TRL and peft: wandb leaves directories in /tmp, bitsandbytes
    takes torch's compiler with it. For the whole process: call it in a worker's own alone.
    """
    for name in hidden(job):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what import takes for "there is none"


def hidden(job: Assignment) -> list[str]:
    """The packages that a job does not use although they may be installed."""
    hidden = [] if "wandb" in job.spec.report_to else ["wandb"]
    is_plain = job.precision.quantization == "none" and job.spec.training.optim in PLAIN_OPTIMIZERS
    if is_plain and job.backend == "transformers" and job.spec.kind != "merge":
        hidden.append("bitsandbytes")
    return hidden


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """No garbage collection while thousands of modules are made, nor of them ever after: nothing in them is garbage."""
    was_enabled, num_before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:
            gc.freeze()
        if was_enabled:
            gc.enable()
