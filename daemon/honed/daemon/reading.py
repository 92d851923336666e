"""The verbs that read: query's rows, and the reasons why queued jobs wait, which only the daemon knows.

honectl answers them itself while honed is down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from honed.daemon.verb import verb
from honed.job import query
from honed.job.job import State
from honed.job.query import Asker
from honed.job.shape import Glance, Overview, Refusal, Refused, Row, Wait
from honed.job.spool import Spool
from honed.system.control import Parts, Request, Rows
from honed.system.error import UsageError
from honed.system.layout import Layout

if TYPE_CHECKING:
    from honed.daemon.arrivals.fetches import Fetches

AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Reading:
    """Answers about jobs. `waits_for` returns why a queued job does not run, `queue` the queued jobs in order. There
    are no fetches and no `waits_for` while the daemon is down."""

    layout: Layout
    spool: Spool
    fetches: Fetches | None
    waits_for: Callable[[int], Wait | None] | None
    queue: query.Queue

    @verb("list")
    def list_jobs(self, request: Request, asker: Asker) -> Rows:
        choice = query.Choice.of(request.arguments)
        rows = query.rows(self.spool, self.layout, choice, asker, self.queue)
        return Rows(row if row is None else self.row(row, asker) for row in rows)

    @verb("numbers")
    def numbers(self, *_: object) -> Rows:
        """Answer `numbers`: those of all jobs, for completions."""
        return Rows(job.id for job in self.spool.all().ordered())

    @verb("names")
    def names(self, _request: Request, asker: Asker) -> Rows:
        """Answer `names`: those of the jobs that the asker may read, for completions."""
        return Rows(_once(job.name if asker.may_read(job) else None for job in self.spool.all().ordered()))

    @verb("overview")
    def overview(self, request: Request, asker: Asker) -> Overview:
        answer = query.overview(self.spool, self.layout, query.Choice.of(request.arguments), asker, self.queue)
        return {**answer, "jobs": list(self.with_reasons(answer["jobs"], asker))}

    @verb("show")
    def show(self, request: Request, asker: Asker) -> Parts:
        """Answer `show`. Raises UsageError for an arrival whose model is fetched first."""
        if self.fetches is not None and (arrival := self.fetches.arrival(request.reference, asker)) is not None:
            fetched = f"{arrival.repo_id} at {arrival.revision}"
            raise UsageError(f"{request.reference!r} is not a job yet: {fetched} is fetched first", hint="honectl list")
        explain = partial(self.row, asker=asker)
        return Parts(query.shown(self.spool, self.layout, request.reference, asker, explain=explain))

    @verb("glance")
    def glance(self, request: Request, asker: Asker) -> Glance:
        return self.row(query.glance(self.spool, self.layout, request.reference, asker), asker)

    @verb("predictions")
    def predictions(self, request: Request, asker: Asker) -> Rows:
        return Rows(query.iter_predictions(self.spool, self.layout, request.reference, asker))

    @verb("losses")
    def losses(self, request: Request, asker: Asker) -> Rows:
        return Rows(query.iter_losses(self.spool, self.layout, request.reference, asker))

    @verb("group")
    def group(self, request: Request, asker: Asker) -> Parts:
        return Parts(query.grouped(self.spool, self.layout, request.reference, asker))

    @verb("accepted")
    def accepted(self, request: Request, asker: Asker) -> Row | None:
        """Return the job that an arrival became; None if there is none."""
        number, since = _number(request), str(request.arguments.get("since", ""))
        taken = query.accepted(self.spool, self.layout, request.reference, asker, since, number=number)
        return self.row(taken, asker) if taken is not None else None

    @verb("refusal")
    def refusal(self, request: Request, asker: Asker) -> Refusal | None:
        """Return the reason of an arrival's rejection; None if there is none."""
        return query.refusal(self.spool, request.reference, asker, number=_number(request))

    @verb("refused")
    def refused(self, request: Request, asker: Asker) -> Refused:
        """Return the newest rejected files that the asker may see."""
        limit = request.arguments.get("limit")
        if limit is not None and (type(limit) is not int or limit < 0):
            raise UsageError("limit is a number of files")
        return query.refused(self.spool, asker, limit=query.MAX_REFUSED if limit is None else limit)

    def row(self, row: AnyRow, asker: Asker) -> AnyRow:
        """Return one row with the reason why its job waits."""
        return next(self.with_reasons([row], asker))

    def with_reasons(self, rows: Iterable[AnyRow], asker: Asker) -> Iterator[AnyRow]:
        """Yield the rows, each queued job with the reason why it waits: the files do not have it."""
        if self.waits_for is None:
            yield from rows
            return
        for row in rows:
            if (waits_for := self.waits_for(row["id"])) is not None:
                is_theirs = asker.reads_all or row["uid"] == asker.uid
                row["waiting_for"] = waits_for if is_theirs else {**waits_for, "detail": ""}
            elif row["state"] == State.QUEUED:
                row["waiting_for"] = None  # it was queued when the row was read, and is no longer
            yield row


def _once(names: Iterable[str | None]) -> Iterator[str | None]:
    seen: set[str] = set()
    for name in names:
        yield None if name in seen else name
        seen |= {name} if name is not None else set()


def _number(request: Request) -> int | None:
    number = request.arguments.get("number")
    if number is not None and type(number) is not int:
        raise UsageError("number is an arrival's")
    return number
