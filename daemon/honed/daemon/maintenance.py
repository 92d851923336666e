"""The verbs that close devices: drain and undrain, reserve and unreserve."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from honed.daemon.availability import ALL
from honed.daemon.placement import Placement
from honed.daemon.verb import Right, verb
from honed.job import query
from honed.job.event import MAX_TIME
from honed.job.query import Asker
from honed.job.shape import DeviceRow
from honed.job.spool import Spool
from honed.system import access, durable
from honed.system.control import Request
from honed.system.error import EnvironmentInvalidError, UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Maintenance:
    """Applies the verbs that close devices, and open them again. Each answers with the devices."""

    spool: Spool
    placement: Placement

    @verb("drain", right=Right.ADMINISTRATOR, wakes=True)
    def drain(self, request: Request, _asker: Asker) -> list[DeviceRow]:
        """Start no further job on a device; with `now`, also preempt the jobs that run there."""
        devices = self.placement.find(request.reference)
        reason = str(request.arguments.get("reason") or "").strip()
        with _durably():
            self.placement.availability.drain(devices, reason, is_now=bool(request.arguments.get("now")))
        labels = ", ".join(device.label for device in devices)
        log.info("drained by user %d: %s%s", request.uid, labels, f": {reason}" if reason else "")
        return self._rows({device.key for device in devices})

    @verb("reserve", right=Right.ADMINISTRATOR, wakes=True)
    def reserve(self, request: Request, asker: Asker) -> list[DeviceRow]:
        """Reserve a device for one user or one job, for a time or until somebody ends it."""
        devices = self.placement.find(request.reference)
        whom = self._whom(request, asker)
        until, for_sec = (_seconds(request, key) for key in ("until", "for_sec"))
        with _durably():
            self.placement.availability.reserve(devices, until=until, for_sec=for_sec, **whom)
        labels = ", ".join(device.label for device in devices)
        log.info("reserved by user %d: %s", request.uid, labels)
        return self._rows({device.key for device in devices})

    def _whom(self, request: Request, asker: Asker) -> dict[str, object]:
        """Return the user or the job that a reservation is for. Raises UsageError for one that does not exist."""
        owner, job_name = (request.arguments.get(key) for key in ("owner", "job"))
        if (owner is None) == (job_name is None):
            raise UsageError("a reservation is for a user or for a job", hint="give --owner NAME or --job ID")
        if owner is not None:
            person = access.person(int(owner) if str(owner).isdecimal() else str(owner))
            if person is None:
                raise UsageError(f"no user {str(owner)!r}", hint="a user's name or number")
            return {"uid": person.uid, "user": person.name.removeprefix("user ")}
        job = query.find(self.spool, str(job_name), asker)
        if job.state.is_final:
            raise UsageError(f"job {job.id} ({job.name}) is {job.state}", hint="reserve a device for an unfinished job")
        return {"job": job.id}

    @verb("undrain", right=Right.ADMINISTRATOR, wakes=True)
    def undrain(self, request: Request, _asker: Asker) -> list[DeviceRow]:
        """Let jobs start on a device again."""
        keys = self._keys(request)
        with _durably():
            self.placement.availability.undrain(keys)
        log.info("undrained by user %d: %s", request.uid, ", ".join(keys))
        return self._rows(set(keys))

    @verb("unreserve", right=Right.ADMINISTRATOR, wakes=True)
    def unreserve(self, request: Request, _asker: Asker) -> list[DeviceRow]:
        """End the reservation of a device."""
        keys = self._keys(request)
        with _durably():
            self.placement.availability.unreserve(keys)
        log.info("unreserved by user %d: %s", request.uid, ", ".join(keys))
        return self._rows(set(keys))

    def _keys(self, request: Request) -> list[str]:
        if request.reference == ALL:
            return [ALL]
        return [device.key for device in self.placement.find(request.reference)]

    def _rows(self, keys: set[str]) -> list[DeviceRow]:
        rows = self.placement.availability.rows(self.placement.all())
        return [row for row in rows if row["device"] in keys or ALL in keys]


def _seconds(request: Request, key: str) -> float | None:
    value = request.arguments.get(key)
    if value is not None and not (isinstance(value, int | float) and 0 <= value <= MAX_TIME):
        raise UsageError(f"{key} must be a number of seconds")
    return value


@contextlib.contextmanager
def _durably() -> Iterator[None]:
    """Turn a fault of the machine, such as a full disk, into an error for the asker: nothing has changed then."""
    try:
        yield
    except OSError as error:
        if (fault := durable.machine_fault(error)) is None:
            raise
        raise EnvironmentInvalidError(f"nothing was changed: {fault}", hint="honectl doctor") from error
