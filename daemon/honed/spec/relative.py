"""Conversion of relative paths in a job file to absolute ones, before honectl checks or submits it.

Only those values change, so that comments and lines stay in place. A file that is dropped into incoming/ by hand has
lost its original directory, so its paths must be absolute.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from honed.spec import document, pydantic_errors, synonym
from honed.spec.advice import is_data_file
from honed.spec.field import VARIABLE, names_place
from honed.spec.problem import KeyPath, dotted, texts, written
from honed.spec.spec import JobSpec
from honed.system.error import HonedError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: Our keys that other tools' names for paths correspond to.
_PLACES = {"base_model", "adapter", "output_dir", "chat_template", "datasets", "eval_datasets", "datasets.path"}


@dataclass(frozen=True)
class Change:
    """One path that was made absolute."""

    key: str
    given: str
    made: str

    def __str__(self) -> str:
        return f"{self.key}: {self.given} is resolved to {self.made}"


@dataclass(frozen=True)
class Resolved:
    """A job file without relative paths: the file itself, or a copy that exists as long as the context."""

    path: Path
    changes: tuple[Change, ...] = ()


@contextlib.contextmanager
def resolved(path: Path) -> Iterator[Resolved]:
    """Provide a job file with absolute paths. An unreadable file is passed on unchanged, for the check to reject."""
    try:
        text, changes = absolute(path.read_bytes(), path.suffix, path.absolute().parent)
    except (OSError, HonedError):
        text, changes = b"", ()
    if not changes:
        yield Resolved(path)
        return
    with tempfile.TemporaryDirectory(prefix="honectl-") as directory:
        copy = Path(directory) / path.name
        copy.write_bytes(text)
        yield Resolved(copy, changes)


def absolute(data: bytes, suffix: str, place: Path) -> tuple[bytes, tuple[Change, ...]]:
    """Return a job file's text with absolute paths, and the changes. Raises SpecError if it cannot be parsed."""
    parsed = document.parse(data, suffix, is_lenient=True)
    edits: dict[tuple[int, int], str] = {}
    changes = []
    for path, value in texts(parsed.data):
        span = parsed.spans.get(path)
        if span is None or (made := _made(path, value, place)) is None or "\n" in parsed.text[slice(*span)]:
            continue
        is_quoted = suffix.lower() not in (".yaml", ".yml") or parsed.text[span[0]] in "'\""
        edits[span] = json.dumps(made, ensure_ascii=False) if is_quoted else written(made)
        changes.append(Change(dotted(path), value, made))
    text = parsed.text
    for (begin, end), new in sorted(edits.items(), reverse=True):
        text = text[:begin] + new + text[end:]
    return text.encode(), tuple(changes)


def _theirs(path: KeyPath) -> str | None:
    """Return our key that another tool's name for a path corresponds to."""
    name, section = str(path[-1]), ".".join(str(part) for part in path[:-1] if isinstance(part, str))
    if len(path) > 1 and path[-2] in synonym.SECTIONS:
        section, renamed = synonym.SECTIONS[str(path[-2])]
        name = renamed.get(name, name)
        if names_place(pydantic_errors.annotation((name,), JobSpec)):
            return name
    theirs = synonym.find(name, section)
    return theirs.key if theirs is not None and theirs.key in _PLACES else None


def _is_place(path: KeyPath, given: str) -> bool:
    """Tell whether a value that a shell would have expanded is a path."""
    return names_place(pydantic_errors.annotation(path, JobSpec)) or (_theirs(path) is not None and "," not in given)


def _made(path: KeyPath, value: str, place: Path) -> str | None:
    """Return the absolute path of a value; None if it is already absolute, or not a path."""
    if not value or value.startswith("job:") or "://" in value or "\x00" in value:
        return None
    if not os.path.lexists(place / value):  # otherwise it is a name that contains such characters
        value, given = os.path.expanduser(os.path.expandvars(value)), value  # noqa: PTH111  (~user, too)
        if VARIABLE.search(value) or value.startswith("~"):
            return None  # unset variable or unknown user: for the check to reject
        if value != given and value.startswith("/"):
            return os.path.normpath(value) if _is_place(path, given) else None
    if value.startswith("/"):
        return None
    is_marked = value.startswith(("./", "../")) or value in (".", "..")
    if not names_place(pydantic_errors.annotation(path, JobSpec)):
        if (theirs := _theirs(path)) is None:
            return None
        if not (is_marked or (theirs == "output_dir") or (is_data_file(value) and "," not in value)):
            return None
    if path[-1] == "training_chat_template" and "/" not in value and not Path(value).suffix:
        return None  # a word: `trl`, or something that the check rejects
    made = os.path.normpath(place / value)
    if is_marked or os.path.exists(made):  # noqa: PTH110
        return made
    if path[-1] == "base_model" and (_HUB_ID.fullmatch(value) or "/" not in value):
        return None
    if path[-1] == "path" and _HUB_ID.fullmatch(value) and not is_data_file(value):
        return None
    if path[-1] == "adapter" and (_HUB_ID.fullmatch(value) or synonym.adapter_word(value) is not None):
        return None
    if path[-1] == "chat_template" and synonym.template_word(value) is not None:
        return None
    return made
