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
    command = [sys.executable, str(SCRIPT), "--short", "--faults", "11", "--seed", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as torture:
        try:
            told, _ = torture.communicate(timeout=480)
        except subprocess.TimeoutExpired:
            torture.terminate()
            told, _ = torture.communicate(timeout=100)
    assert torture.returncode == 0, told[-6000:]
    for each in ("faults | 11", "duplicate start | 1", "shim killed | 1", "sbatch late | 1", "promises broken | 0"):
        assert each in told
