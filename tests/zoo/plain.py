"""A base model and a data set of bare files, for tests in which nothing is trained: no torch, microseconds."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of zeros: name → (dtype as safetensors spells it, shape)."""
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = sizes[dtype]
        for extent in shape:
            num_bytes *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_base_model(directory: Path, *, num_layers: int = 1) -> Path:
    """A checkpoint directory that is complete as far as files go."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    layer: dict[str, tuple[str, list[int]]] = {
        **{f"self_attn.{name}_proj.weight": ("F32", [8, 8]) for name in "qkvo"},
        "mlp.gate_proj.weight": ("F32", [16, 8]),
        "mlp.up_proj.weight": ("F32", [16, 8]),
        "mlp.down_proj.weight": ("F32", [8, 16]),
        "input_layernorm.weight": ("F32", [8]),
        "post_attention_layernorm.weight": ("F32", [8]),
    }
    write_safetensors(
        directory / "model.safetensors",
        {
            "model.embed_tokens.weight": ("F32", [32, 8]),
            **{f"model.layers.{n}.{name}": each for n in range(num_layers) for name, each in layer.items()},
            "model.norm.weight": ("F32", [8]),
            "lm_head.weight": ("F32", [32, 8]),
        },
    )
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}}}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return directory


def write_adapter(directory: Path, *, r: int = 4, width: int = 8) -> Path:
    """A LoRA adapter for `write_base_model`, as far as files go."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    write_safetensors(
        directory / "adapter_model.safetensors",
        {f"{module}.lora_A.weight": ("F32", [r, width]), f"{module}.lora_B.weight": ("F32", [width, r])},
    )
    return directory


def write_dataset(path: Path, *, num_rows: int = 8, first: int = 0) -> Path:
    """Write a data set of messages, each with a number of its own."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(first, first + num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec(model: Path, dataset: Path, **keys: Any) -> dict[str, Any]:
    """Return the smallest job, with a test's own keys added."""
    return {"base_model": str(model), "lora": {"r": 4}, "datasets": [{"path": str(dataset)}], **keys}


def write_tokenizer(directory: Path, *, special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> Path:
    """Write a tokenizer that knows only bytes and special tokens, as the tokenizers library does: 256 numbers, and one
    for each special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.save(str(directory / "tokenizer.json"))
    return directory
