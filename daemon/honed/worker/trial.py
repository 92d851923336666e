"""A job's trial, in a process of its own, so that the job's own process begins without libraries and GPU state."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from honed.job import event, tree, trial
from honed.job.trial import Findings
from honed.system import durable, python
from honed.system.error import KilledError, from_dict
from honed.system.layout import JobLayout
from honed.system.personpath import PersonPath
from honed.worker import parallel
from honed.worker.assignment import Assignment
from honed.worker.stop import Stop

#: Seconds between looks at the trial, and between log lines on its progress.
LOOK_INTERVAL_SEC, TOLD_INTERVAL_SEC = 0.1, 10.0
#: A constant of Linux's prctl(2).
_PR_SET_PDEATHSIG = 1


def run(
    job: Assignment,
    *,
    attempt: int,
    log: Callable[[str, str], None],
    stop: Stop,
    meanwhile: Callable[[], None] = lambda: None,
) -> Findings:
    """Try the job on a few rows. Raises the error that ended the trial; a stop ends it, too. `meanwhile` is called once
    the trial has begun."""
    layout = JobLayout(job.layout.dir / "trial")
    own = layout.attempt(attempt)
    durable.make_dir(own.dir)
    own.events_path.unlink(missing_ok=True)  # left by a first start, before a fallback
    own.result_path.unlink(missing_ok=True)
    tree.remove(layout.checkpoints_dir)  # it would resume from one, and report fewer steps
    trial.reduced(job.plan, layout.output_dir).write(PersonPath.own(layout.plan_path))
    log("info", f"starting with a trial: {trial.NUM_ROWS} rows, a few steps")
    # Its output goes to worker.log, as ours does.
    command = python.module("honed.worker", str(layout.dir), str(attempt), "--backend", job.backend)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=parallel.alone(os.environ),
        preexec_fn=_die_with_parent,  # noqa: PLW1509
    )
    try:
        meanwhile()
        _follow(process, own.events_path, log, stop)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    stop.check()
    try:
        result = json.loads(own.result_path.read_bytes())
    except (OSError, ValueError) as error:
        raise KilledError(
            f"the trial exited with status {process.returncode} and left no result", hint="see its log: honectl logs"
        ) from error
    if result["error"]:
        raise from_dict(result["error"])
    findings = trial.judge(_events(own.events_path), job.plan)
    durable.write_json(layout.dir / "findings.json", asdict(findings))
    return findings


def _die_with_parent() -> None:
    """Have the trial killed when its parent dies: nobody else ends it, and it must not stay on the GPU."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(process: subprocess.Popen[bytes], path: Path, log: Callable[[str, str], None], stop: Stop) -> None:
    """Wait until the trial has ended. Only its events count as signs of life, as with any worker."""
    offset, told_at, is_asked = 0, time.monotonic(), False
    while process.poll() is None:
        if stop.is_set and not is_asked:
            is_asked = True
            process.terminate()
        reading = event.read(PersonPath.own(path), offset)
        if reading.offset != offset:
            offset = reading.offset
            stop.beat()
            if time.monotonic() - told_at >= TOLD_INTERVAL_SEC:
                told_at = time.monotonic()
                log("debug", f"trial: {_how_far(reading.events)}")
        time.sleep(LOOK_INTERVAL_SEC)


def _how_far(events: list[event.Event]) -> str:
    match events[-1] if events else None:
        case event.Event("step", _, data):
            return f"step {data.get('step')} of {data.get('num_steps')}"
        case event.Event("stage", _, data):
            return f"stage {data.get('stage')}"
        case None:
            return "begun"
        case other:
            return other.kind


def _events(path: Path) -> list[event.Event]:
    events, offset = [], -1
    reading = event.read(PersonPath.own(path), 0)
    while reading.offset != offset:
        events += reading.events
        offset = reading.offset
        reading = event.read(PersonPath.own(path), offset)
    return events
