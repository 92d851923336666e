"""Imports of a worker: most of the time before the first step goes into modules."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator

from honed.job.plan_file import PlanFile
from honed.spec import kind
from honed.worker.assignment import Assignment

#: In a worker's environment: import all that the libraries import. For comparisons, and in case that a library does not
#: work without a package that is hidden.
IMPORT_ALL_VARIABLE = "HONED_IMPORT_ALL"
#: Optimizers of torch's own.
PLAIN_OPTIMIZERS = frozenset({None, "adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"})
#: Modules that a run imports on its way, beside those of `run` and of its backend.
ON_THE_WAY = (
    "honed.worker.rows.data",
    "honed.worker.train.losscheck",
    "honed.worker.train.usage",
    "honed.worker.train.trainer",
    "honed.worker.train.callback",
    "honed.worker.model.export",
)


def prepare(job: Assignment) -> None:
    """Hide the packages that the job does not use. This lasts: call it only in a worker's own process."""
    if IMPORT_ALL_VARIABLE not in os.environ:
        for name in hidden(job.plan, job.backend):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # import takes None as a missing package


def hidden(plan: PlanFile, backend: str) -> list[str]:
    """Return the packages that a job does not use although they may be installed, and that its libraries would import.

    wandb leaves directories in /tmp. datasets imports aiohttp for an exception of streaming over HTTP, transformers
    imports torchvision with any model, and peft bitsandbytes with any adapter. Raises KeyError, TypeError, ValueError
    or AttributeError for a damaged plan.
    """
    spec, precision, checkpoint = plan.spec, plan.precision, plan.checkpoint
    training = spec.get("training") or {}
    names = [] if "wandb" in (spec.get("report_to") or ()) else ["wandb"]
    if is_known(plan, backend) and kind.of(spec).has_rows:
        names.append("aiohttp")
        if not checkpoint.has_vision:
            names.append("torchvision")
        # The plan may have chosen another optimizer than the job file's, whose default is plain.
        optim = precision.optim or training.get("optim")
        if precision.quantization == "none" and optim in PLAIN_OPTIMIZERS:
            names.append("bitsandbytes")
    return names


def asks_device(job: Assignment) -> bool:
    """Return whether the imports of TRL and peft ask the device for its properties: bitsandbytes does, in theirs."""
    return "bitsandbytes" not in hidden(job.plan, job.backend) or IMPORT_ALL_VARIABLE in os.environ


def can_be_ahead(job: Assignment) -> bool:
    """Return whether a job's imports may be made before a device is its own: they ask none, and run no other code."""
    return is_known(job.plan, job.backend) and not asks_device(job)


def is_known(plan: PlanFile, backend: str) -> bool:
    """Return whether all code of the run is known: not with Unsloth, code of the model's own, or a compiled model."""
    spec = plan.spec
    training = spec.get("training") or {}
    has_compiler = training.get("torch_compile") or training.get("use_liger_kernel")
    has_compiler = has_compiler or plan.precision.attn_implementation == "flex_attention"
    return backend == "transformers" and not spec.get("trust_remote_code") and not has_compiler


def ahead() -> None:
    """Import what a run will import on its way; nothing is lost by it."""
    from honed.worker.model import load, torchvision

    torchvision.mend()
    with quick():
        load.choose("transformers").import_libraries()
        for name in ON_THE_WAY:
            importlib.import_module(name)


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
