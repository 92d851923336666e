"""Jobs for one to eight GPUs on the daemon's own placement, with time simulated: a few of the mixes of
scripts/simulate_gpus.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/simulate_gpus.py"


#: Mixes in which later jobs did take GPUs meanwhile, and gave them back. In the last two a job for all once lost the
#: time of two checkpoints: one to a job for one GPU that was not counted, one to the job before it.
SEEDS = ("0", "2", "62", "104")


def test_a_job_for_all_gpus_loses_at_most_one_checkpoint_to_later_ones_and_the_gpus_are_used() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", *SEEDS], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert "0 with a job that started too late, 0 with a lower utilisation" in ended.stdout
    assert ended.stdout.count("at most 120 s later") == len(SEEDS)
