"""`honectl watch`: progress of all jobs, or of one. Redraws itself in a terminal; prints a line per change into a
pipe."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from honed.cli import terminal
from honed.cli.predictions import compared
from honed.job.comparison import compare
from honed.job.progress import size
from honed.job.shape import Glance, Row
from honed.system import device
from honed.system.device import Load

#: Returns a verb's answer: see Instance.ask.
Ask = Callable[..., Any]
#: Seconds between looks; and the pause as a multiple of a look's duration, since there may be thousands of jobs.
INTERVAL_SEC = 1.0
REST = 10
#: Jobs in the table, and running jobs that are shown in detail.
MAX_JOBS, MAX_DETAILED = 30, 3
#: Characters of a prompt, a reference or a prediction.
MAX_TEXT = 160
_AT_REST = {"succeeded", "failed", "cancelled", "held"}


def watch(ask: Ask, reference: str | None, *, as_json: bool = False) -> int:
    """Watch until all watched jobs are at rest; in a terminal, all jobs until ^C. Returns 1 if the one job did not
    succeed."""
    if as_json:
        return _lines(ask, reference, lambda job, glance: print(json.dumps(glance or job), flush=True))
    if not terminal.console.is_terminal:
        return _lines(ask, reference, _LinePrinter().say)
    meter = Meter()
    with Live(console=terminal.console, auto_refresh=False) as live:
        while True:
            jobs, one, rest_sec = _look(ask, reference)
            live.update(_screen(ask, jobs, one, meter), refresh=True)
            if one is not None and one["state"] in _AT_REST:
                return _status(one)
            time.sleep(rest_sec)


def _look(ask: Ask, reference: str | None) -> tuple[Sequence[Row], Glance | None, float]:
    began = time.monotonic()
    one: Glance | None = ask("glance", id=reference) if reference is not None else None
    jobs = [one] if one is not None else ask("list")
    return jobs, one, max(INTERVAL_SEC, REST * (time.monotonic() - began))


def _status(job: Row) -> int:
    return int(job["state"] != "succeeded")


class Meter:
    """A worker's use of the machine: its memory, its share of the CPU between two looks, and its GPU."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, gpu_loads: Callable[[], list[Load]] = device.gpu_loads
    ) -> None:
        self._clock = clock
        self._gpu_loads = gpu_loads
        self._before: dict[int, tuple[float, float]] = {}  # job → time of the last look, and CPU seconds by then
        self._loads: list[Load] = []
        self._asked_at: float | None = None

    def loads(self) -> list[Load]:
        """Return the GPUs' loads, at most INTERVAL_SEC old."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= INTERVAL_SEC:
            self._loads, self._asked_at = self._gpu_loads(), now
        return self._loads

    def words(self, glance: Glance) -> str:
        """Return e.g. `memory 1.2 GiB (estimated for model and training: 1.5 GiB), CPU 198 %, GPU 93 % busy, …`."""
        if not (resident := glance["resident_bytes"]):
            return ""
        estimated = glance["estimated_bytes"]
        of = f" (estimated for model and training: {size(estimated)})" if estimated else ""
        parts = [f"memory {size(resident)}{of}"]
        if (percent := self._cpu_percent(glance)) is not None:
            parts.append(f"CPU {percent:.0f} %")
        parts += [f"GPU {_load_words(load)}" for load in self.loads() if load.uuid == glance["device"]]
        return ", ".join(parts)

    def _cpu_percent(self, glance: Glance) -> float | None:
        """Return the CPU use since the last look, 100 for one core; None if it is unknown."""
        now, cpu_sec = self._clock(), glance["cpu_sec"]
        if cpu_sec is None:
            return None
        when, before = self._before.get(glance["id"], (now, cpu_sec))
        if now - when >= INTERVAL_SEC / 2 or glance["id"] not in self._before:
            self._before[glance["id"]] = now, cpu_sec
        return 100 * (cpu_sec - before) / (now - when) if now > when and cpu_sec >= before else None


def _load_words(load: Load) -> str:
    busy = f"{load.busy_percent} % busy, " if load.busy_percent is not None else ""
    return f"{busy}{size(load.used_bytes)} of {size(load.total_bytes)} in use"


# -- a pipe -----------------------------------------------------------------------------------------------------------


def _lines(ask: Ask, reference: str | None, say: Callable[[Row, Glance | None], None]) -> int:
    seen: dict[int, tuple[Any, ...]] = {}
    while True:
        jobs, one, rest_sec = _look(ask, reference)
        for job in jobs:
            now = (job["state"], job["progress"]["step"])
            if seen.get(job["id"]) == now:
                continue
            seen[job["id"]] = now
            say(job, one or _glance(ask, job))
        if jobs and all(job["state"] in _AT_REST for job in jobs):
            return _status(one) if one is not None else 0
        time.sleep(rest_sec)


class _LinePrinter:
    """Prints a line per change of a job, and its predictions when they are new."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._last_steps: dict[int, int] = {}  # job → the step whose predictions were printed last

    def say(self, job: Row, glance: Glance | None) -> None:
        taken = self._meter.words(glance) if glance else ""
        terminal.say(terminal.job_line(job) + (f"  {taken}" if taken else ""))
        for line in _new_predictions(glance, self._last_steps) if glance else ():
            terminal.say(line)


def _glance(ask: Ask, job: Row) -> Glance | None:
    """Return details of a job that has begun; None for another user's job, which has none for us."""
    has_any = job["progress"]["step"] is not None and job["source"]
    glance: Glance | None = ask("glance", id=str(job["id"])) if has_any else None
    return glance


def _new_predictions(glance: Glance, shown: dict[int, int]) -> Iterator[str]:
    """Yield the latest predictions, one per line, if they are new."""
    rows = glance["predictions"]
    if not rows or shown.get(glance["id"]) == rows[0]["step"]:
        return
    shown[glance["id"]] = rows[0]["step"]
    for row in rows:
        comparison = compared(compare((row["ground_truth"] or "").strip(), (row["prediction"] or "").strip())).plain
        yield _flat(f"    step {row['step']} #{row['sample_index']}: {_cut(comparison)}")


# -- a terminal -------------------------------------------------------------------------------------------------------


def _screen(ask: Ask, jobs: Sequence[Row], one: Glance | None, meter: Meter) -> RenderableType:
    running = [job for job in jobs if job["state"] == "running"][:MAX_DETAILED]
    glances = [one] if one is not None else [glance for job in running if (glance := _glance(ask, job))]
    courses = {glance["id"]: glance["course"] for glance in glances}
    lines = [f"{terminal.plain(load.name)}: {_load_words(load)}" for load in meter.loads()] or [_machine_line()]
    parts: list[RenderableType] = [Text(line, style="dim") for line in lines]
    if one is None:
        parts += [Text(), _table(jobs, courses)]
    return Group(*parts, *(part for glance in glances for part in _details(glance, meter)))


def _machine_line() -> str:
    memory = device.probe()[0]
    held = memory.total_bytes - memory.free_bytes
    return f"{terminal.plain(memory.name)}: {size(held)} of {size(memory.total_bytes)} in use"


def _table(jobs: Sequence[Row], courses: dict[int, list[float]]) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "name", "state", "step", "loss", "ETA", "loss so far"):
        drawn.add_column(column, no_wrap=True)
    for job in jobs[:MAX_JOBS]:
        name, course = terminal.plain(job["name"], limit=32), terminal.sparkline(courses.get(job["id"], []))
        cells = [job["id"], name, terminal.state_words(job), *terminal.progress_cells(job), course]
        drawn.add_row(*(Text(terminal.plain(cell), style=terminal.STATE_STYLES.get(str(cell), "")) for cell in cells))
    if len(jobs) > MAX_JOBS:
        drawn.add_row("", f"and {len(jobs) - MAX_JOBS} more: honectl list")
    return drawn


def _details(glance: Glance, meter: Meter) -> Iterator[RenderableType]:
    yield Text()
    yield Text(terminal.plain(terminal.job_line(glance)), style=terminal.STATE_STYLES.get(glance["state"], "bold"))
    if glance["stage"] and glance["state"] == "running" and glance["progress"]["step"] is None:
        yield Text(f"  {terminal.plain(glance['stage'])}", style="dim")
    if course := glance["course"]:
        eval_loss = f"  eval_loss {glance['eval_loss']:.4g}" if glance["eval_loss"] is not None else ""
        yield Text(f"  loss {course[0]:.4g} {terminal.sparkline(course, width=40)} {course[-1]:.4g}{eval_loss}")
    if taken := meter.words(glance):
        yield Text(f"  {taken}")
    if rows := glance["predictions"]:
        yield Text(f"  predictions at step {rows[0]['step']}:", style="dim")
        for row in rows:
            truth, written = (_cut(_flat((row[key] or "").strip())) for key in ("ground_truth", "prediction"))
            yield Text.assemble(f"    #{row['sample_index']} ", compared(compare(truth, written)))


def _flat(text: str) -> str:
    return terminal.plain(text).replace("\n", "⏎")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
