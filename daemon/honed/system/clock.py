"""Clocks that processes share and nobody can set, and a wall clock that ignores adjustments of the system clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self


def boot_time() -> float:
    """Return the seconds since the machine's boot, including sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def awake_time() -> float:
    """Return the seconds since the machine's boot, without sleep: deadlines of one boot that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@functools.cache
def boot_id() -> str | None:
    """Return the id of this boot (random(4)); None if /proc does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: by the wall clock, for people, and by a clock that nobody can set, for durations."""

    wall: float  #: seconds since the epoch
    monotonic: float | None = None  #: seconds of CLOCK_MONOTONIC, which stops while the machine sleeps
    boot_id: str | None = None  #: the boot that `monotonic` counts from

    @classmethod
    def now(cls) -> Self:
        return cls(time.time(), time.clock_gettime(time.CLOCK_MONOTONIC), boot_id())

    def is_of_boot(self, other: Moment) -> bool:
        """Tell whether both moments are known to belong to the same boot."""
        return self.boot_id is not None and self.boot_id == other.boot_id

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment; across a reboot by the wall clock, but at least 0."""
        if self.is_of_boot(earlier) and self.monotonic is not None and earlier.monotonic is not None:
            return max(0.0, self.monotonic - earlier.monotonic)
        return max(0.0, self.wall - earlier.wall)


#: Smallest difference of the wall clock between two looks that counts as set: less does not matter for ages in days.
MAX_DRIFT_SEC = 3600.0


class Calendar:
    """Dates corrected while the process runs: nothing becomes old because somebody sets the clock forward.

    Dates from before the clock was set forward are moved forward by as much. The clock at the process's start is
    believed: no unsettable clock runs across a reboot. `clock` is monotonic seconds, `now` seconds since the epoch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._now = now
        self._jumps: tuple[tuple[float, float], ...] = ()  # (date of the jump, its seconds forward)
        self._looked = (clock(), now())

    def look(self) -> float:
        """Return the seconds by which the clock was set since the last call, else 0.0. Call it regularly."""
        (clock, wall), self._looked = self._looked, (self._clock(), self._now())
        expected = wall + self._looked[0] - clock
        jump = self._looked[1] - expected
        if abs(jump) <= MAX_DRIFT_SEC:
            return 0.0
        left, jumps = jump, list(self._jumps)
        while left < 0 and jumps:  # set back: undo that much of the earlier jumps
            date, by_sec = jumps.pop()
            left += by_sec
            if left > 0:
                jumps.append((date, left))
        self._jumps = (*jumps, (expected, jump)) if jump > 0 else tuple(jumps)
        return jump

    def date(self, date: float) -> float:
        """Return a past date as today's clock setting would have recorded it; seconds since the epoch."""
        for until, by_sec in self._jumps:
            if date <= until:
                date += by_sec
        return date
