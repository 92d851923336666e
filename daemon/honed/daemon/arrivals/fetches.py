"""Arrivals, and accepted jobs that are planned again, whose model or data set is fetched from the hub first."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass
from typing import cast

from honed.daemon.arrivals.checks import Checks, Pending
from honed.daemon.arrivals.rejection import Rejection
from honed.daemon.arrivals.replanning import Replanning
from honed.job.query import Asker
from honed.job.shape import Arrival
from honed.job.spool import Spool
from honed.run.fetcher import Fetcher
from honed.run.reply import Passed
from honed.run.snapshot import MODEL, Missing
from honed.spec.config import Config
from honed.system.error import HonedError, InternalError, InterruptedRunError, NotPermittedError

log = logging.getLogger(__name__)

#: Fetches of the same model or data set for one arrival: a cached copy can be removed before the next check.
MAX_FETCHES_PER_ARRIVAL = 3


@dataclass(frozen=True)
class _Fetching:
    """An arrival, or an accepted job that is planned again, and the model or data set that is fetched for it."""

    missing: Missing
    answer: Passed
    pending: Pending | None  #: None for an accepted job


@dataclass(frozen=True)
class Waiting:
    """An arrival or a job that waits for a fetch, as a row of `list --json`."""

    id: int
    name: str
    uid: int | None
    source: str | None  #: the file's name; None for an accepted job
    state: str
    repo_id: str | None
    revision: str | None
    repo_type: str
    num_bytes: int
    total_bytes: int | None
    problem: str | None

    def as_dict(self) -> Arrival:
        return cast("Arrival", asdict(self))

    def seen_by(self, asker: Asker) -> Arrival:
        """Return the row for an asker; another user's without details."""
        if asker.reads_all or self.uid == asker.uid:
            return self.as_dict()
        return {**self.as_dict(), "name": "", "source": None, "repo_id": None, "revision": None, "problem": None}


class Fetches:
    """Fetches what a check missed, and has the check repeated."""

    def __init__(
        self,
        fetcher: Fetcher,
        spool: Spool,
        checks: Checks,
        replanning: Replanning,
        rejection: Rejection,
        config: Callable[[], Config],
    ) -> None:
        self._fetcher = fetcher
        self._spool = spool
        self._checks = checks
        self._replanning = replanning
        self._rejection = rejection
        self._config = config
        self._fetching: dict[int, _Fetching] = {}
        self._num_fetches: dict[int, Counter[Missing]] = {}

    @property
    def numbers(self) -> Set[int]:
        """Numbers of the arrivals and jobs that wait for a fetch."""
        return self._fetching.keys()

    def num_of(self, uid: int) -> int:
        """Return the number of a user's arrivals that wait for a fetch."""
        return sum(waits.pending is not None and waits.pending.copy.uid == uid for waits in self._fetching.values())

    def listen(self, listener: Callable[[str, int], None]) -> None:
        """Register a callback for every end of a fetching process: it gets the type of the repository and the bytes."""
        self._fetcher.listeners.append(listener)

    def begin(self, answer: Passed, missing: Missing, pending: Pending | None) -> None:
        """Start the fetch of the model or data set that a check missed; `pending` is None for an accepted job."""
        number = answer.id
        waits = _Fetching(missing, answer, pending)
        counts = self._num_fetches.setdefault(number, Counter())
        counts[missing] += 1
        if counts[missing] > MAX_FETCHES_PER_ARRIVAL:
            why = f"{missing.key}: {missing.repo_id} was fetched, but is not in the cache"
            self._fail(number, waits, InternalError(why, hint="see the journal"))
            return
        self._fetching[number] = waits
        self._fetcher.want(number, missing)
        who = repr(pending.claim.name) if pending else "planned again"
        log.info("job %d (%s): waiting for the fetch of %s at %s", number, who, missing.repo_id, missing.revision)

    def forget(self, number: int) -> None:
        """Forget how often something was fetched for an arrival or job: its last check asked for no fetch."""
        self._num_fetches.pop(number, None)

    def settle(self) -> None:
        """Check again the arrivals and jobs whose fetch succeeded, and reject those whose fetch failed."""
        for fetched in self._fetcher.poll():
            if (waits := self._fetching.pop(fetched.number, None)) is None:
                continue
            if fetched.error is None:
                self._check_again(fetched.number, waits)
            else:
                self._fail(fetched.number, waits, fetched.error)
        if not self._config().policy.hub:  # no longer allowed: the check reports it
            for number, waits in list(self._fetching.items()):
                self._fetcher.leave(number)
                del self._fetching[number]
                self._check_again(number, waits)

    def cancel(self, number: int) -> None:
        """Reject an arrival that waits for a fetch, at its owner's request."""
        waits = self._fetching.pop(number)
        self._fetcher.leave(number)
        what = "base model" if waits.missing.repo_type == MODEL else waits.missing.what
        self._fail(number, waits, InterruptedRunError(f"cancelled before its {what} was fetched"))

    def rows(self) -> list[Waiting]:
        """Return a row for every arrival and job that waits for a fetch, with its progress."""
        rows = []
        for number, waits in sorted(self._fetching.items()):
            progress = self._fetcher.progress(number)
            pending, job = waits.pending, None if waits.pending else self._spool.job(number)
            uid = pending.copy.uid if pending else job.uid if job else None
            rows.append(
                Waiting(
                    id=number,
                    name=_name(waits, number),
                    uid=uid,
                    source=pending.claim.name if pending else None,
                    state="fetching",
                    repo_id=waits.missing.repo_id,
                    revision=waits.missing.revision,
                    repo_type=waits.missing.repo_type,
                    num_bytes=progress.get("bytes", 0),
                    total_bytes=progress.get("of") or None,
                    problem=progress.get("problem"),
                )
            )
        return rows

    def arrival(self, reference: str, asker: Asker) -> Waiting | None:
        """Return an arrival that waits for a model, by its number, or by its name if no unfinished job has that name.

        Raises NotPermittedError for another user's number; names of other users' arrivals are not searched.
        """
        waiting = [row for row in self.rows() if row.source is not None]
        if not waiting:
            return None
        closed = [row for row in waiting if not (asker.reads_all or row.uid == asker.uid)]
        if any(str(row.id) == reference for row in closed):
            raise NotPermittedError(f"job {reference} belongs to another user", hint="honectl list shows your own jobs")
        is_a_jobs = any(not job.state.is_final for job in self._spool.named(reference))
        names = [row for row in waiting if row not in closed and reference in {str(row.id), row.name}]
        named = [name for name in names if not is_a_jobs or str(name.id) == reference]
        return named[0] if len(named) == 1 else None

    def names(self) -> set[str]:
        """Return the names and numbers by which other arrivals may name those that wait for a fetch."""
        return {
            name
            for number, waits in self._fetching.items()
            if waits.pending is not None
            for name in (_name(waits, number), str(number))
        }

    def _check_again(self, number: int, waits: _Fetching) -> None:
        if waits.pending is not None:
            self._checks.begin(waits.pending)
        else:
            self._replanning.ask(number)

    def _fail(self, number: int, waits: _Fetching, error: HonedError) -> None:
        if waits.pending is not None:
            self._rejection.reject(waits.pending.claim, error)
        else:
            self._replanning.fail(number, error)


def _name(waits: _Fetching, number: int) -> str:
    title = waits.pending.claim.title if waits.pending else str(number)
    return str(waits.answer.spec.get("name") or title)
