"""The real Unsloth, in processes of its own: it patches what it finds, for good."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from worker.conftest import MakeJob

pytestmark = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth")

KEYS: dict[str, Any] = {
    "lora": {"r": 8}, "eval_split": 0.2, "backend": "unsloth",
    "training": {"max_steps": 4}, "predictions": {"num_samples": 2, "max_new_tokens": 4},
}  # fmt: skip


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_a_job_trains_through_unsloth(make_job: MakeJob, quantization: str) -> None:
    job = make_job(**KEYS, quantization=quantization)
    ended = job.wait(job.start())
    assert ended.status == 0, (ended.result, job.log()[-3000:])
    assert "unsloth" in ended.of("started")[0]["versions"]
    assert "Unsloth" in job.log()
    assert sorted(ended.losses) == [1, 2, 3, 4]
    assert ended.of("evaluation")
    assert sum(item["num_failed"] for item in ended.of("predictions")) == 0
    assert (job.output_dir / "adapter_model.safetensors").exists()
    plain = make_job(**(KEYS | {"backend": "transformers"}), quantization=quantization).run()
    assert ended.metrics["num_trained_tokens"] == plain.metrics["num_trained_tokens"]
    assert [item["segments"] for item in ended.of("example")] == [item["segments"] for item in plain.of("example")]


def test_what_unsloth_changes_silently_is_a_precision_mismatch(make_job: MakeJob) -> None:
    job = make_job(**(KEYS | {"backend": "transformers"}), quantization="8bit")  # the planner would refuse it
    job.change_plan(backend={"name": "unsloth", "reasons": []})
    ended = job.wait(job.start())
    assert ended.status == 80
    assert "8bit" in ended.result["error"]["message"]
    assert not ended.of("step")


def test_an_unsloth_that_cannot_be_imported_ends_the_process_with_its_own_status(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "site/unsloth"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise NotImplementedError('Unsloth cannot find any torch accelerator?')\n")
    monkeypatch.syspath_prepend(str(broken.parent))
    job = make_job(**KEYS)
    ended = job.wait(job.start())
    assert ended.status == 69
    assert ended.result["error"]["code"] == "backend_unavailable"
    assert "torch accelerator" in ended.result["error"]["message"]
    again = job.wait(job.start(1, "--backend", "transformers"))  # the same attempt, as the daemon falls back
    assert again.status == 0, again.result
    assert [item["backend"] for item in again.of("started")] == ["unsloth", "transformers"]
    assert "unsloth" not in again.of("started")[1]["versions"]


def test_a_load_that_fails_in_unsloth_is_the_backends_fault(make_job: MakeJob) -> None:
    job = make_job(**(KEYS | {"lora": {"r": 8, "target_modules": ["no_such_module"]}}))
    ended = job.wait(job.start())
    assert ended.status == 69
    assert "no_such_module" in ended.result["error"]["message"]
