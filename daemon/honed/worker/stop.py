"""The wish that a run end: a flag that SIGTERM sets, and that every phase looks at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType

from honed.system.error import InterruptedRunError


class Stop:
    """Set once, never unset. Whoever looks at it moves, so each look is a `beat` of the run's pulse, which is told,
    too, of the phase that the run is in.
    """

    now_in = "prepare"  #: the stage or phase of the run; after an error, the one that it came up in
    _enter: Callable[[str], None] = staticmethod(lambda _phase: None)

    def __init__(self, beat: Callable[[], None] = lambda: None, enter: Callable[[str], None] = lambda _phase: None):
        self.is_set = False
        self.beat = beat
        self._enter = enter

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True

    def check(self) -> None:
        """Raises InterruptedRunError once the run was asked to stop."""
        self.beat()
        if self.is_set:
            raise InterruptedRunError("stopped on request", hint="it goes on from its last checkpoint")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around an evaluation, predictions, a checkpoint: what a stage does on the way."""
        before, self.now_in = self.now_in, name
        self._enter(name)
        yield
        self.now_in = before
        self._enter(before)
