"""What other programs make of an adapter, from its files alone: remarks for the log and the model card.

vLLM reads of adapter_config.json only `r`, `lora_alpha`, `use_rslora` and a few flags, and of the weights those named
`lora_A`, `lora_B` and `lora_embedding_A`, `lora_embedding_B`. It refuses some adapters, and scales others wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

#: The largest rank that vLLM can be started with (`--max-lora-rank`), and its default.
MAX_RANK, DEFAULT_RANK = 512, 16
_ADVICE = "serve the merged model instead (save_merged, or a job of kind: merge)"


def remarks(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return remarks on the adapter of an adapter_config.json whose weights have these names."""
    return [*_refused(config, list(names)), *_misread(config), *_rank(config)]


def _refused(config: Mapping[str, Any], names: list[str]) -> list[str]:
    reasons = {
        "weights of whole modules (modules_to_save)": config.get("modules_to_save"),
        "DoRA": config.get("use_dora"),
        "trained biases (bias)": config.get("bias", "none") != "none" or config.get("lora_bias"),
        "single trained tokens (trainable_token_indices)": config.get("trainable_token_indices"),
        "LoRA of parameters, such as fused experts (target_parameters)": config.get("target_parameters"),
        "LoRA of the embeddings": any(".lora_embedding_" in name for name in names),
        "whole embeddings": any(name.endswith((".embed_tokens.weight", ".lm_head.weight")) for name in names),
    }
    hindrances = [words for words, is_so in reasons.items() if is_so]
    return [f"vLLM may not load this adapter, which has {', '.join(hindrances)}: {_ADVICE}"] if hindrances else []


def _misread(config: Mapping[str, Any]) -> list[str]:
    """Return remarks on what vLLM loads without an error, and then computes differently."""
    lines = []
    if _has_other_scales(config):
        lines.append(
            f"vLLM scales all modules of this adapter alike, against rank_pattern and alpha_pattern: {_ADVICE}"
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        lines.append(
            f"init_lora_weights: {init} changed the base model at the start of training; programs that add this "
            f"adapter to the unchanged base, such as vLLM, compute another model: {_ADVICE}"
        )
    return lines


def _has_other_scales(config: Mapping[str, Any]) -> bool:
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    root: Any = math.sqrt if config.get("use_rslora") else float
    usual = config["lora_alpha"] / root(config["r"])
    return any(
        not math.isclose(alphas.get(key, config["lora_alpha"]) / root(ranks.get(key, config["r"])), usual)
        for key in {*ranks, *alphas}
    )


def _rank(config: Mapping[str, Any]) -> list[str]:
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > MAX_RANK:
        return [f"vLLM loads adapters up to rank {MAX_RANK}, and this one has {rank}: {_ADVICE}"]
    return (
        [f"vLLM loads this adapter if it is started with --max-lora-rank of at least {rank}"]
        if rank > DEFAULT_RANK
        else []
    )
