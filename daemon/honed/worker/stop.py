"""The wish that a run end: a flag that SIGTERM sets, and that every phase looks at."""

from __future__ import annotations

from types import FrameType

from honed.error import InterruptedRunError


class Stop:
    """Set once, never unset."""

    def __init__(self) -> None:
        self.is_set = False

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True

    def check(self) -> None:
        """Raises InterruptedRunError once the run was asked to stop."""
        if self.is_set:
            raise InterruptedRunError("stopped on request", hint="it goes on from its last checkpoint")
