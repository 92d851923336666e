"""Checkpoints of several families as bare files: their names, tiny shapes, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo import plain

Tensors = dict[str, tuple[str, list[int]]]

_D, _V = 8, 32


def _layers(prefix: str, shapes: Mapping[str, list[int]], number: int = 2) -> Tensors:
    return {f"{prefix}.{n}.{name}": ("F32", shape) for n in range(number) for name, shape in shapes.items()}


def _attention(inner: str = "self_attn") -> dict[str, list[int]]:
    return {f"{inner}.{name}_proj.weight": [_D, _D] for name in "qkvo"}


_MLP = {f"mlp.{name}_proj.weight": [_D, _D] for name in ("gate", "up", "down")}
_NORMS = {"input_layernorm.weight": [_D], "post_attention_layernorm.weight": [_D]}
_LLAMA = _attention() | _MLP | _NORMS
_TOP: Tensors = {"model.embed_tokens.weight": ("F32", [_V, _D]), "model.norm.weight": ("F32", [_D])}
_HEAD: Tensors = {"lm_head.weight": ("F32", [_V, _D])}
_QWEN3 = _LLAMA | {"self_attn.q_norm.weight": [4], "self_attn.k_norm.weight": [4]}
_GPT2 = {
    "attn.c_attn.weight": [_D, 3 * _D],
    "attn.c_attn.bias": [3 * _D],
    "attn.c_proj.weight": [_D, _D],
    "mlp.c_fc.weight": [_D, _D],
    "mlp.c_proj.weight": [_D, _D],
    "ln_1.weight": [_D],
    "ln_2.weight": [_D],
}
_PHI3 = {
    "self_attn.qkv_proj.weight": [3 * _D, _D],
    "self_attn.o_proj.weight": [_D, _D],
    "mlp.gate_up_proj.weight": [2 * _D, _D],
    "mlp.down_proj.weight": [_D, _D],
} | _NORMS
_NEOX = {
    "attention.query_key_value.weight": [3 * _D, _D],
    "attention.dense.weight": [_D, _D],
    "mlp.dense_h_to_4h.weight": [_D, _D],
    "mlp.dense_4h_to_h.weight": [_D, _D],
    "input_layernorm.weight": [_D],
}
_EYES = {
    "attn.qkv.weight": [3 * _D, _D],
    "attn.proj.weight": [_D, _D],
    "mlp.fc1.weight": [_D, _D],
    "mlp.fc2.weight": [_D, _D],
    "norm1.weight": [_D],
}
_CLIP = {f"self_attn.{name}.weight": [_D, _D] for name in ("q_proj", "k_proj", "v_proj", "out_proj")} | {
    "mlp.fc1.weight": [_D, _D],
    "mlp.fc2.weight": [_D, _D],
}
_BERT = {
    "attention.self.query.weight": [_D, _D],
    "attention.self.key.weight": [_D, _D],
    "attention.output.dense.weight": [_D, _D],
    "intermediate.dense.weight": [_D, _D],
}
_EXPERTS = {
    f"block_sparse_moe.experts.{n}.{name}.weight": [_D, _D] for n in range(2) for name in ("w1", "w2", "w3")
} | {"block_sparse_moe.gate.weight": [2, _D]}
_TEXT = {
    "hidden_size": _D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": _D,
    "vocab_size": _V,
}
_SEES = {"depth": 2, "embed_dim": _D, "hidden_size": _D, "num_heads": 2, "patch_size": 14}

#: Name → the content of config.json, and the tensors in the header.
FAMILIES: dict[str, tuple[dict[str, Any], Tensors]] = {
    "llama": ({**_TEXT, "architectures": ["LlamaForCausalLM"]}, _TOP | _HEAD | _layers("model.layers", _LLAMA)),
    "qwen3": (
        {**_TEXT, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
        _TOP | _layers("model.layers", _QWEN3),
    ),
    "mistral": ({**_TEXT, "architectures": ["MistralForCausalLM"]}, _TOP | _HEAD | _layers("model.layers", _LLAMA)),
    "gemma3_text": (
        {**_TEXT, "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": True},
        _TOP | _layers("model.layers", _QWEN3 | {"pre_feedforward_layernorm.weight": [_D]}),
    ),
    "gpt2": (
        {"n_embd": _D, "n_layer": 2, "n_head": 2, "vocab_size": _V, "architectures": ["GPT2LMHeadModel"]},
        {"wte.weight": ("F32", [_V, _D]), "wpe.weight": ("F32", [_V, _D]), "ln_f.weight": ("F32", [_D])}
        | _layers("h", _GPT2),
    ),
    "gpt_neox": (
        {**_TEXT, "architectures": ["GPTNeoXForCausalLM"]},
        {"gpt_neox.embed_in.weight": ("F32", [_V, _D]), "embed_out.weight": ("F32", [_V, _D])}
        | _layers("gpt_neox.layers", _NEOX),
    ),
    "phi3": ({**_TEXT, "architectures": ["Phi3ForCausalLM"]}, _TOP | _HEAD | _layers("model.layers", _PHI3)),
    "mixtral": (
        {**_TEXT, "architectures": ["MixtralForCausalLM"], "num_local_experts": 2},
        _TOP | _HEAD | _layers("model.layers", _attention() | _EXPERTS | _NORMS),
    ),
    "qwen2_vl": (
        {**_TEXT, "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": _SEES, "image_token_id": 5},
        _TOP | _HEAD | _layers("model.layers", _LLAMA) | _layers("visual.blocks", _EYES, 3)
        | {"visual.merger.mlp.0.weight": ("F32", [_D, _D])},
    ),
    "llava": (
        {"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 5,
         "text_config": {**_TEXT, "model_type": "llama"},
         "vision_config": {**_SEES, "model_type": "clip_vision_model", "num_hidden_layers": 3}},
        {f"language_model.{name}": each for name, each in (_TOP | _HEAD | _layers("model.layers", _LLAMA)).items()}
        | _layers("vision_tower.vision_model.encoder.layers", _CLIP, 3)
        | {"multi_modal_projector.linear_1.weight": ("F32", [_D, _D])},
    ),
    "bert": (
        {**_TEXT, "architectures": ["BertForMaskedLM"]},
        {"bert.embeddings.word_embeddings.weight": ("F32", [_V, _D])} | _layers("bert.encoder.layer", _BERT),
    ),
}  # fmt: skip


def write(directory: Path, name: str, **config: Any) -> Path:
    """Write a family's checkpoint, complete as far as files go."""
    plain.write_base_model(directory)
    given, tensors = FAMILIES[name]
    whole = {"model_type": name, "dtype": "float32", **given, **config}
    (directory / "config.json").write_text(json.dumps(whole))
    plain.write_safetensors(directory / "model.safetensors", tensors)
    if "vision_config" in whole:
        (directory / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14, "merge_size": 2}))
    return directory
