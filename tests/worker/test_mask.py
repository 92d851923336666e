"""The check before the first step: the batch that really reaches the model, whatever lies between it and the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker.conftest import Ended, MakeJob


def sabotage(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Make TRL's collator corrupt the labels."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling.torch_call

    def spoilt(self: Any, examples: Any) -> Any:
        batch = collate(self, examples)
        spoil(batch)
        return batch

    monkeypatch.setattr(DataCollatorForLanguageModeling, "torch_call", spoilt)


def train_everything(batch: Any) -> None:
    batch["labels"] = batch["input_ids"].where(batch["attention_mask"].bool(), batch["labels"])


def train_padding(batch: Any) -> None:
    batch["labels"] = batch["labels"].where(batch["attention_mask"].bool(), batch["input_ids"])


def train_one_token_late(batch: Any) -> None:
    batch["labels"] = batch["labels"].roll(1, dims=1).where(batch["attention_mask"].bool(), batch["labels"])


def train_nothing(batch: Any) -> None:
    batch["labels"][:] = -100


def lose_a_token(batch: Any) -> None:
    """Remove the first token: ids and labels agree, but belong to no row."""
    for name in ("input_ids", "labels", "attention_mask"):
        batch[name] = batch[name][:, 1:]


@pytest.mark.parametrize(
    ("spoil", "words", "remedy"),
    [
        (train_everything, "the trained text is not the completion", "honectl preview FILE"),
        (train_padding, "padding is trained on", "training.packing"),
        (train_one_token_late, "the labels are not the row's tokens", "honectl preview FILE"),
        (train_nothing, "nothing is trained on", "honectl preview FILE"),
        (lose_a_token, "a batch contains tokens that belong to no row: '", "honectl doctor"),
    ],
)
def test_a_mask_that_is_spoilt_on_its_way_ends_the_job_before_its_first_step(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, spoil: Any, words: str, remedy: str
) -> None:
    long = {"prompt": "What is the capital of Norway, and of Sweden?", "completion": "Oslo."}
    short = {"prompt": "And of Peru?", "completion": "Lima."}
    sabotage(monkeypatch, spoil)
    ended = make_job(rows=[long, short], lora={"r": 4}).run()
    assert ended.status == 81, ended.result
    error = ended.result["error"]
    assert error["code"] == "mask_invalid"
    assert words in error.get("evidence", error["message"])
    assert remedy in error["hint"]
    assert not ended.of("step")
    assert not ended.of("predictions")


def test_the_check_leaves_the_order_of_the_rows_as_it_was(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = make_job(lora={"r": 4, "lora_dropout": 0.1}).run()
    monkeypatch.setattr("honed.worker.rows.mask.NUM_BATCHES", 0)
    monkeypatch.setattr("honed.worker.rows.mask._hint", lambda *_: None)
    assert make_job(lora={"r": 4, "lora_dropout": 0.1}).run().losses == checked.losses


def test_a_batch_that_is_mostly_trained_on_earns_a_hint_unless_it_is_text(make_job: MakeJob) -> None:
    rows = [{"prompt": "Go on", "completion": "and on, " * 20}]
    off = {"lora": {"r": 4}, "training": {"max_steps": 1}, "predictions": {"sample_frequency": "off"}}
    assert any("trained on" in text for text in make_job(rows=rows, **off).run().messages("warning"))
    assert not make_job(format="text", **off).run().messages("warning")
    # The zoo's qwen2 has a tokenizer.json that its class does not follow, which is a warning of its own.
    [warning] = make_job("qwen2", **off).run().messages("warning")
    assert "tokenizer.json is loaded as it is" in warning


def test_turns_of_weight_0_count_neither_in_training_nor_in_what_is_held_out(make_job: MakeJob, tmp_path: Path) -> None:
    """A row whose last turn has weight 0 is trained and evaluated like the row without that turn: later tokens change
    nothing for the trained turn."""
    turns = [{"role": "user", "content": "Capital of Peru?"}, {"role": "assistant", "content": "Lima."}]
    more = [{"role": "user", "content": "And of Chile?"}, {"role": "assistant", "content": "Oslo.", "weight": 0}]
    nothing = {"messages": [turns[0], turns[1] | {"train": False}]}

    def run(row: dict[str, Any], *others: dict[str, Any]) -> Ended:
        (tmp_path / "held.jsonl").write_text(json.dumps(row) + "\n")
        return make_job(
            "llama",
            rows=[row, *others],
            eval_datasets=[{"path": str(tmp_path / "held.jsonl")}],
            dtype="float32",
            training={"max_steps": 1},
            predictions={"num_samples": 1, "max_new_tokens": 2},
            lora={"r": 4},
        ).run()

    plain, weighed = run({"messages": turns}), run({"messages": [*turns, *more]}, nothing)
    assert weighed.status == plain.status == 0, weighed.result
    [told], [expected] = weighed.of("data"), plain.of("data")
    assert told["num_tokens"] > expected["num_tokens"]
    assert told["num_trained_tokens"] == expected["num_trained_tokens"]
    assert (told["num_dropped"], expected["num_dropped"]) == (1, 0)
    assert any(
        "row 2: no assistant turn to train on: all of them have weight 0" in t for t in weighed.messages("warning")
    )
    assert weighed.losses == pytest.approx(plain.losses, abs=1e-5)
    losses = [[e["metrics"]["eval_loss"] for e in ended.of("evaluation")] for ended in (weighed, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[1]
    assert weighed.of("predictions")[0]["rows"][0]["ground_truth"] == "Lima."
