"""A clock that somebody sets: in every Python that is started with this directory on its path, the time of day is off
by what stands in the file $HONED_TEST_CLOCK, looked at each time. Monotonic clocks go on as they are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

if "HONED_TEST_CLOCK" in os.environ:
    _path, _time = Path(os.environ["HONED_TEST_CLOCK"]), time.time
    time.time = lambda: _time() + float(_path.read_text() or 0)
