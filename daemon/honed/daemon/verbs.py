"""Answers to honectl over the control socket: the verbs, and who may use them."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from honed import __version__
from honed.daemon.arrivals.intake import Intake
from honed.daemon.attempts import Attempts
from honed.daemon.backlog import Backlog
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.wake import Wake
from honed.job import query, removal
from honed.job.arrival import held_name
from honed.job.database import Database
from honed.job.job import Job, State, Stop
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system import access, control, durable, message
from honed.system.access import ENTER, WRITE, Person
from honed.system.error import EnvironmentInvalidError, NotPermittedError, UsageError
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)


class Answers:
    """The daemon's end of the verbs. `status` returns the status line for an asker, `waits_for` why a queued job does
    not run."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], Config],
        spool: Spool,
        database: Database,
        intake: Intake,
        attempts: Attempts,
        backlog: Backlog,
        *,
        housekeeper: Housekeeper,
        unfinished: Callable[[], Iterable[Job]],
        status: Callable[[query.Asker], str],
        waits_for: Callable[[int], dict[str, str] | None],
        wake: Wake,
    ) -> None:
        self._layout = layout
        self._config = config
        self._spool = spool
        self._database = database
        self._intake = intake
        self._attempts = attempts
        self._backlog = backlog
        self._housekeeper = housekeeper
        self._unfinished = unfinished
        self._status = status
        self._waits_for = waits_for
        self._wake = wake.wake
        self._server = control.Server(
            layout.control_path, wake.selector, self.answer, max_request_bytes=self._max_request_bytes()
        )

    def _max_request_bytes(self) -> int:
        return control.with_file(self._config().spool.max_spec_bytes)

    def reload(self) -> None:
        """Apply a new configuration."""
        self._server.max_request_bytes = self._max_request_bytes()

    def close(self) -> None:
        """Close the control socket."""
        self._server.close()

    def answer(self, request: control.Request) -> Any:
        """Answer one verb. Raises HonedError if it cannot be done, or the asker may not do it."""
        verb, reference = request.verb, str(request.arguments.get("id", ""))
        match verb:
            case "show" if (found := self._arrival(reference, self._asker(request))) is not None:
                fetched = f"{found['repo_id']} at {found['revision']}"
                raise UsageError(f"{reference!r} is no job yet: {fetched} is fetched first", hint="honectl list")
            case "list":
                choice = query.Choice.of(request.arguments)
                asker = self._asker(request)
                return control.Rows(self._with_reasons(query.rows(self._spool, self._layout, choice, asker), asker))
            case "overview":
                choice = query.Choice.of(request.arguments)
                asker = self._asker(request)
                found = query.overview(self._spool, self._layout, choice, asker)
                return {**found, "jobs": list(self._with_reasons(found["jobs"], asker))}
            case "accepted" | "refusal":
                return self._verdict(request, reference)
            case "submit":
                return self._submit(request)
            case str() if verb in query.READING_VERBS:
                asker = self._asker(request)
                told = query.READING_VERBS[verb](self._spool, self._layout, reference, asker)
                return next(self._with_reasons([told], asker)) if verb in {"show", "glance"} else told
            case "status":
                asker = self._asker(request)
                return {
                    "status": self._status(asker),
                    "pid": os.getpid(),
                    "version": __version__,
                    "is_watching": self._intake.is_watching,
                    "is_paused": self._spool.is_paused,
                    "takes_drops": self._config().policy.arrivals == "spool",
                    "num_arriving": self._intake.acceptance.incoming.num_seen,
                    "arrivals": [arrival_row(each, asker) for each in self._intake.acceptance.fetches.rows()],
                }
            case "pause" | "resume":
                if not self._asker(request).is_administrator:
                    raise NotPermittedError(f"{verb} is for everybody's jobs", hint="root and policy.admin_group may")
                self._spool.pause(verb == "pause")
                self._wake()
                return self._status(query.ANYBODY)
            case "cancel" if (found := self._arrival(reference, self._asker(request))) is not None:
                self._require_owner(request, found["id"], found["uid"])
                self._intake.acceptance.fetches.cancel(found["id"])
                return {**found, "state": "rejected"}
            case "prune":
                asker = self._asker(request)
                return self._housekeeper.answer(
                    request.arguments, lambda each: query.find(self._spool, each, asker), asker
                )
            case "pruned":
                asker = self._asker(request)
                return self._housekeeper.pruned(request.arguments, asker)
            case "pin" | "unpin":
                job = query.find(self._spool, reference, self._asker(request))
                self._require_owner(request, job.id, job.uid)
                pinned = self._pin(job, is_pinned=verb == "pin")
                return next(self._with_reasons([query.summary(pinned, {})], self._asker(request)))
            case "cancel" | "hold" | "release" | "requeue":
                job = query.find(self._spool, reference, self._asker(request))
                self._require_owner(request, job.id, job.uid)
                from_start = bool(request.arguments.get("from_start"))
                more = (
                    {"goes_on_from": goes_on_from(self._layout, job, from_start=from_start)}
                    if verb == "requeue"
                    else {}
                )
                changed = self._change(verb, job, from_start=from_start)
                self._wake()
                row = {**query.summary(changed, {}), **more}
                return next(self._with_reasons([row], self._asker(request)))
            case _:
                raise UsageError(f"no verb {verb!r}")

    def _with_reasons(self, rows: Iterable[dict[str, Any]], asker: query.Asker) -> Iterator[dict[str, Any]]:
        """Yield the rows, each queued job with the reason why it waits: the files do not have it."""
        for row in rows:
            if (waits_for := self._waits_for(row["id"])) is not None:
                is_theirs = asker.reads_all or row["uid"] == asker.uid
                row["waiting_for"] = waits_for if is_theirs else {**waits_for, "detail": ""}
            elif row["state"] == State.QUEUED:
                row["waiting_for"] = None  # it was queued when the row was read, and is no longer
            yield row

    def _arrival(self, reference: str, asker: query.Asker) -> dict[str, Any] | None:
        """Return an arrival that waits for a model, by its number, or by its name if no unfinished job has that name.

        Raises NotPermittedError for another user's number; names of other users' arrivals are not searched.
        """
        found = [each for each in self._intake.acceptance.fetches.rows() if each["source"] is not None]
        if not found:
            return None
        closed = [each for each in found if not (asker.reads_all or each["uid"] == asker.uid)]
        if any(str(each["id"]) == reference for each in closed):
            raise NotPermittedError(f"job {reference} is another user's", hint="honectl list shows your own")
        found = [each for each in found if each not in closed]
        if any(job.name == reference for job in self._unfinished()):
            found = [each for each in found if str(each["id"]) == reference]
        named = [each for each in found if reference in {str(each["id"]), each["name"]}]
        return named[0] if len(named) == 1 else None

    def _asker(self, request: control.Request) -> query.Asker:
        policy = self._config().policy
        is_member = access.group_id(policy.admin_group) in request.gids
        is_administrator = request.uid in {0, os.getuid()} or is_member
        return query.Asker(request.uid, is_administrator, is_administrator or policy.share_results)

    def _require_owner(self, request: control.Request, job_id: int, uid: int | None) -> None:
        if request.uid != uid and not self._asker(request).is_administrator:
            log.warning(
                "job %d: %s refused to user %d: it is another user's",
                job_id,
                request.verb,
                request.uid,
                extra=about(job_id, of_error(NotPermittedError.code), code=NotPermittedError.code),
            )
            raise NotPermittedError(
                f"job {job_id} is another user's", hint="its owner, root and the administrators' group may change it"
            )

    def _verdict(self, request: control.Request, name: str) -> dict[str, Any] | None:
        """Return the job that an arrival became, or the reason of its refusal. None if there is none.

        Raises UsageError for a number that is not an integer.
        """
        asker, number = self._asker(request), request.arguments.get("number")
        if number is not None and type(number) is not int:
            raise UsageError("number is an arrival's")
        if request.verb == "refusal":
            return query.refusal(self._spool, name, asker, number=number)
        since = str(request.arguments.get("since", ""))
        taken = query.accepted(self._spool, self._layout, name, asker, since, number=number)
        return next(self._with_reasons([taken], asker)) if taken is not None else None

    def _submit(self, request: control.Request) -> dict[str, Any]:
        """Take a job file from any user who may write in incoming/."""
        who = Person(request.uid, request.gids, access.user_name(request.uid))
        if not access.may(self._spool.incoming_dir, who, WRITE | ENTER):
            log.warning(
                "submit refused to user %d: they may not write %s",
                request.uid,
                self._spool.incoming_dir,
                extra=about(None, of_error(NotPermittedError.code), code=NotPermittedError.code),
            )
            raise NotPermittedError(
                f"you may not submit jobs: {self._spool.incoming_dir} is closed to you",
                hint=f"join the group {access.DROPPERS_GROUP}, and log in again",
            )
        name, data = request.arguments.get("name"), request.arguments.get("data")
        if not isinstance(name, str) or not isinstance(data, str):
            raise UsageError("submit takes a name, and the file's bytes as data, in base64")
        try:
            content = base64.b64decode(data, validate=True)
        except ValueError as error:
            raise UsageError(f"data is not base64: {error}") from error
        try:
            claim = self._intake.acceptance.incoming.submit(
                held_name(name) if request.arguments.get("hold") else name, content, request.uid
            )
        except OSError as error:
            raise EnvironmentInvalidError(
                f"{name} was not taken: {durable.machine_fault(error) or error}", hint="honectl doctor"
            ) from error
        self._wake()
        return {"id": claim.id, "name": claim.name}

    def _pin(self, job: Job, *, is_pinned: bool) -> Job:
        if (running := self._attempts.running.get(job.id)) is not None:
            return running.update(is_pinned=is_pinned)
        return self._spool.annotate(job, is_pinned=is_pinned)

    def _change(self, verb: str, job: Job, *, from_start: bool) -> Job:
        if job.id in self._attempts.running and verb in {"cancel", "hold"}:
            self._attempts.stop(job.id, Stop(verb))
            return self._attempts.running[job.id].job
        changed = change(self._spool, self._layout, verb, job, from_start=from_start)
        self._backlog.end_delay(changed.id)
        if verb == "requeue":
            self._housekeeper.free_checkpoints(job.id)
            self._backlog.defer_users_of(job)
        self._database.put_job(changed)
        if verb == "requeue":  # from here on, its state alone does not show whether its rows are up to date
            with contextlib.suppress(sqlite3.Error):
                self._database.sync()
        kind = {State.HELD: message.HELD, State.CANCELLED: message.CANCELLED}.get(changed.state)
        log.info("job %d (%s): %s; now %s", job.id, job.name, verb, changed.state, extra=about(changed, kind))
        return changed


def goes_on_from(layout: Layout, job: Job, *, from_start: bool) -> str:
    """Describe in words where a finished job begins when it is requeued."""
    if from_start or job.state is State.SUCCEEDED:
        return "the start"
    if job.are_checkpoints_pruned:
        return "the start: its checkpoints were pruned"
    try:
        has_any = any(True for _ in layout.job(job.id).checkpoints_dir.iterdir())
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
        case "requeue", State.SUCCEEDED | State.FAILED | State.CANCELLED:
            if from_start or job.state is State.SUCCEEDED:
                # At once and for good: honed frees the disk space (housekeeper.py).
                removal.set_aside_checkpoints(layout, job.id)
            is_deferred = bool(job.inputs)  # its inputs may have changed since
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
                f"job {job.id} ({job.name}) is running, and honed is not", hint="start honed; it then stops the job"
            )
        case _:
            allowed = {
                "cancel": "queued, held or running",
                "hold": "queued or running",
                "release": "held",
                "requeue": "succeeded, failed or cancelled",
            }[verb]
            raise UsageError(f"job {job.id} ({job.name}) is {job.state}; {verb} takes one that is {allowed}")


def arrival_row(found: dict[str, Any], asker: query.Asker) -> dict[str, Any]:
    """Return the row of an arrival that waits for a model, as query's rows are; another user's without details."""
    if asker.reads_all or found["uid"] == asker.uid:
        return found
    return {**found, "name": "", "source": None, "repo_id": None, "revision": None, "problem": None}
