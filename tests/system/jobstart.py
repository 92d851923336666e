"""`honed-job-start` with the fake worker in place of the real one."""

from __future__ import annotations

import sys
from pathlib import Path

from honed.run import jobunit
from honed.system.layout import Layout

if __name__ == "__main__":
    fakeworker = Path(__file__).parents[1] / "process/fakeworker.py"
    sys.exit(jobunit.start(Layout(Path("/")).files(int(sys.argv[1])), command=[sys.executable, str(fakeworker)]))
