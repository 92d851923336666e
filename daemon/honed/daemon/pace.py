"""How much of the loop's time the events of jobs have, however fast their workers write them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

#: Seconds in which the events of one job are read at a time, and those of all jobs in one step.
JOB_SEC, STEP_SEC = 0.02, 0.1


class Pace:
    """The time that readings have taken. What they have left is read once as much time has passed: meanwhile the loop
    sleeps, and answers at once. `clock` is seconds that never stand still."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step_since = clock()
        self._spent_sec = 0.0  # in this turn
        self._rests_until = clock()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of the loop that reads, and count its time."""
        self._step_since = self._clock()
        try:
            yield
        finally:
            self._spent_sec += self._clock() - self._step_since

    @property
    def is_over(self) -> bool:
        """True if the step's time is over."""
        return self.left_sec <= 0.0

    @property
    def left_sec(self) -> float:
        """Seconds in which the next job's events may be read."""
        return max(0.0, min(JOB_SEC, self._step_since + STEP_SEC - self._clock()))

    @property
    def is_resting(self) -> bool:
        """True if what was left is not to be read yet."""
        return self._clock() < self._rests_until

    def rest(self) -> float:
        """Begin to rest after a turn that has read. Returns the seconds until what was left may be read."""
        now = self._clock()
        self._rests_until = max(self._rests_until, now + self._spent_sec)
        self._spent_sec = 0.0
        return self._rests_until - now
