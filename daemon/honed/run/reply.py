"""Validation of the preflight helper's replies.

A helper reads files that its submitter has written, and as a unit has that submitter's permissions: its reply is not
trusted. A reply without the shape below is ignored.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

#: The range that SQLite and every JSON reader support.
_Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
#: Maximum length of a job's name or number.
MAX_NAME_CHARS = 255


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("control characters, or half ones")
    return text


def _path(text: str) -> str:
    if b"\0" in os.fsencode(text):
        raise ValueError("no path")
    return text


_Name = Annotated[str, Field(max_length=MAX_NAME_CHARS), AfterValidator(_printable)]
_Path = Annotated[str, AfterValidator(_path)]


class _Retry(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    max_attempts: _Integer


class _Resources(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    gpus: _Integer


class _Spec(TypedDict):
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
    fix: NotRequired[dict[str, Any]]


class _Accepted(TypedDict):
    id: int
    ok: Literal[True]
    spec: _Spec
    plan: dict[str, Any]
    output_dir: _Path
    warnings: list[str]
    lines: dict[str, int]
    references: dict[str, _Name]
    waits_for: dict[str, _Name]
    needs_fetch: _Missing | None


class _Refused(TypedDict):
    id: int
    ok: Literal[False]
    error: _Error


_ANSWER: TypeAdapter[Any] = TypeAdapter(Annotated[_Accepted | _Refused, Field(discriminator="ok")])


def read(line: bytes, request_id: int) -> dict[str, Any] | None:
    """Return the reply to this request; None for anything else."""
    try:
        answer: dict[str, Any] = _ANSWER.validate_python(json.loads(line), strict=True)
    except (ValueError, RecursionError, ValidationError):
        return None
    return answer if answer["id"] == request_id else None
