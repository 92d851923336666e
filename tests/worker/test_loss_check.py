"""The trained loss is compared with the model's own logits before the first step: TRL's real losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import _patch_chunked_ce_lm_head

from honed.plan import loss
from worker.conftest import MakeJob
from worker.test_families import rows_of
from zoo.vision import build_vision_checkpoint

#: Granite divides its logits, which TRL's chunked loss does not know. Nothing is learned yet: they are all small.
GRANITE: dict[str, Any] = {"family": "granite", "model": {"template": "chatml", "logits_scaling": 8.0}}
LORA: dict[str, Any] = {"lora": {"r": 4}, "predictions": {"sample_frequency": "off"}, "training": {"max_steps": 3}}
CHUNKED = {"type": "chunked_nll", "reasons": []}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_chunked_loss_that_is_not_the_models_gives_way_to_the_plain_one(make_job: MakeJob, dtype: str) -> None:
    job, plain = make_job(**GRANITE, **LORA, dtype=dtype), make_job(**GRANITE, **LORA, dtype=dtype)
    job.change_plan(loss=CHUNKED)
    assert plain.plan["loss"]["reasons"] == [
        "TRL's chunked loss is not compatible with the model (logits_scaling = 8 in its config.json)"
    ]
    stopped = job.stopped_at(1)
    [told] = [text for text in stopped.messages("warning") if "is not the model's" in text]
    assert told.startswith("the training loss (chunked_nll) is not the model's: on ")
    assert told.endswith("using the plain loss (nll) instead")
    resumed = job.run(2)
    assert resumed.status == 0, resumed.result
    assert [text for text in resumed.messages("warning") if "model's" in text] == [], "it goes on with nll"
    assert {**stopped.losses, **resumed.losses} == plain.run().losses


def test_a_chunked_loss_that_the_job_names_is_not_replaced(make_job: MakeJob) -> None:
    named = LORA | {"training": {"max_steps": 1, "loss_type": "chunked_nll"}}
    ended = make_job(**GRANITE, **named).run()
    assert ended.status == 89
    assert ended.result["error"]["code"] == "loss_mismatch"
    assert ended.result["error"]["hint"] == "write training.loss_type: nll, or remove it"
    assert ended.losses == {}


def test_the_plain_loss_is_not_taken_where_its_logits_do_not_fit(make_job: MakeJob) -> None:
    job = make_job(**GRANITE, **LORA, rows=[{"prompt": "a " * 300, "completion": "b " * 300}] * 8)
    memory = job.plan["memory"]
    job.change_plan(loss=CHUNKED, memory=memory | {"available_bytes": memory["total_bytes"] + 2**20})
    ended = job.run()
    assert ended.result["error"]["code"] == "loss_mismatch"
    assert "the plain loss (nll) needs all logits at once" in ended.result["error"]["message"]
    assert "a smaller per_device_train_batch_size" in ended.result["error"]["hint"]


def test_a_chunked_loss_that_fails_on_a_model_gives_way_too(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    job = make_job("llama", **LORA)
    job.change_plan(loss=CHUNKED)
    monkeypatch.setattr(LlamaForCausalLM, "base_model", property(lambda self: self))  # as Llama 4's
    ended = job.run()
    assert ended.status == 0, ended.result
    [told] = [text for text in ended.messages("warning") if "fails on this model" in text]
    assert "last_hidden_state" in told


def test_a_model_whose_own_loss_is_not_that_of_its_logits_is_not_trained(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    def unshifted(self: Any, logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        return cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    monkeypatch.setattr(LlamaForCausalLM, "loss_function", unshifted)
    ended = make_job("llama", **LORA).run()
    assert ended.result["error"]["code"] == "loss_mismatch"
    assert "or nll to use the model's own" in ended.result["error"]["hint"]
    named = make_job("llama", **(LORA | {"training": {"max_steps": 1, "loss_type": "nll"}})).run()
    assert named.status == 0
    assert any("requests the model's own loss" in text for text in named.messages("warning"))


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("gemma2", {"dtype": "bfloat16"}),
        ("phi3", {"quantization": "4bit"}),
        ("gpt_neox", {"dtype": "float32"}),
        ("qwen3", {"quantization": "8bit"}),
        ("qwen3", {"dtype": "bfloat16", "lora": {"r": 4, "modules_to_save": ["lm_head"]}}),
    ],
)
def test_a_chunked_loss_is_left_to_models_that_it_goes_with(
    make_job: MakeJob, family: str, keys: dict[str, Any]
) -> None:
    job = make_job(family, **(LORA | {"training": {"max_steps": 1}} | keys))
    job.change_plan(loss=CHUNKED)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert ended.messages("warning") == []
    assert any("the loss (chunked_nll) matches the model's" in text for text in ended.messages("debug"))


def test_a_forward_pass_that_is_never_twice_the_same_is_no_difference(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drawn = torch.nn.functional.linear, torch.Generator().manual_seed(0)

    def unsteady(*arguments: Any) -> torch.Tensor:
        made = plain(*arguments)
        return made * (1 + 0.2 * torch.randn(made.shape, generator=drawn)).to(made.dtype)

    monkeypatch.setattr(torch.nn.functional, "linear", unsteady)
    ended = make_job("llama", **(LORA | {"training": {"max_steps": 1}}), dtype="float32").run()
    assert ended.status == 0, ended.result
    assert ended.messages("warning") == []


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_rows_with_images_are_compared_whole(make_job: MakeJob, tmp_path: Path, family: str) -> None:
    base = build_vision_checkpoint(tmp_path / "base", family)
    job = make_job(model=base, rows=rows_of(("image",), tmp_path / "media", 2), **LORA, dtype="bfloat16")
    job.change_plan(loss=CHUNKED)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert any("the loss (chunked_nll) matches the model's" in text for text in ended.messages("debug"))


def test_the_balance_of_experts_is_no_difference(make_job: MakeJob) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "template": "qwen3"}
    for planned in ("nll", "chunked_nll"):
        job = make_job("qwen3_moe", model=experts, **(LORA | {"lora": {"r": 4, "target_modules": ["q_proj"]}}))
        job.change_plan(loss={"type": planned, "reasons": []})
        ended = job.run()
        assert ended.status == 0, ended.result
        assert any(f"the loss ({planned}) matches the model's" in text for text in ended.messages("debug"))


# --- What is known by config.json alone -------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_expand": 2}
#: Families by what their config.json says: whether TRL's chunked loss leaves something out.
SUSPECTS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0},
    "granitemoeshared": {"logits_scaling": 8.0, "shared_intermediate_size": 32},
    "granitemoehybrid": {"logits_scaling": 8.0, "layer_types": ["attention", "attention"], **_MAMBA},
    "granite_swa": {"logits_scaling": 8.0},
    "hyperclovax": {"logits_scaling": 0.125},
    "falcon_h1": {"lm_head_multiplier": 0.125, **_MAMBA},
    "minicpm3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "dim_model_base": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "modernbert-decoder": {},
}
WELL: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "phi3": {}, "olmo2": {}, "glm4": {}, "starcoder2": {},
    "gemma2": {"final_logit_softcapping": 2.0}, "gemma3_text": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.25}, "cohere2": {"logit_scale": 0.25}, "granite": {"logits_scaling": 1.0},
    "mixtral": {}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "smollm3": {}, "ernie4_5": {},
}  # fmt: skip


@pytest.mark.parametrize("name", [*SUSPECTS, *(f"{name} as it is" for name in WELL)])
def test_a_config_tells_whether_the_chunked_loss_is_the_models(name: str) -> None:
    family, is_well = name.removesuffix(" as it is"), name.endswith(" as it is")
    config = AutoConfig.for_model(family, **(_SMALL | (WELL if is_well else SUSPECTS)[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    head = model.get_output_embeddings().weight
    ids = torch.randint(3, 90, (1, 40))
    with torch.no_grad():
        head.mul_(10)
        logits = model(input_ids=ids).logits[0, :-1]
        _patch_chunked_ce_lm_head(model, 256)
        difference = abs(float(model(input_ids=ids, labels=ids).loss - cross_entropy(logits, ids[0, 1:])))
    assert (difference < 1e-4) == is_well, difference
    assert (loss.own_head(config.to_diff_dict()) is None) == is_well
