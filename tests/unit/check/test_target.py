"""Module names that a job asks for, compared with several families' checkpoints before any is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.check import target
from honed.inputs import basemodel
from honed.inputs.basemodel import AdapterInfo
from honed.spec import jobfile, problem
from honed.system import installed
from honed.system.error import ModelError, SpecError
from zoo import family

TOKENS = "trainable_token_indices"
ON_Q = {"target_modules": ["q_proj"]}
pytestmark = pytest.mark.skipif(installed.version("transformers") is None, reason="goes by transformers' source")


def check(tmp_path: Path, name: str, lora: dict[str, Any]) -> list[str]:
    job = jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d"}], "lora": lora})
    return target.check(job, basemodel.inspect(family.write(tmp_path / name, name)))


@pytest.mark.parametrize(
    ("name", "lora", "key", "hint"),
    [
        ("qwen3", {"target_modules": ["c_attn"]}, "lora.target_modules.0", "its linear layers are"),
        ("qwen3", {"target_modules": ["q_porj", "v_porj"]}, "lora.target_modules.0", "did you mean q_proj, v_proj?"),
        ("phi3", {"target_modules": ["q_proj", "k_proj", "v_proj"]}, "lora.target_modules.0", "qkv_proj"),
        ("gpt2", {"target_modules": ["q_proj", "v_proj"]}, "lora.target_modules.0", "did you mean c_attn?"),
        ("gpt_neox", {"target_modules": ["q_proj"]}, "lora.target_modules.0", "query_key_value"),
        ("llama", {"target_modules": ["query_key_value"]}, "lora.target_modules.0", "q_proj"),
        ("qwen2_vl", {"target_modules": ["c_attn"]}, "lora.target_modules.0", "q_proj"),
        (
            "qwen2_vl",
            {"target_modules": ["model.layers.0.self_attn.q_proj"]},
            "lora.target_modules.0",
            "write model.language_model.layers.0.self_attn.q_proj",
        ),
        ("llava", {"target_modules": ["query_key_value"]}, "lora.target_modules.0", "q_proj"),
        ("llama", {"target_modules": "all"}, "lora.target_modules", "all-linear"),
        ("llama", {"target_modules": ["all"]}, "lora.target_modules.0", "all-linear"),
        ("llama", {"target_modules": ["all-linear"]}, "lora.target_modules.0", "all-linear"),
        ("llama", {"target_modules": "q_proj"}, "lora.target_modules", "[q_proj]"),
        ("llama", {"target_modules": "c_attn"}, "lora.target_modules", "q_proj"),
        ("llama", {"target_modules": r"layers\.\d+\.self_attn"}, "lora.target_modules", "begin the expression"),
        ("llama", {"target_modules": ["q_proj", "mlp"]}, "lora.target_modules.1", "gate_proj"),
        ("llama", {"target_modules": ["input_layernorm"]}, "lora.target_modules.0", "modules_to_save"),
        ("qwen3", {"modules_to_save": ["lm_haed"]}, "lora.modules_to_save.0", "did you mean lm_head?"),
        ("gpt_neox", {"modules_to_save": ["embed_in", "lm_haed"]}, "lora.modules_to_save.1", "lm_head"),
        ("gpt2", {"modules_to_save": ["lm_head", "embed_tokens"]}, "lora.modules_to_save.1", "wte"),
        ("mixtral", {"target_parameters": ["experts.gate_up_porj"]}, "lora.target_parameters.0", "gate_up_proj?"),
        ("llama", {"target_parameters": ["experts.gate_up_porj"]}, "lora.target_parameters.0", "no parameters"),
        ("llama", {"target_parameters": ["norm.weight"]}, "lora.target_parameters.0", "modules_to_save trains norms"),
        ("llama", {"target_parameters": ["q_proj.weight"]}, "lora.target_parameters.0", "remove "),
        (
            "llama",
            {"target_parameters": ["k_proj.weight", "lm_head.weight"], "modules_to_save": ["lm_head"], **ON_Q},
            "lora.target_parameters.1",
            "remove ",
        ),
        ("llama", {TOKENS: [3, 10**6]}, f"lora.{TOKENS}.1", "tokenizer"),
        ("llama", {TOKENS: [10**6]}, f"lora.{TOKENS}.0", "new tokens need a base model that has them"),
        ("llama", {TOKENS: {"embed_tokens": [3], "lm_head": [3, 10**6]}}, f"lora.{TOKENS}.lm_head.1", "tokenizer"),
        ("llama", {TOKENS: {"embed_tokns": [3]}}, f"lora.{TOKENS}.embed_tokns", "did you mean embed_tokens?"),
        ("gpt_neox", {TOKENS: {"embed_out": [3]}}, f"lora.{TOKENS}.embed_out", "did you mean lm_head?"),
        ("gemma3_text", {TOKENS: {"lm_head": [3]}}, f"lora.{TOKENS}.lm_head", "its head follows"),
        ("gemma3_text", {TOKENS: {"embed_tokens": [3], "lm_head": [4]}}, f"lora.{TOKENS}.lm_head", "its head follows"),
        ("llama", {TOKENS: [3], "modules_to_save": ["norm", "embed_tokens"]}, f"lora.{TOKENS}", "modules_to_save"),
        (
            "gemma3_text",
            {TOKENS: [3], "modules_to_save": ["lm_head"]},
            f"lora.{TOKENS}",
            "lm_head from modules_to_save",
        ),
        ("llama", {TOKENS: [3], "target_modules": ["embed_tokens", "q_proj"]}, f"lora.{TOKENS}", "target_modules"),
        ("llama", {TOKENS: [3], "target_modules": ".*(embed_tokens|q_proj)"}, f"lora.{TOKENS}", "target_modules"),
        ("llama", {TOKENS: [3], "target_parameters": ["embed_tokens.weight"]}, f"lora.{TOKENS}", "target_parameters"),
        ("llama", {"rank_pattern": {"q_porj": 4}}, "lora.rank_pattern", "q_proj"),
        ("llama", {"alpha_pattern": {"c_attn": 4}}, "lora.alpha_pattern", "q_proj"),
        ("llama", {"rank_pattern": {"(q_proj": 4}}, "lora.rank_pattern", "the end of"),
        ("llama", {"layers_to_transform": [0, 2]}, "lora.layers_to_transform.1", "up to 1"),
        ("qwen2_vl", {"layers_to_transform": [2]}, "lora.layers_to_transform.0", "up to 1"),
        (
            "qwen3",
            {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
            "lora.exclude_modules",
            "remove exclude_modules",
        ),
        (
            "qwen3",
            {"target_modules": ["q_proj"], "exclude_modules": r".*\.self_attn\..*"},
            "lora.exclude_modules",
            "remove exclude_modules",
        ),
        ("llama", {"exclude_modules": r".*layers\..*"}, "lora.exclude_modules", "remove exclude_modules"),
        ("qwen2_vl", {"target_modules": ["attn.qkv"]}, "lora.target_modules", "finetune_vision_layers: true"),
    ],
)
def test_names_that_mean_nothing_in_the_model_are_refused_with_those_that_are_there(
    tmp_path: Path, name: str, lora: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(SpecError) as refused:
        check(tmp_path, name, lora)
    assert refused.value.message.startswith(f"{key}")
    assert hint in refused.value.hint
    if fix := refused.value.fix:  # taken, it leads to no second refusal
        check(tmp_path, name, problem.mended({"lora": lora}, fix)["lora"])


@pytest.mark.parametrize(
    ("lora", "fix"),
    [
        ({"target_modules": "all"}, {"lora.target_modules": "all-linear"}),
        ({"target_modules": ["all"]}, {"lora.target_modules": "all-linear"}),
        ({"target_modules": "q_proj"}, {"lora.target_modules": ["q_proj"]}),
        ({"target_modules": ["q_porj", "v_porj"]}, {"lora.target_modules": ["q_proj", "v_proj"]}),
        (
            {"target_modules": ["c_attn", "up_porj"]},
            {"lora.target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]},
        ),
        ({"modules_to_save": ["norm", "lm_haed"]}, {"lora.modules_to_save": ["norm", "lm_head"]}),
        ({"layers_to_transform": [0, 1, 2]}, {"lora.layers_to_transform": [0, 1]}),
        ({"exclude_modules": r".*layers\..*"}, {"lora.exclude_modules": None}),
        ({"target_modules": "q_porj"}, {"lora.target_modules": ["q_proj"]}),
    ],
)
def test_the_edit_that_a_refusal_names_is_taken(tmp_path: Path, lora: dict[str, Any], fix: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        check(tmp_path, "llama", lora)
    assert refused.value.fix == fix
    assert check(tmp_path, "llama", lora | {key.removeprefix("lora."): value for key, value in fix.items()}) == []


@pytest.mark.parametrize(
    ("name", "lora", "key"),
    [
        ("qwen3", {"target_modules": ["q_proj", "c_attn"]}, "lora.target_modules.1: "),
        ("llama", {"exclude_modules": ["lm_haed"]}, "lora.exclude_modules.0: "),
        ("llama", {"exclude_modules": "vision_tower.*"}, "lora.exclude_modules: "),
        ("gpt_neox", {"modules_to_save": ["embed_out"]}, "lora.modules_to_save.0: "),  # lm_head once loaded
        ("gpt_neox", {"target_modules": ["query_key_value", "embed_out"]}, "lora.target_modules.1: "),
        ("qwen2_vl", {"target_modules": r"model\.decoder\..*q_proj"}, "lora.target_modules: "),
    ],
)
def test_names_of_which_some_mean_nothing_are_told(tmp_path: Path, name: str, lora: dict[str, Any], key: str) -> None:
    [told] = check(tmp_path, name, lora)
    assert told.startswith(key)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {}),
        ("llama", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}),
        (
            "llama",
            {"target_modules": ["self_attn.q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
        ),
        ("llama", {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [0, 1]}),
        ("llama", {"target_modules": r".*\.(q|v)_proj", "exclude_modules": ["lm_head"]}),
        ("llama", {"target_modules": r"model\.layers\.\d+\.self_attn\.[qkvo]_proj", "rank_pattern": {"q_proj": 8}}),
        ("qwen3", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}),
        ("qwen3", {"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 8, r"^model\.layers\.1\..*": 4}}),
        ("mistral", {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 8}}),
        ("gemma3_text", {"target_modules": ["q_proj", "embed_tokens"], "exclude_modules": r".*\.1\..*"}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "modules_to_save": ["lm_head", "wte"]}),
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"]}),
        ("llama", {"target_parameters": ["q_proj.weight"], "target_modules": ["v_proj"]}),
        (
            "llama",
            {"target_parameters": ["q_proj.weight"], "modules_to_save": ["self_attn"], "target_modules": ["o_proj"]},
        ),
        ("llama", {TOKENS: [3, 4]}),
        ("llama", {TOKENS: {"embed_tokens": [3], "lm_head": [4, 5]}, "modules_to_save": ["norm"]}),
        ("llama", {TOKENS: [3], "target_modules": ["q_proj", "lm_head"]}),
        ("gemma3_text", {TOKENS: {"embed_tokens": [3], "lm_head": [3]}}),
        ("gpt2", {TOKENS: {"wte": [3], "wpe": [1]}}),
        ("qwen2_vl", {TOKENS: {"language_model.embed_tokens": [3]}}),
        ("gpt2", {"target_modules": r"transformer\.h\.\d+\.attn\.c_attn"}),
        ("gpt_neox", {"target_modules": ["query_key_value", "dense"], "modules_to_save": ["lm_head"]}),
        ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
        ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3", "gate"]}),
        ("mixtral", {"target_modules": ["gate_up_proj", "down_proj"]}),
        ("qwen2_vl", {"target_modules": ["q_proj", "v_proj"]}),
        ("qwen2_vl", {"target_modules": ["model.language_model.layers.0.self_attn.q_proj"]}),
        ("qwen2_vl", {"target_modules": ["qkv", "q_proj"], "finetune_vision_layers": True, "layers_to_transform": [2]}),
        ("qwen2_vl", {"target_modules": r"model\.language_model\.layers\.\d+\.self_attn\.q_proj"}),
        ("qwen2_vl", {"target_modules": r"model\.visual\.blocks.*qkv", "finetune_vision_layers": True}),
        ("llava", {"target_modules": r"model\.language_model\.layers.*q_proj"}),
        ("llava", {"target_modules": ["q_proj"], "modules_to_save": ["multi_modal_projector"]}),
    ],
)
def test_names_that_mean_something_are_taken_without_a_word(tmp_path: Path, name: str, lora: dict[str, Any]) -> None:
    assert check(tmp_path, name, lora) == []


def test_single_tokens_of_a_head_with_a_bias_are_refused(tmp_path: Path) -> None:
    job = jobfile.validate(
        {"base_model": "/m", "datasets": [{"path": "/d"}], "lora": {TOKENS: {"embed_tokens": [3], "lm_head": [4]}}}
    )
    model = basemodel.inspect(family.write(tmp_path / "llama", "llama"))
    bias = replace(model.tensors[0], name="lm_head.bias", shape=(32,))
    with pytest.raises(SpecError, match=r"lm_head .* has a bias"):
        target.check(job, replace(model, tensors=(*model.tensors, bias)))


def test_an_adapter_of_tokens_that_the_base_lacks_is_refused(tmp_path: Path) -> None:
    model = basemodel.inspect(family.write(tmp_path / "llama", "llama"))
    for asked in ([3, 10**6], {"embed_tokens": [3], "lm_head": [10**6]}):
        adapter = AdapterInfo(tmp_path, {TOKENS: asked}, 0, 0)
        with pytest.raises(ModelError, match=r"trainable_token_indices has 1000000, but the vocabulary"):
            target.check_adapter(adapter, model)
    for harmless in ([3], None, "odd", {"embed_tokens": None}):
        target.check_adapter(AdapterInfo(tmp_path, {TOKENS: harmless}, 0, 0), model)


def test_nothing_is_refused_where_names_are_not_known(tmp_path: Path) -> None:
    path = family.write(tmp_path / "own", "llama", model_type="own", auto_map={"AutoModelForCausalLM": "own.Own"})
    job = jobfile.validate(
        {"base_model": "/m", "datasets": [{"path": "/d"}], "lora": {"target_modules": ["q"], "modules_to_save": ["x"]}}
    )
    assert target.check(job, basemodel.inspect(path)) == []
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert target.check(job, basemodel.inspect(path, allow_pickle=True)) == []
