"""Tiny vision-language models of real families with random weights, whole: config, weights, tokenizer, processor files.

Nothing here, and nothing that trains them on text, needs Pillow or torchvision: the processor's file is written as it
would be, and only its tokenizer is ever loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo.tokenizer import build_tokenizer

#: Family -> chat template, and the token in whose place an image stands.
FAMILIES: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma", "<image_soft_token>"),
    "llava": ("chatml", "<image>"),
    "idefics3": ("chatml", "<image>"),
    "qwen2_5_vl": ("chatml", "<|image_pad|>"),
}


def build_vision_checkpoint(
    directory: Path, family: str = "gemma3", *, dtype: str = "float32", seed: int = 0, vocab_size: int = 640
) -> Path:
    """A complete vision-language model. The same arguments give the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    template, image_token = FAMILIES[family]
    tokenizer = build_tokenizer(template, vocab_size=vocab_size)
    tokenizer.add_special_tokens({"additional_special_tokens": [image_token]})
    image_id = tokenizer.convert_tokens_to_ids(image_token)
    settings = _settings(family, (len(tokenizer) + 7) // 8 * 8, image_id)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        settings[name] = settings["text_config"][name] = getattr(tokenizer, name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **settings))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    return directory


def _settings(family: str, vocab_size: int, image_id: int) -> dict[str, Any]:
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": vocab_size, "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    match family:
        case "gemma3":
            text |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}
            return {"text_config": text, "vision_config": vision, "image_token_index": image_id,
                    "mm_tokens_per_image": 4}  # fmt: skip
        case "llava":
            vision |= {"model_type": "clip_vision_model", "projection_dim": 32}
            text |= {"model_type": "llama"}
            return {"text_config": text, "vision_config": vision, "image_token_index": image_id,
                    "vision_feature_layer": -1}  # fmt: skip
        case "idefics3":
            text |= {"model_type": "llama"}
            return {"text_config": text, "vision_config": vision, "image_token_id": image_id, "scale_factor": 2}
        case "qwen2_5_vl":
            rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
            eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                    "patch_size": 14, "fullatt_block_indexes": [0]}  # fmt: skip
            return {"text_config": text | {"rope_parameters": rope}, "vision_config": eyes, "image_token_id": image_id}
        case _:
            raise ValueError(family)
