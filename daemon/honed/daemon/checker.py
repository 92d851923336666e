"""The daemon's end of one preflight helper (preflight.py). It never blocks, and kills a helper that does not answer in
time. It imports none of the helper's checks, so that the daemon stays small."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job.plan_file import Precision
from honed.run import reply
from honed.run.helper import READY, STAGE_BYTES, Helper, Start, Watch
from honed.run.reply import Answer, Refused
from honed.spec.config import Config
from honed.system import untrusted
from honed.system.device import Device
from honed.system.error import EnvironmentInvalidError, SpecError

log = logging.getLogger(__name__)

#: Bytes; an answer holds a spec and a plan.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
#: Helpers that one job file may crash; after the second it is refused.
MAX_HELPERS_PER_REQUEST = 2
#: Seconds from a helper's start to its first word.
START_TIMEOUT_SEC = 120.0
#: Seconds between looks at a helper that is starting.
LOOK_SEC = 0.5
#: Seconds before another start after one has failed, doubled each time; and the longest.
FIRST_PAUSE_SEC = 0.2
MAX_PAUSE_SEC = 10.0
#: Errors of reading that are a fault of the job file; any other is the machine's.
_FILE_FAULTS = {errno.ENOENT, errno.EACCES, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO}


@dataclass
class _Request:
    id: int
    spec_path: Path
    config: Config
    rest: dict[str, Any]
    is_sent: bool = False
    deadline: float = 0.0  #: by the client's clock, set when the request is sent
    num_helpers: int = 0  #: helpers that it was sent to

    @property
    def timeout_sec(self) -> float:
        return self.config.spool.preflight_timeout_sec

    def line(self) -> bytes:
        """Return the request's line, with the job file's content: the helper may not be able to read the file."""
        data = untrusted.read_plain(self.spec_path, max_bytes=self.config.spool.max_spec_bytes, num_names=1)
        spec = {"spec_name": self.spec_path.name, "spec": base64.b64encode(data).decode("ascii")}
        request = {"id": self.id, **spec, "config": self.config.model_dump(mode="json"), **self.rest}
        return json.dumps(request).encode() + b"\n"


class Checker:
    """Hands requests to a helper, one at a time and in order, and never blocks.

    `helper_changed` is called with the old and the new descriptor to watch for reading (None: there is none), so that
    the caller's selector can follow: the helper is started with the first request, and again after a death. While none
    can be started, requests wait, and `fault` says why. `who` names the user in log lines.
    """

    def __init__(
        self,
        start: Start,
        helper_changed: Watch = lambda _old, _new: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        who: str = "",
    ) -> None:
        self._start = start
        self._helper_changed = helper_changed
        self._clock = clock
        self._who = who
        self._stage_file = os.fdopen(os.memfd_create("honed-stage"), "r+b", buffering=0)
        self._waiting: deque[_Request] = deque()
        self._current: _Request | None = None
        self._unread: list[Refused] = []  # refusals of job files that could not be read
        self._helper: Helper | None = None
        self._corpses: list[Helper] = []  #: killed; one in an unanswered system call may linger
        self._buffer = bytearray()
        self._num_searched = 0  # bytes of it known to have no line end
        self._is_ready = False
        self._ready_by = 0.0
        self._start_at = -MAX_PAUSE_SEC
        self._pause_sec = FIRST_PAUSE_SEC
        self.may_go_on = True  #: False: the current check is finished, and no other is begun
        self.fault = ""  #: why no helper can be started

    @property
    def deadline(self) -> float | None:
        """Time by which `poll` must be called, by the client's clock; None without one."""
        if self._helper is not None and not self._is_ready:
            return min(self._ready_by, self._clock() + LOOK_SEC)
        if self._current is not None and self._current.is_sent:
            return self._current.deadline
        return self._start_at if self._helper is None and self.is_busy and self._clock() < self._start_at else None

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._waiting or self._unread)

    @property
    def is_between(self) -> bool:
        """True if no helper is working on a request."""
        return self._current is None or not self._current.is_sent

    @property
    def has_helper(self) -> bool:
        return self._helper is not None

    @property
    def is_ready(self) -> bool:
        """True if it has a helper that takes requests."""
        return self._is_ready

    @property
    def wants_helper(self) -> bool:
        """True if a helper has to be started now."""
        has_work = self._current is not None or bool(self._waiting)
        return self._helper is None and has_work and self._clock() >= self._start_at

    def stuck(self) -> set[int]:
        """Return the requests for which no helper can be started."""
        return {request.id for request in self._requests()} if self.fault else set()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with an answer; -1 while there is no helper."""
        return self._helper.fileno() if self._helper is not None else -1

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
        pinned: Precision | None = None,
        uid: int | None = None,
    ) -> None:
        """Submit a job file for a check; `poll` returns the answer. `commit`: the commit that a hub id meant before;
        `dataset_commits`: those of data sets, by key; `pinned`: the precision of the job's earlier plan."""
        rest = {
            "device": device.as_dict() if device else None,
            "jobs": {name: str(path) for name, path in (jobs or {}).items()},
            "commit": commit,
            "dataset_commits": dict(dataset_commits or {}),
            "pinned": pinned.as_dict() if pinned else None,
            "uid": uid,
        }
        self._waiting.append(_Request(job_id, spec_path, config, rest))
        self.advance()

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call."""
        self._corpses = [corpse for corpse in self._corpses if not corpse.is_gone()]
        answers: list[Answer] = []
        for line, is_over in iter(self._read_line, None):
            answers += self._revive() if is_over else self._take(line)
        now = self._clock()
        if self._helper is not None and not self._is_ready and now >= self._ready_by:
            self._fail_start(f"it was not ready within {START_TIMEOUT_SEC:g} s")
        if self._current is not None and self._current.is_sent and now >= self._current.deadline:
            answers.append(self._give_up(self._current))
        self.advance()
        unread, self._unread = self._unread, []
        return [*answers, *unread]

    def rest(self) -> None:
        """End the idle helper; requests wait."""
        self._drop_helper()

    def close(self) -> None:
        """End the helper for good, whatever it is doing."""
        self._drop_helper()
        self._stage_file.close()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(corpse.is_gone() for corpse in self._corpses):
            time.sleep(0.005)

    def _requests(self) -> list[_Request]:
        return [*([self._current] if self._current is not None else ()), *self._waiting]

    # -- the helper ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Begin the next request, if that is possible now."""
        while self.may_go_on and self.is_between:
            if self._current is None and not self._waiting:
                return
            self._current = self._current or self._waiting.popleft()
            if self.wants_helper:
                self._start_helper()
            if self._helper is None or not self._is_ready:
                return
            self._send(self._current, self._helper)

    def _send(self, request: _Request, helper: Helper) -> None:
        """Send a request to the helper. If the helper is already dead, the next read detects it."""
        try:
            line = request.line()
        except OSError as error:
            if error.errno not in _FILE_FAULTS:  # e.g. no free descriptor
                self._fail_start(str(error))
                return
            fault = SpecError(f"{request.spec_path.name} cannot be read: {error.strerror}", hint="drop it again")
            self._unread.append(Refused(request.id, fault))
            self._current = None
            return
        request.is_sent = True
        request.num_helpers += 1
        request.deadline = self._clock() + request.timeout_sec
        self._stage_file.truncate(0)
        helper.write(line)

    def _start_helper(self) -> None:
        self._stage_file.truncate(0)
        try:
            self._helper = self._start(self._stage_file.fileno(), self._helper_changed)
        except OSError as error:  # no process or no descriptor available, or systemd does not start it
            self._fail_start(str(error))
        else:
            self._ready_by = self._clock() + START_TIMEOUT_SEC

    def _fail_start(self, why: str) -> None:
        """Schedule another start of the helper. Requests wait, and the failure does not count against them."""
        self._drop_helper()
        self._start_at = self._clock() + self._pause_sec
        self._pause_sec = min(2 * self._pause_sec, MAX_PAUSE_SEC)
        if why != self.fault:
            log.error("the checking process%s cannot be started, and job files wait: %s", self._who, why)
        self.fault = why

    def _become_ready(self) -> None:
        self._is_ready = True
        self._pause_sec = FIRST_PAUSE_SEC
        if self.fault:
            log.info("the checking process%s can be started again", self._who)
        self.fault = ""

    def _drop_helper(self) -> None:
        """Kill the helper without waiting for its end."""
        if self._helper is None:
            return
        helper, self._helper = self._helper, None
        self._is_ready = False
        self._buffer.clear()
        self._num_searched = 0
        helper.end()
        self._corpses.append(helper)

    def _read_line(self) -> tuple[bytes, bool] | None:
        """Return one line and False, or b"" and True if the helper has ended; None if there is nothing to read now."""
        while self._helper is not None:
            end = self._buffer.find(b"\n", self._num_searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._num_searched = 0
                return line, False
            self._num_searched = len(self._buffer)
            try:
                data = self._helper.read()
            except OSError as error:
                self._fail_start(str(error))
                return None
            if data is None:
                return None
            if not data or len(self._buffer) > MAX_ANSWER_BYTES:
                return b"", True
            self._buffer += data
        return None

    def _take(self, line: bytes) -> list[Answer]:
        if not self._is_ready and line == READY:
            self._become_ready()
            self.advance()
            return []
        request = self._current
        answer = reply.read(line, request.id) if request is not None and request.is_sent else None
        if answer is None:
            return self._revive()  # an invalid answer is treated as a crash
        self._current = None
        self.advance()
        return [answer]

    def _revive(self) -> list[Answer]:
        """Send the request to a new helper after the helper's death, or refuse it if it has crashed two."""
        if not self._is_ready:
            self._fail_start("it ended before it was ready, see the journal")
            return []
        self._drop_helper()
        request = self._current
        if request is None or not request.is_sent:
            return []
        if request.num_helpers < MAX_HELPERS_PER_REQUEST:
            request.is_sent = False
            self.advance()
            return []
        self._current = None
        error = EnvironmentInvalidError(
            f"could not be checked: the checking process died {request.num_helpers} times, at: {self._stage()}",
            hint="see the journal; a file that the job names may be damaged",
        )
        return [Refused(request.id, error)]

    def _give_up(self, request: _Request) -> Refused:
        self._drop_helper()
        self._current = None
        error = EnvironmentInvalidError(
            f"could not be checked within {request.timeout_sec:g} s: it was at: {self._stage()}",
            hint="is a file that the job names on a slow or dead file system, or a pipe?",
        )
        return Refused(request.id, error)

    def _stage(self) -> str:
        """Return the helper's last reported stage."""
        told = os.pread(self._stage_file.fileno(), STAGE_BYTES, 0).decode("ascii", errors="replace").strip()
        return told if told.isprintable() and told else "start"
