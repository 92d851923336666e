"""Problems of a job file: each with its key and line, all of them combined into one `SpecError`.

For an error about something that the file names, `locate` finds the key and line that name it.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Self, TypedDict

from honed.system import manual, quote
from honed.system.error import Fix, HonedError, ModelError, SpecError, plain

#: The path of a value: keys, and indices of list items.
KeyPath = tuple[str | int, ...]

#: Maximum number of reported problems; a file with more is probably not a job file.
MAX_PROBLEMS = 50
#: Maximum number of characters shown of a key or value: a job file is another person's text.
MAX_SHOWN = 60
#: The quotes that `dotted` puts around a key that is not a plain word.
_QUOTED = re.compile("['\"]")


class Line(int):
    """A line of a job file, from 1. `via` is the line of the alias or merge key that brought in the value."""

    via: int | None

    def __new__(cls, line: int, via: int | None = None) -> Self:
        made = super().__new__(cls, line)
        made.via = via
        return made


@dataclass(frozen=True)
class Problem:
    """One problem. `str()` is one line for people."""

    key: str  #: dotted, list items by index: `datasets.0.path`; empty if the text itself is wrong
    line: int | None  #: 1-based
    message: str
    hint: str = ""  #: the fix in a few words
    fix: Mapping[str, Any] = field(default_factory=dict)  #: the same as data, if it is an edit: see HonedError.fix

    def __str__(self) -> str:
        via = f" (merged in on line {self.line.via})" if isinstance(self.line, Line) and self.line.via else ""
        line = f"line {self.line}{via}: " if self.line is not None else ""
        key = f"{key_words(self.key)}: " if self.key else ""
        return f"{line}{key}{self.message}" + (f" ({self.hint})" if self.hint else "")


class InvalidSpecError(SpecError):
    """A job file with problems; the message has one per line."""

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        lines = [str(problem) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
        super().__init__("\n".join(lines), hint=hint or manual.all_keys("honed-job.5"), fix=_together(problems))
        self.problems = tuple(problems)


def _together(problems: Sequence[Problem]) -> Fix:
    """Combine the fixes of several problems; if two set the same key, the first wins."""
    fix: Fix = {}
    for problem in problems:
        for key, value in problem.fix.items():
            if isinstance(value, dict) and isinstance(fix.get(key), dict):
                fix[key] = value | fix[key]
            fix.setdefault(key, value)
    return fix


class Fault(TypedDict):
    """A problem of a job file, as in `honectl check --json`."""

    key: str
    line: int | None
    code: str
    message: str
    hint: str
    fix: Fix | None
    evidence: NotRequired[str]


def faults(error: HonedError) -> list[Fault]:
    """List the problems of a job file one by one."""
    if isinstance(error, InvalidSpecError):
        return [
            _fault(
                problem.key,
                problem.line,
                error.code,
                plain(quote.hide(problem.message)),
                plain(quote.show(problem.message)),
                plain(quote.show(problem.hint)),
                problem.fix,
            )
            for problem in error.problems
        ]
    place = f"line {error.line}: " if error.line is not None else ""
    message, whole = (text.removeprefix(place).removeprefix(f"{error.key}: ") for text in (error.message, error.shown))
    return [_fault(error.key, error.line, error.code, message, whole, error.hint, error.fix)]


def _fault(key: str, line: int | None, code: str, message: str, whole: str, hint: str, fix: Mapping[str, Any]) -> Fault:
    fault: Fault = {"key": key, "line": line, "code": code, "message": message, "hint": hint, "fix": dict(fix) or None}
    if whole != message:
        fault["evidence"] = whole
    return fault


def mended(data: Mapping[str, Any], fix: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a fix to a job file's content. Removals come first; sections that become empty stay."""
    content: dict[str, Any] = copy.deepcopy(dict(data))
    for path in sorted((as_path(key) for key, value in fix.items() if value is None), key=_last_first):
        above = at(content, path[:-1])
        if isinstance(above, dict):
            above.pop(path[-1], None)
        elif isinstance(above, list) and isinstance(path[-1], int) and path[-1] < len(above):
            del above[path[-1]]
    for key, value in fix.items():
        if value is not None:
            _set(content, as_path(key), copy.deepcopy(value))
    return content


def fix_lines(fix: Mapping[str, Any]) -> list[str]:
    """Return a fix as text, one change per line."""
    return [f"{key}: removed" if value is None else f"{key}: {written(value)}" for key, value in fix.items()]


def key_words(key: str) -> str:
    """Return a dotted key for a message; marked as a quote if it may be a sentence, as in a file of rows."""
    return quote.mark(key) if _QUOTED.search(key) else key


def rewritten(value: Any) -> str:
    """Return a value as written in a job file, marked as a quote."""
    return quote.mark(written(value))


def written(value: Any) -> str:
    """Return a value as it is written in a job file, on one line."""
    match value:
        case str():
            return value if _NO_QUOTES.fullmatch(value) else json.dumps(value, ensure_ascii=False)
        case dict():
            return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(written, value)) + "]"
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else str(value)
        case _:
            return json.dumps(value)


#: Texts that YAML cannot read as anything else, such as a number, a date or true.
_NO_QUOTES = re.compile(r"(?!(?i:true|false|null)$|[\d.]+e?[\d.+-]*$|0[xob]|\d{4}-\d)[A-Za-z0-9/][\w./:-]*(?<!:)")


def as_path(key: str) -> KeyPath:
    """Convert a dotted key to a path; a number that no list can reach stays a text."""
    return tuple(int(part) if part.isdecimal() and len(part) <= 18 else part for part in key.split("."))


def _last_first(path: KeyPath) -> tuple[Any, ...]:
    """Sort key: later list items first, so that earlier indices stay valid; a list's items before the list."""
    return (-len(path), *(-part if isinstance(part, int) else 0 for part in path))


def at(value: Any, path: KeyPath) -> Any:
    """Return the value at a path; None if there is none."""
    for part in path:
        if isinstance(value, list):
            value = value[part] if isinstance(part, int) and part < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _set(content: Mapping[str, Any], path: KeyPath, value: Any) -> None:
    above: Any = content
    for part, below in itertools.pairwise(path):
        if not isinstance(inner := at(above, (part,)), list if isinstance(below, int) else dict):
            inner = above[part] = {}
        above = inner
    there = at(above, path[-1:])
    above[path[-1]] = there | value if isinstance(there, dict) and isinstance(value, dict) else value


def fault(
    message: str, *, line: int | None = None, key: str = "", hint: str = "", fix: Mapping[str, Any] | None = None
) -> InvalidSpecError:
    """Return the error for one problem."""
    return InvalidSpecError([Problem(key=key, line=line, message=message, hint=hint, fix=fix or {})])


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """Return the line of a key, or of the nearest section that would contain it."""
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)


def locate(error: HonedError, data: Mapping[str, Any], lines: Mapping[KeyPath, int]) -> None:
    """Add the line to an error whose message begins with a key, and key and line to one whose message begins with a
    path that a key names. An error about the whole job, such as its memory, is left unchanged.
    """
    if isinstance(error, InvalidSpecError):
        return
    named = re.match(r"([a-z_]+(?:\.\w+)*): ", error.message)
    path = tuple(int(part) if part.isdecimal() else part for part in named[1].split(".")) if named else ()
    if path and path[:1] in lines:
        error.key, error.line = dotted(path), line_of(path, lines)
        error.surround(f"line {error.line}: ")
        return
    about = [(text, path) for path, text in texts(data) if _is_about(error.message, text)]
    path = max(about, key=lambda item: len(item[0]))[1] if about else ()
    if not path and isinstance(error, ModelError) and "adapter" not in data:
        path = ("base_model",)  # a hub model's files are in the cache
    if (line := line_of(path, lines)) is not None:
        error.key, error.line = dotted(path), line
        error.surround(f"line {line}: {error.key}: ")


def texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in plain data with its path."""
    match value:
        case str():
            yield path, value
        case dict():
            for key, item in value.items():
                yield from texts(item, (*path, key))
        case list():
            for index, item in enumerate(value):
                yield from texts(item, (*path, index))


def _is_about(message: str, text: str) -> bool:
    return text.startswith("/") and re.match(re.escape(text.rstrip("/")) + r"(?:/|: )", message) is not None


def dotted(path: KeyPath) -> str:
    """Convert `("datasets", 0, "path")` to `datasets.0.path`; keys that are not plain words are quoted."""
    return ".".join(str(part) if isinstance(part, int) or _is_plain(part) else _cut(part) for part in path)


def shown(value: Any) -> str:
    """Return a value as people write it, truncated, without terminal control characters, and marked as a quote."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return quote.mark(str(value))
        case str():
            return quote.mark(_cut(value))
        case dict():
            keys = ", ".join(map(shown, list(value)[:3]))
            return f"a mapping{quote.aside(f' with the keys {keys}')}" if value else "an empty mapping"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return type(value).__name__


def _cut(value: str) -> str:
    return repr(value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + "…")


def _is_plain(key: str) -> bool:
    return len(key) <= MAX_SHOWN and key.isascii() and key.replace("-", "_").isidentifier()
