"""Jobs that wait for several devices at the same time, and what may start before them meanwhile.

    first waiting job ── the devices that it could use ──► reserved until enough of them are expected to be free
    a later job       ── ends before that, by its time_limit_sec ──► starts there all the same (it has passed)

A job that has passed gives its devices back, by a checkpoint, as soon as the waiting one could start with them: others
may end earlier than expected. If B has passed A, and A lost the time of B's checkpoint, no job that came after B passes
A any more; one that came before B still may. The reservation ends by the time limits of running jobs, else by
their own estimates; with neither, none passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from honed.daemon.attempts import Attempts
from honed.daemon.placement import Placement
from honed.daemon.running import Running
from honed.job.job import Job
from honed.system.device import Device

#: Waiting jobs that a start before them is remembered for.
MAX_PASSED = 64


@dataclass(frozen=True)
class Choice:
    """A job that can start now."""

    job: Job
    devices: tuple[Device, ...]
    passed: tuple[int, ...] = ()  #: waiting jobs whose devices it takes meanwhile


@dataclass(frozen=True)
class Wait:
    """A job that waits for several devices."""

    job: Job
    keys: Set[str]  #: devices that it could use
    in_sec: float  #: until enough of them are expected to be free; infinity if that is not known


class Backfill:
    """The reservations of one pass over the queue, and which waiting jobs have been delayed. A restart forgets the
    latter, which may cost one more checkpoint."""

    def __init__(self, attempts: Attempts, placement: Placement) -> None:
        self._attempts = attempts
        self._placement = placement
        self._waits: list[Wait] = []
        self._delayed: dict[int, int] = {}  # waiting jobs that have lost a checkpoint's time, and to which first
        self._behind: dict[int, Job] = {}  # jobs that could start but for a reservation, and whose it is

    def begin(self) -> None:
        """Begin a pass."""
        self._waits, self._behind = [], {}

    def offer(self, job: Job) -> Choice | None:
        """Return the devices on which the next job of the pass may start; None if it has to wait."""
        devices = self._placement.free_devices(job)
        if devices is None:
            self._wait(job)
            return None
        if not self._waits:
            return Choice(job, devices)
        first = self._waits[0]
        reserved = set().union(*(wait.keys for wait in self._waits))
        if (apart := self._placement.free_devices(job, but=reserved)) is not None:
            return Choice(job, apart)
        if not self._may_pass(job):
            self._behind[job.id] = first.job
            self._wait(job, is_behind=True)
            return None
        keys = {device.key for device in devices}
        return Choice(job, devices, tuple(wait.job.id for wait in self._waits if wait.keys & keys)[:MAX_PASSED])

    def why_behind(self, job: Job) -> str:
        """Return for which reservation a job waited in the last pass, for people; empty for none."""
        first = self._behind.get(job.id)
        if first is None:
            return ""
        return (
            f"job {first.id} ({first.name}) waits for {first.num_gpus} GPUs at the same time: until then only jobs "
            "start whose time_limit_sec ends before"
        )

    def give_back(self, startable: Iterable[Job]) -> None:
        """Ask jobs that have passed others to give their devices back, where these could start with them.

        Each waiting job is looked at in its turn, with what those before it leave: all that can start get their devices
        after the time of one checkpoint, and not one after the other.
        """
        passed = {number for other in self._attempts.running.values() for number in other.job.attempt.passed}
        if not passed:
            return
        self.begin()
        taken: set[str] = set()  # by jobs that come before the next one
        for job in startable:
            is_held_up = bool(self._waits) and not self._may_pass(job)
            offer = None if is_held_up else self._free_or_given_back(job, taken)
            if offer is None:
                self._wait(job)
                continue
            keys, given_back = offer
            taken |= keys
            for other in given_back:
                if other.job.stop is None:
                    for number in other.job.attempt.passed:
                        self._delayed[number] = min(other.job.id, self._delayed.get(number, other.job.id))
                    self._attempts.preempt(other.job.id, f"job {job.id}, which came before it, needs its devices")
            passed.discard(job.id)
            if not passed:
                return

    # -- one waiting job ----------------------------------------------------------------------------------------------

    def _wait(self, job: Job, *, is_behind: bool = False) -> None:
        """Reserve the devices that a job needs together, or that it leaves to a reservation (`is_behind`)."""
        if (job.num_places <= 1 and not is_behind) or len(self._waits) >= MAX_PASSED:
            return
        if groups := self._placement.groups_for(job):
            keys = {device.key for group in groups for device in group}
            in_sec = min(self._ready_in(job, group) for group in groups)
            self._waits.append(Wait(job, keys, in_sec))

    def _ready_in(self, job: Job, group: list[Device]) -> float:
        """Return the seconds until enough of a group is free; infinity if that is not known."""
        keys = {device.key for device in group}
        number = len(keys & self._placement.free_keys(job))
        ends = sorted(
            (_left_sec(other, job), len(keys & set(other.job.attempt.devices)))
            for other in self._attempts.running.values()
        )
        for left_sec, num_devices in ends:
            if number >= job.num_places:
                return 0.0
            if (number := number + num_devices) >= job.num_places:
                return left_sec
        return math.inf

    def _free_or_given_back(self, job: Job, taken: Set[str]) -> tuple[set[str], list[Running]] | None:
        """Return devices with which a job could start, and the jobs that have passed it and would give them back, the
        fewest; None if they do not suffice. `taken`: devices that are left to others."""
        running, free = self._attempts.running.values(), self._placement.free_keys(job)
        stopping = [other for other in running if other.job.stop is not None]
        passing = [other for other in reversed(running) if other.job.stop is None and _gives_way(other, job)]
        for group in self._placement.groups_for(job):
            keys = {device.key for device in group} - taken
            if (enough := freed_by([*stopping, *passing], max(1, job.num_places), keys, free)) is not None:
                return enough
        return None

    def _may_pass(self, job: Job) -> bool:
        """Return True if a job may start before all that wait: it ends in time, and none of them has lost the time of a
        checkpoint to an earlier job than this."""
        in_sec = self._waits[0].in_sec
        if job.time_limit_sec is None or math.isinf(in_sec):
            return False
        is_in_time = job.time_limit_sec - sum(attempt.spent_sec for attempt in job.attempts) <= in_sec
        return is_in_time and all(job.id <= self._delayed.get(wait.job.id, job.id) for wait in self._waits)


def freed_by(
    among: Iterable[Running], number: int, keys: Set[str], free: Set[str]
) -> tuple[set[str], list[Running]] | None:
    """Return so many of these devices, first those that are free, and the first of these jobs that would give up the
    others; None if they do not suffice."""
    have, chosen = set(sorted(keys & free)[:number]), list[Running]()
    for other in among:
        if len(have) < number and (theirs := keys & set(other.job.attempt.devices)):
            have.update(sorted(theirs)[: number - len(have)])
            chosen.append(other)
    return (have, chosen) if len(have) >= number else None


def _gives_way(running: Running, job: Job) -> bool:
    """Return True if a running job that has passed another may be stopped for it: one that could not resume ends by its
    own limit."""
    return job.id in running.job.attempt.passed and running.can_resume


def _left_sec(running: Running, job: Job) -> float:
    if running.job.stop is not None or _gives_way(running, job):
        return 0.0
    left_sec = running.left_sec
    return math.inf if left_sec is None else left_sec
