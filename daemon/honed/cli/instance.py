"""honectl's access to one honed: through the control socket, or through the files while honed is down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from honed.system.client import Client
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout

if TYPE_CHECKING:
    from honed.job.shape import Row, Shown, Status
    from honed.job.spool import Spool


class Instance:
    """One honed, running or not."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._client = Client(layout.control_path)

    @property
    def is_up(self) -> bool:
        return self._client.is_up

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Return the answer to a verb: the daemon's, or, to a verb that needs no daemon, that of the files while it is
        down. Raises EnvironmentInvalidError for any other verb then."""
        if not self.is_up:
            from honed.cli import offline
            from honed.job.change import CHANGES

            if verb in offline.VERBS:
                with self.spool(lock=verb in CHANGES) as spool:
                    return offline.answer(spool, self.layout, verb, arguments)
        return self._client.ask(verb, **arguments)

    @contextlib.contextmanager
    def spool(self, *, lock: bool) -> Iterator[Spool]:
        """Open the spool while honed is down; a change needs its lock."""
        if not self.layout.spool_dir.is_dir():
            raise EnvironmentInvalidError(
                f"{self.layout.spool_dir}: the spool does not exist", hint="start honed once, or give its --root DIR"
            )
        from honed.job.spool import Spool

        spool = Spool(self.layout, lock=lock)
        try:
            yield spool
        finally:
            spool.close()

    def show(self, reference: str) -> Shown:
        """Return a job's details."""
        shown: Shown = self.ask("show", id=reference)
        return shown

    def jobs(self, **choice: Any) -> list[Row]:
        """Return the chosen jobs; see query.Choice."""
        return list(self.ask("list", **choice))

    def status(self) -> Status | None:
        """Return the daemon's status; None if it is down."""
        status: Status | None = self._client.ask("status") if self.is_up else None
        return status
