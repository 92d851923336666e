"""Workers as units: one honed-job@ID.service per job, started over D-Bus, with its own cgroup, limits, watchdog and
journal. They keep running while honed restarts, and systemd ends those that hang or do not stop in time.

    start     start.json, durable ──► StartUnit ──► honed-job-start becomes the shim ──► worker
    end       shim writes exit.json ──► honed-job-end adds systemd's facts ──► poll finds both

A job's end is read from its files; systemd is asked if they record no end, and whether the unit has ended. Without a
bus, the files are believed. A worker that an earlier daemon started as a process is handled by a process runner.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.job.ahead import STAGED_VARIABLE
from honed.run.jobunit import Start, read
from honed.run.process import ProcessRunner
from honed.run.runner import (
    Exit,
    Live,
    NotNowError,
    Runner,
    device_of,
    exit_of,
    has_ended,
    is_staged,
    read_exit_record,
    read_lock_record,
)
from honed.system import dbus, durable
from honed.system.dbus import BusAwayError, BusError, Systemd
from honed.system.layout import AttemptFiles, Layout

log = logging.getLogger(__name__)

#: Seconds between questions to systemd about a unit whose files record no end.
ASK_INTERVAL_SEC = 5.0
#: Exists if systemd is PID 1: sd_booted(3).
BOOTED_PATH = Path("/run/systemd/system")
#: All units of jobs.
UNITS = "honed-job@*.service"
#: A unit of no job; asking to stop it shows whether we may.
PROBE_UNIT = "honed-job@0.service"


@dataclass
class _Unit:
    attempt: AttemptFiles
    start: int
    asked_at: float
    is_doubted: bool = False  #: exit.json records an end, but systemd does not


class SystemdRunner(Runner):
    """Workers as units of the system manager."""

    def __init__(
        self,
        layout: Layout,
        systemd: Systemd,
        *,
        watchdog_sec: Callable[[], float],
        stop_timeout_sec: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._systemd = systemd
        self._watchdog_sec = watchdog_sec
        self._stop_timeout_sec = stop_timeout_sec
        self._clock = clock
        self._units: dict[int, _Unit] = {}
        self._processes = ProcessRunner(layout)

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        job = self._layout.files(job_id)
        if self._goes_on(job_id):  # started by somebody else, or late; it has a start.json of its own
            raise NotNowError(f"{unit_name(job_id)} is already active")
        wanted = Start(number, start, backend, dict(environment), self._watchdog_sec(), self._stop_timeout_sec())
        wanted.write(job)
        self._units[job_id] = _Unit(job.attempt(number), start, self._clock())
        try:
            self._systemd.start_unit(unit_name(job_id))
        except BusAwayError as error:
            if error.was_heard:
                log.warning("job %d: systemd did not report the start of its unit: %s", job_id, error)
                return  # poll finds out
            self._forget(job_id)
            raise NotNowError(f"systemd does not respond: {error}") from error
        except BusError as error:
            self._forget(job_id)
            raise NotNowError(f"systemd did not start {unit_name(job_id)}: {error}") from error

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:
        job = self._layout.files(job_id)
        attempt = job.attempt(number)
        try:
            wanted = read(job)
            is_ours = (wanted.number, wanted.start) == (number, start)
        except (OSError, ValueError) as error:
            if durable.fault_at_persons(error):
                raise  # it may have started
            is_ours = False
        if not is_ours and self._goes_on(job_id):  # start.json is damaged; the end of the unit needs a whole one
            waits = {STAGED_VARIABLE: str(start)} if is_staged else {}
            Start(number, start, "", waits, self._watchdog_sec(), self._stop_timeout_sec()).write(job)
            is_ours = True
        has_run = bool(read_lock_record(attempt, start)) or read_exit_record(attempt, start) is not None
        if not is_ours:
            # It is a process runner's, or we were killed before recording that we would start it.
            return has_run and self._processes.adopt(job_id, number, start)
        if not has_run and self._is_over(job_id):
            return False
        self._units[job_id] = _Unit(attempt, start, asked_at=self._clock() - ASK_INTERVAL_SEC)  # ask at once
        return True

    def live(self) -> list[Live]:
        try:
            units = self._systemd.live_units(UNITS)
        except BusError as error:
            raise OSError(f"systemd does not list {UNITS}: {error}") from error
        names = [unit.partition("@")[2].partition(".")[0] for unit in units if unit != PROBE_UNIT]
        workers = [self._live(int(name)) for name in names if name.isdecimal()]
        return [*(item for item in workers if item is not None), *self._processes.live()]

    def _live(self, job_id: int) -> Live | None:
        """Return the worker of a job's unit; None if it has recorded its end and its unit is ending, too."""
        job = self._layout.files(job_id)
        try:
            wanted = read(job)
        except (OSError, ValueError):
            return Live(job_id, None, None)
        if has_ended(job.attempt(wanted.number), wanted.start) and not self._goes_on(job_id):
            return None
        waits = is_staged(job, wanted.number, wanted.start, wanted.environment)
        return Live(job_id, (wanted.number, wanted.start), device_of(wanted.environment), is_staged=waits)

    def is_supervised(self, job_id: int) -> bool:
        return job_id in self._units

    def is_machine_going_down(self) -> bool:
        try:
            return self._systemd.system_state() == "stopping"
        except BusError:
            return False

    def stop(self, job_id: int) -> None:
        if job_id not in self._units:
            return self._processes.stop(job_id)
        return self._ask(job_id, "stopped", self._systemd.stop_unit)

    def dump(self, job_id: int) -> None:
        if job_id not in self._units:
            return self._processes.dump(job_id)
        return self._ask(job_id, "dumped", lambda unit: self._systemd.kill_unit(unit, "main", signal.SIGABRT))

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        if job_id not in self._units:
            return self._processes.kill(job_id, shim_too=shim_too)
        return self._ask(job_id, "killed", lambda unit: self._systemd.kill_unit(unit, "all", signal.SIGKILL))

    def poll(self, job_id: int) -> Exit | None:
        if job_id not in self._units:
            return self._processes.poll(job_id)
        unit = self._units[job_id]
        record = read_exit_record(unit.attempt, unit.start)
        is_told = record is not None and "service_result" in record
        if is_told:
            # Its worker could have written that itself and still be using the GPU.
            if unit.is_doubted and self._clock() - unit.asked_at < ASK_INTERVAL_SEC:
                return None
            unit.asked_at = self._clock()
            if self._goes_on(job_id):
                if not unit.is_doubted:
                    log.warning("job %d: its worker reported its end, but its unit is still active", job_id)
                unit.is_doubted = True
                return None
        else:
            # The shim's record alone is not enough yet: systemd's facts follow a moment later, unless they cannot be
            # written.
            if self._clock() - unit.asked_at < ASK_INTERVAL_SEC:
                return None
            unit.asked_at = self._clock()
            if not self._is_over(job_id):
                return None
            record = read_exit_record(unit.attempt, unit.start)  # written between the two reads
        if record is None:
            ended = Exit(None, None, ran=bool(read_lock_record(unit.attempt, unit.start)))
        else:
            ended = exit_of(record)
        self._forget(job_id)
        return ended

    def _goes_on(self, job_id: int) -> bool:
        """Tell whether a job's unit is alive. While ExecStopPost= records the end, it is deactivating."""
        try:
            state = self._systemd.unit_state(unit_name(job_id))
        except BusError:
            return False
        return state is not None and state.active in {"active", "activating", "reloading"}

    def _is_over(self, job_id: int) -> bool:
        try:
            state = self._systemd.unit_state(unit_name(job_id))
        except BusError as error:
            log.warning("job %d: systemd did not report the state of its unit: %s", job_id, error)
            return False
        return state is None or state.is_over

    def _ask(self, job_id: int, what: str, call: Callable[[str], None]) -> None:
        try:
            call(unit_name(job_id))
        except BusError as error:
            if error.name != dbus.NO_SUCH_UNIT:  # it has ended by itself
                log.error("job %d: its unit cannot be %s: %s", job_id, what, error)  # noqa: TRY400

    def _forget(self, job_id: int) -> None:
        del self._units[job_id]


def unit_name(job_id: int) -> str:
    return f"honed-job@{job_id}.service"


def why_not(layout: Layout, systemd: Systemd) -> str | None:
    """Return why workers cannot be units here; None if they can. Asks systemd and polkit; changes nothing."""
    if layout.root != Path("/"):
        return "units belong to the instance at /, but this one uses another root directory"
    if not BOOTED_PATH.is_dir():
        return "the machine was not started by systemd"
    try:
        systemd.stop_unit(
            PROBE_UNIT
        )  # it does not run, so nothing is stopped; but the call needs the template and the permission
    except BusError as error:
        if error.name == dbus.NO_SUCH_UNIT:
            return "the unit honed-job@.service is not installed"
        if error.name in dbus.DENIED:
            return f"polkit does not allow this user to start and stop {unit_name(1)}: {error}"
        return str(error)
    return None
