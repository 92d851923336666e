"""Tiny models of real families with random weights, and facts small enough for them to learn."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Literal

from zoo.tokenizer import build_tokenizer

#: Family -> the chat template that goes with it, and the kind of its tokenizer.
FAMILIES: dict[str, str] = {
    "llama": "llama3",
    "qwen2": "chatml",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "phi3": "phi3",
    "gpt2": "chatml",
    "gpt_neox": "zephyr",
}

Format = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text"]

_CAPITALS = (
    ("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
    ("Norway", "Oslo"), ("Egypt", "Cairo"), ("Peru", "Lima"), ("Cuba", "Havana"), ("Kenya", "Nairobi"),
    ("Austria", "Vienna"), ("Greece", "Athens"), ("Ireland", "Dublin"), ("Poland", "Warsaw"), ("Qatar", "Doha"),
    ("Chile", "Santiago"),
)  # fmt: skip


def build_checkpoint(
    directory: Path,
    family: str = "qwen3",
    *,
    template: str | None = None,
    dtype: str = "float32",
    hidden_size: int = 64,
    num_layers: int = 2,
    vocab_size: int = 640,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A complete base model, as save_pretrained writes it. The same arguments give the same weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer(template or FAMILIES.get(family, "chatml"), vocab_size=vocab_size, corpus=_corpus())
    settings = _settings(family, hidden_size, num_layers) | {
        "vocab_size": (len(tokenizer) + 7) // 8 * 8,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": family in ("gemma2", "gemma3_text", "gpt2"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | config)))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _settings(family: str, hidden_size: int, num_layers: int) -> dict[str, Any]:
    heads = 4
    if family == "gpt2":
        return {"n_embd": hidden_size, "n_layer": num_layers, "n_head": heads, "n_positions": 256}
    common = {
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
    }
    if family == "gpt_neox":
        return common
    grouped = common | {"num_key_value_heads": 2}
    match family:
        case "qwen3":
            return grouped | {"head_dim": hidden_size // heads}
        case "gemma2" | "gemma3_text":
            return grouped | {"head_dim": hidden_size // heads, "query_pre_attn_scalar": hidden_size // heads}
        case _:
            return grouped


def write_facts(path: Path, num_rows: int = 12, *, format: Format = "messages", repeat: int = 1) -> Path:  # noqa: A002
    """Capitals, in any of the five formats; .jsonl, or .csv for the flat ones."""
    facts = [_CAPITALS[n % len(_CAPITALS)] for n in range(num_rows)] * repeat
    rows = [_row(country, city, format) for country, city in facts]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _row(country: str, city: str, format: Format) -> dict[str, Any]:  # noqa: A002
    question, answer = f"What is the capital of {country}?", f"{city}."
    match format:
        case "messages":
            return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        case "prompt_completion":
            return {"prompt": f"{question}\n", "completion": answer}
        case "alpaca":
            return {"instruction": question, "input": "", "output": answer}
        case "sharegpt":
            return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        case "text":
            return {"text": f"{question} {answer}"}


def _corpus() -> list[str]:
    return [f"What is the capital of {country}? {city}." for country, city in _CAPITALS]
