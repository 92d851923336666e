"""Job files as text: YAML, JSON and TOML, parsed into plain data with the line of every key.

All three formats have the same semantics, without surprises: no tags, no second document, no duplicate keys, no dates,
no infinities, no numbers that parsers read differently. YAML's anchors, aliases and merge keys are expanded, within the
limits below. Each rejection names a line, and the limits bound the time for any input.
"""

from __future__ import annotations

import bisect
import copy
import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from typing import Any, NoReturn

import yaml

from honed.spec import toml_lines
from honed.spec.problem import InvalidSpecError, KeyPath, Line, Problem, dotted, fault, shown
from honed.system import quote

MAX_BYTES = 256 * 1024
#: Levels of nesting. A spec has five.
MAX_DEPTH = 50
#: Keys and list items in one file. A spec has some hundred.
MAX_VALUES = 20_000
#: Characters that all aliases and merge keys of a file expand to.
MAX_EXPANDED = 1024 * 1024
MAX_INTEGER = 2**63 - 1  #: the largest that SQLite, JSON parsers and torch all support

#: The message about a key without a value.
EMPTY = "the value is empty"

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
#: Suffixes of scripts and notebooks of other tools.
SCRIPTS = (".py", ".ipynb", ".sh", ".bash")


@dataclass(frozen=True)
class Document:
    """A job file's content: dict, list, str, int, float, bool, None, with the position of each."""

    data: dict[str, Any]
    lines: Mapping[KeyPath, int]  #: path of a key or list item -> 1-based line
    problems: Mapping[KeyPath, Problem] = field(default_factory=dict)  #: unreadable values; null in `data`
    text: str = ""
    spans: Mapping[KeyPath, tuple[int, int]] = field(default_factory=dict)  #: position of every text value in `text`


def parse(data: bytes, suffix: str, *, max_bytes: int = MAX_BYTES, is_lenient: bool = False) -> Document:
    """Parse a job file. Raises SpecError, which names the line, its content and the fix.

    If `is_lenient`, single unreadable values are collected in the document's `problems`, so that they are reported
    together with other problems.
    """
    if suffix.lower() not in SUFFIXES:
        script = "; `honectl convert FILE` makes a job file of a script or command line"
        more = script if suffix.lower() in SCRIPTS else ""
        raise fault(f"{shown(suffix)} is not a suffix of a job file", hint=f"use one of {' '.join(SUFFIXES)}{more}")
    if len(data) > max_bytes:
        raise fault(
            f"the file has {len(data)} bytes; a job file may have at most {max_bytes}",
            hint="refer to data sets by path",
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
        raise fault(f"a job file must be a mapping of keys to values, this one is {shown(value)}", line=1)
    if not value:
        raise fault("the file contains no keys", hint="it needs at least base_model and datasets")
    if record.problems and not is_lenient:
        raise InvalidSpecError([*record.problems.values()])
    return Document(value, record.lines, record.problems, text, record.spans)


@dataclass
class _Record:
    """State shared by the parsers: the positions of keys, and the limits."""

    lines: dict[KeyPath, int] = field(default_factory=dict)
    order: list[KeyPath] = field(default_factory=list)  #: the paths of `lines` in order, to find those below a key
    spans: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    problems: dict[KeyPath, Problem] = field(default_factory=dict)

    def note(self, path: KeyPath, line: int, *, once: bool = True) -> None:
        """Record the line of a key or list item. With `once`, a duplicate key is rejected."""
        if len(path) > MAX_DEPTH:
            raise fault(f"nested more than {MAX_DEPTH} levels deep", line=line)
        if path[-1] == "":
            raise fault("a value without a key", line=line)
        if len(self.lines) >= MAX_VALUES:
            raise fault(f"more than {MAX_VALUES} keys and values", line=line, hint="refer to data sets by path")
        if once and path in self.lines:
            raise fault(f"occurs twice; first on line {self.lines[path]}", line=line, key=dotted(path))
        if path not in self.lines:
            self.order.append(path)
            self.lines[path] = line


def _decode(data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise fault(f"not UTF-8 text (byte 0x{data[error.start]:02x})", line=line) from None
    if not text.strip():
        raise fault("the file is empty", hint="it needs at least base_model and datasets")
    if control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
        line = text.count("\n", 0, control.start()) + 1
        raise fault(f"not a text file: a control character (0x{ord(control[0]):02x})", line=line)
    return text


def _text(value: str, line: int) -> str:
    """Return a string if its characters are allowed. Escapes can produce characters that `_decode` rejects."""
    if control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", value):
        raise fault(f"text with the character U+{ord(control[0]):04X}, which cannot be used", line=line)
    return value


def _integer(text: str, line: int, base: int = 10) -> int:
    value = int(text, base) if len(text) < 30 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise fault(f"the number {quote.mark(text[:20])}… is too large", line=line)
    return value


def _float(text: str, line: int) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise fault(f"{shown(text)} is not a finite number", line=line)
    return value


# --- YAML -------------------------------------------------------------------------------------------------------------

#: The meaning of a plain scalar in YAML 1.2. Scalars that YAML 1.1 parsers read differently are rejected, not guessed:
#: 010 (octal 8), 1:30 (ninety), 1_000, 0b11, dates. `yes`, `no`, `on` and `off` are text.
_YAML_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_YAML_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_YAML_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_YAML_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YAML_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")
_YAML_DOUBTFUL = re.compile(
    r"[-+]?0[0-9_]+|[-+]?0b[01_]+|[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
)
#: Characters. The pattern takes quadratic time, and no sensible number is longer.
MAX_DOUBTFUL = 64
_YAML_WORDS = {
    **dict.fromkeys(("null", "Null", "NULL", "~"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
#: libyaml's messages, and their usual causes.
_YAML_HINTS = {
    "mapping values are not allowed": "put text with a colon in quotes; or check the indentation",
    "did not find expected key": "check the indentation and the quotes here and on the line above",
    "did not find expected '-' indicator": "check the indentation here and on the line above",
    "did not find expected ',' or": "a bracket is not closed, or a comma is missing",
    "could not find expected ':'": "write a colon and a space after each key",
    "unexpected end of stream": "a quote or bracket is not closed",
    "cannot start any token": "put text that begins with this character in quotes",
    "unknown escape character": "in double quotes a backslash is an escape; use single quotes",
}
_YAML_ANCHOR = re.compile(r"&\S+\s+")
#: Thousands of %TAG lines take libyaml seconds (it compares each with all earlier ones); no job file needs one.
_YAML_DIRECTIVE = re.compile(r"^%[A-Z]", re.MULTILINE)


@dataclass(frozen=True)
class _Anchored:
    """The value of an anchor, with the relative positions of its parts."""

    value: Any
    line: int
    lines: dict[KeyPath, int]
    spans: dict[KeyPath, tuple[int, int]]
    num_chars: int


#: Prefixes of top-level keys that hold anchors and are not part of the job, as in other tools' files.
HOLDERS = ("x-", "_", ".")


#: Keys that a job must have, or whose default may not be what was meant.
_MUST: tuple[KeyPath, ...] = (("base_model",), ("datasets",), ("path",), ("lora",), ("adapter",))


class _Yaml:
    """A YAML parser on libyaml's events, so that limits are checked before any value is built."""

    def __init__(self, text: str, record: _Record) -> None:
        self._text, self._record = text, record
        self._anchors: dict[str, _Anchored | None] = {}  #: None while the anchor is still open
        self._used: set[str] = set()
        self._holders: dict[str, str] = {}  #: top-level keys -> the anchor of their values
        self._num_chars = self._num_expanded = 0
        self._loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)

    def document(self) -> Any:
        if directive := _YAML_DIRECTIVE.search(self._text):
            line = self._text.count("\n", 0, directive.start()) + 1
            raise fault("a YAML directive (%)", line=line, hint="remove it")
        try:
            self._next()  # the stream's start
            if isinstance(self._next(), yaml.StreamEndEvent):
                return {}
            value = self._value((), self._next())
            self._next()  # the document's end
            if not isinstance(event := self._next(), yaml.StreamEndEvent):
                raise fault("the file has a second document (---)", line=_line(event), hint="write one job per file")
        except yaml.YAMLError as error:
            self._refuse(error)
        return value

    def _next(self) -> Any:
        return self._loader.get_event()

    def _value(self, path: KeyPath, event: Any) -> Any:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(path, event)
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise fault(f"a YAML tag ({shown(tag)})", line=line, hint="remove it, or put the text in quotes")
        anchor = event.anchor
        if anchor is None:
            return self._plain(path, event)
        if (known := self._anchors.get(anchor)) is not None or anchor in self._anchors:
            first = f"; first on line {known.line}" if known else ""
            raise fault(
                f"the anchor {_marked('&', anchor)} occurs twice{first}", line=line, hint="give it another name"
            )
        self._anchors[anchor] = None
        begin, num_chars = len(self._record.order), self._num_chars
        value = self._plain(path, event)
        self._anchors[anchor] = self._anchored(path, begin, value, line, self._num_chars - num_chars)
        if len(path) == 1 and str(path[0]).startswith(HOLDERS):
            self._holders[str(path[0])] = anchor
        return value

    def _anchored(self, path: KeyPath, begin: int, value: Any, line: int, num_chars: int) -> _Anchored:
        record = self._record
        below = record.order[begin:]
        spans = {item[len(path) :]: record.spans[item] for item in (path, *below) if item in record.spans}
        return _Anchored(value, line, {item[len(path) :]: record.lines[item] for item in below}, spans, num_chars)

    def _alias(self, path: KeyPath, event: Any) -> Any:
        anchored = self._meant(event)
        self._lay(path, anchored, Line(_line(event)))
        return copy.deepcopy(anchored.value)

    def _meant(self, event: Any) -> _Anchored:
        """Return the value of an alias; the limit on all expansions is checked first."""
        name, line = event.anchor, _line(event)
        anchored = self._anchors.get(name)
        if anchored is None:
            what = (
                "inside its own anchor"
                if name in self._anchors
                else f"without an anchor {_marked('&', name)} before it"
            )
            raise fault(f"an alias ({_marked('*', name)}) {what}", line=line, hint="put it in quotes if it is text")
        self._used.add(name)
        self._num_expanded += anchored.num_chars
        self._num_chars += anchored.num_chars
        if self._num_expanded > MAX_EXPANDED:
            raise fault(f"aliases for more than {MAX_EXPANDED} characters", line=line, hint="write out what is needed")
        return anchored

    def _lay(self, path: KeyPath, anchored: _Anchored, via: Line, keys: Collection[str] | None = None) -> None:
        """Record the positions that an alias adds, or only those of `keys` for a merge key."""
        for below, line in anchored.lines.items():
            if keys is None or below[0] in keys:
                self._record.note((*path, *below), Line(line, via), once=False)
        for below, span in anchored.spans.items():
            if keys is None or (below and below[0] in keys):
                self._record.spans[(*path, *below)] = span

    def _plain(self, path: KeyPath, event: Any) -> Any:
        match event:
            case yaml.MappingStartEvent():
                return self._mapping(path)
            case yaml.SequenceStartEvent():
                return self._sequence(path)
            case _:
                self._num_chars += len(event.value) + 1
                return self._scalar(path, event)

    def _scalar(self, path: KeyPath, event: Any) -> Any:
        line = _line(event)
        try:
            value = _yaml_scalar(event.value, line, path) if event.implicit[0] else _text(event.value, line)
        except InvalidSpecError as error:
            if path not in self._record.lines:  # a key
                raise
            self._record.problems[path] = replace(error.problems[0], key=dotted(path))
            return None
        if isinstance(value, str):
            begin, end = event.start_mark.index, event.end_mark.index
            if event.anchor is not None and (before := _YAML_ANCHOR.match(self._text, begin, end)):
                begin = before.end()
            self._record.spans[path] = (begin, end)
        return value

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: list[tuple[_Anchored, Line]] = []
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line = _line(event)
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent | yaml.AliasEvent):
                raise fault("a key must be a word, not a list, mapping or alias", line=line)
            if event.value == "<<" and event.implicit[0]:  # in quotes it is an ordinary key
                self._record.note((*path, "<<"), line)
                merged += self._merged((*path, "<<"), self._next(), line)
                continue
            if event.value == "":
                raise fault("a value without a key", line=line)
            key = self._key(event)
            self._record.note((*path, key), line)
            mapping[key] = self._value((*path, key), self._next())
        for anchored, via in merged:  # the mapping's own keys win, wherever they are, then the first merged mapping
            new = {key: value for key, value in anchored.value.items() if key not in mapping}
            self._lay(path, anchored, via, new.keys())
            mapping |= copy.deepcopy(new)
        if not path:
            for key in [key for key, anchor in self._holders.items() if anchor in self._used]:
                mapping.pop(key, None)
        return mapping

    def _key(self, event: Any) -> str:
        if event.anchor is not None:
            raise fault("an anchor on a key", line=_line(event), hint="put it before the value")
        if event.tag is not None:
            raise fault(f"a YAML tag ({shown(event.tag)})", line=_line(event), hint="remove it")
        key = _yaml_scalar(event.value, _line(event), ()) if event.implicit[0] else _text(event.value, _line(event))
        if not isinstance(key, str):
            raise fault(
                f"the key {shown(key)} is not text",
                line=_line(event),
                hint="keys must be text; put it in quotes if it is meant as a key",
            )
        self._num_chars += len(key) + 1
        return key

    def _merged(self, path: KeyPath, event: Any, line: int, *, is_item: bool = False) -> list[tuple[_Anchored, Line]]:
        """Return the mappings that a merge key names: one, or a list of them."""
        if isinstance(event, yaml.SequenceStartEvent) and event.anchor is None and not is_item:
            mappings: list[tuple[_Anchored, Line]] = []
            while not isinstance(item := self._next(), yaml.SequenceEndEvent):
                self._record.note((*path, len(mappings)), _line(item))
                mappings += self._merged((*path, len(mappings)), item, line, is_item=True)
            return mappings
        if isinstance(event, yaml.AliasEvent):
            anchored = self._meant(event)
        else:
            begin, num_chars = len(self._record.order), self._num_chars
            value = self._value(path, event)
            anchored = self._anchored(path, begin, value, line, self._num_chars - num_chars)
        if not isinstance(anchored.value, dict):
            raise fault(
                f"a merge key (<<) for {shown(anchored.value)}",
                line=_line(event),
                hint="it needs a mapping, or a list of mappings",
            )
        return [(anchored, Line(line))]

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
        if "nesting depth" in said or "nesting depth" in str(getattr(error, "context", None)):  # PyYAML's own limit
            raise fault(f"nested more than {MAX_DEPTH} levels deep", line=line) from None
        lines = self._text.splitlines()
        if line and line <= len(lines) and "\t" in re.match(r"\s*", lines[line - 1])[0]:  # type: ignore[index]
            raise fault("a tab in the indentation", line=line, hint="indent YAML with spaces") from None
        hint = next((hint for words, hint in _YAML_HINTS.items() if words in said), "")
        raise fault(f"this is not valid YAML: {said}", line=line, hint=hint) from None


def _marked(sign: str, name: str) -> str:
    """Return an anchor or alias for a message, marked as a quote: ordinary text may look like one."""
    return quote.mark(sign + (name if len(name) <= quote.MAX_NAME else f"{name[: quote.MAX_NAME - 1]}…"))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _yaml_scalar(text: str, line: int, path: KeyPath) -> Any:
    if text == "":
        raise fault(
            EMPTY,
            line=line,
            key=dotted(path),
            hint="write the value, or remove the key",
            fix={} if path[-1:] in _MUST or not path else {dotted(path): None},
        )
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
            f"some YAML readers read {shown(text)} as a number, others as another number or as text",
            line=line,
            hint="write the number plainly, or put it in quotes if it is text",
        )
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
#: Python's words, and those of others.
_JSON_FOREIGN = {
    "true": "write true",
    "false": "write false",
    "none": "write null",
    "null": "write null",
    "nan": "numbers must be finite",
    "infinity": "numbers must be finite",
    "-infinity": "numbers must be finite",
}
_JSON_HINTS = {
    "'": "put text in double quotes",
    "#": "JSON has no comments; YAML and TOML do",
    "/": "JSON has no comments; YAML and TOML do",
    "}": "is there an extra comma?",
    "]": "is there an extra comma?",
}


class _Json:
    """A JSON parser that records the line of every key; strings are parsed by the json module."""

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
        self._at = _JSON_SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
        return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> bool:
        taken = self._peek() == character
        self._at += taken
        return taken

    def _refuse(self, expected: str) -> NoReturn:
        there = self._peek()
        seen = f"found {shown(there)}" if there else "the file ends"
        raise fault(
            f"this is not valid JSON: {seen} instead of {expected}", line=self._line(), hint=_JSON_HINTS.get(there, "")
        )

    def _value(self, path: KeyPath) -> Any:
        match self._peek():
            case "{":
                return self._mapping(path)
            case "[":
                return self._sequence(path)
            case '"':
                begin, value = self._at, self._string()
                self._record.spans[path] = (begin, self._at)
                return value
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
            raise fault(f"this is not valid JSON: {error.msg[0].lower()}{error.msg[1:]}", line=line) from None
        return _text(value, line)

    def _number_or_word(self) -> Any:
        line = self._line()
        if number := _JSON_NUMBER.match(self._text, self._at):
            self._at = number.end()
            return _float(number[0], line) if number[1] or number[2] else _integer(number[0], line)
        if not (word := _JSON_WORD.match(self._text, self._at)):
            self._refuse("a value")
        if word[0] not in _JSON_WORDS:
            hint = _JSON_FOREIGN.get(word[0].lower(), "put text in double quotes")
            raise fault(f"{shown(word[0])} is not a JSON value", line=line, hint=hint)
        self._at = word.end()
        return _JSON_WORDS[word[0]]


# --- TOML -------------------------------------------------------------------------------------------------------------

_TOML_PLACE = re.compile(r"(.*?) ?\(at (?:line (\d+), column \d+|end of document)\)", re.DOTALL)
_TOML_TWICE = re.compile(r"Cannot overwrite|Cannot declare|Cannot mutate|Cannot redefine|Duplicate inline")
_TOML_HINTS = {
    "Invalid value": "put text in quotes; write true and false in lower case",
    "Invalid statement": "a line must be `key = value`, or [section]",
    "Expected '=' after a key": "a line must be `key = value`, or [section]",
}


def _toml(text: str, record: _Record) -> Any:
    # Scan first: the scan enforces the limits, which tomllib does not (a key of 100,000 dots takes it minutes).
    latest: dict[int, KeyPath] = {}

    def note(path: KeyPath, line: int) -> None:
        record.note(path, line, once=False)
        latest[line] = path

    def place(path: KeyPath, begin: int, stop: int) -> None:
        record.spans[path] = (begin, stop)

    end = toml_lines.scan(text, note, place)
    known = text if end is None else text[: end + 200]
    try:
        data = tomllib.loads(known)
    except tomllib.TOMLDecodeError as error:
        _refuse_toml(str(error), known, latest, record)
    except (ValueError, RecursionError):  # Python parses no number of more than 4300 digits
        raise fault("this is not valid TOML: a number is too large, or it is nested too deeply") from None
    if end is not None:
        raise fault("this is not valid TOML", line=text.count("\n", 0, end) + 1)
    return _plain(data, (), record.lines)


def _refuse_toml(said: str, text: str, latest: Mapping[int, KeyPath], record: _Record) -> NoReturn:
    place = _TOML_PLACE.fullmatch(said)
    what = place[1] if place else said
    line = int(place[2]) if place and place[2] else text.count("\n") + 1
    if _TOML_TWICE.match(what):
        path = latest.get(line, ())
        first = f"; first on line {record.lines[path]}" if path else ""
        raise fault(f"occurs twice{first}", line=line, key=dotted(path)) from None
    raise fault(
        f"this is not valid TOML: {what[:1].lower()}{what[1:]}",
        line=line,
        hint=next((hint for words, hint in _TOML_HINTS.items() if words in what), ""),
    ) from None


def _plain(value: Any, path: KeyPath, lines: Mapping[KeyPath, int]) -> Any:
    """Return a TOML value as plain data, rejecting types that the other formats lack."""
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
