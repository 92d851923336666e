"""Predictions: their contents, and that they leave no trace in the training."""

from __future__ import annotations

from typing import Any

import pytest

from worker.conftest import MakeJob

DROPOUT = {"r": 8, "lora_dropout": 0.2}
TRAINING = {
    "max_steps": 8,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"lora": DROPOUT, "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"lora": DROPOUT, "dtype": "bfloat16", "training": {"gradient_checkpointing": False}},
    ],
    ids=["accumulation", "full", "no-gradient-checkpointing"],
)
def test_losses_with_predictions_are_those_without_in_other_ways_of_training(make_job: MakeJob, keys: dict) -> None:
    keys = keys | {"eval_split": 0.3, "training": TRAINING | keys.get("training", {})}
    predicting = make_job(**keys, predictions={"sample_frequency": 1, "num_samples": 3, "max_new_tokens": 8}).run()
    silent = make_job(**keys, predictions={"sample_frequency": "off"}).run()
    assert predicting.status == silent.status == 0, (predicting.result, silent.result)
    assert predicting.losses == silent.losses
    assert len(predicting.of("predictions")) == 9
    assert not silent.of("predictions")
    assert sum(item["num_failed"] for item in predicting.of("predictions")) == 0
    silent_evals = [item["metrics"]["eval_loss"] for item in silent.of("evaluation")]
    assert [item["metrics"]["eval_loss"] for item in predicting.of("evaluation")] == silent_evals


def test_a_4bit_model_that_was_asked_before_its_first_step_learns_the_same(make_job: MakeJob) -> None:
    # bitsandbytes repacks 4-bit weights at the first forward in eval mode, on CPUs with AVX512-BF16.
    keys = {"lora": DROPOUT, "quantization": "4bit", "training": {"learning_rate": 2e-2}}
    asked = make_job(**keys, predictions={"sample_frequency": "eval"}).run()
    silent = make_job(**keys, predictions={"sample_frequency": "off"}).run()
    assert [item["step"] for item in asked.of("predictions")] == [0, 6]
    assert asked.losses == silent.losses


@pytest.mark.parametrize(
    ("frequency", "steps"), [("eval", [0, 2, 4, 6]), ("epoch", [0, 3, 6]), (4, [0, 4, 6]), ("off", [])]
)
def test_predictions_are_made_when_they_were_asked_for(
    make_job: MakeJob, frequency: str | int, steps: list[int]
) -> None:
    job = make_job(
        lora=DROPOUT,
        num_rows=8,
        eval_split=0.25,
        training={"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2},
        predictions={"sample_frequency": frequency, "num_samples": 2},
    )
    ended = job.run()
    assert [item["step"] for item in ended.of("predictions")] == steps
    for item in ended.of("predictions"):
        assert [row["sample_index"] for row in item["rows"]] == [0, 1]
        assert isinstance(item["epoch"], float)


def test_the_jobs_own_prompts_take_the_place_of_held_out_rows(make_job: MakeJob) -> None:
    predictions = {"prompts": ["What is the capital of France?", "And you?"]}
    ended = make_job(lora=DROPOUT, training={"max_steps": 1}, predictions=predictions).run()
    first = ended.of("predictions")[0]
    assert [row["ground_truth"] for row in first["rows"]] == ["", ""]
    assert "And you?" in first["rows"][1]["prompt"]
    assert first["rows"][1]["prompt"].endswith("<|im_start|>assistant\n")


def test_one_prompt_that_fails_does_not_cost_the_others(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM

    generate = Qwen3ForCausalLM.generate

    def choosy(self: Qwen3ForCausalLM, *args: Any, **kwargs: Any) -> Any:
        if (kwargs["attention_mask"].sum(dim=1) > 60).any():
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3ForCausalLM, "generate", choosy)
    predictions = {"prompts": ["short", "long " * 60, "short again"], "max_new_tokens": 4}
    ended = make_job(lora=DROPOUT, training={"max_steps": 2}, predictions=predictions).run()
    assert ended.status == 0
    for item in ended.of("predictions"):
        assert item["num_failed"] == 1
        assert [row["sample_index"] for row in item["rows"]] == [0, 2]
    [told] = [text for text in ended.messages("warning") if "prediction failed" in text]
    assert "autocast off" in told
    assert "torch.bfloat16" in told
    assert "cpu" in told
    assert told.endswith("set `predictions: {autocast: match}` to use the autocast of training")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_modules_that_are_trained_whole_predict_too(make_job: MakeJob, dtype: str) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    ended = make_job(lora=lora, dtype=dtype, eval_split=0.2, training={"max_steps": 2}).run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0], ended.messages("warning")
