"""Displays of jobs in honectl: the list, one job, its predictions, and the path of its page."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.cli import column, terminal
from honed.cli.column import COLUMNS, USUAL
from honed.cli.instance import Instance
from honed.job.progress import duration, together
from honed.system.error import EnvironmentInvalidError, NotPermittedError, UsageError

if TYPE_CHECKING:
    from honed.job.shape import Arrival, GroupShown, Overview, Refusal, Refused, Row, Shown

#: Jobs up to which JSON is drawn in colours; longer output is for scripts.
MAX_PRETTY = 500
MAYBE_EMPTY = ("outcome", "priority", "model", "data", "step", "loss", "score", "elapsed", "eta")
ENDED = ("succeeded", "failed", "cancelled")


def list_jobs(instance: Instance, options: argparse.Namespace) -> int:
    """Print the first jobs of every kind for a person, or all jobs for a script, or what the options choose."""
    if options.json and options.output not in (None, "json"):
        raise UsageError(f"--json and -o {options.output} exclude each other", hint="give one of the two")
    if options.output == "json":
        options.json = True
    if options.rejected:
        return _list_rejected(instance, options)
    columns = _columns(options.output)
    chosen = _chosen(instance, options)
    jobs = chosen["jobs"]
    if options.json:
        terminal.say_json(jobs) if len(jobs) <= MAX_PRETTY else print(json.dumps(jobs))
        return 0
    if options.output == "name":
        for job in jobs:
            terminal.say(job["name"] or str(job["id"]))
        return 0
    if columns is not None:
        _say_rows(columns, _rows(columns, jobs))
        return 0
    _say_jobs(jobs)
    if left := _left_out(jobs, chosen["counts"]):
        terminal.say(f"… and {left}: honectl list --all", style="dim")
    if not (options.ids or options.state or options.filter):
        _say_num_rejected(chosen["refused"])
    _say_status(instance, jobs)
    return 0


def _chosen(instance: Instance, options: argparse.Namespace) -> Overview:
    """Return the jobs that the options choose, in their order, and the number of jobs per state if only the first
    ones were asked for."""
    choice = {"states": options.state, "names": options.ids}
    is_all = options.all or options.json or options.limit is not None or options.after is not None
    if options.sort or options.filter:
        for key in [options.sort.removeprefix("-")] if options.sort else []:
            column.named(key)  # an unknown one is rejected before all jobs are read
        meets = column.test(
            options.filter or [], {"class": lambda: _classes(instance), "sweep": lambda: _sweeps(instance)}
        )
        jobs = [job for job in instance.jobs(**choice, after=options.after) if meets(job)]
        jobs = column.ordered(jobs, options.sort) if options.sort else jobs
        return _whole(jobs[: options.limit])
    if is_all or options.output:
        return _whole(instance.jobs(**choice, limit=options.limit, after=options.after))
    overview: Overview = instance.ask("overview", **choice)
    return overview


def _classes(instance: Instance) -> list[str]:
    from honed.spec import config

    return sorted({*config.load(instance.layout).classes, *(job["class"] for job in instance.jobs() if job["class"])})


def _sweeps(instance: Instance) -> list[str]:
    groups = [group for job in instance.jobs() if (group := job.get("group"))]
    return list(dict.fromkeys(word for group in groups for word in (group["name"], str(group["id"]))))


def _whole(jobs: list[Row]) -> Overview:
    return {"jobs": jobs, "counts": {}, "refused": {"files": [], "num": 0, "are_all": True}}


def _columns(output: str | None) -> list[str] | None:
    """Return the columns that `-o` names; None for those of the list itself. Raises UsageError for another form."""
    match output:
        case None | "json" | "name":
            return None
        case "wide":
            return list(COLUMNS)
        case str() if output.startswith("columns="):
            asked = column.several(output.removeprefix("columns="))
            if not asked:
                raise UsageError("-o columns= names no column", hint=f"its columns are: {', '.join(COLUMNS)}")
            return [name for item in asked for name in COLUMNS if COLUMNS[name] is item]
        case _:
            raise UsageError(f"-o {output}: no such form", hint="use wide, json, name or columns=id,name,score")


def _say_jobs(jobs: list[Row]) -> None:
    names = [*USUAL, *(["why"] if any(job.get("waiting_for") for job in jobs) else [])]
    if any(job.get("group") for job in jobs):
        names.insert(names.index("name") + 1, "sweep")
    rows = _rows(names, jobs)
    if terminal.console.is_terminal:
        _say_narrow(names, rows)
        return
    for row in rows:  # --json has all of it
        row["outcome"] = terminal.plain(row["outcome"], limit=column.MAX_OUTCOME)
    _say_rows(names, rows)


def _rows(names: Sequence[str], jobs: list[Row]) -> list[dict[str, str]]:
    return [{name: COLUMNS[name].text(job) for name in names} for job in jobs]


def _say_rows(names: Sequence[str], rows: list[dict[str, str]]) -> None:
    columns = [COLUMNS[name] for name in names]
    right = [item.title for item in columns if item.is_right]
    terminal.table([item.title for item in columns], [[row[name] for name in names] for row in rows], right=right)


def _say_status(instance: Instance, jobs: list[Row]) -> None:
    """Print what the daemon waits for and which devices are closed."""
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


def _say_num_rejected(rejections: Refused) -> None:
    if rejections["num"]:
        more = "" if rejections["are_all"] else " or more"
        files = "rejected file" if rejections["num"] == 1 else "rejected files"
        newest = terminal.plain(rejections["files"][0]["file"], limit=40)
        terminal.say(f"{rejections['num']}{more} {files}, the newest {newest}: honectl list --rejected", style="dim")


def _list_rejected(instance: Instance, options: argparse.Namespace) -> int:
    """Print the rejected files, the newest first."""
    from honed.job.database import timestamp

    rejections: Refused = instance.ask("refused", limit=options.limit)
    if options.json:
        terminal.say_json(rejections["files"])
        return 0
    rows = [
        [
            terminal.plain(item["file"], limit=60),
            timestamp(item["refused_at"])[:16].replace("T", " "),
            terminal.plain(_cause(item["reason"]), limit=120),
        ]
        for item in rejections["files"]
    ]
    if not rows:
        terminal.say("no rejected files")
        return 0
    terminal.table(["file", "refused (UTC)", "detail"], rows)
    terminal.say("honectl show FILE prints the whole reason; honectl prune --rejected removes such files", style="dim")
    return 0


def _cause(reason: str) -> str:
    """Return the first line of a reason that says what is wrong: those before it name the file and its number."""
    _, _, rest = reason.partition("\n\n")
    return " ".join(line.strip() for line in rest.partition("\n\n")[0].splitlines()) or reason.partition("\n")[0]


#: The remark on a queue that was read from files.
_DOWN = "honed is not running: the queue is in the order that the shares, as last written, let expect"
#: Columns of a terminal from which on priority and the reason of a wait are shown; and those for the submission time.
BROAD, WIDE = 100, 140
#: Characters of a name below BROAD.
NARROW_NAME = 24


def _say_narrow(names: list[str], rows: list[dict[str, str]]) -> None:
    """Print the columns of the list for which the terminal has room; programs read every column, through a pipe."""
    for row in rows:
        row["outcome"] = row["outcome"].removeprefix(row["state"]).removeprefix(", ")
    remarks = [f"job {row['id']}: succeeded, {row['outcome']}" for row in rows if row["outcome"].startswith("but ")]
    for row in rows:
        if row["outcome"].startswith("but "):
            row["outcome"] = "but: see below"
    too_much = {"submitted", "data"} if terminal.console.width < WIDE else set()
    waits: list[str] = []
    if terminal.console.width < BROAD:
        too_much |= {"priority", "why", "model", "elapsed", "sweep"}
        for row in rows:
            row["name"] = terminal.plain(row["name"], limit=NARROW_NAME)
        waits = [f"job {row['id']}: {row['why']}" for row in rows if row.get("why")]
    # An empty column would take room from the others.
    kept = [
        name for name in names if name not in too_much and (name not in MAYBE_EMPTY or any(row[name] for row in rows))
    ]
    if terminal.console.width < BROAD and "score" in kept and "loss" in kept:
        kept.remove("loss")
    _say_rows(kept, rows)
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
            return _show_group(instance.ask("group", id=options.id), as_json=options.json)
        except UsageError:
            pass
        if not error.message.startswith("no job ") or (refusal := _refusal(instance, options.id)) is None:
            raise
        return _show_rejected(refusal, as_json=options.json)
    if options.json:
        terminal.say_json(job)
        return 0
    step, loss, eta = terminal.progress_cells(job)
    remark = terminal.plain(job.get("remark") or "", limit=400)
    terminal.say(
        f"job {job['id']} ({job['name']}): {terminal.state_words(job)}{', but ' if remark else ''}{remark}",
        style="yellow" if remark else terminal.STATE_STYLES.get(job["state"], "bold"),
    )
    if job["error"]:
        terminal.say_error(job["error"])
        terminal.say()
    facts: list[Sequence[object]] = [
        ["outcome", job["outcome"]],
        ["stopped", early["reason"] if (early := job.get("stopped_early")) else None],
        ["waits", terminal.why_waiting(job)],
        ["preempted", _preempted(job)],
        ["cluster", terminal.plain(_cluster(job), limit=400)],
        ["model", job.get("model")],
        ["data", "\n".join(job.get("data") or ())],
        ["adapter", _adapter(job["spec"])],
        ["duration", COLUMNS["elapsed"].text(job)],
        ["step", step],
        ["loss", loss],
        ["ETA", eta],
        *(
            [name, f"{value:.6g}"]
            for name, value in sorted(job["metrics"].items(), key=lambda metric: column.scores_first(metric[0]))
            if isinstance(value, int | float) and not (name == "loss" and loss)
        ),
        *job["artifacts"].items(),
        ["submitted", job["submitted_at"]],
        ["edited", ", ".join(job.get("edited_at") or ())],
        ["from", job["source"]],
        ["pinned", "yes" if job.get("is_pinned") else None],
        ["directory", job["job_dir"]],
    ]
    terminal.table(["", " "], [fact for fact in facts if fact[1] not in (None, "")])
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
            terminal.say(f"fell back from {item.get('from')} to {item.get('to')}: {item.get('reason')}", style="yellow")
        if item["event"] == "worse" and not remark and isinstance(findings := item.get("found"), list):
            terminal.say(f"ended worse than it began: {', '.join(map(str, findings))}", style="yellow")
    if memory := _memory_rows(job["memory"]["estimated"], job["memory"]["used"]):
        terminal.say()
        terminal.table(["memory", "estimated", "used"], memory, right=["estimated", "used"])
    if audits := [item for item in job["events"] if item["event"] == "audit"]:
        _say_audit(audits)
    return 0


def _cluster(job: Shown) -> str:
    """Return what Slurm says of the last attempt's job: its number, its nodes, why it waits."""
    if (slurm := job.get("slurm")) is None:
        return ""
    where = f" on {slurm['nodes']}" if slurm["nodes"] else ""
    why = f", {slurm['reason']}" if slurm["reason"] else ""
    number = f"Slurm job {slurm['id']}" if slurm["id"] else f"{slurm['name']}, not yet in Slurm"
    return f"{number}: {slurm['state'].lower() or 'submitted'}{where}{why}"


def _show_group(group: GroupShown, *, as_json: bool) -> int:
    """Print the jobs of a sweep with their values and losses."""
    if as_json:
        terminal.say_json(group)
        return 0
    terminal.say(
        f"sweep {group['id']} ({group['name']}), from {group['file']}: {len(group['jobs'])} jobs", style="bold"
    )
    keys = list(dict.fromkeys(key for job in group["jobs"] for key in job["values"]))
    rows = [
        [
            job["id"],
            terminal.plain(job["name"], limit=40),
            job["outcome"] if job["state"] == "failed" or job.get("stopped_early") else job["state"],
            *(terminal.plain(json.dumps(job["values"].get(key)), limit=30) for key in keys),
            "" if job["eval_loss"] is None else f"{job['eval_loss']:.4g}",
        ]
        for job in group["jobs"]
    ]
    terminal.table(["id", "name", "state", *keys, "eval_loss"], rows, right=["id", "eval_loss"])
    for job in group["jobs"]:
        if early := job.get("stopped_early"):
            terminal.say(f"job {job['id']} was stopped early: {early['reason']}", style="yellow")
    if any(job.get("stopped_early") for job in group["jobs"]):
        terminal.say("honectl requeue ID trains such a job to its end, from its checkpoint", style="dim")
    if group["best"] is not None:
        terminal.say(f"the lowest eval_loss of those that succeeded has job {group['best']}", style="green")
    return 0


def _adapter(spec: Mapping[str, Any]) -> str:
    """Describe what a job trains; empty for one that trains nothing."""
    from honed.spec import kind

    if not kind.of(spec).trains:
        return str(spec.get("adapter") or "")
    lora, start = spec.get("lora"), spec.get("adapter")
    words = [f"continues {start}"] if start else []
    if isinstance(lora, dict):
        words.append(f"LoRA, r {lora.get('r')}, alpha {lora.get('lora_alpha')}")
    if (quantization := spec.get("quantization", "none")) not in (None, "none"):
        words.append(f"base in {quantization}")
    return ", ".join(words) or ("none: all weights are trained" if spec else "")


def _refusal(instance: Instance, name: str) -> Refusal | None:
    """Return the refusal of a file, by the name that it was dropped with, with or without its suffix."""
    refusal: Refusal | None = instance.ask("refusal", id=Path(name).name)
    if refusal is not None:
        return refusal
    files: list[Refusal] = instance.ask("refused")["files"]
    return next((file for file in files if Path(name).name in (file["file"], Path(file["file"]).stem)), None)


def _show_rejected(refusal: Refusal, *, as_json: bool) -> int:
    """Print why a file was rejected."""
    if as_json:
        terminal.say_json({"state": "rejected", **refusal})
    else:
        terminal.say(f"{refusal['file']}: refused, not a job", style=terminal.STATE_STYLES["rejected"])
        for line in refusal["reason"].rstrip().splitlines():
            terminal.say(line)
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
    counts = [one for one in event.items(last, "counts") if isinstance(one, dict)]
    terminal.table(
        ["role", "dtype", "device", "parameters"],
        [[count.get(key) for key in keys] for count in counts],
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
        path, what = instance.layout.files(job["id"]).place / "report.html", f"job {job['id']} has no report yet"
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
        terminal.say_json({"report": str(path)})
    return 0


def _open(path: Path) -> None:
    import webbrowser

    if webbrowser.open(path.as_uri()):
        return
    named = os.environ.get("BROWSER")
    what = f"BROWSER could not open it: {named}" if named else "there is no browser on this machine"
    raise EnvironmentInvalidError(what, hint=f"copy {path} to a machine with a browser: it is a single file")
