"""A worker that hangs is ended within a time learned from its own steps, and one that is only slow is not."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Instance, RealInstance

from honed.job import query
from honed.job.job import State
from honed.system.pauses import MIN_PAUSE_SEC
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts


def test_a_worker_that_freezes_is_ended_long_before_the_administrators_limit(instance: Instance) -> None:
    instance.configure("[jobs]\nstall_timeout_sec = 900.0\nmin_stall_timeout_sec = 1.0\n")
    instance.drop("freeze")
    assert instance.drain() == 0
    job = instance.job("freeze")
    assert job is not None
    assert job.state is State.SUCCEEDED
    assert [attempt.outcome for attempt in job.attempts] == ["stalled", "succeeded"]
    assert "no sign of life for" in instance.log
    assert re.search(r"hung: no sign of life for \d+ s in train", instance.log)
    stacks = instance.layout.job(job.id).attempt(1).log_path.read_text()
    assert "most recent call first" in stacks
    assert "fakeworker.py" in stacks


def test_a_worker_that_is_slow_to_tell_but_alive_is_left_alone(instance: Instance) -> None:
    """The worker writes no event for twelve seconds, under a limit of six."""
    instance.configure("[jobs]\nstall_timeout_sec = 6.0\nmin_stall_timeout_sec = 6.0\n")
    instance.drop("plod")
    assert instance.drain() == 0
    job = instance.job("plod")
    assert job is not None
    assert [attempt.outcome for attempt in job.attempts] == ["succeeded"]


def test_the_administrators_limit_holds_whatever_a_worker_says_of_itself(instance: Instance) -> None:
    instance.configure("[jobs]\nstall_timeout_sec = 10.0\nmin_stall_timeout_sec = 10.0\n")
    instance.drop("slow-4000")
    instance.start()
    job = instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: instance.show("slow-4000")["progress"]["step"], what="a step")
    attempt = instance.layout.job(job.id).attempt(1)
    worker_pid = json.loads((attempt.dir / "lock").read_text())["worker_pid"]
    os.kill(worker_pid, signal.SIGSTOP)
    attempt.pulse_path.write_text('{"phase": "train", "limit_sec": 1e300}')
    wait_for(lambda: "): hung: " in instance.log, what="the end")
    instance.client.ask("cancel", id="slow-4000")


def test_a_pause_of_honed_and_its_worker_is_nobodys_silence(instance: Instance) -> None:
    """As `systemctl freeze honed.slice` makes it, or a virtual machine that was stopped. The worker goes on last."""
    instance.configure("[jobs]\nstall_timeout_sec = 10.0\nmin_stall_timeout_sec = 10.0\n")
    instance.drop("until", time_limit_sec=600.0)
    instance.start()
    job = instance.wait_state("until", State.RUNNING)
    wait_for(lambda: instance.show("until")["progress"]["step"] == 19, what="the last step but one")
    attempt = instance.layout.job(job.id).attempt(1)
    record = json.loads((attempt.dir / "lock").read_text())
    assert instance.process is not None
    pids = [instance.process.pid, record["shim_pid"], record["worker_pid"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 3 * MIN_PAUSE_SEC
    wait_for(lambda: time.monotonic() >= until, what="the end of the pause")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: "honed could not run for" in instance.log, what="the pause")
    instance.go("until")
    done = instance.wait_state("until", State.SUCCEEDED)
    assert [each.outcome for each in done.attempts] == ["succeeded"]
    assert "): hung: " not in instance.log
    seen_sec = json.loads(attempt.exit_path.read_text())["paused_sec"]
    assert seen_sec > 2 * MIN_PAUSE_SEC
    assert float(attempt.paused_path.read_text()) == pytest.approx(seen_sec, abs=0.01)
    assert done.attempt.paused_sec > 2 * MIN_PAUSE_SEC
    assert done.attempt.took_sec is not None
    wall_sec = (done.attempt.ended_at or 0.0) - done.attempt.started_at
    assert done.attempt.took_sec < wall_sec - 2 * MIN_PAUSE_SEC


def test_a_real_worker_that_is_stopped_in_a_step_is_ended_and_its_job_is_the_same_run(
    real: RealInstance, tmp_path: Path
) -> None:
    real.configure("[jobs]\nstall_timeout_sec = 900.0\nmin_stall_timeout_sec = 8.0\n")
    real.model = build_checkpoint(tmp_path / "tiny", "qwen3")
    real.dataset = write_facts(tmp_path / "facts.jsonl")
    keys: dict[str, Any] = {
        "lora": {"r": 4, "lora_dropout": 0.1},
        "dtype": "float32",
        "backend": "transformers",
        "predictions": {"sample_frequency": "off"},
        "training": {"max_steps": 60, "save_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-3},
    }
    real.drop("hung", **keys)
    real.start("--drain")
    job = real.wait_state("hung", State.RUNNING)
    real.drop("calm", **keys)
    attempt = real.layout.job(job.id).attempt(1)

    def learned() -> bool:
        try:
            return bool(json.loads(attempt.pulse_path.read_text())["limit_sec"])
        except (OSError, ValueError):
            return False

    def is_under_way() -> bool:  # from the file itself: by the time that honectl answers, a fast job may have ended
        return learned() and attempt.events_path.read_text().count('"event": "checkpoint"') >= 2

    wait_for(is_under_way, what="two checkpoints", deadline_sec=300.0)
    os.kill(json.loads((attempt.dir / "lock").read_text())["worker_pid"], signal.SIGSTOP)
    assert real.wait(deadline_sec=900.0) == 0  # the limit is 20 times a pause, which load makes long
    done = real.job("hung")
    assert done is not None
    assert [each.outcome for each in done.attempts] == ["stalled", "succeeded"], real.log
    assert "most recent call first" in attempt.log_path.read_text(errors="replace")
    resumed = [item["step"] for item in real.show("hung")["events"] if item["event"] == "resumed"]
    assert resumed[0] >= 10
    undisturbed = dict(query.losses(real.spool, real.layout, "calm"))
    assert sorted(undisturbed) == list(range(1, 61))
    told = query.losses(real.spool, real.layout, "hung")
    assert {step for step, _ in told} == set(undisturbed)
    for step, loss in told:  # steps after the last checkpoint appear twice
        assert loss == undisturbed[step], step
