"""Behaviour of a chat template, learned by rendering marks and used to find a conversation's turns in its rendering."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from jinja2.exceptions import TemplateError

from honed.inputs.message import Arguments, words
from honed.inputs.row import Example
from honed.system.error import DatasetError, said
from honed.text.expansion import added_text
from honed.text.omission import REASONING_KEYS
from honed.text.span import Span, after, common, squeeze

if TYPE_CHECKING:
    from honed.spec.media import Kind

#: Stand-ins for a message that is searched for. They differ in their first and in their last letter: a message's own
#: text can match one of them there by chance, but not both.
_MARKS = ("Qx7markKz0v", "Wj3signBn8u")
_USER_MARK = "Uy5askedDf2t"

#: Exceptions that a template may raise on a conversation that it does not take.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Probe:
    """A template's text around a turn, learned from a conversation of marks."""

    ends: tuple[str, ...]  #: texts that end a turn; empty where nothing does
    header: str  #: text that opens a turn, after the text that ends the user's; may be empty
    ignores_prompt: bool  #: add_generation_prompt changes nothing, and `header` was learned from a whole turn
    fronts: tuple[tuple[str, str], ...]  #: (from the user's text to the turn, from there to the assistant's text)
    trail: str  #: text after the end of the last turn
    backs: tuple[str, ...]  #: from the assistant's text to the end of its turn, without white space
    prompt_extra: str  #: part of the generation prompt that a rendered turn does not begin with
    unwritten: str = ""  #: end of a turn, where the template writes it only before the next one
    unwritten_call: str = ""  #: the same for a turn that calls tools
    inner: tuple[str, ...] = ()  #: those of `ends` that also stand inside a turn: behind its reasoning
    between_calls: tuple[str, ...] = ()  #: those of `ends` that also stand between two calls of a turn
    is_open_inside: bool = False  #: only a last turn has an end: one in the middle is followed by other text

    def close(self, text: str, message: Mapping[str, Any]) -> str:
        """Return a rendering that ends in the assistant's turn, with that turn's end if the template leaves it out."""
        missing = self._missing(message)
        return text if not missing or text.rstrip().endswith(self.ends) else text + missing

    def opened(self, text: str, message: Mapping[str, Any]) -> str:
        """Return the rendering without the end that `close` adds."""
        return text.removesuffix(self._missing(message))

    def _missing(self, message: Mapping[str, Any]) -> str:
        return self.unwritten_call if message.get("tool_calls") else self.unwritten


@dataclass(frozen=True)
class CallForm:
    """The form in which a template takes a tool call."""

    has_json: bool = False  #: arguments as JSON text, not as an object
    empty: str | None = ""  #: the content of a turn that only calls

    def of(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in this form."""
        if not message.get("tool_calls") or self == CallForm():
            return message
        calls = [_with_json(call) for call in message["tool_calls"]] if self.has_json else message["tool_calls"]
        return {**message, "content": message.get("content") or self.empty, "tool_calls": calls}


#: Forms that are tried, in order. DeepSeek-V3's template concatenates arguments as text, and R1's shows a call only
#: where there is no content at all.
CALL_FORMS = tuple(CallForm(has_json, empty) for has_json in (False, True) for empty in ("", None))


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    written = arguments.written if isinstance(arguments, Arguments) else json.dumps(arguments, ensure_ascii=False)
    changed = {**function, "arguments": written}
    return {**call, "function": changed} if "function" in call else changed


class ChatTemplate(Protocol):
    """A chat template with its arguments (renderer.py)."""

    template: Any
    tokenizer: Any

    @property
    def probe(self) -> Probe:
        """What was learned of it."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """Return its text, with the last turn's end if it lacks that. Raises one of `TEMPLATE_ERRORS`."""


class Conversation:
    """One rendered conversation, and the places of its turns."""

    def __init__(self, renderer: ChatTemplate, example: Example) -> None:
        self._renderer, self._example, self._probe = renderer, example, renderer.probe
        self._messages, self._tools = example.messages, example.tools
        self.trained_indices = example.trained_turns
        if not self.trained_indices:
            why = ": all of them have weight 0" if example.untrained else ""
            raise self._error(f"no assistant turn to train on{why}")
        if shown := [i for i in self.trained_indices if num_media([self._messages[i]])]:
            raise self._error(
                f"message {shown[0] + 1}, from the assistant, contains more than text, which cannot be trained"
            )
        try:
            self.text = renderer.render(self._messages, self._tools)
        except TEMPLATE_ERRORS as error:
            raise self._error(f"the chat template rejects the conversation: {said(error)}") from error
        self._regions: dict[int, Span | None] = {}
        self._begun_indices: set[int] = set()

    @property
    def template(self) -> Any:
        return self._renderer.template

    def is_begun(self, i: int) -> bool:
        """Return True if `spans` found turn i right after the prompt that asks for it."""
        return i in self._begun_indices

    def spans(self) -> list[Span]:
        """Return the span of every trained turn in characters, in order and without overlap. Raises DatasetError."""
        spans = [self._begun(i) or self._searched(i) for i in self.trained_indices]
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise self._error("the chat template does not separate the assistant's turns")
        return spans

    def asked(self, i: int) -> str:
        """Return the text that the model sees when it is to write message i."""
        try:
            text = self._renderer.render(self._messages[:i], self._tools, prompt=True)
        except TEMPLATE_ERRORS as error:
            raise self._error(
                f"the chat template rejects the conversation before message {i + 1}: {said(error)}"
            ) from error
        return text + self._probe.header if self._probe.ignores_prompt else text

    def shown(self, i: int) -> str:
        """Return the part of the rendering that is message i's own words; empty where that cannot be found."""
        region = self._region(i)
        return self.text[slice(*region)] if region is not None else ""

    def _begun(self, i: int) -> Span | None:
        """Return the span of turn i if the shorter renderings are prefixes of the whole one, else None."""
        try:
            asked = self._renderer.render(self._messages[:i], self._tools, prompt=True)
            is_last = i == len(self._messages) - 1
            rendered = self.text if is_last else self._renderer.render(self._messages[: i + 1], self._tools)
        except TEMPLATE_ERRORS:
            return None
        rendered = rendered.removesuffix(self._probe.trail)
        start = len(asked)
        has_header = bool(self._probe.header.strip()) and self.text.startswith(self._probe.header, start)
        start += len(self._probe.header) if has_header else 0
        ends = [end for end in self._probe.ends if end in rendered[start:]]
        end = max((rendered.rfind(end, start) + len(end) for end in ends), default=0)
        if not end or not self.text.startswith(asked) or not (is_last or self.text.startswith(rendered[:end])):
            return None
        if not _shows(self.text[start:end], self._messages[i]):
            return None
        if not has_header or self._probe.ignores_prompt:
            self._begun_indices.add(i)
        return start, end

    def _searched(self, i: int) -> Span:
        """Return the span of turn i, found by the changes in the whole rendering when a message is replaced."""
        region = self._region(i)
        if region is None or (region[0] == region[1] and _is_exchanged(self._messages[i])):
            raise self._error(f"the chat template does not show message {i + 1}, which is from the assistant")
        self._check_whole(i, region)
        rendered = self._rendered_to(i)
        end = min(region[1], len(rendered)) if region[0] < len(rendered) else region[1]
        others = [self._region(k) for k in range(i + 1, len(self._messages))]
        limit = min((other[0] for other in others if other and other[0] >= end), default=len(self.text))
        own = rendered[end:] if end <= len(rendered) else self._own_tail(i)
        return self._start(i, region[0]), self._end(i, own, end, limit)

    def _end(self, i: int, own: str, end: int, limit: int) -> int:
        """Return the end of turn i, after the text that ends it.

        The turn's words end at `end`, and `own` follows them if the turn is the last. The words of another turn begin
        at `limit`.
        """
        closed = own[: common(own, self.text[end:])]
        if closings := [end + closed.rfind(mark) + len(mark) for mark in self._probe.ends if mark in closed]:
            return max(closings)
        stops = [(self.text.find(mark, end, limit), len(mark)) for mark in self._probe.ends]
        if nearest := min((stop for stop in stops if stop[0] >= 0), default=None):
            return sum(nearest)
        own = self._probe.opened(own, self._messages[i])
        end += len(own[: common(own, self.text[end:])].rstrip())
        if i + 1 == len(self._messages) or self._messages[i + 1]["role"] == "assistant":
            return end
        # The next turn's mark ends it, whichever it is.
        return end + len(_opening(turn_marks(self._renderer.tokenizer), self.text[end:limit]))

    def _rendered_to(self, i: int) -> str:
        """Return the conversation up to message i if the whole one begins with it, else an empty string."""
        rendered = self._try([*self._messages[: i + 1]]) or ""
        if self.text.startswith(rendered):
            return rendered
        rendered = self._probe.opened(rendered, self._messages[i])
        shared = common(rendered, self.text)
        return rendered[:shared] if shared >= len(rendered.rstrip()) else ""

    def _own_tail(self, i: int) -> str:
        """Return the text after message i's words if it is the last message; empty where the template refuses that."""
        rendered = self._try([*self._messages[:i], *_marked(self._messages[i], _MARKS[0])])
        return after(rendered, _MARKS[0]) if rendered and _MARKS[0] in rendered else ""

    def _start(self, i: int, content_start: int) -> int:
        """Return the start of turn i: after the part that the generation prompt and the rendering share there."""
        base, tail, shared = 0, "", 0
        if i and (before := self._region(i - 1)) and before[1] <= content_start:
            base, tail = before[1], self._tail_after(i - 1)
            shared = common(tail, self.text[base:content_start])
        if tail and shared == len(tail):
            return base + shared
        # A match of only a part of the prompt may be chance: a header learned before has priority.
        for header in _headers(self._probe):
            at = self.text.rfind(header, base, content_start)
            if at >= 0:
                return at + len(header)
        if not tail and not self._probe.header.strip():  # nothing opens a turn, so it begins with what leads its words
            leads = [lead for _, lead in self._probe.fronts if self.text[:content_start].endswith(lead)]
            return content_start - max(map(len, leads), default=0)
        if not tail:
            raise self._error(f"the beginning of message {i + 1}, from the assistant, is not in the rendered text")
        return base + shared

    def _tail_after(self, k: int) -> str:
        """Return the text after message k's words when the assistant is asked to continue; empty if it is refused."""
        rendered = self._try([*self._messages[:k], *_marked(self._messages[k], _MARKS[0])], prompt=True)
        if not rendered or _MARKS[0] not in rendered:
            return ""
        return after(rendered, _MARKS[0]) + (self._probe.header if self._probe.ignores_prompt else "")

    def _region(self, k: int) -> Span | None:
        """Return the span of message k's own words in the rendering; None where the template does not show them."""
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

    def _check_whole(self, i: int, region: Span) -> None:
        """Raise DatasetError where others speak in the middle of message i.

        Gemma 4 shows a turn's calls, the tools' answers, and only then the turn's words.
        """
        for k in range(i + 1, len(self._messages)):
            other = self._region(k)
            if other and region[0] < other[0] and other[0] < other[1] < region[1]:
                raise self._error(
                    f"the chat template writes message {k + 1}, from the {self._messages[k]['role']}, into the "
                    f"middle of message {i + 1}, which has both text and calls: put each in its own turn"
                )

    def _try(self, messages: list[Any], *, prompt: bool = False) -> str | None:
        try:
            return self._renderer.render(messages, self._tools, prompt=prompt)
        except TEMPLATE_ERRORS:
            return None

    def _error(self, what: str) -> DatasetError:
        return DatasetError(f"{where(self._example)}: {what}", hint="`honectl preview` shows the rendered rows")


def num_media(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of images, videos and sounds in the messages."""
    contents = [message.get("content") for message in messages]
    return sum(part["type"] != "text" for content in contents if isinstance(content, list) for part in content)


def where(example: Example) -> str:
    return f"data set {example.dataset_index + 1}, row {example.row_index + 1}"


# --- media -----------------------------------------------------------------------------------------------------------

_MEDIA_KINDS: tuple[Kind, ...] = ("image", "video", "audio")


def learn_placeholders(renderer: ChatTemplate) -> dict[Kind, str]:
    """Return the text that a template writes for an image, a video or a sound, for the kinds that it knows."""
    placeholders: dict[Kind, str] = {}
    for kind in _MEDIA_KINDS:
        parts = [{"type": "text", "text": _USER_MARK}, {"type": kind}, {"type": "text", "text": _MARKS[1]}]
        answer = {"role": "assistant", "content": _MARKS[0]}
        try:
            seen = renderer.render([{"role": "user", "content": parts}, answer])
            unseen = renderer.render([{"role": "user", "content": [parts[0], parts[2]]}, answer])
        except TEMPLATE_ERRORS:
            continue
        if text := added_text(seen, unseen, added_tokens(renderer.tokenizer)):
            placeholders[kind] = text
    return placeholders


# --- learning a template ---------------------------------------------------------------------------------------------


def learn(renderer: ChatTemplate) -> Probe:
    """Render a question and an answer of marks, and learn the text around them."""
    mark, user = _MARKS[0], {"role": "user", "content": _USER_MARK}
    answer = {"role": "assistant", "content": mark}
    whole = renderer.render([user, answer])
    if mark not in whole or _USER_MARK not in whole:
        raise ValueError("it leaves out text of the user or the assistant")
    closed = after(renderer.render([user]), _USER_MARK)
    asked = after(renderer.render([user], prompt=True), _USER_MARK)
    between = after(whole, _USER_MARK).split(mark)[0]
    ignores_prompt = closed == asked
    if ignores_prompt and between.startswith(asked) and between[len(asked) :].strip():
        # A space before the answer is part of the answer: it is tokenized so.
        asked = asked + between[len(asked) :].rstrip(" ")
    fronts = [_front(asked, between)]
    try:
        middle = renderer.render([user, answer, {"role": "user", "content": _MARKS[1]}])
    except TEMPLATE_ERRORS:
        middle = ""
    if mark in middle:
        fronts.append(_front(asked, after(middle, _USER_MARK).split(mark)[0]))
    front = fronts[0][0]
    header = front[common(front, closed) :]
    ends, unwritten, unwritten_call = _learn_ends(renderer, whole, middle, closed)
    tails = [squeeze(after(whole, mark)), squeeze(after(middle, mark)) if mark in middle else ""]
    tail = after(whole, mark)
    return Probe(
        ends=ends,
        trail=tail[tail.find(ends[0]) + len(ends[0]) :] if ends and ends[0] in tail else "",
        backs=tuple({tail[: tail.find(end) + len(end)] for tail in tails for end in map(squeeze, ends) if end in tail}),
        header=header,
        ignores_prompt=ignores_prompt and bool(header),
        fronts=tuple(dict.fromkeys(fronts)),
        prompt_extra=asked[len(front) :],
        unwritten=unwritten,
        unwritten_call=unwritten_call,
        inner=tuple(_learn_inner(renderer, user, ends)),
        between_calls=tuple(_learn_between_calls(renderer, user, ends)),
        is_open_inside=mark in middle
        and bool(ends)
        and not any(end in after(middle, mark).split(_MARKS[1])[0] for end in ends),
    )


def _learn_inner(renderer: ChatTemplate, user: dict[str, Any], ends: Sequence[str]) -> Iterator[str]:
    """Yield the ends that stand between a turn's reasoning and its answer: gpt-oss' `<|end|>` closes both."""
    thought, said = _MARKS
    for key in REASONING_KEYS:
        try:
            text = renderer.render([user, {"role": "assistant", "content": said, key: thought}])
        except TEMPLATE_ERRORS:
            continue
        if thought in text and said in after(text, thought):
            yield from (end for end in ends if end in after(text, thought).split(said)[0])


def _learn_between_calls(renderer: ChatTemplate, user: dict[str, Any], ends: Sequence[str]) -> Iterator[str]:
    """Yield the ends that stand between two calls: DeepSeek-R1's distilled models end a turn as they end a call."""
    first, second = _MARKS
    calls = [_call(first), {**_call(second), "id": "call00002"}]
    try:
        text = renderer.render([user, {"role": "assistant", "content": "", "tool_calls": calls}])
    except TEMPLATE_ERRORS:
        return
    if first in text and second in text:
        between = text[text.rindex(first) + len(first) :].split(second)[0]
        yield from (end for end in ends if end in between)


def _front(asked: str, between: str) -> tuple[str, str]:
    n = common(asked, between)
    return between[:n], between[n:]


def _learn_ends(renderer: ChatTemplate, whole: str, middle: str, closed: str) -> tuple[tuple[str, ...], str, str]:
    """Return the ends of turns, and the texts missing after a last turn and after a last call.

    Templates may end the last turn, one in the middle, and a tool call differently. Text is missing where they write an
    end only before what follows.
    """
    added, marks = added_tokens(renderer.tokenizer), turn_marks(renderer.tokenizer)
    tail = after(whole, _MARKS[0])
    inner = after(middle, _MARKS[0]).split(_MARKS[1])[0] if _MARKS[0] in middle else ""
    first = _first_of(added, tail) or tail.strip()
    unwritten = "" if first else _missing(tail, inner, marks)
    if not first and not unwritten:
        return (), "", ""
    first = first or unwritten.strip()
    eos = renderer.tokenizer.eos_token or ""
    if tail.partition(first)[2].startswith(eos):  # a turn of several parts ends in two tokens, the second of them eos
        first += eos
    ends = [first]
    if inner and first not in inner:
        other = _first_of(added, inner)
        if other and other == _first_of(added, closed):  # ends the user's turn too, so it is not a header
            ends.append(other)
        elif mark := _opening(marks, inner).strip():  # only the last turn has an end of its own
            ends.append(mark)
    call = _call(_MARKS[0])
    result = {"role": "tool", "name": _MARKS[0], "tool_call_id": call["id"], "content": _MARKS[1]}
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": _USER_MARK},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        called = renderer.render(asked)
    except TEMPLATE_ERRORS:
        return tuple(ends), unwritten, ""
    try:
        answered = renderer.render([*asked, result])
    except TEMPLATE_ERRORS:
        answered = ""
    if _MARKS[0] not in called:  # the template has no place for calls
        return tuple(ends), unwritten, ""
    tail = after(called, _MARKS[0])
    between = answered[len(called) - len(tail) :].split(_MARKS[1])[0] if answered.startswith(called) else ""
    last = _last_of(added, tail)
    unwritten_call = "" if any(end in tail for end in ends) else _missing(tail, between, marks)
    if unwritten_call and (unwritten or not last):
        return tuple(dict.fromkeys([*ends, unwritten_call.strip()])), unwritten, unwritten_call
    if last and not any(end in tail for end in ends):
        ends.append(last)
    return tuple(ends), unwritten, ""


def _call(mark: str) -> dict[str, Any]:
    return {"type": "function", "id": "call00001", "function": {"name": mark, "arguments": {"a": mark}}}


def _missing(tail: str, inner: str, marks: Sequence[str]) -> str:
    """Return the text, up to the next turn's mark, that follows a middle turn's words and not a last turn's."""
    if not inner.startswith(tail.rstrip()):
        return ""
    start = common(tail, inner)
    opening = _opening(marks, inner[start:])
    return opening if start == len(tail) else opening.lstrip()


def _opening(marks: Sequence[str], text: str) -> str:
    """Return the mark that a text begins with, and the white space before it; empty if it begins with none."""
    bare = text.lstrip()
    mark = next((mark for mark in marks if bare.startswith(mark)), "")
    return text[: len(text) - len(bare)] + mark if mark else ""


def turn_marks(tokenizer: Any) -> list[str]:
    """Return the added tokens that may end a turn, without those that begin a text."""
    no_ends = {tokenizer.bos_token, tokenizer.pad_token} - {tokenizer.eos_token}
    return [token for token in added_tokens(tokenizer) if token.strip() and token not in no_ends]


def learn_calls(render: Callable[[list[dict[str, Any]], CallForm], str]) -> CallForm:
    """Return the form in which a template shows a call's name and arguments, best without Python or JSON in JSON."""
    mark, key, value = "Qc4calledNx", "Kp6namedRv", "Vw8givenTz"
    call = {"type": "function", "id": "call00001", "function": {"name": mark, "arguments": {key: value}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": _USER_MARK},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    result = {"role": "tool", "name": mark, "tool_call_id": "call00001", "content": _MARKS[1]}
    shown: dict[CallForm, str] = {}
    for form in CALL_FORMS:
        for messages in (turns, [*turns, result]):
            try:
                text = render(messages, form)
            except TEMPLATE_ERRORS:
                continue
            if mark in text and key in text and value in text:
                shown[form] = text
                break
    is_python = [repr({key: value}) in text or json.dumps(json.dumps({key: value})) in text for text in shown.values()]
    best = [form for form, is_foreign in zip(shown, is_python, strict=True) if not is_foreign]
    return next(iter([*best, *shown]), CallForm())


def added_tokens(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)


def _first_of(tokens: Iterable[str], text: str) -> str:
    starts = [(text.find(token), -len(token), token) for token in tokens if token.strip() and token in text]
    return min(starts)[2] if starts else ""


def _last_of(tokens: Iterable[str], text: str) -> str:
    ends = [(text.rfind(token) + len(token), len(token), token) for token in tokens if token.strip() and token in text]
    return max(ends)[2] if ends else ""


def _headers(probe: Probe) -> list[str]:
    """Return the texts that open a turn, the longest first: as in the last turn, and as in one before it."""
    shared = len(probe.fronts[0][0]) - len(probe.header)
    headers = {probe.header, *[front[shared:] for front, _ in probe.fronts]}
    return sorted((header for header in headers if header.strip()), key=len, reverse=True)


def as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _marked(message: Mapping[str, Any], mark: str) -> list[dict[str, Any]]:
    """Return the message with its words and the arguments of its calls replaced by a mark.

    The tools' names stay: a template may write them beside the answers, too.
    """
    marked = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") or not calls:
        marked["content"] = _marked_content(message.get("content"), mark)
    if calls:
        marked["tool_calls"] = [_marked_call(call, mark) for call in calls]
    return [marked]


def _marked_content(content: Any, mark: str) -> Any:
    """Return the content with the mark in place of its last text, and no other text; images and sounds stay."""
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
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _shows(turn: str, message: Mapping[str, Any]) -> bool:
    """Return True if a rendered turn holds the message's words, unchanged, and the names in its calls."""
    content = message.get("content") or ""
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    calls = message.get("tool_calls") or []
    is_said = all(text.strip() in turn for text in texts)
    return is_said and all(call.get("function", call)["name"] in turn for call in calls)


def _is_exchanged(message: Mapping[str, Any]) -> bool:
    """Return True if a mark replaces any of the message: a call without arguments keeps its name."""
    calls = message.get("tool_calls") or []
    return bool(words(message).strip() or any(call.get("function", call).get("arguments") for call in calls))
