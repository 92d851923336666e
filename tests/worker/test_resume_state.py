"""State besides weights that a run carries from one attempt to the next: each part is interrupted, and none is lost."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.worker.stop import Stop
from worker.conftest import Ended, MakeJob, WorkerJob
from worker.cutter import LOOKS, at_step
from worker.test_examiner import made_worse
from worker.test_matrix import Course, assert_same, course_of, untimed
from worker.test_resume_checkpoint import flip

#: 12 rows, 3 held out: 9 rows in batches of 2 with accumulation 2 are 3 steps an epoch, the last of them half full.
TRAINING = {
    "max_steps": 11,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "gradient_checkpointing": False,  # which the runs of test_matrix.py have
}
KEYS: dict[str, Any] = {
    "lora": {"r": 4, "lora_dropout": 0.1},
    "eval_split": 0.25,
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
}
#: For the model that knows its capitals: a rate that grows until it forgets them. The best evaluation is an early one,
#: those after it are worse by far, on any processor, and early stopping ends the run.
WORSE = {"learning_rate": 0.05, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 11}


class StopAt(Stop):
    """A stop that is set during a step, at a certain kind of check; see cutter.py."""

    def __init__(self, cut: str, step: int) -> None:
        super().__init__(self.look)
        self._moment = (step, LOOKS[cut])

    def look(self) -> None:
        self.is_set = self.is_set or at_step(*self._moment)


def keys(**training: Any) -> dict[str, Any]:
    return KEYS | {"training": TRAINING | training}


def cut(job: WorkerJob, where: str, step: int) -> Ended:
    ended = job.run(1, stop=StopAt(where, step))
    assert ended.status == 75, ended.result
    assert ended.result["step"] == step + (where == "accumulation")
    return ended


def resumed(job: WorkerJob, attempt: int = 2) -> Ended:
    ended = job.run(attempt)
    assert ended.status == 0, ended.result
    assert ended.of("resumed")
    return ended


def steps(kind: str, *attempts: Ended) -> list[int]:
    return [item["step"] for ended in attempts for item in ended.of(kind)]


Whole = Callable[..., tuple[Ended, Course]]


@pytest.fixture(scope="module")
def wholes() -> dict[str, tuple[Ended, Course]]:
    """A cache of uncut runs, by what was asked for."""
    return {}


@pytest.fixture
def whole_of(make_job: MakeJob, wholes: dict[str, tuple[Ended, Course]]) -> Whole:
    """A function that returns the uncut run of a job, and its course; several tests may cut the same one."""

    def run(**wanted: Any) -> tuple[Ended, Course]:
        key = json.dumps(wanted, sort_keys=True, default=str)
        if key not in wholes:
            job = make_job(**wanted)
            ended = job.run()
            wholes[key] = ended, course_of(job, ended)
        return wholes[key]

    return run


@pytest.mark.parametrize(
    ("told", "step"),  # the end of an epoch, and the middle of one
    [
        pytest.param({"logging_steps": 4}, 6),
        pytest.param({"logging_steps": 4}, 7, marks=pytest.mark.exhaustive),
        pytest.param({"logging_strategy": "epoch"}, 6),
        pytest.param({"logging_strategy": "epoch"}, 7),
        pytest.param({"logging_steps": 4, "logging_first_step": True}, 6, marks=pytest.mark.exhaustive),
        pytest.param({"logging_steps": 4, "logging_first_step": True}, 7),
    ],
)
def test_losses_that_are_told_now_and_then_are_those_of_all_their_steps(
    make_job: MakeJob, whole_of: Whole, told: dict[str, Any], step: int
) -> None:
    wanted = KEYS | {"training": TRAINING | told | {"eval_strategy": "no"}, "predictions": {"sample_frequency": "off"}}
    _, undisturbed = whole_of(**wanted)
    job = make_job(**wanted)
    assert_same(course_of(job, cut(job, "step", step), resumed(job)), undisturbed)


EPOCH, THREE = {"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 3}
#: When a round is due, where the run is cut, and when it is evaluated. By default each round and cut once, and each
#: round with both evaluations but the last.
ROUNDS = {
    ("epoch", "step", 6): EPOCH,
    ("epoch", "predictions", 6): THREE,
    ("epoch", "evaluation", 6): THREE,
    (3, "step", 6): THREE,
    (3, "predictions", 6): EPOCH,
    (2, "predictions", 4): THREE,
}


@pytest.mark.parametrize(
    ("frequency", "where", "step", "evaluated"),
    [
        pytest.param(*cut, evaluated, marks=[] if evaluated is by_default else [pytest.mark.exhaustive])
        for cut, by_default in ROUNDS.items()
        for evaluated in (EPOCH, THREE)
    ],
)
def test_a_round_of_predictions_that_is_cut_short_is_made_up_for_and_none_is_made_twice(
    make_job: MakeJob, whole_of: Whole, frequency: str | int, where: str, step: int, evaluated: dict[str, Any]
) -> None:
    wanted = keys(**evaluated, logging_strategy="epoch") | {
        "predictions": {"num_samples": 2, "max_new_tokens": 4, "sample_frequency": frequency}
    }
    whole, undisturbed = whole_of(**wanted)
    job = make_job(**wanted)
    first = cut(job, where, step)
    second = resumed(job)
    found = course_of(job, first, second)
    for entry in (
        *found.steps.values(),
        *undisturbed.steps.values(),
    ):
        entry.pop("grad_norm", None)  # it belongs to a step before the checkpoint, and is not stored
        entry.pop("learning_rate", None)
    assert_same(found, undisturbed)
    assert steps("predictions", first, second) == steps("predictions", whole)
    assert steps("evaluation", first, second) == steps("evaluation", whole)


def test_a_run_that_has_stopped_early_is_not_trained_on(make_job: MakeJob, learned: Path) -> None:
    wanted = keys(**WORSE, eval_strategy="steps", eval_steps=1) | {"early_stopping_patience": 2}
    job = make_job(model=learned, **wanted)
    first = job.run()
    undisturbed = course_of(job, first)
    last = max(first.losses)
    assert last < 11
    shutil.rmtree(job.output_dir)  # as if it had died before its export
    second = resumed(job)
    assert not second.losses
    assert second.result["step"] == last
    assert_same(course_of(job, first, second), undisturbed)


@pytest.mark.parametrize("before", [1, 0])
def test_early_stopping_counts_on_and_its_last_evaluation_may_be_one_that_is_made_up_for(
    make_job: MakeJob, whole_of: Whole, learned: Path, before: int
) -> None:
    wanted = keys(**WORSE, eval_strategy="steps", eval_steps=1) | {"early_stopping_patience": 2}
    whole, undisturbed = whole_of(model=learned, **wanted)
    job = make_job(model=learned, **wanted)
    first = cut(job, "evaluation", max(whole.losses) - before)
    assert_same(course_of(job, first, resumed(job)), undisturbed)


@pytest.mark.parametrize(
    "when",
    [
        {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5},
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
    ],
)
def test_the_best_model_is_found_in_an_evaluation_that_is_made_up_for(make_job: MakeJob, when: dict[str, Any]) -> None:
    """The best evaluation is the last one, so no later checkpoint would name the best model."""
    wanted = keys(**when, load_best_model_at_end=True)
    job = make_job(**wanted)
    whole = job.run()
    undisturbed = course_of(job, whole)
    losses = {item["step"]: item["metrics"]["eval_loss"] for item in whole.of("evaluation")}
    assert min(losses, key=lambda step: losses[step]) == 11
    job = make_job(**wanted)
    assert_same(course_of(job, cut(job, "evaluation", 11), resumed(job)), undisturbed)


def test_the_best_model_has_a_checkpoint_though_none_was_due(make_job: MakeJob, learned: Path) -> None:
    wanted = keys(**WORSE, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_steps=10)
    job = make_job(model=learned, **wanted)
    ended = job.run()
    losses = {item["step"]: item["metrics"]["eval_loss"] for item in ended.of("evaluation") if item["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best not in {10, 11}
    assert ended.metrics["eval_loss"] == losses[best]
    assert (job.dir / f"checkpoints/checkpoint-{best}").is_dir()


def test_a_damaged_best_checkpoint_is_not_what_is_exported(make_job: MakeJob, learned: Path) -> None:
    wanted = keys(**WORSE, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_steps=1)
    job = make_job(model=learned, **wanted)
    first = job.run()
    losses = {item["step"]: item["metrics"]["eval_loss"] for item in first.of("evaluation") if item["step"]}
    best = min(losses, key=lambda step: losses[step])
    flip(job.dir / f"checkpoints/checkpoint-{best}/adapter_model.safetensors", 2000)
    second = resumed(job)
    [word] = second.messages("error")
    assert f"checkpoint-{best}, the best checkpoint, is damaged" in word
    assert second.metrics["eval_loss"] == losses[11] != first.metrics["eval_loss"] == losses[best]


class StopInMerge(Stop):
    """A stop that is set while the trained adapter is merged."""

    def __init__(self) -> None:
        super().__init__(self.look)

    def look(self) -> None:
        self.is_set = self.is_set or "merging" in {frame.name for frame in traceback.extract_stack()}


def test_a_merge_that_is_stopped_costs_no_training(make_job: MakeJob) -> None:
    """The resume repeats no step although no checkpoint was due at the last one."""
    wanted = keys(save_strategy="no", eval_strategy="no") | {"save_merged": "bfloat16", "save_interval_sec": None}
    job = make_job(**wanted)
    undisturbed = course_of(job, job.run())
    job = make_job(**wanted)
    first = job.run(1, stop=StopInMerge())
    assert first.status == 75
    assert not job.output_dir.exists()
    second = resumed(job)
    assert not second.losses
    assert_same(course_of(job, first, second), undisturbed)
    assert (job.output_dir / "merged/model.safetensors").is_file()


@pytest.mark.parametrize("before", [2, 0])
def test_the_guard_counts_on(make_job: MakeJob, learned: Path, before: int) -> None:
    """Its earlier measurements are not repeated, and its patience ends when it would have ended without the cut."""
    wanted: dict[str, Any] = {
        "guard": {"metric": "token_f1", "max_drop": 0.1, "patience": 2},
        "training": {"max_steps": 40, "eval_strategy": "steps", "eval_steps": 2},
    }
    whole = made_worse(make_job, learned, **wanted).run()
    assert whole.result["error"]["code"] == "regressed"
    assert whole.result["step"] < 40
    job = made_worse(make_job, learned, **wanted)
    first = cut(job, "evaluation", whole.result["step"] - before)
    second = job.run(2)
    assert second.result["error"] == whole.result["error"]
    assert steps("step", first, second) == steps("step", whole)
    assert steps("guard", first, second) == steps("guard", whole)
    assert untimed(second.metrics) == untimed(whole.metrics)


@pytest.mark.parametrize("strategy", ["no", "epoch", "steps"])
def test_checkpoints_are_written_by_time_in_the_middle_of_an_epoch(make_job: MakeJob, strategy: str) -> None:
    wanted = keys(save_strategy=strategy, save_steps=500, max_steps=5) | {"save_interval_sec": 0.001}
    ended = make_job(**wanted).run()
    assert steps("checkpoint", ended) == list(range(1, 6))


def test_without_a_time_the_strategy_alone_counts(make_job: MakeJob) -> None:
    ended = make_job(**(keys(save_strategy="epoch", max_steps=5) | {"save_interval_sec": None})).run()
    assert steps("checkpoint", ended) == [3, 5]


def test_ten_minutes_are_the_default() -> None:
    from honed.spec.spec import JobSpec

    assert JobSpec.model_fields["save_interval_sec"].default == 600


def test_a_job_whose_earlier_attempt_never_trained_does_not_start_over(make_job: MakeJob) -> None:
    job = make_job(**keys(save_steps=3, max_steps=3))
    job.events_path(1).parent.mkdir(parents=True)
    job.events_path(1).write_text('{"event": "stage", "time": 1.0, "stage": "staged"}\n')
    second = job.run(2)
    assert second.status == 0, second.result
    assert second.of("started_over") == []


def test_a_job_without_a_whole_checkpoint_says_so_and_starts_over(make_job: MakeJob) -> None:
    wanted = keys(save_steps=3)
    job = make_job(**wanted)
    undisturbed = course_of(job, job.run())
    job = make_job(**wanted)
    first = cut(job, "step", 8)
    for path in (job.dir / "checkpoints").iterdir():
        flip(path / "optimizer.pt", 100)
    second = job.run(2)
    assert second.status == 0, second.result
    assert len(second.messages("warning")) >= 2
    assert second.messages("error") == ["all checkpoints of this job are damaged: it starts from the beginning"]
    assert second.of("started_over") == [{"reason": "damaged"}]
    assert list(second.losses) == list(range(1, 12))
    assert_same(course_of(job, first, second), undisturbed)


def test_a_limit_of_one_leaves_one_that_is_whole_whenever_it_is_cut(
    make_job: MakeJob, learned: Path, tmp_path: Path
) -> None:
    """The best checkpoint stays, too, where it is to be restored at the end."""
    wanted = keys(
        **WORSE, eval_strategy="steps", eval_steps=1, save_steps=1, save_total_limit=1, load_best_model_at_end=True
    )
    job = make_job(model=learned, **wanted)
    whole = job.run()
    undisturbed = course_of(job, whole)
    losses = {item["step"]: item["metrics"]["eval_loss"] for item in whole.of("evaluation") if item["step"]}
    best = min(losses, key=lambda step: losses[step])
    kept = {path.name for path in (job.dir / "checkpoints").iterdir()}
    assert kept == {"checkpoint-11", f"checkpoint-{best}"}
    job = make_job(model=learned, **wanted)
    first = cut(job, "step", 8)
    assert {path.name for path in (job.dir / "checkpoints").iterdir()} == {"checkpoint-8", f"checkpoint-{best}"}
    assert_same(course_of(job, first, resumed(job)), undisturbed)
