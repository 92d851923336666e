"""Batch norms: those of a frozen base compute in training as in the output, those in modules_to_save are trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

from honed.spec.spec import JobSpec
from honed.worker.model import load
from worker.conftest import Ended, MakeJob, WorkerJob
from zoo.model import build_checkpoint

RUN: dict[str, Any] = {
    "training": {"max_steps": 3, "save_steps": 1, "learning_rate": 1e-2},
    "predictions": {"sample_frequency": "off"},
    "dtype": "float32",
}
NORM = "model.layers.0.mlp.batch_norm"


@pytest.fixture
def normed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base of a class whose layers have batch norms, as the convolutions of granite_speech's encoder."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    init, forward = LlamaMLP.__init__, LlamaMLP.forward

    def build(module: Any, config: Any) -> None:
        init(module, config)
        module.batch_norm = torch.nn.BatchNorm1d(config.hidden_size)

    def normalize(module: Any, given: Any) -> Any:
        found: Any = forward(module, given)
        return module.batch_norm(found.transpose(1, 2)).transpose(1, 2)

    monkeypatch.setattr(LlamaMLP, "__init__", build)
    monkeypatch.setattr(LlamaMLP, "forward", normalize)
    return build_checkpoint(tmp_path / "base", "llama")


def statistics(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for name, each in load_file(directory / "model.safetensors").items() if "running_" in name}


def check_ended(job: WorkerJob, ended: Ended) -> None:
    assert ended.status == 0, ended.result
    assert not [each for each in ended.messages("warning") if "buffers" in each]


@pytest.mark.parametrize("keys", [{}, {"bias": "all"}])
def test_a_frozen_batch_norm_keeps_its_statistics(make_job: MakeJob, normed: Path, keys: dict[str, Any]) -> None:
    job = make_job(model=normed, lora={"r": 4, **keys}, save_merged="bfloat16", **RUN)
    job.stopped_at(1)
    check_ended(job, job.run(2))
    assert not list(job.dir.glob("checkpoints/*/BUFFERS.safetensors"))
    before, after = statistics(normed), statistics(job.output_dir / "merged")
    assert before.keys() == after.keys()
    assert all(torch.equal(each, after[name]) for name, each in before.items())


def test_a_batch_norm_in_modules_to_save_is_trained_exported_and_merged(make_job: MakeJob, normed: Path) -> None:
    import peft

    job = make_job(model=normed, lora={"r": 4, "modules_to_save": ["batch_norm"]}, save_merged="bfloat16", **RUN)
    job.stopped_at(1)
    check_ended(job, job.run(2))
    before, after = statistics(normed), statistics(job.output_dir / "merged")
    assert not any(torch.equal(each, after[name]) for name, each in before.items())
    stored = load_file(job.output_dir / "adapter_model.safetensors")
    assert torch.equal(stored[f"base_model.model.{NORM}.running_mean"], after[f"{NORM}.running_mean"])
    assert int(stored[f"base_model.model.{NORM}.num_batches_tracked"]) >= 3  # checkpointing computes a layer twice
    base = AutoModelForCausalLM.from_pretrained(normed)
    opened = dict(peft.PeftModel.from_pretrained(base, job.output_dir).named_buffers())
    assert torch.equal(
        opened[f"base_model.model.{NORM}.modules_to_save.default.running_var"], after[f"{NORM}.running_var"]
    )


def test_full_fine_tuning_trains_batch_norms(make_job: MakeJob, normed: Path) -> None:
    job = make_job(model=normed, **RUN)
    check_ended(job, job.run())
    before, after = statistics(normed), statistics(job.output_dir)
    assert not any(torch.equal(each, after[name]) for name, each in before.items())


@pytest.mark.parametrize("trains_ears", [False, True])
def test_a_speech_models_encoder_computes_in_training_as_in_the_output(trains_ears: bool) -> None:
    import peft

    config = AutoConfig.for_model(
        "granite_speech",
        encoder_config={
            "input_dim": 20,
            "num_layers": 1,
            "hidden_dim": 16,
            "num_heads": 2,
            "dim_head": 8,
            "output_dim": 8,
            "context_size": 10,
            "max_pos_emb": 16,
            "dropout": 0.0,
            "conv_kernel_size": 3,
        },
        text_config={
            "model_type": "granite",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 64,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "encoder_hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    )
    model = AutoModelForSpeechSeq2Seq.from_config(config)
    lora: dict[str, Any] = {"r": 4, "finetune_audio_layers": trains_ears}
    spec = JobSpec.model_validate({"base_model": "/m", "datasets": [{"path": "/d"}], "lora": lora})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    job: Any = SimpleNamespace(spec=spec, precision=SimpleNamespace(adapter_dtype="float32"))
    load.hold_statistics(adapted, job)
    encoder = model.get_submodule(next(name for name, each in model.named_modules() if name.endswith("encoder")))
    before = {name: each.clone() for name, each in model.named_buffers()}
    assert any("running_mean" in name for name in before)
    heard = torch.randn(2, 30, 20)
    adapted.train()
    trained = encoder(heard).last_hidden_state
    torch.testing.assert_close(trained, encoder.eval()(heard).last_hidden_state)
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
