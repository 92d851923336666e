"""The daemon's side of a worker: what any runner can do. A runner starts a worker, asks it to stop, kills it, and tells
when and how it ended.

    process_runner.py   a child in a session of its own
    systemd_runner.py   the unit honed-job@ID.service

Both put the shim (shim.py) between, which outlives the daemon, holds a lock while the worker lives and writes down how
it ended. Nothing else knows how workers are started on this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from honed.job.event import MAX_TIME
from honed.system import untrusted
from honed.system.clock import Moment, boot_id, boot_time
from honed.system.layout import AttemptLayout


@dataclass(frozen=True)
class Exit:
    """The end of a worker's process. Status and signal both None: it vanished, and nobody saw how."""

    status: int | None
    signal: int | None
    max_resident_bytes: int | None = None
    service_result: str | None = (
        None  #: of its unit, in systemd's words: success, signal, watchdog, oom-kill, timeout, …
    )
    was_out_of_memory: bool = False  #: the kernel's out-of-memory killer struck as it died
    was_asked: bool = False  #: it had been asked to stop, by whomever
    is_machine_going_down: bool = False  #: its unit ended in a shutdown
    ran: bool = True  #: False where its unit failed before the worker's own process began
    ended: Moment | None = None  #: when; None where nobody saw it


class NotNowError(OSError):
    """A worker was not started, for a reason that is none of the job's; it can be tried later."""


class Runner(Protocol):
    """What knows how workers are started on this machine; nothing else does."""

    name: str

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        """Start the worker of an attempt. Raises OSError where it cannot be started, NotNowError where only not now."""

    def adopt(self, job_id: int, number: int, start: int) -> bool:
        """Take over a worker that an earlier daemon started, or meant to; False where it surely was never started."""

    def is_supervised(self, job_id: int) -> bool:
        """Whether systemd looks after it: it lives on without us, and is ended where it hangs or does not stop."""

    def stop(self, job_id: int) -> None:
        """Ask a worker for a checkpoint and its end."""

    def dump(self, job_id: int) -> None:
        """Have every thread's stack written to a worker's log; it ends of it."""

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        """End a worker at once, and all that it started; `shim_too` where that was tried and did not help."""

    def poll(self, job_id: int) -> Exit | None:
        """The process's end; None while it lives."""

    def is_machine_going_down(self) -> bool:
        """Whether a shutdown has begun, as far as we can tell."""


def read_exit_record(attempt: AttemptLayout, start: int) -> dict[str, Any] | None:
    """exit.json, if it tells of this start."""
    return _read_record(attempt.exit_path, start)


def read_lock_record(attempt: AttemptLayout, start: int) -> dict[str, Any]:
    """Who the shim and the worker of this start are: empty before it has one."""
    return _read_record(attempt.dir / "lock", start) or {}


def exit_of(record: Mapping[str, Any] | None) -> Exit:
    """What exit.json tells, in our words; the worker's own user could have written it, so nothing in it is trusted."""
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
    )


def _ended(record: Mapping[str, Any]) -> Moment | None:
    wall, monotonic, boot = _seconds(record, "ended_at"), _seconds(record, "ended_monotonic"), record.get("boot_id")
    if wall is None:
        return None
    if monotonic is None or not isinstance(boot, str):
        return Moment(wall)  # an older shim's
    return Moment(wall, monotonic, boot)


def _seconds(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return value if isinstance(value, int | float) and 0 <= value <= MAX_TIME else None


def _ended_in_shutdown(record: Mapping[str, Any]) -> bool:
    """Whether a unit ended as the machine went down: it was told so, or had nobody to ask and this is another boot."""
    state, ended = record.get("system_state"), _ended(record)
    if state != "" or ended is None:
        return bool(state == "stopping")
    if ended.boot_id is not None and boot_id() is not None:
        return ended.boot_id != boot_id()
    return ended.wall < time.time() - boot_time()


def _read_record(path: Path, start: int) -> dict[str, Any] | None:
    try:
        record = json.loads(untrusted.read_plain(path))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("start") == start else None
