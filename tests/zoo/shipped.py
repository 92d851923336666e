"""The chat templates that the installed TRL ships, and tokenizers around them."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_FOUND = importlib.util.find_spec("trl")
assert _FOUND is not None
assert _FOUND.submodule_search_locations
SHIPPED_DIR = Path(_FOUND.submodule_search_locations[0]) / "chat_templates"

#: Names of the templates that come with models, without those for training.
SHIPPED = tuple(sorted(path.stem for path in SHIPPED_DIR.glob("*.jinja") if not path.stem.endswith("_training")))

#: (bos, eos) by the beginning of a template's name.
_ENDS: dict[str, tuple[str | None, str]] = {
    "llama": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "diffusion": ("<bos>", "<eos>"),
    "phi": (None, "<|endoftext|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "glm": (None, "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "lfm": ("<|startoftext|>", "<|im_end|>"),
}
_SPECIAL = re.compile(
    r"<\|[^|<>\s]{2,40}\|>|<｜[^｜]{2,40}｜>|</?(?:bos|eos|start_of_turn|end_of_turn|think|tool_call|image|s|BOS_TOKEN)>"
    r"|<turn\|>|<\|turn>|\[/?INST\]"
)


def source(name: str) -> str:
    """Return the text of a shipped template; those for training (`qwen3_training`) are included."""
    return (SHIPPED_DIR / f"{name}.jinja").read_text(encoding="utf-8")


@functools.cache
def build_shipped(name: str) -> PreTrainedTokenizerFast:
    """Build a small tokenizer with that template, whose markers are tokens of their own."""
    text = source(name)
    bos, eos = next((ends for start, ends in _ENDS.items() if name.startswith(start)), (None, "<|im_end|>"))
    special = sorted({*_SPECIAL.findall(text), eos, "<pad>", *([bos] if bos else [])})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the capital of france is paris and what answer user assistant system model\n\n hello world"] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token="<pad>", chat_template=text
    )
