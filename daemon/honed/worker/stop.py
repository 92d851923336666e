"""Stop request for a run: a flag that SIGTERM sets, and that every phase checks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import FrameType

from honed.system.error import InterruptedRunError


class Stop:
    """A flag that is set once and never unset.

    Every check of it shows that the run progresses, and is a `beat` of the run's pulse. The pulse also gets the
    phase.
    """

    now_in = "prepare"  #: the stage or phase of the run; after an error, the one in which it occurred
    _enter: Callable[[str], None] = staticmethod(lambda _phase: None)
    _kill_at: float | None = None  # monotonic seconds

    def __init__(
        self,
        beat: Callable[[], None] = lambda: None,
        enter: Callable[[str], None] = lambda _phase: None,
        *,
        timeout_sec: float | None = None,
    ) -> None:
        """Begin unset. `timeout_sec`: how long after the request the process is killed, where that is known."""
        self.is_set = False
        self._timeout_sec = timeout_sec
        self.beat = beat
        self._enter = enter

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_set and self._timeout_sec is not None:
            self._kill_at = time.monotonic() + self._timeout_sec
        self.is_set = True

    @property
    def left_sec(self) -> float | None:
        """The seconds until the process is killed; None where that is unknown, or no stop was asked for."""
        return self._kill_at - time.monotonic() if self._kill_at is not None else None

    def check(self) -> None:
        """Give a sign of life, and raise InterruptedRunError once the run was asked to stop."""
        self.beat()
        if self.is_set:
            raise InterruptedRunError("stopped on request", hint="it resumes from its last checkpoint")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase of a stage (an evaluation, predictions, a checkpoint), and return to the stage after it."""
        before, self.now_in = self.now_in, name
        self._enter(name)
        yield
        self.now_in = before
        self._enter(before)
