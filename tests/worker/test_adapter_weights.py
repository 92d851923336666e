"""A loaded adapter is the one that was saved, tensor by tensor; an altered checkpoint is not resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from honed.system.error import InternalError, ModelError
from honed.worker.model import adapter, tensorfile
from honed.worker.train import checkpoint
from worker.conftest import MakeJob, WorkerJob

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Families, and forms of LoRA whose tensors peft names in ways of their own.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {"target_modules": "all-linear"}),
    "dora, whole head": ("llama", {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "some tokens": ("llama", {"target_modules": ["v_proj"], "trainable_token_indices": [3, 5]}),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
}


def adapted(family: str, lora: dict[str, Any], *, seed: int) -> Any:
    """Return a model with an adapter whose every weight is drawn."""
    config = AutoConfig.for_model(family, **SMALL, **(EXPERTS if family == "mixtral" else {}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(
            AutoModelForCausalLM.from_config(config), peft.LoraConfig(r=4, task_type="CAUSAL_LM", **lora)
        )
        torch.manual_seed(seed)
        for weight in trained(model).values():
            weight.data.normal_()
    return model


def trained(model: Any) -> dict[str, Any]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_adapter_is_the_one_that_was_saved(kind: str, tmp_path: Path) -> None:
    family, lora = KINDS[kind]
    saved, other = (adapted(family, lora, seed=seed) for seed in (1, 2))
    saved.save_pretrained(tmp_path)
    adapter.write_digests(saved, tmp_path)
    assert (
        json.loads((tmp_path / tensorfile.NAME).read_text())[adapter.FILE].keys()
        == load_file(tmp_path / adapter.FILE).keys()
    )
    adapter.load(other, tmp_path)
    assert all(torch.equal(weight, trained(saved)[name]) for name, weight in trained(other).items())
    (tmp_path / tensorfile.NAME).unlink()  # as another program writes it
    adapter.load(adapted(family, lora, seed=3), tmp_path)


def alter(directory: Path, how: str, part: str) -> str:
    """Change an adapter's file; return the name of the tensor that is not as it was."""
    tensors = load_file(directory / adapter.FILE)
    name = max(name for name in tensors if part in name)
    match how:
        case "altered":
            tensors[name].reshape(-1)[7] += 1
        case "missing":
            del tensors[name]
        case "added":
            name = name.replace("layers.1", "layers.7")
            tensors[name] = torch.zeros(3)
    save_file(tensors, directory / adapter.FILE, {"format": "pt"})
    return name


@pytest.mark.parametrize("has_digests", [True, False])
@pytest.mark.parametrize("how", ["altered", "missing", "added"])
def test_an_adapter_that_is_not_what_was_saved_is_refused_by_name(how: str, has_digests: bool, tmp_path: Path) -> None:
    model = adapted(*KINDS["plain"], seed=1)
    model.save_pretrained(tmp_path)
    if has_digests:
        adapter.write_digests(model, tmp_path)
    name = alter(tmp_path, how, "layers.1.self_attn.q_proj.lora_A")
    if how == "altered" and not has_digests:
        return  # nobody can know
    with pytest.raises(ModelError) as caught:
        adapter.load(adapted(*KINDS["plain"], seed=2), tmp_path)
    assert name.removesuffix(".weight") in caught.value.message.replace(".default", "")


def test_a_loader_that_leaves_an_adapters_tensor_alone_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, other = (adapted(*KINDS["plain"], seed=seed) for seed in (1, 2))
    saved.save_pretrained(tmp_path)
    nothing_is_wrong = torch.nn.modules.module._IncompatibleKeys([], [])
    monkeypatch.setattr(type(other), "load_state_dict", lambda *_args, **_kwargs: nothing_is_wrong)
    with pytest.raises(ModelError, match="differ from the file"):
        adapter.load(other, tmp_path)


def test_what_is_trained_and_not_saved_is_noticed(tmp_path: Path) -> None:
    model = adapted(*KINDS["plain"], seed=1)
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(InternalError, match="embed_tokens"):
        adapter.write_digests(model, tmp_path)


RUN: dict[str, Any] = {
    "predictions": {"sample_frequency": "off"},
    "training": {"max_steps": 4, "learning_rate": 2e-2, "save_steps": 2, "save_total_limit": 4},
}


@pytest.mark.parametrize("is_full", [False, True])
def test_a_checkpoint_whose_tensors_were_altered_after_it_was_written_is_not_resumed(
    make_job: MakeJob, is_full: bool
) -> None:
    """Its manifest may be of the files as they are now: the digests are of what the model had."""
    job = make_job("llama", **RUN, lora=None) if is_full else make_job("llama", **RUN, lora={"r": 4})
    assert job.stopped_at(3).status == 75
    newest = job.dir / "checkpoints/checkpoint-3"
    kept = newest.with_name("kept")
    shutil.copytree(newest, kept)
    for attempt, how in enumerate(("altered", "missing"), 2):
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)
        name = damage(newest, how, is_full=is_full)
        ended = job.run(attempt)
        error = ended.result["error"]
        assert (ended.result["outcome"], error["code"]) == ("failed", "model_invalid"), ended.result
        assert name in error["message"].replace(".default", "")
        assert str(newest) in error["hint"]
    shutil.rmtree(newest)  # as the hint says
    shutil.rmtree(kept)
    assert resumed_at(job, 4) == 2


def damage(place: Path, how: str, *, is_full: bool) -> str:
    progress, _ = checkpoint.read(place)
    assert progress is not None
    file = "model.safetensors" if is_full else adapter.FILE
    if is_full:
        (place / file).rename(place / adapter.FILE)
    name = alter(place, how, "layers.1.self_attn.q_proj")
    if is_full:
        (place / adapter.FILE).rename(place / file)
    checkpoint.seal(place, progress)
    return name.removesuffix(".weight")


def resumed_at(job: WorkerJob, attempt: int) -> int | None:
    ended = job.run(attempt)
    assert ended.status == 0, ended.result
    return next((item["step"] for item in ended.of("resumed")), None)
