"""Verbs for a job file that is not submitted yet: honed's check of it, its plan, and a preview of its rows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.run.snapshot import Missing
from honed.spec import config, problem, relative
from honed.system import quote
from honed.system.error import DatasetError, HonedError, InternalError, ModelError, UsageError, from_dict
from honed.text import omission


def check_one(instance: Instance, path: Path, *, beside: Iterable[Path] = ()) -> Any:
    """Run all checks that honed makes before it accepts a job file. Raises the error with which honed would refuse it.

    `beside` are job files that would be dropped together with it.
    """
    from honed.check import preflight

    if not path.exists():
        raise UsageError(f"{path}: no such file")
    settings = config.load(instance.layout)
    with relative.resolved(path) as found:
        jobs = _made(instance, found.path)
        try:
            verdict = preflight.check(found.path, layout=instance.layout, config=settings, jobs=jobs)
        except HonedError as error:
            error.is_refusal = True
            raise
    told = [f"{each}; honectl submit writes the absolute path" for each in found.changes]
    warnings = map(quote.show, verdict.warnings)  # the file's own submitter asks
    return replace(verdict, warnings=[*told, *warnings, *_not_there(instance, verdict.spec, beside)])


def _not_there(instance: Instance, job_spec: Any, beside: Iterable[Path]) -> Iterator[str]:
    """Yield a warning for each job that the file names and that neither honed knows nor another file makes."""
    from honed.spec import spec as specs

    made = set()
    for path in beside:
        with contextlib.suppress(HonedError):  # its own check reports its fault
            made.add(specs.load(path).name or path.stem.removesuffix(".hold"))
    named = {str(name): "depends_on" for name in job_spec.depends_on or ()}
    named |= {name: key for key, name in specs.references(job_spec).items()}
    there = instance.jobs(names=[*named]) if named and instance.layout.spool_dir.is_dir() else []
    made |= {word for job in there for word in (job["name"], str(job["id"]))}
    for name, key in named.items():
        if name not in made:
            yield f"{key}: there is no job {name!r} yet: drop it first, or both together, or this one is refused"


def _made(instance: Instance, path: Path) -> dict[str, Path]:
    """Return the output directories of those jobs named by a job file that have succeeded."""
    from honed.spec import spec as specs

    try:
        names = set(specs.references(specs.load(path)).values())
    except HonedError:
        return {}  # the check reports its fault
    made = {}
    for name in sorted(names) if instance.layout.spool_dir.is_dir() else ():
        known = instance.jobs(names=[name])
        newest = max(known, key=lambda job: int(job["id"]), default=None)
        if newest is not None and newest["state"] == "succeeded":
            made[name] = Path(instance.read("show", str(newest["id"]))["artifacts"]["output_dir"])
    return made


def checked(instance: Instance, path: Path) -> Any:
    """Run check_one; an error then names the file."""
    try:
        return check_one(instance, path)
    except HonedError as error:
        if str(path) not in error.message:
            error.surround(f"{path}: ")
        raise


def missing(verdict: Any) -> dict[str, Any]:
    """Return the model or data set that has to be fetched first."""
    needed: dict[str, Any] = verdict.needs_fetch.as_dict()
    return needed


def _options(needed: Missing) -> str:
    """Return the options of honed.inputs.fetch that precede the id."""
    said = {key: getattr(needed, key) for key in ("name", "split") if getattr(needed, key) is not None}
    revision = {} if needed.revision == "main" else {"revision": needed.revision}
    options = "".join(f"--{key} {shlex.quote(value)} " for key, value in {**revision, **said}.items())
    return options if needed.key == "base_model" else f"--dataset {options}"


def check(instance: Instance, options: argparse.Namespace) -> int:
    answers: list[dict[str, Any]] = []
    for path in options.files:
        try:
            verdict = check_one(instance, path, beside=options.files)
        except HonedError as error:
            answers.append(
                {
                    "file": str(path),
                    "ok": False,
                    "error": error.as_dict(),
                    "faults": problem.faults(error),
                    "warnings": [],
                    "needs_fetch": None,
                }
            )
        else:
            needed = missing(verdict) if verdict.needs_fetch else None
            answers.append(
                {
                    "file": str(path),
                    "ok": True,
                    "error": None,
                    "faults": [],
                    "warnings": list(verdict.warnings),
                    "needs_fetch": needed,
                }
            )
    if options.json:
        terminal.console.print_json(json.dumps(answers))
        return int(not all(answer["ok"] for answer in answers))
    for answer in answers:
        if answer["ok"]:
            terminal.say(f"{answer['file']}: ok", style="green")
        else:
            is_named = answer["error"]["message"].startswith(answer["file"])
            terminal.say_error(answer["error"], prefix="" if is_named else f"{answer['file']}: ")
        for warning in answer["warnings"]:
            terminal.say(f"  warning: {warning}", style="yellow")
    return int(not all(answer["ok"] for answer in answers))


def plan(instance: Instance, options: argparse.Namespace) -> int:
    verdict = checked(instance, options.file)
    if verdict.plan is None:
        return _say_deferred(verdict, as_json=options.json)
    made = verdict.plan.as_dict() | {"warnings": verdict.warnings}
    if options.json:
        terminal.console.print_json(json.dumps(made))
        return 0
    terminal.say(f"backend: {made['backend']['name']}", style="bold")
    for reason in made["backend"]["reasons"]:
        terminal.say(f"  {reason}")
    if made["loss"]["reasons"]:
        terminal.say(f"loss: {made['loss']['type']}", style="bold")
        terminal.say(f"  {made['loss']['reasons'][0]}")
    precision = made["precision"]
    words = {None: "none", True: "yes", False: "no"}
    for key, why in precision["reasons"].items():
        value = precision.get(key)
        if key == "optim" and value is None:  # the plan keeps the job's own
            value = verdict.spec.training.optim
        terminal.say(f"{key}: {words[value] if value is None or isinstance(value, bool) else value}", style="bold")
        terminal.say(f"  {why}")
    if made["training_chat_template"]:
        terminal.say(f"training_chat_template: {made['training_chat_template']}", style="bold")
        terminal.say("  renders the rows; predictions and the exported model use the base's template")
    parts = {key.removesuffix("_bytes"): value for key, value in made["memory"].items() if key.endswith("_bytes")}
    # The sum below its parts, and the available memory last; a part that the job does not have is left out.
    ordered = [*(key for key in parts if key not in {"total", "available"}), "total", "available"]
    memory = [[key, f"{value / 2**20:,.1f} MiB"] for key in ordered if (value := parts.get(key))]
    terminal.table(["memory (estimate)", ""], memory, right=[""])
    rungs = [
        [
            f"{'→' if each['is_chosen'] else ' '} {each['master_weights']}",
            each["optim"],
            f"{each['bytes_per_parameter']:g}",
            f"{each['total_bytes'] / 2**30:,.1f} GiB",
            "yes" if each["fits"] else "no",
        ]
        for each in made["rungs"]
    ]
    if rungs:
        header = ["master_weights", "optim", "bytes a parameter", "in all", "fits"]
        terminal.table(header, rungs, right=["bytes a parameter", "in all"])
    parameters = made["checkpoint"]
    stored = ", ".join(f"{count:,} {dtype}" for dtype, count in parameters["stored_dtypes"].items())
    terminal.say(f"checkpoint: {parameters['num_parameters']:,} parameters ({stored})")
    for warning in made["warnings"]:
        terminal.say(f"warning: {warning}", style="yellow")
    return 0


def _say_deferred(verdict: Any, *, as_json: bool) -> int:
    """Print that there is no plan yet for a job that waits for another job's output or for a fetch."""
    if as_json:
        needed = missing(verdict) if verdict.needs_fetch else None
        terminal.console.print_json(
            json.dumps(
                {"waits_for": dict(verdict.waits_for), "needs_fetch": needed, "warnings": list(verdict.warnings)}
            )
        )
        return 0
    needed = verdict.needs_fetch
    fetched = "the base model" if needed is None or needed.key == "base_model" else f"the data set {needed.repo_id}"
    why = "the job starts from what another one makes" if verdict.waits_for else f"{fetched} has to be fetched first"
    terminal.say(f"no plan yet: {why}", style="bold")
    for warning in verdict.warnings:
        terminal.say(f"  {warning}")
    return 0


def _not_previewed(done: subprocess.CompletedProcess[bytes]) -> HonedError:
    """Return the error of a preview that failed: the one that the process printed, or its exit status."""
    try:
        error = from_dict(json.loads(done.stdout)["error"])
    except (ValueError, KeyError, TypeError):
        return InternalError(f"the preview ended with status {done.returncode}", hint="its own words are above")
    error.is_refusal = True
    return error


def preview(instance: Instance, options: argparse.Namespace) -> int:
    verdict = checked(instance, options.file)
    if verdict.needs_fetch:
        needed = verdict.needs_fetch
        is_model = needed.key == "base_model"
        lacking = "tokenizer to preview with" if is_model else "row to preview"
        raise (ModelError if is_model else DatasetError)(
            f"{needed.key}: {needed.repo_id} at {needed.revision} is not in the local cache, so there is no {lacking}",
            hint=f"honectl submit has it fetched, or python -m honed.inputs.fetch {_options(needed)}{needed.repo_id}",
        )
    environment = {"HF_HOME": str(instance.layout.cache_dir), **os.environ, "HF_HUB_OFFLINE": "1"}
    with relative.resolved(options.file) as found:
        command = [sys.executable, "-m", "honed.worker.preview", str(found.path), "--rows", str(options.rows), "--json"]
        if verdict.plan is not None:
            command += ["--base-model", str(verdict.plan.model.path)]
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
    for line in done.stderr.decode(errors="replace").splitlines():
        print(terminal.plain(line), file=sys.stderr)
    if done.returncode:
        raise _not_previewed(done)
    if options.json:
        sys.stdout.buffer.write(done.stdout)
        return 0
    for row in json.loads(done.stdout):
        share = row["num_trained"] / row["num_tokens"] if row["num_tokens"] else 0
        cut = ", cut off" if row["is_truncated"] else ""
        counts = f"{row['num_tokens']} tokens, {row['num_trained']} trained ({share:.0%}){cut}"
        terminal.say(f"{row['dataset']}: row {row['row']}: {counts}", style="bold")
        for each in row["omitted"]:
            terminal.say(f"  left out by the chat template: {omission.line(each)}", style="yellow")
        terminal.say_drawn(terminal.segments(row["segments"]))
        terminal.say()
    return 0
