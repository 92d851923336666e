"""The kinds of jobs, and what the code asks of each. What a run of a kind does is its recipe (worker/recipe/), and its
rules are in rule.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Kind:
    """A kind of job."""

    name: str
    trains: bool  #: weights change, step by step
    resumes: bool  #: an interrupted run continues from its last checkpoint
    makes: Literal["trained", "merged", ""]  #: its output: what was trained, base and adapter as one, or none
    has_rows: bool  #: the model is loaded, and rows are encoded for it
    has_batches: bool  #: of a size that can be made smaller where memory is short
    needs_device: bool  #: it runs on a GPU where there is one
    freezes_base: bool  #: nothing of the model changes

    @property
    def merges(self) -> bool:
        return self.makes == "merged"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("sft", True, True, "trained", has_rows=True, has_batches=True, needs_device=True, freezes_base=False),
        Kind("evaluate", False, False, "", has_rows=True, has_batches=True, needs_device=True, freezes_base=True),
        Kind("merge", False, False, "merged", has_rows=False, has_batches=False, needs_device=False, freezes_base=True),
    )
}


class _Spec(Protocol):
    @property
    def kind(self) -> str: ...


def of(spec: _Spec | Mapping[str, Any]) -> Kind:
    """Return the kind of a job, by its spec or the spec in its plan. Raises KeyError for a damaged plan."""
    return KINDS[spec.get("kind", "sft") if isinstance(spec, Mapping) else spec.kind]
