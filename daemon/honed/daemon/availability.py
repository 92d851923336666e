"""The times at which a device may be used, and by whom: its hours, drains and reservations.

    honed.toml: device.hours, device.hours_of    a job may start within them, and is preempted when they end
    var/spool/honed/devices.json                 drains and reservations by device, until somebody or a date ends them

While that file is damaged, every device counts as drained, since one of them may be.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from honed.job.damaged import is_of_item, twice
from honed.job.job import Job
from honed.job.shape import Closure, DeviceRow
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.spec.hours import Hours
from honed.system import durable
from honed.system.device import Device
from honed.system.error import UsageError, plain
from honed.system.log import about
from honed.system.message import DEGRADED

log = logging.getLogger(__name__)

#: The name of all devices, in requests and in the drain that stands for a damaged file.
ALL = "all"
#: Maximum number of characters of a drain's reason.
MAX_REASON = 200


@dataclass(frozen=True)
class Drain:
    """A device on which no job starts."""

    since: float  #: seconds since the epoch
    reason: str = ""
    is_now: bool = False  #: running jobs are preempted


@dataclass(frozen=True)
class Reservation:
    """A device on which only the jobs of one user, or one job, start."""

    since: float  #: seconds since the epoch
    uid: int | None = None
    user: str = ""  #: the name of that user
    job: int | None = None
    until: float | None = None  #: seconds since the epoch


@dataclass(frozen=True)
class Standing:
    """The content of devices.json: drains and reservations by device."""

    drains: Mapping[str, Drain] = field(default_factory=dict)
    reservations: Mapping[str, Reservation] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: bytes) -> Standing:
        """Parse the file. Raises ValueError if it is damaged."""
        return TypeAdapter(cls).validate_json(data)


class Availability:
    """The hours, drains and reservations of devices. `now` is seconds since the epoch."""

    def __init__(self, spool: Spool, config: Callable[[], Config], *, now: Callable[[], float] = time.time) -> None:
        self._spool = spool
        self._config = config
        self._now = now
        self._path = spool.dir / "devices.json"
        self._hours: dict[Hours, tuple[float, float, bool]] = {}  # from when until when they are open or not
        self._standing = self._read()

    def _read(self) -> Standing:
        try:
            return Standing.from_json(twice(lambda: durable.read(self._path)))
        except FileNotFoundError:
            return Standing()
        except (OSError, ValueError) as error:
            if not is_of_item(error):
                raise  # the next start reads it
            log.error(  # noqa: TRY400
                "%s is damaged, so every device counts as drained: %s", self._path, error, extra=about(message=DEGRADED)
            )
            return Standing({ALL: Drain(self._now(), f"{self._path} is damaged: honectl undrain all")})

    # -- what holds now -----------------------------------------------------------------------------------------------

    def obstacle(self, job: Job, device: Device) -> tuple[str, str] | None:
        """Return why a job may not start on a device: a code for programs, and a text that follows `GPU 0 is`; None if
        it may."""
        return self.closed(device) or self.reserved(device, job)

    def closed(self, device: Device) -> tuple[str, str] | None:
        """Return why no job may start on a device, as `obstacle` does: `drained` or `hours`; None if jobs may."""
        if (drain := self._drain(device.key)) is not None:
            return "drained", f"drained{f': {drain.reason}' if drain.reason else ''}"
        hours = self._hours_of(device)
        if not self._is_open(hours):
            opens = hours.next_change(self._now())
            return "hours", f"closed{f' until {self._when(opens)}' if opens is not None else ''}: device.hours"
        return None

    def why_vacate(self, device: Device) -> str | None:
        """Return why the job that runs on a device has to give it up now; None if it may continue."""
        if (drain := self._drain(device.key)) is not None and drain.is_now:
            return f"{device.label} was drained{f': {drain.reason}' if drain.reason else ''}"
        return None if self._is_open(self._hours_of(device)) else f"the hours of {device.label} ended"

    def reserved(self, device: Device, job: Job | None) -> tuple[str, str] | None:
        """Return for whom a device is reserved, as `obstacle` does; None if it is not, or for this job."""
        reservation = self._standing.reservations.get(device.key)
        if reservation is None or self._is_over(reservation):
            return None
        is_by_job = reservation.job is not None
        if job is not None and (job.id == reservation.job if is_by_job else job.uid == reservation.uid):
            return None
        whom = f"job {reservation.job}" if is_by_job else f"user {reservation.user}"
        until = f" until {self._when(reservation.until)}" if reservation.until is not None else ""
        return "reserved", f"reserved for {whom}{until}"

    def rows(self, devices: Iterable[Device]) -> list[DeviceRow]:
        """Return all devices, and those that do not respond but are drained or reserved, each with what closes it."""
        present = {device.key: device for device in devices}
        keys = {**self._standing.drains, **self._standing.reservations}
        absent = [Device("cuda", key, uuid=key) for key in keys if key not in {*present, ALL}]
        return [
            {
                "device": device.key,
                "label": device.label,
                "name": device.name if device.key in present else None,
                "closures": [
                    Closure(reason=code, detail=text)
                    for code, text in filter(None, (self.closed(device), self.reserved(device, None)))
                ],
            }
            for device in [*present.values(), *absent]
        ]

    def next_change(self, devices: Iterable[Device]) -> float:
        """Return the seconds until hours begin or end, or a reservation ends; infinity if nothing changes by itself."""
        now = self._now()
        moments = [
            reservation.until for reservation in self._standing.reservations.values() if reservation.until is not None
        ]
        for device in devices:
            hours = self._hours_of(device)
            self._is_open(hours)
            moments.append(self._hours[hours][1])
        return min((moment - now for moment in moments if moment > now), default=math.inf)

    def unknown_names(self, devices: Iterable[Device]) -> list[str]:
        """Return the names in device.hours_of that no device has."""
        known = {name for device in devices for name in _names(device)}
        return [name for name in self._config().device.hours_of if name not in known]

    def _drain(self, key: str) -> Drain | None:
        return self._standing.drains.get(key) or self._standing.drains.get(ALL)

    def _is_over(self, reservation: Reservation) -> bool:
        if reservation.until is not None and reservation.until <= self._now():
            return True
        if reservation.job is None:
            return False
        job = self._spool.listed(reservation.job)
        return job is None or job.state.is_final

    def _hours_of(self, device: Device) -> Hours:
        return self._config().device.hours_for(*_names(device))

    def _is_open(self, hours: Hours) -> bool:
        """Return True if hours are open now; computed when they change, and when the clock was set back."""
        now = self._now()
        begin, end, is_open = self._hours.get(hours, (math.inf, math.inf, True))
        if not begin <= now < end:
            change = hours.next_change(now)
            begin, end, is_open = now, math.inf if change is None else change, hours.is_open(now)
            self._hours[hours] = (begin, end, is_open)
        return is_open

    def _when(self, moment: float) -> str:
        """Return a moment for people: `Mon 20:00 (in 3 h)`; almost a week ahead, and later, with its date."""
        left = moment - self._now()
        words = time.strftime("%a %H:%M" if left < 6 * 86400 else "%Y-%m-%d %H:%M", time.localtime(moment))
        # Rounded up to minutes: every change of the text is an event for all who watch the queue.
        minutes = max(1, math.ceil(left / 60))
        return f"{words} (in {f'{minutes} min' if minutes < 90 else f'{round(minutes / 60)} h'})"

    # -- what changes -------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Apply a new configuration, and a new time zone of the machine."""
        time.tzset()
        self._hours.clear()

    def drain(self, devices: Iterable[Device], reason: str, *, is_now: bool) -> None:
        """Start no further jobs on these devices. Raises OSError if that cannot be made durable."""
        drain = Drain(self._now(), plain(reason.replace("\n", " "), max_chars=MAX_REASON), is_now)
        self._put(drains={**self._standing.drains, **{device.key: drain for device in devices}})

    def undrain(self, keys: Iterable[str]) -> None:
        """End the drains of these devices; `all` ends every one. Raises UsageError for one that is not drained, and
        OSError if that cannot be made durable."""
        self._put(drains=_without(self._standing.drains, keys, "drained"))

    def reserve(
        self, devices: Iterable[Device], *, until: float | None = None, for_sec: float | None = None, **whom: Any
    ) -> None:
        """Reserve devices, in place of earlier reservations. `whom`: a `uid` and a `user`, or a `job`.

        Raises UsageError if `until` is over, and OSError if that cannot be made durable.
        """
        until = until if for_sec is None else self._now() + for_sec
        if until is not None and not until > self._now():
            raise UsageError("a reservation cannot end in the past", hint="give --until a later time, or --for")
        reservation = Reservation(self._now(), until=until, **whom)
        self._put(reservations={**self._standing.reservations, **{device.key: reservation for device in devices}})

    def unreserve(self, keys: Iterable[str]) -> None:
        """End the reservations of these devices; `all` ends every one. Raises UsageError for one that is not reserved,
        and OSError if that cannot be made durable."""
        self._put(reservations=_without(self._standing.reservations, keys, "reserved"))

    def expire(self) -> None:
        """Remove reservations that are over; they are without effect already. Raises OSError on a full disk."""
        over = [key for key, reservation in self._standing.reservations.items() if self._is_over(reservation)]
        if over:
            self.unreserve(over)
            log.info("the reservation of %s is over", ", ".join(over))

    def standing_keys(self) -> list[str]:
        """Return the devices that are drained or reserved, whether they respond or not."""
        return [key for key in {**self._standing.drains, **self._standing.reservations} if key != ALL]

    def _put(self, **changes: Any) -> None:
        standing = dataclasses.replace(self._standing, **changes)
        durable.write_json(self._path, dataclasses.asdict(standing))
        self._standing = standing


def _names(device: Device) -> list[str]:  # in device.hours_of, the most specific first
    index = [str(device.index)] if device.index is not None else []
    return [*([device.uuid] if device.uuid else []), *index, *([device.kind] if not device.uuid else [])]


def _without(standing: Mapping[str, Any], keys: Iterable[str], what: str) -> dict[str, Any]:
    """Return drains or reservations without those of some devices. Raises UsageError for a device that has none."""
    left = dict(standing)
    for key in keys:
        if key == ALL:
            left.clear()
        elif left.pop(key, None) is None:
            # After damage, only all of them can be undrained: which ones were drained is not known.
            raise UsageError(f"{key} is not {what}", hint="honectl undrain all" if ALL in left else "honectl list")
    return left
