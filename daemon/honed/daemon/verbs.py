"""The daemon's end of the control socket: its verbs by name, and the check of who may use them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from honed.daemon import verb
from honed.daemon.arrivals.fetches import Waiting
from honed.daemon.arrivals.intake import Intake
from honed.daemon.arrivals.submission import Submission
from honed.daemon.attempts import Attempts
from honed.daemon.changes import Changes
from honed.daemon.dispatch import Dispatch
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.maintenance import Maintenance
from honed.daemon.reading import Reading
from honed.daemon.status import Status
from honed.daemon.telemetry import Observer
from honed.daemon.verb import Right, Verb
from honed.daemon.wake import Wake
from honed.job.database import Database
from honed.job.job import Job
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


def answers(
    layout: Layout,
    config: Callable[[], Config],
    wake: Wake,
    spool: Spool,
    database: Database,
    intake: Intake,
    attempts: Attempts,
    housekeeper: Housekeeper,
    status: Status,
    dispatch: Dispatch,
) -> Answers:
    """Return the answers of the daemon's services."""
    selection, fetches = dispatch.selection, intake.acceptance.fetches
    reading = Reading(layout, spool, fetches, selection.waits_for, selection.queue)
    changes = Changes(layout, spool, database, fetches, attempts, dispatch.backlog, housekeeper, reading)
    verbs = verb.table(
        reading,
        changes,
        status,
        housekeeper,
        Observer(status),
        Submission(spool.incoming_dir, intake.acceptance.incoming),
        dispatch.plans.editing,
        Maintenance(spool, dispatch.placement),
    )
    return Answers(layout, config, verbs, changes.item, wake)


class Answers:
    """Looks a verb up, checks the right to it, and answers it."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], Config],
        verbs: Mapping[str, Verb],
        item: Callable[..., Job | Waiting],
        wake: Wake,
    ) -> None:
        self._config = config
        self.verbs = verbs
        self._item = item
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
        if (found := self.verbs.get(request.verb)) is None:
            raise UsageError(f"unknown verb {request.verb!r}")
        declaration, asker, items = found.declaration, self._asker(request), list[Job | Waiting]()
        match declaration.right:
            case Right.ADMINISTRATOR if not asker.is_administrator:
                raise NotPermittedError(
                    f"{request.verb} affects everybody's jobs", hint="only root and policy.admin_group may use it"
                )
            case Right.OWNER:
                items = [item := self._item(request, asker, takes_arrival=declaration.takes_arrival)]
                _require_owner(request, asker, item.id, item.uid)
        answer = found.answer(request, asker, *items)
        if declaration.wakes:
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
