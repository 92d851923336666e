"""The submission of job files: copied where needed, checked, dropped or sent, and honed's verdict on them."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from honed.cli import draft, following, terminal
from honed.cli.instance import Instance
from honed.job import arrival, tree, trial
from honed.job.database import timestamp
from honed.job.progress import gib
from honed.job.shape import Refusal, Row, Submitted
from honed.spec import config, relative
from honed.system.error import EnvironmentInvalidError, HonedError, UsageError

#: Seconds that `submit` waits for honed's verdict on a file.
VERDICT_TIMEOUT_SEC = 90.0


def submit(instance: Instance, options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as copies:
        resolved = [copies.enter_context(relative.resolved(path)) for path in options.files]
        for change in () if options.json else [change for item in resolved for change in item.changes]:
            terminal.say(str(change))
        return _submit(instance, options, [item.path for item in resolved])


def _submit(instance: Instance, options: argparse.Namespace, paths: list[Path]) -> int:
    """Submit the files at `paths`: those of the options, with the paths in them made absolute."""
    if options.stage:
        paths = options.files = [_stage(instance, path, quiet=options.json) for path in paths]
    checked = [_checked(instance, path, paths, given) for path, given in zip(paths, options.files, strict=True)]
    if any(isinstance(item, HonedError) for item in checked):
        _remove_copies(instance, options)
        _say_rejected(options, checked)
        return 1
    if options.wait and not instance.is_up:
        raise EnvironmentInvalidError("honed is not running, so there is nothing to wait for", hint="start it first")
    if not options.json:
        draft.say_offers(instance, checked)
    status, answers = 0, list[Mapping[str, Any]]()
    since = time.time() - 1.0
    # All are sent before the first verdict: one may name another.
    for path, sent, verdict in zip(options.files, _send(instance, paths, hold=options.hold), checked, strict=True):
        if instance.is_up and verdict.needs_fetch and not options.wait:
            answers.append({"file": str(path), "id": None, "state": "fetching", **verdict.needs_fetch.as_dict()})
        elif instance.is_up:
            on_wait = None if options.json else _Fetching(instance, sent.name).say
            answers.append(_verdict(instance, sent, since, is_fetched=bool(verdict.needs_fetch), on_wait=on_wait))
            if verdict.members and answers[-1].get("group"):
                answers[-1] = _group(instance, answers[-1]["group"]["id"], len(verdict.members))
        else:
            answers.append({"file": str(path), "id": None})
        if not options.json:
            say_verdict(str(path), answers[-1])
        for warning in () if options.json or answers[-1].get("state") == "rejected" else verdict.warnings:
            terminal.say(f"  warning: {warning}", style="yellow")
        status |= answers[-1].get("state") == "rejected"
        if answers[-1].get("state") == "rejected":
            _remove_copies(instance, options, path)
    if options.json:
        terminal.say_json(answers)
    if options.wait:
        for answer in answers:
            for job_id in answer.get("jobs", [answer["id"]] if answer["id"] is not None else []):
                status |= following.until_final(instance, str(job_id), quiet=options.json)
    return int(status)


@dataclass(frozen=True)
class _Sent:
    """A job file that was sent to honed."""

    name: str
    number: int | None = None  #: known at once for a file sent over the socket


def _send(instance: Instance, paths: Sequence[Path], *, hold: bool = False) -> list[_Sent]:
    """Send job files to honed: into incoming/, or over the socket if the configuration allows no drops."""
    status = instance.status()
    if status["takes_drops"] if status else config.load(instance.layout).policy.arrivals == "spool":
        incoming_dir = instance.layout.spool_dir / "incoming"
        if not incoming_dir.is_dir():
            raise EnvironmentInvalidError(
                f"{incoming_dir}: no such directory", hint="start honed once, or give its --root DIR"
            )
        return [_Sent(arrival.drop(incoming_dir, path, hold=hold)) for path in paths]
    if status is None:
        raise EnvironmentInvalidError(
            "honed is not running, and it accepts job files only over its socket (policy.arrivals)",
            hint="start it first",
        )
    sent: list[_Sent] = []
    for path in paths:
        try:
            taken: Submitted = instance.ask(
                "submit", name=path.name, data=base64.b64encode(path.read_bytes()).decode(), hold=hold
            )
        except HonedError as error:
            if isinstance(error, EnvironmentInvalidError):
                error.hint += f"; honectl list shows whether {path.name} was accepted"
            if sent:
                error.surround(after=f"; {len(sent)} of {len(paths)} files were submitted before")
            raise
        sent.append(_Sent(taken["name"], taken["id"]))
    return sent


def send_one(instance: Instance, path: Path, *, hold: bool = False, num_jobs: int = 0) -> Mapping[str, Any]:
    """Send one job file that was checked, and return honed's verdict: the job's row, or one without a number; of a
    sweep, which becomes `num_jobs` jobs, the numbers of all of them."""
    since = time.time() - 1.0
    (sent,) = _send(instance, [path], hold=hold)
    if not instance.is_up:
        return {"id": None, "state": None}
    verdict = _verdict(instance, sent, since, is_fetched=True)
    return _group(instance, verdict["group"]["id"], num_jobs) if num_jobs and verdict.get("group") else verdict


def _stage(instance: Instance, path: Path, *, quiet: bool) -> Path:
    """Return the job file to drop: one that names copies of the files that the workers cannot reach."""
    from honed.cli.stage import stage

    if not path.exists():
        raise UsageError(f"{path}: no such file")
    copied = stage(path, instance.layout, config.load(instance.layout))
    for key, source, copy in () if quiet else copied.copies:
        terminal.say(f"{key}: {source} copied to {copy}")
    return copied.spec_path


def _remove_copies(instance: Instance, options: argparse.Namespace, path: Path | None = None) -> None:
    from honed.job.staging import place_of

    for file in [path] if path else options.files if options.stage else []:
        directory = place_of(file, instance.layout)
        if options.stage and directory is not None:
            tree.remove(directory)


def _checked(instance: Instance, path: Path, others: list[Path], original: Path) -> Any:
    """Return the check's verdict on a file, or the error with which honed would refuse it. Raises UsageError without a
    file."""
    try:
        return draft.check_one(instance, path, others=others, original=original)
    except UsageError:
        raise
    except HonedError as error:
        return error


def _say_rejected(options: argparse.Namespace, checked: list[Any]) -> None:
    """Print why nothing was submitted: the files that would be rejected."""
    rejected = {path: file for path, file in zip(options.files, checked, strict=True) if isinstance(file, HonedError)}
    for path, error in () if options.json else rejected.items():
        terminal.complain(error, prefix=f"{path}: ")
    if len(checked) > len(rejected) and not options.json:
        terminal.say(f"nothing was submitted: {len(rejected)} of {len(checked)} files would be rejected", style="red")
    if options.json:
        answers = [
            {"file": str(path), "id": None, "state": "rejected", "error": rejected[path].as_dict()}
            if path in rejected
            else {"file": str(path), "id": None, "state": None}
            for path in options.files
        ]
        terminal.say_json(answers)


class _Fetching:
    """The progress of the fetches for one arrival: a line per tenth, and per new problem."""

    def __init__(self, instance: Instance, source: str) -> None:
        self._instance, self._source = instance, source
        self._said: tuple[Any, ...] = ()

    def say(self) -> None:
        status = self._instance.status()
        for item in status["arrivals"] if status else ():
            if item["source"] != self._source:
                continue
            total, num_bytes = item["total_bytes"], item["num_bytes"]
            if self._said == (now := (item["repo_id"], total and 10 * num_bytes // total, item["problem"])):
                return
            self._said = now
            progress = f"{num_bytes / total:.0%} of {gib(total)}" if total else "begins"
            problem = f"; {item['problem']}" if item["problem"] else ""
            terminal.say(f"  fetching {item['repo_id']}: {progress}{problem}", style="dim")


def _verdict(
    instance: Instance, sent: _Sent, since: float, *, is_fetched: bool, on_wait: Callable[[], None] | None = None
) -> Mapping[str, Any]:
    """Return honed's verdict on a file just sent. If something has to be fetched first (`is_fetched`), it may take
    hours; `on_wait` is called meanwhile.
    """
    deadline = time.monotonic() + VERDICT_TIMEOUT_SEC
    while time.monotonic() < deadline or (is_fetched and instance.is_up):
        job: Row | None = instance.ask("accepted", id=sent.name, since=timestamp(since), number=sent.number)
        if job is not None:
            return job
        rejection: Refusal | None = instance.ask("refusal", id=sent.name, number=sent.number)
        if rejection is not None and rejection["refused_at"] >= since:
            return {"id": None, "state": "rejected", "reason": rejection["reason"]}
        if is_fetched and on_wait is not None:
            on_wait()
        time.sleep(0.05)
    return {"id": None, "state": None}


def _group(instance: Instance, number: int, num_jobs: int) -> Mapping[str, Any]:
    """Return a sweep's jobs once all are accepted; fewer if honed refuses some of them, or takes them later."""
    deadline = time.monotonic() + VERDICT_TIMEOUT_SEC
    while True:
        sweep = instance.ask("group", id=str(number))
        if len(sweep["jobs"]) >= num_jobs or time.monotonic() > deadline:
            ids = [job["id"] for job in sweep["jobs"]]
            return {"id": number, "name": sweep["name"], "state": "sweep", "num_jobs": num_jobs, "jobs": ids}
        time.sleep(0.1)


def say_verdict(path: str, verdict: Mapping[str, Any]) -> None:
    """Print what has become of a job file."""
    if "jobs" in verdict:
        num, jobs = verdict["num_jobs"], verdict["jobs"]
        terminal.say(f"{path}: sweep {verdict['id']} ({verdict['name']}): {len(jobs)} jobs, {min(jobs)} to {max(jobs)}")
        if len(jobs) < num:
            terminal.say(
                f"  {num - len(jobs)} of {num} are not accepted: see honectl list and rejected/", style="yellow"
            )
        return
    if verdict["id"] is not None:
        terminal.say(f"{path}: job {verdict['id']} ({verdict['name']}), {verdict['state']}")
    elif verdict.get("state") == "fetching":
        model = f"{verdict['repo_id']} at {verdict['revision']}"
        terminal.say(f"{path}: submitted; honed accepts it after fetching {model}; see honectl list")
    elif verdict.get("state") == "rejected":
        terminal.say(f"{path}: refused\n{verdict['reason']}", style="red")
    else:
        terminal.say(f"{path}: submitted; honed accepts it when it runs")


def try_out(instance: Instance, options: argparse.Namespace) -> int:
    """Run a trial of a job file on a few rows, before your other jobs, and print its findings."""
    from honed.spec import document, sweep

    draft.checked(instance, options.file)
    if not instance.is_up:
        raise EnvironmentInvalidError("honed is not running, but a trial runs as a job", hint="start it first")
    with relative.resolved(options.file) as resolved:
        content = document.parse(resolved.path.read_bytes(), resolved.path.suffix).data
    if sweep.is_in(content):
        content = sweep.first(content).document
    with tempfile.TemporaryDirectory(prefix="honectl-") as directory:
        path = Path(directory) / f"{options.file.stem}.trial.json"
        path.write_text(json.dumps(trial.only(content, options.file.stem)), encoding="utf-8")
        verdict = send_one(instance, path)
    if verdict["id"] is None:
        say_verdict(str(options.file), verdict)
        return 1
    if not options.json:
        terminal.say(f"job {verdict['id']} ({verdict['name']}): {trial.NUM_ROWS} rows, a few steps")
    waits = None
    for job in following.states(instance, str(verdict["id"])):
        # The trial is first in the queue, but running jobs come before it: that may take hours.
        if (why := terminal.why_waiting(job)) != waits and why and not options.json:
            terminal.say(f"  waits: {why}", style="dim")
        waits = why
    trial_event = next((item for item in reversed(job["events"]) if item["event"] == "trial"), None)
    if options.json:
        terminal.say_json({"id": job["id"], "error": job["error"], "findings": trial_event})
    elif trial_event is None:
        following.say_end(job)
    else:
        _say_findings(trial.Findings.from_dict(trial_event))
    return int(trial_event is None or trial_event["verdict"] == "does_not_learn")


_VERDICT_STYLES = {"learns": "green", "learns_slowly": "yellow", "does_not_learn": "red"}


def _say_findings(findings: trial.Findings) -> None:
    """Print the findings of a trial in plain words, and its first row with masked and trained text."""
    drawn = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for title, text in trial.words(findings):
        style = _VERDICT_STYLES[findings.verdict] if title == trial.ASKED else ""
        drawn.add_row(title, Text(terminal.plain(text), style=style))
    terminal.console.print(drawn)
    if findings.segments:
        terminal.say()
        terminal.say("The first row, with trained text marked:", style="bold")
        terminal.say_drawn(terminal.segments(findings.segments))
