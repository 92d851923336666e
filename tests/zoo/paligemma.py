"""A tiny PaliGemma: a prefix language model, whose prompt sees itself as a whole."""

from __future__ import annotations

from pathlib import Path

from zoo.tokenizer import build_tokenizer

#: The model's own processor puts the images first, and an end of line after the prompt.
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<image>' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ eos_token if m['role'] == 'assistant' else '\n' }}{% endfor %}"
)


def build_paligemma(directory: Path, *, seed: int = 0) -> Path:
    """Build a complete checkpoint. The same arguments give the same weights."""
    import torch
    import transformers

    tokenizer = build_tokenizer("gemma", vocab_size=640)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    images = transformers.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = transformers.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    text = {
        "model_type": "gemma",
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        **{name: getattr(tokenizer, name) for name in names},
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 64,
    }
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
