"""A merge: an adapter's weights are added to its base's, without a device, and nothing is trained."""

from __future__ import annotations

import os
import time
from pathlib import Path

from honed.system import durable
from honed.system.error import TimeLimitError
from honed.worker.assignment import Assignment
from honed.worker.model.card import Facts
from honed.worker.recipe.base import Run, versions
from honed.worker.timelimit import TimeLimit

#: Seconds between progress events.
STEP_INTERVAL_SEC = 1.0


def run(this: Run, job: Assignment, _attempt: int) -> None:
    """Merge, compare the result with base and adapter, and put it in place."""
    from honed.worker.model import export, likeness, merge
    from honed.worker.model.config import load_config

    limit = TimeLimit(job.spec.time_limit_sec, 0.0, job.attempt.paused_path)
    this.events.emit("started", pid=os.getpid(), versions=versions(job.backend), backend=job.backend)
    stepped_at = -STEP_INTERVAL_SEC

    def check() -> None:
        this.stop.check()
        if limit.is_reached:
            raise TimeLimitError(f"time limit of {job.spec.time_limit_sec:g} s reached", hint="increase time_limit_sec")

    def progress(number: int, count: int) -> None:
        nonlocal stepped_at
        check()
        if time.monotonic() - stepped_at >= STEP_INTERVAL_SEC or number == count:
            stepped_at = time.monotonic()
            this.events.emit("step", step=number, num_steps=count)

    this.stage("prepare")
    job.check_inputs()
    assert job.spec.adapter is not None
    adapter_dir, dtype = Path(job.spec.adapter), job.precision.load_dtype
    config = load_config(job)

    this.stage("merge")
    this.log("info", f"merging {adapter_dir} into {job.base_model_path}, in {dtype}")
    with export.temporary(job.output_dir) as temporary_dir:
        merged = merge.merge(
            job.base_model_path,
            adapter_dir,
            temporary_dir,
            dtype=dtype,
            config=config,
            chat_template=job.spec.chat_template,
            trust_remote_code=job.spec.trust_remote_code,
            progress=progress,
        )
        this.log("info", str(merged))
        compared = likeness.compare(temporary_dir, job, beat=check)
        this.log("info", compared)

        this.stage("export")
        facts = Facts(
            started=this.started,
            versions=versions(job.backend),
            step=merged.num_tensors,
            metrics={},
            changes=[*merged.changes, compared],
        )
        export.finish(job, temporary_dir, facts)
    this.artifacts = {"output_dir": str(job.output_dir)}
    num_bytes = durable.num_bytes_below(job.output_dir)
    this.events.emit("artifact", name="output_dir", path=str(job.output_dir), num_bytes=num_bytes)
