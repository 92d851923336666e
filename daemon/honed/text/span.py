"""Spans of texts and of their tokens, and the mapping between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
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


def runs_of(trained: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    start = 0
    for n in range(1, len(trained) + 1):
        if n == len(trained) or trained[n] != trained[start]:
            yield start, n, trained[start]
            start = n


def token_ends(text: str, offsets: Sequence[Span]) -> list[int] | None:
    """Return the end of each token; None unless the tokens account for the whole text, white space aside, in order."""
    if not offsets:
        return None if text.strip() else []
    starts, ends = zip(*offsets, strict=True)
    before = (0, *ends[:-1])
    if any(map(gt, before, ends)) or any(map(gt, starts, ends)):
        return None
    if starts != before and not all(text[a:b].isspace() for a, b in zip(before, starts, strict=True) if a < b):
        return None
    return list(ends) if ends[-1] <= len(text) and not text[ends[-1] :].strip() else None


def range_by_offset(text: str, ends: list[int], span: Span) -> Span | None:
    """Return the tokens of a span; None where one crosses its start, or its end with more than white space."""
    first, last = bisect_right(ends, span[0]), bisect_right(ends, span[1])
    before = text[ends[first - 1] if first else 0 : span[0]]
    beyond = last < len(ends) and (ends[last - 1] if last else 0) < span[1]
    after = text[span[1] : ends[last]] if beyond else ""
    if before.strip() or after.strip():
        return None
    return first, last + (1 if beyond else 0)
