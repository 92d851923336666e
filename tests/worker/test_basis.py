"""A run that resumes an adapter stands on the base that was trained, or ends with the names of what differs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.conftest import Ended, MakeJob, WorkerJob
from zoo.model import build_checkpoint

RUN = {"training": {"max_steps": 3, "save_steps": 1}, "predictions": {"sample_frequency": "off"}}
WAYS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"r": 4}},
    "pissa": {"lora": {"r": 4, "init_lora_weights": "pissa"}, "dtype": "bfloat16"},
    "olora": {"lora": {"r": 4, "init_lora_weights": "olora"}},
    "olora, 4 bit": {"lora": {"r": 4, "init_lora_weights": "olora"}, "quantization": "4bit"},
}


def message(ended: Ended) -> str:
    assert ended.result["error"]["code"] == "model_invalid", ended.result
    return str(ended.result["error"]["message"])


@pytest.mark.parametrize("way", WAYS)
def test_a_base_that_was_replaced_meanwhile_ends_the_run_until_it_is_back(
    way: str, make_job: MakeJob, tmp_path: Path
) -> None:
    base = build_checkpoint(tmp_path / "base", "llama", dtype="bfloat16")
    job = make_job(model=base, **RUN, **WAYS[way])
    job.stopped_at(1)
    kept = shutil.copyfile(base / "model.safetensors", tmp_path / "kept")
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name] * (1 + 2**-6)  # as a few steps of another training
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert "has other weights than the run began with: model.layers.1" in message(job.run(2))
    shutil.copyfile(kept, base / "model.safetensors")
    assert job.run(3).status == 0


def replaced_svd(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """Have torch find other singular vectors, as another version or device may."""
    svd = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *args, **kwargs: change(*svd(*args, **kwargs)))


@pytest.fixture
def pissa(make_job: MakeJob) -> WorkerJob:
    job = make_job("llama", **RUN, **WAYS["pissa"])
    job.stopped_at(1)
    return job


def test_other_signs_of_singular_vectors_are_the_same_base(pissa: WorkerJob, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_svd(monkeypatch, lambda u, s, v: (-u, s, -v))
    assert pissa.run(2).status == 0


def test_other_singular_vectors_end_the_run(pissa: WorkerJob, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_svd(monkeypatch, lambda u, s, v: (u.roll(1, 1), s.roll(1), v.roll(1, 0)))
    assert "init_lora_weights has changed the base otherwise than for checkpoint-1: model.layers.0" in message(
        pissa.run(2)
    )


def test_a_run_goes_on_in_another_dtype_on_the_same_base(make_job: MakeJob, tmp_path: Path) -> None:
    """A job that leaves a device for another may be planned anew, without bfloat16."""
    base = build_checkpoint(tmp_path / "base", "llama", dtype="bfloat16")
    job = make_job(model=base, **RUN, **WAYS["lora"], dtype="bfloat16")
    job.stopped_at(1)
    other = make_job(model=base, **RUN, **WAYS["lora"], dtype="float32")
    job.change_plan(precision=other.plan["precision"])
    ended = job.run(2)
    assert "has other weights" not in str(ended.result), ended.result


def test_a_buffer_that_training_changes_is_put_back(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the statistics of a batch norm are."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        model.num_batches += int(model.training)
        return forward(model, *args, **kwargs)

    def build(model: Any, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)
        model.register_buffer("num_batches", torch.zeros(()))

    init = LlamaForCausalLM.__init__
    monkeypatch.setattr(LlamaForCausalLM, "__init__", build)
    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    job = make_job(model=build_checkpoint(tmp_path / "base", "llama"), **RUN, **WAYS["lora"])
    job.stopped_at(1)
    first = counts(job)
    ended = job.run(2)
    assert ended.status == 0
    assert [each for each in ended.messages("warning") if "does not carry: base_model.model.num_batches" in each]
    assert first == {1: 1.0}
    assert counts(job).items() >= {2: 2.0, 3: 3.0}.items()


def counts(job: WorkerJob) -> dict[int, float]:
    """Return the counts of batches in a job's checkpoints, by step."""
    paths = job.dir.glob("checkpoints/checkpoint-*/BUFFERS.safetensors")
    return {
        int(path.parent.name.rpartition("-")[2]): float(load_file(path)["base_model.model.num_batches"])
        for path in paths
    }
