"""Held-out, truncated and skipped rows: a job gets what it asked for, and losses are reported with a remedy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from honed.inputs import dataset
from honed.inputs.row import Example
from worker.conftest import MakeJob

LORA = {"r": 4}
OFF = {"sample_frequency": "off"}
SHORT = {"prompt": "Why?", "completion": "So."}
CUT = {"prompt": "Why?", "completion": "because " * 80}
LOST = {"prompt": "why " * 80, "completion": "So."}


def numbered(row: dict[str, str], number: int) -> dict[str, str]:
    """Return the row with a text of its own."""
    return row | {"prompt": f"{number}: {row['prompt']}"}


def held_out(number: int, share: float) -> set[int]:
    """Return the indices of the rows that a split holds out, with the seed that jobs have."""
    examples = [Example("text", text=str(place)) for place in range(number)]
    return {int(example.text) for example in dataset.split(examples, share, 42)[1]}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"guard": {"metric": "exact_match"}},
        {"early_stopping_patience": 2},
        {"training": {"eval_strategy": "epoch"}},
    ],
    ids=["alone", "guard", "early stopping", "eval_strategy"],
)
def test_a_job_none_of_whose_held_out_rows_is_left_is_refused_whatever_it_wants_of_them(
    make_job: MakeJob, keys: dict[str, Any]
) -> None:
    places = held_out(20, 0.1)
    rows = [numbered(LOST if place in places else SHORT, place) for place in range(20)]
    training = {"max_steps": 2, "max_length": 48} | keys.get("training", {})
    ended = make_job(rows=rows, lora=LORA, eval_split=0.1, **keys | {"training": training}).run()
    error = ended.result["error"]
    assert (error["code"], ended.losses) == ("dataset_invalid", {})
    assert error["message"].startswith("no row is left to evaluate on, of 2 that eval_split holds out; the first: ")
    assert f"row {min(places) + 1}: nothing to train on in its first 48 tokens" in error["message"]
    assert "increase training.max_length" in error["hint"]
    assert "a larger eval_split" in error["hint"]


def test_held_out_rows_some_of_which_are_left_out_are_evaluated_on_and_the_loss_is_told(make_job: MakeJob) -> None:
    lost = min(held_out(20, 0.1))
    rows = [numbered(LOST if place == lost else SHORT, place) for place in range(20)]
    ended = make_job(
        rows=rows, lora=LORA, eval_split=0.1, predictions=OFF, training={"max_steps": 1, "max_length": 48}
    ).run()
    assert ended.status == 0, ended.result
    assert ended.of("data")[0]["num_eval"] == 1
    [told] = ended.messages("warning")
    assert told.startswith("1 row is skipped; the first: ")
    assert told.endswith("; 1 of them because they are too long: increase training.max_length")


def test_rows_that_are_trained_on_and_held_out_are_counted_and_told_packed_ones_too(
    make_job: MakeJob, tmp_path: Path
) -> None:
    rows = [numbered(SHORT, place) for place in range(6)]
    held = tmp_path / "held.jsonl.gz"
    held.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in [*rows[4:], SHORT]).encode()))
    datasets.Dataset.from_list([numbered(SHORT, place) for place in range(6, 9)]).save_to_disk(tmp_path / "saved")
    ended = make_job(
        rows=[*rows, *rows],
        lora=LORA,
        predictions=OFF,
        training={"max_steps": 1},
        eval_datasets=[{"path": str(held)}, {"path": str(tmp_path / "saved")}],
    ).run()
    assert ended.status == 0, ended.result
    [data] = ended.of("data")
    assert (data["num_train"], data["num_eval"], data["num_twice"], data["num_in_both"]) == (12, 6, 6, 2)
    told = ended.messages("warning")
    assert [text for text in told if text.startswith("2 of 6 held-out rows are also trained on")]
    assert [text for text in told if text.startswith("6 of 12 training rows repeat an earlier row")]


def test_rows_that_say_the_same_are_on_one_side(make_job: MakeJob) -> None:
    rows = [numbered(SHORT, place % 10) for place in range(20)]
    job = make_job(rows=rows, lora=LORA, eval_split=0.3, predictions=OFF, training={"max_steps": 1})
    assert job.run().of("data")[0]["num_in_both"] == 0


@pytest.mark.parametrize(("rows", "is_told"), [([CUT, CUT, SHORT], True), ([CUT, SHORT], False)], ids=["most", "half"])
def test_most_rows_cut_earn_a_warning(make_job: MakeJob, rows: list[dict[str, str]], is_told: bool) -> None:
    ended = make_job(rows=rows, lora=LORA, predictions=OFF, training={"max_steps": 1, "max_length": 48}).run()
    assert ended.status == 0, ended.result
    told = [text for text in ended.messages("warning") if "truncated after" in text]
    assert len(told) == is_told
    if is_told:
        assert told[0].startswith("2 of 3 rows are truncated after training.max_length tokens")
        assert int(told[0].rsplit(" ", 1)[1]) > 80, "the longest, so that one knows how long is long enough"


@pytest.mark.parametrize(
    ("template", "format_", "level"),
    [
        ("words", "messages", "warning"),
        ("words", "text", None),
        ("llama3", "messages", "info"),
        ("chatml", "messages", None),
    ],
)
def test_what_deserves_a_word_of_a_chat_template_is_told_once_before_training(
    make_job: MakeJob, template: str, format_: Any, level: str | None
) -> None:
    ended = make_job(
        model={"template": template}, format=format_, lora=LORA, predictions=OFF, training={"max_steps": 1}
    ).run()
    assert ended.status == 0, ended.result
    said = [item for item in ended.of("log") if "turn" in item["message"] and "stop" in item["message"]]
    assert [item["level"] for item in said] == ([level] if level else [])
    kinds = [item.kind for item in ended.events]
    if level == "warning":
        assert "chat_template:" in said[0]["message"]
        assert next(n for n, item in enumerate(ended.events) if item.data == said[0]) < kinds.index("step")


def test_the_best_checkpoint_is_wanted_and_each_evaluation_writes_one(make_job: MakeJob) -> None:
    training = {
        "max_steps": 4,
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "max_length": 48,
        "metric_for_best_model": "eval_mean_token_accuracy",
    }
    rows = [numbered(SHORT, place) for place in range(20)]
    job = make_job(rows=rows, lora=LORA, eval_split=0.1, training=training, backend="transformers")
    ended = job.run()
    assert ended.result["outcome"] == "succeeded", ended.result["error"]
    assert {"checkpoint-2", "checkpoint-4"} <= {path.name for path in (job.dir / "checkpoints").iterdir()}
