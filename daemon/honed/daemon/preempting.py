"""Preemption by class: a job of a class that preempts takes the device of a running job of a lower class.

waiting job ── its class preempts, no device is free ──► victim: lower rank, after its min_run, resumes exactly

A victim returns to the queue behind the job that it made room for: its rank is lower, so that job is chosen first, and
the victim cannot preempt it in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from honed.daemon.attempts import Attempts
from honed.daemon.backfill import freed_by
from honed.daemon.fencing import UNKNOWN_DEVICE
from honed.daemon.obstacles import Obstacles
from honed.daemon.placement import Placement
from honed.daemon.running import Running
from honed.daemon.shares import Shares
from honed.job.entitlement import class_of
from honed.job.job import Job
from honed.spec.config import Config
from honed.system.clock import Moment

#: Waiting jobs without a victim after which the search ends for this turn: a long queue mostly waits for the same.
MAX_MISSES = 8


class Preempting:
    """Chooses the victims, for the jobs that are `startable`. `now` tells how long jobs have run."""

    def __init__(
        self,
        config: Callable[[], Config],
        attempts: Attempts,
        placement: Placement,
        shares: Shares,
        obstacles: Obstacles,
        startable: Callable[[], Iterator[Job]],
        *,
        now: Callable[[], Moment] = Moment.now,
    ) -> None:
        self._config = config
        self._attempts = attempts
        self._placement = placement
        self._shares = shares
        self._obstacles = obstacles
        self._startable = startable
        self._now = now

    def tend(self) -> None:
        """Ask running jobs to make room for waiting ones of a higher class, one for each."""
        config, running = self._config(), dict(self._attempts.running)
        if not running or not any(klass.preempts for klass in config.classes.values()):
            return
        if UNKNOWN_DEVICE in self._attempts.devices_in_use():
            return  # nothing can start before that job ends
        lowest = min(self._rank(other.job) for other in running.values())
        coming = [other for other in running.values() if other.job.stop is not None]  # devices that become free
        num_misses = 0
        promised: Counter[int] = Counter()  # devices, by the user they are given up for
        for job in self._startable():
            if self._rank(job) <= lowest:
                return
            if not class_of(config, job.job_class).preempts or promised[job.uid] >= self._shares.room(job.uid):
                continue
            if not self._obstacles.is_full and self._placement.free_devices(job) is not None:
                promised[job.uid] += 1
                continue
            if (freed := self._enough(job, coming)) is not None:
                coming = [other for other in coming if other not in freed]
                promised[job.uid] += 1
            elif (freed := self._enough(job, [*coming, *self._victims(job)])) is not None:
                for other in freed:
                    if other in coming:
                        coming.remove(other)
                    else:
                        self._attempts.preempt(other.job.id, f"job {job.id}, of a higher class, needs its device")
                promised[job.uid] += 1
            elif (num_misses := num_misses + 1) >= MAX_MISSES:
                return

    def _enough(self, job: Job, among: list[Running]) -> list[Running] | None:
        """Return the first of these jobs with whose devices, and what is free, a job could start; None if they do not
        suffice."""
        number, groups = max(1, job.num_places), self._placement.groups_for(job)
        # One device is free for it only if it may not start at all: then another job has to end all the same.
        free = self._placement.free_keys(job) if number > 1 else set[str]()
        for group in groups if number > 1 else [list(chain(*groups))]:
            if (freed := freed_by(among, number, {device.key for device in group}, free)) is not None:
                return freed[1]
        return None

    def _victims(self, job: Job) -> list[Running]:
        """Return the running jobs that this one may preempt: the lowest rank first, then the shortest run."""
        now, rank, victims = self._now(), self._rank(job), []
        for other in self._attempts.running.values():
            run_sec = other.job.attempt.ran_sec(now)
            min_run_sec = class_of(self._config(), other.job.job_class).min_run_sec
            may_go = self._rank(other.job) < rank and other.job.stop is None and run_sec >= min_run_sec
            if may_go and other.can_resume:
                victims.append((self._rank(other.job), run_sec, other.job.id, other))
        return [other for *_, other in sorted(victims, key=lambda one: one[:3])]

    def _rank(self, job: Job) -> int:
        return class_of(self._config(), job.job_class).rank
