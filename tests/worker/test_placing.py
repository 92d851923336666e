"""Adapters are where the job said: the experts and routers of a mixture are parameters, which peft treats otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from honed.inputs import basemodel
from honed.plan import loadedname, parameter
from honed.spec import jobfile
from honed.spec import spec as specs
from honed.system.error import ModelError
from honed.worker.model import load, placing, transformers_backend
from honed.worker.model.config import model_class
from worker.conftest import MakeJob
from zoo import families

_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
#: Mixtures of each kind: experts and router adapted by name, dense layers and shared experts beside them, and none.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"template": "qwen3", "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "mixtral": {"template": "mistral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"template": "qwen3", **_ROUTED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"template": "qwen3", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"template": "qwen3", "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "excluded": {"exclude_modules": r".*mlp.*"},
    "experts excluded": {"exclude_modules": ["experts"]},
    "stored name excluded": {"exclude_modules": r".*block_sparse_moe.*"},
    "layers": {"layers_to_transform": [1]},
    "both": {"layers_to_transform": [0], "exclude_modules": [r"gate"]},
    "regex of a layer": {"target_modules": r".*\.1\..*\.(q_proj|down_proj|w2)"},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 2, r".*\.1\..*": 3, "down_proj": 6}},
    "head": {"modules_to_save": ["lm_head"]},
    "layers by parameter": {"target_parameters": ["q_proj.weight"], "target_modules": ["v_proj"]},
    "parameters of a layer": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
        "layers_to_transform": [1],
    },
}

RANKS = {"transformer.h.1.mlp.c_fc": 7}


def attached(path: Path, lora: dict[str, Any]) -> tuple[Any, specs.JobSpec]:
    import torch
    from transformers import AutoConfig

    spec = jobfile.validate({"base_model": str(path), "datasets": [{"path": "/d.jsonl"}], "lora": {"r": 4, **lora}})
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        model = model_class(config).from_config(config)
    job: Any = SimpleNamespace(spec=spec, base_model_path=path, precision=SimpleNamespace(adapter_dtype=None))
    return transformers_backend.attach_adapter(model, job), spec


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_a_mixture_is_where_the_job_said_and_as_large_as_planned(
    checkpoint_of: Callable[..., Path], family: str, case: str
) -> None:
    path = checkpoint_of(family, **MIXTURES[family])
    model, spec = attached(path, CASES[case])
    names = placing.adapted(model)
    assert names
    if "excluded" in case and (family == "mixtral" or "stored" not in case):
        assert not [each for each in names if ".experts" in each]
    if case == "layers":
        assert {each.split(".layers.")[1][0] for each in names} == {"1"}
        has_experts = family not in ("gpt_oss", "qwen2_moe")
        assert any(".experts." in each for each in names) == has_experts
    if case.startswith("parameters"):
        where = {each.split(".layers.")[1][0] for each in names if ".experts." in each}
        assert where == ({"1"} if "layer" in case or family == "dots1" else {"0", "1"})
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameter.trained(spec, basemodel.inspect(path)).num_parameters == trained


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"exclude_modules": ["gate_proj"]}, "exclude_modules"),
        ({"exclude_modules": r".*experts\.0\..*"}, "exclude_modules"),
        ({"target_modules": r".*experts\.[01]\..*|.*q_proj"}, "target_modules"),
        ({"target_parameters": ["experts.no_proj"]}, "target_parameters"),
    ],
)
def test_a_part_of_the_experts_cannot_be_left_out(
    checkpoint_of: Callable[..., Path], lora: dict[str, Any], key: str
) -> None:
    with pytest.raises(ModelError, match=f"lora.{key}"):
        attached(checkpoint_of("qwen3_moe", **MIXTURES["qwen3_moe"]), lora)


def test_modules_that_peft_passes_over_are_named(checkpoint_of: Callable[..., Path]) -> None:
    model, spec = attached(checkpoint_of("dots1", **MIXTURES["dots1"]), {})
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    checkpoint = SimpleNamespace(num_trained=trained, trained_unsure="")
    job: Any = SimpleNamespace(spec=spec, plan=SimpleNamespace(checkpoint=checkpoint))
    (remark,) = placing.remarks(model, job)
    assert "6 modules" in remark and "model.layers.0.mlp.gate_proj" in remark
    checkpoint.num_trained += 1
    (remark,) = placing.counted(model, job)
    assert f"{trained:,} parameters are trained, not {trained + 1:,} as planned:" in remark
    checkpoint.trained_unsure = "names are not known"
    assert "names are not known" in next(placing.counted(model, job))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "modernbert-decoder", "zamba", "zamba2"])
@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head", "q_proj"]}])
def test_what_is_stored_once_and_trained_apart_is_counted(tmp_path: Path, family: str, lora: dict[str, Any]) -> None:
    path = families.build(tmp_path / family, family)
    if family == "modernbert-decoder" and "target_modules" in lora:
        lora = {"target_modules": ["Wo"]}
    model, spec = attached(path, lora)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameter.trained(spec, basemodel.inspect(path)).num_parameters == trained


def test_layers_that_peft_passes_over_are_reached_by_the_names_in_the_warning(
    checkpoint_of: Callable[..., Path],
) -> None:
    path = checkpoint_of("dots1", **MIXTURES["dots1"])
    _, spec = attached(path, {})
    names = parameter.passed_over(spec, basemodel.inspect(path))
    assert len(names) == 6 and "model.layers.0.mlp.gate_proj.weight" in names
    ends = sorted({".".join(each.split(".")[-3:]) for each in names})
    model, spec = attached(path, {"target_parameters": ends})
    assert set(names) <= placing.adapted(model)
    assert not parameter.passed_over(spec, basemodel.inspect(path))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameter.trained(spec, basemodel.inspect(path)).num_parameters == trained


def test_a_mixture_with_adapters_in_one_layer_is_trained_saved_and_continued(make_job: MakeJob) -> None:
    model = MIXTURES["qwen3_moe"]
    run = {"training": {"max_steps": 2}, "predictions": {"sample_frequency": "off"}}
    job = make_job("qwen3_moe", model=model, lora={"r": 4, "layers_to_transform": [1]}, save_merged="bfloat16", **run)
    ended = job.run()
    assert ended.status == 0, ended.result
    saved = load_file(job.output_dir / "adapter_model.safetensors")
    assert {name.split(".layers.")[1][0] for name in saved} == {"1"} and any(".experts." in name for name in saved)
    assert sum(each.numel() for each in saved.values()) == job.plan["checkpoint"]["num_trained"]
    written = json.loads((job.output_dir / "adapter_config.json").read_text())
    assert written["target_parameters"]
    again = make_job("qwen3_moe", model=model, adapter=str(job.output_dir), **run)
    assert again.run().status == 0


def test_the_names_in_the_warning_train(make_job: MakeJob) -> None:
    ends = ["mlp.gate_proj.weight", "shared_experts.up_proj.weight"]
    job = make_job(
        "dots1",
        model=MIXTURES["dots1"],
        lora={"r": 4, "target_parameters": ends},
        save_merged="bfloat16",
        training={"max_steps": 2},
        predictions={"sample_frequency": "off"},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    saved = load_file(job.output_dir / "adapter_model.safetensors")
    assert any(".mlp.gate_proj." in name for name in saved)
    assert sum(each.numel() for each in saved.values()) == job.plan["checkpoint"]["num_trained"]


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
        ("phi", {"bias": "all", "modules_to_save": ["final_layernorm"]}),
        ("qwen2_vl", {"target_modules": ["qkv", "proj", "q_proj"], "finetune_vision_layers": True}),  # a convolution
        ("lfm2_vl", {"finetune_vision_layers": True}),  # a linear layer makes its patches
        ("glm4v_moe", {"finetune_vision_layers": True}),  # peft keeps the ends of names, and a convolution has one
        ("phimoe", {"target_modules": ["q_proj", "gate"]}),  # a router once it is loaded
        ("phimoe", {"target_modules": ["q_proj", "router"]}),
        ("dbrx", {"modules_to_save": ["norm"]}),  # norm_attn_norm holds the attention, which keeps its adapter
        ("afmoe", {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}),  # no module, where it is stacked
        ("nemotron_h", {"target_modules": r"model\.layers\.0\.mixer\.in_proj"}),
        ("gemma4", {"finetune_projector": True}),
        ("laguna", {"modules_to_save": ["gate"], "target_modules": ["q_proj"]}),  # with a bias that nothing else trains
        ("kimi_linear", {"modules_to_save": ["gate"], "target_modules": ["q_proj"]}),  # the forget_gate is one, too
        ("qwen2_vl", {"target_modules": ["model.language_model.layers.0.self_attn.q_proj"]}),
        ("gemma3", {"target_modules": ["q_proj"], "exclude_modules": ["language_model.layers.0.self_attn.q_proj"]}),
    ],
)
def test_what_an_adapter_trains_beside_its_matrices_is_counted(
    tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    path = families.build(tmp_path / family, family)
    model, spec = attached(path, lora)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameter.trained(spec, basemodel.inspect(path)).num_parameters == trained


@pytest.mark.parametrize(
    ("family", "prefix", "lora"),
    [
        ("llama", "model", {"layers_to_transform": [1]}),
        ("llama", "model", {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]}),
        ("gpt2", "transformer", {"exclude_modules": ["transformer.h.0.attn.c_attn"], "rank_pattern": RANKS}),
        ("zamba2", "model", {}),
        ("opt", "model", {"target_modules": r"model\.decoder\.layers\.1\..*fc1"}),
    ],
)
def test_the_layers_of_a_checkpoint_without_its_prefix_are_counted(
    tmp_path: Path, family: str, prefix: str, lora: dict[str, Any]
) -> None:
    path = families.build(tmp_path / family, family)
    weights = path / "model.safetensors"
    bare = {name.removeprefix(f"{prefix}."): each for name, each in load_file(weights).items()}
    save_file(bare, weights, metadata={"format": "pt"})
    model, spec = attached(path, lora)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    info = basemodel.inspect(path)
    assert parameter.trained(spec, info).num_parameters == trained > 0
    assert not parameter.unsure(spec, info)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("glm4v", {"target_modules": ["model.layers.0.self_attn.q_proj"]}),
        ("glm4v", {"exclude_modules": ["language_model.layers.0.self_attn"]}),
        ("hy_v3", {"modules_to_save": ["shared_experts"], "target_modules": ["q_proj"]}),
        ("olmo_hybrid", {"target_modules": ["q_conv1d", "q_proj"]}),
    ],
)
def test_names_that_may_differ_once_they_are_loaded_make_the_count_an_estimate(
    tmp_path: Path, family: str, lora: dict[str, Any]
) -> None:
    info = basemodel.inspect(families.build(tmp_path / family, family))
    spec = jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], "lora": lora})
    assert "may have another name once the model is loaded" in parameter.unsure(spec, info)


def test_names_within_a_layer_are_the_same_once_they_are_loaded(tmp_path: Path) -> None:
    info = basemodel.inspect(families.build(tmp_path / "model", "qwen2_vl"))
    lora = {"target_modules": ["self_attn.q_proj", "layers.1.mlp.up_proj"], "exclude_modules": ["layers.0.mlp"]}
    spec = jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], "lora": lora})
    assert not parameter.unsure(spec, info)


@pytest.mark.parametrize("family", [*loadedname.SEEING_FAMILIES, "laguna", "kimi_linear"])
def test_a_checkpoints_names_are_translated_to_the_loaded_ones(tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoConfig

    path = families.build(tmp_path / family, family)
    info, config = basemodel.inspect(path), AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    model.tie_weights()
    names = {each.name for each in parameter.parameters(info)}
    held = {name for name, _ in model.named_parameters()}
    others = {name for name in names ^ held if ".experts." not in name and "conv1d" not in name}  # made of several
    assert not {name for name in others if loadedname.is_trainable(info)(name)}


FIXED = ["deepseek_v3", "apertus", "minimax", "gemma4", "ernie4_5_moe", "nemotron_h", "zamba2", "qwen2_vl"]
OTHERS = sorted(families.FAMILIES.keys() - set(FIXED))


@pytest.mark.parametrize("family", [*FIXED, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in OTHERS)])
def test_what_full_fine_tuning_trains_is_counted(tmp_path: Path, family: str) -> None:
    """Buffers are stored like parameters, and are none: routers' biases, numbers of an activation, tables."""
    import torch
    from transformers import AutoConfig

    path = families.build(tmp_path / family, family)
    info = basemodel.inspect(path)
    ways = [["language"], ["language", "vision", "projector"]][: 2 if info.has_vision else 1]
    for parts in ways:
        spec = jobfile.validate({"base_model": str(path), "datasets": [{"path": "/d.jsonl"}], "train_parts": parts})
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = model_class(config).from_config(config)
        model.tie_weights()
        job: Any = SimpleNamespace(spec=spec, precision=SimpleNamespace(adapter_dtype=None))
        load.freeze(model, job)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        assert parameter.trained(spec, info).num_parameters == trained > 0


CONTINUED = {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head", "norm"], "bias": "lora_only"}


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_count_that_is_not_the_planned_one_is_a_warning_in_every_training(make_job: MakeJob, kind: str) -> None:
    run = {"training": {"max_steps": 1}, "predictions": {"sample_frequency": "off"}}
    if kind == "adapter":
        first = make_job("qwen2", lora=CONTINUED, **run)
        assert first.run().status == 0
        run |= {"adapter": str(first.output_dir)}
    job = make_job("qwen2", **run)
    planned = job.plan["checkpoint"]["num_trained"]
    ended = job.run()
    assert ended.status == 0 and not [each for each in ended.messages("warning") if "as planned" in each]
    again = make_job("qwen2", **run)
    again.change_plan(checkpoint={**again.plan["checkpoint"], "num_trained": planned + 1})
    (said,) = (each for each in again.run().messages("warning") if "as planned" in each)
    key = "base_model" if kind == "full" else "adapter"
    assert said.startswith(f"{key}: {planned:,} parameters are trained, not {planned + 1:,} as planned:")
