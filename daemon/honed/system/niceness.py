"""Lower CPU priority for helper programs: ten thousand arrivals must not slow down the running job."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICENESS = 10


def step_back() -> None:
    """Lower this process's CPU priority, as far as permitted."""
    with contextlib.suppress(OSError):  # the daemon's unit may forbid this system call
        os.nice(NICENESS)
    with contextlib.suppress(OSError):
        # Where sessions are scheduled as groups, niceness only counts within ours: sched(7), "The autogroup feature".
        Path("/proc/self/autogroup").write_text(f"{NICENESS}", encoding="ascii")
