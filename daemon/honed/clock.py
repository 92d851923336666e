"""A clock that several processes share and nobody sets."""

from __future__ import annotations

import time


def boot_time() -> float:
    """Seconds since the machine's boot, its sleep among them; after a reboot they begin anew."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
