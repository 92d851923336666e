"""The queued and held jobs: their order, and the conditions that they wait for.

Only this module knows the whole set, which follows the spool's catalog. A job's conditions are checked when the job
comes or changes, and when one of its dependencies does: a pass over a long queue costs as much as has changed since the
last pass, not the queue's length.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from heapq import merge

from honed.daemon.dependencies import Dependencies
from honed.daemon.shares import Shares
from honed.job.brief import Listed
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.queue_order import Place, by_turns
from honed.job.spool import Spool
from honed.system.error import HonedError
from honed.system.failures import Failures
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)

_WAITING = (State.QUEUED, State.HELD)


class _Ready:
    """The order of those `jobs` that wait for nothing but a device, by whether they want a GPU, and by user."""

    def __init__(self, jobs: Mapping[int, Job], shares: Shares) -> None:
        self._jobs = jobs
        self._shares = shares
        self._places: dict[int, Place] = {}  # by job number
        self._queues: dict[bool, dict[int, list[Place]]] = {True: {}, False: {}}

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._places

    def put(self, job: Job) -> None:
        self._places[job.id] = place = self._shares.place(job)
        insort(self._queues[job.num_gpus > 0].setdefault(job.uid, []), place)

    def drop(self, job: Job) -> None:
        """Drop a job, if it is here."""
        if (place := self._places.pop(job.id, None)) is not None:
            queues = self._queues[job.num_gpus > 0]
            del queues[job.uid][bisect_left(queues[job.uid], place)]
            if not queues[job.uid]:
                del queues[job.uid]

    def reorder(self) -> None:
        """Order the jobs by a new configuration."""
        for job in [self._jobs[number] for number in self._places]:
            self.drop(job)
            self.put(job)

    def in_order(
        self,
        for_gpu: Iterable[bool],
        levels: Mapping[int, float],
        but: Container[int],
        spends: Callable[[int], float] | None,
    ) -> Iterator[Job]:
        """Yield the jobs as `Backlog.ready` tells."""
        kinds = [self._queues[wants_gpu] for wants_gpu in for_gpu]
        level = {uid: levels.get(uid, self._shares.usage.level(uid)) for of in kinds for uid in of}
        places = {uid: merge(*(of.get(uid, ()) for of in kinds)) for uid in level}
        for place in by_turns(places, level, self._shares.turn, but=but, spends=spends):
            yield self._jobs[place.job_id]

    def first_ones(self, number: int) -> dict[int, list[Job]]:
        """Return the first jobs of every user, at most `number` of each kind."""
        first: dict[int, list[Job]] = {}
        for queues in self._queues.values():
            for uid, places in queues.items():
                first.setdefault(uid, []).extend(self._jobs[place.job_id] for place in places[:number])
        return first

    def first_of(self, job: Job) -> Job | None:
        """Return the first of the same user's jobs that want the same kind of device."""
        places = self._queues[job.num_gpus > 0].get(job.uid)
        return self._jobs[places[0].job_id] if places else None


class Backlog:
    """The queued and held jobs. `shares` orders them, `has_room` tells whether the disk space that a job waits for is
    there; `clock` is monotonic seconds."""

    def __init__(
        self,
        spool: Spool,
        database: Database,
        shares: Shares,
        *,
        has_room: Callable[[Job], bool],
        failures: Failures | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._database = database
        self._shares = shares
        self._has_room = has_room
        self._failures = failures or Failures(log)
        self._clock = clock
        self.dependencies = Dependencies(spool, database)
        self._jobs: dict[int, Job] = {}
        self._num_queued = 0
        self._ready = _Ready(self._jobs, shares)
        self._unplanned: set[int] = set()  # deferred jobs whose inputs exist
        self._users: dict[int, set[int]] = {}  # job number → the jobs here that depend on it
        self._unsure: set[int] = set()  # to be checked again
        self._not_before: dict[int, float] = {}
        self._short: set[int] = set()  # waiting for disk space

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @property
    def num_held(self) -> int:
        return len(self._jobs) - self._num_queued

    @property
    def num_short(self) -> int:
        """The number of jobs that wait for disk space."""
        return len(self._short)

    def jobs(self) -> Iterable[Job]:
        """Return all queued and held jobs, in no particular order."""
        return self._jobs.values()

    def get(self, job_id: int) -> Job | None:
        """Return a queued or held job."""
        return self._jobs.get(job_id)

    def ready(
        self,
        *,
        for_gpu: Iterable[bool],
        levels: Mapping[int, float],
        but: Container[int] = (),
        spends: Callable[[int], float] | None = None,
    ) -> Iterator[Job]:
        """Yield the jobs that waited for nothing but a device at the last look, in the order of `Shares`. `for_gpu`:
        jobs that want a GPU, jobs that want none, or both. `levels`: of the users; others have what they were charged.
        `but`: users who are left out; it may grow meanwhile. `spends`: what the start of a job adds to its user's
        level; None where only the next one counts."""
        return self._ready.in_order(for_gpu, levels, but, spends)

    def is_ready(self, job_id: int) -> bool:
        """Return True if a job waits for nothing but a device."""
        self.look_again()
        return job_id in self._ready

    def first_ones(self, number: int) -> dict[int, list[Job]]:
        """Return the first jobs of every user that wait for nothing but a device, at most `number` of each kind."""
        return self._ready.first_ones(number)

    def first_of(self, job: Job) -> Job | None:
        """Return the first of the same user's jobs that wait for nothing but the same kind of device."""
        return self._ready.first_of(job)

    def reorder(self) -> None:
        """Order the jobs by a new configuration."""
        self._ready.reorder()

    def unplanned(self) -> list[Job]:
        """Return the deferred jobs whose inputs exist by now, by number."""
        self.look_again()
        return [self._jobs[number] for number in sorted(self._unplanned)]

    def is_short(self, job: Job) -> bool:
        """Return True if the disk space that a job waits for is not there."""
        return job.needs_bytes > 0 and not self._has_room(job)

    def delay_sec(self, job: Job) -> float:
        """Return the seconds until a job may be tried again; 0 or less if it may be now."""
        return self._not_before.get(job.id, 0.0) - self._clock()

    def next_retry_sec(self) -> float | None:
        """Return the seconds until the first delayed retry may start; None without one."""
        now = self._clock()
        return min((when - now for when in self._not_before.values() if when > now), default=None)

    def all_wait_for_a_person(self) -> bool:
        """Return True if no job here will start by itself."""
        if self._unsure:
            return False
        stuck: set[int] = set()
        ahead = [job.id for job in self._jobs.values() if job.state is State.HELD]
        ahead += [number for number in self._short if not self._has_room(self._jobs[number])]  # for a person
        limited = {uid for uid in {job.uid for job in self._jobs.values()} if self._shares.waits_for_a_person(uid)}
        ahead += [job.id for job in self._jobs.values() if job.uid in limited]
        while ahead:
            number = ahead.pop()
            if number not in stuck:
                stuck.add(number)
                ahead += self._users.get(number, ())
        return stuck >= self._jobs.keys()

    # -- what comes and goes ------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read the spool's queued and held jobs, follow its changes, and write all jobs to the database."""
        for state in _WAITING:
            for job in self._spool.jobs(state):
                self._put(job)
        self._spool.catalog.listen(self._follow)
        self._database.put_jobs(self._spool.catalog)

    def _follow(self, old: Listed | None, new: Job | None) -> None:
        """Follow a change of a job's entry, and mark the jobs that depend on it for another check."""
        changed = new or old
        if changed is None:
            return
        self._pop(changed.id)
        if new is not None and new.state in _WAITING:
            self._put(new)
        else:
            self._not_before.pop(changed.id, None)
        self._unsure |= self._users.get(changed.id, set())

    def _put(self, job: Job) -> None:
        self._jobs[job.id] = job
        if job.state is State.QUEUED:
            self._num_queued += 1
            if job.needs_bytes:
                self._short.add(job.id)
        if job.state is State.QUEUED or job.held_for is not None:
            self._unsure.add(job.id)
        for before in self.dependencies.of(job):
            self._users.setdefault(before.id, set()).add(job.id)

    def _pop(self, job_id: int) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._num_queued -= job.state is State.QUEUED
        self._unsure.discard(job_id)
        self._short.discard(job_id)
        self._unplanned.discard(job_id)
        self._ready.drop(job)
        for before in self.dependencies.of(job):
            if (users := self._users.get(before.id)) is not None:
                users.discard(job_id)
                if not users:
                    del self._users[before.id]

    def delay(self, job: Job, seconds: float) -> None:
        """Delay the next start of a job that ran, or could not be started, if it is to run again."""
        if job.state in _WAITING and seconds:
            self._not_before[job.id] = self._clock() + seconds

    def end_delay(self, job_id: int) -> None:
        """Let a job that a person has changed start at once."""
        self._not_before.pop(job_id, None)

    def defer_users_of(self, job: Job) -> None:
        """Plan again all jobs that start from this job's output, because it will be made again."""
        for other in [other for other in self._jobs.values() if job.id in other.inputs.values()]:
            self._spool.update(other, is_deferred=True)

    def fail(self, job: Job, error: HonedError) -> None:
        """Fail a job that cannot be started."""
        log.error(
            "job %d (%s): %s",
            job.id,
            job.name,
            error.message,
            extra=about(job, of_error(error.code), state="failed", code=error.code, hint=error.hint),
        )
        self._database.put_job(self._spool.move(job, State.FAILED, outcome=error.code, error=error.as_dict()))

    # -- conditions ---------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Check the conditions of new jobs, and of jobs with a dependency that has changed."""
        failed = set[int]()
        while self._unsure:
            number = self._unsure.pop()
            if (job := self._jobs.get(number)) is not None:
                failed.add(number)
                with self._failures.alone(f"job {number} ({job.name})"):
                    self._look_at(job)
                    failed.discard(number)
        for number in failed:  # e.g. on a full disk: still to be done
            if (job := self._jobs.get(number)) is not None:
                self._ready.drop(job)
        self._unsure |= failed

    def _look_at(self, job: Job) -> None:
        if job.state is State.HELD:
            self.dependencies.look_at_held(job)
            return
        is_free = not job.is_being_edited and (not job.depends_on or self.dependencies.are_met(job))
        self._unplanned.discard(job.id)
        self._ready.drop(job)
        if is_free and job.is_deferred:
            self._unplanned.add(job.id)
        elif is_free:
            self._ready.put(job)
