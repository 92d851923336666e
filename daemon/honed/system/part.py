"""Objects of any length, in parts: a part has some of the keys, and of a key with a long value a piece of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: A part of an object; None is none, and gives others their turn.
Part = Mapping[str, Any] | None


def join(whole: dict[str, Any], part: Part) -> None:
    """Add a part to those before it: lists and objects grow."""
    for key, value in (part or {}).items():
        match whole.get(key):
            case list() as rows:
                rows.extend(value)
            case dict() as fields:
                fields.update(value)
            case _:
                whole[key] = value


def joined(parts: Iterable[Part]) -> dict[str, Any]:
    """Return an object as a whole."""
    whole: dict[str, Any] = {}
    for part in parts:
        join(whole, part)
    return whole
