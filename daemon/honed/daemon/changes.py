"""Changes of a job that people ask for: cancel, hold, release, requeue, pin and unpin."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from dataclasses import dataclass

from honed.daemon.arrivals.fetches import Fetches, Waiting
from honed.daemon.attempts import Attempts
from honed.daemon.backlog import Backlog
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.reading import Reading
from honed.daemon.verb import Right, verb
from honed.job import query, removal
from honed.job.change import CHANGES
from honed.job.database import Database
from honed.job.job import Job, State, Stop
from honed.job.query import Asker
from honed.job.shape import Arrival, Begin, ChangedRow, Row
from honed.job.spool import Spool
from honed.system import message, untrusted
from honed.system.control import Request
from honed.system.error import EnvironmentInvalidError, UsageError
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changes:
    """Applies the verbs that change one job."""

    layout: Layout
    spool: Spool
    database: Database
    fetches: Fetches
    attempts: Attempts
    backlog: Backlog
    housekeeper: Housekeeper
    reading: Reading

    def item(self, request: Request, asker: Asker, *, takes_arrival: bool) -> Job | Waiting:
        """Return the job that a request names, or the arrival whose model is being fetched."""
        arrival = self.fetches.arrival(request.reference, asker) if takes_arrival else None
        return arrival or query.find(self.spool, request.reference, asker)

    @verb("cancel", right=Right.OWNER, wakes=True, takes_arrival=True)
    def cancel(self, request: Request, asker: Asker, item: Job | Waiting) -> ChangedRow | Arrival:
        """Cancel a job, or reject an arrival whose model is being fetched."""
        if isinstance(item, Job):
            return self.change(request, asker, item)
        self.fetches.cancel(item.id)
        return {**item.as_dict(), "state": "rejected"}

    @verb("hold", "release", "requeue", right=Right.OWNER, wakes=True)
    def change(self, request: Request, asker: Asker, job: Job) -> ChangedRow:
        """Cancel, hold, release or requeue a job."""
        from_start, more = bool(request.arguments.get("from_start")), Begin()
        if request.verb == "requeue":
            more = {"goes_on_from": goes_on_from(self.layout, job, from_start=from_start)}
        changed: ChangedRow = {**query.summary(self._change(request.verb, job, from_start=from_start)), **more}
        return self.reading.row(changed, asker)

    @verb("pin", "unpin", right=Right.OWNER)
    def pin(self, request: Request, asker: Asker, job: Job) -> Row:
        """Exempt a job from retention, or end that."""
        is_pinned = request.verb == "pin"
        if (running := self.attempts.running.get(job.id)) is not None:
            pinned = running.update(is_pinned=is_pinned)
        else:
            pinned = self.spool.annotate(job, is_pinned=is_pinned)
        return self.reading.row(query.summary(pinned), asker)

    def _change(self, verb: str, job: Job, *, from_start: bool) -> Job:
        if job.id in self.attempts.running and verb in {"cancel", "hold"}:
            self.attempts.stop(job.id, Stop(verb))
            return self.attempts.running[job.id].job
        changed = change(self.spool, self.layout, verb, job, from_start=from_start)
        self.backlog.end_delay(changed.id)
        if verb == "requeue":
            self.housekeeper.free_checkpoints(job.id)
            self.backlog.defer_users_of(job)
        self.database.put_job(changed)
        if verb == "requeue":  # from here on, its state alone does not show whether its rows are up to date
            with contextlib.suppress(sqlite3.Error):
                self.database.sync()
        kind = {State.HELD: message.HELD, State.CANCELLED: message.CANCELLED}.get(changed.state)
        log.info("job %d (%s): %s; now %s", job.id, job.name, verb, changed.state, extra=about(changed, kind))
        return changed


def goes_on_from(layout: Layout, job: Job, *, from_start: bool) -> str:
    """Describe in words where a finished job begins when it is requeued."""
    if from_start:
        return "the start"
    if job.are_checkpoints_pruned:
        return "the start: its checkpoints were pruned"
    try:
        has_any = bool(untrusted.names_in(layout.files(job.id).checkpoints_dir, limit=1))
    except FileNotFoundError:
        has_any = False
    except OSError:  # the directory is its worker's, and we may not list it
        return "its last checkpoint, if it has one"
    return "its last checkpoint" if has_any else "the start: it has no checkpoint"


def change(spool: Spool, layout: Layout, verb: str, job: Job, *, from_start: bool = False) -> Job:
    """Apply a verb to a job that is not running. Raises UsageError if its state does not allow the verb."""
    match verb, job.state:
        case "cancel", State.QUEUED | State.HELD:
            return spool.move(job, State.CANCELLED, outcome="cancelled")
        case "hold", State.QUEUED:
            return spool.move(job, State.HELD, held_for=None)
        case "release", State.HELD:
            return spool.move(job, State.QUEUED, error=None, held_for=None)
        case "pin" | "unpin", _:
            return spool.annotate(job, is_pinned=verb == "pin")
        case "requeue", State.SUCCEEDED:
            # Its output would be made again in place, and a good model would be gone if that fails.
            raise UsageError(
                f"job {job.id} ({job.name}) has succeeded, and requeue would make its output again in place",
                hint=f"honectl rerun {job.id} makes a new job of the same job file and leaves this one as it is",
            )
        case "requeue", State.FAILED | State.CANCELLED:
            if from_start:
                # At once and for good: honed frees the disk space (housekeeper.py).
                removal.set_aside_checkpoints(layout, job.id)
            is_deferred = bool(job.inputs) or job.is_deferred  # its inputs may have changed since
            return spool.move(
                job,
                State.QUEUED,
                outcome=None,
                error=None,
                num_failures=0,
                stop=None,
                is_deferred=is_deferred,
                are_checkpoints_pruned=False,
                held_for=None,
                needs_bytes=0,
                adjustments=() if from_start or job.outcome == "out_of_memory" else job.adjustments,
            )
        case _, State.RUNNING if verb in {"cancel", "hold"}:
            raise EnvironmentInvalidError(
                f"job {job.id} ({job.name}) is running, but honed is not", hint="start honed, which then stops the job"
            )
        case _:
            needed = CHANGES[verb].allowed
            raise UsageError(f"job {job.id} ({job.name}) is {job.state}, but {verb} needs a job that is {needed}")
