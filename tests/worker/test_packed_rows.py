"""Packed rows: kept apart by most models, and rejected for those in which a row sees the one before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from honed.plan import packing

WIDE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2}
SMALL: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
#: Families, with more settings that make them small: some of each kind.
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": SMALL,
    "gptj": SMALL | {"rotary_dim": 8},
    "mixtral": EXPERTS,
    "mamba": {"state_size": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "qwen3_5_text": DELTA | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": EXPERTS | {"head_dim": 16},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "gpt_oss": EXPERTS | {"head_dim": 16},
}


def loss_of_the_second(model: Any, first: list[int], second: list[int]) -> float:
    """Return the loss of the second of two rows packed as TRL packs them."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    row = {
        "input_ids": first + second,
        "labels": [-100] * len(first) + second,
        "seq_lengths": [len(first), len(second)],
    }
    batch = collate([row])
    assert batch["position_ids"][0].tolist() == [*range(len(first)), *range(len(second))]
    model.train()  # as it is trained: some make their masks otherwise to predict
    with torch.no_grad():
        return float(model(**batch, use_cache=False).loss)


@pytest.mark.parametrize("family", TINY)
def test_a_row_reaches_the_next_in_the_families_that_are_refused_alone(family: str) -> None:
    config = AutoConfig.for_model(family, **(WIDE | TINY[family]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:  # as drawn, random weights hardly mix tokens
                torch.nn.init.normal_(parameter, std=0.15)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    one, other, second = [list(range(start, start + 9)) for start in (10, 30, 60)]
    change = abs(loss_of_the_second(model, one, second) - loss_of_the_second(model, other, second))
    is_refused = packing.leak(family, config.to_dict()) is not None
    assert is_refused == (change > 1e-4), change
    if not is_refused:
        with torch.no_grad():
            alone = float(model(torch.tensor([second]), labels=torch.tensor([second]), use_cache=False).loss)
        assert loss_of_the_second(model, one, second) == pytest.approx(alone, abs=1e-4)
