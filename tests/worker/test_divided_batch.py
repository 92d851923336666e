"""A batch divided is the same batch: over accumulation, the gradient of a step is that of the whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from worker.conftest import MakeJob, WorkerJob, read_events
from worker.test_ranks import Run, over_two
from zoo.paligemma import build_paligemma
from zoo.vision import build_vision_checkpoint

#: One step of plain gradient descent: the weights move by the gradient times this.
RATE = 0.5
STEP: dict[str, Any] = {
    "max_steps": 1,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "weight_decay": 0,
    "train_sampling_strategy": "sequential",
}
#: Rows per batch, and batches per step.
WAYS = ((4, 1), (2, 2), (1, 4))
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def rows() -> list[dict[str, Any]]:
    """Return rows of very different lengths, of which some are hard to guess."""
    answers = ("Rome.", "Oslo. Lima. Cairo. Tokyo. Paris.", "no", "What is the capital of Chile? Santiago." * 3)
    return [
        {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]


def divided(make_job: MakeJob, family: str, model: Any, *, ways: Any = WAYS, **keys: Any) -> list[WorkerJob]:
    """Run one step on the same rows in each way."""
    training = STEP | keys.pop("training", {})
    jobs = [one_step(make_job, family, model, training | batch(*way), **keys) for way in ways]
    for job in jobs:
        ended = job.run()
        assert ended.status == 0, ended.result
    return jobs


def batch(size: int, number: int) -> dict[str, int]:
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": number}


def one_step(make_job: MakeJob, family: str, model: Any, training: dict[str, Any], **keys: Any) -> WorkerJob:
    off = {"sample_frequency": "off"}
    return make_job(family, model=model, rows=rows(), dtype="float32", predictions=off, training=training, **keys)


def first_step(job: WorkerJob) -> dict[str, Any]:
    return next(each.data for each in read_events(job.events_path(1)) if each.kind == "step")


def gradient(job: WorkerJob) -> dict[str, torch.Tensor]:
    """Return the gradient of the job's step."""
    base = Path(job.plan["base_model_path"])
    before, after = load_file(base / "model.safetensors"), load_file(job.output_dir / "model.safetensors")
    return {name: (before[name] - after[name]) / RATE for name in before}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two gradients, as a share of the largest element."""
    largest = max(float(each.abs().max()) for each in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {},
    "rwkv": {"template": "chatml", "attention_hidden_size": 64},
    "doge": {"template": "chatml"},
    "mamba": {"template": "chatml", "state_size": 8},
    "lfm2": {"template": "chatml", "layer_types": ["conv", "full_attention"]},
}
NO_BALANCE = {"router_aux_loss_coef": 0.0}


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.exhaustive if each in {"gemma2", "lfm2"} else []) for each in FAMILIES],
)
def test_a_step_has_one_gradient(make_job: MakeJob, family: str) -> None:
    training = NO_BALANCE if family == "doge" else {}
    whole, *parts = [gradient(job) for job in divided(make_job, family, FAMILIES[family], training=training)]
    assert all(distance(whole, part) < 1e-5 for part in parts)


def test_rows_that_a_wide_batch_changes_are_taken_singly(make_job: MakeJob) -> None:
    model = {"template": "chatml", "keep_window_size": 16}
    jobs = divided(make_job, "doge", model, training=NO_BALANCE)
    whole, *parts = map(gradient, jobs)
    assert all(distance(whole, part) < 1e-5 for part in parts)
    logs = [[each.data["message"] for each in read_events(job.events_path(1)) if each.kind == "log"] for job in jobs]
    said = [sum("are trained and evaluated one at a time" in line for line in lines) for lines in logs]
    assert said == [1, 1, 1]  # also evaluations have batches of several


def test_a_model_that_sees_later_tokens_is_refused(make_job: MakeJob) -> None:
    job = one_step(make_job, "doge", {"template": "chatml"}, STEP | NO_BALANCE, attn_implementation="sdpa")
    ended = job.run()
    assert ended.result["error"]["code"] == "loss_mismatch"
    assert ended.result["error"]["hint"] == "attn_implementation: eager"
    assert one_step(make_job, "doge", {"template": "chatml"}, STEP | NO_BALANCE).run().status == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_that_padding_changes_are_asked_singly(make_job: MakeJob, dtype: str) -> None:
    """rwkv's state takes in whatever stands before the prompt."""
    model = {"template": "chatml", "attention_hidden_size": 64}
    told, answers = [], []
    for size in (None, 1):
        asked = {"num_samples": 4, "max_new_tokens": 6, "batch_size": size}
        job = make_job("rwkv", model=model, rows=rows(), dtype=dtype, predictions=asked, training=STEP, lora={"r": 4})
        ended = job.run()
        told.append("padding on the left" in " ".join(ended.messages("info")))
        answers.append([row["prediction"] for row in ended.of("predictions")[0]["rows"]])
    assert told == [True, False]
    assert answers[0] == answers[1]


def test_the_loss_of_unbalanced_routing_counts_once(make_job: MakeJob) -> None:
    """It is not linear in the tokens of a pass: its share of the gradient has the right size, not the same bits."""
    model = EXPERTS | {"template": "chatml"}
    without = gradient(divided(make_job, "qwen3_moe", model, training=NO_BALANCE, ways=WAYS[:1])[0])
    jobs = divided(make_job, "qwen3_moe", model, training={"router_aux_loss_coef": 2.0})
    shares = [{name: each[name] - without[name] for name in each} for each in map(gradient, jobs)]
    assert all(distance(shares[0], share) < 0.5 for share in shares[1:])
    steps = [first_step(job) for job in jobs]
    assert [step["loss"] for step in steps] == pytest.approx([steps[0]["loss"]] * 3, abs=0.05)
    assert [step["aux_loss"] for step in steps] == pytest.approx([steps[0]["aux_loss"]] * 3, abs=0.02)
    assert steps[0]["aux_loss"] > 1.5  # and so the loss would be more than 4 higher for the second, 12 for the third


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "paligemma"])
def test_means_over_a_batch_count_by_its_tokens(make_job: MakeJob, tmp_path: Path, family: str) -> None:
    build = build_paligemma if family == "paligemma" else functools.partial(build_vision_checkpoint, family=family)
    base = build(tmp_path / "base")
    whole, *parts = [gradient(job) for job in divided(make_job, family, base)]
    assert all(distance(whole, part) < 1e-5 for part in parts)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen2_5_vl", "ddp"),
        ("qwen3_moe", "fsdp"),
        pytest.param("qwen2_5_vl", "fsdp", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "ddp", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_have_the_gradient_of_one_process(make_job: MakeJob, tmp_path: Path, family: str, mode: str) -> None:
    """Two ranks, of which one has nearly all tokens: in one batch each, or in two."""
    is_moe = family == "qwen3_moe"
    model = EXPERTS | {"template": "chatml"} if is_moe else build_vision_checkpoint(tmp_path / "base", family)
    training = STEP | ({"router_aux_loss_coef": 2.0} if is_moe else {})
    whole = one_step(make_job, family, model, training | batch(4, 1))
    assert whole.run().status == 0
    for size in (2, 1):
        job = over_two(one_step(make_job, family, model, training | batch(size, 2 // size)), mode=mode)
        job.change_plan(parallel=job.plan["parallel"] | batch(size, 2 // size))
        run = Run(job)
        assert run.end().status == 0, run.log[-3000:]
        assert distance(gradient(whole), gradient(job)) < (0.2 if is_moe else 1e-5)
        assert first_step(job)["loss"] == pytest.approx(first_step(whole)["loss"], abs=0.1 if is_moe else 1e-5)
