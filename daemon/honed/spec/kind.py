"""The kinds of jobs, and what the code asks of each.

A kind is an entry here, and a recipe of its name in worker/recipe/: what a run of it does. The form of its rows is a
module of inputs/form/. Kinds that train obey the same rules (rule.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    name: str
    trains: bool  #: weights change, step by step
    resumes: bool  #: an interrupted run continues from its last checkpoint
    makes: Literal["trained", "merged", ""]  #: its output: what was trained, base and adapter as one, or none
    form: str  #: of its rows; empty for a kind that encodes none, and loads no model for them
    formats: tuple[str, ...]  #: of that form, as values of a data set's `format`
    has_batches: bool  #: of a size that can be made smaller where memory is short
    needs_device: bool  #: it runs on a GPU where there is one
    freezes_base: bool  #: nothing of the model changes

    @property
    def merges(self) -> bool:
        return self.makes == "merged"

    @property
    def has_rows(self) -> bool:
        return bool(self.form)


_TEXT = ("messages", "prompt_completion", "alpaca", "sharegpt", "text")

KINDS = {
    kind.name: kind
    for kind in (
        Kind("sft", True, True, "trained", "text", _TEXT, has_batches=True, needs_device=True, freezes_base=False),
        Kind("merge", False, False, "merged", "", (), has_batches=False, needs_device=False, freezes_base=True),
        Kind("evaluate", False, False, "", "text", _TEXT, has_batches=True, needs_device=True, freezes_base=True),
    )
}

if TYPE_CHECKING:
    Name = str
    Format = str
else:  # in the order of the tables, for the documentation and for messages
    Name = Literal[tuple(KINDS)]
    Format = Literal["auto", *dict.fromkeys(name for kind in KINDS.values() for name in kind.formats)]


class _Spec(Protocol):
    @property
    def kind(self) -> str: ...


def of(spec: _Spec | Mapping[str, Any]) -> Kind:
    """Return the kind of a job, by its spec or the spec in its plan. Raises KeyError for a damaged plan."""
    return KINDS[spec.get("kind", "sft") if isinstance(spec, Mapping) else spec.kind]
