"""What the machine shows of workers that are processes of honed's own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ESTALE], ids=errno.errorcode.get)
def test_whether_a_start_has_reached_its_worker_is_asked_again_when_the_machine_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    runner, real = ProcessRunner(Layout(tmp_path)), os.open
    Layout(tmp_path).job(7).dir.mkdir(parents=True)

    def fail(path: object, *arguments: object, **keys: object) -> int:
        if path == "lock":
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch, pytest.raises(OSError, match="lock"):
        patch.setattr(os, "open", fail)
        runner.adopt(7, 1, 1)
    assert runner.adopt(7, 1, 1) is False, "it never began: the start is made again, and costs no attempt"


def test_what_a_worker_has_put_in_place_of_its_lock_is_not_waited_for(tmp_path: Path) -> None:
    attempt = Layout(tmp_path).job(7).attempt(1)
    (attempt.dir / "lock").mkdir(parents=True)
    assert ProcessRunner(Layout(tmp_path)).adopt(7, 1, 1)
