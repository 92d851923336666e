"""Programs of honed's that come second on a processor: ten thousand arrivals must not slow down the job that runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICENESS = 10


def step_back() -> None:
    """Let everybody else have the processor first, as far as we may."""
    with contextlib.suppress(OSError):  # the daemon's unit has no system call for it
        os.nice(NICENESS)
    with contextlib.suppress(OSError):
        # Where sessions are scheduled as groups, niceness counts within ours alone: sched(7), "The autogroup feature".
        Path("/proc/self/autogroup").write_text(f"{NICENESS}", encoding="ascii")
