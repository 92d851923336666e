"""A form of rows: its formats, each with its columns, and how a row of them becomes its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from honed.inputs.message import unpacked
from honed.inputs.misfit import Misfit
from honed.spec.kind import KINDS
from honed.system.error import DatasetError

#: The columns that hold a conversation; the first that exists is read.
TURNS = ("messages", "conversations", "conversation")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """Rows with the same columns."""

    needs: str  #: its columns, for people
    reads: tuple[str, ...]  #: the columns that it reads; one of TURNS, too, if it has turns
    fits: Callable[[Row], bool]  #: True for a row with its columns
    answers: Callable[..., list[dict[str, Any]]]
    """Convert a row, `has_chat_template` or not, to the fields of an Example, once per answer. Raises RowError."""
    has_turns: bool = False  #: each is trained on or not by its own `weight`


@dataclass(frozen=True)
class Form:
    """The rows of a kind of job."""

    formats: Mapping[str, Format]  #: in the order in which they are recognised
    num_answers: int = 1  #: of every row: so many sequences of tokens are trained on together
    misfit: Callable[[Row], Misfit | None] = lambda _row: None  #: the apparent kind of a row that fits no format

    @property
    def hint(self) -> str:
        return "formats: " + "; ".join(f"{name} needs {item.needs}" for name, item in self.formats.items())


@cache
def of(name: str) -> Form:
    """Return a form by its name: the `FORM` of the module of that name."""
    form: Form = import_module(f"{__package__}.{name}").FORM
    return form


def of_format(name: str) -> Format:
    """Return a format, of whatever form. Raises DatasetError if there is none of this name."""
    for kind in KINDS.values():
        if name in kind.formats:
            return of(kind.form).formats[name]
    raise DatasetError(f"no such format: {name}", hint=of("text").hint)


def turns(row: Row) -> list[Any] | None:
    """Return a row's conversation; None if it has none."""
    value = next((unpacked(row[name]) for name in TURNS if name in row), None)
    return value if isinstance(value, list) else None
