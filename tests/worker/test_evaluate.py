"""Jobs of kind evaluate: the figures at the end of a training, again, from what it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from honed.worker.rows.group import Groups
from honed.worker.train.evaluation import Kinds, TokenMeans
from honed.worker.train.prediction import Predictor
from honed.worker.train.trainer import WatchedTrainer
from worker.conftest import Ended, MakeJob
from worker.test_media_training import colored_rows
from zoo.model import write_facts
from zoo.vision import build_vision_checkpoint

LORA = {"r": 4, "lora_dropout": 0.2}


def held_out_rows(path: Path, number: int = 7) -> list[dict[str, str]]:
    write_facts(path, number)
    return [{"path": str(path)}]


def evaluated(make_job: MakeJob, **keys: Any) -> Ended:
    """Return the end of an evaluation; the conftest's training keys are not for it."""
    job = make_job(kind="evaluate", datasets=[], training={**NO_TRAINING, **keys.pop("training", {})}, **keys)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert not job.output_dir.exists()
    return ended


#: The values with which a key counts as left out.
NO_TRAINING = {"max_steps": -1, "per_device_train_batch_size": 8, "learning_rate": 2e-5}


@pytest.mark.parametrize("keys", [{}, {"quantization": "4bit", "dtype": "bfloat16"}], ids=["bf16", "4bit"])
def test_an_adapter_has_the_figures_bit_for_bit_with_which_its_training_ended(
    make_job: MakeJob, tmp_path: Path, keys: dict[str, Any]
) -> None:
    asked = {"eval_datasets": held_out_rows(tmp_path / "test.jsonl"), **keys}
    training = make_job(lora=LORA, training={"max_steps": 4}, **asked)
    trained = training.run()
    assert trained.status == 0, trained.result
    ended = evaluated(make_job, adapter=str(training.output_dir), **asked)
    told = {name: value for name, value in trained.metrics.items() if name.startswith(("eval_", "predictions/"))}
    assert ended.metrics == told
    assert {"eval_loss", "predictions/exact_match"} <= set(told)
    assert ended.of("predictions")[0]["rows"] == trained.of("predictions")[-1]["rows"]
    assert [each["stage"] for each in ended.of("stage")] == ["prepare", "data", "load", "audit", "mask", "evaluate"]
    [data] = ended.of("data")
    assert (data["num_train"], data["num_eval"], data["datasets"]) == (0, 7, [])
    assert not {"gradient_bytes", "optimizer_bytes"} & set(ended.result["memory"])
    assert not ended.of("step")


def test_a_base_model_alone_has_the_figures_from_before_its_training(make_job: MakeJob, tmp_path: Path) -> None:
    asked = {"eval_datasets": held_out_rows(tmp_path / "test.jsonl")}
    trained = make_job(lora=LORA, training={"max_steps": 1}, **asked).run()
    ended = evaluated(make_job, **asked)
    assert ended.metrics["eval_loss"] == trained.of("evaluation")[0]["metrics"]["eval_loss"]
    assert ended.of("predictions")[0]["scores"] == trained.of("predictions")[0]["scores"]


def test_a_quantized_base_model_alone_is_evaluated(make_job: MakeJob, tmp_path: Path) -> None:
    ended = evaluated(make_job, quantization="4bit", eval_datasets=held_out_rows(tmp_path / "test.jsonl"))
    assert ended.of("audit")[-1]["quantization"] == "4bit"
    assert ended.metrics["eval_loss"] > 0


def test_weights_that_were_narrowed_have_their_own_figures_each_time(make_job: MakeJob, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"eval_datasets": held_out_rows(tmp_path / "test.jsonl")}
    training = make_job("llama", training={"max_steps": 4, "learning_rate": 1e-3}, save_dtype="bfloat16", **asked)
    trained = training.run()
    assert trained.status == 0, trained.result
    once, twice = (evaluated(make_job, model=training.output_dir, **asked) for _ in range(2))
    assert once.metrics == twice.metrics
    assert once.metrics["eval_loss"] != trained.metrics["eval_loss"]
    assert once.metrics["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=0.05)


def test_rows_with_pictures_are_evaluated_bit_for_bit(make_job: MakeJob, tmp_path: Path) -> None:
    base = build_vision_checkpoint(tmp_path / "base", "qwen2_5_vl")
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in colored_rows(tmp_path / "images", 5, seed=1)))
    asked: dict[str, Any] = {"eval_datasets": [{"path": str(path)}], "predictions": {"max_new_tokens": 4}}
    training = make_job(
        model=base, rows=colored_rows(tmp_path / "images", 8), lora=LORA, training={"max_steps": 2}, **asked
    )
    trained = training.run()
    assert trained.status == 0, trained.result
    ended = evaluated(make_job, model=base, adapter=str(training.output_dir), **asked)
    for name, value in ended.metrics.items():
        assert trained.metrics[name] == value
    assert ended.of("data")[0]["num_media"] == 5


def test_an_evaluation_that_was_killed_begins_again(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(
        kind="evaluate", datasets=[], training=NO_TRAINING, eval_datasets=held_out_rows(tmp_path / "test.jsonl")
    )
    first, second = job.run(1), job.run(2)
    assert second.status == 0, second.result
    assert second.metrics == first.metrics


@pytest.mark.parametrize(
    ("batch", "question", "said"),
    [
        (0, 0, "after 0 of 4 batches and 0 of 5 predictions"),
        (2, 0, "after 2 of 4 batches and 0 of 5 predictions"),
        (9, 2, "after 4 of 4 batches and 2 of 5 predictions"),
    ],
    ids=["at once", "in the evaluation", "in the predictions"],
)
def test_an_evaluation_ends_by_itself_at_its_time_limit_with_what_it_has(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, question: int, said: str
) -> None:
    """The clock is set forward when this many batches and questions have been measured."""
    measure, ask = WatchedTrainer.prediction_step, Predictor._ask_batch
    trainers: list[Any] = []
    num_asked = 0

    def pass_time() -> None:
        trainers[-1]._limit._started_at -= 1000

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = measure(self, *args, **kwargs)
        trainers.append(self)
        if len(trainers) == batch:
            pass_time()
        return found

    def asked(self: Any, model: Any, questions: Any) -> Any:
        nonlocal num_asked
        found = ask(self, model, questions)
        num_asked += len(questions)
        if num_asked == question:
            pass_time()
        return found

    monkeypatch.setattr(WatchedTrainer, "prediction_step", measured)
    monkeypatch.setattr(Predictor, "_ask_batch", asked)
    keys: dict[str, Any] = {
        "kind": "evaluate",
        "datasets": [],
        "training": NO_TRAINING | {"per_device_eval_batch_size": 2},
        "eval_datasets": held_out_rows(tmp_path / "test.jsonl"),
        "predictions": {"num_samples": 5, "max_new_tokens": 4, "batch_size": 1},
    }
    ended = make_job(**keys, time_limit_sec=1000 if batch or question else 1e-6).run()
    assert ended.status == 88
    error = ended.result["error"]
    assert (ended.result["outcome"], error["code"]) == ("failed", "time_limit")
    assert error["message"].endswith(f"s reached {said}")
    assert ("eval_loss" in ended.metrics) is bool(batch)
    told = ended.of("evaluation")[-1]["metrics"]
    assert ended.metrics.get("eval_loss") == told.get("eval_loss")
    if 0 < batch < 4:  # the speed is that of the rows that were measured
        assert told["eval_samples_per_second"] * told["eval_runtime"] == pytest.approx(2 * batch, rel=0.1)
        assert not any(name.startswith("eval_loss/") for name in told)
    assert sum(len(each["rows"]) for each in ended.of("predictions")) == question
    assert ("predictions/exact_match" in ended.metrics) is bool(question)
    if batch == 9:  # the evaluation was whole
        monkeypatch.undo()
        assert make_job(**keys).run().metrics["eval_loss"] == ended.metrics["eval_loss"]


def test_a_group_of_which_rows_were_not_measured_has_no_loss() -> None:
    """Four rows in batches of one: both of `first` and one of `second` are measured before the time is over."""
    kinds = (frozenset({"first"}), frozenset({"second"}))
    codes = np.array([0, 0, 1, 1])
    groups = Groups(("first", "second"), frozenset(), kinds, codes, codes.astype(np.int32))
    means = TokenMeans(Kinds(groups, codes))
    assert means.batches(1) == [[0], [1], [2], [3]]
    means.begin()
    for loss in (1.0, 3.0, 5.0):
        means.count(torch.tensor([[-100, 1, 1]]))
        means.add(torch.tensor(loss))
    means.weigh({"eval_loss": 3.0}, "eval_loss", {})
    assert means.num_measured(1) == 3
    assert means.of_groups("eval_loss") == {"eval_loss/first": 2.0}
