"""The time limit of a job, as its worker keeps it; honed's own is later (jobs.time_limit_grace_sec)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from honed.system import pauses
from honed.system.error import TimeLimitError
from honed.system.personpath import PersonPath

#: Seconds without CPU time that may have been a pause, and those in which the shim notes one (PAUSE_LOOK_SEC).
MIN_PAUSE_SEC, NOTED_SEC = 5.0, 3.0


def paused_sec(path: Path) -> float:
    """Return the seconds that did not pass for the job, as its shim has seen them."""
    return pauses.noted_sec(PersonPath.own(path))


class TimeLimit:
    """The time that a job may take, without pauses. `clock` is monotonic seconds, `cpu` the process's CPU time."""

    def __init__(
        self,
        seconds: float | None,
        elapsed_before: float,
        paused_path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._seconds = seconds
        self._elapsed_before = elapsed_before
        self._paused_path = paused_path
        self._clock = clock
        self._cpu = cpu
        self._started_at = clock()
        self._paused_before = paused_sec(paused_path)
        self._looked = (clock(), cpu())
        self._over_at: float | None = None  # when the time was over first, right after a silence

    def elapsed_sec(self) -> float:
        return self._unpaused_sec() - (paused_sec(self._paused_path) - self._paused_before)

    def _unpaused_sec(self) -> float:
        return self._elapsed_before + self._clock() - self._started_at

    @property
    def is_reached(self) -> bool:
        if self._seconds is None:
            return False
        (before, cpu_before), self._looked = self._looked, (self._clock(), self._cpu())
        now, cpu = self._looked
        # Every step asks: the file is read only at the end.
        if self._unpaused_sec() <= self._seconds or self.elapsed_sec() <= self._seconds:
            self._over_at = None
            return False
        if self._over_at is None:
            # The silence before may have been a pause that is not noted yet; steps that wait for data are silent, too.
            was_silent = now - before - (cpu - cpu_before) >= MIN_PAUSE_SEC
            self._over_at = now if was_silent else -math.inf
        return now >= self._over_at + NOTED_SEC

    def error(self, step: int) -> TimeLimitError:
        return TimeLimitError(
            f"time limit of {self._seconds:g} s reached at step {step}",
            hint="its checkpoint is kept; submit the job again with a higher time_limit_sec",
        )

    def error_of(self, measured: str) -> TimeLimitError:
        """Return the error of an evaluation, of which a part was `measured`."""
        return TimeLimitError(
            f"time limit of {self._seconds:g} s reached after {measured}",
            hint="what it has measured is kept; submit the job again with a higher time_limit_sec",
        )
