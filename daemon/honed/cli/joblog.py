"""The log of a job's attempts: the journal's entries, or the events in the attempts' own files.

Readers of the journal may not be allowed to read the job, so the journal lacks quotes from the job's files: they come
from the attempts' events, and the worker's output from its worker.log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from honed.cli import terminal
from honed.cli.following import FINAL_STATES, INTERVAL_SEC
from honed.cli.instance import Instance
from honed.job import event
from honed.job.narration import example_text, row_counts
from honed.job.progress import gib, progress_text
from honed.job.shape import Shown
from honed.system import access, untrusted
from honed.system.error import EnvironmentInvalidError, UsageError


def logs(instance: Instance, options: argparse.Namespace) -> int:
    """Print the journal's entries of a job, if there is a journal that we may read; else the attempts' own events."""
    if options.json and (options.raw or options.explain):
        raise UsageError("--json prints the events of the attempts, and cannot be combined with --raw or --explain")
    job = instance.show(options.id)
    if not options.json and not options.raw and _has_journal(instance):
        return _follow_journal(instance, job, options)
    if options.explain:
        raise EnvironmentInvalidError(
            "you may not read any journal", hint="join the group systemd-journal, or omit --explain"
        )
    files = instance.layout.files(job["id"])
    offsets: dict[int, int] = {}
    while True:
        for attempt in job["attempts"]:
            number = attempt["number"]
            if number not in offsets and not options.json:
                print(terminal.plain(f"-- attempt {number}, {attempt['backend']}, {attempt['started_at']}"))
            say = partial(_say_json, number) if options.json else _say
            read = _read_raw if options.raw else partial(_read, say)
            offsets[number] = read(files.attempt(number), offsets.get(number, 0))
        sys.stdout.flush()
        if not job["attempts"] and not options.follow:
            words = f"job {job['id']} ({job['name']}) has not started yet"
            words += f": {why}" if (why := terminal.why_waiting(job)) else ""
            print(terminal.plain(f"honectl: {words}"), file=sys.stderr)
        if not options.follow or job["state"] in FINAL_STATES:
            return 0
        time.sleep(INTERVAL_SEC)
        job = instance.show(options.id)


#: The users whose programs write entries about jobs: of the daemon and what it starts, and of the helpers.
_WRITERS = (access.DAEMON_USER, "root")
#: Bytes of a worker's output that are read at once.
_BITE_BYTES = 1024 * 1024


def _has_journal(instance: Instance) -> bool:
    """Return True if this is the system's own instance, and its journal is readable to us."""
    if instance.layout.root != Path("/") or not Path("/run/systemd/system").is_dir():
        return False
    files = [
        path
        for directory in ("/var/log/journal", "/run/log/journal")
        for path in Path(directory).glob("*/system.journal")
    ]
    return shutil.which("journalctl") is not None and any(os.access(path, os.R_OK) for path in files)


def journal_command(job_id: int, *, explain: bool = False, follow: bool = False) -> list[str]:
    """Return the call of journalctl for a job: honed's entries about it, its unit's own, and systemd's about that."""
    # Any program can write an entry with any field, and only those that begin with _ are journald's own.
    writers = [f"_UID={uid}" for uid in dict.fromkeys(writer.uid for writer in map(access.person, _WRITERS) if writer)]
    command = ["journalctl", "--priority=info", f"HONED_JOB={job_id}", *writers]
    # Its unit runs as its submitter: what could not be started, and the stacks of a worker that hung or crashed.
    command += ["+", f"_SYSTEMD_UNIT=honed-job@{job_id}.service", "+", f"UNIT=honed-job@{job_id}.service", "_PID=1"]
    return [*command, *(["--catalog"] if explain else []), *(["--follow", "--lines=all"] if follow else [])]


def _follow_journal(instance: Instance, job: Shown, options: argparse.Namespace) -> int:
    is_over = job["state"] in FINAL_STATES
    command = journal_command(job["id"], explain=options.explain, follow=options.follow and not is_over)
    if "--follow" not in command:
        status = subprocess.run(command, check=False).returncode
        _say_quotes(instance, job)
        return status
    with subprocess.Popen(command) as process:
        while not is_over and process.poll() is None:
            time.sleep(INTERVAL_SEC)
            is_over = instance.show(options.id)["state"] in FINAL_STATES
        time.sleep(INTERVAL_SEC)  # the last entries may still arrive
        process.terminate()
    _say_quotes(instance, instance.show(options.id))
    return 0


def _say_quotes(instance: Instance, job: Shown) -> None:
    """Print in full the messages that quote the job's files: the journal has them without the quotes."""
    files = instance.layout.files(job["id"])
    for attempt in job["attempts"]:
        quoting = (item for item in _events(files.attempt(attempt["number"])) if item.data.get("evidence"))
        for number, item in enumerate(quoting):
            if number == 0:
                print(f"-- attempt {attempt['number']}: text that the journal does not contain")
            _say(item)


def _read_raw(attempt: Any, offset: int) -> int:
    """Print the lines of a worker's output from `offset` on, a piece at a time: its owner chooses its size. Returns
    where the next call goes on. A line that is longer than a piece is printed as several."""
    try:
        file = os.fdopen(untrusted.open_plain(attempt.log_path), "rb")
    except FileNotFoundError:
        return offset
    with file:
        file.seek(offset)
        while data := file.read(_BITE_BYTES):
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _BITE_BYTES else 0)
            if not end:
                break
            for line in data[:end].decode(errors="replace").splitlines():
                print(terminal.plain(line))
            offset += end
            file.seek(offset)
    return offset


def _read(say: Callable[[event.Event], None], attempt: Any, offset: int) -> int:
    while (reading := event.read(attempt.events_path, offset)).offset != offset:
        for item in reading.events:
            say(item)
        offset = reading.offset
    return offset


def _say(item: event.Event) -> None:
    when = time.strftime("%H:%M:%S", time.localtime(item.time))
    line = terminal.plain(_text_of(item)).replace("\n", "\n         ")  # no line of it looks like another event
    print(f"{when} {line}")


def _say_json(number: int, item: event.Event) -> None:
    print(json.dumps({"event": item.kind, "time": item.time} | item.data | {"attempt": number}))


def _events(attempt: Any) -> Iterator[event.Event]:
    offset = 0
    with contextlib.suppress(PermissionError):
        while (reading := event.read(attempt.events_path, offset)).offset != offset:
            yield from reading.events
            offset = reading.offset


def _text_of(item: event.Event) -> str:
    match item.kind:
        case "log":
            return f"{item.data.get('level')}: {item.data.get('evidence') or item.data.get('message')}"
        case "predictions":
            return f"predictions: step {item.data.get('step')}, {item.data.get('num_failed', 0)} failed"
        case "example":
            return f"example: {example_text(item.data)}"
        case "stage":
            return f"stage: {item.data.get('stage')}"
        case "step":
            rest = [
                f"{key.replace('_', ' ')} {_short(value)}"
                for key, value in event.step_metrics(item.data).items()
                if key != "loss" and _is_number(value)  # the progress has the loss
            ]
            numbers = {key: value for key, value in item.data.items() if _is_number(value)}
            return ", ".join([progress_text(numbers), *rest])
        case "evaluation":
            metrics = item.data.get("metrics")
            figures = metrics.items() if isinstance(metrics, dict) else ()
            values = ", ".join(f"{name} {_short(value)}" for name, value in figures if _is_number(value))
            return f"evaluated at step {item.data.get('step')}: {values or 'no metrics'}"
        case "data":
            return f"rows: {row_counts(item.data)}"
        case "checkpoint":
            return f"checkpoint at step {item.data.get('step')}: {_size(item.data.get('num_bytes'))}"
        case "resumed":
            return f"resumes from step {item.data.get('step')}"
        case "started":
            return f"the worker has started, process {item.data.get('pid')}, {item.data.get('backend')}"
        case "started_over":
            return f"starts over: {item.data.get('reason')}"
        case "fallback":
            return f"falls back from {item.data.get('from')} to {item.data.get('to')}: {item.data.get('reason')}"
        case "artifact":
            name, path = str(item.data.get("name")).replace("_", " "), item.data.get("path")
            return f"{name} written: {path}, {_size(item.data.get('num_bytes'))}"
        case "worse":
            return f"ended worse than it began: {', '.join(map(str, event.items(item.data, 'found')))}"
        case "adjusted":
            steps = [one.get("text") for one in event.items(item.data, "steps") if isinstance(one, dict)]
            return f"settings changed because memory ran out: {'; '.join(map(str, steps))}"
        case "memory":
            sizes = {key: value for key, value in item.data.items() if key.endswith("_bytes") and _is_number(value)}
            values = ", ".join(
                f"{key.removesuffix('_bytes').replace('_', ' ')} {gib(size)}" for key, size in sizes.items()
            )
            return f"memory ({item.data.get('when')}): {values}"
        case "audit":
            words = f"audit ({item.data.get('when')}): model {item.data.get('model_dtype')}"
            return "; ".join([words, *(f"fixed: {text}" for text in event.items(item.data, "mended"))])
        case "finished":
            return f"the worker has finished: {item.data.get('outcome')}, step {item.data.get('step')}"
        case _:
            return f"{item.kind}: {_in_words(item.data)}"


#: Below this a value is printed as a number.
_MAX_NUMBER = 2**63


def _is_number(value: Any) -> bool:
    """Tell whether a worker's value can be printed as a number; one beyond a float's range cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def _size(value: Any) -> str:
    return gib(value) if _is_number(value) else "size unknown"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _in_words(value: Any) -> str:
    """Return a value of any kind as text: names and values, with commas between them."""
    match value:
        case dict():
            return ", ".join(f"{str(key).replace('_', ' ')} {_in_words(item)}".rstrip() for key, item in value.items())
        case list():
            return "; ".join(map(_in_words, value)) or "none"
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case _:
            return _short(value)
