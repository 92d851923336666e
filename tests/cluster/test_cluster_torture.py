"""The torture of scripts/torture --slurm, short: whatever fails, each file is one job, and each start begins once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import why_not

SCRIPT = Path(__file__).parents[2] / "scripts/torture_slurm.py"


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_whatever_fails_on_a_cluster_each_file_is_one_job_and_each_start_begins_once() -> None:
    command = [sys.executable, str(SCRIPT), "--short", "--faults", "8", "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    assert "faults | 8" in ended.stdout
    assert "promises broken | 0" in ended.stdout
