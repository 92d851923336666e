"""Fair share on the daemon's own queue, with time simulated; plain priority order on the same jobs is seen to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/simulate.py"


def test_each_share_and_each_start_is_near_the_ideal_and_plain_priority_order_is_not() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--seeds", "1"], capture_output=True, text=True, env=environment, check=False
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count("| fair share |") == ended.stdout.count("| priority |") == 3
