"""Fair share and preemption on the daemon's own queue, with time simulated: on the same jobs, plain priority order and
classes that do not preempt fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/simulate.py"


def test_shares_starts_and_preemptions_are_near_the_ideal_and_without_them_they_are_not() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--seeds", "1"], capture_output=True, text=True, env=environment, check=False
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count("| fair share |") == ended.stdout.count("| priority |") == 3
    assert ended.stdout.count("| preempt |") == ended.stdout.count("| do not |") == 2
