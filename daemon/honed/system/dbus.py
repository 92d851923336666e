"""systemd over D-Bus, as far as honed needs it: start, stop and kill a unit, and ask how it is. Spoken with jeepney.

Every call has a deadline, so that a bus which hangs cannot hang the loop; after one that was missed the bus is left
alone for a while. An unprivileged caller is let in by the polkit rule beside honed-job@.service.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jeepney import DBusAddress, Message, MessageType, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection

#: Seconds for a call to be answered. Polkit is asked in between, and starts on its first call.
CALL_TIMEOUT_SEC = 5.0
#: Seconds for which a bus that did not answer is not asked again.
PAUSE_SEC = 15.0

_MANAGER = DBusAddress("/org/freedesktop/systemd1", "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager")
_PROPERTIES = "org.freedesktop.DBus.Properties"
_UNIT = "org.freedesktop.systemd1.Unit"

NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
#: What is queued for a unit, a stop for example, and what was asked for do not go together.
DESTRUCTIVE = "org.freedesktop.systemd1.TransactionIsDestructive"
#: Each of these says that we may not.
DENIED = frozenset(
    {"org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired"}
)


class BusError(OSError):
    """systemd or the bus said no, in words for a person; `name` is the D-Bus error's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class BusAwayError(BusError):
    """The bus cannot be reached, or did not answer; `was_heard` where nobody knows whether the call was heard."""

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
    """One connection to the system's manager, made when it is first needed and again when it broke."""

    def __init__(self, *, bus: str = "SYSTEM", clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._connection: DBusConnection | None = None
        self._paused_until = -PAUSE_SEC

    def start_unit(self, unit: str) -> None:
        """Queue its start; what is queued against it stays. Raises BusError."""
        self._call(_MANAGER, "StartUnit", "ss", (unit, "fail"))

    def stop_unit(self, unit: str) -> None:
        """Queue its stop. Raises BusError; a unit that is not loaded is NO_SUCH_UNIT."""
        self._call(_MANAGER, "StopUnit", "ss", (unit, "replace"))

    def kill_unit(self, unit: str, whom: str, signal: int) -> None:
        """Send a signal to a unit's `main` process or to `all`. Raises BusError."""
        self._call(_MANAGER, "KillUnit", "ssi", (unit, whom, signal))

    def unit_state(self, unit: str) -> UnitState | None:
        """A unit's state; None where it is not loaded, so has ended and left nothing queued. Raises BusError."""
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
        """The names of the units that run, start or end, by a pattern as for a shell. Raises BusError."""
        (units,) = self._call(_MANAGER, "ListUnitsByPatterns", "asas", ([], [pattern]))
        return [str(name) for name, _description, _load, active, *_ in units if active not in {"inactive", "failed"}]

    def system_state(self) -> str:
        """initializing, starting, running, degraded, maintenance or stopping. Raises BusError."""
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
            reply = self._send(message)  # the old connection was cut when the bus was restarted; a call may be repeated
        if reply.header.message_type is MessageType.error:
            name = next((str(value) for key, value in reply.header.fields.items() if key.name == "error_name"), "")
            raise BusError(name, str(reply.body[0]) if reply.body else name)
        return tuple(reply.body)

    def _send(self, message: Message) -> Message:
        if self._clock() < self._paused_until:
            raise BusAwayError("the system bus did not answer a moment ago", was_heard=False)
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
