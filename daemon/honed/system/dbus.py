"""A small D-Bus client for systemd, based on jeepney: start, stop and kill a unit, and query its state.

Every call has a timeout, so that a hanging bus cannot block the loop; after a timeout the bus is not called for a
while. The polkit rule beside honed-job@.service allows these calls to an unprivileged user.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jeepney import DBusAddress, Message, MessageType, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection

#: Timeout of a call in seconds. It includes polkit, which starts on its first call.
CALL_TIMEOUT_SEC = 5.0
#: Seconds for which a bus that did not answer is not called again.
PAUSE_SEC = 15.0

_MANAGER = DBusAddress("/org/freedesktop/systemd1", "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager")
_PROPERTIES = "org.freedesktop.DBus.Properties"
_UNIT = "org.freedesktop.systemd1.Unit"

NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
#: The request conflicts with one that is queued for the unit, a stop for example.
DESTRUCTIVE = "org.freedesktop.systemd1.TransactionIsDestructive"
#: Each of these means that we may not.
DENIED = frozenset(
    {"org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired"}
)


class BusError(OSError):
    """An error from systemd or the bus, with a message for people; `name` is the D-Bus error's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class BusAwayError(BusError):
    """The bus cannot be reached, or did not answer; `was_heard` if the call may have been received."""

    def __init__(self, message: str, *, was_heard: bool) -> None:
        super().__init__("away", message)
        self.was_heard = was_heard


@dataclass(frozen=True)
class UnitState:
    """The state of a loaded unit."""

    active: str  #: active, activating, deactivating, reloading, inactive, failed
    has_job: bool  #: a start or stop of it is queued

    @property
    def is_over(self) -> bool:
        return self.active in {"inactive", "failed"} and not self.has_job


class Systemd:
    """One connection to the system manager, opened when first needed and reopened when broken."""

    def __init__(self, *, bus: str = "SYSTEM", clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._connection: DBusConnection | None = None
        self._paused_until = -PAUSE_SEC

    def start_unit(self, unit: str) -> None:
        """Queue a unit's start without replacing a conflicting queued request. Raises BusError."""
        self._call(_MANAGER, "StartUnit", "ss", (unit, "fail"))

    def stop_unit(self, unit: str) -> None:
        """Queue a unit's stop. Raises BusError; for a unit that is not loaded, NO_SUCH_UNIT."""
        self._call(_MANAGER, "StopUnit", "ss", (unit, "replace"))

    def kill_unit(self, unit: str, whom: str, signal: int) -> None:
        """Send a signal to a unit's `main` process or to `all`. Raises BusError."""
        self._call(_MANAGER, "KillUnit", "ssi", (unit, whom, signal))

    def reload(self) -> None:
        """Have systemd read all unit files again. Raises BusError."""
        self._call(_MANAGER, "Reload", "", ())

    def unit_state(self, unit: str) -> UnitState | None:
        """Return a unit's state; None if it is not loaded: ended, and nothing queued. Raises BusError."""
        try:
            (path,) = self._call(_MANAGER, "GetUnit", "s", (unit,))
            address = DBusAddress(path, "org.freedesktop.systemd1", _PROPERTIES)
            (properties,) = self._call(address, "GetAll", "s", (_UNIT,))
        except BusError as error:
            if error.name in {NO_SUCH_UNIT, "org.freedesktop.DBus.Error.UnknownObject"}:
                return None
            raise
        return UnitState(str(properties["ActiveState"][1]), properties["Job"][1][0] != 0)

    def live_units(self, pattern: str) -> list[str]:
        """Return the names of the units that run, start or stop and match a shell pattern. Raises BusError."""
        (units,) = self._call(_MANAGER, "ListUnitsByPatterns", "asas", ([], [pattern]))
        return [str(name) for name, _description, _load, active, *_ in units if active not in {"inactive", "failed"}]

    def system_state(self) -> str:
        """Return initializing, starting, running, degraded, maintenance or stopping. Raises BusError."""
        address = DBusAddress(_MANAGER.object_path, _MANAGER.bus_name, _PROPERTIES)
        ((_, state),) = self._call(address, "Get", "ss", (_MANAGER.interface, "SystemState"))
        return str(state)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _call(self, address: DBusAddress, method: str, signature: str, body: tuple[Any, ...]) -> tuple[Any, ...]:
        message = new_method_call(address, method, signature, body)
        is_new = self._connection is None
        try:
            reply = self._send(message)
        except BusAwayError:
            if is_new or self._clock() < self._paused_until:
                raise
            reply = self._send(message)  # the connection broke when the bus was restarted; repeating a call is safe
        if reply.header.message_type is MessageType.error:
            name = next((str(value) for key, value in reply.header.fields.items() if key.name == "error_name"), "")
            raise BusError(name, str(reply.body[0]) if reply.body else name)
        return tuple(reply.body)

    def _send(self, message: Message) -> Message:
        if self._clock() < self._paused_until:
            raise BusAwayError("the system bus did not respond", was_heard=False)
        was_heard = False
        try:
            self._connection = self._connection or open_dbus_connection(bus=self._bus)
            was_heard = True
            return self._connection.send_and_get_reply(message, timeout=CALL_TIMEOUT_SEC)
        except (OSError, EOFError, ValueError, KeyError) as error:  # jeepney's AuthenticationError is a ValueError
            self.close()
            if isinstance(error, TimeoutError):
                self._paused_until = self._clock() + PAUSE_SEC
            raise BusAwayError(f"the system bus: {str(error) or type(error).__name__}", was_heard=was_heard) from error
