"""The time that one holder of connections has in a pass of a loop, so that a crowd of theirs holds up nobody else."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator


class Rations:
    """What each holder has had in this pass."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._spent: Counter[int] = Counter()

    def begin(self) -> None:
        """Begin a pass."""
        self._spent.clear()

    def is_left(self, holder: int) -> bool:
        """Return True if a holder's connections may be worked for in this pass."""
        return self._spent[holder] < self._seconds

    @contextlib.contextmanager
    def spend(self, holder: int) -> Iterator[None]:
        """Count the time of the block."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent[holder] += self._clock() - began  # type: ignore[assignment]
