"""The verbs of the control socket, and who may use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from honed.daemon.arrivals.intake import Intake
from honed.daemon.arrivals.submission import submit
from honed.daemon.attempts import Attempts
from honed.daemon.changes import Changes
from honed.daemon.dispatch import Dispatch
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.maintenance import Maintenance
from honed.daemon.reading import Reading
from honed.daemon.status import Status
from honed.daemon.telemetry import Observer
from honed.daemon.wake import Wake
from honed.job.database import Database
from honed.job.query import Asker
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system import access, control
from honed.system.control import Request
from honed.system.error import NotPermittedError, UsageError
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)


class Right(Enum):
    """The users who may use a verb."""

    ANYBODY = auto()  #: every user; the verb itself checks or leaves out the rest
    OWNER = auto()  #: the owner of the job or arrival that is named, and administrators
    ADMINISTRATOR = auto()  #: root, honed's own user, and the members of policy.admin_group


@dataclass(frozen=True)
class Verb:
    """One verb. `answer` takes the request and its asker and, where only the owner may use the verb, the item."""

    right: Right
    answer: Callable[..., Any]
    find: Callable[[Request, Asker], Any] | None = None  #: returns the item: the job or arrival that is named
    wakes: bool = False  #: the loop has something to do afterwards


def table(
    layout: Layout,
    spool: Spool,
    database: Database,
    intake: Intake,
    attempts: Attempts,
    housekeeper: Housekeeper,
    status: Status,
    dispatch: Dispatch,
) -> dict[str, Verb]:
    """Return the verbs by name."""
    selection, editing, maintenance = dispatch.selection, dispatch.plans.editing, Maintenance(spool, dispatch.placement)
    fetches, incoming = intake.acceptance.fetches, intake.acceptance.incoming
    reading = Reading(layout, spool, fetches, selection.waits_for, selection.queue)
    changes = Changes(layout, spool, database, fetches, attempts, dispatch.backlog, housekeeper, reading)
    changing = partial(Verb, Right.OWNER, find=changes.job)
    return {
        "list": Verb(Right.ANYBODY, reading.list_jobs),
        "numbers": Verb(Right.ANYBODY, reading.numbers),
        "names": Verb(Right.ANYBODY, reading.names),
        "overview": Verb(Right.ANYBODY, reading.overview),
        "show": Verb(Right.ANYBODY, reading.show),
        "glance": Verb(Right.ANYBODY, reading.glance),
        "predictions": Verb(Right.ANYBODY, reading.predictions),
        "losses": Verb(Right.ANYBODY, reading.losses),
        "group": Verb(Right.ANYBODY, reading.group),
        "accepted": Verb(Right.ANYBODY, reading.accepted),
        "refusal": Verb(Right.ANYBODY, reading.refusal),
        "refused": Verb(Right.ANYBODY, reading.refused),
        "status": Verb(Right.ANYBODY, status.answer),
        "metrics": Verb(Right.ANYBODY, Observer(status).answer),
        "submit": Verb(Right.ANYBODY, partial(submit, spool.incoming_dir, incoming), wakes=True),
        "prune": Verb(Right.ANYBODY, housekeeper.prune),  # of their own jobs, administrators of all
        "pruned": Verb(Right.ANYBODY, housekeeper.pruned),
        "cancel": Verb(Right.OWNER, changes.cancel, changes.job_or_arrival, wakes=True),
        "hold": changing(changes.change, wakes=True),
        "release": changing(changes.change, wakes=True),
        "requeue": changing(changes.change, wakes=True),
        "edit": changing(editing.edit, wakes=True),
        "edited": changing(editing.edited),
        "pin": changing(changes.pin),
        "unpin": changing(changes.pin),
        "pause": Verb(Right.ADMINISTRATOR, status.pause, wakes=True),
        "resume": Verb(Right.ADMINISTRATOR, status.pause, wakes=True),
        "drain": Verb(Right.ADMINISTRATOR, maintenance.drain, wakes=True),
        "undrain": Verb(Right.ADMINISTRATOR, maintenance.undrain, wakes=True),
        "reserve": Verb(Right.ADMINISTRATOR, maintenance.reserve, wakes=True),
        "unreserve": Verb(Right.ADMINISTRATOR, maintenance.unreserve, wakes=True),
    }


class Answers:
    """The daemon's end of the control socket: looks a verb up, checks the right to it, and answers it."""

    def __init__(self, layout: Layout, config: Callable[[], Config], verbs: Mapping[str, Verb], wake: Wake) -> None:
        self._config = config
        self.verbs = verbs
        self._wake = wake.wake
        self._server = control.Server(
            layout.control_path, wake.selector, self.answer, max_request_bytes=self._max_request_bytes()
        )

    def _max_request_bytes(self) -> int:
        return control.with_file(self._config().spool.max_spec_bytes)

    def reload(self) -> None:
        """Apply a new configuration."""
        self._server.max_request_bytes = self._max_request_bytes()

    def tend(self) -> None:
        """Listen again where the control socket's file was removed."""
        self._server.tend()

    def serve(self) -> None:
        """Answer what waits, between two steps of the loop."""
        self._server.serve()

    def close(self) -> None:
        """Close the control socket."""
        self._server.close()

    def answer(self, request: Request) -> Any:
        """Answer one verb. Raises HonedError if it cannot be done, or the asker may not do it."""
        if (verb := self.verbs.get(request.verb)) is None:
            raise UsageError(f"unknown verb {request.verb!r}")
        asker = self._asker(request)
        item: list[Any] = []
        if verb.right is Right.ADMINISTRATOR and not asker.is_administrator:
            raise NotPermittedError(
                f"{request.verb} affects everybody's jobs", hint="only root and policy.admin_group may use it"
            )
        if verb.right is Right.OWNER:
            assert verb.find is not None
            item = [verb.find(request, asker)]
            _require_owner(request, asker, item[0].id, item[0].uid)
        answer = verb.answer(request, asker, *item)
        if verb.wakes:
            self._wake()
        return answer

    def _asker(self, request: Request) -> Asker:
        policy = self._config().policy
        is_member = access.group_id(policy.admin_group) in request.gids
        is_administrator = request.uid in {0, os.getuid()} or is_member
        return Asker(request.uid, is_administrator, is_administrator or policy.share_results)


def _require_owner(request: Request, asker: Asker, job_id: int, uid: int | None) -> None:
    if request.uid != uid and not asker.is_administrator:
        log.warning(
            "job %d: %s refused for user %d: it belongs to another user",
            job_id,
            request.verb,
            request.uid,
            extra=about(job_id, of_error(NotPermittedError.code), code=NotPermittedError.code, uid=request.uid),
        )
        raise NotPermittedError(
            f"job {job_id} belongs to another user",
            hint="only its owner, root and the administrators' group may change it",
        )
