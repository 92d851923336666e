"""The wish that a run end: a flag that SIGTERM sets, and that every phase looks at."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from honed.error import InterruptedRunError


class Stop:
    """Set once, never unset. Whoever looks at it moves, so each look is a `beat` of the run's pulse."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        self.is_set = False
        self.beat = beat

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True

    def check(self) -> None:
        """Raises InterruptedRunError once the run was asked to stop."""
        self.beat()
        if self.is_set:
            raise InterruptedRunError("stopped on request", hint="it goes on from its last checkpoint")
