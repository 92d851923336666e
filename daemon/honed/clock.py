"""Clocks that several processes share and nobody sets, and dates that stay right though somebody sets the other."""

from __future__ import annotations

import functools
import time
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
