"""The list of jobs as honed-web shows it: the devices and what runs on them, the queue with its reasons, and the jobs
that an address chooses and sorts.

    /?state=failed&q=qwen&sort=-score
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

from honed.job.database import Reader
from honed.job.job import State
from honed.job.progress import duration, figure, short
from honed.job.query import Asker
from honed.job.shape import Gpu, Row, Status, Telemetry
from honed.page.comparison import MAX_JOBS
from honed.page.page import document
from honed.page.plot import SPARK_POINTS, sparkline
from honed.page.source import CONTROL_SEC, Kept, Source
from honed.system.client import Client
from honed.system.error import HonedError, UsageError

#: Jobs that have ended on one page, and all others, at most; with an order of one's own, jobs of any kind.
MAX_ENDED, MAX_UNFINISHED, MAX_SORTED = 200, 2000, 500
#: Seconds that one page may spend on sparklines that it has not kept; the next one goes on.
SPARK_SEC = 0.15
#: Sparklines that are kept.
MAX_SPARKS = 2000
#: Characters of a text to look for.
MAX_TEXT = 100

Value = float | str | None


def _share(row: Row) -> float | None:
    step, num_steps = row["progress"]["step"], row["progress"]["num_steps"]
    return step / num_steps if step is not None and num_steps else None


@dataclass(frozen=True)
class Column:
    """A column: its head, the value that it is sorted by, and True if the largest comes first."""

    title: str
    value: Callable[[Row], Value]
    is_falling: bool = False


COLUMNS = {
    "id": Column("job", lambda row: row["id"], is_falling=True),
    "state": Column("state", lambda row: row["state"]),
    "progress": Column("progress", _share, is_falling=True),
    "loss": Column("loss", lambda row: row["progress"]["loss"]),
    "score": Column("score", lambda row: row["score"]["value"] if row["score"] else None, is_falling=True),
    "time": Column("time", lambda row: row["elapsed_sec"], is_falling=True),
    "model": Column("model", lambda row: (row["model"] or "").lower() or None),
}


@dataclass(frozen=True)
class Choice:
    """The jobs that an address asks for, and their order; the default is all, in honed's own order."""

    state: str = ""
    text: str = ""
    sort: str = ""
    before: int = 0  #: of the jobs that have ended, only older ones

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Choice:
        """Parse the parameters of an address. Raises UsageError if one is invalid."""
        state, sort, before = given.get("state", ""), given.get("sort", ""), given.get("before", "")
        if before and not (before.isascii() and before.isdecimal() and len(before) < 19):
            raise UsageError(f"before: not a job number: {before[:40]!r}", hint="follow the link to older jobs")
        if state and state not in set(State):
            raise UsageError(f"state: no such state: {state[:40]!r}", hint=f"one of {', '.join(State)}")
        if sort and sort.removeprefix("-") not in COLUMNS:
            raise UsageError(f"sort: no such column: {sort[:40]!r}", hint=f"one of {', '.join(COLUMNS)}")
        return cls(state, given.get("q", "")[:MAX_TEXT], sort, int(before or 0))

    def address(self, **changes: Any) -> str:
        """Return the address of the list with some changes."""
        made = replace(self, **{"before": 0, **changes})
        given = {"state": made.state, "q": made.text, "sort": made.sort, "before": made.before}
        words = urlencode({key: value for key, value in given.items() if value})
        return f"/?{words}" if words else "/"

    def has(self, row: Row) -> bool:
        if self.state and row["state"] != self.state:
            return False
        group = row.get("group")
        names = (str(row["id"]), row["name"], row["model"], row["outcome"], group["name"] if group else None)
        return not self.text or any(self.text.lower() in name.lower() for name in names if name)

    def sorted(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows in the order of the chosen column; those without a value are last."""
        column, is_reversed = COLUMNS[self.sort.removeprefix("-")], self.sort.startswith("-")
        known = [row for row in rows if column.value(row) is not None]
        known.sort(key=column.value, reverse=is_reversed)  # type: ignore[arg-type]
        return [*known, *(row for row in rows if column.value(row) is None)]

    def heads(self) -> Iterator[tuple[str, str, str]]:
        """Yield the title of every column, the address that sorts by it, and its order now, as aria-sort names it."""
        for key, column in COLUMNS.items():
            down, up = (f"-{key}", key)
            first, second = (down, up) if column.is_falling else (up, down)
            order = {down: "descending", up: "ascending"}.get(self.sort, "none")
            yield column.title, self.address(sort=second if self.sort == first else first), order


@dataclass(frozen=True)
class Device:
    """A device, its load, what closes it, and the jobs on it with their names."""

    label: str
    name: str
    load: Gpu | None
    closures: Sequence[str]
    jobs: Sequence[tuple[int, str]]


class JobList:
    """Makes the page of all jobs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._told = Kept(self._ask)
        self._sparks: OrderedDict[int, tuple[object, list[float]]] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, asker: Asker, choice: Choice, login: str) -> bytes:
        """Return the page that an asker may see."""
        everything = self._source.rows(asker)
        rows = [row for row in everything if choice.has(row)]
        shown, older_than, num_hidden = _cut(choice, rows)
        status, _ = self._told.get()
        counts = Counter(row["state"] for row in everything)
        return document(
            "list.html",
            title="honed: all jobs",
            is_served=True,
            live="/api/events",
            scripts=("list",),
            max_compared=MAX_JOBS,
            now=time.time(),
            choice=choice,
            heads=list(choice.heads()),
            counts=[(state.value, counts[state]) for state in State if counts[state]],
            num_jobs=len(everything),
            num_found=len(rows),
            num_hidden=num_hidden,
            older_than=older_than,
            status=status,
            line=status["status"] if status and asker.reads_all else "",  # it names jobs
            devices=self._devices(everything, asker),
            rows=[(row, *cells) for row, cells in zip(shown, self._cells(shown, asker), strict=True)],
            login=login,
        )

    # -- the jobs -----------------------------------------------------------------------------------------------------

    def _cells(self, rows: Sequence[Row], asker: Asker) -> Iterator[tuple[Any, ...]]:
        """Yield what the page says of every job: in words why it waits, its sparkline, score, duration and model."""
        readable = [row for row in rows if asker.reads_all or row["uid"] == asker.uid]
        courses = self._courses(readable)
        for row in rows:
            why, score, seconds = row["waiting_for"], row["score"], row["elapsed_sec"]
            yield (
                (why["detail"] or why["reason"]) if why else "",
                sparkline("loss", courses.get(row["id"], ())),
                (score["name"].replace("_", " "), figure(score["value"])) if score else None,
                duration(seconds) if seconds is not None else "",
                short(row["model"]),
            )

    def _courses(self, rows: Sequence[Row]) -> dict[int, list[float]]:
        """Return the losses of these jobs, averaged to a few values; of some none as yet, if that takes long."""
        until = time.monotonic() + SPARK_SEC
        courses: dict[int, list[float]] = {}
        with self._lock, closing(Reader(self._source.layout.database_path)) as reader:
            for row in rows:
                if row["progress"]["step"] is None:
                    continue
                stamp, known = (row["state"], row["progress"]["step"]), self._sparks.get(row["id"])
                if (known is None or known[0] != stamp) and time.monotonic() < until:
                    known = stamp, reader.course(row["id"], "loss", num_points=SPARK_POINTS)
                    self._sparks[row["id"]] = known
                if known is not None:
                    self._sparks.move_to_end(row["id"])
                    courses[row["id"]] = known[1]
            while len(self._sparks) > MAX_SPARKS:
                self._sparks.popitem(last=False)
        return courses

    # -- the machine --------------------------------------------------------------------------------------------------

    def _ask(self) -> tuple[Status | None, Telemetry | None]:
        """Return what honed tells of itself and of the devices; None if it does not answer."""
        ask = partial(Client(self._source.layout.control_path, timeout_sec=CONTROL_SEC).ask)
        try:
            return ask("status"), ask("metrics")
        except (HonedError, ValueError):
            return None, None

    def _devices(self, rows: Sequence[Row], asker: Asker) -> list[Device]:
        """Return the devices, and what runs on them."""
        status, telemetry = self._told.get()
        loads = {gpu["uuid"]: gpu for gpu in telemetry["gpus"]} if telemetry else {}
        jobs = self._source.entries.all_jobs()
        on: dict[str, list[tuple[int, str]]] = {}
        for row in rows:
            if row["state"] == State.RUNNING and (job := jobs.get(row["id"])) is not None and job.attempts:
                for key in job.attempt.devices:
                    on.setdefault(key, []).append((row["id"], row["name"] or f"job {row['id']}"))
        is_anybody = asker.uid < 0 and not asker.reads_all  # they do not learn who reserved a device, and why
        devices = []
        for device in status["devices"] if status else ():
            key, load = device["device"], loads.pop(device["device"], None)
            closures = [item["reason" if is_anybody else "detail"] for item in device["closures"]]
            devices.append(Device(device["label"], device["name"] or "", load, closures, on.pop(key, ())))
        devices += [
            Device(f"GPU {item['index']}", item["name"], item, (), on.pop(key, ())) for key, item in loads.items()
        ]
        devices += [Device(key, "", None, (), those) for key, those in on.items()]
        # Where there are GPUs, the CPU is shown only if it has a job.
        return [item for item in devices if item.load or item.jobs or item.closures] or devices


def _cut(choice: Choice, rows: Sequence[Row]) -> tuple[list[Row], int | None, int]:
    """Return the rows on one page, the last of them if there are older ones, and the number of those left out."""
    if choice.sort:
        return choice.sorted(rows)[:MAX_SORTED], None, max(0, len(rows) - MAX_SORTED)
    is_over = {state.value for state in State if state.is_final}
    waiting = [row for row in rows if row["state"] not in is_over] if not choice.before else []
    ended = [row for row in rows if row["state"] in is_over and (not choice.before or row["id"] < choice.before)]
    older_than = ended[MAX_ENDED - 1]["id"] if len(ended) > MAX_ENDED else None
    return [*waiting[:MAX_UNFINISHED], *ended[:MAX_ENDED]], older_than, max(0, len(waiting) - MAX_UNFINISHED)
