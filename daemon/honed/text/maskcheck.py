"""Independent check of a mask: it uses only the row and the decoded tokens, not the way in which the mask was made."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from honed.inputs.message import words
from honed.inputs.row import Example
from honed.system import quote
from honed.system.error import MaskError
from honed.text.span import Span, from_letter, runs_of, squeeze
from honed.text.template import TEMPLATE_ERRORS, turn_marks, where

if TYPE_CHECKING:
    from honed.text.renderer import Renderer

IGNORED = -100  #: the label of a token that is not trained on

#: Characters, without white space, from which on another speaker's words in a trained text are no coincidence.
_MIN_FOREIGN = 12


def check(
    renderer: Renderer,
    ids: list[int],
    labels: list[int],
    example: Example,
    *,
    is_truncated: bool,
    placeholder_ids: Collection[int],
    end_ids: Collection[int],
) -> None:
    """Compare one row's labels with the words of its assistant, by decoding. Raises MaskError.

    `end_ids` are the tokens that may end what is trained, and `placeholder_ids` those that stand for media.
    """
    row = _Row(renderer, ids, labels, example, is_truncated)
    _check_tokens(row, frozenset(placeholder_ids), end_ids)
    runs = [(a, b) for a, b, is_trained in runs_of([label != IGNORED for label in labels]) if is_trained]
    match example.kind:
        case "messages":
            _Turns(row).check(runs)
        case "prompt_completion":
            _check_completion(row, runs)
        case "text":
            _check_whole(row)
            _check_space(row, row.example.text, row.whole)


@dataclass(frozen=True)
class _Row:
    """One row as the model takes it, with the text of its tokens as evidence."""

    renderer: Renderer
    ids: list[int]
    labels: list[int]
    example: Example
    is_truncated: bool

    def text(self, a: int, b: int) -> str:
        """Return the text of tokens [a, b), as it stands in the row's."""
        return self.renderer.tokens.decode(self.ids[:b])[len(self.renderer.tokens.decode(self.ids[:a])) :]

    @property
    def whole(self) -> str:
        """The row's text without the tokens that begin every text."""
        tokens = self.renderer.tokens
        n = len(tokens.bos_ids)
        return tokens.decode(self.ids[n:] if self.ids[:n] == tokens.bos_ids else self.ids)

    def said(self, run: Span, *, is_cut: bool) -> str:
        """Return the text of a run; of a truncated one, without the bytes of an incomplete character."""
        text = self.text(*run)
        return text.rstrip("\ufffd") if is_cut else text

    def error(self, what: str, at: int | None = None) -> MaskError:
        """Return an error that shows the row around token `at`, with the trained text between ⟦ and ⟧."""
        around = range(max(0, (at or 0) - 24), min(len(self.ids), len(self.labels), (at or 0) + 24))
        shown = ""
        for a, b, is_trained in runs_of([self.labels[n] != IGNORED for n in around]):
            text = self.renderer.tokens.decode(self.ids[around[0] + a : around[0] + b])
            shown += f"⟦{text}⟧" if is_trained else text
        return MaskError(
            f"{where(self.example)}: {what}{quote.aside(f'; trained between ⟦⟧: {shorten(shown, 600)!r}')}",
            hint="this would train something other than the data: `honectl preview FILE` shows the rendered rows; "
            f"{_MORE[self.example.kind == 'messages']}",
        )


def _check_tokens(row: _Row, forbidden: frozenset[int], end_ids: Collection[int]) -> None:
    tokenizer, trained = row.renderer.tokenizer, [n for n, label in enumerate(row.labels) if label != IGNORED]
    if len(row.ids) != len(row.labels):
        raise row.error(f"there are {len(row.ids)} tokens, but {len(row.labels)} labels")
    if not trained:
        raise row.error("nothing is trained on")
    if wrong := [n for n in trained if row.labels[n] != row.ids[n]]:
        raise row.error("the labels are not the row's tokens", wrong[0])
    forbidden |= placeholder_ids(tokenizer)
    said = str([words(m) for m in row.example.messages]) + row.example.completion + row.example.text
    pads_otherwise = tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in end_ids
    if pads_otherwise and tokenizer.pad_token not in said:
        forbidden |= {tokenizer.pad_token_id}
    if wrong := [n for n in trained if row.ids[n] in forbidden]:
        named = ", ".join(repr(row.renderer.tokens.decode([token])) for token in sorted({row.ids[n] for n in wrong}))
        raise row.error(f"a token that belongs to no turn is trained on{quote.aside(f': {named}')}", wrong[0])
    twice = [n for n in trained[1:] if row.ids[n] == row.ids[n - 1] == tokenizer.pad_token_id]
    if twice and tokenizer.pad_token not in said:
        raise row.error("padding is trained on", twice[0])


def _check_completion(row: _Row, runs: list[Span]) -> None:
    text, wanted = squeeze(row.said(runs[0], is_cut=row.is_truncated)), squeeze(row.example.completion)
    eos = squeeze(row.renderer.tokenizer.eos_token or "")
    is_whole = text in (wanted + eos, wanted)
    if len(runs) > 1 or not (is_whole or (row.is_truncated and (wanted + eos).startswith(text))):
        raise row.error("the trained text is not the completion", runs[0][0])
    if text == wanted and eos and not wanted.endswith(eos) and not row.is_truncated:
        raise row.error("the end token after the completion is not trained on", runs[0][1] - 1)
    _check_space(row, row.example.prompt + row.example.completion, row.whole, at=runs[0][0])


def _check_space(row: _Row, said: str, *shown: str, at: int | None = None) -> None:
    """Check that one of the decoded texts, which begin with the same letters, has the white space of what is said."""
    places = [row.renderer.tokens.lost_space(said, item) for item in shown]
    if places and all(place is not None for place in places):
        a, b = places[0] or (0, 0)
        lost = quote.aside(f" of {said[max(0, a - 16) : b + 16]!r}")
        raise row.error(f"the trained text has lost or changed the white space{lost}", at)


def _check_whole(row: _Row) -> None:
    tokenizer = row.renderer.tokenizer
    outside = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    for n, label in enumerate(row.labels):
        if label == IGNORED and row.ids[n] not in outside:
            raise row.error("a text row must be trained on in full, but a part of it is masked", n)


class _Turns:
    """Comparison of the trained runs of a conversation with the turns of its assistant."""

    def __init__(self, row: _Row) -> None:
        self._row = row
        self._renderer, self._probe = row.renderer, row.renderer.probe
        self._example, self._messages = row.example, row.example.messages

    def check(self, runs: list[Span]) -> None:
        awaited = self._example.trained_turns
        for n, run in enumerate(runs):
            if not awaited:
                raise self._row.error("more than the assistant's turns is trained on", run[0])
            is_cut = self._row.is_truncated and n == len(runs) - 1
            turns = self._match(run, awaited, is_cut=is_cut, is_alone=len(runs) - n >= len(awaited))
            awaited = awaited[len(turns) :]
            self._check_order(run, turns)
            for i in turns:
                self._check_space(run, i, is_cut=is_cut)
            self._check_edges(run, words(self._messages[turns[0]]), is_cut=is_cut)
            if not is_cut:
                self._check_end(run, turns[-1])
        if awaited and not self._row.is_truncated:
            raise self._row.error(f"message {awaited[0] + 1}, from the assistant, is not trained on")

    def _match(self, run: Span, awaited: list[int], *, is_cut: bool, is_alone: bool) -> list[int]:
        """Return the messages that one run of trained tokens holds, in order; at least one. Raises MaskError."""
        text, at, matched = squeeze(self._row.said(run, is_cut=is_cut)), 0, list[int]()
        ends = [squeeze(end) for end in self._probe.ends]
        rest, reached = "", 0
        for i in awaited[:1] if is_alone else awaited:
            message = self._messages[i]
            span = self._place(text, at, i, is_cut=is_cut)
            if span is None:
                break
            if matched and span[0] == span[1] and not any(end in text[at:] for end in ends):
                break  # an empty turn, and nothing is left of this run: the turn has its own
            if not matched or not _is_simple(message):
                self._check_front(text[at : span[0]], i, run)
            rest += text[at : span[0]]
            reached = span[1]
            at = reached + next((len(end) for end in ends if text.startswith(end, reached)), 0)
            matched.append(i)
        if not matched:
            said = shorten(words(self._messages[awaited[0]]))
            raise self._row.error(
                f"message {awaited[0] + 1}, from the assistant, is not trained on as in the data: its "
                f"text{quote.aside(f', {said!r},')} is not in the trained text",
                run[0],
            )
        self._check_back(text[reached:], matched[-1], run)
        self._check_foreign(rest + "\n" + text[reached:], run)
        return matched

    def _place(self, text: str, at: int, i: int, *, is_cut: bool) -> Span | None:
        """Return the span of message i's words in a run, or None; in a truncated run, a beginning of them is enough."""
        message = self._messages[i]
        content = squeeze(words(message))
        wanted = [content, squeeze(words(message).split("</think>")[-1])]
        names = [squeeze(call.get("function", call)["name"]) for call in message.get("tool_calls") or []]
        for word in wanted if content else names[:1] or [""]:
            if word in text[at:]:
                start = text.index(word, at)
                called = [text.find(name, start + len(word)) + len(name) for name in names if name in text[start:]]
                if len(called) == len(names) or is_cut or not content:
                    return start, max([start + len(word), *called])
        if content and names:
            by_name, by_words = _found(names[:1], text, at), _found(wanted, text, at)
            if by_name and by_words:  # the template writes the calls first
                return min(by_name[0], by_words[0]), max(by_name[1], by_words[1])
            # Many templates show a turn's words or its calls, not both.
            lost = self._renderer.left_out(self._example, i) if by_name or by_words else set()
            if alone := (by_words if "tool_calls" in lost else None) or (by_name if "answer" in lost else None):
                return alone
        if not is_cut:
            return None
        fronts = ["", *[squeeze(lead) for _, lead in self._probe.fronts]]
        bare = [text[at:].removeprefix(front) for front in fronts]
        if any(front.startswith(text[at:]) for front in fronts) or any(
            word.startswith(part) or part.startswith(word) for word in wanted for part in bare
        ):
            return at, len(text)
        return None if _is_simple(message) else (at, len(text))

    def _check_space(self, run: Span, i: int, *, is_cut: bool) -> None:
        """Check that message i's words have their white space in a run, wherever in it they may be."""
        whole = words(self._messages[i])
        for said in (whole, whole.split("</think>")[-1]):
            text, letters = self._row.said(run, is_cut=is_cut), squeeze(said)
            starts = [item.start() for item in re.finditer(re.escape(letters), squeeze(text))] if letters else []
            if starts:
                _check_space(self._row, said, *(from_letter(text, n) for n in starts), at=run[0])
                return

    def _check_front(self, front: str, i: int, run: Span) -> None:
        """Check the trained text before a message's words: only the template's marks of a turn, nothing earlier."""
        probe = self._probe
        if not front or front in {squeeze(lead) for _, lead in probe.fronts}:
            return
        message = self._messages[i]
        openings = {squeeze(opening) for opening, _ in probe.fronts} | {squeeze(probe.header)}
        asked = squeeze(words(self._messages[i - 1]) if i else "")
        # After the reasoning, a template may open the answer as it opens a turn.
        if any(opening and opening in front.partition(_reasoning(message) or "\n")[0] for opening in openings):
            raise self._row.error("the header of a turn is trained on", run[0])
        if asked and _is_simple(self._messages[i]) and asked.endswith(front):
            raise self._row.error(
                f"the end of message {i}, from the {self._messages[i - 1]['role']}, is trained on", run[0]
            )

    def _check_back(self, back: str, i: int, run: Span) -> None:
        """Check the trained text after a message's words: its end, once, and nothing after it."""
        said = squeeze("".join(words(m) for m in self._messages if m["role"] == "assistant"))
        ends = [squeeze(end) for end in self._probe.ends if squeeze(end) not in said]
        if not back or back in self._probe.backs or back in ends:
            return
        if self._messages[i].get("tool_calls") and self._rendered_to(i).endswith(back):
            return  # one of several calls ends as the last does
        if any(back.find(end) not in (-1, len(back) - len(end)) for end in ends if end):
            raise self._row.error(f"more than message {i + 1} and its end token is trained on", run[1] - 1)

    def _check_foreign(self, rest: str, run: Span) -> None:
        """Check that the trained text holds nobody else's words beside the assistant's."""
        probe = self._probe
        trained = self._example.trained_turns
        own = squeeze(str([self._messages[i] for i in trained]))
        own += "".join(map(squeeze, [*probe.ends, *probe.backs, *(part for front in probe.fronts for part in front)]))
        for i, message in enumerate(self._messages):
            foreign = squeeze(words(message))
            if i not in trained and len(foreign) >= _MIN_FOREIGN and foreign in rest and foreign not in own:
                raise self._row.error(f"message {i + 1}, from the {message['role']}, is trained on", run[0])

    def _check_order(self, run: Span, turns: list[int]) -> None:
        """Check that the run is not an untrained turn with the same words as a trained one.

        Turns with the same words that precede the trained one must lie before the run, and those that follow it, after.
        """
        for i in turns:
            text = squeeze(words(self._messages[i]))
            same = [
                k
                for k, m in enumerate(self._messages)
                if m["role"] == "assistant" and k not in turns and _is_simple(m) and text and text == squeeze(words(m))
            ]
            if not any(k in self._example.untrained for k in same):
                continue
            before, after = squeeze(self._row.text(0, run[0])), squeeze(self._row.text(run[1], len(self._row.ids)))
            num_before, num_after = sum(k < i for k in same), sum(k > i for k in same)
            if before.count(text) < num_before or (not self._row.is_truncated and after.count(text) < num_after):
                raise self._row.error(f"a turn of weight 0 with the same text as message {i + 1} is trained on", run[0])

    def _check_edges(self, run: Span, content: str, *, is_cut: bool) -> None:
        """Check the run's two ends: the header before it untrained, its own front and its end token trained."""
        before, text, after = (
            self._row.text(0, run[0]),
            self._row.text(*run),
            self._row.text(run[1], len(self._row.ids)),
        )
        first, last = self._row.text(run[0], run[0] + 1), self._row.text(run[1] - 1, run[1])
        ends = self._probe.ends
        for form in (str, _despace):
            openings = [form(opening) for opening, _ in self._probe.fronts if opening]
            is_opened = any(form(before).endswith(opening) for opening in openings)
            for opening, lead in [(form(o), form(lead)) for o, lead in self._probe.fronts]:
                over = _overlap(form(before), form(text), opening)
                if over == len(opening) and not (opening.isspace() and not form(content).startswith(opening)):
                    over = 0  # words that read like a header, or one that `_check_front` has seen
                if over and not is_opened and not (opening[-over:].isspace() and len(form(first)) > over):
                    raise self._row.error(
                        f"{quote.mark(repr(opening[-over:]))}, from the header of the turn, is trained on", run[0]
                    )
                is_late = opening and lead and form(before).endswith(opening + lead)
                late = 0 if is_late else _overlap(form(before), form(text), opening + lead)
                if is_late or (opening and 0 < late < len(lead)):
                    front = quote.mark(repr(lead[: len(lead) - late]))
                    raise self._row.error(f"the start of the turn, {front}, is not trained on", run[0])
        ended = [end for end in ends if squeeze(text).endswith(squeeze(end))]
        if ended and not last.strip():
            raise self._row.error("text after the end token is trained on", run[1] - 1)
        if not ended and not is_cut and any(_overlap(squeeze(text), squeeze(after), squeeze(end)) for end in ends):
            raise self._row.error("the end token of the turn is not trained on", run[1] - 1)

    def _check_end(self, run: Span, i: int) -> None:
        """Check that the end of message i's turn is trained: without it the model would not learn to stop."""
        text, after = self._row.text(*run).rstrip(), self._row.text(run[1], len(self._row.ids)).lstrip()
        ends, messages = [squeeze(end) for end in self._probe.ends], self._messages
        if any(squeeze(text).endswith(end) for end in ends):
            return
        following = messages[i + 1] if i + 1 < len(messages) else None
        calls = bool(messages[i].get("tool_calls"))
        missing = self._probe.unwritten_call if calls else self._probe.unwritten
        # Where no mark is a token, a call's end looks like its arguments' end, and is trained with it.
        if following is None and (missing or (ends and (after or not calls))):
            raise self._row.error(
                "the row ends without the end token of a turn, so the model would not learn to stop", run[1]
            )
        if following is not None and following["role"] == "assistant":
            return
        # By the row alone: the turn rendered without what follows it, and the mark with which that begins.
        rendered = self._rendered_to(i)
        whole, reached = squeeze(self._row.text(0, len(self._row.ids))), len(squeeze(self._row.text(0, run[1])))
        if rendered.startswith(whole[:reached]) and whole.startswith(rendered) and len(rendered) > reached:
            end = quote.mark(repr(whole[reached : len(rendered)]))
            raise self._row.error(f"the end of message {i + 1}, {end}, is not trained on", run[1])
        marks = [mark for mark in turn_marks(self._renderer.tokenizer) if squeeze(after).startswith(squeeze(mark))]
        if marks and not any(text.endswith(mark) for mark in turn_marks(self._renderer.tokenizer)):
            end = quote.mark(repr(marks[0]))
            raise self._row.error(f"the end of message {i + 1}, {end}, is not trained on", run[1])

    def _rendered_to(self, i: int) -> str:
        """Return the conversation up to message i, rendered alone and without white space; empty if it is refused."""
        try:
            return squeeze(self._renderer.render(self._messages[: i + 1], self._example.tools))
        except TEMPLATE_ERRORS:
            return ""


#: Advice for rows that a chat template renders, and for others.
_MORE = {
    True: "use another template with `chat_template:`, or prompt/completion rows, which need none; report it with the "
    "template",
    False: "check the versions with `honectl doctor`, and report it with the row",
}


def placeholder_ids(*sources: Any) -> frozenset[int]:
    """Return the tokens of images, video and audio, and of their beginnings and ends, as far as the sources name them.

    A source is a tokenizer, a processor, or a model's config as a dict.
    """
    ids: set[int] = set()
    for source in sources:
        named = source if isinstance(source, Mapping) else _named_ids(source)
        ids |= {token for name, token in named.items() if _PLACEHOLDER.search(name) and type(token) is int}
    return frozenset(token for token in ids if token >= 0)


#: `image_token_id`, `vision_start_token_id`, `boi_token_id`, `audio_token_index`, `vision_eos_token_id`, …
_PLACEHOLDER = re.compile(r"(image|video|vision|audio|\bboi|\beoi).*token_(id|index)$")


def _named_ids(source: Any) -> dict[str, Any]:
    """Return an object's values under such names; some of a tokenizer's exist only when the attribute is read."""
    kinds = (
        "image",
        "video",
        "audio",
        "vision_start",
        "vision_end",
        "vision_bos",
        "vision_eos",
        "audio_bos",
        "audio_eos",
        "boi",
        "eoi",
    )
    return {**vars(source)} | {name: getattr(source, name, None) for name in (f"{kind}_token_id" for kind in kinds)}


def _is_simple(message: Mapping[str, Any]) -> bool:
    """Return True if a message is only its content, without reasoning or calls around it."""
    has_more = any(message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking"))
    return not has_more and "</think>" not in words(message)


def _reasoning(message: Mapping[str, Any]) -> str:
    named = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), "")
    inside, _, answer = words(message).rpartition("</think>")
    return squeeze(str(named) or (inside.removeprefix("<think>") if answer != words(message) else ""))


def _found(wanted: list[str], text: str, at: int) -> Span | None:
    """Return the span of the first of the wanted words that the text has from `at` on."""
    places = ((text.find(word, at), len(word)) for word in wanted)
    return next(((start, start + length) for start, length in places if start >= 0), None)


def _overlap(before: str, after: str, text: str) -> int:
    """Return how many of `text`'s last characters lie in `after`, if `text` lies across the two; else 0."""
    return next((n for n in range(1, len(text) + 1) if after.startswith(text[-n:]) and before.endswith(text[:-n])), 0)


def _despace(text: str) -> str:
    return text.replace(" ", "").replace("▁", "")


def shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length // 2] + " … " + text[-length // 2 :]
