"""Metrics of each held-out data set and of each tag of rows: which skill fell, from the same passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from honed.job.database import figures
from honed.worker.train.trainer import WatchedTrainer
from worker.conftest import Ended, MakeJob
from zoo.model import write_facts

LORA = {"r": 4}


def row(question: str, answer: str, **columns: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **columns}


def written(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return {"path": str(path)}


def sums(number: int = 7) -> list[dict[str, Any]]:
    """Return sums, of which each third is also `hard`."""
    return [row(f"{n} + {n}?", f"{2 * n}", tags=["sums", *(["hard"] if n % 3 == 0 else [])]) for n in range(number)]


def capitals() -> list[dict[str, Any]]:
    cities = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Austria": "Vienna"}
    return [row(f"The capital of {country}, please?", f"{city}.", tag="capitals") for country, city in cities.items()]


def test_losses_and_scores_are_told_by_data_set_and_tag_from_the_same_passes(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    step = WatchedTrainer.prediction_step

    def counting(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(inputs["input_ids"]))
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(WatchedTrainer, "prediction_step", counting)
    sets = [
        written(tmp_path / "sums.jsonl", sums()),
        written(tmp_path / "b.jsonl", capitals()) | {"label": "geography"},
    ]
    asked: dict[str, Any] = {"dtype": "float32", "predictions": {"num_samples": 6, "max_new_tokens": 4}}
    asked["training"] = {"max_steps": -1, "per_device_train_batch_size": 8, "learning_rate": 2e-5}
    whole = make_job(kind="evaluate", datasets=[], eval_datasets=sets, **asked).run()
    assert whole.status == 0, whole.result
    assert sum(seen) == 12, "each row once"
    losses = {name: value for name, value in whole.metrics.items() if name.startswith("eval_loss/")}
    assert sorted(losses) == [
        "eval_loss/geography",
        "eval_loss/sums",
        "eval_loss/tag:capitals",
        "eval_loss/tag:hard",
        "eval_loss/tag:sums",
    ]
    assert losses["eval_loss/tag:sums"] == losses["eval_loss/sums"]
    for name, rows in {"sums": sums(), "geography": capitals(), "tag:hard": sums()[::3]}.items():
        alone = make_job(
            kind="evaluate", datasets=[], eval_datasets=[written(tmp_path / "alone.jsonl", rows)], **asked
        ).run()
        assert alone.metrics["eval_loss"] == pytest.approx(losses[f"eval_loss/{name}"], rel=1e-5), name
    [told] = whole.of("predictions")
    assert len([each for each in told["rows"] if "capital" in each["prompt"]]) == 3, "as many of each data set"
    assert {"exact_match/sums", "exact_match/geography", "exact_match/tag:capitals"} <= set(told["scores"])
    [stored] = [figures(item) for item in whole.events if item.kind == "predictions"]
    assert "predictions/exact_match/tag:capitals" in stored
    assert whole.metrics["predictions/exact_match/tag:capitals"] == told["scores"]["exact_match/tag:capitals"]


def forgetting(make_job: MakeJob, learned: Path, directory: Path, **keys: Any) -> Ended:
    """Train a model that knows four capitals on sums, and hold out both."""
    known = [json.loads(line) for line in write_facts(directory / "known.jsonl", 4).read_text().splitlines()]
    return make_job(
        model=learned,
        rows=[row(f"{n} + {n}?", f"{2 * n}") for n in range(20, 32)],
        eval_datasets=[written(directory / "held.jsonl", [*sums(), *({**each, "tag": "capitals"} for each in known)])],
        training={"max_steps": 30, "learning_rate": 0.01},
        dtype="float32",
        predictions={"num_samples": 11, "max_new_tokens": 8},
        **keys,
    ).run()


def test_a_training_tells_which_of_its_parts_got_worse(make_job: MakeJob, learned: Path, tmp_path: Path) -> None:
    ended = forgetting(make_job, learned, tmp_path)
    assert ended.status == 0, ended.result
    before, *_, after = (item["metrics"] for item in ended.of("evaluation"))
    tags = ("capitals", "hard", "sums")
    assert {name for name in before if "/" in name} == {f"eval_loss/tag:{name}" for name in tags}
    assert {name: ended.metrics[name] for name in after if "/" in name} == {
        name: value for name, value in after.items() if "/" in name
    }
    assert after["eval_loss/tag:sums"] < before["eval_loss/tag:sums"]
    assert "eval_loss/tag:capitals rose from" in ended.result["remark"]
    assert "exact_match/tag:capitals fell from 1.000" in ended.result["remark"]
    assert "tag:sums" not in ended.result["remark"]


def test_a_guard_watches_the_rows_with_a_tag(make_job: MakeJob, learned: Path, tmp_path: Path) -> None:
    ended = forgetting(make_job, learned, tmp_path, guard={"metric": "exact_match/tag:capitals", "max_drop": 0.5})
    assert ended.result["error"]["code"] == "regressed", ended.result
    assert ended.result["error"]["message"].startswith("exact_match/tag:capitals fell from 1.000")
    first, *_ = ended.of("guard")
    assert (first["metric"], first["num_failed"]) == ("exact_match/tag:capitals", 0)
    assert first["scores"]["exact_match/tag:capitals"] == 1.0, "of four rows, none of them a sum"


def test_a_guard_of_rows_that_are_not_there_ends_the_job_before_its_first_step(
    make_job: MakeJob, tmp_path: Path
) -> None:
    ended = make_job(
        lora=LORA,
        eval_datasets=[written(tmp_path / "held.jsonl", sums())],
        guard={"metric": "exact_match/tag:capitals"},
    ).run()
    error = ended.result["error"]
    assert (error["code"], ended.losses) == ("dataset_invalid", {})
    assert "no held-out row of tag:capitals" in error["message"]
    assert "tag:hard, tag:sums" in error["hint"]


def test_of_many_tags_the_most_frequent_have_metrics_and_the_rest_is_told(make_job: MakeJob, tmp_path: Path) -> None:
    rows = [row(f"{n} + 1?", str(n + 1), tags=[f"t{n:02}", "all"]) for n in range(40)]
    ended = make_job(
        kind="evaluate",
        datasets=[],
        eval_datasets=[written(tmp_path / "held.jsonl", rows)],
        training={"max_steps": -1, "per_device_train_batch_size": 8, "learning_rate": 2e-5},
        predictions={"sample_frequency": "off"},
    ).run()
    assert ended.status == 0, ended.result
    names = {name for name in ended.metrics if "/" in name}
    assert len(names) == 32
    assert ended.metrics["eval_loss/tag:all"] == pytest.approx(ended.metrics["eval_loss"], rel=1e-5)
    assert "41 tags: only the 32 most frequent have metrics of their own" in ended.messages("warning")


@pytest.mark.parametrize("keys", [{"packing": True, "max_length": 64}, {"shuffle_dataset": True}], ids=str)
def test_rows_that_trl_packs_or_shuffles_have_scores_alone_and_this_is_told(
    make_job: MakeJob, tmp_path: Path, keys: dict[str, Any]
) -> None:
    ended = make_job(
        lora=LORA,
        eval_datasets=[written(tmp_path / "held.jsonl", sums())],
        training={"max_steps": 1, **keys},
    ).run()
    assert ended.status == 0, ended.result
    assert not [name for name in ended.metrics if name.startswith("eval_loss/")]
    assert "predictions/exact_match/tag:sums" in ended.metrics
    assert any("no evaluation loss by data set and tag" in text for text in ended.messages("info"))
