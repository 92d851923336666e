"""One spare worker, as the daemon sees it: a shim whose worker has no job yet (see shim.py and worker/spare.py).

    made ── its libraries are imported ──► ready ── given a job ──► the shim and the worker of that job's start
      └──────────────────────────────────────┴── the daemon ends, or ends it ──► gone

It exists as long as the daemon holds its socket: a spare outlives no daemon, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.job import row_cache
from honed.system import python, untrusted
from honed.system.layout import AttemptFiles

#: Variables in which a job's environment may differ from that of its spare: nothing reads them before there is a job.
#: Whether there is a GPU must be the same.
OF_THE_JOB = frozenset(
    {
        "HONED_JOB",
        "HONED_MIN_STALL_SEC",
        "HONED_STOP_TIMEOUT_SEC",
        "HONED_TIME_LEFT_SEC",
        "CUDA_VISIBLE_DEVICES",
        row_cache.VARIABLE,
    }
)
#: Bytes of its output that are kept.
MAX_OUTPUT_BYTES = 64 * 1024


class Spare:
    """A spare worker. Its process and its socket are the daemon's own until it is given a job."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: socket.socket, output_fd: int, environment: Mapping[str, str]
    ) -> None:
        self.process = process
        self._link = link
        self._output_fd = output_fd
        self._environment = dict(environment)
        self._is_ready = False

    @classmethod
    def make(
        cls, shim: Path, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], popen: Any
    ) -> Spare:
        """Start a spare. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output_fd = os.memfd_create("honed-spare", os.MFD_CLOEXEC)
        try:
            process = popen(
                python.bare(shim, "--spare", *command),
                stdin=theirs,
                stdout=output_fd,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=dict(environment),
                start_new_session=True,
                restore_signals=True,
            )
        except BaseException:
            ours.close()
            os.close(output_fd)
            raise
        finally:
            theirs.close()
        return cls(process, ours, output_fd, environment)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """True once its libraries are imported, and it waits for a job."""
        with contextlib.suppress(OSError):  # it has said nothing yet, or was ended
            self._is_ready = self._is_ready or self._link.recv(64, socket.MSG_DONTWAIT) == b"ready"
        return self._is_ready and self.is_alive

    @property
    def output(self) -> bytes:
        """The first part of what it has written."""
        return os.pread(self._output_fd, MAX_OUTPUT_BYTES, 0) if self._output_fd >= 0 else b""

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Return True if a worker with this environment would have imported as the spare did."""
        names = self._environment.keys() | environment.keys()
        differ = {name for name in names if self._environment.get(name) != environment.get(name)}
        has_gpu = [bool(each.get("CUDA_VISIBLE_DEVICES")) for each in (self._environment, environment)]
        return differ <= OF_THE_JOB and has_gpu[0] == has_gpu[1]

    def give(
        self, attempt: AttemptFiles, start: int, *, cwd: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> bool:
        """Give it a job. Returns False if that was not possible: then it is ended, and nothing of the job was touched
        but its log."""
        job = {
            "attempt_dir": str(attempt.dir),
            "start": start,
            "dir": str(cwd),
            "command": list(command),
            "environment": dict(environment),
        }
        try:
            with os.fdopen(untrusted.open_plain(attempt.log_path, flags=untrusted.LOG_FLAGS), "ab") as log_file:
                log_file.write(self.output)
            self._link.send(json.dumps(job).encode(), socket.MSG_DONTWAIT)
        except OSError:  # it has just ended, the message is too long, or the disk is full
            self.end()
            return False
        self._close()
        return True

    def end(self) -> None:
        """End it, and whatever it has started. Its process is to be waited for."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        self._link.close()
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1
