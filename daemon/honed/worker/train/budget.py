"""The share of a run that predictions may take: at evaluations where they would take more, they are skipped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from honed.worker.train.checkpoint import Progress

#: Seconds; in a shorter run the limit does not apply.
MIN_RUN_SEC = 600.0


class Budget:
    """Account of the time that predictions take. A resumed run continues with the account in its checkpoint."""

    def __init__(self, share: float | None, progress: Progress, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the account. Predictions may take `share` of the run; None sets no limit."""
        self._share = share
        self._progress = progress
        self._clock = clock
        self._began = clock() - progress.elapsed_sec
        self._first_step = 0
        self._train_began = clock()
        self._round_sec = 0.0

    def train(self, step: int) -> None:
        """Note that the first step of this attempt comes next."""
        self._train_began, self._first_step = self._clock(), step

    def refusal(self, step: int, num_steps: int) -> str | None:
        """Return the reason why a round during training is to be skipped; None where it may be made.

        The time already spent, this round and the one at the end must fit in the share of the time so far. So the share
        holds at every moment, and the rounds are spread evenly over the run.
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
            f"they would take {would_sec:.0f} of {elapsed_sec:.0f} s including those at the end, more than "
            f"{self._share:.0%}"
        )

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        """Measure the time of a round of predictions."""
        began = self._clock()
        try:
            yield
        finally:
            self._round_sec = self._clock() - began
            self._progress.prediction_sec += self._round_sec
