"""Preemption by class: a job of a class that preempts takes the device of a running job of a lower class.

waiting job ── its class preempts, no device is free ──► victim: lower rank, after its min_run, resumes exactly

A victim returns to the queue behind the job that it made room for: its rank is lower, so that job is chosen first, and
the victim cannot preempt it in turn.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from honed.daemon.attempts import Attempts, Running
from honed.daemon.fencing import UNKNOWN_DEVICE
from honed.daemon.placement import Placement
from honed.daemon.shares import Shares
from honed.job.entitlement import class_of
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.spec.config import Config
from honed.system.clock import Moment
from honed.system.device import Device
from honed.system.layout import Layout

if TYPE_CHECKING:
    from honed.daemon.dispatch import Selection


#: Waiting jobs without a victim after which the search ends for this turn: a long queue mostly waits for the same.
MAX_MISSES = 8


class Preempting:
    """Chooses the victims, for the jobs that `selection` would start. `now` tells how long jobs have run."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], Config],
        attempts: Attempts,
        placement: Placement,
        shares: Shares,
        selection: Selection,
        *,
        now: Callable[[], Moment] = Moment.now,
    ) -> None:
        self._layout = layout
        self._config = config
        self._attempts = attempts
        self._placement = placement
        self._shares = shares
        self._selection = selection
        self._now = now
        self._resumes: dict[int, bool] = {}  # running jobs that would resume exactly

    def tend(self) -> None:
        """Ask running jobs to make room for waiting ones of a higher class, one for each."""
        config, running = self._config(), dict(self._attempts.running)
        self._resumes = {number: known for number, known in self._resumes.items() if number in running}
        if not running or not any(each.preempts for each in config.classes.values()):
            return
        if UNKNOWN_DEVICE in self._attempts.devices_in_use():
            return  # nothing can start before that job ends
        lowest = min(self._rank(each.job) for each in running.values())
        devices = {found.key: found for found in self._placement.all()}
        coming = [each for each in running.values() if each.job.stop is not None]  # devices that become free
        num_misses = 0
        promised: Counter[int] = Counter()  # devices, by the user they are given up for
        for job in self._selection.startable():
            if self._rank(job) <= lowest:
                return
            if not class_of(config, job.job_class).preempts or promised[job.uid] >= self._shares.room(job.uid):
                continue
            if not self._selection.is_full and self._placement.free_device(job) is not None:
                promised[job.uid] += 1
                continue
            if (freed := self._first_on(job, coming, devices)) is not None:
                coming.remove(freed)
                promised[job.uid] += 1
            elif (victim := self._first_on(job, self._victims(job), devices)) is not None:
                self._attempts.preempt(victim.job.id, f"job {job.id}, of a higher class, needs its device")
                promised[job.uid] += 1
            elif (num_misses := num_misses + 1) >= MAX_MISSES:
                return

    def _first_on(self, job: Job, among: list[Running], devices: dict[str, Device]) -> Running | None:
        """Return the first of these jobs whose device would suit."""
        for each in among:
            found = devices.get(each.job.attempt.device or "")
            if found is not None and self._placement.suits(job, found):
                return each
        return None

    def _victims(self, job: Job) -> list[Running]:
        """Return the running jobs that this one may preempt: the lowest rank first, then the shortest run."""
        now, rank, found = self._now(), self._rank(job), []
        for each in self._attempts.running.values():
            run_sec = now.since(each.job.attempt.began)
            min_run_sec = class_of(self._config(), each.job.job_class).min_run_sec
            may_go = self._rank(each.job) < rank and each.job.stop is None and run_sec >= min_run_sec
            if may_go and self._can_resume(each):
                found.append((self._rank(each.job), run_sec, each.job.id, each))
        return [each for *_, each in sorted(found, key=lambda one: one[:3])]

    def _rank(self, job: Job) -> int:
        return class_of(self._config(), job.job_class).rank

    def _can_resume(self, running: Running) -> bool:
        """Return True if a job goes on from its checkpoint: merges and evaluations have none, and would begin again."""
        number = running.job.id
        if number not in self._resumes:
            self._resumes[number] = False
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                spec = PlanFile.read(self._layout.job(number).plan_path).document["spec"]
                self._resumes[number] = spec["kind"] == "sft"
        return self._resumes[number]
