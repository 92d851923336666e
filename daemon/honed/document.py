"""Job files as text: YAML, JSON and TOML, read into plain data with the line of every key.

One meaning in all three formats, and nothing clever in any: no tags, anchors or merge keys, no second document, no
duplicate keys, no dates, no infinities, no number that one reader takes for another. What is refused is refused with
its line, and in a time bounded by the limits below, whatever the text.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, NoReturn

import yaml

from honed import tomlmap
from honed.problem import KeyPath, dotted, fault, shown

MAX_BYTES = 256 * 1024
#: Levels of nesting. A spec has five.
MAX_DEPTH = 50
#: Keys and list items in one file. A spec has some hundred.
MAX_VALUES = 20_000
MAX_INTEGER = 2**63 - 1  #: what SQLite, JSON readers and torch can all hold

SUFFIXES = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True)
class Document:
    """A job file's content: dict, list, str, int, float, bool, None, and where each of it stands."""

    data: dict[str, Any]
    lines: Mapping[KeyPath, int]  #: path of a key or list item -> 1-based line


def parse(data: bytes, suffix: str, *, max_bytes: int = MAX_BYTES) -> Document:
    """Read a job file. Raises SpecError, which names the line, what stands there and what to do."""
    if suffix.lower() not in SUFFIXES:
        raise fault(f"{shown(suffix)} is not a job file's suffix", hint=f"one of {' '.join(SUFFIXES)}")
    if len(data) > max_bytes:
        raise fault(
            f"the file has {len(data)} bytes, a job file at most {max_bytes}", hint="data sets are named by path"
        )
    text, record = _decode(data), _Record()
    match suffix.lower():
        case ".json":
            value = _Json(text, record).document()
        case ".toml":
            value = _toml(text, record)
        case _:
            value = _Yaml(text, record).document()
    if not isinstance(value, dict):
        raise fault(f"a job file is a mapping of keys to values, this one is {shown(value)}", line=1)
    if not value:
        raise fault("the file holds no keys", hint="base_model and datasets are the least")
    return Document(value, record.lines)


@dataclass
class _Record:
    """What the readers keep in common: where keys stand, and the limits."""

    lines: dict[KeyPath, int] = field(default_factory=dict)

    def note(self, path: KeyPath, line: int, *, once: bool = True) -> None:
        """Note where a key or list item stands. With `once`, a key that is there already is refused."""
        if len(path) > MAX_DEPTH:
            raise fault(f"nested more than {MAX_DEPTH} levels deep", line=line)
        if path[-1] == "":
            raise fault("a value without a key", line=line)
        if len(self.lines) >= MAX_VALUES:
            raise fault(f"more than {MAX_VALUES} keys and values", line=line, hint="data sets are named by path")
        if once and path in self.lines:
            raise fault(f"stands here twice; first on line {self.lines[path]}", line=line, key=dotted(path))
        self.lines.setdefault(path, line)


def _decode(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise fault(f"not UTF-8 text (byte 0x{data[error.start]:02x})", line=line) from None
    if not text.strip():
        raise fault("the file is empty", hint="base_model and datasets are the least")
    if control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
        line = text.count("\n", 0, control.start()) + 1
        raise fault(f"not text: a control character (0x{ord(control[0]):02x})", line=line)
    return text


def _text(value: str, line: int) -> str:
    """A string as it may stand in a spec. Escapes can bring in what `_decode` keeps out."""
    if control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", value):
        raise fault(f"text with the character U+{ord(control[0]):04X}, which nothing here can use", line=line)
    return value


def _integer(text: str, line: int, base: int = 10) -> int:
    value = int(text, base) if len(text) < 30 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise fault(f"the number {text[:20]}… is too large", line=line)
    return value


def _float(text: str, line: int) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise fault(f"{shown(text)} is not a finite number", line=line)
    return value


# --- YAML -------------------------------------------------------------------------------------------------------------

#: A plain scalar's meaning, as in YAML 1.2. What YAML 1.1 readers take for something else is refused, not guessed:
#: 010 (octal 8), 1:30 (ninety), 1_000, 0b11, dates. `yes`, `no`, `on` and `off` stay words.
_YAML_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_YAML_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_YAML_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_YAML_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YAML_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")
_YAML_DOUBTFUL = re.compile(
    r"[-+]?0[0-9_]+|[-+]?0b[01_]+|[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
)
#: Characters. The pattern takes quadratic time, and no number that is meant as one is longer.
MAX_DOUBTFUL = 64
_YAML_WORDS = {
    **dict.fromkeys(("null", "Null", "NULL", "~"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
#: libyaml's words, and what they mostly mean.
_YAML_HINTS = {
    "mapping values are not allowed": "a text with a colon in it stands in quotes; or the indentation is off",
    "did not find expected key": "check the indentation and the quotes here and on the line above",
    "did not find expected '-' indicator": "check the indentation here and on the line above",
    "did not find expected ',' or": "a bracket is not closed, or a comma is missing",
    "could not find expected ':'": "each key is followed by a colon and a space",
    "unexpected end of stream": "a quote or bracket is not closed",
    "cannot start any token": "a text that begins with this character stands in quotes",
    "unknown escape character": "in double quotes a backslash is an escape; use single quotes",
}
#: Thousands of %TAG lines take libyaml seconds (it compares each with all before it); no job file needs one.
_YAML_DIRECTIVE = re.compile(r"^%[A-Z]", re.MULTILINE)


class _Yaml:
    """Built from the parser's events, so that each refusal comes before anything is made of what is refused."""

    def __init__(self, text: str, record: _Record) -> None:
        self._text, self._record = text, record
        self._loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)

    def document(self) -> Any:
        if directive := _YAML_DIRECTIVE.search(self._text):
            line = self._text.count("\n", 0, directive.start()) + 1
            raise fault("a YAML directive (%)", line=line, hint="leave it out")
        try:
            self._next()  # the stream's start
            if isinstance(self._next(), yaml.StreamEndEvent):
                return {}
            value = self._value((), self._next())
            self._next()  # the document's end
            if not isinstance(event := self._next(), yaml.StreamEndEvent):
                raise fault("a second document (---) in one file", line=_line(event), hint="one job, one file")
        except yaml.YAMLError as error:
            self._refuse(error)
        return value

    def _next(self) -> Any:
        return self._loader.get_event()

    def _value(self, path: KeyPath, event: Any) -> Any:
        line = _line(event)
        if getattr(event, "anchor", None) is not None:
            raise fault("an anchor or alias (& or *)", line=line, hint="write the value out, or put it in quotes")
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise fault(f"a YAML tag ({shown(tag)})", line=line, hint="leave it out, or put the text in quotes")
        match event:
            case yaml.MappingStartEvent():
                return self._mapping(path)
            case yaml.SequenceStartEvent():
                return self._sequence(path)
            case _ if event.implicit[0]:
                return _yaml_scalar(event.value, line, path)
            case _:
                return _text(event.value, line)

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        mapping = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line = _line(event)
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                raise fault("a key is a word, not a list or mapping", line=line)
            if getattr(event, "value", "") == "<<" and event.implicit[0]:  # in quotes it is a name
                raise fault("a merge key (<<)", line=line, hint="write the keys out")
            if getattr(event, "value", None) == "":
                raise fault("a value without a key", line=line)
            key = self._value(path, event)
            if not isinstance(key, str):
                raise fault(f"the key {shown(key)} is not text", line=line, hint="keys are names; quote it if meant")
            self._record.note((*path, key), line)
            mapping[key] = self._value((*path, key), self._next())
        return mapping

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            item = (*path, len(items))
            self._record.note(item, _line(event))
            items.append(self._value(item, event))
        return items

    def _refuse(self, error: yaml.YAMLError) -> NoReturn:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        said = getattr(error, "problem", None) or "a character that YAML does not allow"
        line = mark.line + 1 if mark else None
        lines = self._text.splitlines()
        if line and line <= len(lines) and "\t" in re.match(r"\s*", lines[line - 1])[0]:  # type: ignore[index]
            raise fault("a tab in the indentation", line=line, hint="YAML is indented with spaces") from None
        hint = next((hint for words, hint in _YAML_HINTS.items() if words in said), "")
        raise fault(f"this is not YAML: {said}", line=line, hint=hint) from None


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _yaml_scalar(text: str, line: int, path: KeyPath) -> Any:
    if text == "":
        raise fault("nothing stands here", line=line, key=dotted(path), hint="write the value, or leave the key out")
    if text in _YAML_WORDS:
        return _YAML_WORDS[text]
    if _YAML_INTEGER.fullmatch(text):
        return _integer(text, line)
    if _YAML_BASED.fullmatch(text):
        return _integer(text, line, 0)
    if _YAML_NOT_FINITE.fullmatch(text):
        raise fault(f"{shown(text)} is not a finite number", line=line)
    if len(text) <= MAX_DOUBTFUL and _YAML_DOUBTFUL.fullmatch(text):
        raise fault(
            f"{shown(text)} is one number to some YAML readers and another, or text, to others", line=line,
            hint="write it plainly, or put it in quotes if it is text",
        )  # fmt: skip
    if _YAML_FLOAT.fullmatch(text):
        return _float(text, line)
    if _YAML_DATE.fullmatch(text):
        raise fault(f"{shown(text)} is a date", line=line, hint="put it in quotes if it is text")
    return _text(text, line)


# --- JSON -------------------------------------------------------------------------------------------------------------

_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?(?![0-9A-Za-z_.])")
_JSON_WORD = re.compile(r"[-+.\w]+")
_JSON_WORDS = {"null": None, "true": True, "false": False}
#: Python's words, and others'.
_JSON_FOREIGN = {
    "true": "write true", "false": "write false", "none": "write null", "null": "write null",
    "nan": "numbers are finite", "infinity": "numbers are finite", "-infinity": "numbers are finite",
}  # fmt: skip
_JSON_HINTS = {
    "'": "text stands in double quotes", "#": "JSON has no comments; YAML and TOML do",
    "/": "JSON has no comments; YAML and TOML do", "}": "a comma too many?", "]": "a comma too many?",
}  # fmt: skip


class _Json:
    """A reader of our own, for the line of every key; strings are read by the library's."""

    def __init__(self, text: str, record: _Record) -> None:
        self._text, self._record, self._at = text, record, 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._decoder = json.JSONDecoder()

    def document(self) -> Any:
        value = self._value(())
        if self._peek():
            self._refuse("the end of the file")
        return value

    def _line(self) -> int:
        return bisect.bisect_left(self._newlines, self._at) + 1

    def _peek(self) -> str:
        """The next character that is not white space, or nothing at the end."""
        self._at = _JSON_SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
        return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> bool:
        taken = self._peek() == character
        self._at += taken
        return taken

    def _refuse(self, expected: str) -> NoReturn:
        there = self._peek()
        found = f"{shown(there)} stands" if there else "the file ends"
        raise fault(
            f"this is not JSON: {found} where {expected} should be", line=self._line(), hint=_JSON_HINTS.get(there, "")
        )

    def _value(self, path: KeyPath) -> Any:
        match self._peek():
            case "{":
                return self._mapping(path)
            case "[":
                return self._sequence(path)
            case '"':
                return self._string()
            case _:
                return self._number_or_word()

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        self._take("{")
        if self._take("}"):
            return mapping
        while True:
            if self._peek() != '"':
                self._refuse("a key in double quotes")
            line, key = self._line(), self._string()
            self._record.note((*path, key), line)
            if not self._take(":"):
                self._refuse("a colon")
            mapping[key] = self._value((*path, key))
            if self._take("}"):
                return mapping
            if not self._take(","):
                self._refuse("a comma or '}'")

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        self._take("[")
        if self._take("]"):
            return items
        while True:
            self._peek()
            self._record.note((*path, len(items)), self._line())
            items.append(self._value((*path, len(items))))
            if self._take("]"):
                return items
            if not self._take(","):
                self._refuse("a comma or ']'")

    def _string(self) -> str:
        line = self._line()
        try:
            value, self._at = self._decoder.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise fault(f"this is not JSON: {error.msg[0].lower()}{error.msg[1:]}", line=line) from None
        return _text(value, line)

    def _number_or_word(self) -> Any:
        line = self._line()
        if number := _JSON_NUMBER.match(self._text, self._at):
            self._at = number.end()
            is_float = number[1] or number[2]
            return _float(number[0], line) if is_float else _integer(number[0], line)
        if not (word := _JSON_WORD.match(self._text, self._at)):
            self._refuse("a value")
        if word[0] not in _JSON_WORDS:
            hint = _JSON_FOREIGN.get(word[0].lower(), "text stands in double quotes")
            raise fault(f"{shown(word[0])} is no JSON value", line=line, hint=hint)
        self._at = word.end()
        return _JSON_WORDS[word[0]]


# --- TOML -------------------------------------------------------------------------------------------------------------

_TOML_PLACE = re.compile(r"(.*?) ?\(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)
_TOML_TWICE = re.compile(r"Cannot overwrite|Cannot declare|Cannot mutate|Cannot redefine|Duplicate inline")
_TOML_HINTS = {
    "Invalid value": "text stands in quotes; true and false are written small",
    "Invalid statement": "a line is `key = value`, or [section]",
    "Expected '=' after a key": "a line is `key = value`, or [section]",
}


def _toml(text: str, record: _Record) -> Any:
    # The map comes first: it keeps the limits, which tomllib does not (a key of 100,000 dots takes it minutes).
    latest: dict[int, KeyPath] = {}

    def note(path: KeyPath, line: int) -> None:
        record.note(path, line, once=False)
        latest[line] = path

    end = tomlmap.scan(text, note)
    known = text if end is None else text[: end + 200]
    try:
        data = tomllib.loads(known)
    except tomllib.TOMLDecodeError as error:
        _refuse_toml(str(error), known, latest, record)
    except (ValueError, RecursionError):  # Python reads no number of more than 4300 digits
        raise fault("this is not TOML: a number too large, or nested too deeply") from None
    if end is not None:
        raise fault("this is not TOML", line=text.count("\n", 0, end) + 1)
    return _plain(data, (), record.lines)


def _refuse_toml(said: str, text: str, latest: Mapping[int, KeyPath], record: _Record) -> NoReturn:
    place = _TOML_PLACE.fullmatch(said)
    what = place[1] if place else said
    line = int(place[2]) if place and place[2] else text.count("\n") + 1
    if _TOML_TWICE.match(what):
        path = latest.get(line, ())
        first = f"; first on line {record.lines[path]}" if path else ""
        raise fault(f"stands here twice{first}", line=line, key=dotted(path)) from None
    raise fault(
        f"this is not TOML: {what[:1].lower()}{what[1:]}", line=line,
        hint=next((hint for words, hint in _TOML_HINTS.items() if words in what), ""),
    ) from None  # fmt: skip


def _plain(value: Any, path: KeyPath, lines: Mapping[KeyPath, int]) -> Any:
    """TOML's values without those that the other formats lack."""
    line = lines.get(path, 1)
    match value:
        case dict():
            return {_text(key, line): _plain(item, (*path, key), lines) for key, item in value.items()}
        case list():
            return [_plain(item, (*path, index), lines) for index, item in enumerate(value)]
        case str():
            return _text(value, line)
        case bool():
            return value
        case int():
            return _integer(str(value) if abs(value) < 10**40 else "9" * 40, line)
        case float():
            return _float(str(value), line)
        case datetime() | date() | time():
            raise fault(f"{shown(str(value))} is a date", line=line, hint="put it in quotes if it is text")
        case _:
            raise AssertionError(type(value))
