"""Images, videos and sounds in a rendered text: their places, and the processor that expands them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import isqrt

from honed.inputs.media import Media
from honed.inputs.row import Example
from honed.spec.media import Kind
from honed.system import quote
from honed.system.error import DatasetError
from honed.text.expansion import Expanded, Place, find_places
from honed.text.renderer import Renderer
from honed.text.span import Span
from honed.text.template import added_tokens, where

_A_KIND: dict[Kind, str] = {"image": "an image", "video": "a video", "audio": "sound"}

#: A processor's side of a row: expands a rendered text and its media, in order of occurrence.
Expand = Callable[[str, Sequence[Media]], Expanded]


class Places:
    """The media of rows under one template."""

    def __init__(self, renderer: Renderer, expand: Expand | None) -> None:
        self._renderer = renderer
        self._expand = expand
        self._prompt_end, self._leads_answers = "", False

    def expand_with(self, expand: Expand, *, prompt_end: str = "") -> None:
        """Expand rows by a processor that was loaded later. It ends every prompt with `prompt_end`, unless the template
        does."""
        self._expand = expand
        front, lead = self._renderer.probe.fronts[0] if prompt_end else ("", "")
        self._prompt_end = "" if front.endswith(prompt_end) else prompt_end
        self._leads_answers = lead.startswith(prompt_end)

    def with_end(self, prompt: str) -> str:
        """Return a rendered prompt with the processor's end."""
        return prompt + self._prompt_end

    def with_ended_prompt(self, text: str, spans: list[Span]) -> tuple[str, list[Span]]:
        """Return a rendered row with the processor's end of a prompt before its first answer, and the spans of all."""
        if not self._prompt_end or not spans:
            return text, spans
        (start, end), more = spans[0], len(self._prompt_end)
        if self._leads_answers and text.startswith(self._prompt_end, start):
            return text, [(start + more, end), *spans[1:]]
        return self.with_end(text[:start]) + text[start:], [(a + more, b + more) for a, b in spans]

    def of(self, text: str) -> list[Place]:
        """Return the places of media in a text that the template rendered."""
        return find_places(text, self._renderer.placeholders)

    def shown(self, text: str, media: Sequence[Media]) -> str:
        """Return a rendered text for people, with `[image /srv/images/7.png]` in place of every medium."""
        pieces, at = [], 0
        for place, item in zip(self.of(text), self._ordered(text, media), strict=True):
            pieces += [text[at : place.start], f"[{item.kind} {item.place}]"]
            at = place.end
        return "".join([*pieces, text[at:]])

    def _ordered(self, text: str, media: Sequence[Media]) -> list[Media]:
        """Return the media in the order in which the template shows them: it may put all of a kind first."""
        rest = list(media)
        return [
            rest.pop(next((n for n, item in enumerate(rest) if item.kind == place.kind), 0)) for place in self.of(text)
        ]

    def check(self, text: str, media: Sequence[Media], example: Example) -> tuple[Place, ...]:
        """Return the places of a row's media in its text. Raises DatasetError if they are not those of its media."""
        places, placeholders = self.of(text), self._renderer.placeholders
        for kind in dict.fromkeys(item.kind for item in media):
            if kind not in placeholders:
                raise DatasetError(
                    f"{where(example)}: the chat template has no placeholder for {_A_KIND[kind]}",
                    hint="the base model, or its template, does not support them",
                )
        given, shown = Counter(item.kind for item in media), Counter(place.kind for place in places)
        if given != shown:
            counted = " and ".join(f"{n} of kind {kind}" for kind, n in sorted(shown.items())) or "none"
            written = quote.aside(f" {', '.join(map(repr, placeholders.values()))}")
            raise DatasetError(
                f"{where(example)}: it has {sum(given.values())} images, videos and sounds, but the rendered text "
                f"has placeholders for {counted}: text that looks like a placeholder of the template{written} counts "
                "as one",
                hint="write such text differently",
            )
        return tuple(places)

    def expand(self, text: str, media: Sequence[Media]) -> Expanded:
        """Have the processor expand a rendered text. Raises DatasetError where there is none."""
        if self._expand is None:
            raise DatasetError(
                "the rows have images, videos or sounds, but the base model has no processor for them",
                hint="use a vision or audio model, with its processor's files",
            )
        return self._expand(text, media)

    def labels(self, expanded: Expanded, places: Sequence[Place]) -> Iterator[tuple[str, str]]:
        """Yield the text of every place, and the label that people see instead."""
        tokens = re.compile("|".join(map(re.escape, added_tokens(self._renderer.tokenizer))) or r"(?!)")
        seen: Counter[Kind] = Counter()
        for place in places:
            text = expanded.text[place.start : place.end]
            counted = Counter(tokens.findall(text)).most_common(1)
            num_tokens = counted[0][1] if counted else len(self._renderer.tokens.ids(text))
            grids = expanded.grids.get(place.kind, ())
            size = _grid(grids[seen[place.kind]], num_tokens) if seen[place.kind] < len(grids) else ""
            seen[place.kind] += 1
            yield text, f"[{place.kind} {size or num_tokens} tokens]"


def _grid(patches: Sequence[int], num_tokens: int) -> str:
    """Return frames, columns and rows of tokens, if patches are merged in squares; empty where that does not add up."""
    frames, rows, columns = patches
    side = isqrt(max(frames * rows * columns // max(num_tokens, 1), 1))
    if frames * rows * columns != num_tokens * side * side:
        return ""
    return "×".join(map(str, [*([frames] if frames > 1 else []), columns // side, rows // side]))
