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
from typing import TYPE_CHECKING, TypedDict

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.run.snapshot import Missing
from honed.spec import config, kind, problem, relative
from honed.system import python, quote
from honed.system.error import DatasetError, ErrorRecord, HonedError, InternalError, ModelError, UsageError, from_dict
from honed.text import omission

if TYPE_CHECKING:
    from honed.check.checklist import Verdict
    from honed.spec.spec import JobSpec
    from honed.text.chat import PreviewRow


def check_one(instance: Instance, path: Path, *, others: Iterable[Path] = (), original: Path | None = None) -> Verdict:
    """Run all checks that honed makes before it accepts a job file. Raises the error with which honed would refuse it.

    `others` are job files that would be dropped together with it. `original`: the file of which this one is a copy.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    with terminal.doing(f"{path.name}: reading the model and the data …"):
        try:
            return _check_one(instance, path, others)
        except HonedError as error:
            words = f"honectl convert {shlex.quote(str(original or path))}"
            error.hint = error.hint.replace("honectl convert FILE", words)
            raise


def _check_one(instance: Instance, path: Path, others: Iterable[Path]) -> Verdict:
    from honed.check import preflight, rehearsal
    from honed.check.checklist import Asked
    from honed.job.plan_file import Earlier

    with relative.resolved(path) as resolved:
        earlier = Earlier(_made(instance, resolved.path))
        keep = rehearsal.keeper(instance.layout)
        asked = Asked(instance.layout, config.load(instance.layout), earlier=earlier, keep=keep)
        try:
            verdict = preflight.check(resolved.path, asked)
        except HonedError as error:
            error.is_refusal = True
            raise
    changes = [f"{change}; honectl submit writes the absolute path" for change in resolved.changes]
    if verdict.members:
        changes.append(f"sweep: {len(verdict.members)} jobs; models, data, memory and disk are those of the first")
    warnings = map(quote.show, verdict.warnings)  # the file's own submitter asks
    return replace(verdict, warnings=[*changes, *warnings, *_not_there(instance, verdict.spec, others)])


def _not_there(instance: Instance, job_spec: JobSpec, other_paths: Iterable[Path]) -> Iterator[str]:
    """Yield a warning per job that the file names and that neither honed knows nor another file makes."""
    from honed.spec import jobfile
    from honed.spec import spec as specs

    made = set()
    for path in other_paths:
        with contextlib.suppress(HonedError):  # its own check reports its fault
            made.add(jobfile.load(path).name or path.stem.removesuffix(".hold"))
    named = {str(name): "depends_on" for name in job_spec.depends_on or ()}
    named |= {name: key for key, name in specs.references(job_spec).items()}
    there = instance.jobs(names=[*named]) if named and instance.layout.spool_dir.is_dir() else []
    made |= {word for job in there for word in (job["name"], str(job["id"]))}
    for name, key in named.items():
        if name not in made:
            yield (
                f"{key}: there is no job {name!r} yet: submit it first, or both together; otherwise this one is "
                "rejected"
            )


def _made(instance: Instance, path: Path) -> dict[str, Path]:
    """Return the output directories of those jobs named by a job file that have succeeded."""
    from honed.spec import jobfile
    from honed.spec import spec as specs

    try:
        names = set(specs.references(jobfile.load(path)).values())
    except HonedError:
        return {}  # the check reports its fault
    made: dict[str, Path] = {}
    for name in sorted(names) if instance.layout.spool_dir.is_dir() else ():
        newest = max(instance.jobs(names=[name]), key=lambda job: job["id"], default=None)
        if newest is not None and newest["state"] == "succeeded":
            output_dir = instance.show(str(newest["id"]))["artifacts"]["output_dir"]
            made |= {} if output_dir is None else {name: Path(output_dir)}
    return made


def checked(instance: Instance, path: Path) -> Verdict:
    """Run check_one; an error then names the file."""
    try:
        return check_one(instance, path)
    except HonedError as error:
        if str(path) not in error.message:
            error.surround(f"{path}: ")
        raise


def _options(needed: Missing) -> str:
    parts = {key: getattr(needed, key) for key in ("name", "split") if getattr(needed, key) is not None}
    revision = {} if needed.revision == "main" else {"revision": needed.revision}
    options = "".join(f"--{key} {shlex.quote(value)} " for key, value in {**revision, **parts}.items())
    return options if needed.key == "base_model" else f"--dataset {options}"


def say_offers(instance: Instance, verdicts: Iterable[Verdict]) -> None:
    """Print size, licence and gating of what honed would fetch for these jobs, once."""
    if not (needy := [verdict for verdict in verdicts if verdict.needs_fetch]):
        return
    from honed.inputs import offer

    needed = [missing for item in needy for missing in offer.missing(item.spec, instance.layout.cache_dir)]
    for item in dict.fromkeys(needed):
        terminal.say(f"{item.key}: {offer.message(item, instance.layout)}")


class _Checked(TypedDict):
    file: str
    ok: bool
    error: ErrorRecord | None
    faults: list[problem.Fault]
    warnings: list[str]
    needs_fetch: dict[str, object] | None
    sampled: bool


def check(instance: Instance, options: argparse.Namespace) -> int:
    answers: list[_Checked] = []
    verdicts = []
    for path in options.files:
        try:
            verdict = check_one(instance, path, others=options.files)
        except HonedError as error:
            answers.append(
                {
                    "file": str(path),
                    "ok": False,
                    "error": error.as_dict(),
                    "faults": problem.faults(error),
                    "warnings": [],
                    "needs_fetch": None,
                    "sampled": False,
                }
            )
        else:
            verdicts.append(verdict)
            needed = verdict.needs_fetch.as_dict() if verdict.needs_fetch else None
            answers.append(
                {
                    "file": str(path),
                    "ok": True,
                    "error": None,
                    "faults": [],
                    "warnings": list(verdict.warnings),
                    "needs_fetch": needed,
                    "sampled": verdict.is_sampled,
                }
            )
    if options.json:
        terminal.say_json(answers)
        return int(not all(answer["ok"] for answer in answers))
    from honed.check.datacheck import NUM_ROWS

    for answer in answers:
        if (fault := answer["error"]) is None:
            seen = f" (of each data set the first {NUM_ROWS} rows; training checks the others)"
            terminal.say(f"{answer['file']}: ok{seen if answer['sampled'] else ''}", style="green")
        else:
            is_named = fault["message"].startswith(answer["file"])
            terminal.say_error(fault, prefix="" if is_named else f"{answer['file']}: ")
        for warning in answer["warnings"]:
            terminal.say(f"  warning: {warning}", style="yellow")
    say_offers(instance, verdicts)
    return int(not all(answer["ok"] for answer in answers))


def plan(instance: Instance, options: argparse.Namespace) -> int:
    verdict = checked(instance, options.file)
    if (made := verdict.plan) is None:
        return _say_deferred(verdict, as_json=options.json)
    if options.json:
        terminal.say_json(made.as_dict() | {"warnings": verdict.warnings})
        return 0
    terminal.say(f"backend: {made.backend.name}", style="bold")
    for reason in made.backend.reasons:
        terminal.say(f"  {reason}")
    if made.loss.reasons:
        terminal.say(f"loss: {made.loss.type}", style="bold")
        terminal.say(f"  {made.loss.reasons[0]}")
    words = {None: "none", True: "yes", False: "no"}
    for key, why in made.precision.reasons.items():
        value = getattr(made.precision, key, None)
        if key == "optim" and value is None and kind.of(verdict.spec).trains:  # the plan keeps the job's own
            value = verdict.spec.training.optim
        terminal.say(f"{key}: {words[value] if value is None or isinstance(value, bool) else value}", style="bold")
        terminal.say(f"  {why}")
    if (division := made.parallel).effective_batch:
        if division.num_ranks > 1:
            terminal.say(f"parallel: {division.mode}, on {division.num_ranks} GPUs", style="bold")
            terminal.say(f"  {division.reasons['mode']}; the memory below is that of each")
        terminal.say(f"effective batch: {division.effective_batch}", style="bold")
        terminal.say(f"  {division.reasons['effective_batch']}")
    if made.rows_template is not None:
        terminal.say(f"training_chat_template: {made.rows_template}", style="bold")
        terminal.say("  renders the rows; predictions and the exported model use the base's template")
    figures = [(key, value) for key, value in made.memory.as_dict().items() if isinstance(value, int)]
    parts = {key.removesuffix("_bytes"): value for key, value in figures if key.endswith("_bytes")}
    # The sum below its parts, and the available memory last; a part that the job does not have is left out.
    ordered = [*(key for key in parts if key not in {"total", "available"}), "total", "available"]
    memory = [[key, f"{value / 2**20:,.1f} MiB"] for key in ordered if (value := parts.get(key))]
    terminal.table(["memory (estimate)", ""], memory, right=[""])
    rungs = [
        [
            f"{'→' if rung.is_chosen else ' '} {rung.master_weights}",
            rung.optim,
            f"{rung.bytes_per_parameter:g}",
            f"{rung.total_bytes / 2**30:,.1f} GiB",
            "yes" if rung.fits else "no",
        ]
        for rung in made.rungs
    ]
    if rungs:
        header = ["master_weights", "optim", "bytes a parameter", "in all", "fits"]
        terminal.table(header, rungs, right=["bytes a parameter", "total"])
    stored = ", ".join(f"{count:,} {dtype}" for dtype, count in made.model.stored_dtypes.items())
    terminal.say(f"checkpoint: {made.model.num_parameters:,} parameters ({stored})")
    for warning in verdict.warnings:
        terminal.say(f"warning: {warning}", style="yellow")
    return 0


def _say_deferred(verdict: Verdict, *, as_json: bool) -> int:
    """Print that there is no plan yet for a job that waits for another job's output or for a fetch."""
    if as_json:
        fetch = verdict.needs_fetch.as_dict() if verdict.needs_fetch else None
        terminal.say_json({"waits_for": dict(verdict.waits_for), "needs_fetch": fetch, "warnings": verdict.warnings})
        return 0
    needed = verdict.needs_fetch
    fetched = "the base model" if needed is None or needed.key == "base_model" else f"the data set {needed.repo_id}"
    why = "the job starts from the output of another job" if verdict.waits_for else f"{fetched} must be fetched first"
    terminal.say(f"no plan yet: {why}", style="bold")
    for warning in verdict.warnings:
        terminal.say(f"  {warning}")
    return 0


def _not_previewed(done: subprocess.CompletedProcess[bytes]) -> HonedError:
    """Return the error of a preview that failed: the one that the process printed, or its exit status."""
    try:
        error = from_dict(json.loads(done.stdout)["error"])
    except (ValueError, KeyError, TypeError):
        return InternalError(f"the preview exited with status {done.returncode}", hint="see its messages above")
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
            hint=f"honectl submit fetches it; or run python -m honed.inputs.fetch {_options(needed)}{needed.repo_id}",
        )
    environment = {"HF_HOME": str(instance.layout.cache_dir), **os.environ, "HF_HUB_OFFLINE": "1"}
    with relative.resolved(options.file) as resolved:
        command = python.module("honed.worker.preview", str(resolved.path), "--rows", str(options.rows), "--json")
        if verdict.plan is not None:
            command += ["--base-model", str(verdict.plan.model.path)]
        with terminal.doing(f"{options.file.name}: rendering and encoding rows …"):
            done = subprocess.run(command, capture_output=True, env=environment, check=False)
    for line in done.stderr.decode(errors="replace").splitlines():
        print(terminal.plain(line), file=sys.stderr)
    if done.returncode:
        raise _not_previewed(done)
    if options.json:
        sys.stdout.buffer.write(done.stdout)
        return 0
    rows: list[PreviewRow] = json.loads(done.stdout)
    for row in rows:
        share = row["num_trained"] / row["num_tokens"] if row["num_tokens"] else 0
        cut = ", truncated" if row["is_truncated"] else ""
        counts = f"{row['num_tokens']} tokens, {row['num_trained']} trained ({share:.0%}){cut}"
        terminal.say(f"{row['dataset']}: row {row['row']}: {counts}", style="bold")
        for item in row["omitted"]:
            terminal.say(f"  left out by the chat template: {omission.line(item)}", style="yellow")
        terminal.say_drawn(terminal.segments(row["segments"]))
        terminal.say()
    return 0
