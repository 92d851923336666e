"""Order between users, and their limits: whose job starts next, and who has to wait for how much.

    class ── rank ──► users by their share ──► the first of the user's own jobs, by priority, then by number

A user's share is the level of what they have used (job/usage.py) and of what their running jobs take: these count for
at least as long as jobs mostly do, so that two devices which become free together go to two users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from honed.job import queue_order
from honed.job.catalog import Catalog
from honed.job.entitlement import Entitlements
from honed.job.job import Job
from honed.job.progress import duration, gib
from honed.job.queue_order import Place
from honed.job.usage import Usage
from honed.spec.config import Config
from honed.system import access


@dataclass(frozen=True)
class Use:
    """The use of the devices by a running job."""

    uid: int
    device_sec: float  #: from its attempt's start until now


class Shares:
    """Shares and limits of all users. `in_use` returns what running jobs take; `num_bytes` the bytes of a user's
    job directories, as last measured."""

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

    def recover(self, jobs: Catalog) -> None:
        """Count the attempts that a crash has left out. Raises OSError."""
        self.usage.catch_up(jobs, self._entitlements.weight)

    def charge(self, jobs: Iterable[Job]) -> None:
        """Count the attempts of these jobs that have ended; `usage.flush` writes them."""
        for job in jobs:
            self.usage.charge(job, self._entitlements.weight(job.uid))

    # -- the order ----------------------------------------------------------------------------------------------------

    def place(self, job: Job) -> Place:
        """Return a job's place among its user's jobs."""
        return queue_order.place_of(self._config(), job)

    def levels(self, waiting: Iterable[int]) -> dict[int, float]:
        """Return the shares of the users with jobs that could start and of those with running ones.

        A returning user starts at the floor: the lowest level of the active users, or the highest of those who left
        last. Only what was charged counts for it: what running jobs may still take is not known."""
        here = {*waiting, *(use.uid for use in self._in_use())}
        self.usage.floor = self._floor(here)
        self.usage.raise_to(self.usage.floor, here - self._active)
        self._active = here
        return self._with_running(here)

    def expected_levels(self, waiting: Iterable[int]) -> dict[int, float]:
        """Return what `levels` would, and change nothing."""
        here = {*waiting, *(use.uid for use in self._in_use())}
        floor, levels = self._floor(here), self._with_running(here)
        return {
            uid: level if uid in self._active else level + max(0.0, floor - self.usage.level(uid))
            for uid, level in levels.items()
        }

    def _floor(self, here: Set[int]) -> float:
        level = self.usage.level
        if stayed := here & self._active:
            return max(self.usage.floor, min(map(level, stayed)))
        return max(self.usage.floor, max(map(level, self._active), default=0.0))

    def _with_running(self, here: Iterable[int]) -> dict[int, float]:
        levels = {uid: self.usage.level(uid) for uid in here}
        for use in self._in_use():
            levels[use.uid] += max(use.device_sec, self.usage.typical_sec) / self._entitlements.weight(use.uid)
        return levels

    def start_costs(self, uid: int) -> float:
        """Return what the start of a job adds to its user's level."""
        return self.usage.typical_sec / self._entitlements.weight(uid)

    def turn(self, place: Place, level: float) -> tuple[float, ...]:
        """Return the order between users' jobs, the lowest one starts: `place` of a job, `level` of its user."""
        return queue_order.turn_of(self._config(), place, level)

    def room(self, uid: int) -> float:
        """Return how many more jobs of a user may run; infinite without a limit."""
        limit = self._entitlements.of(uid).max_running
        return math.inf if limit is None else limit - sum(use.uid == uid for use in self._in_use())

    def waits_for_a_person(self, uid: int) -> bool:
        """Return True if a user's jobs wait until somebody prunes jobs or changes the configuration."""
        rights = self._entitlements.of(uid)
        limit = rights.max_job_bytes
        return rights.max_running == 0 or (limit is not None and self._num_bytes(uid) > limit)

    # -- limits -------------------------------------------------------------------------------------------------------

    def obstacle(self, uid: int) -> str:
        """Return the limit, with its numbers, that keeps a user's next job from starting; empty without one."""
        rights, running = self._entitlements.of(uid), [use for use in self._in_use() if use.uid == uid]
        if rights.max_running is not None and len(running) >= rights.max_running:
            return f"{len(running)} jobs of {access.user_name(uid)} are running, the maximum (max_running)"
        if rights.max_device_sec is not None:
            window_sec = self._config().fair_share.window_sec
            used = self.usage.used_sec(uid, window_sec) + sum(min(use.device_sec, window_sec) for use in running)
            if used >= rights.max_device_sec:
                return (
                    f"{access.user_name(uid)} has used {duration(used)} of the devices within {duration(window_sec)}, "
                    f"and the maximum is {duration(rights.max_device_sec)} (max_device_sec)"
                )
        if rights.max_job_bytes is not None and (num_bytes := self._num_bytes(uid)) > rights.max_job_bytes:
            return (
                f"the jobs of {access.user_name(uid)} take {gib(num_bytes)} of disk space, and the maximum is "
                f"{gib(rights.max_job_bytes)} (max_job_bytes): honectl prune"
            )
        return ""
