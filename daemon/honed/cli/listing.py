"""Displays of jobs in honectl: the list, one job, its predictions, and the path of its page."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.job.job import MAX_PRIORITY
from honed.job.progress import duration, together
from honed.system.error import EnvironmentInvalidError, NotPermittedError, UsageError

if TYPE_CHECKING:
    from honed.job.shape import Arrival, GroupShown, Row, Shown

#: Characters of an outcome and its remark in a line of the list.
MAX_OUTCOME = 60
#: Jobs up to which JSON is drawn in colours; longer output is for scripts.
MAX_PRETTY = 500
COLUMNS = ["id", "name", "state", "outcome", "priority", "step", "loss", "ETA", "submitted (UTC)"]
RIGHT = ("id", "priority", "step", "loss", "ETA")
MAYBE_EMPTY = ("outcome", "priority", "step", "loss", "ETA")
ENDED = ("succeeded", "failed", "cancelled")


def list_jobs(instance: Instance, options: argparse.Namespace) -> int:
    """Print the first jobs of each kind for a person, or all jobs for a script, unless the options choose otherwise."""
    choice = {"states": options.state, "names": options.ids}
    is_whole = options.all or options.json or options.limit is not None or options.after is not None
    if is_whole:
        jobs = instance.jobs(**choice, limit=options.limit, after=options.after)
        counts: dict[str, int] = {}
    else:
        found = instance.overview(**choice)
        jobs, counts = found["jobs"], found["counts"]
    if options.json:
        terminal.console.print_json(json.dumps(jobs)) if len(jobs) <= MAX_PRETTY else print(json.dumps(jobs))
        return 0
    rows = [
        [
            job["id"],
            terminal.plain(job["name"], limit=40),
            terminal.state_words(job),
            _outcome(job),
            _priority(job),
            *terminal.progress_cells(job),
            job["submitted_at"][:16].replace("T", " "),
        ]
        for job in jobs
    ]
    columns = list(COLUMNS)
    if any(job.get("group") for job in jobs):
        columns.insert(2, "sweep")
        for row, job in zip(rows, jobs, strict=True):
            row.insert(2, _swept(job))
    if any(job.get("waiting_for") for job in jobs):
        columns.append("waiting because")
        for row, job in zip(rows, jobs, strict=True):
            row.append(terminal.plain(terminal.why_waiting(job), limit=60))
    if terminal.console.is_terminal:
        _say_narrow(columns, rows)
    else:
        for row in rows:  # --json has all of it
            row[columns.index("outcome")] = terminal.plain(row[columns.index("outcome")], limit=MAX_OUTCOME)
        terminal.table(columns, rows, right=[*RIGHT])
    if left := _left_out(jobs, counts):
        terminal.say(f"… and {left}: honectl list --all", style="dim")
    if (status := instance.status()) is not None:
        for arrival in status["arrivals"]:
            terminal.say(_fetch_line(arrival))
        devices = status.get("devices", ())
        for words in together((row["label"], closure["detail"]) for row in devices for closure in row["closures"]):
            terminal.say(terminal.plain(words, limit=400), style="yellow")
        if limit := status.get("limit"):
            terminal.say(limit)
    elif sum(job["state"] == "queued" for job in jobs) > 1:
        terminal.say(_DOWN, style="dim")
    return 0


def _swept(job: Row) -> str:
    """Return the sweep of a job, and its values; empty for any other job."""
    if not (group := job.get("group")):
        return ""
    values = ", ".join(f"{key.rpartition('.')[2]} {json.dumps(value)}" for key, value in group["values"].items())
    return terminal.plain(f"{group['id']}: {values}", limit=60)


def _priority(job: Row) -> int | str:
    """Return a job's priority; "head" for the highest one, which every trial has."""
    return "head" if job["priority"] == MAX_PRIORITY else job["priority"]


#: The remark on a queue that was read from files.
_DOWN = "honed is not running: the queue is in the order that the shares, as last written, let expect"
#: Columns of a terminal from which on priority and the reason of a wait are shown; and those for the submission time.
BROAD, WIDE = 100, 140
#: Characters of a name below BROAD.
NARROW_NAME = 24


def _say_narrow(columns: list[str], rows: list[list[Any]]) -> None:
    """Print the columns of the list for which the terminal has room; programs read every column, through a pipe."""
    state, outcome = columns.index("state"), columns.index("outcome")
    for row in rows:
        row[outcome] = str(row[outcome]).removeprefix(row[state]).removeprefix(", ")
    remarks = [f"job {row[0]}: succeeded, {row[outcome]}" for row in rows if str(row[outcome]).startswith("but ")]
    for row in rows:
        if str(row[outcome]).startswith("but "):
            row[outcome] = "but: see below"
    too_much = {"submitted (UTC)"} if terminal.console.width < WIDE else set()
    waits: list[str] = []
    if terminal.console.width < BROAD:
        too_much |= {"priority", "waiting because", "sweep"}
        for row in rows:
            row[columns.index("name")] = terminal.plain(row[columns.index("name")], limit=NARROW_NAME)
        waits = [f"job {row[0]}: {row[-1]}" for row in rows if columns[-1] == "waiting because" and row[-1]]
    # An empty column would take room from the others.
    kept = [
        at
        for at, name in enumerate(columns)
        if name not in too_much and (name not in MAYBE_EMPTY or any(row[at] for row in rows))
    ]
    terminal.table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows], right=[*RIGHT])
    for line in waits:
        terminal.say(line, style="dim")
    for line in remarks:
        terminal.say(line, style="yellow")


def _left_out(jobs: list[Row], counts: dict[str, int]) -> str:
    """Count, in words, the jobs that the list does not show."""
    kinds = [("running", ("running",)), ("queued", ("queued",)), ("held", ("held",)), ("finished", ENDED)]
    parts = []
    for words, states in kinds:
        shown = sum(job["state"] in states for job in jobs)
        if (num := sum(counts.get(state, 0) for state in states) - shown) > 0:
            parts.append(f"{num:,} more {words}")
    return ", ".join(parts)


def _outcome(job: Row) -> str:
    remark = f"but {job['remark']}" if job.get("remark") else ""
    preemption = job.get("preemption")
    outcome = f"preempted: {preemption['reason']}" if preemption else job["outcome"]
    return ", ".join(filter(None, [outcome, remark, "pinned" if job.get("is_pinned") else ""]))


def _fetch_line(arrival: Arrival) -> str:
    """Return a line about an arrival that waits for a fetch, with the fetch's progress."""
    done, of = arrival["num_bytes"] / 2**30, arrival["total_bytes"]
    share = f": {done:.1f} of {of / 2**30:.1f} GiB" if of else ""
    problem = f"; {arrival['problem']}" if arrival["problem"] else ""
    if arrival["repo_id"] is None:
        what = "a data set" if arrival.get("repo_type") == "dataset" else "a model"
        return f"{arrival['id']}: waiting for {what} to be fetched{share}"
    name = terminal.plain(arrival["name"], limit=40)
    return f"{arrival['id']} ({name}): fetching {arrival['repo_id']} at {arrival['revision']}{share}{problem}"


def show(instance: Instance, options: argparse.Namespace) -> int:
    try:
        job = instance.show(options.id)
    except UsageError as error:
        try:
            return _show_group(instance.read("group", options.id), as_json=options.json)
        except UsageError:
            raise error from None
    if options.json:
        terminal.console.print_json(json.dumps(job))
        return 0
    step, loss, eta = terminal.progress_cells(job)
    remark = terminal.plain(job.get("remark") or "", limit=400)
    terminal.say(
        f"job {job['id']} ({job['name']}): {terminal.state_words(job)}{', but ' if remark else ''}{remark}",
        style="yellow" if remark else terminal.STATE_STYLES.get(job["state"], "bold"),
    )
    facts: list[Sequence[object]] = [
        ["outcome", job["outcome"]],
        ["submitted", job["submitted_at"]],
        ["from", job["source"]],
        ["waits", terminal.why_waiting(job)],
        ["preempted", _preempted(job)],
        ["pinned", "yes" if job.get("is_pinned") else None],
        ["step", step],
        ["loss", loss],
        ["ETA", eta],
        *(
            [name, f"{value:.6g}"]
            for name, value in sorted(job["metrics"].items())
            if isinstance(value, int | float) and not (name == "loss" and loss)
        ),
        *job["artifacts"].items(),
        ["directory", job["job_dir"]],
    ]
    terminal.table(["", " "], [fact for fact in facts if fact[1] not in (None, "")])
    if job["error"]:
        terminal.say()
        terminal.say_error(job["error"])
    if job["needs_bytes"] and not ((wait := job.get("waiting_for")) and wait["reason"] == "disk"):
        terminal.say(f"waiting for {job['needs_bytes'] / 2**20:,.0f} MiB of free disk space", style="yellow")
    for change in job["adjustments"]:
        terminal.say(f"attempt {change['attempt']} ran out of memory: {change['text']}", style="yellow")
    if job["attempts"]:
        terminal.say()
        columns = ["attempt", "backend", "device", "started (UTC)", "ended", *_ATTEMPT_KEYS[5:]]
        terminal.table(columns, map(_attempt_cells, job["attempts"]))
    for attempt in job["attempts"]:
        if preemption := attempt.get("preemption"):
            stop_sec = preemption["stop_sec"]
            cost = f"; stopped after {duration(stop_sec)}" if stop_sec is not None else "; writing a checkpoint"
            terminal.say(f"attempt {attempt['number']} was preempted: {preemption['reason']}{cost}", style="yellow")
    for item in job["events"]:
        if item["event"] == "fallback":
            words = f"fell back from {item.get('from')} to {item.get('to')}: {item.get('reason')}"
            terminal.say(words, style="yellow")
        if item["event"] == "worse" and not remark and isinstance(found := item.get("found"), list):
            terminal.say(f"ended worse than it began: {', '.join(map(str, found))}", style="yellow")
    if memory := _memory_rows(job["memory"]["estimated"], job["memory"]["used"]):
        terminal.say()
        terminal.table(["memory", "estimated", "used"], memory, right=["estimated", "used"])
    if audits := [item for item in job["events"] if item["event"] == "audit"]:
        _say_audit(audits)
    return 0


def _show_group(found: GroupShown, *, as_json: bool) -> int:
    """Print the jobs of a sweep with their values and losses."""
    if as_json:
        terminal.console.print_json(json.dumps(found))
        return 0
    terminal.say(
        f"sweep {found['id']} ({found['name']}), from {found['file']}: {len(found['jobs'])} jobs", style="bold"
    )
    keys = list(dict.fromkeys(key for job in found["jobs"] for key in job["values"]))
    rows = [
        [
            job["id"],
            terminal.plain(job["name"], limit=40),
            job["outcome"] if job["state"] == "failed" else job["state"],
            *(terminal.plain(json.dumps(job["values"].get(key)), limit=30) for key in keys),
            "" if job["eval_loss"] is None else f"{job['eval_loss']:.4g}",
        ]
        for job in found["jobs"]
    ]
    terminal.table(["id", "name", "state", *keys, "eval_loss"], rows, right=["id", "eval_loss"])
    if found["best"] is not None:
        terminal.say(f"the lowest eval_loss of those that succeeded has job {found['best']}", style="green")
    return 0


def _preempted(job: Shown) -> str:
    """Describe the current preemption and the number of all of them; empty without any."""
    if not (num := job.get("num_preemptions")):
        return ""
    preemption = job.get("preemption")
    times = f"{num} {'time' if num == 1 else 'times'}"
    return f"{preemption['reason']} ({times} so far)" if preemption else times


_ATTEMPT_KEYS = ("number", "backend", "device", "started_at", "ended_at", "outcome", "step")


def _attempt_cells(attempt: Mapping[str, object]) -> list[str]:
    """Return a row of the attempts' table; times without their year, so that it fits into a terminal."""
    cells = {key: str(attempt[key] or "") for key in _ATTEMPT_KEYS}
    return [text[5:19].replace("T", " ") if key.endswith("_at") else text[:19] for key, text in cells.items()]


#: Rows of the table of memory: label, key of the estimate, key of the measured value.
_MEMORY_ROWS = (
    *((name, f"{name}_bytes", f"{name}_bytes") for name in ("weights", "adapter", "gradient", "optimizer")),
    ("activations", "activation_bytes", ""),
    ("total, or peak on the GPU", "total_bytes", "device_peak_bytes"),
    ("peak of the process (resident)", "", "resident_peak_bytes"),
)


def _memory_rows(estimated: Mapping[str, object], used: Mapping[str, object]) -> list[list[str]]:
    """Return the table of estimated and used memory."""

    def cell(figures: Mapping[str, object], key: str) -> str:
        value = figures.get(key)
        return f"{value / 2**20:,.1f} MiB" if isinstance(value, int) else ""

    rows = [[words, cell(estimated, planned), cell(used, held)] for words, planned, held in _MEMORY_ROWS]
    return [row for row in rows if row[1] or row[2]]


def _say_audit(audits: list[dict[str, Any]]) -> None:
    """Print the audit: the model's dtypes when it was last checked, and the fixes before that."""
    from honed.job import event

    last = audits[-1]
    keys = ["role", "dtype", "device", "num_parameters"]
    terminal.say()
    terminal.say(
        f"audit ({last.get('when')}): model {last.get('model_dtype')}, quantization {last.get('quantization')}, "
        f"config {last.get('config_dtype')}, embeddings {last.get('embedding_dtype')}"
    )
    counts = [each for each in event.items(last, "counts") if isinstance(each, dict)]
    terminal.table(
        ["role", "dtype", "device", "parameters"],
        [[each.get(key) for key in keys] for each in counts],
        right=["parameters"],
    )
    for item in audits:
        for text in event.items(item, "mended"):
            terminal.say(f"fixed ({item.get('when')}): {text}", style="yellow")


def report(instance: Instance, options: argparse.Namespace) -> int:
    """Print the page's path; with --open, also open it in a browser."""
    if options.id is None:
        path, what = instance.layout.index_path, "there is no index yet"
    else:
        job = instance.show(options.id)
        path, what = instance.layout.job(job["id"]).report_path, f"job {job['id']} has no report yet"
    if not path.exists():
        raise EnvironmentInvalidError(f"{path}: {what}", hint="honed writes it shortly after accepting the job")
    if not os.access(path, os.R_OK):
        raise NotPermittedError(
            f"{path}: you may not read it", hint="honectl report ID prints the path of a job's report"
        )
    if not options.json:
        print(path, flush=True)  # unformatted, for `$(honectl report 7)`; and before a browser draws in the terminal
    if options.open:
        _open(path)
    if options.json:  # last: if the page did not open, only the error is printed
        terminal.console.print_json(json.dumps({"report": str(path)}))
    return 0


def _open(path: Path) -> None:
    import webbrowser

    if webbrowser.open(path.as_uri()):
        return
    named = os.environ.get("BROWSER")
    what = f"BROWSER could not open it: {named}" if named else "there is no browser on this machine"
    raise EnvironmentInvalidError(what, hint=f"copy {path} to a machine with a browser: it is a single file")
