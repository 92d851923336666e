"""The job file: reads one into a `JobSpec`, or raises an error that lists all its problems."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from honed.spec import document, other_tool, problem, pydantic_errors, rule, sweep, synonym
from honed.spec import kind as kinds
from honed.spec.problem import InvalidSpecError, KeyPath, Problem, dotted, fault, line_of, texts
from honed.spec.spec import JobSpec, ResourceSpec


def load(path: Path, *, max_bytes: int = document.MAX_BYTES) -> JobSpec:
    """Read a job file. Raises SpecError, whose message has every problem on a line of its own (`.problems`)."""
    return of(read(path, max_bytes=max_bytes))


def read(path: Path, data: bytes | None = None, *, max_bytes: int = document.MAX_BYTES) -> document.Document:
    """Parse a job file whether or not it is a valid job; `data` is its content if already read. May raise SpecError."""
    content = _read(path, max_bytes) if data is None else data
    return document.parse(content, path.suffix, max_bytes=max_bytes, is_lenient=True)


def loads(data: bytes, suffix: str, *, max_bytes: int = document.MAX_BYTES) -> JobSpec:
    """Load a job file from its content; the suffix determines the format. Raises SpecError, as `load` does."""
    return of(document.parse(data, suffix, max_bytes=max_bytes, is_lenient=True))


def of(parsed: document.Document) -> JobSpec:
    """Validate the result of `read` as a JobSpec. Raises SpecError, as `load` does."""
    return validate(parsed.data, parsed.lines, parsed.problems)


def validate(
    data: Mapping[str, Any],
    lines: Mapping[KeyPath, int] | None = None,
    unread: Mapping[KeyPath, Problem] | None = None,
) -> JobSpec:
    """Validate plain data as a JobSpec. Raises SpecError with every problem of single values and of combinations.
    `unread` has the problems of unreadable values, which are null in the data.
    """
    lines = lines or {}
    if sweep.is_in(data):  # the first of its jobs stands for all
        member = sweep.first(data, lines)
        data, lines = member.document, sweep.lines_of(member, lines)
    if secrets := [Problem(dotted(path), line_of(path, lines), *_SECRET) for path in _secrets(data)]:
        raise InvalidSpecError(secrets)  # before any message repeats a value
    spec, refusals = None, []
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        refusals = pydantic_errors.refusals(error, data, JobSpec)
    # An unknown key is reported as unknown, whatever its value.
    unknown = {one.path for one in refusals if one.is_unknown}
    unread = {path: one for path, one in (unread or {}).items() if path not in unknown}
    refusals = [one for one in refusals if one.path not in unread]
    problems = [item.problem(lines) for item in refusals] + [*unread.values()]
    refusals += [pydantic_errors.Refusal(path, "") for path in unread]
    # Valid values may still conflict; a rule that reads a rejected key is skipped.
    if (mended := _mended(data, refusals) if refusals or spec is None else spec) is not None:
        problems += rule.problems(mended, lines, except_of=[path for item in refusals for path in item.touched])
    if problems:
        problems = _followed(data, problems, lines)
        problems = sorted(problems, key=lambda one: one.line or 0)
        raise InvalidSpecError(problems, hint=other_tool.hint(data, problems))
    assert spec is not None
    spec = rule.with_batch(spec)
    if not kinds.of(spec).needs_device and "resources" not in spec.model_fields_set:
        return spec.model_copy(update={"resources": ResourceSpec(gpus=0)})  # a merge does not need a GPU
    return spec


_SECRET = ("looks like a token or a key", "a job file must not contain secrets: revoke it where it was issued")


def _secrets(data: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield the paths of values that look like secrets. Keys named like secrets are rejected anyway."""
    for path, text in texts(data):
        if synonym.SECRET_VALUES.search(text) and not synonym.SECRETS.fullmatch(str(path[-1]).lower()):
            yield path


def _followed(data: Mapping[str, Any], problems: list[Problem], lines: Mapping[KeyPath, int]) -> list[Problem]:
    """Extend the problems by fixable ones that would only appear once the problems' fixes are applied."""
    fix = InvalidSpecError(problems).fix
    if not fix:
        return problems
    content = problem.mended(data, fix)
    touched: list[KeyPath] = []
    try:
        settled: JobSpec | None = JobSpec.model_validate(content)
    except ValidationError as error:
        wrong = pydantic_errors.places(error, content)
        touched = [item.path for item in wrong]
        settled = _mended(content, wrong)
    known = {(item.key, item.message) for item in problems}
    next_ones = rule.problems(settled, lines, except_of=touched) if settled is not None else []
    keys = {item.key for item in problems}
    for one in next_ones:
        if (one.key, one.message) in known or not one.fix:
            continue
        cause = next((number for number, chosen in enumerate(problems) if chosen.fix.get(one.key) is not None), None)
        if cause is not None:
            chosen = problems[cause]
            problems[cause] = replace(chosen, hint=f"{chosen.hint}; {one.hint}", fix={**chosen.fix, **one.fix})
        elif one.key not in keys and one.line is not None:
            problems.append(one)  # the rule was skipped, because a key that it reads was rejected
    return problems


def _mended(data: Mapping[str, Any], refusals: list[pydantic_errors.Refusal]) -> JobSpec | None:
    try:
        return JobSpec.model_validate(pydantic_errors.without(data, refusals))
    except ValidationError:
        return None


def _read(path: Path, max_bytes: int) -> bytes:
    """Read a regular file's content, without following a link or waiting for a FIFO's other end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        what = "is a symbolic link" if path.is_symlink() else f"cannot be read: {(error.strerror or '').lower()}"
        raise fault(f"{path.name} {what}", hint="a job file must be a regular file") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise fault(f"{path.name} is {_kind(mode)}", hint="a job file must be a regular file")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    finally:
        os.close(fd)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
