"""The choice of the jobs that are staged (staging.py): those that are next for a busy device.

Staging does not change the queue's order: the first job starts first, staged or not. A staged job's worker is
dropped if the job is not among the next for REPLACE_AFTER_SEC or waits for something else by now, if the worker hangs,
or if memory or disk space is short.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from honed.daemon.attempts import Attempts
from honed.daemon.placement import Placement
from honed.daemon.running import Running
from honed.daemon.staging import StagedWorkers, Worker
from honed.job.job import Job
from honed.job.plan_file import PlanFile, RowNeeds
from honed.spec import kind
from honed.spec.config import Config, JobsConfig
from honed.system import usage
from honed.system.device import Device
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds between looks for a job to stage.
LOOK_INTERVAL_SEC = 1.0
#: Seconds after which a staged job that is not among the next any more gives up its place.
REPLACE_AFTER_SEC = 30.0
#: Phases of a running job in which the next one may be staged: it has its libraries and its data.
STEADY = frozenset({"load", "audit", "mask", "baseline", "train", "evaluate", "predict", "save", "seal", "export"})
#: Processors of a machine on which jobs are staged: one trains.
MIN_PROCESSORS = 2
#: Seconds for which nothing is staged after memory was short.
STEP_BACK_SEC = 300.0
#: Bytes of disk space that must be left besides a staged job's rows.
MIN_FREE_DISK_BYTES = 1024**3
#: Needs of rows that take nothing.
NO_NEEDS = RowNeeds(0, 0, 0)
#: Jobs at the front of the queue that are looked at for one that can be staged.
MAX_LOOKS = 16
#: Control group of the workers that are units: its limits count.
JOBS_GROUP = "honed.slice/honed-jobs.slice"


class Queue(Protocol):
    """The jobs that wait for nothing but a device, in the order in which they start."""

    def startable(self) -> Iterator[Job]: ...

    def is_ready(self, job_id: int) -> bool: ...


def _is_stageable(job: Job, plan: PlanFile) -> bool:
    """Return True if something of a job can be done before its turn: not of a merge, nor of a job that begins with a
    trial or has several ranks. Code of the model's own is not run then: it could use the device."""
    spec = plan.spec
    begins_with_trial = bool(spec.get("trial")) and not job.attempts
    is_alone = spec.get("resources", {}).get("gpus", 1) <= 1
    return is_alone and kind.of(spec).has_rows and not begins_with_trial and not spec.get("trust_remote_code")


def why_not(
    config: JobsConfig, jobs_dir: Path, *, group: str = "", share: float = 1.0, needs: RowNeeds = NO_NEEDS
) -> str:
    """Return why no worker may be staged; empty if one may. `share`: of the memory that must be available in a control
    group, and of the disk space in `jobs_dir`; `needs`: of its rows, besides."""
    if config.has_cluster:
        return "a cluster starts the workers"
    if not config.stage_ahead:
        return "jobs.stage_ahead is off"
    if len(os.sched_getaffinity(0)) < MIN_PROCESSORS:
        return "the machine has one processor"
    if usage.available_bytes(group) < share * config.stage_min_available_bytes + needs.memory_bytes:
        return "little memory is available"
    with contextlib.suppress(OSError):
        space = os.statvfs(jobs_dir)
        if space.f_bavail * space.f_frsize < share * MIN_FREE_DISK_BYTES + needs.disk_bytes:
            return "little disk space is available"
    return ""


def _is_prepared(running: Running) -> bool:
    was_staged = running.job.attempt.staged_at is not None and running.job.attempt.num_starts == 1
    return was_staged or running.phase in STEADY


class Ahead:
    """The choice of what is staged. `group`: the control group of the workers, if they have one of their own; `clock`
    is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        workers: StagedWorkers,
        config: Callable[[], Config],
        attempts: Attempts,
        placement: Placement,
        *,
        group: str,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._workers = workers
        self._config = config
        self._attempts = attempts
        self._placement = placement
        self._group = group
        self._clock = clock
        self._look_at = 0.0
        self._not_before = 0.0  # monotonic seconds

    def tend(self, queue: Queue, *, may_stage: bool) -> None:
        """Stage the next job, from time to time; end staged workers where memory is short."""
        now = self._clock()
        if now < self._look_at or not (len(self._workers) or self._attempts.running):
            return
        self._look_at = now + LOOK_INTERVAL_SEC
        self._let_go(queue)
        config, jobs_dir = self._config().jobs, self._layout.jobs_dir
        if why := why_not(config, jobs_dir, group=self._group, share=0.5):
            self._step_back(why)
        elif may_stage and now >= self._not_before and not why_not(config, jobs_dir, group=self._group):
            self._stage_next(queue)

    def hurry(self) -> None:
        """Look for a job to stage at once."""
        self._look_at = 0.0

    def _step_back(self, why: str) -> None:
        for worker in self._workers:
            if worker.asked_at is None:
                log.info("job %d (%s): its staged worker ends: %s", worker.job_id, worker.name, why)
                self._workers.drop(worker)
                self._not_before = self._clock() + STEP_BACK_SEC

    def _stage_next(self, queue: Queue) -> None:
        """Stage the first job without a worker that a busy device would suit, and let go of one that is late now."""
        waiting = [worker for worker in self._workers if self._workers.is_wanted(worker)]
        reserved = {worker.staged.device for worker in waiting}
        busy = self._busy()
        first = list(itertools.islice(queue.startable(), len(busy) + len(waiting) + MAX_LOOKS))
        self._replace(waiting, {job.id for job in first[: max(len(busy), 1)]})
        if any(worker.pulse.phase != "staged" for worker in self._workers):
            return  # one at a time: until it waits at its gate it may still need much memory
        for job in first:
            if job.id in self._workers.numbers or self._workers.has_given_up(job):
                continue
            device = next(
                (device for device in busy if device.key not in reserved and self._placement.suits(job, device)), None
            )
            if device is None:
                continue
            try:
                plan = PlanFile.read(self._layout.files(job.id).plan_path)
                is_stageable, backend, needs = _is_stageable(job, plan), plan.backend.name, plan.row_needs
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                is_stageable, backend, needs = False, "", NO_NEEDS  # its turn reports it
            if not is_stageable:
                self._workers.give_up(job)
            elif not why_not(self._config().jobs, self._layout.jobs_dir, group=self._group, needs=needs):
                fell_back = bool(job.attempts) and job.attempts[-1].num_starts > 1
                self._workers.start(job, [device], job.attempts[-1].backend if fell_back else backend)
                return

    def _let_go(self, queue: Queue) -> None:
        """Let go of the workers whose jobs wait for something else by now, and of those that give no sign of life."""
        limit_sec = self._config().jobs.stall_timeout_sec
        for worker in self._workers:
            worker.pulse.feel(self._clock())
            if worker.asked_at is None and not queue.is_ready(worker.job_id):
                self._workers.drop(worker)
            elif worker.asked_at is None and self._clock() - worker.pulse.heard_at >= limit_sec:
                log.warning("job %d (%s): its staged worker hangs, and ends", worker.job_id, worker.name)
                self._workers.drop(worker, for_good=True)

    def _busy(self) -> list[Device]:
        """Return the devices whose jobs are past their own start, and go on."""
        keys = {
            key
            for running in self._attempts.running.values()
            for key in running.job.attempt.devices
            if running.job.stop is None and running.is_alive and _is_prepared(running)
        }
        return [device for device in self._placement.all() if device.key in keys]

    def _replace(self, waiting: list[Worker], next_ones: set[int]) -> None:
        now = self._clock()
        for worker in waiting:
            if worker.job_id in next_ones:
                worker.unwanted_since = None
            elif worker.unwanted_since is None:
                worker.unwanted_since = now
            elif now - worker.unwanted_since >= REPLACE_AFTER_SEC:
                log.info("job %d (%s): its staged worker ends: other jobs come first", worker.job_id, worker.name)
                self._workers.drop(worker)
