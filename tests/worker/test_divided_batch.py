"""A batch divided is the same batch: over accumulation, the gradient of a step is that of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from worker.conftest import MakeJob, WorkerJob

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


def divided(make_job: MakeJob, family: str, model: Any, **keys: Any) -> list[WorkerJob]:
    """Run one step on the same rows in each way."""
    training = STEP | keys.pop("training", {})
    jobs = []
    for size, number in WAYS:
        batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": number}
        job = make_job(
            family,
            model=model,
            rows=rows(),
            dtype="float32",
            predictions={"sample_frequency": "off"},
            training=training | batch,
            **keys,
        )
        ended = job.run()
        assert ended.status == 0, ended.result
        jobs.append(job)
    return jobs


def gradient(job: WorkerJob, base: Path) -> dict[str, torch.Tensor]:
    """Return the gradient of the job's step."""
    before, after = load_file(base / "model.safetensors"), load_file(job.output_dir / "model.safetensors")
    return {name: (before[name] - after[name]) / RATE for name in before}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two gradients, as a share of the largest element."""
    largest = max(float(each.abs().max()) for each in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def base_of(job: WorkerJob) -> Path:
    return Path(job.plan["base_model_path"])


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {},
    "rwkv": {"template": "chatml", "attention_hidden_size": 64},
    "doge": {"template": "chatml"},
    "mamba": {"template": "chatml", "state_size": 8},
    "lfm2": {"template": "chatml", "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_one_gradient(make_job: MakeJob, family: str) -> None:
    whole, *parts = [gradient(job, base_of(job)) for job in divided(make_job, family, FAMILIES[family])]
    assert all(distance(whole, part) < 1e-5 for part in parts)
