"""Stopped or killed at any moment, and resumed: the same run, loss by loss."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from honed.worker.train import checkpoint
from worker.conftest import Ended, MakeJob, StopAtStep, WorkerJob
from worker.test_resume_checkpoint import flip

#: 12 rows, 3 held out: 9 rows in batches of 2 with accumulation 2 are 3 steps an epoch, the last of them half full.
TRAINING = {
    "max_steps": 11,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}
LORA = {"r": 8, "lora_dropout": 0.1}
KEYS: dict[str, Any] = {
    "eval_split": 0.25,
    "training": TRAINING,
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
}


def evaluations(*attempts: Any) -> list[tuple[int, float]]:
    return [(item["step"], item["metrics"]["eval_loss"]) for ended in attempts for item in ended.of("evaluation")]


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    """A cache of undisturbed runs, by what was asked for."""
    return {}


@pytest.fixture
def undisturbed_of(make_job: MakeJob, ended: dict[str, Ended]) -> Callable[..., Ended]:
    """A function that returns the undisturbed run of a job; several tests may stop the same one."""

    def run(**keys: Any) -> Ended:
        key = json.dumps(keys, sort_keys=True)
        if key not in ended:
            ended[key] = make_job(**keys).run()
            assert ended[key].status == 0, ended[key].result
        return ended[key]

    return run


@pytest.mark.parametrize(
    "keys",
    [
        {"lora": LORA, "quantization": "4bit"},
        {"dtype": "float32"},
    ],
    ids=["4bit", "full-fp32"],  # all others: see test_matrix.py
)
@pytest.mark.parametrize("step", [4, 6])  # in the middle of an epoch, and at the end of one
def test_a_job_that_is_stopped_and_resumed_is_the_undisturbed_run(
    make_job: MakeJob, undisturbed_of: Callable[..., Ended], keys: dict, step: int
) -> None:
    undisturbed = undisturbed_of(**(KEYS | keys))
    job = make_job(**(KEYS | keys))
    first = job.stopped_at(step)
    assert first.status == 75
    assert first.result["outcome"] == "interrupted"
    assert first.result["step"] == step
    second = job.run(2)
    assert second.status == 0, second.result
    assert [item["step"] for item in second.of("resumed")] == [step]
    assert list(second.losses) == list(range(step + 1, 12))
    assert first.losses | second.losses == undisturbed.losses
    assert evaluations(first, second) == evaluations(undisturbed)
    for name in ("train_loss", "eval_loss", "num_trained_tokens"):
        assert second.metrics[name] == pytest.approx(undisturbed.metrics[name], rel=1e-12)
    steps = [item["step"] for ended in (first, second) for item in ended.of("predictions")]
    assert steps == [item["step"] for item in undisturbed.of("predictions")]


def test_a_stop_during_an_evaluation_is_made_up_for(make_job: MakeJob, undisturbed_of: Callable[..., Ended]) -> None:
    class StopInEvaluation(StopAtStep):
        """A stop that is set at the second check after the step: the first one is the boundary of the step itself."""

        num_looks = 0

        @property
        def is_set(self) -> bool:  # type: ignore[override]
            if super().is_set:
                self.num_looks += 1
            return self.num_looks > 1

    keys = KEYS | {"lora": LORA, "training": TRAINING | {"per_device_eval_batch_size": 1}}
    undisturbed = undisturbed_of(**keys)
    job = make_job(**keys)
    first = job.run(1, stop=StopInEvaluation(job.events_path(1), 3))
    assert first.status == 75
    assert [item["step"] for item in first.of("evaluation")] == [0]
    [sealed] = (job.dir / "checkpoints").iterdir()
    assert sealed.name == "checkpoint-3"
    second = job.run(2)
    assert first.losses | second.losses == undisturbed.losses
    assert evaluations(first, second) == evaluations(undisturbed)


def test_a_run_that_had_ended_before_it_was_killed_is_not_trained_on(make_job: MakeJob) -> None:
    job = make_job(**(KEYS | {"lora": LORA}))
    first = job.run()
    assert first.status == 0
    shutil.rmtree(job.output_dir)  # as if it had died before its export
    second = job.run(2)
    assert second.status == 0, second.result
    assert not second.losses
    assert second.result["step"] == 11
    assert second.metrics["train_loss"] == pytest.approx(first.metrics["train_loss"])
    assert (job.output_dir / "adapter_model.safetensors").exists()


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(
    make_job: MakeJob, undisturbed_of: Callable[..., Ended]
) -> None:
    keys = KEYS | {"lora": LORA, "training": TRAINING | {"save_steps": 2}}
    undisturbed = undisturbed_of(**keys)
    job = make_job(**keys)
    job.stopped_at(6)
    flip(job.dir / "checkpoints/checkpoint-6/adapter_model.safetensors", 5000)
    second = job.run(2)
    assert [item["step"] for item in second.of("resumed")] == [4]
    [word] = second.messages("warning")
    assert word == (
        "checkpoint-6 is damaged (adapter_model.safetensors was changed) and was renamed to checkpoint-6.damaged"
    )
    assert {step: loss for step, loss in undisturbed.losses.items() if step > 4} == second.losses


def test_checkpoints_are_rotated_and_the_best_one_stays(make_job: MakeJob) -> None:
    training = TRAINING | {
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
    }
    job = make_job(**(KEYS | {"lora": LORA, "dtype": "float32", "training": training}))
    ended = job.run()
    losses = dict(evaluations(ended))
    best = min(losses, key=lambda step: losses[step])
    kept = {path.name for path in (job.dir / "checkpoints").iterdir()}
    assert kept == {"checkpoint-10", "checkpoint-11", f"checkpoint-{best}"}


def test_sigterm_saves_a_checkpoint_and_ends_with_its_own_status(make_job: MakeJob) -> None:
    keys = KEYS | {"lora": LORA, "training": TRAINING | {"max_steps": 2000}}
    job = make_job(**keys)
    process = job.start()
    job.wait_for(lambda events: any(e.kind == "step" and e.data["step"] >= 5 for e in events), process)
    process.send_signal(signal.SIGTERM)
    ended = job.wait(process)
    assert ended.status == 75, job.log()[-3000:]
    assert ended.result["outcome"] == "interrupted"
    assert ended.result["error"]["code"] == "interrupted"
    found, damaged = checkpoint.find(job.dir / "checkpoints")
    assert found is not None
    assert found.step == ended.result["step"]
    assert not damaged
    assert ended.of("finished")[0]["outcome"] == "interrupted"


#: The worker is asked to stop when it loads the model.
STOP_AT_LOAD = """
import os
from honed.job.event import EventWriter
emit = EventWriter.emit
def told(self, kind, **data):
    emit(self, kind, **data)
    if data.get("stage") == "load":
        os.kill(os.getpid(), 15)
EventWriter.emit = told
"""
#: It is killed in its seventh step, once the checkpoint of the fourth, which is sealed meanwhile, is in place.
KILL_LATER = """
import os, sys, time
from honed.worker.train.trainer import WatchedTrainer
step = WatchedTrainer.training_step
def training_step(self, *args, **kwargs):
    if self.state.global_step == 6:
        while not os.path.exists(os.path.join(sys.argv[1], "checkpoints", "checkpoint-4")):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    return step(self, *args, **kwargs)
WatchedTrainer.training_step = training_step
"""


def test_sigterm_before_the_first_step_ends_a_worker_too(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONED_TEST_RANK_0", STOP_AT_LOAD)
    job = make_job(lora=LORA)
    ended = job.wait(job.start())
    assert ended.status == 75
    assert not ended.losses


def test_kill_9_is_resumed_from_the_last_whole_checkpoint(
    make_job: MakeJob, undisturbed_of: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KEYS | {"lora": LORA, "training": TRAINING | {"save_steps": 2}}
    undisturbed = undisturbed_of(**keys)
    job = make_job(**keys)
    monkeypatch.setenv("HONED_TEST_RANK_0", KILL_LATER)
    first = job.wait(job.start())
    assert first.status == -signal.SIGKILL
    assert not first.result
    second: Any = WorkerJob(job.dir).run(2)
    assert second.status == 0, second.result
    [resumed] = second.of("resumed")
    assert resumed["step"] >= 4
    assert second.losses == {step: loss for step, loss in undisturbed.losses.items() if step > resumed["step"]}
