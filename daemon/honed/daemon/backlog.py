"""The queued and held jobs: their order, and the conditions that each of them waits for.

Only this module knows the whole set. A job's conditions are checked when the job is added and when one of its
dependencies changes: a pass over a long queue costs as much as has changed since the last pass, not the queue's
length. Jobs that start from another job's output, and jobs that will run on another device than they were planned for,
are planned again from here.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

from honed.daemon.arrivals.acceptance import Acceptance
from honed.daemon.attempts import Attempts
from honed.daemon.placement import Placement
from honed.job import query
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.progress import duration, gib
from honed.job.spool import Spool
from honed.run.reply import Answer, Passed, Refused
from honed.system import message
from honed.system.device import Device
from honed.system.error import EnvironmentInvalidError, HonedError, ModelError
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)

_ENDED = {State.FAILED: "failed", State.CANCELLED: "was cancelled"}


@dataclass(frozen=True)
class _Blocking:
    """A dependency that will not succeed by itself."""

    found: Job | None  #: None if it was removed
    words: str


def _blocked(job: Job, blocking: Sequence[_Blocking]) -> EnvironmentInvalidError:
    """Return the error that explains why a job is held and how to let it continue."""
    numbers = [str(each.found.id) for each in blocking if each.found is not None]
    again = ""
    if len(numbers) == len(blocking):
        which = "that has" if len(numbers) == 1 else "these have"
        again = f"honectl requeue {' '.join(numbers)}: when {which} succeeded, this one goes on; or "
    what = ", and on ".join(each.words for each in blocking)
    return EnvironmentInvalidError(f"it depends on {what}", hint=f"{again}honectl cancel {job.id}")


class Backlog:
    """The queued and held jobs. `clock` is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        spool: Spool,
        database: Database,
        acceptance: Acceptance,
        attempts: Attempts,
        placement: Placement,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._spool = spool
        self._database = database
        self._acceptance = acceptance
        self._attempts = attempts
        self._placement = placement
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._num_queued = 0
        # (-priority, number) of jobs that wait for nothing but a device, by whether they want a GPU
        self._ready: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._unplanned: set[int] = set()  # deferred jobs whose inputs exist
        self._users: dict[int, set[int]] = {}  # job number → the jobs here that depend on it
        self._unsure: set[int] = set()  # to be checked again
        self._not_before: dict[int, float] = {}
        self._short: set[int] = set()  # waiting for disk space
        self._waiting: set[int] = set()  # jobs whose wait for a GPU was logged
        self._asked_for: dict[int, Device] = {}  # jobs being planned again, and the device

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        return self._num_queued

    @property
    def num_held(self) -> int:
        return len(self._jobs) - self._num_queued

    @property
    def has_queued(self) -> bool:
        return self._num_queued > 0

    @property
    def num_short(self) -> int:
        """The number of jobs that wait for disk space."""
        return len(self._short)

    def jobs(self) -> Iterable[Job]:
        """Return all queued and held jobs, in no particular order."""
        return self._jobs.values()

    def _put(self, job: Job) -> None:
        """Keep a job in its current state; its conditions are checked in the next pass."""
        self._pop(job.id)
        self._jobs[job.id] = job
        if job.state is State.QUEUED:
            self._num_queued += 1
            if job.needs_bytes:
                self._short.add(job.id)
        if job.state is State.QUEUED or job.held_for is not None:
            self._unsure.add(job.id)
        for before in self._before(job):
            self._users.setdefault(before.id, set()).add(job.id)

    def _pop(self, job_id: int) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._num_queued -= job.state is State.QUEUED
        self._unsure.discard(job_id)
        self._short.discard(job_id)
        self._unplanned.discard(job_id)
        self._unready(job)
        for before in self._before(job):
            if (users := self._users.get(before.id)) is not None:
                users.discard(job_id)
                if not users:
                    del self._users[before.id]

    def _unready(self, job: Job) -> None:
        place = (-job.priority, job.id)
        ready = self._ready[job.num_gpus > 0]
        at = bisect_left(ready, place)
        if ready[at : at + 1] == [place]:
            del ready[at]

    def _before(self, job: Job) -> list[Job]:
        """Return the existing jobs that this one depends on."""
        return [found for reference in job.depends_on if (found := self._find_any(reference)) is not None]

    def _told(self, old: Job | None, new: Job | None) -> None:
        """Follow a change of a job's entry, and mark the jobs that depend on it for another check."""
        changed = new or old
        if changed is None:
            return
        self._pop(changed.id)
        if new is not None and new.state in {State.QUEUED, State.HELD}:
            self._put(new)
        self._unsure |= self._users.get(changed.id, set())

    def next_retry_at(self) -> float | None:
        """Return the earliest time at which a delayed retry may start; None without one."""
        now = self._clock()
        return min((when for when in self._not_before.values() if when > now), default=None)

    def all_wait_for_a_person(self) -> bool:
        """Return True if no job here will start by itself."""
        if self._unsure:
            return False
        stuck: set[int] = set()
        ahead = [job.id for job in self._jobs.values() if job.state is State.HELD]
        ahead += [number for number in self._short if not self._attempts.has_room(self._jobs[number])]  # for a person
        while ahead:
            number = ahead.pop()
            if number not in stuck:
                stuck.add(number)
                ahead += self._users.get(number, ())
        return stuck >= self._jobs.keys()

    # -- what comes and goes ------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read the spool's queued and held jobs, and write all jobs to the database."""
        for state in (State.QUEUED, State.HELD):
            for job in self._spool.jobs(state):
                self._put(job)
        self._spool.catalog.listen(self._told)
        self._database.put_jobs(self._spool.catalog)

    def _look_at_held(self, job: Job) -> None:
        """Release a job whose dependency has succeeded since it was held; else update the reason why it is held."""
        if job.held_for is None:
            return
        found = self._spool.job(job.held_for)
        if found is None or found.state is not State.SUCCEEDED:
            self._tell_anew(job, found)
            return
        released = self._spool.move(job, State.QUEUED, error=None, held_for=None)
        log.info(
            "job %d (%s): goes on: job %d (%s) has succeeded", job.id, job.name, found.id, found.name, extra=about(job)
        )
        self._put(released)
        self._database.put_job(released)

    def _tell_anew(self, job: Job, found: Job | None) -> None:
        """Update the reason why a job is held. `found` is the job that it is held for."""
        blocking = self._blocking(job)
        is_requeued = found is not None and found.state not in _ENDED
        if blocking:
            problem = _blocked(job, blocking)
        elif found is not None and is_requeued:
            problem = EnvironmentInvalidError(
                f"it depends on job {found.id} ({found.name}), which was requeued and has not succeeded yet",
                hint=f"when that has succeeded, this one goes on; or honectl cancel {job.id}",
            )
        else:
            return  # it depends on a name, which by now means another job
        numbers = [each.found.id for each in blocking if each.found is not None]
        held_for = job.held_for if is_requeued or job.held_for in numbers else next(iter(numbers), None)
        if (problem.as_dict(), held_for) == (job.error, job.held_for):
            return
        log.info(
            "job %d (%s): still held: %s",
            job.id,
            job.name,
            problem.message,
            extra=about(job, state=State.HELD, hint=problem.hint),
        )
        self._put(self._spool.update(job, error=problem.as_dict(), held_for=held_for))

    def add(self, job: Job) -> None:
        """Add an accepted job."""
        self._put(job)
        self._database.put_job(job)

    def put_back(self, job: Job, *, delay_sec: float = 0.0) -> None:
        """Take back a job that ran, or could not be started, if it is to run again; `delay_sec` from now at the
        earliest."""
        if job.state not in {State.QUEUED, State.HELD}:
            return
        if delay_sec:
            self._not_before[job.id] = self._clock() + delay_sec
        self._put(job)

    def follow_change(self, changed: Job) -> None:
        """Follow a person's change of a job that is not running, whatever its state was before."""
        self._pop(changed.id)
        self._not_before.pop(changed.id, None)
        if changed.state in {State.QUEUED, State.HELD}:
            self._put(changed)

    def defer_users_of(self, job: Job) -> None:
        """Plan again all jobs that start from this job's output, because it will be made again."""
        for other in [other for other in self._jobs.values() if job.id in other.inputs.values()]:
            self._put(self._spool.update(other, is_deferred=True))

    def take(self, job: Job) -> None:
        """Remove a job that starts now."""
        self._waiting.discard(job.id)
        self._not_before.pop(job.id, None)
        self._placement.forget(job)
        self._pop(job.id)

    def fail(self, job: Job, error: HonedError) -> None:
        """Fail a job that cannot be started."""
        self._pop(job.id)
        log.error(
            "job %d (%s): %s",
            job.id,
            job.name,
            error.message,
            extra=about(job, of_error(error.code), state="failed", code=error.code, hint=error.hint),
        )
        try:
            failed = self._spool.move(job, State.FAILED, outcome=error.code, error=error.as_dict())
        except OSError:
            self._put(job)
            raise
        self._database.put_job(failed)

    def backend_of(self, job: Job) -> str:
        """Return the backend that loads the base. Raises OSError, ValueError, KeyError or TypeError for a bad plan."""
        name = PlanFile.read(self._layout.job(job.id).plan_path).backend.name
        if job.attempts and job.attempts[-1].num_starts > 1:
            name = job.attempts[-1].backend  # it fell back before, and would again
        return name

    # -- which is next ------------------------------------------------------------------------------------------------

    def next_that_fits(self) -> tuple[Job, Device] | None:
        """Return the job to start on a free device: highest priority first, then first come. It stays until taken."""
        self.look_again()
        now = self._clock()
        with_device = [ready for wants_gpu, ready in self._ready.items() if self._placement.is_any_free(wants_gpu)]
        for _, number in merge(*with_device):
            job = self._jobs[number]
            if self._not_before.get(job.id, now) > now or job.id in self._acceptance.replanning.numbers:
                continue
            if job.needs_bytes and not self._attempts.has_room(job):
                continue
            if (free := self._placement.free_device(job)) is not None:
                if self._placement.holds_on(job, free):
                    return job, free
                if not self._acceptance.replanning.has_room:
                    break
                self._asked_for[job.id] = free
                self._acceptance.replanning.plan_again(job, self._made_for(job), free)
        if self._ready[True] and not self._attempts.running and not self._placement.is_any_free(wants_gpu=True):
            self._tell_waits(self._jobs[self._ready[True][0][1]])
        return None

    def _tell_waits(self, job: Job) -> None:
        if job.id not in self._waiting:
            self._waiting.add(job.id)
            log.info("job %d (%s): waits for a GPU: others hold their memory", job.id, job.name)

    def look_again(self) -> None:
        """Check the conditions of new jobs, and of jobs with a dependency that has changed."""
        while self._unsure:
            number = self._unsure.pop()
            try:
                if (job := self._jobs.get(number)) is not None:
                    self._look_at(job)
            except BaseException:  # e.g. a full disk: still to be done
                self._unsure.add(number)
                raise

    def _look_at(self, job: Job) -> None:
        if job.state is State.HELD:
            self._look_at_held(job)
            return
        is_free = not job.depends_on or self._dependencies_are_met(job)
        self._unready(job)
        self._unplanned.discard(job.id)
        if is_free and job.is_deferred:
            self._unplanned.add(job.id)
        elif is_free:
            insort(self._ready[job.num_gpus > 0], (-job.priority, job.id))

    def _dependencies_are_met(self, job: Job) -> bool:
        if blocking := self._blocking(job):
            self._hold(job, blocking)
            return False
        there = [found for reference in job.depends_on if (found := self._find_any(reference)) is not None]
        return all(found.state is State.SUCCEEDED for found in there)

    def _blocking(self, job: Job) -> list[_Blocking]:
        """Return the dependencies of a job that will not succeed by themselves."""
        blocking = []
        for reference in job.depends_on:
            found = self._find_any(reference)
            if found is None and not self._had_succeeded(reference, job):
                pruned = self._spool.pruned(reference)
                ended = f"({pruned.name}), which {query.words_of_pruned(pruned)}" if pruned else "which is gone"
                blocking.append(_Blocking(None, f"job {reference} {ended}"))
            elif found is not None and found.state in _ENDED:
                blocking.append(_Blocking(found, f"job {found.id} ({found.name}), which {_ENDED[found.state]}"))
        return blocking

    def _had_succeeded(self, reference: str, job: Job) -> bool:
        """Return True if a pruned job had met this dependency: it succeeded, and its files are not needed."""
        pruned = self._spool.pruned(reference)
        return pruned is not None and pruned.state is State.SUCCEEDED and pruned.id not in job.inputs.values()

    def _hold(self, job: Job, blocking: Sequence[_Blocking]) -> None:
        """Hold a job whose dependencies will not succeed by themselves, for a person to decide. It continues by itself
        once they have been requeued and have succeeded."""
        problem = _blocked(job, blocking)
        log.warning(
            "job %d (%s): held: %s",
            job.id,
            job.name,
            problem.message,
            extra=about(job, message.HELD, state=State.HELD, hint=problem.hint),
        )
        first = next((each.found.id for each in blocking if each.found is not None), None)
        held = self._spool.move(job, State.HELD, error=problem.as_dict(), held_for=first)
        self._put(held)
        self._database.put_job(held)

    def _find_any(self, reference: str) -> Job | None:
        """Return the job of that number, else the newest job of that name."""
        if reference.isdecimal() and (job := self._spool.job(int(reference))) is not None:
            return job
        return max(self._spool.named(reference), key=lambda job: job.id, default=None)

    # -- why a job waits ----------------------------------------------------------------------------------------------

    def waits_for(self, job_id: int) -> dict[str, str] | None:
        """Return why a queued job does not run: a code for programs, a text for people. None if it is not queued."""
        job = self._jobs.get(job_id)
        if job is None or job.state is not State.QUEUED:
            return None
        reason, detail = self._why_waiting(job)
        return {"reason": reason, "detail": detail}

    def _why_waiting(self, job: Job) -> tuple[str, str]:
        for reference in job.depends_on:
            other = self._find_any(reference)
            if other is not None and other.state is not State.SUCCEEDED:
                return "dependency", f"job {other.id} ({other.name}), which it depends on, is {other.state}"
        if job.is_deferred or job.id in self._acceptance.replanning.numbers:
            return "plan", "it is being planned again"
        if (seconds := self._not_before.get(job.id, 0.0) - self._clock()) > 0:
            return "retry", f"it is tried again in {duration(seconds)}"
        if job.needs_bytes and not self._attempts.has_room(job):
            return "disk", f"its checkpoints need {gib(job.needs_bytes)} of free disk space"
        if self._spool.is_paused:
            return "paused", "no jobs are started: honectl resume"
        limit = self._placement.config.jobs.max_running
        if limit is not None and len(self._attempts.running) >= limit:
            return "device", f"{limit} jobs run, as many as jobs.max_running allows"
        return self._placement.obstacles(job) or ("turn", "it is about to start, or more urgent ones come first")

    # -- planned again ------------------------------------------------------------------------------------------------

    def plan_deferred(self) -> None:
        """Plan the deferred jobs whose inputs exist by now."""
        self.look_again()
        for number in sorted(self._unplanned):
            if not self._acceptance.replanning.has_room:
                return
            if number not in self._acceptance.replanning.numbers:
                self._acceptance.replanning.plan_again(self._jobs[number], self._made_for(self._jobs[number]))

    def settle_replanned(self) -> None:
        """Take the plans that were made again; an error found then fails the job."""
        for done in self._acceptance.replanning.take_done():
            job, found = self._jobs.get(done.job_id), self._asked_for.pop(done.job_id, None)
            if job is not None and job.state is State.QUEUED:
                self._replanned(job, done.answer, found)

    def _replanned(self, job: Job, answer: Answer, found: Device | None) -> None:
        """Take one new plan. `found` is the device that it was made for; None if it was made for new inputs."""
        if isinstance(answer, Passed) and not answer.waits_for:
            self._acceptance.plan_of(job, answer).write(self._layout.job(job.id).plan_path)
            self._placement.reread_plan(job)
            self._put(self._spool.update(job, is_deferred=False))
            log.info(
                "job %d (%s): planned again, for %s", job.id, job.name, found.name if found else "what is there now"
            )
            for warning in answer.warnings:
                log.warning("job %d (%s): %s", job.id, job.name, warning)
            return
        problem = answer.error if isinstance(answer, Refused) else ModelError("what it starts from is not there")
        if found is not None:  # it was accepted, so another device can run it
            self._placement.rule_out(job, found, problem.message)
            log.warning("job %d (%s): not on %s: %s", job.id, job.name, found.name, problem.message)
            return
        self.fail(job, problem)

    def _made_for(self, job: Job) -> dict[str, Path]:
        """Return the output directories of other jobs that this one starts from, by the names it uses for them."""
        makers = {name: self._spool.job(number) for name, number in job.inputs.items()}
        return {name: Path(maker.output_dir) for name, maker in makers.items() if maker is not None}
