"""The torture of scripts/torture, short: real training, kill -9 of everything, and not one loss that differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/torture.py"


@pytest.mark.timeout(1_800)
def test_whatever_is_killed_each_file_is_one_job_or_one_refusal_and_each_loss_the_undisturbed_runs(
    tmp_path: Path, is_whole: bool
) -> None:
    much = ("--kills", "100") if is_whole else ("--kills", "5", "--kinds", "lora", "--seeds", "2")
    command = [sys.executable, str(SCRIPT), *much, "--seed", "7", "--keep", str(tmp_path / "it")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    assert "promises broken | 0" in ended.stdout
