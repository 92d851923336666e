"""The time in which honed itself could not run: its processes were frozen or stopped, or its own file system hung.

    loop ── asleep, at most as long as it asked for ── awake: its CPU time passes, or it waits for a disk ── asleep
                                                       └─ much longer than both: a pause

What honed starts shares that fate mostly (`systemctl freeze honed.slice`, a stopped virtual machine, a dead server of
/var/lib), and honed could not look after it. So no deadline comes nearer by a pause. CLOCK_MONOTONIC stops by itself
while the machine is suspended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from honed.system import untrusted
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Seconds. A shorter pause is what a busy machine makes, and moves no deadline.
MIN_PAUSE_SEC = 5.0
#: Seconds between two looks for a pause.
LOOK_SEC = 1.0
#: The pauses that are remembered one by one.
MAX_PAUSES = 1000


def noted_sec(path: PersonPath) -> float:
    """Return the seconds that the shim of a start has noted (run/shim.py): 0 without any."""
    try:
        seconds = float(untrusted.read_plain(path, max_bytes=64))
    except (OSError, ValueError):
        return 0.0
    return seconds if 0.0 <= seconds < math.inf else 0.0


class Lookout:
    """Looks for the pauses of a process that waits for others, e.g. for the network: in a thread of its own, since it
    does not know how long each wait may take. `sleep` takes seconds."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self.paused_sec = 0.0  #: in all; the last one after up to LOOK_SEC

    def start(self) -> None:
        threading.Thread(target=self._run, name="pauses", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.look()

    def look(self) -> None:
        """Sleep, and note by how much it took too long."""
        before = self._clock()
        self._sleep(LOOK_SEC)
        if (pause_sec := self._clock() - before - LOOK_SEC) >= MIN_PAUSE_SEC:
            self.paused_sec += pause_sec


class Pauses:
    """A clock, in monotonic seconds, that stands still during the pauses of the thread that has made it.

    Each call of that thread looks for a pause since its last one, so that no two of its calls have one between them.
    `cpu` is the thread's CPU time in seconds.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._owner = threading.get_ident()
        self._looked = (clock(), cpu())
        self._has_slept = False  # before the first sleep it waits for the disk, to read what there is
        self._asleep_sec = 0.0  # that may have passed since then in a sleep
        self._total_sec = 0.0
        self._each: deque[tuple[float, float]] = deque(maxlen=MAX_PAUSES)  # began, ended

    def __call__(self) -> float:
        now = self._look() if threading.get_ident() == self._owner else self._clock()
        return now - self._total_sec

    @contextlib.contextmanager
    def asleep(self, seconds: float) -> Iterator[None]:
        """Let at most so many seconds pass in the block, which are no pause."""
        self._look()
        self._has_slept, self._asleep_sec = True, max(0.0, seconds)
        try:
            yield
        finally:
            self._look()
            self._asleep_sec = 0.0

    def between(self, since: float, until: float) -> float:
        """Return the seconds of the pauses between two times of CLOCK_MONOTONIC."""
        self()
        return sum(max(0.0, min(until, ended) - max(since, began)) for began, ended in self._each)

    def _look(self) -> float:
        (before, cpu_before), self._looked = self._looked, (self._clock(), self._cpu())
        now, cpu = self._looked
        pause_sec = now - before - (cpu - cpu_before) - self._asleep_sec
        if self._has_slept and pause_sec >= MIN_PAUSE_SEC:
            self._total_sec += pause_sec
            self._each.append((now - pause_sec, now))
            log.warning("honed could not run for %.0f s: its jobs' deadlines are as much later", pause_sec)
        return now
