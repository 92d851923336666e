"""The torture of scripts/torture --slurm, short: whatever fails, each job ends once, and none has two workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import why_not

SCRIPT = Path(__file__).parents[2] / "scripts/torture_slurm.py"


@pytest.mark.timeout(900)
def test_no_job_is_lost_or_done_twice_whatever_fails(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, str(SCRIPT), "--faults", "6", "--seed", "5", "--keep", str(tmp_path / "it")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
