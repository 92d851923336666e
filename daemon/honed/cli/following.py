"""Following a job until it ends."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.job.shape import Shown

FINAL_STATES = {"succeeded", "failed", "cancelled"}
#: Seconds between looks while following something.
INTERVAL_SEC = 0.3


def watch(instance: Instance, options: argparse.Namespace) -> int:
    from honed.cli.watch import watch

    status = watch(instance.ask, options.id, as_json=options.json)
    if options.id and not options.json:
        say_end(instance.show(options.id))
    return status


def until_final(instance: Instance, reference: str, *, quiet: bool = False) -> int:
    """Show a job's progress until it is over. Returns 0 if it succeeded or its sweep ended it early, else 1."""
    if quiet or not terminal.console.is_terminal:
        return _follow_lines(instance, reference, quiet=quiet)
    from rich.progress import BarColumn, Progress, TextColumn

    columns = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[figures]}")]
    with Progress(columns[0], BarColumn(bar_width=None), columns[1], console=terminal.console) as bar:
        task = bar.add_task("", total=None, figures="")
        for job in states(instance, reference):
            step, loss, eta = terminal.progress_cells(job)
            figures = "  ".join(filter(None, [step, f"loss {loss}" if loss else "", f"ETA {eta}" if eta else ""]))
            name = f"{terminal.plain(job['name'], limit=32)} {job['state']}"
            bar.update(
                task,
                description=name,
                figures=figures,
                total=job["progress"]["num_steps"],
                completed=job["progress"]["step"] or 0,
            )
    say_end(job)
    return _status(job)


def _status(job: Shown) -> int:
    return int(job["state"] != "succeeded" and not job.get("stopped_early"))


def _follow_lines(instance: Instance, reference: str, *, quiet: bool) -> int:
    last, said_at = None, 0.0
    for job in states(instance, reference):
        now = (job["state"], job["progress"]["step"])
        is_due = last is None or job["state"] != last[0] or time.monotonic() - said_at >= 1.0
        is_news = job["state"] not in FINAL_STATES or terminal.bar(job["progress"])  # its end is printed below
        if now != last and is_due and is_news and not quiet:
            terminal.say(terminal.job_line(job))
            said_at, last = time.monotonic(), now
    if not quiet:
        say_end(job)
    return _status(job)


def states(instance: Instance, reference: str) -> Iterator[Shown]:
    """Yield a job's `show` repeatedly until the job is over or held."""
    while True:
        job = instance.show(reference)
        yield job
        if job["state"] in FINAL_STATES or job["state"] == "held":
            return
        time.sleep(INTERVAL_SEC)


def say_end(job: Shown) -> None:
    remark = terminal.plain(job.get("remark") or "", limit=400)
    style = "yellow" if remark else terminal.STATE_STYLES.get(job["state"], "")
    words = f"{job['state']}, but {remark}" if remark else job["state"]
    if early := job.get("stopped_early"):
        words = f"stopped early by its sweep: {early['reason']}"
    terminal.say(f"job {job['id']} ({job['name']}): {words}", style=style)
    if job["state"] == "succeeded":
        if (output_dir := job["artifacts"]["output_dir"]) is not None:
            terminal.say(f"  {output_dir}")
    elif job["error"]:
        terminal.say_error(job["error"], prefix="  ")
