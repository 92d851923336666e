"""honectl: hands jobs to honed, and tells what became of them.

Reads through the control socket, and from the files when honed is down; changes go through the socket, or, when honed
is down, to the spool itself under its lock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from honed import __version__, config, event, foreign, query
from honed import layout as layouts
from honed import spool as spools
from honed.control import Client
from honed.database import timestamp
from honed.error import EnvironmentInvalidError, HonedError, ModelError, NotPermittedError, UsageError
from honed.job import State
from honed.layout import Layout
from honed.spool import Spool

FINAL_STATES = {"succeeded", "failed", "cancelled"}
#: Seconds between looks while following something.
FOLLOW_INTERVAL_SEC = 0.3
#: Seconds that `submit` waits for honed's verdict on a file.
VERDICT_TIMEOUT_SEC = 90.0


class Instance:
    """One honed, running or not."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._client = Client(layout.control_path)

    @property
    def is_up(self) -> bool:
        return self._client.is_up

    def _spool(self, *, lock: bool = False) -> Spool:
        if not self.layout.spool_dir.is_dir():
            raise EnvironmentInvalidError(
                f"{self.layout.spool_dir}: there is no spool", hint="start honed once, or give its --root DIR"
            )
        return Spool(self.layout, lock=lock)

    def read(self, verb: str, reference: str = "") -> Any:
        """Ask the daemon, or read the files where it is down."""
        if self.is_up:
            return self._client.ask(verb, id=reference)
        return query.READING_VERBS[verb](self._spool(), self.layout, reference, query.ANYBODY)

    def change(self, verb: str, reference: str, **arguments: Any) -> Any:
        """Change a job, through the daemon or, where it is down, in the spool itself."""
        if self.is_up:
            return self._client.ask(verb, id=reference, **arguments)
        from honed.daemon import change

        spool = self._spool(lock=True)
        try:
            return query.summary(change(spool, self.layout, verb, query.find(spool, reference), **arguments), {})
        finally:
            spool.close()

    def arrivals(self) -> list[dict[str, Any]]:
        """What waits for its base model to be fetched; only a running daemon fetches."""
        return list(self._client.ask("status")["arrivals"]) if self.is_up else []

    def pause(self, paused: bool) -> None:
        if self.is_up:
            self._client.ask("pause" if paused else "resume")
        else:
            self._spool().pause(paused)


# -- verbs ------------------------------------------------------------------------------------------------------------


def submit(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    if options.stage:
        options.files = [_stage(instance, path, quiet=options.json) for path in options.files]
    checked = [_accepted(instance, path) for path in options.files]
    if None in checked:
        _remove_copies(instance, options)
        return 1
    if options.wait and not instance.is_up:
        raise EnvironmentInvalidError("honed is not running, so there is nothing to wait for", hint="start it first")
    incoming_dir = instance.layout.spool_dir / "incoming"
    if not incoming_dir.is_dir():
        raise EnvironmentInvalidError(
            f"{incoming_dir}: no such directory", hint="start honed once, or give its --root DIR"
        )
    status, answers = 0, []
    since = time.time() - 1.0
    # All are dropped before the first verdict: one may name another.
    names = [spools.drop(incoming_dir, path, hold=options.hold) for path in options.files]
    for path, name, verdict in zip(options.files, names, checked, strict=True):
        if instance.is_up and verdict.needs_fetch and not options.wait:
            answers.append({"file": str(path), "id": None, "state": "fetching", **_missing(verdict)})
        elif instance.is_up:
            answers.append(_verdict(instance, name, since, is_fetched=bool(verdict.needs_fetch)))
        else:
            answers.append({"file": str(path), "id": None})
        _say_verdict(path, answers[-1], as_json=options.json)
        status |= answers[-1].get("state") == "rejected"
        if answers[-1].get("state") == "rejected":
            _remove_copies(instance, options, path)
    if options.json:
        terminal.console.print_json(json.dumps(answers))
    if options.wait:
        for answer in answers:
            if answer["id"] is not None:
                status |= follow_until_final(instance, str(answer["id"]), quiet=options.json)
    return int(status)


def _stage(instance: Instance, path: Path, *, quiet: bool) -> Path:
    """The job file to drop: one that names copies of what the workers cannot reach."""
    from honed import terminal
    from honed.stage import stage

    if not path.exists():
        raise UsageError(f"{path}: no such file")
    staged = stage(path, instance.layout, config.load(instance.layout))
    for key, source, copy in () if quiet else staged.copies:
        terminal.say(f"{key}: {source} copied to {copy}")
    return staged.spec_path


def _remove_copies(instance: Instance, options: argparse.Namespace, path: Path | None = None) -> None:
    """Those that --stage has made for a file that is refused, or for all."""
    from honed.staged import place_of

    for each in [path] if path else options.files if options.stage else []:
        place = place_of(each, instance.layout)
        if options.stage and place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _accepted(instance: Instance, path: Path) -> Any:
    """The check's verdict on a file that honed would take; None after each reason against it went to stderr.

    Raises UsageError where there is no such file.
    """
    try:
        return check_one(instance, path)
    except UsageError:
        raise
    except HonedError as error:
        _complain(error, prefix=f"{path}: ")
        return None


def _missing(verdict: Any) -> dict[str, str]:
    """The model that has to be fetched first."""
    return {"repo_id": verdict.needs_fetch.repo_id, "revision": verdict.needs_fetch.revision}


def _verdict(instance: Instance, name: str, since: float, *, is_fetched: bool) -> dict[str, Any]:
    """What honed made of a file just dropped. Where a model `is_fetched` first, that may take hours."""
    deadline = time.monotonic() + VERDICT_TIMEOUT_SEC
    while time.monotonic() < deadline or (is_fetched and instance.is_up):
        for job in instance.read("list"):
            if job["source"] == name and job["submitted_at"] >= timestamp(since):
                return dict(job)
        refused = instance.read("refusal", name)
        if refused is not None and refused["refused_at"] >= since:
            return {"id": None, "state": "rejected", "reason": refused["reason"]}
        time.sleep(0.05)
    return {"id": None, "state": None}


def _say_verdict(path: Path, verdict: dict[str, Any], *, as_json: bool) -> None:
    from honed import terminal

    if as_json:
        return
    if verdict["id"] is not None:
        terminal.say(f"{path}: job {verdict['id']} ({verdict['name']}), {verdict['state']}")
    elif verdict.get("state") == "fetching":
        model = f"{verdict['repo_id']} at {verdict['revision']}"
        terminal.say(f"{path}: dropped; honed takes it when it has fetched {model}; honectl list")
    elif verdict.get("state") == "rejected":
        terminal.say(f"{path}: refused\n{verdict['reason']}", style="red")
    else:
        terminal.say(f"{path}: dropped; honed takes it when it runs")


def check_one(instance: Instance, path: Path) -> Any:
    """All that honed would check before it accepts a job file. Raises what it would refuse it with."""
    from honed import preflight

    if not path.exists():
        raise UsageError(f"{path}: no such file")
    jobs = _made(instance, path)
    return preflight.check(path, layout=instance.layout, config=config.load(instance.layout), jobs=jobs)


def _made(instance: Instance, path: Path) -> dict[str, Path]:
    """The output directories of the jobs that a job file names, as far as they have succeeded."""
    from honed import spec as specs

    try:
        names = set(specs.references(specs.load(path)).values())
    except HonedError:
        return {}  # the check says what is wrong with it
    made = {}
    for name in sorted(names) if instance.layout.spool_dir.is_dir() else ():
        known = [job for job in instance.read("list") if name in {job["name"], str(job["id"])}]
        newest = max(known, key=lambda job: int(job["id"]), default=None)
        if newest is not None and newest["state"] == "succeeded":
            made[name] = Path(instance.read("show", str(newest["id"]))["artifacts"]["output_dir"])
    return made


def _checked(instance: Instance, path: Path) -> Any:
    """As check_one; what it raises names the file."""
    try:
        return check_one(instance, path)
    except HonedError as error:
        if str(path) not in error.message:
            error.message = f"{path}: {error.message}"
        raise


def check(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    answers: list[dict[str, Any]] = []
    for path in options.files:
        try:
            verdict = check_one(instance, path)
        except HonedError as error:
            answers.append(
                {"file": str(path), "ok": False, "error": error.as_dict(), "warnings": [], "needs_fetch": None}
            )
        else:
            missing = _missing(verdict) if verdict.needs_fetch else None
            answers.append({"file": str(path), "ok": True, "error": None, "warnings": list(verdict.warnings),
                            "needs_fetch": missing})  # fmt: skip
    if options.json:
        terminal.console.print_json(json.dumps(answers))
        return int(not all(answer["ok"] for answer in answers))
    for answer in answers:
        if answer["ok"]:
            terminal.say(f"{answer['file']}: ok", style="green")
        else:
            _say_error(answer["error"], prefix=f"{answer['file']}: ")
        for warning in answer["warnings"]:
            terminal.say(f"  warning: {warning}", style="yellow")
    return int(not all(answer["ok"] for answer in answers))


def plan(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    verdict = _checked(instance, options.file)
    if verdict.plan is None:
        return _say_deferred(verdict, as_json=options.json)
    made = verdict.plan.as_dict()
    if options.json:
        terminal.console.print_json(json.dumps(made))
        return 0
    terminal.say(f"backend: {made['backend']['name']}", style="bold")
    for reason in made["backend"]["reasons"]:
        terminal.say(f"  {reason}")
    precision = made["precision"]
    words = {None: "none", True: "yes", False: "no"}
    for key, why in precision["reasons"].items():
        value = precision.get(key)
        terminal.say(f"{key}: {words[value] if value is None or isinstance(value, bool) else value}", style="bold")
        terminal.say(f"  {why}")
    memory = [[key.removesuffix("_bytes"), f"{value / 2**20:,.1f} MiB"] for key, value in made["memory"].items()
              if key.endswith("_bytes") and value is not None]  # fmt: skip
    terminal.table(["memory (estimate)", ""], memory, right=[""])
    parameters = made["checkpoint"]
    stored = ", ".join(f"{count:,} {dtype}" for dtype, count in parameters["stored_dtypes"].items())
    terminal.say(f"checkpoint: {parameters['num_parameters']:,} parameters ({stored})")
    for warning in made["warnings"]:
        terminal.say(f"warning: {warning}", style="yellow")
    return 0


def _say_deferred(verdict: Any, *, as_json: bool) -> int:
    """Of a job that starts from what another makes, or from a model that has to be fetched: there is no plan yet."""
    from honed import terminal

    if as_json:
        missing = _missing(verdict) if verdict.needs_fetch else None
        terminal.console.print_json(json.dumps(
            {"waits_for": dict(verdict.waits_for), "needs_fetch": missing, "warnings": list(verdict.warnings)}
        ))  # fmt: skip
        return 0
    why = (
        "the job starts from what another one makes" if verdict.waits_for else "the base model has to be fetched first"
    )
    terminal.say(f"no plan yet: {why}", style="bold")
    for warning in verdict.warnings:
        terminal.say(f"  {warning}")
    return 0


def preview(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    verdict = _checked(instance, options.file)
    if verdict.needs_fetch:
        model = " at ".join(_missing(verdict).values())
        raise ModelError(
            f"base_model: {model} is not in the local cache, so there is no tokenizer to preview with",
            hint=f"honectl submit has it fetched, or python -m honed.fetch {verdict.needs_fetch.repo_id}",
        )
    command = [sys.executable, "-m", "honed.worker.preview", str(options.file), "--rows", str(options.rows), "--json"]
    if verdict.plan is not None:
        command += ["--base-model", str(verdict.plan.model.path)]
    environment = {"HF_HOME": str(instance.layout.cache_dir), **os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
    if done.returncode:
        return done.returncode
    if options.json:
        sys.stdout.buffer.write(done.stdout)
        return 0
    for row in json.loads(done.stdout):
        share = row["num_trained"] / row["num_tokens"] if row["num_tokens"] else 0
        cut = ", cut off" if row["is_truncated"] else ""
        counts = f"{row['num_tokens']} tokens, {row['num_trained']} trained ({share:.0%}){cut}"
        terminal.say(f"{row['dataset']}: row {row['row']}: {counts}", style="bold")
        terminal.console.print(terminal.segments(row["segments"]))
        terminal.say()
    return 0


def try_out(instance: Instance, options: argparse.Namespace) -> int:
    """Have honed try a job file on a few rows, before all other jobs, and say what that tells of it."""
    from honed import document, terminal, trial

    _checked(instance, options.file)
    if not instance.is_up:
        raise EnvironmentInvalidError("honed is not running, and a trial is a job", hint="start it first")
    content = document.parse(options.file.read_bytes(), options.file.suffix).data
    since = time.time() - 1.0
    with tempfile.TemporaryDirectory(prefix="honectl-") as directory:
        path = Path(directory) / f"{options.file.stem}.trial.json"
        path.write_text(json.dumps(trial.only(content, options.file.stem)), encoding="utf-8")
        name = spools.drop(instance.layout.spool_dir / "incoming", path)
    verdict = _verdict(instance, name, since, is_fetched=True)
    if verdict["id"] is None:
        _say_verdict(options.file, verdict, as_json=False)
        return 1
    if not options.json:
        terminal.say(f"job {verdict['id']} ({verdict['name']}): {trial.NUM_ROWS} rows, a few steps")
    *_, job = _states(instance, str(verdict["id"]))
    told = next((item for item in reversed(job["events"]) if item["event"] == "trial"), None)
    if options.json:
        terminal.console.print_json(json.dumps({"id": job["id"], "error": job["error"], "findings": told}))
    elif told is None:
        _say_end(job)
    else:
        terminal.trial(trial.Findings.from_dict(told))
    return int(told is None or told["verdict"] == "does_not_learn")


def list_jobs(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    jobs = instance.read("list")
    if options.state:
        jobs = [job for job in jobs if job["state"] in options.state]
    if options.json:
        terminal.console.print_json(json.dumps(jobs))
        return 0
    rows = [
        [job["id"], terminal.plain(job["name"], limit=40), job["state"], job["outcome"] or "", job["priority"],
         *terminal.progress_cells(job["progress"]), job["submitted_at"][:16].replace("T", " ")]
        for job in jobs
    ]  # fmt: skip
    columns = ["id", "name", "state", "outcome", "priority", "step", "loss", "ETA", "submitted (UTC)"]
    terminal.table(columns, rows, right=["id", "priority", "step", "loss", "ETA"])
    for job in jobs:
        if job["needs_bytes"]:
            terminal.say(f"{job['id']}: waits for {job['needs_bytes'] / 2**20:,.0f} MiB of free disk space")
    for arrival in instance.arrivals():
        terminal.say(_fetch_line(arrival))
    return 0


def _fetch_line(arrival: dict[str, Any]) -> str:
    """What waits for a model and is no job yet, and how far that is."""
    from honed import terminal

    done, of = arrival["num_bytes"] / 2**30, arrival["total_bytes"]
    share = f": {done:.1f} of {of / 2**30:.1f} GiB" if of else ""
    problem = f"; {arrival['problem']}" if arrival["problem"] else ""
    if arrival["repo_id"] is None:
        return f"{arrival['id']}: waits for a model that is fetched{share}"
    name = terminal.plain(arrival["name"], limit=40)
    return f"{arrival['id']} ({name}): fetching {arrival['repo_id']} at {arrival['revision']}{share}{problem}"


def show(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    job = instance.read("show", options.id)
    if options.json:
        terminal.console.print_json(json.dumps(job))
        return 0
    step, loss, eta = terminal.progress_cells(job["progress"])
    terminal.say(
        f"job {job['id']} ({job['name']}): {job['state']}", style=terminal.STATE_STYLES.get(job["state"], "bold")
    )
    facts = [["outcome", job["outcome"]], ["submitted", job["submitted_at"]], ["from", job["source"]], ["step", step],
             ["loss", loss], ["ETA", eta], *([name, f"{value:.6g}"] for name, value in sorted(job["metrics"].items())
             if isinstance(value, int | float)), *job["artifacts"].items(), ["directory", job["job_dir"]]]  # fmt: skip
    terminal.table(["", " "], [fact for fact in facts if fact[1] not in {None, ""}])
    if job["error"]:
        terminal.say()
        _say_error(job["error"])
    if job["needs_bytes"]:
        terminal.say(f"waits for {job['needs_bytes'] / 2**20:,.0f} MiB of free disk space", style="yellow")
    for item in job["adjustments"]:
        terminal.say(f"attempt {item['attempt']} ran out of memory: {item['text']}", style="yellow")
    if job["attempts"]:
        keys = ["number", "backend", "device", "started_at", "ended_at", "outcome", "step"]
        terminal.say()
        terminal.table(
            ["attempt", *keys[1:]], [[str(attempt[key] or "")[:19] for key in keys] for attempt in job["attempts"]]
        )
    for item in job["events"]:
        if item["event"] == "fallback":
            terminal.say(f"fell back from {item['from']} to {item['to']}: {item['reason']}", style="yellow")
    if memory := _memory_rows(job["memory"]["estimated"], job["memory"]["used"]):
        terminal.say()
        terminal.table(["memory", "estimated", "used"], memory, right=["estimated", "used"])
    if audits := [item for item in job["events"] if item["event"] == "audit"]:
        _say_audit(audits)
    return 0


#: Rows of the table of memory: its words, the key of the estimate and that of what was used.
_MEMORY_ROWS = (
    *((name, f"{name}_bytes", f"{name}_bytes") for name in ("weights", "adapter", "gradient", "optimizer")),
    ("activations", "activation_bytes", ""),
    ("all, or peak on the GPU", "total_bytes", "device_peak_bytes"),
    ("peak of the process (resident)", "", "resident_peak_bytes"),
)


def _memory_rows(estimated: dict[str, Any], used: dict[str, Any]) -> list[list[str]]:
    """Estimated and used, side by side."""

    def cell(figures: dict[str, Any], key: str) -> str:
        value = figures.get(key)
        return f"{value / 2**20:,.1f} MiB" if isinstance(value, int) else ""

    rows = [[words, cell(estimated, planned), cell(used, held)] for words, planned, held in _MEMORY_ROWS]
    return [row for row in rows if row[1] or row[2]]


def _say_audit(audits: list[dict[str, Any]]) -> None:
    """What the model was when it was last looked at, and what had to be mended on the way there."""
    from honed import terminal

    last = audits[-1]
    keys = ["role", "dtype", "device", "num_parameters"]
    terminal.say()
    terminal.say(
        f"audit ({last['when']}): model {last['model_dtype']}, quantization {last['quantization']}, "
        f"config {last['config_dtype']}, embeddings {last['embedding_dtype']}"
    )
    terminal.table(["role", "dtype", "device", "parameters"], [[each[key] for key in keys] for each in last["counts"]],
                   right=["parameters"])  # fmt: skip
    for item in audits:
        for text in item["mended"]:
            terminal.say(f"mended ({item['when']}): {text}", style="yellow")


def logs(instance: Instance, options: argparse.Namespace) -> int:
    """The journal's entries of a job, where there is a journal and we may read it; else its attempts' own words."""
    job = instance.read("show", options.id)
    if _has_journal(instance):
        return _follow_journal(instance, job, options)
    if options.explain:
        raise EnvironmentInvalidError(
            "there is no journal that you may read", hint="join the group systemd-journal, or leave --explain out"
        )
    files = instance.layout.job(job["id"])
    offsets: dict[int, int] = {}
    while True:
        for attempt in job["attempts"]:
            number = attempt["number"]
            if number not in offsets:
                print(f"-- attempt {number}, {attempt['backend']}, {attempt['started_at']}")
            read = _read_raw if options.raw else _read_told
            offsets[number] = read(files.attempt(number), offsets.get(number, 0))
        sys.stdout.flush()
        if not options.follow or job["state"] in FINAL_STATES:
            return 0
        time.sleep(FOLLOW_INTERVAL_SEC)
        job = instance.read("show", options.id)


def _has_journal(instance: Instance) -> bool:
    """Whether the system's own instance writes to a journal that we may read."""
    if instance.layout.root != Path("/") or not Path("/run/systemd/system").is_dir():
        return False
    files = [
        path for place in ("/var/log/journal", "/run/log/journal") for path in Path(place).glob("*/system.journal")
    ]
    return shutil.which("journalctl") is not None and any(os.access(path, os.R_OK) for path in files)


def journal_command(job_id: int, *, raw: bool = False, explain: bool = False, follow: bool = False) -> list[str]:
    """The call of journalctl for a job: its worker's chatter is at debug, so `raw` alone shows it."""
    command = ["journalctl", f"HONED_JOB={job_id}"]
    # What systemd itself says of the unit bears the unit's name in a field of its own.
    command += ["+", f"UNIT=honed-job@{job_id}.service"]
    command += [] if raw else ["--priority=info"]
    command += ["--catalog"] if explain else []
    return command + (["--follow", "--lines=all"] if follow else [])


def _follow_journal(instance: Instance, job: dict[str, Any], options: argparse.Namespace) -> int:
    is_over = job["state"] in FINAL_STATES
    command = journal_command(
        job["id"], raw=options.raw, explain=options.explain, follow=options.follow and not is_over
    )
    if "--follow" not in command:
        return subprocess.run(command, check=False).returncode
    with subprocess.Popen(command) as process:
        while not is_over and process.poll() is None:
            time.sleep(FOLLOW_INTERVAL_SEC)
            is_over = instance.read("show", options.id)["state"] in FINAL_STATES
        time.sleep(FOLLOW_INTERVAL_SEC)  # its last words are on their way
        process.terminate()
    return 0


def _read_raw(attempt: Any, offset: int) -> int:
    from honed import terminal

    try:
        with os.fdopen(foreign.open_plain(attempt.log_path), "rb") as file:
            file.seek(offset)
            data: bytes = file.read()
    except FileNotFoundError:
        return offset
    end = data.rfind(b"\n") + 1
    for line in data[:end].decode(errors="replace").splitlines():
        print(terminal.plain(line))
    return offset + end


def _read_told(attempt: Any, offset: int) -> int:
    from honed import terminal

    reading = event.read(attempt.events_path, offset)
    while reading.offset != offset:
        for item in reading.events:
            when = time.strftime("%H:%M:%S", time.localtime(item.time))
            print(f"{when} {terminal.plain(_told(item))}")
        offset = reading.offset
        reading = event.read(attempt.events_path, offset)
    return offset


def _told(item: event.Event) -> str:
    match item.kind:
        case "log":
            return f"{item.data.get('level')}: {item.data.get('message')}"
        case "predictions":
            return f"predictions: step {item.data.get('step')}, {item.data.get('num_failed', 0)} failed"
        case "example":
            parts = item.data.get("segments") or []
            return "example: " + "".join(f"⟦{part['text']}⟧" if part["trained"] else part["text"] for part in parts)
        case "stage":
            return f"stage: {item.data.get('stage')}"
        case _:
            return f"{item.kind}: " + ", ".join(f"{key} {_short(value)}" for key, value in item.data.items())


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def watch(instance: Instance, options: argparse.Namespace) -> int:
    from honed.watch import watch

    status = watch(instance.read, options.id)
    if options.id:
        _say_end(instance.read("show", options.id))
    return status


def follow_until_final(instance: Instance, reference: str, *, quiet: bool = False) -> int:
    """Show a job's progress until it is over. Returns 0 if it succeeded, else 1."""
    from honed import terminal

    if quiet or not terminal.console.is_terminal:
        return _follow_lines(instance, reference, quiet=quiet)
    with terminal.progress_bar() as bar:
        task = bar.add_task("", total=None, figures="")
        for job in _states(instance, reference):
            step, loss, eta = terminal.progress_cells(job["progress"])
            figures = "  ".join(filter(None, [step, f"loss {loss}" if loss else "", f"ETA {eta}" if eta else ""]))
            name = f"{terminal.plain(job['name'], limit=32)} {job['state']}"
            bar.update(task, description=name, figures=figures,
                       total=job["progress"]["num_steps"], completed=job["progress"]["step"] or 0)  # fmt: skip
    _say_end(job)
    return int(job["state"] != "succeeded")


def _follow_lines(instance: Instance, reference: str, *, quiet: bool) -> int:
    from honed import terminal

    last, said_at = None, 0.0
    for job in _states(instance, reference):
        now = (job["state"], job["progress"]["step"])
        is_due = last is None or job["state"] != last[0] or time.monotonic() - said_at >= 1.0
        if now != last and is_due and not quiet:
            terminal.say(terminal.job_line(job))
            said_at, last = time.monotonic(), now
    if not quiet:
        _say_end(job)
    return int(job["state"] != "succeeded")


def _states(instance: Instance, reference: str) -> Iterator[dict[str, Any]]:
    """A job's `show`, again and again, until it is over."""
    while True:
        job = instance.read("show", reference)
        yield job
        if job["state"] in FINAL_STATES or job["state"] == "held":
            return
        time.sleep(FOLLOW_INTERVAL_SEC)


def _say_end(job: dict[str, Any]) -> None:
    from honed import terminal

    style = terminal.STATE_STYLES.get(job["state"], "")
    terminal.say(f"job {job['id']} ({job['name']}): {job['state']}", style=style)
    if job["state"] == "succeeded":
        terminal.say(f"  {job['artifacts']['output_dir']}")
    elif job["error"]:
        _say_error(job["error"], prefix="  ")


def change(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    arguments = {"from_start": options.from_start} if options.verb == "requeue" else {}
    changed = [instance.change(options.verb, reference, **arguments) for reference in options.ids]
    if options.json:
        terminal.console.print_json(json.dumps(changed))
        return 0
    for job in changed:
        is_asked = job["state"] == State.RUNNING
        terminal.say(f"job {job['id']} ({job['name']}): " + ("asked to stop" if is_asked else job["state"]))
    return 0


def pause(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal

    instance.pause(options.verb == "pause")
    terminal.say(
        "no more jobs are started; running ones go on" if options.verb == "pause" else "jobs are started again"
    )
    return 0


def predictions(instance: Instance, options: argparse.Namespace) -> int:
    from honed import comparison, terminal

    everything = instance.read("predictions", options.id)
    rows = comparison.chosen(everything, sample=options.sample, step=options.step)
    if options.json:
        terminal.console.print_json(json.dumps(rows))
    elif options.jsonl:
        comparison.write_jsonl(rows, sys.stdout)
    elif options.csv:
        comparison.write_csv(rows, sys.stdout)
    elif not rows:
        terminal.say("no predictions" + (" of that example or step" if everything else " yet"))
    else:
        steps = sorted({row["step"] for row in (rows if options.step is not None else everything)})
        for index, mine in comparison.by_sample(rows):
            terminal.predictions(index, mine, steps=steps)
    return 0


def report(instance: Instance, options: argparse.Namespace) -> int:
    """The page's path; with --open it is opened instead, in the browser of whoever sits there."""
    from honed import terminal

    if options.id is None:
        path, what = instance.layout.index_path, "there is no index yet"
    else:
        job = instance.read("show", options.id)
        path, what = instance.layout.job(job["id"]).report_path, f"job {job['id']} has no report yet"
    if not path.exists():
        raise EnvironmentInvalidError(f"{path}: {what}", hint="honed makes it a moment after it has taken the job")
    if not os.access(path, os.R_OK):
        raise NotPermittedError(f"{path}: it is not for you to read", hint="honectl report ID names a job's own")
    if options.json:
        terminal.console.print_json(json.dumps({"report": str(path)}))
    else:
        print(path)  # as it is, for `$(honectl report 7)`
    return _open(path) if options.open else 0


def _open(path: Path) -> int:
    import webbrowser

    if webbrowser.open(path.as_uri()):
        return 0
    raise EnvironmentInvalidError("there is no browser here", hint=f"copy {path} to where there is one: it is one file")


def doctor(instance: Instance, options: argparse.Namespace) -> int:
    from honed import terminal
    from honed.doctor import examine

    found = [finding.as_dict() for finding in examine(instance.layout)]
    if options.json:
        terminal.console.print_json(json.dumps(found))
    else:
        terminal.table(["check", "status", "detail", "hint"],
                       [[item["check"], item["status"], item["detail"], item["hint"]] for item in found])  # fmt: skip
    return int(any(item["status"] == "error" for item in found))


def sandbox(instance: Instance, options: argparse.Namespace) -> int:
    from honed import sandbox as sandboxes
    from honed import terminal

    configuration = config.load(instance.layout)
    if options.dry_run:
        for unit, text in sandboxes.dropins(configuration).items():
            terminal.say(f"{unit}: {'nothing to open' if not text else ''}")
            print(text, end="")
        return 0
    if instance.layout.root != Path("/"):
        raise UsageError("only the instance at / runs in a sandbox", hint="leave --root and --user out")
    changed = sandboxes.open_up(configuration)
    for path in changed:
        terminal.say(str(path))
    if not changed:
        terminal.say("the sandbox is as policy.allowed_paths says")
    else:
        sandboxes.restart()
        terminal.say("honed runs in its new sandbox, and so does every job that starts from now on")
    return 0


# -- the command line -------------------------------------------------------------------------------------------------


def _say_error(error: dict[str, str], *, prefix: str = "") -> None:
    from honed import terminal

    terminal.say(f"{prefix}{error['code']}: {error['message']}", style="red")
    if error.get("hint"):
        terminal.say(f"{' ' * (len(prefix) - len(prefix.lstrip()))}hint: {error['hint']}")


def _complain(error: HonedError, *, prefix: str) -> None:
    from honed import terminal

    for line in [f"{prefix}{error.message}", *([f"hint: {error.hint}"] if error.hint else [])]:
        print(terminal.plain(line), file=sys.stderr)


def parser() -> argparse.ArgumentParser:  # noqa: PLR0915 - one verb after the other
    """The command line; the man page and the completions are made from it."""
    made = argparse.ArgumentParser(
        prog="honectl",
        description="Hand jobs to honed, and see what becomes of them.",
        epilog="ID is a job's number, or its name where that is unambiguous. "
        "Exit status: 0, 1 for the answer no, 2 for usage, sysexits for the rest.",
    )
    root = Path(os.environ.get("HONED_ROOT", "/"))
    made.add_argument(
        "--root", type=Path, default=root, help="the instance below this directory (default: $HONED_ROOT or /)"
    )
    own = layouts.user_root()
    made.add_argument("--user", action="store_const", dest="root", const=own, help="one's own instance")
    made.add_argument("--version", action="version", version=f"honectl {__version__}")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, run: Callable[[Instance, argparse.Namespace], int], words: str, *, as_json: bool = True) -> Any:
        verb = verbs.add_parser(name, help=words, description=words)
        verb.set_defaults(run=run)
        verb.add_argument("--root", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        verb.add_argument(
            "--user", action="store_const", dest="root", const=own, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        if as_json:
            verb.add_argument("--json", action="store_true", help="print JSON")
        return verb

    verb = add("submit", submit, "check job files, then drop them into the spool")
    verb.add_argument("files", nargs="+", type=Path, metavar="FILE")
    verb.add_argument("--hold", action="store_true", help="accept it, and start it only when it is released")
    verb.add_argument(
        "--stage", action="store_true", help="copy models and data that its worker could not read to where it can"
    )
    verb.add_argument(
        "--wait", action="store_true", help="show its progress until it is over; exit 1 unless it succeeded"
    )
    verb = add("check", check, "check job files as honed would before it accepts them")
    verb.add_argument("files", nargs="+", type=Path, metavar="FILE")
    add("plan", plan, "what would be done and why; no model is loaded").add_argument("file", type=Path, metavar="FILE")
    verb = add("preview", preview, "rows exactly as they will be trained on, masked and trained text told apart")
    verb.add_argument("file", type=Path, metavar="FILE")
    verb.add_argument("--rows", type=int, default=3, help="how many (default: %(default)s)")
    verb = add("trial", try_out, "try a job on eight rows, before all others: does it learn, how long, how much memory")
    verb.add_argument("file", type=Path, metavar="FILE")
    verb = add("list", list_jobs, "all jobs and their progress")
    verb.add_argument(
        "--state", action="append", choices=[state.value for state in State], help="only these; may be repeated"
    )
    add("show", show, "all that is known of one job").add_argument("id", metavar="ID")
    verb = add("logs", logs, "what a job's attempts told", as_json=False)
    verb.add_argument("id", metavar="ID")
    verb.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    verb.add_argument("--raw", action="store_true", help="the worker's own output, its libraries' chatter included")
    verb.add_argument("-x", "--explain", action="store_true", help="with the journal's explanations of what happened")
    verb = add("watch", watch, "live progress of all jobs, or of one", as_json=False)
    verb.add_argument("id", metavar="ID", nargs="?")
    for name, words in (
        ("cancel", "end a job for good"),
        ("hold", "keep a queued job from starting, or stop a running one at a checkpoint"),
        ("release", "let a held job go on"),
        ("requeue", "queue a finished job again, from its last checkpoint if it has one"),
    ):
        verb = add(name, change, words)
        verb.add_argument("ids", nargs="+", metavar="ID")
        if name == "requeue":
            verb.add_argument("--from-start", action="store_true", help="forget its checkpoints")
    add("pause", pause, "start no more jobs; running ones go on", as_json=False)
    add("resume", pause, "start jobs again", as_json=False)
    verb = add("predictions", predictions, "what the model wrote for held-out examples, step by step, beside the truth")
    verb.add_argument("id", metavar="ID")
    verb.add_argument("--sample", type=int, metavar="N", help="only this example")
    verb.add_argument("--step", type=int, metavar="N", help="only this step; -1 is the last")
    forms = verb.add_mutually_exclusive_group()
    forms.add_argument("--jsonl", action="store_true", help="a line of JSON for each row")
    forms.add_argument("--csv", action="store_true", help="CSV, with a line of names")
    verb = add("report", report, "the path of a job's page, or of the index over all jobs")
    verb.add_argument("id", metavar="ID", nargs="?")
    verb.add_argument("--open", action="store_true", help="open it in a browser, too")
    verb = add("sandbox", sandbox, "open the units' sandbox to policy.allowed_paths (root)", as_json=False)
    verb.add_argument("--dry-run", action="store_true", help="show the drop-ins, and write nothing")
    add("doctor", doctor, "is this machine fit: versions, GPU, disk, permissions")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The `honectl` command."""
    from honed import terminal

    options = parser().parse_args(arguments)
    try:
        status: int = options.run(Instance(layouts.of(options.root)), options)
    except HonedError as error:
        if getattr(options, "json", False):
            terminal.console.print_json(json.dumps({"error": error.as_dict()}))
        else:
            _complain(error, prefix="honectl: ")
        return _status(error)
    except PermissionError as error:
        print(f"honectl: {error.filename}: {error.strerror}", file=sys.stderr)
        return 77  # EX_NOPERM
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return status


def _status(error: HonedError) -> int:
    """Refusals of a job file are the answer no."""
    if isinstance(error, UsageError):
        return 2
    if error.code == NotPermittedError.code:
        return NotPermittedError.exit_status
    return 1 if error.exit_status in {65, 66, 73, 78, 80, 82} else 69


if __name__ == "__main__":
    sys.exit(main())
