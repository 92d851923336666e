"""Between the queue and the devices: which job starts next and on which device, why the others wait, and where a job
goes whose attempt has ended.

    backlog ── selection: the next that fits ──► attempts ── settled ──► backlog, after a delay if it failed
       ▲            └─ planned for another device ──► plans ─┐
       └─────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

from honed.daemon.ahead import Ahead
from honed.daemon.arrivals.acceptance import Acceptance
from honed.daemon.attempts import Attempts
from honed.daemon.availability import Availability
from honed.daemon.backfill import Backfill, Choice
from honed.daemon.backlog import Backlog
from honed.daemon.editing import Editing
from honed.daemon.fencing import RETRY_SEC, Fence
from honed.daemon.halving import Halvings
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.obstacles import Obstacles
from honed.daemon.placement import Placement
from honed.daemon.plans import Plans
from honed.daemon.preempting import Preempting
from honed.daemon.shares import Shares
from honed.daemon.staging import StagedWorkers
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.shape import Wait
from honed.job.spool import Spool
from honed.job.usage import Usage
from honed.run.runner import Runner
from honed.spec.config import Config
from honed.system import durable
from honed.system.device import Device
from honed.system.error import InternalError, said

log = logging.getLogger(__name__)

#: Jobs that could not be started, after which a turn tries no more.
MAX_FAILED_STARTS = 3
#: Seconds for which a free device waits for arrivals that are still being taken, so that the most urgent of many files
#: dropped together starts first.
ARRIVAL_GRACE_SEC = 10.0
#: Seconds before the retry of a job whose worker could not be started, for no fault of its own.
NOT_NOW_SEC = 10.0


#: Jobs of a user of which one must be able to start, for the user to compete.
MAX_LOOKS = 8


class Selection:
    """The choice of the job that starts next, and the reasons why the others wait."""

    def __init__(
        self,
        spool: Spool,
        attempts: Attempts,
        backlog: Backlog,
        plans: Plans,
        placement: Placement,
        shares: Shares,
        staged: StagedWorkers,
        obstacles: Obstacles,
    ) -> None:
        self._spool = spool
        self._attempts = attempts
        self._backlog = backlog
        self._plans = plans
        self._placement = placement
        self._shares = shares
        self._staged = staged
        self.obstacles = obstacles
        self.backfill = Backfill(attempts, placement)
        self._waiting: set[int] = set()  # jobs whose wait for a GPU was logged

    def next_that_fits(self) -> Choice | None:
        """Return the job to start on free devices, in the order of `Shares`; see backfill.py for jobs behind one that
        waits for several."""
        self._backlog.look_again()
        self.backfill.begin()
        with_device = [wants_gpu for wants_gpu in (True, False) if self._placement.is_any_free(wants_gpu)]
        kept: set[str] = set()  # devices of jobs whose turn has come, and whose staged workers end in a moment
        for job in self._startable(with_device, with_ending=True):
            choice = self.backfill.offer(job)
            if choice is not None and not kept & (keys := {device.key for device in choice.devices}):
                if self._staged.is_ending(job.id):
                    kept |= keys
                    continue
                if self._placement.holds_on(job, choice.devices[0]):
                    return choice
                if not self._plans.has_room:
                    break
                self._plans.ask(job, choice.devices[0])
        first = next(self._backlog.ready(for_gpu=[True], levels={}), None)
        if first is not None and not self._attempts.running and not self._placement.is_any_free(wants_gpu=True):
            self._log_wait(first)
        return None

    def startable(self) -> Iterator[Job]:
        """Yield the jobs that wait for nothing but a device, in the order of `Shares`."""
        self._backlog.look_again()
        return self._startable((True, False))

    def is_ready(self, job_id: int) -> bool:
        """Return True if a job waits for nothing but a device."""
        return self._backlog.is_ready(job_id)

    def could_start(self, job: Job) -> bool:
        """Return True if a job would start now if a device were free."""
        self._backlog.look_again()  # its entry may just have changed
        is_closed = self.obstacles.of_all() is not None
        return not is_closed and any(other.id == job.id for other in self._startable((True, False), with_ending=True))

    def _startable(self, for_gpu: Iterable[bool], *, with_ending: bool = False) -> Iterator[Job]:
        """Yield the jobs that wait for nothing but a device. `with_ending`: and for nothing but the end of their staged
        workers."""
        beyond = {uid for uid in self._backlog.first_ones(1) if self._shares.obstacle(uid)}
        here = {
            uid
            for uid, jobs in self._backlog.first_ones(MAX_LOOKS).items()
            if uid not in beyond and any(map(self._is_here, jobs))
        }
        for job in self._backlog.ready(for_gpu=for_gpu, levels=self._shares.levels(here), but=beyond):
            is_late = self._staged.is_stuck(job.id) or (not with_ending and self._staged.is_ending(job.id))
            if not is_late and self.obstacles.of_job(job) is None:
                yield job

    def queue(self) -> Iterator[Job]:
        """Yield all queued jobs in the order in which they start, as far as it is known now: first those that wait
        for a device alone, then those of users beyond a limit, then those that wait for something else as well."""
        users = set(self._backlog.first_ones(1))
        beyond = {uid for uid in users if self._shares.obstacle(uid)}
        levels, spends = self._shares.expected_levels(users), self._shares.start_costs
        first: set[int] = set()
        for but in (beyond, users - beyond):
            for job in self._backlog.ready(for_gpu=(True, False), levels=levels, but=but, spends=spends):
                if self.obstacles.of_job(job) is None:
                    first.add(job.id)
                    yield job
        yield from (job for job in self._spool.catalog.unfinished(State.QUEUED) if job.id not in first)

    def _is_here(self, job: Job) -> bool:
        """Return True if a job could start on a device that is taken or free now: only then does its user compete."""
        if self.obstacles.of_job(job) is not None:
            return False
        why = self.obstacles.device(job)
        return why is None or why.reason == "device"

    def _log_wait(self, job: Job) -> None:
        why = self.obstacles.device(job)
        if job.id not in self._waiting and why is not None and why.reason == "device":
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
        why = self.obstacles.first(job)
        if why is None:
            return {"reason": "turn", "detail": self.backfill.why_behind(job) or self._why_not_next(job)}
        return {"reason": why.reason, "detail": why.detail}

    def _why_not_next(self, job: Job) -> str:
        first = self._backlog.first_of(job)
        if first is not None and first.id != job.id:
            return f"job {first.id} ({first.name}) of the same user comes first"
        return "it is about to start, or jobs of other users come first: by their class, or as they have used less"


class _Grace:
    """The time for which a free device waits for arrivals that are being taken."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_since: float | None = None

    def is_on(self) -> bool:
        """Return True if a device that is free now has not been so for long."""
        now = self._clock()
        self._free_since = self._free_since if self._free_since is not None else now
        return now - self._free_since < ARRIVAL_GRACE_SEC

    def end(self) -> None:
        """Note that no device is free, or that a job starts there."""
        self._free_since = None


class Dispatch:
    """Starts jobs on free devices, and takes them back; each stage on the way is an attribute.

    `probe` returns the devices; `housekeeper` knows the bytes of users' job directories; `group`: the control group of
    the workers, if they have one of their own; `clock` is monotonic seconds, `now` seconds since the epoch.
    """

    def __init__(
        self,
        spool: Spool,
        database: Database,
        config: Callable[[], Config],
        runner: Runner,
        acceptance: Acceptance,
        attempts: Attempts,
        *,
        probe: Callable[[list[int] | None], list[Device]],
        housekeeper: Callable[[], Housekeeper],
        group: str,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        layout = spool.layout
        self._spool = spool
        self._config = config
        self._attempts = attempts
        self._shares = shares = Shares(
            Usage(layout.usage_path), config, attempts.in_use, lambda uid: housekeeper().num_bytes(uid)
        )
        self._housekeeper = housekeeper
        self._grace = _Grace(clock)
        availability = Availability(spool, config, now=now)
        self.placement = placement = Placement(layout, config, attempts, availability, probe=probe, clock=clock)
        self.fence = Fence(spool, runner, clock=clock, interval=lambda: config().spool.rescan_interval_sec)
        self.staging = StagedWorkers(layout, spool, config, runner, attempts, clock=clock)
        self._ahead = Ahead(layout, self.staging, config, attempts, placement, group=group, clock=clock)
        self.backlog = Backlog(
            spool, database, shares, has_room=attempts.has_room, failures=attempts.failures, clock=clock
        )
        editing = Editing(spool, database, acceptance, self.backlog, placement)
        self.plans = Plans(spool, self.backlog, placement, acceptance, editing)
        obstacles = Obstacles(spool, config, attempts, self.backlog, self.plans, placement, shares, self.fence)
        self.selection = Selection(
            spool, attempts, self.backlog, self.plans, placement, shares, self.staging, obstacles
        )
        self._preempting = Preempting(config, attempts, placement, shares, obstacles, self.selection.startable)
        self.halvings = Halvings(spool, database, attempts)

    def unfinished(self) -> Iterator[Job]:
        """Yield all jobs that are queued, held or running."""
        yield from self.backlog.jobs()
        yield from (running.job for running in self._attempts.running.values())

    @property
    def is_idle(self) -> bool:
        """True if nothing runs or is staged, and no job that waits will start by itself."""
        is_busy = self._attempts.running or len(self.staging)
        return not is_busy and self.backlog.all_wait_for_a_person()

    def patience(self) -> float:
        """Return the seconds until a step is due."""
        waits = [self.placement.availability.next_change(self.placement.all()), self._attempts.patience()]
        if self.fence.fault:
            waits.append(RETRY_SEC)
        if self._attempts.running or len(self.staging):
            waits.append(self._config().jobs.poll_interval_sec)
        if self.backlog.num_queued and not self._spool.is_paused:
            waits.append(self.placement.probe_interval_sec)
        if (retry_sec := self.backlog.next_retry_sec()) is not None:
            waits.append(retry_sec)
        return min(waits)

    def recover(self) -> None:
        """Take up the queue, and the use of the devices as far as it was not counted. Raises OSError."""
        self._shares.recover(self._spool.catalog)
        self.backlog.recover()
        self.plans.editing.recover()
        self.staging.recover()
        self.staging.take_over(self.fence.ahead)

    # -- steps --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Settle the attempts that have ended."""
        settled, put_back = self._attempts.reap(), self._attempts.put_back()
        self._shares.charge([*settled, *put_back])
        if settled:
            self.placement.hurry()
        for job in put_back:
            self.backlog.delay(job, NOT_NOW_SEC)
            self.fence.doubt()
            with self._alone(job):
                self.staging.give_up(job)
        for job in settled:
            self.backlog.delay(job, self._retry_delay_sec(job))
        for job in settled:
            if job.state is State.SUCCEEDED:
                with self._alone(job):
                    self._housekeeper().remove_copies(job)
        self._shares.usage.flush()  # last: on a full disk it raises, and is written later

    def _alone(self, job: Job) -> contextlib.AbstractContextManager[None]:
        return self._attempts.failures.alone(f"job {job.id} ({job.name})")

    def _retry_delay_sec(self, job: Job) -> float:
        if job.state is not State.QUEUED or job.num_failures <= 1 or job.outcome == "interrupted":
            return 0.0
        delay: float = self._config().jobs.retry_delay_sec * 2 ** (job.num_failures - 2)
        log.info("job %d (%s): retrying in %.0f s", job.id, job.name, delay)
        return delay

    def plan_deferred(self) -> None:
        """Take new plans, and have jobs planned whose inputs exist by now."""
        try:
            self.plans.settle()
        finally:
            if not self._attempts.is_stopping:
                self.plans.ask_deferred()

    def vacate(self) -> None:
        """Preempt the jobs on devices whose hours have ended, or that were drained at once, and those that have to make
        room for jobs of a higher class."""
        self.placement.availability.expire()
        if not self._attempts.is_stopping:
            for job_id, reason in list(self.placement.overstays()):
                with self._attempts.failures.alone(f"job {job_id}"):
                    self._attempts.preempt(job_id, reason)
            if self.selection.obstacles.of_all() is None:
                self._preempting.tend()
                self.selection.backfill.give_back(self.selection.startable())

    def look_around(self) -> None:
        """Compare entries and live workers at intervals, and adopt the workers that no entry knew of."""
        if self.fence.is_due:
            self._attempts.check_entries()
            for job in self.fence.look({*self._attempts.running, *self.staging.numbers}):
                self._attempts.adopt(job)
            self.staging.take_over(self.fence.ahead)

    def start_next(self) -> None:
        """Start what can be started; nothing while it is not known which workers live."""
        if self.fence.is_due:
            return
        num_failed = 0
        while self.selection.obstacles.of_all() is None and not self.selection.obstacles.is_full:
            chosen = self.selection.next_that_fits()
            if chosen is None:
                self._grace.end()
                return
            if self._grace.is_on() and self.plans.acceptance.is_busy:
                return  # an arrival that is being accepted may be more urgent
            self._grace.end()
            is_started = False
            with self._alone(chosen.job):
                self._start(chosen)
                is_started = True
            if not is_started:  # it waits, and others are started meanwhile
                self.backlog.delay(chosen.job, NOT_NOW_SEC)
                num_failed += 1
            if num_failed >= MAX_FAILED_STARTS:
                return

    def settle_staged(self) -> None:
        """Settle the staged workers that have ended."""
        self.staging.settle(self.selection.could_start)

    def stage_next(self) -> None:
        """Have the jobs that are next prepare while the devices are busy."""
        self._ahead.tend(self.selection, may_stage=self.selection.obstacles.of_all() is None)

    def _start(self, choice: Choice) -> None:
        """Start a job. After an error, e.g. a full disk, it is still in queued/."""
        job = choice.job
        self.selection.forget(job)
        try:
            backend = self._backend_of(job)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError) and durable.machine_fault(error):
                raise
            self.backlog.fail(
                job, InternalError(f"its plan cannot be read: {said(error)}", hint="submit the job again")
            )
        else:
            staged = self.staging.of(job)
            if staged is None and job.id in self.staging.numbers:
                return  # its worker has ended a moment ago: settled in the next pass
            name = staged.backend if staged is not None else backend
            self._attempts.start(job, choice.devices, name, staged, passed=choice.passed)
            self.staging.forget(job)  # last: until it runs, its worker is ours to end
            self._ahead.hurry()

    def _backend_of(self, job: Job) -> str:
        name = PlanFile.read(self._spool.files(job.id).plan_path).backend.name
        if job.attempts and job.attempts[-1].num_starts > 1:
            name = job.attempts[-1].backend  # it fell back before, and would again
        return name
