"""The preflight helper as a unit, honed-check@UID.service: it has the permissions of one submitter, and no others.

    a socket of ours at run/honed/check/UID ──► StartUnit ──► systemd connects it, as the unit's stdin and stdout

Only we and root can enter the directory, and root connects before the process becomes the submitter's: so the other end
is certainly the unit, and none of the submitter's processes can take its place. Nor can they reach into the unit, see
honed-check@.service.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from honed.run.helper import Helper, Start, Watch
from honed.system import durable
from honed.system.dbus import DESTRUCTIVE, NO_SUCH_UNIT, BusAwayError, BusError, Systemd
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds between questions to systemd about a unit that has not connected yet.
ASK_INTERVAL_SEC = 1.0
_UCRED = struct.Struct("3i")


class CheckUnits:
    """The check units of one instance. Units left by an earlier daemon are stopped."""

    def __init__(self, layout: Layout, systemd: Systemd, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._dir = layout.runtime_dir / "check"
        self._systemd = systemd
        self._clock = clock
        durable.make_dir(self._dir, mode=0o700)
        self._end_left()

    def of(self, uid: int) -> Start:
        """Return a function that starts helpers of one submitter."""
        return lambda stage_fd, watch: UnitHelper(
            unit_name(uid), self._dir / str(uid), self._systemd, stage_fd, watch, clock=self._clock
        )

    def _end_left(self) -> None:
        try:
            for unit in self._systemd.live_units("honed-check@*.service"):
                stop(self._systemd, unit)
        except BusError as error:
            log.warning("the checks that were started before honed restarted cannot be stopped: %s", error)


class UnitHelper(Helper):
    """A helper that runs as a unit and connects to its own socket."""

    def __init__(
        self, unit: str, path: Path, systemd: Systemd, stage_fd: int, watch: Watch, *, clock: Callable[[], float]
    ) -> None:
        super().__init__(stage_fd, watch)
        self._unit = unit
        self._path = path
        self._systemd = systemd
        self._clock = clock
        self._look_at = 0.0
        self._is_asked = False
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(str(path))
            self._listener.listen()
            self._ask()
        except BaseException:
            self._close_listener()
            raise
        watch(None, self._listener.fileno())

    def fileno(self) -> int:
        return super().fileno() if self._socket is not None else self._listener.fileno()

    def read(self) -> bytes | None:
        if self._socket is None:
            self._wait_for_it()
        return super().read()

    def end(self) -> None:
        if self._socket is None:
            self._watch(self._listener.fileno(), None)
            self._close_listener()
        super().end()
        stop(self._systemd, self._unit)

    def _ask(self) -> None:
        try:
            self._systemd.start_unit(self._unit)
        except BusError as error:
            if error.name == DESTRUCTIVE:  # the previous unit is about to end: retry at the next read
                return
            if not (isinstance(error, BusAwayError) and error.was_heard):
                raise OSError(f"systemd did not start {self._unit}: {error}") from error
        self._is_asked = True
        self._look_at = self._clock() + ASK_INTERVAL_SEC

    def _wait_for_it(self) -> None:
        """Accept the unit's connection if it is there. Raises OSError if it will never come."""
        if not self._is_asked:
            self._ask()
        is_over = self._is_asked and self._clock() >= self._look_at and self._is_over()
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            _pid, uid, _gid = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid != 0:
                peer.close()
                raise PermissionError(f"user {uid} connected instead of {self._unit}")
            self._meet(peer, self._listener.fileno())
            self._close_listener()
            return
        if is_over:
            raise OSError(f"{self._unit} exits immediately: journalctl -u {self._unit}")

    def _is_over(self) -> bool:
        self._look_at = self._clock() + ASK_INTERVAL_SEC
        with contextlib.suppress(BusError):
            state = self._systemd.unit_state(self._unit)
            return state is None or state.is_over
        return False

    def _close_listener(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


def unit_name(uid: int) -> str:
    return f"honed-check@{uid}.service"


def stop(systemd: Systemd, unit: str) -> None:
    """Stop a unit, whatever it is doing."""
    try:
        systemd.stop_unit(unit)
    except BusError as error:
        if error.name != NO_SUCH_UNIT:
            log.warning("%s cannot be stopped: %s", unit, error)
