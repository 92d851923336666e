"""What the machine shows of workers that are processes of honed's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from honed.run.process import ProcessRunner
from honed.system.layout import Layout


def test_a_shim_that_has_just_forked_is_one_worker(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    attempt_dir = layout.job(7).attempt(1).dir
    attempt_dir.mkdir(parents=True)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "/opt/shim.py", str(attempt_dir), "1"]
    runner = ProcessRunner(layout)
    shims = [subprocess.Popen(command, stdin=subprocess.PIPE, env={"CUDA_VISIBLE_DEVICES": "GPU-a"}) for _ in range(2)]
    try:
        assert [(each.job_id, each.attempt, each.device) for each in runner.live()] == [(7, (1, 1), "GPU-a")]
    finally:
        for shim in shims:
            shim.communicate()
    assert runner.live() == []
