"""The memory estimate compared with the tensors of real models during a real training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.plan import parameter
from honed.plan.parameter import EXPERT_NAMES
from honed.plan.precision import PART_KEYS
from honed.spec import jobfile
from worker.conftest import MakeJob

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "mixtral")
DTYPES = ("bfloat16", "float16", "float32")
#: Shapes large enough for percentages to mean something.
SIZES: dict[str, dict[str, Any]] = {
    family: {"hidden_size": 256, "num_layers": 2, "dtype": "bfloat16"} for family in (*FAMILIES, "qwen2", "qwen3_moe")
}
SIZES["mixtral"] |= {"template": "mistral", "num_local_experts": 4, "num_experts_per_tok": 2}
SIZES["qwen3_moe"] |= {"template": "qwen3", "num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
PARTS = ("weights_bytes", "adapter_bytes", "gradient_bytes", "optimizer_bytes")


def estimated_and_used(
    make_job: MakeJob, family: str, model: Any = None, **keys: Any
) -> tuple[dict[str, int], dict[str, int]]:
    training = {"max_steps": 1, "gradient_checkpointing": False} | keys.pop("training", {})
    predictions = {"sample_frequency": "off"}
    job = make_job(family, model=model or SIZES[family], training=training, predictions=predictions, **keys)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert [told["when"] for told in ended.of("memory")] == ["built", "trained"]
    assert ended.result["memory"]["resident_peak_bytes"] > 2**20
    return job.plan["memory"], ended.result["memory"]


def assert_close(estimated: dict[str, int], used: dict[str, int]) -> None:
    for part in PARTS:
        assert abs(estimated[part] - used[part]) <= 0.05 * used[part], (part, estimated[part], used[part])


def cells() -> list[Any]:
    """Return each family in each quantization, and in full, in one dtype or another; in every dtype with --all."""
    found = []
    ways = [("none", True), ("4bit", True), ("8bit", True), ("none", False)]
    for (number, family), (way, (quantization, has_lora)) in itertools.product(enumerate(FAMILIES), enumerate(ways)):
        dtypes = DTYPES if has_lora else ("bfloat16", "float32")  # float16 is float32 in full fine-tuning
        for place, dtype in enumerate(dtypes):
            marks = [] if place == (number + way) % len(dtypes) else [pytest.mark.exhaustive]
            found.append(pytest.param(family, quantization, has_lora, dtype, marks=marks))
    return found


@pytest.mark.parametrize(("family", "quantization", "has_lora", "dtype"), cells())
def test_weights_adapter_gradients_and_optimizer_are_estimated_within_five_percent(
    make_job: MakeJob, family: str, quantization: str, has_lora: bool, dtype: str
) -> None:
    tuning = {"lora": {"r": 8}} if has_lora else {}
    assert_close(*estimated_and_used(make_job, family, quantization=quantization, dtype=dtype, **tuning))


_ALWAYS = ("adamw_8bit", "lion_32bit", "ademamix_8bit", "adafactor", "sgd")
_OPTIMIZERS = (
    *_ALWAYS,
    "adamw_torch",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_8bit",
    "ademamix",
    "adagrad",
    "rmsprop",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
)


@pytest.mark.parametrize(
    ("optim", "tuning"),
    [
        pytest.param(optim, tuning, marks=[] if optim in _ALWAYS and not tuning else [pytest.mark.exhaustive])
        for optim in _OPTIMIZERS
        for tuning in ({}, {"lora": {"r": 8}})
    ],
)
def test_an_optimizers_state_is_estimated_by_its_kind(make_job: MakeJob, optim: str, tuning: dict[str, Any]) -> None:
    assert_close(*estimated_and_used(make_job, "llama", dtype="bfloat16", training={"optim": optim}, **tuning))


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_checkpoint_that_is_stored_quantized_is_estimated_too(
    make_job: MakeJob, checkpoint_of: Callable[..., Path], tmp_path: Path, quantization: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    whole, stored = checkpoint_of("llama", **SIZES["llama"]), tmp_path / "stored"
    options: dict[str, Any] = (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        if quantization == "4bit"
        else {"load_in_8bit": True}
    )
    AutoModelForCausalLM.from_pretrained(
        whole, quantization_config=BitsAndBytesConfig(**options), dtype="bfloat16"
    ).save_pretrained(stored)
    AutoTokenizer.from_pretrained(whole).save_pretrained(stored)
    assert_close(*estimated_and_used(make_job, "llama", model=stored, lora={"r": 8}))


def test_going_on_from_an_adapter_is_estimated_from_its_shapes(make_job: MakeJob) -> None:
    first = make_job("llama", model=SIZES["llama"], training={"max_steps": 1}, lora={"r": 8})
    assert first.run().status == 0
    assert_close(*estimated_and_used(make_job, "llama", adapter=str(first.output_dir)))


# --- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, {}) for family in SIZES),
        ("llama", {"use_dora": True}),
        ("gpt2", {"use_dora": True}),
        ("qwen2", {"bias": "all"}),
        ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj"]}),
        ("gpt2", {"bias": "lora_only", "target_modules": ["c_attn"]}),
        ("qwen3", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"]}),
        ("gemma2", {"modules_to_save": ["lm_head"]}),  # tied to the embedding: a copy of its own
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("llama", {"rank_pattern": {"q_proj": 32, r"layers\.0\.mlp\.up_proj": 2}}),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0]}),
        ("llama", {"target_modules": r"model\.layers\.1\..*\.(q|k)_proj", "exclude_modules": ["k_proj"]}),
        ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
        ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
        ("mixtral", {"target_modules": r".*\.(q_proj|w2)"}),
        ("qwen3_moe", {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}),
    ],
)
def test_an_adapter_is_estimated_as_peft_builds_it(
    checkpoint_of: Callable[..., Path], family: str, lora: dict[str, Any]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    path = checkpoint_of(family, **SIZES[family])
    spec = jobfile.validate({"base_model": str(path), "datasets": [{"path": "/d.jsonl"}], "lora": {"r": 8, **lora}})
    assert spec.lora is not None
    options = spec.lora.model_dump(exclude_none=True, exclude=set(PART_KEYS.values()))
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(path), peft.LoraConfig(task_type="CAUSAL_LM", **options)
    )
    estimated = parameter.trained(spec, basemodel.inspect(path))
    assert estimated.num_parameters == sum(each.numel() for each in model.parameters() if each.requires_grad)
    added = [each for name, each in model.named_parameters() if ".lora_" in name or ".modules_to_save." in name]
    assert estimated.num_added == sum(each.numel() for each in added)


def test_the_families_whose_experts_are_adapted_are_those_of_peft() -> None:
    from peft.utils import transformers_weight_conversion as conversion
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    theirs = {
        family: set(conversion._MOE_TARGET_MODULE_MAPPING[base])
        for family, base in conversion._MODEL_TO_CONVERSION_PATTERN.items()
        if base in conversion._MOE_TARGET_MODULE_MAPPING and family in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "glm4v_moe"}
    }
    assert {family: set(names) for family, names in EXPERT_NAMES.items()} == theirs
