"""The jobs that a queued or held job depends on, and what their ends mean for it.

A job whose dependency failed or was cancelled is held, for a person to decide. It continues by itself once that
dependency has been requeued and has succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from honed.job import query
from honed.job.brief import Listed
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.system import message
from honed.system.error import EnvironmentInvalidError
from honed.system.log import about

log = logging.getLogger(__name__)

_ENDED = {State.FAILED: "failed", State.CANCELLED: "was cancelled"}


@dataclass(frozen=True)
class _Blocking:
    """A dependency that will not succeed by itself."""

    other: Listed | None  #: None if it was removed
    words: str


def _blocked(job: Job, blocking: Sequence[_Blocking]) -> EnvironmentInvalidError:
    """Return the error that explains why a job is held and how to let it continue."""
    numbers = [str(obstacle.other.id) for obstacle in blocking if obstacle.other is not None]
    again = ""
    if len(numbers) == len(blocking):
        which = "that job has" if len(numbers) == 1 else "these jobs have"
        again = f"honectl requeue {' '.join(numbers)}: this job continues when {which} succeeded; or "
    what = ", and on ".join(obstacle.words for obstacle in blocking)
    return EnvironmentInvalidError(f"it depends on {what}", hint=f"{again}honectl cancel {job.id}")


class Dependencies:
    """Finds the jobs that others depend on; holds and releases those others."""

    def __init__(self, spool: Spool, database: Database) -> None:
        self._spool = spool
        self._database = database

    def of(self, job: Job) -> list[Listed]:
        """Return the existing jobs that this one depends on."""
        return [other for reference in job.depends_on if (other := self._find(reference)) is not None]

    def are_met(self, job: Job) -> bool:
        """Return True if all have succeeded. If one will not succeed by itself, hold the job."""
        if blocking := self._blocking(job):
            self._hold(job, blocking)
            return False
        return all(other.state is State.SUCCEEDED for other in self.of(job))

    def look_at_held(self, job: Job) -> None:
        """Release a job whose dependency has succeeded since it was held; else update the reason why it is held."""
        if job.held_for is None:
            return
        other = self._spool.listed(job.held_for)
        if other is None or other.state is not State.SUCCEEDED:
            self._renew_reason(job, other)
            return
        released = self._spool.move(job, State.QUEUED, error=None, held_for=None)
        log.info(
            "job %d (%s): released: job %d (%s) succeeded", job.id, job.name, other.id, other.name, extra=about(job)
        )
        self._database.put_job(released)

    def _renew_reason(self, job: Job, other: Listed | None) -> None:
        """Update the reason why a job is held. `other` is the job that it is held for."""
        blocking = self._blocking(job)
        is_requeued = other is not None and other.state not in _ENDED
        if blocking:
            problem = _blocked(job, blocking)
        elif other is not None and is_requeued:
            problem = EnvironmentInvalidError(
                f"it depends on job {other.id} ({other.name}), which was requeued and has not succeeded yet",
                hint=f"it continues when that job has succeeded; or honectl cancel {job.id}",
            )
        else:
            return  # it depends on a name, which by now means another job
        numbers = [obstacle.other.id for obstacle in blocking if obstacle.other is not None]
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
        self._spool.update(job, error=problem.as_dict(), held_for=held_for)

    def _blocking(self, job: Job) -> list[_Blocking]:
        """Return the dependencies of a job that will not succeed by themselves."""
        blocking = []
        for reference in job.depends_on:
            other = self._find(reference)
            if other is None and not self._had_succeeded(reference, job):
                pruned = self._spool.pruned.get(reference)
                ended = (
                    f"({pruned.name}), which {query.words_of_pruned(pruned)}" if pruned else "which no longer exists"
                )
                blocking.append(_Blocking(None, f"job {reference} {ended}"))
            elif other is not None and other.state in _ENDED:
                blocking.append(_Blocking(other, f"job {other.id} ({other.name}), which {_ENDED[other.state]}"))
        return blocking

    def _had_succeeded(self, reference: str, job: Job) -> bool:
        """Return True if a pruned job had met this dependency: it succeeded, and its files are not needed."""
        pruned = self._spool.pruned.get(reference)
        return pruned is not None and pruned.state is State.SUCCEEDED and pruned.id not in job.inputs.values()

    def _hold(self, job: Job, blocking: Sequence[_Blocking]) -> None:
        problem = _blocked(job, blocking)
        log.warning(
            "job %d (%s): held: %s",
            job.id,
            job.name,
            problem.message,
            extra=about(job, message.HELD, state=State.HELD, hint=problem.hint),
        )
        first = next((obstacle.other.id for obstacle in blocking if obstacle.other is not None), None)
        self._database.put_job(self._spool.move(job, State.HELD, error=problem.as_dict(), held_for=first))

    def _find(self, reference: str) -> Listed | None:
        if reference.isdecimal() and (job := self._spool.listed(int(reference))) is not None:
            return job
        return max(self._spool.named(reference), key=lambda job: job.id, default=None)
