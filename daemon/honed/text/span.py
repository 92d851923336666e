"""Spans of texts and of their tokens, the mapping between them, and the white space that tokens keep.

`squeeze` removes white space to find a text; whether its white space is there, too, is for `lost_space` to say.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import gt
from typing import Any

Span = tuple[int, int]


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def after(text: str, mark: str) -> str:
    return text[text.rfind(mark) + len(mark) :]


def squeeze(text: str) -> str:
    """Remove white space and `▁`; SentencePiece's decoders write a space for it, even in `<｜end▁of▁sentence｜>`."""
    return "".join(text.replace("▁", " ").split())


#: What `squeeze` removes.
_SPACE = re.compile(r"[\s▁]+")
#: Templates write their own white space around tags such as `<think>`, and tokens may take that around them.
_TAG = r"</?[^<>\s/][^<>\n]{0,40}>|\[/?[A-Z_]{3,20}\]"
_MAX_TAG = 64
#: The white space that a tokenizer keeps of some between two letters: (letter, white space, letter); None if unknown.
Keeps = Callable[[str, str, str], str | None]


def lost_space(said: str, shown: str, marks: Sequence[str], keeps: Keeps) -> Span | None:
    """Return the first white space in `said` that `shown` lacks or has otherwise; None if there is none.

    The two begin with the same letters, and are compared as far as these are the same. White space at both ends, around
    tags and around the tokens `marks` is free, and so is what the tokenizer makes of it: T5's writes a space for a line
    break. No tokenizer may take the white space between two words.
    """
    letters, gaps = _apart(said)
    others, replaced = _apart(shown)
    end = common(letters, others)
    tag: re.Pattern[str] | None = None
    for n, (a, b) in gaps.items():
        gap, kept = said[a:b].replace("▁", " "), shown[slice(*replaced.get(n, (0, 0)))].replace("▁", " ")
        if gap == kept or not 0 < n < end:
            continue
        tag = tag or re.compile("|".join([*map(re.escape, marks), _TAG]))
        if tag.match(said, b) or any(item.end() == a for item in tag.finditer(said, max(0, a - _MAX_TAG), a)):
            continue
        before, following = said[a - 1], said[b]
        remains = keeps(before, gap, following)
        if kept != (kept if remains is None else remains) or (not kept and before.isalnum() and following.isalnum()):
            return a, b
    return None


def _apart(text: str) -> tuple[str, dict[int, Span]]:
    """Return a text without white space, and where the white space is, by the number of letters before it."""
    gaps, num_removed = dict[int, Span](), 0
    for item in _SPACE.finditer(text):
        gaps[item.start() - num_removed] = item.span()
        num_removed += item.end() - item.start()
    return squeeze(text), gaps


def from_letter(text: str, n: int) -> str:
    """Return a text from its n-th letter on, counted without white space."""
    _, gaps = _apart(text)
    return text[n + sum(b - a for at, (a, b) in gaps.items() if at <= n) :]


def runs_of(trained: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    start = 0
    for n in range(1, len(trained) + 1):
        if n == len(trained) or trained[n] != trained[start]:
            yield start, n, trained[start]
            start = n


def token_ends(text: str, offsets: Sequence[Span]) -> list[int] | None:
    """Return the end of every token; None unless the tokens account for the whole text, in order.

    Offsets may leave out white space that their tokens have; see `has_gaps`.
    """
    if not offsets:
        return None if text.strip() else []
    starts, ends = zip(*offsets, strict=True)
    before = (0, *ends[:-1])
    if any(map(gt, before, ends)) or any(map(gt, starts, ends)):
        return None
    if starts != before and not all(text[a:b].isspace() for a, b in zip(before, starts, strict=True) if a < b):
        return None
    return list(ends) if ends[-1] <= len(text) and not text[ends[-1] :].strip() else None


def has_gaps(offsets: Sequence[Span]) -> bool:
    """Return True if offsets leave out some of a text."""
    return any(b < a for (_, b), (a, _) in pairwise(offsets))


def range_by_offset(text: str, ends: list[int], span: Span) -> Span | None:
    """Return the tokens of a span; None where one crosses its start, or its end with more than white space."""
    first, last = bisect_right(ends, span[0]), bisect_right(ends, span[1])
    before = text[ends[first - 1] if first else 0 : span[0]]
    beyond = last < len(ends) and (ends[last - 1] if last else 0) < span[1]
    after = text[span[1] : ends[last]] if beyond else ""
    if before.strip() or after.strip():
        return None
    return first, last + (1 if beyond else 0)
