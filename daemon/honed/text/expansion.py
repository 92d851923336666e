"""Mapping from the text that a template renders to the text that a processor makes of it.

    rendered   user\\n<|image_pad|>What is it?<|im_end|>\\n<|im_start|>assistant\\nA cat.<|im_end|>\\n
    expanded   user\\n<|image_pad|>…<|image_pad|>What is it?<|im_end|>\\n<|im_start|>assistant\\nA cat.<|im_end|>\\n

A template writes a few tokens in place of an image, a video or a sound. A processor replaces them by as many as it
needs, with whatever else its model reads there. All other text is the same in both, in the same order: so it is found
again, in any family, without knowing what the processor wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from honed.system import quote
from honed.text.span import Span, common

if TYPE_CHECKING:
    from honed.spec.media import Kind


@dataclass(frozen=True)
class Place:
    """The place of an image, a video or a sound in a text."""

    kind: Kind
    start: int
    end: int


@dataclass(frozen=True)
class Expanded:
    """A processor's result for a rendered conversation and its media."""

    text: str  #: as it went to the tokenizer
    input_ids: list[int]
    grids: Mapping[Kind, Sequence[tuple[int, ...]]] = field(default_factory=dict)  #: in patches, if the family has any


@dataclass(frozen=True)
class Carried:
    """The pieces of a rendered text, each with its span in the expanded one."""

    pieces: tuple[tuple[Span, Span], ...]
    places: tuple[Place, ...]  #: in the expanded text

    def spans(self, spans: Iterable[Span]) -> list[Span]:
        """Return spans of the rendered text as spans of the expanded one, without what was inserted."""
        carried = []
        for a, b in spans:
            for (start, end), (at, _) in self.pieces:
                low, high = max(a, start), min(b, end)
                if low < high:
                    carried.append((at + low - start, at + high - start))
        return carried


def added_text(with_it: str, without: str, tokens: Sequence[str]) -> str:
    """Return the part of `with_it` that `without` lacks, from the first added token to the last; empty for none."""
    pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
    matches, other = list(pattern.finditer(with_it)), [match.group() for match in pattern.finditer(without)]
    named = [match.group() for match in matches]
    head = common(named, other)
    tail = common(named[head:][::-1], other[head:][::-1])
    more = matches[head : len(matches) - tail]
    return with_it[more[0].start() : more[-1].end()] if more else ""


def find_places(text: str, placeholders: Mapping[Kind, str]) -> list[Place]:
    """Return the places of media that the template has written, in order."""
    kinds = {placeholder: kind for kind, placeholder in placeholders.items()}
    pattern = re.compile("|".join(map(re.escape, sorted(kinds, key=len, reverse=True))) or r"(?!)")
    return [Place(kinds[match.group()], *match.span()) for match in pattern.finditer(text)]


def carry(text: str, places: Sequence[Place], expanded: str, tokens: Sequence[str] = ()) -> Carried:
    """Map the text between the places to the expanded text. Raises ValueError where that cannot be known.

    `tokens` are those whose spelling is not text: `ok` is not found in `<image_soft_token>`.
    """
    cuts = [0, *[cut for place in places for cut in (place.start, place.end)], len(text)]
    pieces = [(cuts[n], cuts[n + 1]) for n in range(0, len(cuts), 2)]
    first, last = text[: pieces[0][1]], text[pieces[-1][0] :]
    if not expanded.startswith(first) or not expanded.endswith(last) or len(first) + len(last) > len(expanded):
        raise ValueError("the processor changes the text before the first of its media, or after the last")
    if not places:
        return Carried(((pieces[0], (0, len(expanded))),), ())
    inner, limit = pieces[1:-1], len(expanded) - len(last)
    early, late = [], []
    at = len(first)
    for a, b in inner:
        if (at := _without(tokens, expanded, text[a:b]).find(text[a:b], at, limit)) < 0:
            raise ValueError(
                f"the processor changes the text between its media: {quote.mark(repr(text[a:b]))} is missing"
            )
        early.append(at)
        at += b - a
    at = limit
    for a, b in reversed(inner):
        at = _without(tokens, expanded, text[a:b]).rfind(text[a:b], len(first), at)
        late.append(at)
    starts = []
    for (a, b), start, other in zip(inner, early, reversed(late), strict=True):
        if start != other and text[a:b].strip():
            raise ValueError(f"the processor repeats {quote.mark(repr(text[a:b]))}, which is between its media")
        starts.append(start)
    where = [(0, len(first)), *[(at, at + b - a) for (a, b), at in zip(inner, starts, strict=True)]]
    where.append((limit, len(expanded)))
    return Carried(
        tuple(zip(pieces, where, strict=True)),
        tuple(Place(item.kind, where[n][1], where[n + 1][0]) for n, item in enumerate(places)),
    )


def _without(tokens: Sequence[str], expanded: str, piece: str) -> str:
    """Return the expanded text with those tokens blanked whose spelling holds a piece of the rendered one."""
    for token in tokens:
        if piece in token and piece != token and piece.strip():
            expanded = expanded.replace(token, "\0" * len(token))
    return expanded
