"""honectl's access to one honed: through the control socket, or through the files while honed is down. Changes then go
to the spool itself, under its lock."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.system.client import Client
from honed.system.error import EnvironmentInvalidError, HonedError
from honed.system.layout import Layout

if TYPE_CHECKING:
    from honed.job.job import Job
    from honed.job.shape import ChangedRow, DeviceRow, Edited, Overview, Refusal, Refused, Row, Shown, Status, Submitted
    from honed.job.spool import Spool


class Instance:
    """One honed, running or not."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._client = Client(layout.control_path)

    @property
    def is_up(self) -> bool:
        return self._client.is_up

    def _spool(self, *, lock: bool = False) -> Spool:
        if not self.layout.spool_dir.is_dir():
            raise EnvironmentInvalidError(
                f"{self.layout.spool_dir}: the spool does not exist", hint="start honed once, or give its --root DIR"
            )
        from honed.job.spool import Spool

        return Spool(self.layout, lock=lock)

    def read(self, verb: str, reference: str = "") -> Any:
        """Ask the daemon, or read the files if it is down."""
        if self.is_up:
            return self._client.ask(verb, id=reference)
        from honed.job import query

        return query.READING_VERBS[verb](self._spool(), self.layout, reference, query.ANYBODY)

    def show(self, reference: str) -> Shown:
        """Return a job's details."""
        shown: Shown = self.read("show", reference)
        return shown

    def jobs(self, **choice: Any) -> list[Row]:
        """Return the chosen jobs; see query.Choice."""
        if self.is_up:
            return list(self._client.ask("list", **choice))
        from honed.job import query

        spool = self._spool()
        rows = query.rows(spool, self.layout, query.Choice.of(choice), queue=self._queue(spool))
        return [row for row in rows if row is not None]

    def overview(self, **choice: Any) -> Overview:
        """Return the first jobs of each kind, and their counts."""
        if self.is_up:
            found: Overview = self._client.ask("overview", **choice)
            return found
        from honed.job import query

        spool = self._spool()
        return query.overview(spool, self.layout, query.Choice.of(choice), queue=self._queue(spool))

    def _queue(self, spool: Spool) -> Callable[[], Iterator[Job]] | None:
        """Return the queue as a honed that is down would start it; None if the configuration or the shares cannot be
        read: then it is listed by priority and number."""
        from honed.job import queue_order
        from honed.spec import config

        try:
            found = list(queue_order.expected(self.layout.usage_path, config.load(self.layout), spool.all()))
        except (OSError, HonedError):
            return None
        return lambda: iter(found)

    @property
    def takes_drops(self) -> bool:
        """True if job files are dropped into incoming/; else honed takes them only over its socket."""
        if self.is_up:
            return bool(self._client.ask("status")["takes_drops"])
        from honed.spec import config

        return config.load(self.layout).policy.arrivals == "spool"

    def submit(self, path: Path, *, hold: bool) -> Submitted:
        """Send a job file over the socket."""
        data = base64.b64encode(path.read_bytes()).decode()
        try:
            sent: Submitted = self._client.ask("submit", name=path.name, data=data, hold=hold)
        except EnvironmentInvalidError as error:
            error.hint += f"; honectl list shows whether {path.name} was accepted"
            raise
        return sent

    def accepted(self, source: str, *, since: str, number: int | None = None) -> Row | None:
        """Return the job made of a file since then, or of the arrival of that number; None if there is none."""
        if self.is_up:
            found: Row | None = self._client.ask("accepted", id=source, since=since, number=number)
            return found
        from honed.job import query

        return query.accepted(self._spool(), self.layout, source, query.ANYBODY, since, number=number)

    def refusal(self, source: str, *, number: int | None = None) -> Refusal | None:
        """Return the reason why a file was refused; None if it was not."""
        if self.is_up:
            found: Refusal | None = self._client.ask("refusal", id=source, number=number)
            return found
        from honed.job import query

        return query.refusal(self._spool(), source, number=number)

    def refused(self, *, limit: int | None = None) -> Refused:
        """Return the newest refused files, with the reasons of at most `limit`."""
        if self.is_up:
            found: Refused = self._client.ask("refused", **({} if limit is None else {"limit": limit}))
            return found
        from honed.job import query

        return query.refused(self._spool(), limit=query.MAX_REFUSED if limit is None else limit)

    def change(self, verb: str, reference: str, **arguments: Any) -> ChangedRow:
        """Change a job, through the daemon or, if it is down, in the spool itself."""
        if self.is_up:
            changed: ChangedRow = self._client.ask(verb, id=reference, **arguments)
            return changed
        from honed.daemon.changes import change, goes_on_from
        from honed.job import query
        from honed.job.shape import Begin

        spool = self._spool(lock=True)
        try:
            job, more = query.find(spool, reference), Begin()
            if verb == "requeue":
                more = {"goes_on_from": goes_on_from(self.layout, job, from_start=arguments.get("from_start", False))}
            return {**query.summary(change(spool, self.layout, verb, job, **arguments)), **more}
        finally:
            spool.close()

    def edit(self, number: int, data: bytes, *, was: bytes) -> Edited:
        """Send a waiting job another job file; `was` is the one that it replaces. `edited` has the verdict."""
        text, before = base64.b64encode(data).decode(), hashlib.sha256(was).hexdigest()
        sent: Edited = self._client.ask("edit", id=str(number), data=text, was=before)
        return sent

    def edited(self, number: int) -> Edited:
        """Return what became of a job's last edit."""
        found: Edited = self._client.ask("edited", id=str(number))
        return found

    @contextlib.contextmanager
    def pruner(self) -> Iterator[Callable[..., Any]]:
        """Yield the function that answers `prune` and `pruned`: the daemon's, or our own if the daemon is down."""
        if self.is_up:
            yield self._client.ask
            return
        from honed.cli.pruning import Down

        spool = self._spool(lock=True)
        try:
            yield Down(spool, self.layout).ask
        finally:
            spool.close()

    def status(self) -> Status | None:
        """Return the daemon's status; None if it is down."""
        found: Status | None = self._client.ask("status") if self.is_up else None
        return found

    def change_devices(self, verb: str, device: str, **arguments: Any) -> list[DeviceRow]:
        """Drain, undrain, reserve or unreserve a device; only the daemon knows the devices."""
        changed: list[DeviceRow] = self._client.ask(verb, id=device, **arguments)
        return changed

    def pause(self, paused: bool) -> None:
        if self.is_up:
            self._client.ask("pause" if paused else "resume")
        else:
            self._spool().pause(paused)
