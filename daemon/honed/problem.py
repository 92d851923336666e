"""What is wrong with a job file: each problem with its key and line, all of them as one `SpecError`.

Where a check of something that the file names says no, `locate` finds the key and the line that named it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from honed.error import HonedError, ModelError, SpecError

#: Where a value stands: keys, and numbers of list items.
KeyPath = tuple[str | int, ...]

#: Problems that are told; a file with more is not a job file with mistakes.
MAX_PROBLEMS = 50
#: Characters of a key or a value that are shown: what stands in a job file is another person's text.
MAX_SHOWN = 60


@dataclass(frozen=True)
class Problem:
    """One thing wrong. `str()` is one line for a person."""

    key: str  #: dotted, list items by number: `datasets.0.path`; empty where the text itself is at fault
    line: int | None  #: 1-based
    message: str
    hint: str = ""  #: what to do, a few words

    def __str__(self) -> str:
        line = f"line {self.line}: " if self.line is not None else ""
        key = f"{self.key}: " if self.key else ""
        return f"{line}{key}{self.message}" + (f" ({self.hint})" if self.hint else "")


class InvalidSpecError(SpecError):
    """A job file with problems; the message has one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        told = [str(problem) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            told.append(f"and {len(problems) - MAX_PROBLEMS} more")
        super().__init__("\n".join(told), hint="docs/job-spec.md has every key")
        self.problems = tuple(problems)


def fault(message: str, *, line: int | None = None, key: str = "", hint: str = "") -> InvalidSpecError:
    """The error for one problem."""
    return InvalidSpecError([Problem(key=key, line=line, message=message, hint=hint)])


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    """The line of a key, or of what it would stand in."""
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)


def locate(error: HonedError, data: Mapping[str, Any], lines: Mapping[KeyPath, int]) -> None:
    """Put the line before a refusal's message that begins with a key, and both before one that begins with the path
    that a key names. One that is about the job as a whole, such as its need of memory, is left as it is."""
    if isinstance(error, InvalidSpecError):
        return
    named = re.match(r"([a-z_]+(?:\.\w+)*): ", error.message)
    path = tuple(int(part) if part.isdecimal() else part for part in named[1].split(".")) if named else ()
    if path and path[:1] in lines:
        error.message = f"line {line_of(path, lines)}: {error.message}"
        return
    about = [(text, path) for path, text in _texts(data, ()) if _is_about(error.message, text)]
    path = max(about, key=lambda each: len(each[0]))[1] if about else ()
    if not path and isinstance(error, ModelError) and "adapter" not in data:
        path = ("base_model",)  # a hub id's files lie in the cache
    if (line := line_of(path, lines)) is not None:
        error.message = f"line {line}: {dotted(path)}: {error.message}"


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    match value:
        case str():
            yield path, value
        case dict():
            for key, each in value.items():
                yield from _texts(each, (*path, key))
        case list():
            for index, each in enumerate(value):
                yield from _texts(each, (*path, index))


def _is_about(message: str, text: str) -> bool:
    return text.startswith("/") and re.match(re.escape(text.rstrip("/")) + r"(?:/|: )", message) is not None


def dotted(path: KeyPath) -> str:
    """`("datasets", 0, "path")` as `datasets.0.path`; a key that is no plain word is quoted and cut."""
    return ".".join(str(part) if isinstance(part, int) or _is_plain(part) else shown(part) for part in path)


def shown(value: Any) -> str:
    """A value as people write it, cut, and without anything that a terminal would act on."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return str(value)
        case str():
            cut = value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + "…"
            return repr(cut)
        case dict():
            return f"a mapping with the keys {', '.join(map(shown, list(value)[:3]))}" if value else "an empty mapping"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return type(value).__name__


def _is_plain(key: str) -> bool:
    return len(key) <= MAX_SHOWN and key.isascii() and key.replace("-", "_").isidentifier()
