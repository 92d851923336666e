"""The verbs that need no daemon, answered while it is down: the daemon's own answers about jobs, and changes of the
spool itself, under its lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from honed.daemon.reading import Reading
from honed.daemon.verb import declared, table, verb
from honed.job import query
from honed.job.change import CHANGES
from honed.job.job import Job, State
from honed.job.query import Asker
from honed.job.shape import Begin, ChangedRow
from honed.job.spool import Spool
from honed.system.control import Parts, Request, Rows
from honed.system.error import HonedError
from honed.system.layout import Layout
from honed.system.part import joined


@dataclass(frozen=True)
class Changing:
    """Changes the spool."""

    layout: Layout
    spool: Spool

    @verb(*CHANGES)
    def change(self, request: Request, _asker: Asker) -> ChangedRow:
        """Change a job that is not running."""
        from honed.daemon.changes import change, goes_on_from

        job, more = query.find(self.spool, request.reference), Begin()
        from_start = bool(request.arguments.get("from_start"))
        if request.verb == "requeue":
            more = {"goes_on_from": goes_on_from(self.layout, job, from_start=from_start)}
        changed = change(self.spool, self.layout, request.verb, job, from_start=from_start)
        return {**query.summary(changed), **more}

    @verb("pause", "resume")
    def pause(self, request: Request, _asker: Asker) -> None:
        """Stop starting jobs, or start them again, once honed runs."""
        self.spool.pause(request.verb == "pause")


#: The verbs that are answered here; those of CHANGES need the spool's lock.
VERBS = {name for service in (Reading, Changing) for _, declaration in declared(service) for name in declaration.names}


def answer(spool: Spool, layout: Layout, name: str, arguments: dict[str, Any]) -> Any:
    """Return the answer to one of VERBS."""
    reading = Reading(layout, spool, None, None, lambda: _queue(layout, spool))
    services = table(reading, Changing(layout, spool))
    match services[name].answer(Request(name, arguments, os.getuid()), query.ANYBODY):
        case Rows(rows):
            return [row for row in rows if row is not None]
        case Parts(parts):
            return joined(parts)
        case whole:
            return whole


def _queue(layout: Layout, spool: Spool) -> Iterator[Job]:
    """Return the queued jobs in the order in which honed would start them; by priority and number if the configuration
    or the shares cannot be read."""
    from honed.job import queue_order
    from honed.spec import config

    jobs = spool.all()
    try:
        return iter(list(queue_order.expected(layout.usage_path, config.load(layout), jobs)))
    except (OSError, HonedError):
        return jobs.unfinished(State.QUEUED)
