"""The daemon's side of a worker: starts it, asks it to stop, kills it, and tells when and how it ended.

One runner is here, `process`: a child in a session of its own, started through the shim (shim.py), which outlives the
daemon. A daemon that comes back adopts such workers by the shim's lock and reads their exit from exit.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from honed import durable
from honed.layout import AttemptLayout, Layout

#: What a worker must not inherit: it would speak to systemd in the daemon's name.
DAEMON_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "JOURNAL_STREAM", "INVOCATION_ID", "LISTEN_FDS")


@dataclass(frozen=True)
class Exit:
    """How a worker's process ended. Both None: it vanished, and nobody saw how."""

    status: int | None
    signal: int | None
    max_resident_bytes: int | None = None


class Runner(Protocol):
    """What knows how workers are started on this machine; nothing else does."""

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        """Start the worker of an attempt. Raises OSError where it cannot be started."""

    def adopt(self, job_id: int, number: int, start: int) -> None:
        """Take over a worker that an earlier daemon started, or meant to."""

    def stop(self, job_id: int) -> None:
        """Ask a worker for a checkpoint and its end."""

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        """End a worker at once, and all that it started; `shim_too` where that was tried and did not help."""

    def poll(self, job_id: int) -> Exit | None:
        """How it ended; None while it lives."""

    def pid(self, job_id: int) -> int | None:
        """The worker's own process, while it lives."""


@dataclass
class _Child:
    layout: AttemptLayout
    start: int
    process: subprocess.Popen[bytes] | None  #: None for an adopted one


class ProcessRunner:
    """Workers as processes of the daemon's user, each in its own session."""

    name = "process"

    def __init__(self, layout: Layout, *, command: Sequence[str] | None = None) -> None:
        self._layout = layout
        self._command = list(command or [sys.executable, "-m", "honed.worker"])
        self._children: dict[int, _Child] = {}

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        attempt = self._layout.job(job_id).attempt(number)
        durable.make_dir(attempt.dir)
        shim = Path(__file__).with_name("shim.py")
        worker = [*self._command, str(self._layout.job(job_id).dir), str(number), "--backend", backend]
        with attempt.log_path.open("ab") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(shim), str(attempt.dir), str(start), *worker],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                cwd=self._layout.job(job_id).dir,
                env={**_inherited(), **environment},
                start_new_session=True,
                restore_signals=True,
            )
        self._children[job_id] = _Child(attempt, start, process)

    def adopt(self, job_id: int, number: int, start: int) -> None:
        attempt = self._layout.job(job_id).attempt(number)
        durable.make_dir(attempt.dir)
        self._children[job_id] = _Child(attempt, start, None)

    def stop(self, job_id: int) -> None:
        self._signal_shim(job_id, signal.SIGTERM)

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        child = self._children[job_id]
        shim_pid = self._shim_pid(child)
        if shim_pid is None:
            return
        worker_pid = self._lock_record(child).get("worker_pid")
        # The worker first: the shim then still writes down how it ended. What the worker started shares the session.
        doomed = _session(shim_pid) | ({worker_pid} if worker_pid else set())
        for pid in doomed if shim_too else doomed - {shim_pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def poll(self, job_id: int) -> Exit | None:
        child = self._children[job_id]
        if child.process is not None:
            if child.process.poll() is None:
                return None
        elif not self._settle(child):
            return None
        del self._children[job_id]
        return _read_exit(child)

    def pid(self, job_id: int) -> int | None:
        pid = self._lock_record(self._children[job_id]).get("worker_pid")
        return pid if isinstance(pid, int) else None

    def _settle(self, child: _Child) -> bool:
        """Whether an adopted worker has ended. If nobody wrote down how, we do: then no late shim starts it."""
        fd = os.open(child.layout.dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            if _read_exit_record(child) is None:
                record = {"start": child.start, "status": None, "signal": None}
                durable.write_json(child.layout.exit_path, record)
            return True
        finally:
            os.close(fd)

    def _signal_shim(self, job_id: int, number: signal.Signals) -> None:
        pid = self._shim_pid(self._children[job_id])
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _shim_pid(self, child: _Child) -> int | None:
        if child.process is not None:
            return child.process.pid if child.process.poll() is None else None
        # The lock is held, so the process that the record names lives and its number is its own.
        pid = None if self._settle(child) else self._lock_record(child).get("shim_pid")
        return pid if isinstance(pid, int) else None

    @staticmethod
    def _lock_record(child: _Child) -> dict[str, Any]:
        try:
            record = json.loads((child.layout.dir / "lock").read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and record.get("start") == child.start else {}


def _inherited() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in DAEMON_VARIABLES}


def _read_exit_record(child: _Child) -> dict[str, Any] | None:
    try:
        record = json.loads(child.layout.exit_path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("start") == child.start else None


def _read_exit(child: _Child) -> Exit:
    record = _read_exit_record(child) or {}
    return Exit(record.get("status"), record.get("signal"), record.get("max_resident_bytes"))


def _session(session_id: int) -> set[int]:
    """The processes of a session (Linux), from /proc/<pid>/stat: `pid (comm) state ppid pgrp session …`."""
    found = set()
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == session_id:
                found.add(int(path.name))
    return found
