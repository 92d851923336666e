"""The preflight helper's answers, and their lines of JSON.

A helper reads files that its submitter has written, and as a unit has that submitter's permissions: its answer is not
trusted. A line without the shape below is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from honed.job.plan_file import PlanFile
from honed.run.rehearsed import Kept
from honed.run.snapshot import Missing
from honed.system.error import MAX_CHARS, Fix, HonedError, from_dict

#: The range that SQLite and every JSON reader support.
_Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
#: Maximum nesting of a plan, which is copied and written by recursion.
MAX_DEPTH = 50
#: Maximum length of a job's name or number.
MAX_NAME_CHARS = 255


@dataclass(frozen=True)
class Passed:
    """A job file without faults: the job may run, or its plan waits for another job's output or for a fetch."""

    id: int  #: of the request
    spec: dict[str, Any]  #: as validated
    plan: PlanFile  #: without what the daemon adds
    output_dir: str
    warnings: tuple[str, ...]  #: for the log, without quoted content; those in `plan` include it
    lines: Mapping[str, int]  #: line numbers of the job file's top-level keys
    references: Mapping[str, str]  #: key → name of the job whose output it means
    waits_for: Mapping[str, str]  #: those of them whose output is not there yet
    needs_fetch: Missing | None  #: a base model or data set that is not in the cache and may be fetched
    members: tuple[
        dict[str, Any], ...
    ] = ()  #: of a sweep: `document`, `values` and `halving` of each job; the rest is the first's
    rehearsed: Kept | None = None  #: a new answer of a rehearsal, to be kept for the user's next jobs

    def to_line(self) -> bytes:
        answer = {
            "id": self.id,
            "ok": True,
            "spec": self.spec,
            "plan": self.plan.document,
            "output_dir": self.output_dir,
            "warnings": list(self.warnings),
            "lines": dict(self.lines),
            "references": dict(self.references),
            "waits_for": dict(self.waits_for),
            "needs_fetch": asdict(self.needs_fetch) if self.needs_fetch else None,
        }
        if self.members:
            answer["members"] = list(self.members)
        if self.rehearsed:
            answer["rehearsed"] = self.rehearsed.as_dict()
        return json.dumps(answer).encode() + b"\n"


@dataclass(frozen=True)
class Refused:
    """A job file with a fault, or one that could not be checked."""

    id: int  #: of the request; null in the line if the request could not be read
    error: HonedError
    rehearsed: Kept | None = None  #: as above

    def to_line(self) -> bytes:
        answer: dict[str, Any] = {"id": self.id, "ok": False, "error": self.error.as_dict()}
        if self.rehearsed:
            answer["rehearsed"] = self.rehearsed.as_dict()
        return json.dumps(answer).encode() + b"\n"


Answer = Passed | Refused


@dataclass(frozen=True)
class Postponed:
    """A job file whose check a fault of the machine has ended, such as too many open files: it is checked again."""

    id: int
    fault: str
    is_of_helper: bool = False  #: it may be the helper's own; not in the line

    def to_line(self) -> bytes:
        return json.dumps({"id": self.id, "ok": None, "fault": self.fault}).encode() + b"\n"


# -- the shape of the lines --------------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("control characters, or unpaired surrogates")
    return text


def _path(text: str) -> str:
    if b"\0" in os.fsencode(text):
        raise ValueError("not a path")
    return text


def _bounded(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the plan. Raises ValueError if its numbers or its nesting are beyond those of a real one."""
    values: list[Any] = [plan]
    for _ in range(MAX_DEPTH):
        parts = [part for value in values for part in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(part, int) and abs(part) > 2**53 for part in parts):
            raise ValueError("a number that is too large")
        if not (values := [part for part in parts if isinstance(part, dict | list)]):
            return plan
    raise ValueError("nested too deeply")


_Name = Annotated[str, Field(max_length=MAX_NAME_CHARS), AfterValidator(_printable)]
_Path = Annotated[str, AfterValidator(_path)]


class _Retry(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    max_attempts: _Integer


class _Resources(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    gpus: _Integer


_Class = TypedDict("_Class", {"class": NotRequired[_Name | None]})


class _Spec(_Class):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    kind: str
    retry: _Retry
    resources: _Resources
    name: NotRequired[_Name | None]
    priority: NotRequired[_Integer]
    depends_on: NotRequired[list[_Name] | None]
    pin: NotRequired[bool]
    notify: NotRequired[dict[str, Any] | None]
    time_limit_sec: NotRequired[float | None]
    adapter: NotRequired[str | None]
    group: NotRequired[_Group | None]


class _Halving(TypedDict):
    min_steps: _Integer
    eta: Annotated[int, Field(ge=2, le=1000)]


class _Group(TypedDict):
    id: _Integer
    name: _Name
    file: _Name
    values: Annotated[dict[str, Any], AfterValidator(_bounded)]
    halving: NotRequired[_Halving | None]


class _Member(TypedDict):
    document: Annotated[dict[str, Any], AfterValidator(_bounded)]
    values: Annotated[dict[str, Any], AfterValidator(_bounded)]
    halving: NotRequired[_Halving | None]


class _Missing(TypedDict):
    repo_id: str
    revision: str
    repo_type: Literal["model", "dataset"]
    name: str | None
    split: str | None


class _Error(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    code: str
    message: str
    hint: str
    fix: NotRequired[Fix]
    evidence: NotRequired[str]


class _Rehearsed(TypedDict):
    key: str
    outcome: Literal["passed", "refused", "unknown"]
    error: _Error | None
    why: str


class _PassedLine(TypedDict):
    id: int
    ok: Literal[True]
    spec: _Spec
    plan: Annotated[dict[str, Any], AfterValidator(_bounded)]
    output_dir: _Path
    warnings: list[str]
    lines: dict[str, int]
    references: dict[str, _Name]
    waits_for: dict[str, _Name]
    needs_fetch: _Missing | None
    members: NotRequired[list[_Member]]
    rehearsed: NotRequired[_Rehearsed]


class _RefusedLine(TypedDict):
    id: int
    ok: Literal[False]
    error: _Error
    rehearsed: NotRequired[_Rehearsed]


class _PostponedLine(TypedDict):
    id: int
    ok: None
    fault: Annotated[str, Field(max_length=MAX_CHARS), AfterValidator(_printable)]


_LINE: TypeAdapter[Any] = TypeAdapter(
    Annotated[_PassedLine | _RefusedLine | _PostponedLine, Field(discriminator="ok")],
    config=ConfigDict(defer_build=True),
)


def read(line: bytes, request_id: int) -> Answer | Postponed | None:
    """Return the answer to this request; None for anything else."""
    try:
        answer: dict[str, Any] = _LINE.validate_python(json.loads(line), strict=True)
        kept = Kept.from_dict(answer["rehearsed"]) if "rehearsed" in answer else None
    except (ValueError, RecursionError, ValidationError):
        return None
    if answer.pop("id") != request_id:
        return None
    if (is_ok := answer.pop("ok")) is None:
        return Postponed(request_id, answer["fault"])
    if not is_ok:
        return Refused(request_id, from_dict(answer["error"]), kept)
    missing = answer["needs_fetch"]
    changed = {
        "plan": PlanFile(answer["plan"]),
        "warnings": tuple(answer["warnings"]),
        "needs_fetch": Missing(**missing) if missing else None,
        "members": tuple(answer.get("members", ())),
        "rehearsed": kept,
    }
    return Passed(request_id, **{**answer, **changed})
