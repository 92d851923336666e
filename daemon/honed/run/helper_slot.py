"""A slot for one preflight helper: it is started when work waits, and started again after its death.

    empty ── start ──► starting ── its first line, READY ──► ready ──► empty: it has died, or is dropped
      ▲                   │
      └──── a pause ◄─────┴── it has died, or reported nothing in time: `fault` says why until one is ready

Nothing here blocks: a helper is killed without waiting for its end, and reaped later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable

from honed.run.helper import READY, STAGE_BYTES, Helper, Start, Watch
from honed.system.backoff import Backoff

log = logging.getLogger(__name__)

#: Bytes; an answer holds a spec and a plan.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
#: Seconds from a helper's start to its first word.
START_TIMEOUT_SEC = 120.0
#: Seconds between looks at a helper that is starting.
LOOK_SEC = 0.5
#: Seconds before another start after one has failed, doubled each time; and the longest.
FIRST_PAUSE_SEC = 0.2
MAX_PAUSE_SEC = 10.0


class HelperSlot:
    """Holds at most one helper, and logs once when none can be started.

    `helper_changed` is called with the old and the new descriptor to watch for reading (None: there is none), and
    `became_ready` when a helper takes requests. `who` names the user in log lines.
    """

    def __init__(
        self,
        start: Start,
        helper_changed: Watch,
        became_ready: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        who: str = "",
    ) -> None:
        self._start = start
        self._helper_changed = helper_changed
        self._became_ready = became_ready
        self._clock = clock
        self._who = who
        self._stage_file = os.fdopen(os.memfd_create("honed-stage"), "r+b", buffering=0)
        self._helper: Helper | None = None
        self._corpses: list[Helper] = []  #: killed; one in an unanswered system call may linger
        self._output = _Lines()
        self._is_ready = False
        self._ready_by = 0.0
        self._start_at = -MAX_PAUSE_SEC
        self._backoff = Backoff(FIRST_PAUSE_SEC, MAX_PAUSE_SEC)
        self._fault = ""

    @property
    def fault(self) -> str:
        """Reason why no helper can be started; empty if one can."""
        return self._fault

    @property
    def is_empty(self) -> bool:
        return self._helper is None

    @property
    def is_ready(self) -> bool:
        """True if it has a helper that takes requests."""
        return self._is_ready

    @property
    def may_start(self) -> bool:
        """True if it is empty, and no pause lasts."""
        return self._helper is None and self._clock() >= self._start_at

    def deadline(self, *, is_wanted: bool) -> float | None:
        """Return the time by which `read_line` and `tend` must be called, or `start` if a helper is wanted."""
        if self._helper is not None:
            return min(self._ready_by, self._clock() + LOOK_SEC) if not self._is_ready else None
        return self._start_at if is_wanted and self._clock() < self._start_at else None

    def start(self) -> None:
        """Start a helper."""
        self._forget_stage()
        try:
            self._helper = self._start(self._stage_file.fileno(), self._helper_changed)
        except OSError as error:  # no process or no descriptor available, or systemd does not start it
            self.fail(str(error))
        else:
            self._ready_by = self._clock() + START_TIMEOUT_SEC

    def send(self, line: bytes) -> None:
        """Send a request to the ready helper. If it is already dead, the next read detects it."""
        assert self._helper is not None
        self._forget_stage()
        self._helper.write(line)

    def read_line(self) -> bytes | None:
        """Return the next line of a ready helper, empty if it has ended; None if there is nothing to read now."""
        while self._helper is not None:
            line = self._output.take()
            if line is None:
                try:
                    data = self._helper.read()
                except OSError as error:
                    self.fail(str(error))
                    return None
                if data is None:
                    return None
                if data and len(self._output) <= MAX_ANSWER_BYTES:
                    self._output.add(data)
                    continue
                line = b""
            if self._is_ready:
                return line
            if line == READY:
                self._become_ready()
            else:
                self.fail("it ended before it was ready; see the journal")
        return None

    def tend(self) -> None:
        """Reap killed helpers, and give up one that has not become ready in time."""
        self._corpses = [corpse for corpse in self._corpses if not corpse.is_gone()]
        if self._helper is not None and not self._is_ready and self._clock() >= self._ready_by:
            self.fail(f"it was not ready within {START_TIMEOUT_SEC:g} s")

    def fail(self, why: str) -> None:
        """Empty the slot, and have the next helper started after a pause."""
        self.drop()
        self._start_at = self._clock() + self._backoff.next_sec()
        if why != self._fault:
            log.error("the checking process%s cannot be started, so job files wait: %s", self._who, why)
        self._fault = why

    def drop(self) -> None:
        """Kill the helper without waiting for its end."""
        if self._helper is None:
            return
        helper, self._helper = self._helper, None
        self._is_ready = False
        self._output = _Lines()
        helper.end()
        self._corpses.append(helper)

    def close(self) -> None:
        """End the helper for good, whatever it is doing."""
        self.drop()
        self._stage_file.close()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(corpse.is_gone() for corpse in self._corpses):
            time.sleep(0.005)

    def stage(self) -> str:
        """Return the helper's last reported stage."""
        stage = os.pread(self._stage_file.fileno(), STAGE_BYTES, 0).decode("ascii", errors="replace").strip()
        return stage if stage.isprintable() and stage else "start"

    def _forget_stage(self) -> None:
        with contextlib.suppress(OSError):  # of the machine: the last stage is quoted until the next is reported
            self._stage_file.truncate(0)

    def _become_ready(self) -> None:
        self._is_ready = True
        self._backoff.reset()
        if self._fault:
            log.info("the checking process%s can be started again", self._who)
        self._fault = ""
        self._became_ready()


class _Lines:
    """A helper's output, taken apart into lines."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._num_searched = 0  # bytes of it known to have no line end

    def __len__(self) -> int:
        return len(self._buffer)

    def add(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the first whole line, without its end; None if there is none."""
        end = self._buffer.find(b"\n", self._num_searched)
        if end < 0:
            self._num_searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._num_searched = 0
        return line
