"""An output is proven before it is put in place: whatever differs from what was trained is found, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.system.error import ModelError
from honed.worker.model import config_file, leftover, proof
from worker.conftest import MakeJob

OFF = {"sample_frequency": "off"}
Change = Callable[[Path], None]
EXPERTS = {"template": "mistral", "num_local_experts": 4, "num_experts_per_tok": 2}


def weights(change: Callable[[dict[str, Any]], None], file: str = "model.safetensors") -> Change:
    def apply(made: Path) -> None:
        tensors = load_file(made / file)
        change(tensors)
        save_file(tensors, made / file, {"format": "pt"})

    return apply


def config(file: str = "config.json", **values: Any) -> Change:
    def apply(made: Path) -> None:
        raw = json.loads((made / file).read_text())
        (made / file).write_text(json.dumps(raw | values))

    return apply


def flip(name: str) -> Callable[[dict[str, Any]], None]:
    """Change the lowest bit of one number."""

    def change(tensors: dict[str, Any]) -> None:
        tensors[name].view(torch.int32).view(-1)[7] ^= 1

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


Q, EXPERT = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.block_sparse_moe.experts.2.w3.weight"
LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ADAPTER = "adapter_model.safetensors"
WHOLE: dict[str, tuple[Change, str]] = {
    "a tensor dropped": (weights(lambda each: each.pop(Q)), "lacks weights: " + Q),
    "an expert dropped": (weights(lambda each: each.pop(EXPERT)), "than model.layers.1.mlp.experts.gate_up_proj"),
    "an expert altered": (weights(flip(EXPERT)), "other weights than the model in memory: model.layers.1"),
    "a tensor altered by one bit": (weights(flip(Q)), "other weights than the model in memory: " + Q),
    "a tensor in another dtype": (weights(lambda each: each.update({Q: each[Q].half()})), Q),
    "a tensor renamed": (weights(lambda each: each.update({"model.q": each.pop(Q)})), Q),
    "a tensor too many": (weights(lambda each: each.update({"mtp.fc.weight": torch.ones(2)})), "mtp.fc.weight"),
    "a file cut": (lambda made: cut(made / "model.safetensors"), "SafetensorError"),
    "fewer layers": (config(num_hidden_layers=1), "num_hidden_layers"),
    "another epsilon": (config(rms_norm_eps=1e-3), "rms_norm_eps"),
    "another theta": (
        config(rope_parameters={"rope_type": "default", "rope_theta": 7.0}),
        "rope_parameters.rope_theta",
    ),
    "tied": (config(tie_word_embeddings=True), "tie_word_embeddings"),
    "another family": (config(model_type="llama"), "LlamaForCausalLM"),
    "an end that does not exist": (config("generation_config.json", eos_token_id=[1, 99999]), "99999"),
}
PART: dict[str, tuple[Change, str]] = {
    "a matrix dropped": (weights(lambda each: each.pop(LORA_A), ADAPTER), LORA_A),
    "a matrix altered by one bit": (weights(flip(LORA_A), ADAPTER), LORA_A),
    "a matrix renamed": (weights(lambda each: each.update({"base_model.x": each.pop(LORA_A)}), ADAPTER), LORA_A),
    "another alpha": (config("adapter_config.json", lora_alpha=1), "lora_alpha"),
    "another scaling": (config("adapter_config.json", use_rslora=True), "use_rslora"),
    "other modules": (config("adapter_config.json", target_modules=["k_proj"]), "target_modules"),
}


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_whatever_differs_from_what_was_trained_is_found_and_nothing_is_put_in_place(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    changes = WHOLE if kind == "whole" else PART
    lora = {} if kind == "whole" else {"lora": {"r": 4, "target_modules": ["q_proj"]}}
    job = make_job("mixtral", model=EXPERTS, training={"max_steps": 1}, predictions=OFF, **lora)
    prove, found, left = proof.prove, {}, []

    def with_mutants(made: Path, assignment: Any, model: Any) -> None:
        prove(made, assignment, model)
        for name, (change, _) in changes.items():
            mutant = shutil.copytree(made, tmp_path / name)
            change(mutant)
            try:
                prove(mutant, assignment, model)
            except ModelError as error:
                found[name] = error.said
            else:
                left.append(name)
        change, _ = next(iter(changes.values()))
        change(made)
        prove(made, assignment, model)

    monkeypatch.setattr(proof, "prove", with_mutants)
    ended = job.run()
    assert not left
    assert {name: words in found[name] for name, (_, words) in changes.items()} == dict.fromkeys(changes, True), found
    assert ended.result["error"]["code"] == "model_invalid", ended.result
    assert "requeue" in ended.result["error"]["hint"]
    assert not job.output_dir.exists()
    assert not list(job.output_dir.parent.glob(".output*"))
    assert list((job.dir / "checkpoints").glob("checkpoint-*"))


def with_draft(base: Path, place: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Copy a base, and give it a layer that predicts several tokens, which transformers does not read."""
    shutil.copytree(base, place)
    tensors = load_file(place / "model.safetensors")
    draft = {f"mtp.layers.0.{name}.weight": torch.rand(64, 8).to(dtype) for name in ("fc", "norm")}
    save_file(tensors | draft, place / "model.safetensors", {"format": "pt"})
    config(num_nextn_predict_layers=1)(place)
    return place


@pytest.mark.parametrize("how", ["in one file", "in shards", "in eight bits"])
def test_what_transformers_does_not_read_is_in_the_output_too_or_no_longer_declared(
    make_job: MakeJob, checkpoint_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedModel

    dtype = torch.float8_e4m3fn if how == "in eight bits" else torch.bfloat16
    base = with_draft(checkpoint_of("qwen3"), tmp_path / "base", dtype)
    if how == "in shards":
        save = PreTrainedModel.save_pretrained
        monkeypatch.setattr(
            PreTrainedModel, "save_pretrained", lambda self, place: save(self, place, max_shard_size="200KB")
        )
    job = make_job(model=base, training={"max_steps": 1}, predictions=OFF)
    ended = job.run()
    assert ended.status == 0, ended.result
    tensors, stored = leftover.stored(job.output_dir), leftover.stored(base)
    card, raw = (job.output_dir / "README.md").read_text(), json.loads((job.output_dir / "config.json").read_text())
    if how == "in eight bits":
        assert not any(name.startswith("mtp") for name in tensors)
        assert raw["num_nextn_predict_layers"] == 0
        assert "num_nextn_predict_layers is 0" in card
        return
    assert raw["num_nextn_predict_layers"] == 1
    assert tensors.keys() == stored.keys()
    for name in tensors:
        assert leftover.is_same(tensors[name], stored[name]) == name.startswith("mtp"), name
    assert "2 weights that transformers does not read" in card
    files = {path.name for path in job.output_dir.glob("*.safetensors")}
    assert files == {each.path.name for each in tensors.values()}
    assert (len(files) > 2) == (how == "in shards")
    AutoModelForCausalLM.from_pretrained(job.output_dir)


def test_a_config_is_the_bases_own_but_for_what_changed(
    make_job: MakeJob, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = shutil.copytree(checkpoint_of("llama"), tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope["rope_theta"], "torch_dtype": raw.pop("dtype"), "a_key": {"of": "another program"}}
    published = json.dumps(raw, indent=4)
    (base / "config.json").write_text(published)
    same, other = (
        make_job(model=base, training={"max_steps": 1}, predictions=OFF, **keys)
        for keys in ({}, {"save_dtype": "bfloat16"})
    )
    for job in (same, other):
        ended = job.run()
        assert ended.status == 0, ended.result
    assert (same.output_dir / "config.json").read_text() == published
    assert "- config.json" not in (same.output_dir / "README.md").read_text()
    assert json.loads((other.output_dir / "config.json").read_text()) == raw | {"torch_dtype": "bfloat16"}
    assert 'torch_dtype is "bfloat16" (base: "float32")' in (other.output_dir / "README.md").read_text()


def test_an_adapter_names_its_base_as_others_can_find_it(tmp_path: Path) -> None:
    import peft

    peft.LoraConfig(r=4, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    config_file.write_adapter(
        tmp_path, base_model="Qwen/Qwen3-0.6B", revision="c0ffee", defaults=peft.LoraConfig().to_dict()
    )
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
    assert raw["revision"] == "c0ffee"
    assert raw["target_modules"] == ["q_proj", "v_proj"]
    assert not raw.keys() & {"arrow_config", "target_parameters", "alora_invocation_tokens", "peft_version"}
    assert peft.PeftConfig.from_pretrained(tmp_path).r == 4
