"""Parts of a row that its chat template leaves out: reasoning, system messages, names, tools, calls.

Templates decide by role, by position, and by tags in the text, so omissions are found by trial: every text of the row
gets its own mark in its middle, tags and all else stay as they are, and the conversation is rendered once more. Texts
whose marks are missing in that rendering are left out.

    said       <think>two and two</think>4
    marked     <think>two aQx0omitnd two</think>Qx1omit4
    rendered   …<|im_start|>assistant\\nQx1omit4<|im_end|>       the reasoning is left out

Most rows of a data set have the same keys and tags. Once one of them is shown in full, the others are not tried: their
texts are only searched for in their renderings.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from honed.spec.problem import shown
from honed.system import quote
from honed.system.error import DatasetError
from honed.text.span import Span, squeeze

Kind = Literal["reasoning", "answer", "tool_calls", "tools", "system", "user", "tool", "name"]

#: Names of the kinds, for messages about rows that lose some of them.
WORDS: dict[Kind, str] = {
    "reasoning": "reasoning",
    "answer": "text of the assistant",
    "tool_calls": "tool calls",
    "tools": "the list of tools",
    "system": "system messages",
    "user": "text of the user",
    "tool": "tool answers",
    "name": "names of speakers",
}
#: The keys of a message under which templates look for reasoning.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Tags by which templates may take a text apart: `<think>`, `<|channel|>`, `[THINK]`.
_TAG = re.compile(r"</?[^<>\s/][^<>\n]{0,40}>|\[/?[A-Z_]{3,20}\]")
_REASONING_TAG = re.compile(r"think|thought|reason|analysis", re.IGNORECASE)
#: Pieces between tags that are tried separately; in a text with more tags, the rest is one piece.
MAX_PIECES = 32
#: Shapes of rows that are remembered as shown in full.
MAX_REMEMBERED = 4096

#: Share of rows skipped because nothing of a turn is shown; a job with more is refused.
MAX_SILENCED_SHARE = 0.1

#: Renders a conversation with its tools; None where the template refuses it.
Render = Callable[[Sequence[Mapping[str, Any]], Any], str | None]


class SilencedError(DatasetError):
    """A row with a turn of which the template leaves out every word: only its end would be trained."""


class OmittedRow(TypedDict):
    """An omission as JSON."""

    kind: Kind
    message: int | None  #: from 1; None for the row's tools
    text: str


@dataclass(frozen=True)
class Omission:
    """One text that is left out, wholly or in part."""

    kind: Kind
    message: int | None  #: from 0; None for the row's tools
    text: str

    @property
    def place(self) -> str:
        return "tools" if self.message is None else f"message {self.message + 1}"

    @property
    def quoted(self) -> str:
        return shown(" ".join(self.text.split()))

    def __str__(self) -> str:
        return f"{self.place}, {WORDS[self.kind]}: {self.quoted}"

    def as_dict(self) -> OmittedRow:
        return {"kind": self.kind, "message": None if self.message is None else self.message + 1, "text": self.text}


def line(row: OmittedRow) -> str:
    """Return a dict made by `as_dict` in words, for the row's owner."""
    number = row["message"]
    return quote.show(str(Omission(row["kind"], None if number is None else number - 1, row["text"])))


@dataclass(frozen=True)
class _Text:
    """One text of a row: its location, and the pieces of it that are tried."""

    kind: Kind
    message: int | None
    path: tuple[str | int, ...]  #: of keys and numbers, from the row's messages or its tools
    value: str
    pieces: tuple[Span, ...]
    is_key: bool = False  #: the text is the last key of the path, not its value


SILENCED_HINT = (
    "use a template that shows the complete rows (`chat_template:`, `training_chat_template: trl`), or remove them; "
    "`honectl preview` shows the rendered rows"
)


def said_in_tags(text: str) -> str:
    """Return an answer's text with its tags, except those of reasoning: `[SEARCH]` is an answer that is only a tag."""
    return _TAG.sub(lambda tag: "" if _REASONING_TAG.search(tag[0]) else tag[0], text).strip()


class Finder:
    """Search for the texts that the rows of a data set lose under one template."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._shown: set[int] = set()  # hashes of the shapes of rows that are shown in full

    def find(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, text: str) -> list[Omission]:
        """Return the parts of a row that are missing from `text`, its rendering, in the row's order."""
        texts = list(_texts(messages, tools))
        shape = hash(_shape(messages, texts))
        squeezed = ""
        is_found = True
        for item in texts:
            if item.kind.startswith("tool") or item.kind == "name":
                continue
            for a, b in item.pieces:
                if item.value[a:b] not in text:  # else its white space needs no removal
                    squeezed = squeezed or squeeze(text)
                    is_found = is_found and squeeze(item.value[a:b]) in squeezed
        if is_found and shape in self._shown:
            return []
        lost = self._tried(messages, tools, texts, 0.5)
        if not lost and not is_found:  # the template rewrites or cuts some text
            lost = self._tried(messages, tools, texts, 0.0) or self._tried(messages, tools, texts, 1.0)
        if not lost:
            if len(self._shown) >= MAX_REMEMBERED:
                self._shown.clear()
            self._shown.add(shape)
        return lost

    def is_silenced(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, i: int, lost: Iterable[Omission]
    ) -> bool:
        """Return True if message i says something and the template shows none of it; `lost` is what its row loses."""
        texts = list(_texts(messages, tools))
        said = sum(len(text.pieces) for text in texts if text.message == i and text.kind != "name")

        def is_lost(omissions: Iterable[Omission]) -> bool:
            return sum(omission.message == i and omission.kind != "name" for omission in omissions) >= said

        # A template that cuts a text may leave out its middle, and show its beginning or end.
        return (
            said > 0
            and is_lost(lost)
            and all(is_lost(self._tried(messages, tools, texts, where)) for where in (0.0, 1.0))
        )

    def _tried(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, texts: list[_Text], where: float
    ) -> list[Omission]:
        """Return the parts left out of a rendering with marks at `where` in the texts: 0 is the beginning."""
        mark = _mark(messages, tools)
        rendered = self._marked(messages, tools, texts, mark, where)
        if rendered is not None:
            return _missing(texts, mark, rendered)
        # The template interprets some text as more than text: each kind is tried separately, refused kinds are skipped.
        omissions: list[Omission] = []
        for kind in dict.fromkeys(text.kind for text in texts):
            some = [text for text in texts if text.kind == kind]
            rendered = self._marked(messages, tools, some, mark, where)
            omissions += _missing(some, mark, rendered) if rendered is not None else []
        return sorted(omissions, key=lambda item: -1 if item.message is None else item.message)

    def _marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, texts: Iterable[_Text], mark: str, where: float
    ) -> str | None:
        made: dict[str, Any] = {"messages": _copied(messages), "tools": _copied(tools)}
        number = 0
        for text in reversed(list(texts)):  # a key is renamed after what lies below it
            value, root = text.value, made["tools" if text.message is None else "messages"]
            numbers = range(number, number + len(text.pieces))
            number += len(text.pieces)
            for n, (a, b) in reversed(list(zip(numbers, text.pieces, strict=True))):
                at = a + max(1 if where else 0, int((b - a) * where))
                value = value[:at] + mark.format(n) + value[at:]
            for step in text.path[:-1]:
                root = root[step]
            if text.is_key:
                renamed = {value if key == text.path[-1] else key: item for key, item in root.items()}
                root.clear()
                root.update(renamed)
            else:
                root[text.path[-1]] = value
        return self._render(made["messages"], made["tools"])


@dataclass
class Tally:
    """Losses of many rows, added up."""

    num_rows: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)  #: rows that lose some of it
    firsts: dict[Kind, str] = field(default_factory=dict)  #: the first omission of every kind, with its row
    rows: dict[Kind, tuple[Any, list[Omission]]] = field(default_factory=dict)  #: those rows, each with its omissions

    def add(self, where: str, omissions: Sequence[Omission], row: Any) -> None:
        for kind in {omission.kind for omission in omissions} - self.rows.keys():
            self.rows[kind] = row, [omission for omission in omissions if omission.kind == kind]
        self.num_rows += bool(omissions)
        self.kinds.update({omission.kind for omission in omissions})
        for item in merged(omissions):
            self.firsts.setdefault(item.kind, f"{where}, {item.place}: {item.quoted}")

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.num_rows + other.num_rows, self.kinds + other.kinds, other.firsts | self.firsts, other.rows | self.rows
        )

    def as_dict(self) -> dict[str, object]:
        return {"num_rows": self.num_rows, "kinds": dict(sorted(self.kinds.items()))}

    def message(self, num_rows: int) -> str:
        """Return a message for the rows' owner; empty where nothing is lost."""
        if not self.num_rows:
            return ""
        listed = "; ".join(
            f"{WORDS[kind]} in {number} (the first: {self.firsts[kind]})" for kind, number in self.kinds.most_common()
        )
        return f"the chat template leaves out parts of {self.num_rows} of {num_rows} rows: {listed}"


def merged(omissions: Iterable[Omission]) -> list[Omission]:
    """Merge omissions to one per message and kind: a call is a name and several arguments."""
    texts_of: dict[tuple[int | None, Kind], list[str]] = {}
    for omission in omissions:
        texts_of.setdefault((omission.message, omission.kind), []).append(omission.text)
    return [Omission(kind, message, ", ".join(texts)) for (message, kind), texts in texts_of.items()]


def _missing(texts: Iterable[_Text], mark: str, rendered: str) -> list[Omission]:
    omissions: list[Omission] = []
    number = 0
    shown_reasoning: set[tuple[int | None, str]] = set()
    for text in reversed(list(texts)):
        lost = []
        for n, (a, b) in enumerate(text.pieces, start=number):
            is_shown = mark.format(n) in rendered
            if text.path[-1] in REASONING_KEYS and is_shown:
                shown_reasoning.add((text.message, text.value))
            if not is_shown:
                lost.append(Omission(_kind_of_piece(text, (a, b)), text.message, text.value[a:b]))
        number += len(text.pieces)
        omissions += reversed(lost)
    # Servers write the same reasoning under two keys; it is shown once.
    return [
        item
        for item in reversed(omissions)
        if item.kind != "reasoning"
        or not any(message == item.message and item.text.strip() in value for message, value in shown_reasoning)
    ]


def _kind_of_piece(text: _Text, piece: Span) -> Kind:
    """Return the kind of a piece: the assistant's words between tags of reasoning are reasoning."""
    if text.kind != "answer":
        return text.kind
    before, behind = _TAG.findall(text.value[: piece[0]]), _TAG.findall(text.value[piece[1] :])
    opens = bool(before) and _REASONING_TAG.search(before[-1]) and not before[-1].startswith(("</", "[/"))
    closes = bool(behind) and _REASONING_TAG.search(behind[0]) and behind[0].startswith(("</", "[/"))
    return "reasoning" if opens or closes else "answer"


# --- the texts of a row ----------------------------------------------------------------------------------------------


def _texts(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Iterator[_Text]:
    for n, tool in enumerate(tools or []):
        below = ("function",) if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) else ()
        function = tool["function"] if below else tool
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            yield from _text("tools", None, (n, *below, "name"), name, is_whole=True)
    for n, message in enumerate(messages):
        yield from _of_message(message, n)


def _of_message(message: Mapping[str, Any], n: int) -> Iterator[_Text]:
    role = message["role"]
    kind: Kind = {"assistant": "answer", "developer": "system"}.get(role, role)
    content = message.get("content")
    if role != "tool" and isinstance(name := message.get("name"), str):  # a tool's name says only which call it answers
        yield from _text("name", n, (n, "name"), name, is_whole=True)
    for key in REASONING_KEYS:
        if isinstance(value := message.get(key), str):
            yield from _text("reasoning", n, (n, key), value, is_whole=True)
    if isinstance(content, str):
        yield from _text(kind, n, (n, "content"), content)
    elif isinstance(content, list):
        for place, part in enumerate(content):
            if part.get("type") == "text":
                yield from _text(kind, n, (n, "content", place, "text"), part["text"])
    for place, call in enumerate(message.get("tool_calls") or []):
        below = ("function",) if "function" in call else ()
        function = call["function"] if below else call
        yield from _text("tool_calls", n, (n, "tool_calls", place, *below, "name"), function["name"], is_whole=True)
        arguments = function.get("arguments")
        if not isinstance(arguments, Mapping):
            continue
        for key, value in arguments.items():
            path = (n, "tool_calls", place, *below, "arguments", key)
            yield from _text("tool_calls", n, path, str(key), is_whole=True, is_key=True)
            if isinstance(value, str):
                yield from _text("tool_calls", n, path, value, is_whole=True)


def _text(
    kind: Kind,
    message: int | None,
    path: tuple[str | int, ...],
    value: str,
    *,
    is_whole: bool = False,
    is_key: bool = False,
) -> Iterator[_Text]:
    """Yield the text, unless it is empty; a whole one is not split at its tags."""
    pieces = tuple(_pieces(value, max_tags=0 if is_whole else MAX_PIECES - 1))
    if pieces:
        yield _Text(kind, message, path, value, pieces, is_key)


def _pieces(value: str, *, max_tags: int) -> Iterator[Span]:
    """Yield the spans between tags, without the white space around them."""
    at = 0
    cuts = [match.span() for _, match in zip(range(max_tags), _TAG.finditer(value), strict=False)]
    for start, end in [*cuts, (len(value), len(value))]:
        piece = value[at:start]
        if piece.strip():
            yield at + len(piece) - len(piece.lstrip()), start - (len(piece) - len(piece.rstrip()))
        at = end


def _shape(messages: Sequence[Mapping[str, Any]], texts: Iterable[_Text]) -> tuple[Any, ...]:
    """Return the features of a row by which a template treats it: all but its words."""
    turns = tuple((message["role"], *sorted(key for key, value in message.items() if value)) for message in messages)
    marked = tuple((text.message, text.kind, len(text.pieces), tuple(_TAG.findall(text.value))) for text in texts)
    return turns, marked


def _mark(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Return a mark that the row does not contain, with a place for a number."""
    said = json.dumps([messages, tools], default=str)
    letters = next(letters for letters in ("Qx", "Wj", "Vz", "Kq", "Zv", "") if f"{letters}omit" not in said)
    return letters + "omit{}Q"


def _copied(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _copied(item) for key, item in value.items()}
        case list() | tuple():
            return [_copied(item) for item in value]
        case _:
            return value
