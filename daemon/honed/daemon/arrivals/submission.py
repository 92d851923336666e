"""Job files that come over the control socket, from the users who may write in incoming/."""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.arrivals.incoming import Incoming
from honed.daemon.verb import verb
from honed.job.arrival import held_name
from honed.job.query import Asker
from honed.job.shape import Submitted
from honed.system import access, durable
from honed.system.access import ENTER, WRITE, Person
from honed.system.control import Request
from honed.system.error import EnvironmentInvalidError, NotPermittedError, UsageError
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submission:
    """Takes job files from any user who may write in incoming/."""

    incoming_dir: Path
    incoming: Incoming

    @verb("submit", wakes=True)
    def submit(self, request: Request, _asker: Asker) -> Submitted:
        """Take a job file. Raises NotPermittedError for a user who may not write in incoming/."""
        who = Person(request.uid, request.gids, access.user_name(request.uid))
        if not access.may(self.incoming_dir, who, WRITE | ENTER):
            log.warning(
                "submit refused for user %d: no write permission for %s",
                request.uid,
                self.incoming_dir,
                extra=about(None, of_error(NotPermittedError.code), code=NotPermittedError.code, uid=request.uid),
            )
            raise NotPermittedError(
                f"you may not submit jobs: you have no write permission for {self.incoming_dir}",
                hint=f"join the group {access.DROPPERS_GROUP}, and log in again",
            )
        name, data = request.arguments.get("name"), request.arguments.get("data")
        if not isinstance(name, str) or not isinstance(data, str):
            raise UsageError("submit needs a name, and the file's bytes as data, in base64")
        try:
            content = base64.b64decode(data, validate=True)
        except ValueError as error:
            raise UsageError(f"data is not base64: {error}") from error
        try:
            claim = self.incoming.submit(
                held_name(name) if request.arguments.get("hold") else name, content, request.uid
            )
        except OSError as error:
            if durable.machine_fault(error):
                raise
            raise EnvironmentInvalidError(
                f"{name} could not be submitted: {error}", hint="see honectl doctor"
            ) from error
        return {"id": claim.id, "name": claim.name}
