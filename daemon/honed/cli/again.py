"""`honectl rerun`: a new job of an old one's job file, with some keys changed. The old job stays as it is."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from honed.cli import draft, submission, terminal
from honed.cli.instance import Instance
from honed.spec import document, jobfile, problem, relative
from honed.spec.problem import InvalidSpecError, Problem
from honed.system import untrusted
from honed.system.error import EnvironmentInvalidError, HonedError, UsageError

if TYPE_CHECKING:
    from honed.job.shape import Shown

_NUMBERED = re.compile(r"(?P<name>.+)-\d+")
_KEY = re.compile(r"[A-Za-z_][\w]*(\.[\w-]+)*")
#: Longest name of a job.
_MAX_NAME = 100


def rerun(instance: Instance, options: argparse.Namespace) -> int:
    """Submit a job's file again under another name, with the changes of --set."""
    job = instance.show(options.id)
    content = content_of(instance, job)
    content.pop("group", None)  # the new job is none of the sweep's
    was_in = content.get("output_dir")
    content = changed(content, options.set)
    if content.get("output_dir") not in (None, "") and content.get("output_dir") == was_in:
        raise UsageError(
            f"job {job['id']} ({job['name']}) writes to its own output_dir {was_in}, and the new job would, too",
            hint="--set output_dir=DIR, or --set output_dir=null for a directory that honed chooses",
        )
    content["name"] = options.name or _free_name(instance, job["name"])
    text, _ = relative.absolute(to_text(content), ".yaml", Path.cwd())
    with tempfile.TemporaryDirectory(prefix="honectl-") as directory:
        stem = re.sub(r"[^\w.-]", "-", content["name"]).lstrip(".-")[:80] or "rerun"
        path = Path(directory) / f"{stem}.yaml"
        path.write_bytes(text)
        try:
            checked = draft.check_one(instance, path)
        except HonedError as error:
            raise in_options(error, options.set) from error
        verdict = submission.send_one(instance, path, hold=options.hold, num_jobs=len(checked.members))
    is_refused = verdict.get("state") == "rejected"
    if options.json:
        terminal.say_json(verdict)
        return int(is_refused)
    if verdict["id"] is None or checked.members:
        submission.say_verdict(f"{content['name']} (of job {job['id']})", verdict)
    else:
        what = ", ".join(options.set) or "nothing changed"
        terminal.say(f"job {verdict['id']} ({verdict['name']}), {verdict['state']}: as job {job['id']}, {what}")
        terminal.say(str(instance.layout.files(verdict["id"]).spec_path))
    for warning in () if is_refused else checked.warnings:
        terminal.say(f"  warning: {warning}", style="yellow")
    return int(is_refused)


def in_options(error: HonedError, settings: Sequence[str]) -> HonedError:
    """Return a check's error about a job file that honectl has made: in terms of --set, without lines of that file."""
    if not isinstance(error, InvalidSpecError):
        if at := re.match(r"line \d+: ", error.message):  # also in honed's own answer, which has it in the text alone
            error.without(at[0])
        return error
    given = [setting.partition("=")[0].strip() for setting in settings]
    problems, right, alone = [], dict[str, Any](), _alone(settings)
    for theirs in error.problems:
        ours = next((key for key in given if f"{theirs.key}.".startswith(f"{key}.")), None)
        # The file may have the right key, too; but it is the wrong one that was meant to be set.
        problem_of_ours = alone.get(theirs.key, theirs) if ours is not None else theirs
        reported = (
            problem_of_ours
            if ours is None
            else replace(problem_of_ours, key="", message=f"--set {problem_of_ours.key}: {problem_of_ours.message}")
        )
        problems.append(replace(reported, line=None))
        right |= {key: value for key, value in problem_of_ours.fix.items() if ours is not None and value is not None}
    made = InvalidSpecError(problems)
    made.is_refusal = error.is_refusal
    if right:
        written = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in right.items()
        }
        options = " ".join(f"--set {shlex.quote(f'{key}={text}')}" for key, text in written.items())
        made.hint = f"did you mean {options}?"
    return made


def _alone(settings: Sequence[str]) -> dict[str, Problem]:
    """Return the problems of a job file that has nothing but the KEY=VALUE of --set, by key."""
    try:
        jobfile.validate(changed({}, settings))
    except InvalidSpecError as error:
        return {item.key: item for item in error.problems}
    except HonedError:
        pass
    return {}


def content_of(instance: Instance, job: Shown) -> dict[str, Any]:
    """Return the content of a job's file as it was submitted. Raises EnvironmentInvalidError if it is gone."""
    try:
        path = instance.layout.files(job["id"]).spec_path
        data = untrusted.read_plain(path)
    except FileNotFoundError:
        raise EnvironmentInvalidError(
            f"job {job['id']} ({job['name']}) has no job file any more", hint="submit its job file again"
        ) from None
    content: dict[str, Any] = document.parse(data, path.suffix).data
    return content


def changed(content: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a job file's content with the KEY=VALUE of --set. Raises UsageError for one that is not of that form."""
    fix: dict[str, Any] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        key = key.strip()
        if not sign or not _KEY.fullmatch(key):
            raise UsageError(f"--set {setting!r} is not KEY=VALUE", hint="such as --set training.learning_rate=1e-4")
        fix[key] = _value(setting, text)
    return _with(content, fix)


def _value(setting: str, text: str) -> Any:
    """Parse a value as job files are parsed: 1e-4 is a number, and yes is a word."""
    if not text.strip():
        return ""
    data = document.parse(f"value: {text}\n".encode(), ".yaml").data
    if set(data) != {"value"}:
        raise UsageError(
            f"--set {setting!r}: its value is not one value", hint="a value is YAML, such as [1, 2] or {r: 8}"
        )
    return data["value"]


def _with(content: Mapping[str, Any], fix: Mapping[str, Any]) -> dict[str, Any]:
    """Set keys; a section that is set replaces the old one, so it is removed first."""
    sections = {key: None for key, value in fix.items() if isinstance(value, dict)}
    try:
        return problem.mended(problem.mended(content, sections), fix)
    except (IndexError, TypeError):
        raise UsageError(
            "--set names an item of a list that is not there", hint="set the whole list: --set 'datasets=[{path: …}]'"
        ) from None


def to_text(content: Mapping[str, Any]) -> bytes:
    """Return a job file of this content, in YAML."""
    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=10_000)
    return text.encode()


def _free_name(instance: Instance, name: str) -> str:
    """Return the name of a rerun, which no other job has: capitals-2 after capitals, capitals-3 after capitals-2."""
    match = _NUMBERED.fullmatch(name)
    stem = name
    if match and any(job["name"] == match["name"] for job in instance.jobs(names=[match["name"]])):  # not a sweep's
        stem = match["name"]
    number = 2
    while instance.jobs(names=[made := f"{stem[: _MAX_NAME - len(str(number)) - 1]}-{number}"]):
        number += 1
    return made
