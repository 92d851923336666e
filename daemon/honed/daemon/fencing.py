"""Fencing: a worker that lives, and of which no entry says so, keeps its device until it ends. The machine is asked at
start, at every rescan, and when a start has failed in a way that may have left a worker.

live workers ── compared with ── running/ ── missing there ──► an entry, from its copy, from plan.json, or bare
                                                  corrupt/ ◄──────┴──► adopted, shown, cancelled as any other
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Container

from honed.job import recovery
from honed.job.corrupt import copy_of
from honed.job.job import Attempt, Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.run.runner import Live, Runner
from honed.system import untrusted
from honed.system.layout import JobFiles
from honed.system.log import about
from honed.system.message import ENTRY_DAMAGED

log = logging.getLogger(__name__)

#: The device of a worker whose own is not known: no device is free while it lives.
UNKNOWN_DEVICE = "unknown"
#: Seconds before workers that could not be listed are listed again.
RETRY_SEC = 5.0
#: Digits of an attempt's number, at most.
MAX_DIGITS = 4
#: The states of a job that has not begun: a worker of it is ahead of its turn.
_WAITING = {State.QUEUED, State.HELD}


class Fence:
    """Finds the live workers that no running entry knows of. `clock` is monotonic seconds, `interval` the seconds
    between two looks."""

    def __init__(
        self, spool: Spool, runner: Runner, *, clock: Callable[[], float], interval: Callable[[], float]
    ) -> None:
        self._spool = spool
        self._runner = runner
        self._clock = clock
        self._interval = interval
        self._look_at = -math.inf
        self.ahead: list[Live] = []  #: workers that wait at their gates, whether their jobs still want them or not
        self.fault = ""  #: why they are not known yet; until they are, no job may be started

    @property
    def is_due(self) -> bool:
        """True if it is time for another look."""
        return self._clock() >= self._look_at

    def doubt(self) -> None:
        """Look before anything else is started."""
        self._look_at = -math.inf

    def look(self, followed: Container[int] | None = None) -> list[Job]:
        """Give every live worker a running entry. Returns the jobs that got one; looks again later if that failed.
        `followed`: jobs whose workers are known to live."""
        if not self.is_due:
            return []
        self.ahead = []
        try:
            unfollowed = [live for live in self._runner.live() if live.job_id not in (followed or ())]
        except OSError as error:
            self.fault = f"running workers cannot be listed, so no job is started: {error}"
            self._look_at = self._clock() + RETRY_SEC
            return []
        fenced = [job for live in unfollowed if (job := self._fence(live, is_known=followed is None)) is not None]
        self.fault, self._look_at = "", self._clock() + self._interval()
        return fenced

    def _fence(self, live: Live, *, is_known: bool) -> Job | None:
        """Return the job of a live worker that is to be adopted. `is_known`: running entries are, without this."""
        job = self._spool.job(live.job_id)
        number = live.attempt[0] if live.attempt is not None else None
        if job is not None and job.state is State.RUNNING and number in {None, job.attempt.number}:
            return None if is_known else job
        if live.is_staged or (
            live.attempt is None and job is not None and job.state in _WAITING and job.num_staged > 0
        ):
            self.ahead.append(live)
            return None
        if job is not None and job.state.is_final and number in {None, *(attempt.number for attempt in job.attempts)}:
            return None  # settled; its process is about to end
        recovery.note_lost(self._spool, live.job_id)
        rebuilt = recovery.rebuild(self._spool, _entry_of(self._spool.files(live.job_id), job, live))
        log.error(
            "job %d (%s): its worker lives, but its entry did not say so; the entry was rebuilt, and is running",
            rebuilt.id,
            rebuilt.name,
            extra=about(rebuilt, ENTRY_DAMAGED, attempt=rebuilt.attempt.number),
        )
        return rebuilt


def _entry_of(files: JobFiles, job: Job | None, live: Live) -> Job:
    """Return an entry for a live worker, from the best that there is."""
    job = job or copy_of(files) or _planned(files, live)
    job = dataclasses.replace(job, outcome=None, error=None)
    numbers = [attempt.number for attempt in job.attempts]
    number, start = live.attempt or (numbers[-1] if numbers else _last_attempt(files), 1)
    if number in numbers:
        job = dataclasses.replace(job, attempts=job.attempts[: numbers.index(number) + 1])
        return job.with_attempt(ended_at=None, outcome=None, took_sec=None)
    attempt = Attempt(number, "", time.time(), first_start=start, device=live.device or UNKNOWN_DEVICE)
    return dataclasses.replace(job, attempts=(*job.attempts, attempt))


def _last_attempt(files: JobFiles) -> int:  # by its directory, which the worker itself could have made
    with contextlib.suppress(OSError):
        names = untrusted.names_in(files.attempts_dir)
        return max((int(name) for name in names if name.isdecimal() and len(name) <= MAX_DIGITS), default=1)
    return 1


def _planned(files: JobFiles, live: Live) -> Job:
    """Return an entry from plan.json, or a bare one of honed's own user; its job is not tried again."""
    owner, submitted_at = os.geteuid(), time.time()
    with contextlib.suppress(OSError):
        info = untrusted.info(files.dir)
        owner, submitted_at = info.st_uid, info.st_mtime
    bare = Job(
        id=live.job_id,
        name=f"job-{live.job_id}",
        submitted_at=submitted_at,
        source="",
        uid=owner,
        output_dir=str(files.output_dir),
        max_attempts=1,
        num_gpus=0 if live.device == "cpu" else len((live.device or UNKNOWN_DEVICE).split(",")),
    )
    try:
        if untrusted.info(files.plan_path).st_uid != owner:
            return bare
        plan = PlanFile.read(files.plan_path)
        if plan.job.id != live.job_id:
            return bare
        planned = dataclasses.replace(bare, name=plan.job.name, uid=plan.uid, output_dir=str(plan.output_dir))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return bare
    with contextlib.suppress(ValueError, KeyError, TypeError):
        data = tuple(str(dataset["path"]) for dataset in plan.spec["datasets"])
        return dataclasses.replace(planned, model=str(plan.spec["base_model"]), data=data)
    return planned
