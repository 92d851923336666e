"""Between the queue and the devices: which job starts next and on which device, why the others wait, and where a job
goes whose attempt has ended.

    backlog ── selection: the next that fits ──► attempts ── settled ──► backlog, after a delay if it failed
       ▲            └─ planned for another device ──► plans ─┐
       └─────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from honed.daemon.arrivals.acceptance import Acceptance
from honed.daemon.attempts import Attempts
from honed.daemon.backlog import Backlog
from honed.daemon.fencing import Fence
from honed.daemon.placement import DEVICE_PROBE_INTERVAL_SEC, Placement
from honed.daemon.plans import Plans
from honed.job import unstage
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.progress import duration, gib
from honed.job.shape import Wait
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system import durable, training
from honed.system.device import Device
from honed.system.error import InternalError, said

log = logging.getLogger(__name__)

#: Seconds for which a free device waits for arrivals that are still being taken, so that the most urgent of many files
#: dropped together starts first.
ARRIVAL_GRACE_SEC = 10.0
#: Seconds before the retry of a job whose worker could not be started, for no fault of its own.
NOT_NOW_SEC = 10.0


class Selection:
    """The choice of the job that starts next, and the reasons why the others wait."""

    def __init__(
        self,
        spool: Spool,
        config: Callable[[], Config],
        attempts: Attempts,
        backlog: Backlog,
        plans: Plans,
        placement: Placement,
    ) -> None:
        self._spool = spool
        self._config = config
        self._attempts = attempts
        self._backlog = backlog
        self._plans = plans
        self._placement = placement
        self._waiting: set[int] = set()  # jobs whose wait for a GPU was logged

    @property
    def is_full(self) -> bool:
        """True if as many jobs run as may."""
        limit = self._config().jobs.max_running
        return limit is not None and len(self._attempts.running) >= limit

    def next_that_fits(self) -> tuple[Job, Device] | None:
        """Return the job to start on a free device: highest priority first, then first come."""
        self._backlog.look_again()
        with_device = [wants_gpu for wants_gpu in (True, False) if self._placement.is_any_free(wants_gpu)]
        for job in self._backlog.ready(for_gpu=with_device):
            if self._backlog.delay_sec(job) > 0 or job.id in self._plans.numbers or self._backlog.is_short(job):
                continue
            if (free := self._placement.free_device(job)) is not None:
                if self._placement.holds_on(job, free):
                    return job, free
                if not self._plans.has_room:
                    break
                self._plans.ask(job, free)
        first = next(self._backlog.ready(for_gpu=[True]), None)
        if first is not None and not self._attempts.running and not self._placement.is_any_free(wants_gpu=True):
            self._tell_waits(first)
        return None

    def _tell_waits(self, job: Job) -> None:
        if job.id not in self._waiting:
            self._waiting.add(job.id)
            log.info("job %d (%s): waiting for a GPU: other processes use their memory", job.id, job.name)

    def forget(self, job: Job) -> None:
        """Forget a job that starts now."""
        self._waiting.discard(job.id)
        self._placement.forget(job)

    def waits_for(self, job_id: int) -> Wait | None:
        """Return why a queued job does not run: a code for programs, a text for people. None if it is not queued."""
        job = self._backlog.get(job_id)
        if job is None or job.state is not State.QUEUED:
            return None
        reason, detail = self._why_waiting(job)
        return {"reason": reason, "detail": detail}

    def _why_waiting(self, job: Job) -> tuple[str, str]:
        for other in self._backlog.dependencies.of(job):
            if other.state is not State.SUCCEEDED:
                return "dependency", f"job {other.id} ({other.name}), which it depends on, is {other.state}"
        if job.is_deferred or job.id in self._plans.numbers:
            return "plan", "it is being planned again"
        if (seconds := self._backlog.delay_sec(job)) > 0:
            return "retry", f"it is retried in {duration(seconds)}"
        if self._backlog.is_short(job):
            return "disk", f"its checkpoints need {gib(job.needs_bytes)} of free disk space"
        if self._spool.is_paused:
            return "paused", "the queue is paused: honectl resume"
        if training.is_missing():
            return "environment", f"{training.MISSING}: {training.REMEDY}"
        if self.is_full:
            limit = self._config().jobs.max_running
            return "device", f"{limit} jobs are running, the maximum of jobs.max_running"
        return self._placement.obstacles(job) or (
            "turn",
            "it is about to start, or jobs with higher priority come first",
        )


class Dispatch:
    """Starts jobs on free devices, and takes them back; each stage on the way is an attribute.

    `unfinished` returns all jobs that are queued, held or running.
    """

    def __init__(
        self,
        spool: Spool,
        config: Callable[[], Config],
        acceptance: Acceptance,
        attempts: Attempts,
        backlog: Backlog,
        placement: Placement,
        fence: Fence,
        *,
        unfinished: Callable[[], Iterable[Job]],
        is_stopping: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._config = config
        self._acceptance = acceptance
        self._attempts = attempts
        self._backlog = backlog
        self._unfinished = unfinished
        self._is_stopping = is_stopping
        self._clock = clock
        self._free_since: float | None = None
        self.placement = placement
        self.fence = fence
        self.plans = Plans(spool, backlog, placement, acceptance)
        self.selection = Selection(spool, config, attempts, backlog, self.plans, placement)

    def patience(self) -> float:
        """Return the seconds until a step is due."""
        waits = [math.inf]
        if self._attempts.running:
            waits.append(self._config().jobs.poll_interval_sec)
        if self._backlog.num_queued and not self._spool.is_paused:
            waits.append(DEVICE_PROBE_INTERVAL_SEC)
        if (retry_at := self._backlog.next_retry_at()) is not None:
            waits.append(retry_at - self._clock())
        return min(waits)

    # -- steps --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Settle the attempts that have ended."""
        settled = self._attempts.reap()
        for job in self._attempts.put_back():
            self._backlog.delay(job, NOT_NOW_SEC)
        for job in settled:
            self._backlog.delay(job, self._retry_delay_sec(job))
        for job in settled:
            if job.state is State.SUCCEEDED:
                unstage.remove_copies(self._spool.layout, job, self._unfinished())

    def _retry_delay_sec(self, job: Job) -> float:
        """Return the delay before a retry: none before the first, then twice as long each time."""
        if job.state is not State.QUEUED or job.num_failures <= 1:
            return 0.0
        delay: float = self._config().jobs.retry_delay_sec * 2 ** (job.num_failures - 2)
        log.info("job %d (%s): retrying in %.0f s", job.id, job.name, delay)
        return delay

    def plan_deferred(self) -> None:
        """Take new plans, and have jobs planned whose inputs exist by now."""
        self.plans.settle()
        if not self._is_stopping():
            self.plans.ask_deferred()

    def start_next(self) -> None:
        """Start what can be started; nothing while it is not known which workers live."""
        for job in self.fence.look() if self.fence.fault else ():
            self._attempts.adopt(job)
        if self.fence.fault or training.is_missing():
            return
        while not self._is_stopping() and not self._spool.is_paused and not self.selection.is_full:
            chosen = self.selection.next_that_fits()
            if chosen is None:
                self._free_since = None
                return
            if self._must_wait_for_arrivals():
                return
            self._free_since = None
            self._start(*chosen)

    def _must_wait_for_arrivals(self) -> bool:
        """Return True if an arrival that is being accepted may be more urgent than the job that could start now."""
        now = self._clock()
        self._free_since = self._free_since if self._free_since is not None else now
        return self._acceptance.is_busy and now - self._free_since < ARRIVAL_GRACE_SEC

    def _start(self, job: Job, free: Device) -> None:
        """Start a job. After an error, e.g. a full disk, it is still in queued/."""
        self.selection.forget(job)
        try:
            backend = self._backend_of(job)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if durable.machine_fault(error):
                raise
            self._backlog.fail(
                job, InternalError(f"its plan cannot be read: {said(error)}", hint="submit the job again")
            )
        else:
            self._attempts.start(job, free, backend)

    def _backend_of(self, job: Job) -> str:
        """Return the backend that loads the base. Raises OSError, ValueError, KeyError or TypeError for a bad plan."""
        name = PlanFile.read(self._spool.job_layout(job.id).plan_path).backend.name
        if job.attempts and job.attempts[-1].num_starts > 1:
            name = job.attempts[-1].backend  # it fell back before, and would again
        return name
