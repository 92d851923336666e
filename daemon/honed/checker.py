"""The daemon's end of the preflight helper (preflight.py): it never waits, and it kills a helper that does not answer
in time. Imports nothing of what the helper checks with, so that the daemon stays small.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.config import Config
from honed.device import Device
from honed.error import EnvironmentInvalidError
from honed.layout import Layout

log = logging.getLogger(__name__)

#: Bytes; an answer holds a spec and a plan.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
#: Each thread reserves address space, and pyarrow starts one a core: few of them, so that the limit fits any machine.
HELPER_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "2", "ARROW_IO_THREADS": "2"}
#: Bytes of the file in which the helper says what it is at.
STAGE_BYTES = 64
#: Helpers that one job file may cost; after the second it is refused.
MAX_HELPERS_PER_REQUEST = 2


@dataclass
class _Request:
    id: int
    line: bytes
    timeout_sec: float
    deadline: float = 0.0  #: by the client's clock, from when it was sent
    num_helpers: int = 0  #: that it was sent to


class Checker:
    """Hands requests to the helper, one at a time and in order, and never waits for it.

    `helper_changed` is called with the old and the new descriptor to watch for reading (None: there is none), so that
    the caller's selector can follow: the helper is started with the first request, and again after a death.
    """

    def __init__(
        self,
        layout: Layout,
        helper_changed: Callable[[int | None, int | None], None] = lambda _old, _new: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        command: list[str] | None = None,
    ) -> None:
        # What the helper is at is asked for when it dies or takes too long, and else wakes nobody: a file, and no pipe.
        self._stage_file = os.fdopen(os.memfd_create("honed-stage"), "r+b", buffering=0)
        module = [sys.executable, "-P", "-m", "honed.preflight"]
        self._command = command or [*module, "--root", str(layout.root), "--stage-fd", str(self._stage_file.fileno())]
        self._helper_changed = helper_changed
        self._clock = clock
        self._waiting: deque[_Request] = deque()
        self._current: _Request | None = None
        self._helper: subprocess.Popen[bytes] | None = None
        self._corpses: list[subprocess.Popen[bytes]] = []  #: killed; one in an unanswered system call may linger
        self._buffer = b""

    @property
    def deadline(self) -> float | None:
        """When `poll` must be called at the latest, by the client's clock."""
        return self._current.deadline if self._current else None

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def fileno(self) -> int:
        """The descriptor that becomes readable with an answer; -1 while there is no helper."""
        return self._helper.stdout.fileno() if self._helper and self._helper.stdout else -1

    def submit(
        self,
        job_id: int,
        spec_path: Path,
        config: Config,
        device: Device | None = None,
        jobs: Mapping[str, Path] | None = None,
        *,
        commit: str | None = None,
        dataset_commits: Mapping[str, str] | None = None,
        pinned: Mapping[str, Any] | None = None,
        uid: int | None = None,
    ) -> None:
        """Ask for a job file to be checked; `poll` has the answer. `commit`: the one that a hub id meant before;
        `dataset_commits`: those of data sets, by key; `pinned`: the precision of the job's earlier plan."""
        request = {
            "id": job_id,
            "spec_path": str(spec_path),
            "config": config.model_dump(mode="json"),
            "device": device.as_dict() if device else None,
            "jobs": {name: str(path) for name, path in (jobs or {}).items()},
            "commit": commit,
            "dataset_commits": dict(dataset_commits or {}),
            "pinned": dict(pinned) if pinned else None,
            "uid": uid,
        }
        line = json.dumps(request).encode() + b"\n"
        self._waiting.append(_Request(job_id, line, config.spool.preflight_timeout_sec))
        self._send_next()

    def poll(self) -> list[dict[str, Any]]:
        """The answers that have come since the last call, in the helper's own words; see the module's top."""
        self._corpses = [corpse for corpse in self._corpses if corpse.poll() is None]
        answers = []
        for line, is_dead in iter(self._read_line, None):
            answers += self._revive() if is_dead else self._take(line)
        if self._current is not None and self._clock() >= self._current.deadline:
            answers.append(self._give_up(self._current))
        if self._current is not None and self._helper is None:
            self._send(self._current)
        self._send_next()
        return answers

    def close(self) -> None:
        """End the helper, whatever it is at, for good."""
        self._drop_helper()
        self._stage_file.close()
        for corpse in self._corpses:
            with contextlib.suppress(subprocess.TimeoutExpired):
                corpse.wait(timeout=1.0)

    def _send_next(self) -> None:
        while self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._current.deadline = self._clock() + self._current.timeout_sec
            self._send(self._current)

    def _send(self, request: _Request) -> None:
        """A helper that is dead already is found so by the next read."""
        if self._helper is None:
            try:
                self._start_helper()
            except OSError as error:  # no process, no descriptor to be had: the next poll tries again
                log.warning("the checking process cannot be started: %s", error)
                return
        assert self._helper is not None
        assert self._helper.stdin is not None
        request.num_helpers += 1
        self._stage_file.truncate(0)
        with contextlib.suppress(BrokenPipeError):
            self._helper.stdin.write(request.line)

    def _start_helper(self) -> None:
        self._helper = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=[self._stage_file.fileno()],
            env=os.environ | HELPER_ENVIRONMENT,
        )
        assert self._helper.stdout is not None
        os.set_blocking(self._helper.stdout.fileno(), False)
        self._helper_changed(None, self._helper.stdout.fileno())

    def _drop_helper(self) -> None:
        """Kill the helper without waiting for its end."""
        if self._helper is None:
            return
        helper, self._helper, self._buffer = self._helper, None, b""
        assert helper.stdout is not None
        assert helper.stdin is not None
        self._helper_changed(helper.stdout.fileno(), None)
        helper.kill()
        helper.stdin.close()
        helper.stdout.close()
        self._corpses.append(helper)

    def _read_line(self) -> tuple[bytes, bool] | None:
        """One line, or the news that the helper is dead; None where there is no more to read for now."""
        while self._helper is not None:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                return line, False
            data = self._helper.stdout.read(65536) if self._helper.stdout else b""
            if data is None:
                return None
            if not data or len(self._buffer) > MAX_ANSWER_BYTES:
                return b"", True
            self._buffer += data
        return None

    def _take(self, line: bytes) -> list[dict[str, Any]]:
        request = self._current
        try:
            answer = json.loads(line)
            is_ours = request is not None and answer["id"] == request.id
        except (ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours or request is None:
            return self._revive()  # a helper that talks nonsense is none
        self._current = None
        self._send_next()
        return [answer]

    def _revive(self) -> list[dict[str, Any]]:
        """After the helper's death: once more with a new one, or the end of a request that has killed two."""
        self._drop_helper()
        if self._current is None:
            return []
        if self._current.num_helpers < MAX_HELPERS_PER_REQUEST:
            self._send(self._current)
            return []
        request, self._current = self._current, None
        error = EnvironmentInvalidError(
            f"could not be checked: the checking process died {request.num_helpers} times, at: {self._stage()}",
            hint="see the journal; a file that the job names may be damaged",
        )
        return [{"id": request.id, "ok": False, "error": error.as_dict()}]

    def _give_up(self, request: _Request) -> dict[str, Any]:
        self._drop_helper()
        self._current = None
        error = EnvironmentInvalidError(
            f"could not be checked within {request.timeout_sec:g} s: it was at: {self._stage()}",
            hint="is a file that the job names on a slow or dead file system, or a pipe?",
        )
        return {"id": request.id, "ok": False, "error": error.as_dict()}

    def _stage(self) -> str:
        """What the helper was at, in its own words."""
        told = os.pread(self._stage_file.fileno(), STAGE_BYTES, 0).decode("ascii", errors="replace").strip()
        return told if told.isprintable() and told else "start"
