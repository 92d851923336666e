"""What other programs make of an adapter is said."""

from __future__ import annotations

from typing import Any

import pytest

from honed.worker.model import serving

PLAIN: dict[str, Any] = {"r": 16, "lora_alpha": 32, "init_lora_weights": True, "bias": "none"}
NAMES = ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",)


def test_nothing_is_said_of_an_adapter_that_every_program_reads() -> None:
    assert serving.remarks(PLAIN, NAMES) == []
    assert serving.remarks(PLAIN | {"use_rslora": True}, NAMES) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"use_dora": True}, "may not load this adapter, which has DoRA: serve the merged model"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.down_proj"]}, "fused experts"),
        ({"trainable_token_indices": [3]}, "single trained tokens"),
        ({"rank_pattern": {"q_proj": 4}}, "against rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "against rank_pattern"),
        ({"init_lora_weights": "pissa"}, "compute another model"),
        ({"init_lora_weights": "olora"}, "compute another model"),
        ({"r": 32}, "--max-lora-rank of at least 32"),
        ({"r": 1024}, "up to rank 512"),
    ],
)
def test_what_vllm_refuses_or_computes_otherwise_is_said(keys: dict[str, Any], words: str) -> None:
    assert words in serving.remarks(PLAIN | keys, NAMES)[0]


def test_patterns_that_scale_every_module_alike_are_read_rightly() -> None:
    alike = {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 16}}
    assert serving.remarks(PLAIN | alike, NAMES) == []
    assert serving.remarks(PLAIN | alike | {"use_rslora": True}, NAMES) != []
