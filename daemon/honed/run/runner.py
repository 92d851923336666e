"""The daemon's interface to workers: a runner has the devices, starts a worker, asks it to stop, kills it, and reports
when and how it ended, and what an end means that only it can bring about.

    process.py   a child process in its own session
    systemd.py   the unit honed-job@ID.service
    choice.py    chooses one of these, or that of a cluster

All run the worker below the shim (shim.py), which outlives the daemon, holds a lock while the worker lives and records
how it ended. No other module knows how workers are started on this machine.
"""

# ruff: noqa: ARG002 - an answer here needs no arguments
from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from honed.job.ahead import STAGED_VARIABLE, has_passed
from honed.job.event import MAX_TIME
from honed.system import device, durable, untrusted
from honed.system.clock import Moment, boot_id, boot_time
from honed.system.device import Device
from honed.system.error import HonedError
from honed.system.layout import AttemptFiles, JobFiles
from honed.system.personpath import PersonPath

#: The number of workers that the shim starts on this machine; unset for one.
RANKS_VARIABLE = "HONED_NUM_RANKS"
#: Bytes of what a shim tells of its worker.
MAX_RECORD_BYTES = 64 * 1024
#: The number of machines of a cluster that a worker runs on, with so many ranks on each; unset for one.
NODES_VARIABLE = "HONED_NUM_NODES"
#: The time that is left to a worker of a cluster, and its profile, as its runner gets them with its environment.
TIME_LEFT_VARIABLE, PROFILE_VARIABLE = "HONED_TIME_LEFT_SEC", "HONED_PROFILE"


@dataclass(frozen=True)
class Exit:
    """The end of a worker's process. If status and signal are None, it vanished without being observed."""

    status: int | None
    signal: int | None
    max_resident_bytes: int | None = None
    service_result: str | None = (
        None  #: of its unit, as systemd names it: success, signal, watchdog, oom-kill, timeout, …
    )
    was_out_of_memory: bool = False  #: the kernel's out-of-memory killer killed it
    was_asked: bool = False  #: somebody had asked it to stop
    is_machine_going_down: bool = False  #: its unit ended during a shutdown
    ran: bool = True  #: False if its unit failed before the worker's process began
    ended: Moment | None = None  #: the time; None if it was not observed
    problem: HonedError | None = None  #: what the end means to its runner; None: what it means for any process
    paused_sec: float = 0.0  #: seconds in which its shim could not run, which a cluster suspends with it
    is_after_pause: bool = False  #: it ended soon after such a pause
    began: Moment | None = None  #: when it began on a cluster; None elsewhere, and for one that never began


@dataclass(frozen=True)
class Live:
    """A worker that lives, as the machine shows it: no file of its job is needed to know of it."""

    job_id: int
    attempt: tuple[int, int] | None  #: its number, and that of its start; None if that is not known
    device: str | None  #: a GPU's uuid, or cpu; None if that is not known
    is_staged: bool = False  #: it waits, or will, at its gate, and uses no device


class NotNowError(OSError):
    """A worker was not started for a reason unrelated to the job; it can be retried later."""


class UnreachedError(NotNowError):
    """A start ended before a worker began, and nobody saw why: honed or the machine went down."""


class Runner(Protocol):
    """A way to start workers. Where a method has an answer here, it is that of processes on this machine."""

    def devices(self, gpus: list[int] | None) -> list[Device]:
        """Return the devices that jobs may run on: of this machine, those among `gpus`, by default all."""
        return device.probe(gpus)

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        """Start the worker of an attempt. Raises OSError if it cannot start, NotNowError if it may later."""

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:
        """Take over a worker that an earlier daemon started, or was about to; False if it certainly never started.
        `is_staged`: it waits, or will, at its gate. Raises OSError where the machine prevents finding out."""

    def live(self) -> list[Live]:
        """Return all workers of this instance that live, whoever started them. Raises OSError if that is not known."""

    def is_supervised(self, job_id: int) -> bool:
        """Tell whether systemd supervises it: it outlives the daemon and is killed if it hangs or does not stop."""
        return False

    def is_left(self, job_id: int) -> bool:
        """Tell whether a worker may go on while honed is down."""
        return self.is_supervised(job_id)

    def began(self, job_id: int) -> Moment | None:
        """Return when a worker began that a cluster started; None while it waits there, and for every other one."""
        return None

    def is_suspended(self, job_id: int) -> bool:
        """Tell whether a cluster keeps a worker that has begun from running: no time passes for it."""
        return False

    def stop(self, job_id: int) -> None:
        """Ask a worker to write a checkpoint and end."""

    def dump(self, job_id: int) -> None:
        """Have a worker write the stacks of all its threads to its log; this ends it."""

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        """Kill a worker and all processes that it started; `shim_too` if that was tried and did not help."""

    def poll(self, job_id: int) -> Exit | None:
        """Return the end of the worker's process; None while it is alive."""

    def is_machine_going_down(self) -> bool:
        """Tell whether a shutdown of the machine has begun, as far as we know: without systemd, honed is only asked to
        stop."""
        return False


def read_exit_record(attempt: AttemptFiles, start: int) -> dict[str, Any] | None:
    """Return exit.json if it describes this start. Raises OSError where the machine prevents that: a worker is not
    taken for one that left no record."""
    return _read_record(attempt.exit_path, start)


def has_ended(attempt: AttemptFiles, start: int) -> bool:
    """Return True if the end of this start is recorded. While the record cannot be read, it may be alive."""
    try:
        return read_exit_record(attempt, start) is not None
    except OSError:
        return False


def read_lock_record(attempt: AttemptFiles, start: int) -> dict[str, Any]:
    """Return the pids of this start's shim and worker from the lock file; empty if there is no shim yet. Raises OSError
    where the machine prevents that."""
    return _read_record(attempt.lock_path, start) or {}


def exit_of(record: Mapping[str, Any] | None) -> Exit:
    """Convert exit.json to an Exit. Its values are checked, since the worker's user could have written it."""
    record = record or {}

    def number(key: str) -> int | None:
        value = record.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    result = record.get("service_result")
    return Exit(
        status=number("status"),
        signal=number("signal"),
        max_resident_bytes=number("max_resident_bytes"),
        service_result=result if isinstance(result, str) else None,
        was_out_of_memory=record.get("was_out_of_memory") is True,
        was_asked=record.get("was_asked") is True,
        is_machine_going_down=_ended_in_shutdown(record),
        ran=record.get("ran") is not False,
        ended=_ended(record),
        paused_sec=seconds(record, "paused_sec") or 0.0,
        is_after_pause=record.get("is_after_pause") is True,
    )


def _ended(record: Mapping[str, Any]) -> Moment | None:
    wall, monotonic, boot = seconds(record, "ended_at"), seconds(record, "ended_monotonic"), record.get("boot_id")
    if wall is None:
        return None
    if monotonic is None or not isinstance(boot, str):
        return Moment(wall)  # not as the shim writes it
    return Moment(wall, monotonic, boot)


def seconds(record: Mapping[str, Any], key: str) -> float | None:
    """Return a number of seconds of a record that its worker's user could have written; None if it is none."""
    value = record.get(key)
    return value if isinstance(value, int | float) and value is not True and 0 <= value <= MAX_TIME else None


def _ended_in_shutdown(record: Mapping[str, Any]) -> bool:
    """Tell whether a unit ended during a shutdown: systemd reported it, or did not answer and the machine rebooted."""
    state, ended = record.get("system_state"), _ended(record)
    if state != "" or ended is None:
        return bool(state == "stopping")
    if ended.boot_id is not None and boot_id() is not None:
        return ended.boot_id != boot_id()
    return ended.wall < time.time() - boot_time()


def device_of(environment: Mapping[str, str]) -> str:
    """Return the device that a worker's environment gives it, as an entry names it."""
    return environment.get("CUDA_VISIBLE_DEVICES") or "cpu"


def is_staged(job: JobFiles, number: int, start: int, environment: Mapping[str, str]) -> bool:
    """Return True if a start of a worker was ahead of its job's turn, and was not let through its gate."""
    return STAGED_VARIABLE in environment and not has_passed(job, number, start)


def _read_record(path: PersonPath, start: int) -> dict[str, Any] | None:
    try:
        record = json.loads(untrusted.read_plain(path, max_bytes=MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if durable.fault_at_persons(error):
            raise
        return None
    return record if isinstance(record, dict) and record.get("start") == start else None
