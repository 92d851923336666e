"""A clock that somebody sets: the time of day is off by what stands in the file $HONED_TEST_CLOCK, looked at each time.
Monotonic clocks go on as they are. It is planted before honed is imported: see `JumpingPopen` in warm.py."""

from __future__ import annotations

import os
import time
from pathlib import Path


def plant() -> None:
    real = time.time

    def jumping() -> float:
        path = os.environ.get("HONED_TEST_CLOCK")
        return real() + (float(Path(path).read_text() or 0) if path else 0.0)

    time.time = jumping
