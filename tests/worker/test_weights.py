"""What a checkpoint restores is what the model had, whatever the names of its family's published files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from honed.system.error import ModelError, PrecisionError
from honed.worker.model import tensorfile
from honed.worker.train import weights
from worker.conftest import MakeJob
from zoo.model import build_checkpoint

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
TEXT = SMALL | {"model_type": "llama"}
SEEING: dict[str, Any] = {
    "vision_config": SMALL | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    "image_token_index": 5,
}
#: Families: as they are named in modules, renamed, with fused experts, with tied weights, and one (hrm_text) whose
#: published tensors are no views of the model's.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SMALL | {"head_dim": 16},
    "gemma2": SMALL | {"head_dim": 16, "tie_word_embeddings": True},
    "gpt_neox": SMALL,
    "mixtral": SMALL | EXPERTS,
    "qwen3_moe": SMALL | EXPERTS | {"head_dim": 16, "moe_intermediate_size": 16},
    "deepseek_v3": SMALL
    | LATENT
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1, "v_head_dim": 16},
    "llava": {"text_config": TEXT} | SEEING,
    "hrm_text": SMALL | {"head_dim": 16},
}


def build(family: str) -> Any:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    kind = AutoModelForImageTextToText if "vision_config" in FAMILIES[family] else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind.from_config(config)


def spoil(model: Any) -> None:
    with torch.no_grad():
        for _, tensor in model.state_dict().items():
            tensor.zero_()


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_has_loaded_a_checkpoint_is_the_one_that_wrote_it(family: str, tmp_path: Path) -> None:
    model = build(family)
    before = state_of(model)
    weights.write(tmp_path, model)
    assert (tmp_path / weights.REST).exists() == (family == "hrm_text")
    spoil(model)
    weights.load(tmp_path, model)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.config.save_pretrained(tmp_path)
    opened, info = type(model).from_pretrained(tmp_path, config=model.config, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(opened.state_dict()[name], before[name]) for name in before)


def damage(path: Path, how: str) -> str:
    """Change a file of weights; return the name of the tensor that is no longer as it was."""
    tensors = load_file(path)
    name = max(name for name in tensors if "experts.3" in name)
    match how:
        case "altered":
            tensors[name].reshape(-1)[7] += 1
        case "missing":
            del tensors[name]
        case "renamed":
            tensors[f"{name}_too"] = tensors.pop(name)
        case "cast":
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, path, {"format": "pt"})
    return name


@pytest.mark.parametrize("how", ["altered", "missing", "renamed", "cast"])
def test_a_checkpoint_that_is_not_what_the_model_had_is_refused_by_name(how: str, tmp_path: Path) -> None:
    model = build("mixtral")
    weights.write(tmp_path, model)
    damage(tmp_path / weights.WEIGHTS, how)
    with pytest.raises((ModelError, PrecisionError)) as caught:
        weights.load(tmp_path, model)
    assert "experts" in caught.value.message
    assert "remove" in caught.value.hint


def test_weights_that_the_load_leaves_alone_are_noticed(tmp_path: Path) -> None:
    model = build("qwen3")
    weights.write(tmp_path, model)
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1e-3
    with pytest.raises(ModelError, match=r"lm_head\.weight differ"):
        weights.check(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool])
@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("size", [0, 1, 7, 16])
def test_bits_are_compared_whatever_the_size_and_place_of_a_tensor(dtype: Any, place: int, size: int) -> None:
    one = torch.zeros(place + size + 1, dtype=torch.uint8).to(dtype)[place:][:size]
    other = one.clone()
    assert tensorfile.equal_bits(one, other)
    if size:
        bits = one if dtype == torch.bool else one.view(torch.uint8)
        bits[-1] = 1 if dtype == torch.bool else 128  # -0.0, where the dtype has it
        assert not tensorfile.equal_bits(one, other)
    empty = torch.full((size,), math.nan).to(dtype)
    assert tensorfile.equal_bits(empty, empty.clone())


MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "model"),
    [("qwen3_moe", MIXTURE), ("gpt_neox", {})],
)
def test_a_full_fine_tuning_resumes_and_restores_its_best_under_any_names(
    family: str, model: dict[str, Any], make_job: MakeJob
) -> None:
    training = {"max_steps": 6, "learning_rate": 5e-2, "lr_scheduler_type": "constant", "save_total_limit": 10}
    training |= {"eval_steps": 1, "load_best_model_at_end": True, "optim": "adamw_torch"}
    keys: dict[str, Any] = {"eval_split": 0.25, "training": training, "predictions": {"sample_frequency": "off"}}
    whole, cut = (make_job(family, model=model, **keys) for _ in range(2))
    undisturbed = whole.run()
    assert undisturbed.status == 0, undisturbed.result
    first = cut.stopped_at(3)
    assert first.status == 75
    second = cut.run(2)
    assert second.status == 0, second.result
    assert first.losses | second.losses == undisturbed.losses
    written, again = (load_file(job.output_dir / "model.safetensors") for job in (whole, cut))
    assert written.keys() == again.keys()
    assert all(torch.equal(written[name], again[name]) for name in written)
    newest = max((whole.dir / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    state = json.loads((newest / "trainer_state.json").read_text())
    best = load_file(whole.dir / f"checkpoints/checkpoint-{state['best_global_step']}/model.safetensors")
    assert state["best_global_step"] < 6  # so much is learned too fast
    assert all(torch.equal(written[name], best[name]) for name in best)


@pytest.mark.parametrize("how", ["missing", "renamed", "added"])
def test_an_expert_that_a_base_lacks_or_has_too_many_is_named(how: str, make_job: MakeJob, tmp_path: Path) -> None:
    base = build_checkpoint(tmp_path / "base", "qwen3_moe", **MIXTURE)
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    match how:
        case "missing":
            del tensors[name]
        case "renamed":
            tensors[name.replace("up_proj", "w3")] = tensors.pop(name)
        case "added":
            tensors[name.replace(".2.", ".4.")] = torch.ones_like(tensors[name])
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    error = make_job(model=base, lora={"r": 4, "target_modules": ["q_proj"]}).run().result["error"]
    assert error["code"] == "model_invalid"
    assert name.replace(".2.", ".4." if how == "added" else ".2.") in error["message"], error
