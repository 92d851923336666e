"""Clocks that several processes share and nobody sets, and dates that stay right though somebody sets the other."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self


def boot_time() -> float:
    """Seconds since the machine's boot, its sleep among them; after a reboot they begin anew."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def boot_id() -> str | None:
    """Another one after each boot: random(4). None where /proc does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Moment:
    """When something was: by the clock on the wall, for people, and by one that nobody sets, for what it took."""

    wall: float  #: seconds since the epoch
    monotonic: float | None = None  #: seconds of CLOCK_MONOTONIC, which stands still while the machine sleeps
    boot_id: str | None = None  #: the boot that those belong to: each has its own

    @classmethod
    def now(cls) -> Self:
        return cls(time.time(), time.clock_gettime(time.CLOCK_MONOTONIC), boot_id())

    def is_of_boot(self, other: Moment) -> bool:
        """Whether both are known to lie between the same two boots."""
        return self.boot_id is not None and self.boot_id == other.boot_id

    def since(self, earlier: Moment) -> float:
        """Seconds from an earlier one; across a boot by the clock on the wall, but never less than nothing."""
        if self.is_of_boot(earlier) and self.monotonic is not None and earlier.monotonic is not None:
            return max(0.0, self.monotonic - earlier.monotonic)
        return max(0.0, self.wall - earlier.wall)


#: Seconds by which the clock on the wall has to be off between two looks to count as set: less is no matter to days.
MAX_DRIFT_SEC = 3600.0


class Calendar:
    """Dates, while we run: nothing becomes old because somebody sets the clock forward.

    What is dated before the clock was set forward is younger than it looks, by as much. What the clock said when we
    started is believed: across a reboot no clock goes on that nobody sets. `clock` is monotonic seconds, `now` those
    since the epoch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._now = now
        self._jumps: tuple[tuple[float, float], ...] = ()  # from which date, and by how many seconds forward
        self._looked = (clock(), now())

    def look(self) -> float:
        """Seconds by which the clock was set since the last look, 0.0 where it was not. To be called now and then."""
        (clock, wall), self._looked = self._looked, (self._clock(), self._now())
        expected = wall + self._looked[0] - clock
        jump = self._looked[1] - expected
        if abs(jump) <= MAX_DRIFT_SEC:
            return 0.0
        left, jumps = jump, list(self._jumps)
        while left < 0 and jumps:  # set back: so much of it never was
            date, by_sec = jumps.pop()
            left += by_sec
            if left > 0:
                jumps.append((date, left))
        self._jumps = (*jumps, (expected, jump)) if jump > 0 else tuple(jumps)
        return jump

    def date(self, date: float) -> float:
        """What would stand in the place of a date, had the clock been then as it is now; seconds since the epoch."""
        for until, by_sec in self._jumps:
            if date <= until:
                date += by_sec
        return date
