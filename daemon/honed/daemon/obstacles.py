"""Why a queued job does not start: the first obstacle of a list that answers. A job may start if none does, so what
`honectl list` shows is what kept the job from starting.

    of the job       dependency · edit · plan · retry · disk: the next job passes it
    of all           paused · environment
    of the number    jobs.max_running, and the limits of the job's user (shares.py)
    of the devices   in use · hours · reserved · drained · unfit (placement.py)

A job without any still waits for its turn: behind a reservation (backfill.py), or behind others of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from honed.daemon.attempts import Attempts
from honed.daemon.backlog import Backlog
from honed.daemon.fencing import Fence
from honed.daemon.placement import Placement
from honed.daemon.plans import Plans
from honed.daemon.shares import Shares
from honed.job.job import Job, State
from honed.job.progress import duration, gib
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system import training


class Why(NamedTuple):
    """What keeps a job from starting."""

    reason: str  #: a code for programs
    detail: str  #: for people


Obstacle = Callable[[Job], Why | None]


class Obstacles:
    """The obstacles of queued jobs, in the order in which they are shown."""

    def __init__(
        self,
        spool: Spool,
        config: Callable[[], Config],
        attempts: Attempts,
        backlog: Backlog,
        plans: Plans,
        placement: Placement,
        shares: Shares,
        fence: Fence,
    ) -> None:
        self._spool = spool
        self._config = config
        self._attempts = attempts
        self._backlog = backlog
        self._plans = plans
        self._placement = placement
        self._shares = shares
        self._fence = fence
        self._of_job: tuple[Obstacle, ...] = (self._dependency, self._edit, self._plan, self._retry, self._disk)
        self._of_place: tuple[Obstacle, ...] = (self._max_running, self._limit, self._device)

    def first(self, job: Job) -> Why | None:
        """Return the first obstacle of a job; None if it waits only for its turn."""
        return self.of_job(job) or self.of_all() or _first(self._of_place, job)

    def of_job(self, job: Job) -> Why | None:
        """Return what the job itself waits for, whatever is free."""
        return _first(self._of_job, job)

    def of_all(self) -> Why | None:
        """Return why no job starts at all."""
        if self._attempts.is_stopping:
            return Why("paused", "honed is being stopped")
        if self._spool.is_paused:
            return Why("paused", "the queue is paused: honectl resume")
        if training.is_missing():
            return Why("environment", f"{training.MISSING}: {training.REMEDY}")
        if self._fence.fault:
            return Why("environment", self._fence.fault)
        return None

    def device(self, job: Job) -> Why | None:
        """Return why no device is available for a job."""
        return self._device(job)

    @property
    def is_full(self) -> bool:
        """True if as many jobs run as may."""
        limit = self._config().jobs.max_running
        return limit is not None and len(self._attempts.running) >= limit

    # -- one by one ---------------------------------------------------------------------------------------------------

    def _dependency(self, job: Job) -> Why | None:
        for other in self._backlog.dependencies.of(job):
            if other.state is not State.SUCCEEDED:
                return Why("dependency", f"job {other.id} ({other.name}), which it depends on, is {other.state}")
        return None

    def _edit(self, job: Job) -> Why | None:
        is_edited = job.is_being_edited or job.id in self._plans.editing.numbers
        return Why("plan", "its new job file is being checked") if is_edited else None

    def _plan(self, job: Job) -> Why | None:
        is_planned = job.is_deferred or job.id in self._plans.numbers
        return Why("plan", "it is being planned again") if is_planned else None

    def _retry(self, job: Job) -> Why | None:
        seconds = self._backlog.delay_sec(job)
        return Why("retry", f"it is retried in {duration(seconds)}") if seconds > 0 else None

    def _disk(self, job: Job) -> Why | None:
        is_short = self._backlog.is_short(job)
        return Why("disk", f"its checkpoints need {gib(job.needs_bytes)} of free disk space") if is_short else None

    def _max_running(self, _job: Job) -> Why | None:
        limit = self._config().jobs.max_running
        return Why("device", f"{limit} jobs are running, the maximum of jobs.max_running") if self.is_full else None

    def _limit(self, job: Job) -> Why | None:
        reached = self._shares.obstacle(job.uid)
        return Why("limit", reached) if reached else None

    def _device(self, job: Job) -> Why | None:
        why = self._placement.obstacle(job)
        return None if why is None else Why(*why)


def _first(obstacles: Iterable[Obstacle], job: Job) -> Why | None:
    return next((why for obstacle in obstacles if (why := obstacle(job)) is not None), None)
