"""Tokenizers of the two great families, trained on the spot in a fraction of a second.

`bytelevel` is the kind of GPT-2, Llama-3 and Qwen; `metaspace` is SentencePiece's (Llama-2, Mistral, Gemma): a `▁` for
a space and before the first word, and bytes for characters outside the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from zoo.template import TEMPLATES

Kind = Literal["bytelevel", "metaspace"]

#: Enough words for merges across the boundaries that masks depend on.
CORPUS = (
    "user\nassistant\nsystem\ntool\nmodel\n\nYou are a careful assistant. The capital of France is Paris.",
    "What is the capital of Germany? Berlin. What is two and two? 4. Four! Answer: yes.\n\n no?\n",
    "<think>\n\n</think>\n\n reasoning, first; then the answer: 42 </think>\n",
    '<tool_call>\n{"name": "add"}\n</tool_call>',
    "User: hello there, Assistant: hello! <|im_end|>\n<|im_start|>assistant\n ([INST] and [/INST]) <<SYS>> <</SYS>>",
    "Ünïcödé 日本語 мир 🙂 can be said, too; and def f(x):\n    return x + 1\n\n\n  \t done.",
)

#: Llama-3's and Qwen's way of cutting words: a newline sticks to the punctuation before it.
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: The pieces within which SentencePiece merges: it splits by script, by digit and at line breaks.
_PIECES = Regex(r"▁*\p{L}+|▁*\p{N}|▁*[^\s\p{L}\p{N}▁]+|▁+|\n+|\s")


def build_tokenizer(
    template_name: str, *, corpus: Iterable[str] | None = None, vocab_size: int = 640, kind: Kind = "bytelevel"
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with the template's special tokens and its chat template, as `AutoTokenizer` would load it."""
    template = TEMPLATES[template_name]
    texts = [*CORPUS, *(corpus or [])] * 2
    tokenizer = _byte_level(texts, vocab_size) if kind == "bytelevel" else _metaspace(texts, vocab_size)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in template.special_tokens])
    if kind == "metaspace" and template.bos_token:
        bos_id = tokenizer.token_to_id(template.bos_token)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{template.bos_token} $A",
            pair=f"{template.bos_token} $A $B",
            special_tokens=[(template.bos_token, bos_id)],
        )
    names = {"bos_token": template.bos_token, "eos_token": template.eos_token, "pad_token": template.pad_token}
    if "<unk>" in template.special_tokens:
        names["unk_token"] = "<unk>"
    named = {name: token for name, token in names.items() if token}
    rest = [token for token in template.special_tokens if token not in named.values()]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=rest,
        chat_template=template.source,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="right",
        **named,
    )


def _byte_level(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=True)  # as Llama-3's: offsets leave spaces out
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _metaspace(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")  # in training alone: no merges across words
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 256, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in sorted(trained["vocab"], key=trained["vocab"].__getitem__):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in trained["merges"]]
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return built


#: Spellings of single tokens in templates: `<|im_end|>`, `<｜User｜>`, `<turn|>`, `[INST]`, `<start_of_turn>`, `</s>`.
_MARKS = re.compile(
    r"<\|[^|<>\s\"']{1,40}\|?>|<[a-z_]{1,20}\|>|<｜[^｜]{1,40}｜>|\[/?[A-Z_]{3,20}\]|\[gMASK\]|<sop>|</?s>"
    r"|<(?:bos|eos|start_of_turn|end_of_turn|end_of_utterance|BOS_TOKEN)>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
#: EOS and BOS of the tokenizers of those templates, found by a marker that a template contains.
_EOS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|eot|>",
    "</s>",
    "<|endoftext|>",
    "<eos>",
)
_FAMILIES = {
    "<start_of_turn>": ("<bos>", "<eos>"),
    "<turn|>": ("<bos>", "<eos>"),
    "<｜User｜>": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "<|assistant|>": ("", "<|endoftext|>"),
    "[INST]": ("<s>", "</s>"),
    "<|eot_id|>": ("<|begin_of_text|>", "<|eot_id|>"),
    "<end_of_utterance>": ("<|begin_of_text|>", "<end_of_utterance>"),
}
_BOS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<BOS_TOKEN>", "<bos>", "<|startoftext|>", "<s>")


def build_marked_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer for a chat template of any family, in which each of the template's markers is one token."""
    marks = {match.group() for match in _MARKS.finditer(source)} | {"<pad>"}
    bos, eos = next((named for mark, named in _FAMILIES.items() if mark in source), ("", ""))
    eos = eos or next((token for token in _EOS if token in source), "<|endoftext|>")
    bos = bos or (next((token for token in _BOS if token in source), "<s>") if "bos_token" in source else "")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:1], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in sorted({*marks, eos, *([bos] if bos else [])})]
    )
    named = {"bos_token": bos} if bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=source,
        clean_up_tokenization_spaces=False,
        pad_token="<pad>",
        eos_token=eos,
        **named,
    )
