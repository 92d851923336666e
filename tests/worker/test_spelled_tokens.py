"""Masks by the spellings of tokens: the same as by their offsets, wherever they are used at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from honed.text.tokens import Tokens
from zoo.template import TEMPLATES
from zoo.tokenizer import build_tokenizer

KINDS = ("bytelevel", "metaspace", "normalized", "prefixed")
PARTS = (
    *("user\n", "assistant\n", "<|im_start|>", "<|im_end|>", "\n", "\n\n", " ", "  \t", "Paris", " is", "Paris is "),
    *(
        "日本語",
        "🙂",
        "é",
        "e\u0301",
        "Ünïcödé",
        "\ufb01",
        "▁",
        "\u00a0",
        "42",
        ".",
        "</think>",
        "<0x41>",
        "\ufeff",
        "\0",
    ),
)
_BUILT: dict[str, Any] = {}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer; of byte-level ones also one that normalizes, and one that writes a space first."""
    if kind not in _BUILT:
        made = build_tokenizer("qwen3" if "qwen3" in TEMPLATES else next(iter(TEMPLATES)), kind=_base(kind))
        if kind == "normalized":
            made.backend_tokenizer.normalizer = normalizers.NFC()
        if kind == "prefixed":
            made.backend_tokenizer.normalizer = normalizers.Prepend(" ")
        _BUILT[kind] = made
    return _BUILT[kind]


def _base(kind: str) -> Any:
    return "metaspace" if kind == "metaspace" else "bytelevel"


def trusted(kind: str) -> Tokens:
    """Return tokens whose offsets are trusted, as after the first rows."""
    made = Tokens(tokenizer_of(kind))
    made._num_trials = 100
    return made


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=12), st.data())
def test_where_spellings_settle_a_mask_offsets_give_the_same(kind: str, parts: list[str], data: Any) -> None:
    text = "".join(parts).encode(errors="replace").decode()
    tokens = trusted(kind)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=4, unique=len(text) > 3)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    ids = tokens._backend.encode(text, add_special_tokens=False).ids
    spelled = tokens._spelled(text, spans, ids)
    if spelled is None:
        return
    located = tokens._located(text, spans, None)
    assert located is not None
    assert located[:2] == spelled[:2]
    n = data.draw(st.integers(0, len(ids)))
    assert spelled[2](0, n) == located[2](0, n)


@pytest.mark.parametrize(("kind", "is_settled"), [("bytelevel", True), ("normalized", True), ("prefixed", False)])
def test_spellings_settle_what_is_as_written_and_nothing_else(kind: str, is_settled: bool) -> None:
    tokens, text = (
        trusted(kind),
        "<|im_start|>user\nÜnï 日本語 🙂?<|im_end|>\n<|im_start|>assistant\nmир, é.<|im_end|>\n",
    )
    span = (text.rindex("mир"), text.rindex("\n"))
    ids = tokens._backend.encode(text, add_special_tokens=False).ids
    found = tokens._spelled(text, [span], ids)
    assert (found is not None) == is_settled
    if found is not None:
        at = found[1].index(True)
        assert tokens.decode(ids[at : len(ids)][: sum(found[1])]) == text[slice(*span)]
    # Not even as written: the normalizer composes it.
    if kind == "normalized":
        other = text.replace("é", "e\u0301")
        span = (other.rindex("mир"), other.rindex("\n"))
        ids = tokens._backend.encode(other, add_special_tokens=False).ids
        assert tokens._spelled(other, [span], ids) is None


def test_a_span_that_cuts_a_token_is_left_to_the_offsets() -> None:
    tokens, text = trusted("bytelevel"), "What is the capital"
    ids = tokens._backend.encode(text, add_special_tokens=False).ids
    end = next(n for n in range(1, len(text)) if tokens._spelled(text, [(0, n)], ids) is None)
    assert tokens.mask(text, [(0, end)]) is None


def test_spellings_that_contradict_the_offsets_are_given_up() -> None:
    tokens, text = trusted("bytelevel"), "<|im_start|>user\n<|im_end|>"
    ids = tokens._backend.encode(text, add_special_tokens=False).ids
    span = (len(tokens.decode(ids[:2])), len(text))
    first = tokens.mask(text, [span])
    assert first is not None
    spelled = list(tokens._spellings or [])
    one, two, three = (spelled[each] for each in ids[:3])
    for number, wrong in zip(ids, (one + two, three[:1], three[1:]), strict=False):
        spelled[number] = wrong  # the same text, cut at other places
    tokens._spellings = spelled
    assert tokens._spelled(text, [span], ids) is not None
    again = tokens.mask(text, [span])
    assert again is not None
    assert again[:2] == first[:2]
    assert tokens._spellings == []
    assert tokens._spelled(text, [span], ids) is None
