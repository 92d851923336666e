"""Several ranks on one machine: the run of one process, by two that share its batch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORKER_TIMEOUT_SEC, Ended, MakeJob, WorkerJob, read_events

import warm
from honed.run import shim

#: Seconds in which all ranks have to end after one has failed.
END_SEC = 30.0
OFF = {"sample_frequency": "off"}


class Run:
    """One attempt of a job by several ranks behind a shim."""

    def __init__(self, job: WorkerJob, attempt: int = 1, *, num_ranks: int = 2, **environment: str) -> None:
        self.job, self.attempt = job, attempt
        self.dir = job.dir / f"attempts/{attempt}"
        self.dir.mkdir(parents=True, exist_ok=True)
        with (self.dir / "worker.log").open("ab") as log:
            self.process = warm.RankPopen(
                [
                    sys.executable,
                    *("-I", "-S", str(shim.__file__), str(self.dir), "1"),
                    *(sys.executable, "-m", "honed.worker", str(job.dir), str(attempt)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=job.dir,
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "HONED_NUM_RANKS": str(num_ranks),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **environment,
                },
                start_new_session=True,
            )

    @property
    def pids(self) -> list[int]:
        return list(json.loads((self.dir / "lock").read_text())["worker_pids"])

    @property
    def exit(self) -> dict[str, Any]:
        return dict(json.loads((self.dir / "exit.json").read_text()))

    @property
    def log(self) -> str:
        return (self.dir / "worker.log").read_text(errors="replace")

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WORKER_TIMEOUT_SEC
        while not is_there():
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        path = self.job.events_path(self.attempt)
        self.wait_for(
            lambda: (
                path.exists() and any(e.kind == "step" and e.data["step"] >= step for e in read_events(path))
            )
        )

    def end(self, timeout_sec: float = WORKER_TIMEOUT_SEC) -> Ended:
        try:
            self.process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            for pid in [*self.pids, self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still there: {self.log[-3000:]}")
        result_path = self.dir / "result.json"
        result = json.loads(result_path.read_text()) if result_path.exists() else {}
        assert not [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]
        status = self.exit["status"]
        return Ended(-1 if status is None else status, result, read_events(self.job.events_path(self.attempt)))


def over_two(job: WorkerJob, *, effective: int = 4) -> WorkerJob:
    """Divide a job of one process between two ranks."""
    job.change_plan(
        parallel={
            "mode": "ddp",
            "num_ranks": 2,
            "ranks_per_node": 2,
            "num_nodes": 1,
            "per_device_train_batch_size": effective // 2,
            "gradient_accumulation_steps": 1,
            "effective_batch": effective,
            "reasons": {},
        }
    )
    return job


def test_two_ranks_train_what_one_process_does(make_job: MakeJob) -> None:
    keys: dict[str, Any] = {
        "num_rows": 24,
        "dtype": "float32",
        "eval_split": 1 / 3,
        "lora": {"r": 4},
        "training": {
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "per_device_eval_batch_size": 2,
        },
        "predictions": {"num_samples": 2, "max_new_tokens": 8},
    }
    one = make_job(**keys).run()
    two = Run(over_two(make_job(**keys)))
    ended = two.end()
    assert ended.status == 0, two.log[-4000:]
    print(one.losses, ended.losses, one.of("evaluation"), ended.of("evaluation"), one.of("data"), two.log[-1000:])
    print(ended.of("log"))
    assert ended.losses == pytest.approx(one.losses, abs=5e-7)
