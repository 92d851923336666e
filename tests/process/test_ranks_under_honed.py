"""A job on two GPUs under the real daemon, with two real ranks: from incoming/ to succeeded/, whatever is killed.

The GPUs are handed in (tests/gpus.py), the ranks train on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import RankInstance

from honed.job import query
from honed.job.job import Attempt, Job, State
from honed.run import shim
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

NUM_STEPS, SAVE_STEPS = 28, 4
#: Before what an attempt waits until one of its ranks is killed: `seal`, `export`, or a step by its number.
HOLDS = """
import os, sys, time
from honed.worker.model import export
from honed.worker.train import checkpoint
from honed.worker.train.trainer import WatchedTrainer
place = {holds}.get(int(sys.argv[2]))
lost_path = os.path.join(sys.argv[1], "attempts", sys.argv[2], "ranks", "lost.json")
def held(where, function):
    def wait(*args, **kwargs):
        while where(*args) and not os.path.exists(lost_path):
            time.sleep(0.02)
        return function(*args, **kwargs)
    return wait
checkpoint.seal = held(lambda *_: place == "seal", checkpoint.seal)
export.export = held(lambda *_: place == "export", export.export)
WatchedTrainer.training_step = held(
    lambda self, *_: self.state.global_step + 1 == place, WatchedTrainer.training_step
)
"""
#: Rank 0 takes its time over predictions, with signs of life.
SLOW_PREDICTIONS = """
import time
from honed.worker.train.examiner import Examiner
predict = Examiner._predict
def slow(self, *args, **kwargs):
    end = time.monotonic() + 12.0
    while time.monotonic() < end:
        self._predictor._stop.check()
        time.sleep(0.1)
    return predict(self, *args, **kwargs)
Examiner._predict = slow
"""


def keys(instance: RankInstance, **training: Any) -> dict[str, Any]:
    model, rows = instance.root / "llama", instance.root / "facts.jsonl"
    return {
        "base_model": str(model if model.exists() else build_checkpoint(model, "llama")),
        "datasets": [{"path": str(rows if rows.exists() else write_facts(rows, 24))}],
        "dtype": "float32",
        "lora": {"r": 4, "lora_dropout": 0.2},
        "resources": {"gpus": 2},
        "predictions": {"sample_frequency": "off"},
        "retry": {"max_attempts": 20},
        "training": {
            "max_steps": NUM_STEPS,
            "save_steps": SAVE_STEPS,
            "per_device_train_batch_size": 2,
            "eval_strategy": "no",
            **training,
        },
    }


def is_there(instance: RankInstance, name: str, number: int, condition: Callable[[Job, Path], bool]) -> Job:
    """Wait for a condition of an attempt's directory, and return the job."""

    def reached() -> Job | None:
        job = instance.job(name)
        assert job is None or not job.state.is_final, (job, instance.log[-3000:])
        if job is None or job.state is not State.RUNNING or job.attempt.number != number:
            return None
        with contextlib.suppress(OSError, ValueError):
            return job if condition(job, instance.layout.job(job.id).attempt(number).dir) else None
        return None

    return wait_for(reached, what=f"attempt {number} of {name}")


def has_trained(steps: int) -> Callable[[Job, Path], bool]:
    return lambda _job, attempt: (attempt / "events.jsonl").read_bytes().count(b'"event": "step"') >= steps


def is_saving(job: Job, attempt: Path) -> bool:
    """Another attempt, killed before, may have left what it was saving."""
    if "worker_pids" not in json.loads((attempt / "lock").read_bytes()):
        return False
    return any((attempt.parents[1] / "checkpoints").glob(".new*/*"))


def ended(instance: RankInstance, name: str, number: int) -> Attempt | None:
    """Return an attempt that has ended."""
    job = instance.job(name)
    found = job.attempts[number - 1] if job is not None and len(job.attempts) >= number else None
    return found if found is not None and found.ended_at else None


def are_gone(pids: list[int]) -> None:
    """Wait for the end of all processes, which is the shim's doing: the ranks would wait for each other for minutes."""
    wait_for(
        lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()],
        6 * shim.RANK_END_SEC,
        what="the end of all processes",
    )


def hold(instance: RankInstance, holds: dict[int, str | int]) -> None:
    code = HOLDS.format(holds=holds)
    instance.environment |= {"HONED_TEST_RANK_0": code, "HONED_TEST_RANK_1": code}


def test_a_job_on_two_gpus_is_trained_by_two_ranks_and_any_kill_costs_only_steps(ranked: RankInstance) -> None:
    ranked.configure("[jobs]\npoll_interval_sec = 0.05\nretry_delay_sec = 0\n")
    ranked.start()
    ranked.drop("calm", name="calm", **keys(ranked))
    calm = ranked.wait_state("calm", State.SUCCEEDED, State.FAILED)
    assert calm.error is None, ranked.log[-3000:]
    assert calm.attempt.devices == ("GPU-0", "GPU-1")
    shown = ranked.show("calm")
    assert (shown["plan"]["parallel"]["mode"], shown["plan"]["parallel"]["num_ranks"]) == ("ddp", 2)
    ranked.stop()

    # The second attempt leaves one checkpoint at most, the fourth makes sixteen steps at least.
    hold(ranked, {1: 2, 2: 7, 3: "seal", 4: 24, 5: "seal", 6: "export"})
    ranked.start()
    ranked.drop("hit", name="hit", **keys(ranked))
    hits: list[tuple[str, Callable[[Job, Path], bool]]] = [
        ("rank 1", lambda _job, attempt: "worker_pids" in json.loads((attempt / "lock").read_bytes())),
        ("rank 0", has_trained(2)),
        ("rank 1", is_saving),
        ("shim", has_trained(5)),
        ("rank 0", is_saving),
        ("rank 1", lambda _job, attempt: b'"stage": "export"' in (attempt / "events.jsonl").read_bytes()),
    ]
    for number, (target, moment) in enumerate(hits, 1):
        job = is_there(ranked, "hit", number, moment)
        pids = ranked.pids(job)
        assert len(set(pids)) == 3
        if number == 4:  # its workers go on, and the next daemon takes them over
            ranked.kill(signal.SIGKILL)
            ranked.start()
            job = is_there(ranked, "hit", number, has_trained(8))
            assert ranked.pids(job) == pids
        os.kill(pids[{"rank 0": 0, "rank 1": 1, "shim": 2}[target]], signal.SIGKILL)
        are_gone(pids)
    done = ranked.wait_state("hit", State.SUCCEEDED, State.FAILED)
    assert done.error is None, ranked.log[-3000:]
    assert [each.outcome for each in done.attempts] == ["killed"] * 6 + ["succeeded"]
    losses = [query.losses(ranked.spool, ranked.layout, name) for name in ("calm", "hit")]
    assert set(losses[0]) == set(losses[1])  # steps after the last checkpoint appear twice
    weights = [(Path(job.output_dir) / "adapter_model.safetensors").read_bytes() for job in (calm, done)]
    assert weights[0] == weights[1]


def test_a_divided_model_is_trained_under_honed_and_survives_a_rank_killed_inside_a_save(ranked: RankInstance) -> None:
    ranked.configure("[jobs]\npoll_interval_sec = 0.05\nretry_delay_sec = 0\n")
    hold(ranked, {1: "seal"})
    ranked.start()
    asked = keys(ranked, max_steps=12) | {"parallel": "fsdp", "quantization": "4bit", "dtype": "bfloat16"}
    ranked.drop("parts", name="parts", **asked)
    job = is_there(ranked, "parts", 1, is_saving)
    pids = ranked.pids(job)
    os.kill(pids[1], signal.SIGKILL)
    are_gone(pids)
    done = ranked.wait_state("parts", State.SUCCEEDED, State.FAILED)
    assert done.error is None, ranked.log[-3000:]
    assert [each.outcome for each in done.attempts] == ["killed", "succeeded"]
    shown = ranked.show("parts")
    assert (shown["plan"]["parallel"]["mode"], shown["plan"]["memory"]["num_ranks"]) == ("fsdp", 2)
    assert {step for step, _ in query.losses(ranked.spool, ranked.layout, "parts")} == set(range(1, 13))
    kept = ranked.layout.job(done.id).dir / "checkpoints/checkpoint-12"
    assert {path.name for path in kept.glob("part-*")} == {"part-0-of-2.pt", "part-1-of-2.pt"}
    assert (Path(done.output_dir) / "adapter_model.safetensors").exists()


@pytest.mark.timeout(900)
def test_a_frozen_rank_is_named_and_one_that_waits_for_another_is_left_alone(ranked: RankInstance) -> None:
    ranked.configure(
        "[jobs]\npoll_interval_sec = 0.05\nretry_delay_sec = 0\nstall_timeout_sec = 120\nmin_stall_timeout_sec = 6\n"
    )
    ranked.environment |= {"HONED_TEST_RANK_0": SLOW_PREDICTIONS}
    ranked.start()
    asked = keys(ranked, max_steps=60) | {
        "eval_split": 0.25,
        "predictions": {"num_samples": 1, "max_new_tokens": 2},
    }
    ranked.drop("it", name="it", **asked)

    def both_know(job: Job, attempt: Path) -> bool:
        limits = [json.loads((attempt / name).read_bytes())["limit_sec"] for name in ("pulse", "pulse.1")]
        return all(limits) and has_trained(12)(job, attempt)

    for number, rank in ((1, 1), (2, 0)):
        job = is_there(ranked, "it", number, both_know)
        os.kill(ranked.pids(job)[rank], signal.SIGSTOP)
        has_ended = wait_for(lambda number=number: ended(ranked, "it", number), what="its end")
        assert has_ended.outcome == "stalled"
        assert f"rank {rank} of 2 gave no sign of life for" in ranked.log, ranked.log[-3000:]
        log = (ranked.layout.job(job.id).attempt(number).dir / "worker.log").read_text(errors="replace")
        # The stacks of both: one may meet the other's end in a call, and raise, before its own signal arrives.
        stacks = [log.count("Fatal Python error: "), log.count("Connection reset by peer"), log.count("closed by peer")]
        assert stacks[0] >= 1
        assert sum(stacks) >= 2, log[-3000:]
    # In the end rank 1 waits for twelve seconds, in training, while rank 0 asks the model.
    done = ranked.wait_state("it", State.SUCCEEDED, State.FAILED)
    assert done.error is None, ranked.log[-3000:]
    assert [each.outcome for each in done.attempts] == ["stalled", "stalled", "succeeded"], ranked.log[-3000:]
