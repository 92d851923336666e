"""Weights that layers share: a merged checkpoint has them apart, or the job is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Kosmos2Config, LlamaForCausalLM

from honed.system.error import Fix
from honed.worker import rehearsal
from honed.worker.model import merge
from worker.conftest import MakeJob

TOKENS = torch.arange(3, 40).reshape(1, -1)


def test_ties_by_the_default_of_a_part_that_config_json_does_not_name_are_undone(tmp_path: Path) -> None:
    text = {"embed_dim": 32, "ffn_dim": 48, "layers": 2, "attention_heads": 2, "vocab_size": 64}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    }  # fmt: skip
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(
        Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=2)
    ).save_pretrained(base)
    config_path = base / "config.json"
    config_path.write_text(config_path.read_text().replace('"tie_word_embeddings": true,', ""))  # as published
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (base / name).write_text("{}")
    model = AutoModelForImageTextToText.from_pretrained(base)
    assert model.all_tied_weights_keys
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.get_output_embeddings().modules_to_save.default.weight.data += 0.1 * torch.randn(64, 32)
    model.save_pretrained(adapter)
    config = AutoConfig.from_pretrained(base)
    assert merge.merge(base, adapter, tmp_path / "merged", dtype="float32", config=config).is_untied
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        found, expected = (each.eval().text_model(input_ids=TOKENS).logits for each in (merged, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def is_always_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a class share its head's weights whatever the config says, as a model's own code may."""
    ties = {"lm_head.weight": "model.embed_tokens.weight"}
    monkeypatch.setattr(LlamaForCausalLM, "get_expanded_tied_weights_keys", lambda *_args, **_kwargs: dict(ties))


@pytest.mark.usefixtures("is_always_tied")
@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"lora": {"modules_to_save": ["lm_head"]}, "save_merged": "bfloat16"}, {"lora.modules_to_save": None}),
        ({"lora": {"target_modules": ["q_proj", "embed_tokens"]}, "save_merged": "bfloat16"}, {"save_merged": None}),
        ({"lora": {"target_modules": ["q_proj"]}, "save_merged": "bfloat16"}, None),
        ({"lora": {"modules_to_save": ["lm_head"]}}, None),
    ],
)
def test_a_class_that_cannot_store_them_apart_is_refused_before_a_step(
    keys: dict[str, Any], fix: Fix | None, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("llama", model={"tie_word_embeddings": True}, training={"max_steps": 1}, **keys)
    answer = rehearsal.rehearse(rehearsal._assignment(job.plan["spec"], job.plan, tmp_path))
    ended = job.run()
    if fix is None:
        assert (answer.outcome, ended.status) == ("passed", 0), (answer, ended.result)
        return
    assert answer.error is not None
    assert "always shares lm_head.weight with another layer" in answer.error.message
    assert answer.error.fix == fix, "the step on a small model passes with it"
    assert ended.result["error"]["code"] == "model_invalid"
    assert "always shares lm_head.weight" in ended.result["error"]["message"]
    assert not ended.losses
