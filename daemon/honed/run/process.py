"""Workers as processes of the daemon's user, every one in its own session, behind the shim.

A restarted daemon adopts such workers by the shim's lock and reads their exit from exit.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.run.runner import (
    Exit,
    Live,
    Runner,
    device_of,
    exit_of,
    has_ended,
    is_staged,
    read_exit_record,
    read_lock_record,
)
from honed.system import durable, python, untrusted
from honed.system.layout import AttemptFiles, Layout

log = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("shim.py")
#: Variables that a worker must not inherit: it would speak to systemd in the daemon's name.
DAEMON_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "JOURNAL_STREAM", "INVOCATION_ID", "LISTEN_FDS")
#: Variables meant for honed-send and for fetches only.
SECRET_VARIABLES = ("JOB_TOKEN", "CREDENTIALS_DIRECTORY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass
class _Child:
    layout: AttemptFiles
    start: int
    process: subprocess.Popen[bytes] | None  #: None for an adopted one


class ProcessRunner(Runner):
    """Workers as processes of the daemon's user, every one in its own session."""

    def __init__(
        self, layout: Layout, *, command: Sequence[str] | None = None, popen: Callable[..., Any] = subprocess.Popen
    ) -> None:
        """Create a runner. `popen` replaces subprocess.Popen: tests start processes with libraries preloaded."""
        self._layout = layout
        self._popen = popen
        self._command = list(command or python.module("honed.worker"))
        self._children: dict[int, _Child] = {}

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        attempt = self._layout.files(job_id).attempt(number)
        untrusted.make_dirs(attempt.dir)
        with os.fdopen(untrusted.open_plain(attempt.log_path, flags=untrusted.LOG_FLAGS), "ab") as log_file:
            process = self._popen(
                python.bare(SHIM, str(attempt.dir), str(start), *self._worker(attempt, backend)),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                cwd=self._layout.files(job_id).place,
                env={**inherited(), **environment},
                start_new_session=True,
                restore_signals=True,
            )
        self._children[job_id] = _Child(attempt, start, process)

    def _worker(self, attempt: AttemptFiles, backend: str) -> list[str]:
        return [*self._command, str(attempt.dir.root), attempt.dir.name, "--backend", backend]

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:  # noqa: ARG002
        attempt = self._layout.files(job_id).attempt(number)
        untrusted.make_dirs(attempt.dir)
        child = _Child(attempt, start, None)
        if _has_not_begun(child):
            return False
        self._children[job_id] = child
        return True

    def live(self) -> list[Live]:
        workers = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # no process, gone, or no shim
                if path.stat().st_uid == os.geteuid():  # whoever likes can name a process like a shim
                    workers.append(self._live(path))
        # A shim that has just forked is there twice, until the worker's program begins.
        return [item for item in dict.fromkeys(workers) if item is not None]

    def _live(self, process_dir: Path) -> Live | None:
        """Return the worker of a shim's process; None if that is another instance's, or has recorded its end. Raises
        ValueError or IndexError for other processes."""
        command = _words(process_dir / "cmdline")
        at = [word.endswith("/shim.py") for word in command].index(True) + 1
        at += command[at] == "--relay"
        attempt_dir, start = Path(command[at]), int(command[at + 1])
        job_id, number = int(attempt_dir.parents[1].name), int(attempt_dir.name)
        files = self._layout.files(job_id)
        attempt = files.attempt(number)
        if str(attempt.dir) != str(attempt_dir):
            return None
        if has_ended(attempt, start):
            return None
        variables = dict(word.split("=", 1) for word in _words(process_dir / "environ") if "=" in word)
        waits = is_staged(files, number, start, variables)
        return Live(job_id, (number, start), device_of(variables), is_staged=waits)

    def stop(self, job_id: int) -> None:
        pid = self._shim_pid(self._children[job_id])
        if pid is not None:
            _signal(pid, signal.SIGTERM)

    def dump(self, job_id: int) -> None:
        for pid in self._worker_pids(self._children[job_id]):
            _signal(pid, signal.SIGABRT)  # faulthandler writes every thread's stack to worker.log
            _signal(pid, signal.SIGCONT)  # a stopped process would not handle it

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        child = self._children[job_id]
        shim_pid = self._shim_pid(child)
        if shim_pid is None:
            return
        # The worker first, so that the shim can still record its end. Processes that the worker started share the
        # session.
        doomed = _session(shim_pid) | set(self._worker_pids(child))
        for pid in doomed if shim_too else doomed - {shim_pid}:
            _signal(pid, signal.SIGKILL)

    def poll(self, job_id: int) -> Exit | None:
        child = self._children[job_id]
        if child.process is not None:
            if child.process.poll() is None:
                return None
        elif not _settle(child):
            return None
        record = read_exit_record(child.layout, child.start)
        del self._children[job_id]
        return exit_of(record)

    def _worker_pids(self, child: _Child) -> list[int]:
        record = read_lock_record(child.layout, child.start)
        pids = record.get("worker_pids")
        valid = map(_process, pids if isinstance(pids, list) else [record.get("worker_pid")])
        return [pid for pid in valid if pid is not None]

    def _shim_pid(self, child: _Child) -> int | None:
        if child.process is not None:
            return child.process.pid if child.process.poll() is None else None
        # The lock is held, so the process named in the record is alive and its pid was not reused.
        return None if _settle(child) else _process(read_lock_record(child.layout, child.start).get("shim_pid"))


def _settle(child: _Child) -> bool:
    """Tell whether an adopted worker has ended. If no exit is recorded, record one: no late shim may start it."""
    try:
        fd = untrusted.open_plain(child.layout.lock_path, flags=os.O_CREAT | os.O_RDWR)
    except FileNotFoundError:
        return True  # its job was removed, and whatever it had to record
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if read_exit_record(child.layout, child.start) is None:
            record = {"start": child.start, "status": None, "signal": None}
            untrusted.write_plain(child.layout.exit_path, durable.as_json(record))
        return True
    finally:
        os.close(fd)


def _has_not_begun(child: _Child) -> bool:
    """Return True if no worker has begun for a start, and none will: an end is recorded, by which a late shim ends.
    Raises OSError if the machine prevents finding out."""
    try:
        if not _settle(child) or read_lock_record(child.layout, child.start):
            return False
    except OSError as error:
        # Its worker has put something there, and its end tells more. A fault of the machine tells nothing.
        if durable.fault_at_persons(error):
            raise
        return False
    ended = exit_of(read_exit_record(child.layout, child.start))
    return ended.status is None and ended.signal is None


def _words(path: Path) -> list[str]:
    """Return the strings of a file in /proc that ends every one with a zero byte."""
    return path.read_bytes().decode(errors="surrogateescape").split("\0")


def _process(pid: Any) -> int | None:
    """Return a pid from a worker's file if it is valid: -1 would mean all that we may signal; 0 and 1 are ours."""
    return pid if type(pid) is int and 1 < pid < 2**31 else None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        # It was started as a unit, by a honed that could; this one runs workers as processes.
        log.warning("process %d belongs to another user: stop its unit with systemctl stop honed-job@ID", pid)


def inherited() -> dict[str, str]:
    """Return our environment without what is the daemon's own."""
    return {key: value for key, value in os.environ.items() if key not in (*DAEMON_VARIABLES, *SECRET_VARIABLES)}


def _session(session_id: int) -> set[int]:
    """Return the pids of a session (Linux), from /proc/<pid>/stat: `pid (comm) state ppid pgrp session …`."""
    pids = set()
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == session_id:
                pids.add(int(path.name))
    return pids
