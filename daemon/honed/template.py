"""What a chat template does: learned by rendering marks, and used to find a conversation's turns in its rendering."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from honed.error import DatasetError
from honed.expansion import added_text
from honed.row import Example, words
from honed.span import Span, after, common, squeeze

if TYPE_CHECKING:
    from honed.chat import ChatFormat
    from honed.media import Kind

#: What stands in for a message while it is looked for: they differ in their first letter and in their last, so that
#: a message's own text can run on with one of them by chance, not with both.
_MARKS = ("Qx7markKz0v", "Wj3signBn8u")
_USER_MARK = "Uy5askedDf2t"

#: What a template may raise on a conversation that it does not take.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Probe:
    """What a template does around a turn, learned from a conversation of marks."""

    ends: tuple[str, ...]  #: what ends a turn; empty where nothing does
    header: str  #: what opens a turn after the generation prompt's part of the user's tail; may be empty
    ignores_prompt: bool  #: add_generation_prompt changes nothing, and `header` was learned from a whole turn
    fronts: tuple[
        tuple[str, str], ...
    ]  #: (between the user's text and the turn, between there and the assistant's text)
    trail: str  #: what follows the end of the last turn
    backs: tuple[str, ...]  #: between the assistant's text and the end of its turn, white space left out
    prompt_extra: str  #: what the generation prompt adds that a rendered turn does not begin with


class Conversation:
    """One rendered conversation, and where its turns lie in it."""

    def __init__(self, chat: ChatFormat, example: Example) -> None:
        self._chat, self._example, self._probe = chat, example, chat.probe
        self._messages, self._tools = example.messages, example.tools
        first = example.num_prompt_messages
        self.trained_indices = [i for i, m in enumerate(self._messages) if m["role"] == "assistant" and i >= first]
        if not self.trained_indices:
            raise self._error("no turn of the assistant to train on")
        if shown := [i for i in self.trained_indices if num_media([self._messages[i]])]:
            raise self._error(
                f"message {shown[0] + 1}, the assistant's, holds more than words, which cannot be trained"
            )
        try:
            self.text = chat.render(self._messages, self._tools)
        except TEMPLATE_ERRORS as error:
            raise self._error(f"the chat template refuses the conversation: {error}") from error
        self._regions: dict[int, Span | None] = {}

    def spans(self) -> list[Span]:
        """The characters of each trained turn, in order, apart from each other."""
        spans = [self._begun(i) or self._searched(i) for i in self.trained_indices]
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise self._error("the chat template does not keep the assistant's turns apart")
        return spans

    def asked(self, i: int) -> str:
        """What the model sees when it is to write message i."""
        try:
            text = self._chat.render(self._messages[:i], self._tools, prompt=True)
        except TEMPLATE_ERRORS as error:
            raise self._error(f"the chat template refuses the conversation before message {i + 1}: {error}") from error
        return text + self._probe.header if self._probe.ignores_prompt else text

    def _begun(self, i: int) -> Span | None:
        """Turn i where shorter renderings begin the whole one; None where they do not."""
        try:
            asked = self._chat.render(self._messages[:i], self._tools, prompt=True)
            is_last = i == len(self._messages) - 1
            told = self.text if is_last else self._chat.render(self._messages[: i + 1], self._tools)
        except TEMPLATE_ERRORS:
            return None
        told = told.removesuffix(self._probe.trail)
        start = len(asked)
        if self._probe.header.strip() and self.text.startswith(self._probe.header, start):
            start += len(self._probe.header)
        end = max((told.rfind(end, start) + len(end) for end in self._probe.ends if end in told[start:]), default=0)
        if not end or not self.text.startswith(asked) or not (is_last or self.text.startswith(told[:end])):
            return None
        return (start, end) if _shows(self.text[start:end], self._messages[i]) else None

    def _searched(self, i: int) -> Span:
        """Turn i, found by what changes in the whole rendering when a message does."""
        region = self._region(i)
        if region is None or (region[0] == region[1] and _has_words(self._messages[i])):
            raise self._error(f"the chat template does not show message {i + 1}, which is the assistant's")
        start, end = self._start(i, region[0]), region[1]
        others = [self._region(k) for k in range(i + 1, len(self._messages))]
        limit = min((other[0] for other in others if other and other[0] >= end), default=len(self.text))
        stops = [(self.text.find(mark, end, limit), len(mark)) for mark in self._probe.ends]
        at, length = min((stop for stop in stops if stop[0] >= 0), default=(end, 0))
        return start, at + length

    def _start(self, i: int, content_start: int) -> int:
        """Where turn i starts: after what the generation prompt has in common with the rendering, there."""
        base, tail, shared = 0, "", 0
        if i and (before := self._region(i - 1)) and before[1] <= content_start:
            base, tail = before[1], self._tail_after(i - 1)
            shared = common(tail, self.text[base:content_start])
        if tail and shared == len(tail):
            return base + shared
        # What only a part of the prompt has in common may be chance: a header learned before goes first.
        for header in _headers(self._probe):
            at = self.text.rfind(header, base, content_start)
            if at >= 0:
                return at + len(header)
        if not tail and not self._probe.header.strip():  # nothing opens a turn, so it begins with what leads its words
            leads = [lead for _, lead in self._probe.fronts if self.text[:content_start].endswith(lead)]
            return content_start - max(map(len, leads), default=0)
        if not tail:
            raise self._error(f"the beginning of message {i + 1}, the assistant's, cannot be found in the rendering")
        return base + shared

    def _tail_after(self, k: int) -> str:
        """What follows message k's words where the assistant is asked to go on; empty where that is refused."""
        told = self._try([*self._messages[:k], *_marked(self._messages[k], _MARKS[0])], prompt=True)
        if not told or _MARKS[0] not in told:
            return ""
        return after(told, _MARKS[0]) + (self._probe.header if self._probe.ignores_prompt else "")

    def _region(self, k: int) -> Span | None:
        """Where message k's own words lie in the rendering; None where the template does not show them."""
        if k not in self._regions:
            self._regions[k] = self._find(k)
        return self._regions[k]

    def _find(self, k: int) -> Span | None:
        head, tail = len(self.text), len(self.text)
        for mark in _MARKS:
            changed = self._try([*self._messages[:k], *_marked(self._messages[k], mark), *self._messages[k + 1 :]])
            if not changed or mark not in changed:
                return None
            head = min(head, common(changed, self.text))
            tail = min(tail, common(changed[::-1], self.text[::-1]))
        return head, max(head, len(self.text) - tail)

    def _try(self, messages: list[Any], *, prompt: bool = False) -> str | None:
        try:
            return self._chat.render(messages, self._tools, prompt=prompt)
        except TEMPLATE_ERRORS:
            return None

    def _error(self, what: str) -> DatasetError:
        return DatasetError(f"{where(self._example)}: {what}", hint="`honectl preview` shows how rows are rendered")


def num_media(messages: Iterable[Mapping[str, Any]]) -> int:
    """How many images, videos and sounds the messages hold."""
    contents = [message.get("content") for message in messages]
    return sum(part["type"] != "text" for content in contents if isinstance(content, list) for part in content)


def where(example: Example) -> str:
    return f"data set {example.dataset_index + 1}, row {example.row_index + 1}"


# --- media -----------------------------------------------------------------------------------------------------------

_MEDIA_KINDS: tuple[Kind, ...] = ("image", "video", "audio")


def learn_placeholders(chat: ChatFormat) -> dict[Kind, str]:
    """What a template writes where an image, a video or a sound belongs; a kind that it does not know is left out."""
    found: dict[Kind, str] = {}
    for kind in _MEDIA_KINDS:
        parts = [{"type": "text", "text": _USER_MARK}, {"type": kind}, {"type": "text", "text": _MARKS[1]}]
        answer = {"role": "assistant", "content": _MARKS[0]}
        try:
            seen = chat.render([{"role": "user", "content": parts}, answer])
            unseen = chat.render([{"role": "user", "content": [parts[0], parts[2]]}, answer])
        except TEMPLATE_ERRORS:
            continue
        if text := added_text(seen, unseen, added_tokens(chat.tokenizer)):
            found[kind] = text
    return found


# --- learning a template ---------------------------------------------------------------------------------------------


def learn(chat: ChatFormat) -> Probe:
    """Render a question and an answer of marks, and see what comes around them."""
    mark, user = _MARKS[0], {"role": "user", "content": _USER_MARK}
    answer = {"role": "assistant", "content": mark}
    whole = chat.render([user, answer])
    if mark not in whole or _USER_MARK not in whole:
        raise ValueError("it leaves out what the user or the assistant says")
    told = after(chat.render([user]), _USER_MARK)
    asked = after(chat.render([user], prompt=True), _USER_MARK)
    between = after(whole, _USER_MARK).split(mark)[0]
    ignores_prompt = told == asked
    if ignores_prompt and between.startswith(asked) and between[len(asked) :].strip():
        # A space that leads the answer is part of it: that is how it is tokenized.
        asked = asked + between[len(asked) :].rstrip(" ")
    fronts = [_front(asked, between)]
    try:
        middle = chat.render([user, answer, {"role": "user", "content": _MARKS[1]}])
    except TEMPLATE_ERRORS:
        middle = ""
    if mark in middle:
        fronts.append(_front(asked, after(middle, _USER_MARK).split(mark)[0]))
    front = fronts[0][0]
    header = front[common(front, told) :]
    ends = _learn_ends(chat, whole, middle, told)
    tails = [squeeze(after(whole, mark)), squeeze(after(middle, mark)) if mark in middle else ""]
    tail = after(whole, mark)
    return Probe(
        ends=ends,
        trail=tail[tail.find(ends[0]) + len(ends[0]) :] if ends else "",
        backs=tuple({tail[: tail.find(end) + len(end)] for tail in tails for end in map(squeeze, ends) if end in tail}),
        header=header,
        ignores_prompt=ignores_prompt and bool(header),
        fronts=tuple(dict.fromkeys(fronts)),
        prompt_extra=asked[len(front) :],
    )


def _front(asked: str, between: str) -> tuple[str, str]:
    n = common(asked, between)
    return between[:n], between[n:]


def _learn_ends(chat: ChatFormat, whole: str, middle: str, told: str) -> tuple[str, ...]:
    """What ends a turn: the last one, one in the middle, and a call of a tool, which templates may tell apart."""
    added = added_tokens(chat.tokenizer)
    tail = after(whole, _MARKS[0])
    first = _first_of(added, tail) or tail.strip()
    if not first:
        return ()
    eos = chat.tokenizer.eos_token or ""
    if tail.partition(first)[2].startswith(eos):  # a turn of several parts ends in two tokens, the second of them eos
        first += eos
    ends = [first]
    if middle and first not in (inner := after(middle, _MARKS[0]).split(_MARKS[1])[0]):
        other = _first_of(added, inner)
        if other and other == _first_of(added, told):  # ends the user's turn too, so it is not a header
            ends.append(other)
    call = {"type": "function", "id": "call00001", "function": {"name": _MARKS[0], "arguments": {"a": _MARKS[0]}}}
    try:
        called = chat.render(
            [{"role": "user", "content": _USER_MARK}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )
    except TEMPLATE_ERRORS:
        return tuple(ends)
    tail = after(called, _MARKS[0]) if _MARKS[0] in called else first
    if not any(end in tail for end in ends) and (last := _first_of(added, tail)):
        ends.append(last)
    return tuple(ends)


def added_tokens(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)


def _first_of(tokens: Iterable[str], text: str) -> str:
    found = [(text.find(token), -len(token), token) for token in tokens if token.strip() and token in text]
    return min(found)[2] if found else ""


def _headers(probe: Probe) -> list[str]:
    """What opens a turn, the longest first: as in the last turn, and as in one before it."""
    shared = len(probe.fronts[0][0]) - len(probe.header)
    found = {probe.header, *[front[shared:] for front, _ in probe.fronts]}
    return sorted((header for header in found if header.strip()), key=len, reverse=True)


def as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _marked(message: Mapping[str, Any], mark: str) -> list[dict[str, Any]]:
    """The message with its words, and the calls that it makes, exchanged for a mark."""
    marked = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") or not calls:
        marked["content"] = _marked_content(message.get("content"), mark)
    if calls:
        marked["tool_calls"] = [_marked_call(call, mark) for call in calls]
    return [marked]


def _marked_content(content: Any, mark: str) -> Any:
    """The mark in the place of the last of a content's texts, and no other text; pictures and sounds stay."""
    if not isinstance(content, list):
        return mark
    texts = [n for n, part in enumerate(content) if part["type"] == "text"]
    if not texts:
        return [*content, {"type": "text", "text": mark}]
    kept = [part for part in content[: texts[-1]] if part["type"] != "text"]
    return [*kept, {"type": "text", "text": mark}, *content[texts[-1] + 1 :]]


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = dict.fromkeys(function.get("arguments") or {}, mark) or {mark: mark}
    changed = {**function, "name": mark, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _shows(turn: str, message: Mapping[str, Any]) -> bool:
    """Whether a rendered turn holds the message's words, as they are."""
    content = message.get("content") or ""
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    calls = message.get("tool_calls") or []
    is_said = all(text.strip() in turn for text in texts)
    return is_said and all(call.get("function", call)["name"] in turn for call in calls)


def _has_words(message: Mapping[str, Any]) -> bool:
    return bool(words(message).strip() or message.get("tool_calls"))
