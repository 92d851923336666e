"""The share of a run that predictions may take: where an evaluation's would take too much, they are left out whole."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from honed.worker.train.checkpoint import Progress

#: Seconds; a run that is shorter is not saved by it.
MIN_RUN_SEC = 600.0


class Budget:
    """Counts what predictions take. A resumed run goes on with what was counted up to its checkpoint."""

    def __init__(self, share: float | None, progress: Progress, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` of the run; None sets no limit."""
        self._share = share
        self._progress = progress
        self._clock = clock
        self._began = clock() - progress.elapsed_sec
        self._first_step = 0
        self._train_began = clock()
        self._round_sec = 0.0

    def train(self, step: int) -> None:
        """The first step of this attempt comes next."""
        self._train_began, self._first_step = self._clock(), step

    def refusal(self, step: int, num_steps: int) -> str | None:
        """The reason why a round on the way is to be left out; None where it may be made.

        What was spent, this round and the one at the end have to fit in the share of what has run so far: so the share
        holds at every moment, and the rounds that are made lie evenly over the run.
        """
        elapsed_sec = self._clock() - self._began
        if self._share is None or step <= self._first_step or step >= num_steps:
            return None
        run_sec = elapsed_sec + (self._clock() - self._train_began) / (step - self._first_step) * (num_steps - step)
        if run_sec <= MIN_RUN_SEC:
            return None
        would_sec = self._progress.prediction_sec + 2 * self._round_sec
        if would_sec <= self._share * elapsed_sec:
            return None
        return (
            f"they would take {would_sec:.0f} s of {elapsed_sec:.0f} s with those at the end, above {self._share:.0%}"
        )

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        """Around a round of predictions."""
        began = self._clock()
        try:
            yield
        finally:
            self._round_sec = self._clock() - began
            self._progress.prediction_sec += self._round_sec
