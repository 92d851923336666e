"""One attempt at one job: its trial, its recipe (recipe/), and its result, whatever the end.

Nothing here imports the training stack before the backend is chosen. A worker ahead of its turn waits between data and
load until its device is free (gate.py); with Unsloth, whose import asks the device, before it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from honed.inputs import modality
from honed.job import trial
from honed.job.event import EventWriter
from honed.spec import kind
from honed.system import durable
from honed.system.error import (
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    InterruptedRunError,
    KilledError,
    OutOfMemoryError,
    SpecError,
    said,
)
from honed.system.layout import JobLayout
from honed.worker import assignment as assignments
from honed.worker import cause, imports
from honed.worker import trial as trials
from honed.worker.assignment import Assignment
from honed.worker.gate import Gate
from honed.worker.model import torchvision
from honed.worker.parallel import ALONE, Ranks, Unwritten
from honed.worker.recipe.base import Run
from honed.worker.stop import Stop
from honed.worker.train import disk_reserve

_MEMORY_HINT = (
    "use a smaller per_device_train_batch_size with more gradient_accumulation_steps, or a shorter max_length"
)


def run(
    job_dir: Path,
    attempt: int,
    *,
    backend: str | None = None,
    stop: Stop | None = None,
    gate: Gate | None = None,
    report: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _data: None,
    ranks: Ranks = ALONE,
) -> int:
    """Run one attempt. Write events and, once everything else is durable, result.json; return the exit status.

    Every event is also passed to `report`. `gate`: before it the device is not used. Of several ranks, the first
    alone writes.
    """
    layout = JobLayout(job_dir).attempt(attempt)
    durable.make_dir(layout.dir)
    events = EventWriter(layout.events_path, on_event=report) if ranks.is_zero else Unwritten(report)
    stop = stop or Stop()
    reserve = disk_reserve.Reserve(layout.dir) if ranks.is_zero else None
    this = Run(events, stop, gate or Gate(JobLayout(job_dir), attempt, {}), ranks)

    def conclude(error: HonedError | None) -> int:
        """Write the result, and return the exit status."""
        match error:
            case None:
                outcome = "succeeded"
            case InterruptedRunError():
                outcome = "interrupted"
            case _:
                outcome = "failed"
                events.log("error", error.message, evidence=error.evidence, code=error.code)
        status = error.exit_status if error else 0
        if reserve is None:
            events.close()
            return status
        events.emit("finished", outcome=outcome, step=this.step, metrics=this.metrics)
        events.close()
        reserve.spend()
        durable.write_json(
            layout.result_path,
            {
                "outcome": outcome,
                "step": this.step,
                "metrics": {name: value for name, value in this.metrics.items() if math.isfinite(value)},
                "artifacts": this.artifacts,
                "memory": this.memory,
                "error": error.as_dict() if error else None,
                "remark": this.remark if error is None else "",
                "phase": stop.now_in,
                "needed_bytes": error.needed_bytes if isinstance(error, DiskShortError) else 0,
            },
        )
        return status

    def give_up(error: HonedError | None) -> None:
        """End this process, which waits for a rank that has failed or was lost."""
        os._exit(KilledError.exit_status if error is None else conclude(error))

    ranks.watch(give_up)
    error: HonedError | None = None
    try:
        torchvision.mend()
        job = assignments.read(job_dir, attempt, backend=backend)
        _check_ranks(job, ranks)
        with modality.naming(job.spec.parts.patterns):
            _try_first(this, job, attempt)
            if job.spec.trial != "only":
                import_module(f"honed.worker.recipe.{job.spec.kind}").run(this, job, attempt)
    except Exception as problem:  # noqa: BLE001 - every end of a worker is reported
        with contextlib.suppress(OSError):  # worker.log may be on the full disk, and the result is still to be written
            traceback.print_exc()
        error = ranks.fail(problem, explain(problem, job_dir.name))
        if error is None:
            events.close()
            return KilledError.exit_status
        ranks.wait_for_result(layout.result_path)
        if isinstance(problem, HonedError) and error.evidence:
            with contextlib.suppress(OSError):
                print(error.evidence, file=sys.stderr)
    return conclude(error)


def _try_first(this: Run, job: Assignment, attempt: int) -> None:
    """Run the job's trial, if the job asks for one and does not resume from a checkpoint.

    Of several ranks, the first runs it, on its own device: whether a job learns does not depend on their number. The
    others wait for it where they join.
    """
    if not this.ranks.is_zero or not job.spec.trial:
        return
    if any(job.layout.checkpoints_dir.glob("checkpoint-*")) and job.spec.trial != "only":
        return
    this.pass_gate()
    this.stage("trial")

    def prepare() -> None:
        if job.spec.trial != "only" and not this.stop.is_set and imports.can_be_ahead(job):
            imports.ahead()

    result = trials.run(job, attempt=attempt, log=this.log, stop=this.stop, meanwhile=prepare)
    this.events.emit("trial", **asdict(result))
    level = "info" if result.verdict == "learns" else "warning"
    this.log(level, f"trial: {trial.headline(result)}")


def _check_ranks(job: Assignment, ranks: Ranks) -> None:
    """Raise SpecError for what several ranks cannot do yet."""
    planned = job.plan.parallel
    if planned.num_ranks != ranks.world and not job.is_trial:
        raise SpecError(
            f"the job is planned for {planned.num_ranks} processes, but {ranks.world} were started",
            hint="the daemon and the worker are of different versions: restart honed",
        )
    if not ranks.are_several:
        return
    if job.backend != "transformers":
        raise SpecError(f"backend: {job.backend} trains on one GPU only", hint="backend: transformers")
    if not kind.of(job.spec).has_batches:
        raise SpecError(f"kind: {job.spec.kind} runs on one GPU only", hint="resources: {gpus: 1}")


def explain(problem: Exception, job: str = "ID") -> HonedError:
    """Return honed's error for an exception; `job` is the number of the job that it ended."""
    text = f"{type(problem).__name__}: {said(problem)}"
    match problem:
        case HonedError():
            return problem
        case _ if cause.is_out_of_memory(problem):
            return OutOfMemoryError(f"{type(problem).__name__}: {problem}".splitlines()[0], hint=_MEMORY_HINT)
        case ImportError():
            return EnvironmentInvalidError(text, hint="see `honectl doctor`")
        case _ if disk_reserve.is_no_room(problem):
            return DiskShortError(text, hint="free disk space; honectl requeue resumes from the last checkpoint")
        case PermissionError():
            return EnvironmentInvalidError(text, hint="give the worker's user read or write permission")
        case _:
            return cause.explain(problem, job)
