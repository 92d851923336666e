"""Order between users, and their limits: whose job starts next, and who has to wait for how much.

    class ── rank ──► users by their share ──► the first of the user's own jobs, by priority, then by number

A user's share is the level of what they have used (job/usage.py) and of what their running jobs take: these count for
at least as long as jobs mostly do, so that two devices which become free together go to two users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from honed.job.entitlement import Entitlements, class_of
from honed.job.job import Job
from honed.job.progress import duration, gib
from honed.job.usage import Usage
from honed.spec.config import Config
from honed.system import access


class Place(NamedTuple):
    """A job's place among its user's jobs: the lowest is first."""

    rank: int  #: of its class, negative
    priority: int  #: negative
    job_id: int


@dataclass(frozen=True)
class Use:
    """The use of the devices by a running job."""

    uid: int
    device_sec: float  #: from its attempt's start until now


class Shares:
    """Shares and limits of all users. `in_use` returns what running jobs take; `num_bytes` the bytes of a user's
    finished jobs' directories, as last measured."""

    def __init__(
        self,
        usage: Usage,
        config: Callable[[], Config],
        in_use: Callable[[], Iterable[Use]],
        num_bytes: Callable[[int], int] = lambda _uid: 0,
    ) -> None:
        self.usage = usage
        self._config = config
        self._in_use = in_use
        self._num_bytes = num_bytes
        self._entitlements = Entitlements(config)
        self._active: set[int] = set()  # users with waiting or running jobs at the last look

    def weight(self, uid: int) -> float:
        """Return a user's weight: their share in relation to others."""
        return self._entitlements.of(uid).weight or 1.0

    def recover(self, jobs: Iterable[Job]) -> None:
        """Count the attempts that a crash has left out. Raises OSError."""
        self.usage.catch_up(jobs, self.weight)

    def charge(self, jobs: Iterable[Job]) -> None:
        """Count the attempts of these jobs that have ended, and write all that was not written yet. Raises OSError."""
        for job in jobs:
            self.usage.charge(job, self.weight(job.uid))
        self.usage.flush()

    # -- the order ----------------------------------------------------------------------------------------------------

    def place(self, job: Job) -> Place:
        """Return a job's place among its user's jobs."""
        return Place(-class_of(self._config(), job.job_class).rank, -job.priority, job.id)

    def levels(self, waiting: Iterable[int]) -> dict[int, float]:
        """Return the shares of the users with waiting jobs and of those with running ones. Whoever comes back after
        having had neither starts level with the lowest of those who are there."""
        here = {uid: self.usage.level(uid) for uid in waiting}
        for use in self._in_use():
            level = here.get(use.uid, self.usage.level(use.uid))
            sec = max(use.device_sec, self.usage.typical_sec)
            here[use.uid] = level + sec / self.weight(use.uid)
        if (back := here.keys() - self._active) and (stayed := here.keys() & self._active):
            lowest = min(here[uid] for uid in stayed)
            self.usage.raise_to(lowest, back)
            here |= {uid: max(here[uid], lowest) for uid in back}
        self._active = set(here)
        return here

    def turn(self, place: Place, level: float) -> tuple[float, ...]:
        """Return the order between users' jobs, the lowest one starts: `place` of a job, `level` of its user."""
        if self._config().fair_share.priority_across_users:
            return (place.rank, place.priority, level, place.job_id)
        return (place.rank, level, place.job_id)

    # -- limits -------------------------------------------------------------------------------------------------------

    def obstacle(self, uid: int) -> str:
        """Return the limit, with its numbers, that keeps a user's next job from starting; empty without one."""
        rights, running = self._entitlements.of(uid), [each for each in self._in_use() if each.uid == uid]
        if rights.max_running is not None and len(running) >= rights.max_running:
            return f"{len(running)} jobs of {access.user_name(uid)} are running, the maximum (max_running)"
        if rights.max_device_sec is not None:
            window_sec = self._config().fair_share.window_sec
            used = self.usage.used_sec(uid, window_sec) + sum(min(each.device_sec, window_sec) for each in running)
            if used >= rights.max_device_sec:
                return (
                    f"{access.user_name(uid)} has used {duration(used)} of the devices within {duration(window_sec)}, "
                    f"and the maximum is {duration(rights.max_device_sec)} (max_device_sec)"
                )
        if rights.max_job_bytes is not None and (num_bytes := self._num_bytes(uid)) > rights.max_job_bytes:
            return (
                f"the finished jobs of {access.user_name(uid)} take {gib(num_bytes)} of disk space, and the maximum is "
                f"{gib(rights.max_job_bytes)} (max_job_bytes): honectl prune"
            )
        return ""
