"""Counters and histograms of an instance, which only grow: var/lib/honed/counters.json, for Prometheus.

    entries ── each change ──► Counters ◄── each rejection ── rejected/
                                  └── at most every few seconds ──► counters.json ──► honed-web, honectl metrics

The file also records how far every job was counted. After a crash the difference to the entries is counted, so each of
these is counted exactly once, whatever kills honed: a job's acceptance, its first start, the end of every attempt with
its outcome, device time, written bytes, fallback, resumption and adjustment, and every time that it finishes. Only what
is in the file is published, so no value ever decreases; a prune or a rebuilt honed.db changes nothing.

A rejection is counted once, by the number in its `.reason`. Not exact: one whose `.reason` is removed between a crash
and the next start is lost; one counted after a crash has no latency; durations are those of the wall clock; bytes that
were fetched or removed in the seconds before a crash are lost. If the file is missing or damaged, all counters start at
zero, and what happened before is not counted.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from honed.job import refusals
from honed.job.brief import Listed
from honed.job.damaged import begun_anew, passed_over
from honed.job.job import Job
from honed.job.spool import Spool
from honed.system import durable

log = logging.getLogger(__name__)

#: Seconds between two writes of the file, at least, and that as a multiple of a write's duration.
WRITE_INTERVAL_SEC, WRITE_REST = 5.0, 100


#: Numbers in one span, at most: more jobs than any instance has.
MAX_SPAN = 10_000_000
#: What the content of another program, or of a broken disk, may raise.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Counter(NamedTuple):
    """One kind of counter."""

    label: str | None  #: the label by which it is divided
    words: str  #: for people


class Histogram(NamedTuple):
    """One kind of histogram. `bounds` are its buckets' upper bounds in seconds; +Inf is added."""

    label: str | None
    words: str
    bounds: tuple[float, ...]


COUNTERS = {
    "honed_jobs_finished_total": Counter("outcome", "Jobs that finished, by outcome; a requeued job finishes again"),
    "honed_jobs_rejected_total": Counter("code", "Job files that were rejected, by error code"),
    "honed_attempts_finished_total": Counter("outcome", "Attempts that ended, by outcome"),
    "honed_device_seconds_total": Counter("outcome", "Device time of ended attempts, by outcome"),
    "honed_fallbacks_total": Counter(None, "Ended attempts that fell back from Unsloth to transformers"),
    "honed_resumes_total": Counter(None, "Ended attempts that had resumed from a checkpoint"),
    "honed_preemptions_total": Counter(None, "Ended attempts that had been asked to give up their device"),
    "honed_written_bytes_total": Counter("kind", "Bytes that ended attempts had written, as they report it, by kind"),
    "honed_fetched_bytes_total": Counter("type", "Bytes that were fetched from the hub, by type of the repository"),
    "honed_removed_bytes_total": Counter("kind", "Bytes that prunes and retention have removed, by kind"),
    "honed_out_of_memory_adjustments_total": Counter(None, "Out-of-memory adjustments of jobs"),
}
HISTOGRAMS = {
    "honed_check_duration_seconds": Histogram(
        "result",
        "Time from a job file's arrival to its acceptance or rejection, by result",
        (0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400),
    ),
    "honed_queue_wait_seconds": Histogram(
        None,
        "Time from a job's acceptance to its first start",
        (1, 5, 15, 60, 300, 900, 3600, 10800, 21600, 43200, 86400, 259200),
    ),
}


class Observed(TypedDict):
    """The values of one histogram and label."""

    counts: list[int]  #: values in every bucket alone, with that of +Inf
    sum: float  #: seconds


class Values(TypedDict):
    """All values, by name, then by the label's value; the empty text without a label."""

    counters: dict[str, dict[str, float]]
    histograms: dict[str, dict[str, Observed]]


class Mark(NamedTuple):
    """How far a job was counted; a job that has one was counted as accepted."""

    started: int = 0  #: 1 once its first start was counted
    attempt: int = 0  #: the number of the last ended attempt that was counted
    ends: int = 0  #: the number of its ends that were counted

    @classmethod
    def of(cls, job: Listed) -> Mark:
        """Return the mark of a job that is counted as far as it has come."""
        return cls(int(job.has_started), job.last_ended, job.num_ends)


class Counters:
    """The counters of the spool's owner; `recover` comes after the spool's own. `clock` is monotonic seconds."""

    def __init__(self, path: Path, spool: Spool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._spool = spool
        self._clock = clock
        self._values = _zero()
        self._marks: dict[int, Mark] = {}
        self._pruned: set[int] = set()  # pruned jobs that are wholly counted
        self._rejected: set[int] = set()  # numbers of the rejected arrivals that are counted
        self._is_behind = False
        self._write_at = -math.inf

    def recover(self) -> None:
        """Read the file, count what it lacks, and count every change from now on. Raises OSError for a fault of the
        machine."""
        if begun_anew(self._path, self._read):
            self._catch_up()
        else:
            self._begin()
        self._spool.catalog.listen(self._count_change)

    def patience(self) -> float:
        """Return the seconds until the file is to be written."""
        return max(0.0, self._write_at - self._clock()) if self._is_behind else math.inf

    def tend(self, *, is_last: bool = False) -> None:
        """Write the file if something was counted and the last write is long enough ago. Raises OSError if that is
        impossible; nothing is lost then."""
        if self._is_behind and (is_last or self._clock() >= self._write_at):
            began = self._clock()
            durable.write(self._path, (json.dumps(self._data()) + "\n").encode())
            ended = self._clock()
            self._is_behind, self._write_at = False, ended + max(WRITE_INTERVAL_SEC, WRITE_REST * (ended - began))

    def count_rejection(self, number: int, code: str, arrived_at: float | None) -> None:
        """Count a rejected arrival, unless it was counted before."""
        if number in self._rejected:
            return
        self._rejected.add(number)
        self._add("honed_jobs_rejected_total", code)
        if arrived_at is not None:
            self._observe("honed_check_duration_seconds", time.time() - arrived_at, "rejected")

    def count_fetched(self, repo_type: str, num_bytes: int) -> None:
        """Count the bytes that one process has fetched."""
        self._add("honed_fetched_bytes_total", repo_type, num_bytes)

    def count_removed(self, kind: str, num_bytes: int) -> None:
        """Count the bytes that were removed: of a `job`, or of `checkpoints`."""
        self._add("honed_removed_bytes_total", kind, num_bytes)

    # -- what is counted ----------------------------------------------------------------------------------------------

    def _count_change(self, old: Listed | None, new: Job | None) -> None:
        if new is not None:
            self._count(new)
        elif old is not None:
            self._pruned.add(old.id)
            self._is_behind = True

    def _count(self, job: Job) -> None:
        """Count what has happened to a job since it was counted last."""
        old = self._marks.get(job.id)
        known, now = old or Mark(), Mark.of(job)
        if now == old:  # as most jobs at a start
            return
        if old is None and job.arrived_at is not None:
            self._observe("honed_check_duration_seconds", job.submitted_at - job.arrived_at, "accepted")
        if now.started > known.started:
            self._observe("honed_queue_wait_seconds", job.attempts[0].started_at - job.submitted_at)
        for attempt in job.attempts:
            if attempt.number > known.attempt and attempt.ended_at is not None:
                outcome = attempt.outcome or "none"
                self._add("honed_attempts_finished_total", outcome)
                self._add("honed_device_seconds_total", outcome, attempt.spent_sec * max(1, job.num_gpus))
                for kind, num_bytes in (("checkpoint", attempt.checkpoint_bytes), ("output", attempt.output_bytes)):
                    if num_bytes:
                        self._add("honed_written_bytes_total", kind, num_bytes)
                self._add("honed_fallbacks_total", by=int(attempt.fallback is not None))
                self._add("honed_resumes_total", by=int(attempt.is_resumed))
                self._add("honed_preemptions_total", by=int(attempt.preemption is not None))
                self._add("honed_out_of_memory_adjustments_total", by=int(attempt.is_adjusted))
        for outcome in job.ends[known.ends :]:
            self._add("honed_jobs_finished_total", outcome)
        # An entry that was rebuilt from an older copy takes nothing back.
        mark = Mark(*map(max, known, now))
        if mark != old:
            self._marks[job.id] = mark
            self._is_behind = True

    def _add(self, name: str, label: str = "", by: float = 1) -> None:
        values = self._values["counters"][name]
        values[label] = values.get(label, 0) + by
        self._is_behind = True

    def _observe(self, name: str, seconds: float, label: str = "") -> None:
        seconds = max(0.0, seconds)  # the clock was set back
        value = self._values["histograms"][name].setdefault(label, _nothing(name))
        value["counts"][bisect.bisect_left(HISTOGRAMS[name].bounds, seconds)] += 1
        value["sum"] += seconds
        self._is_behind = True

    # -- the file -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._values = _zero()
        self._marks = {job.id: Mark.of(job) for job in self._spool.catalog}
        self._pruned = self._spool.pruned.ids()
        self._rejected = set(self._refused()[0])
        self._is_behind = True
        self.tend(is_last=True)  # at once, as later nobody would know what is not to be counted

    def _catch_up(self) -> None:
        """Count what happened between the last write and the end of the last daemon."""
        pruned = self._spool.pruned.ids()
        for number in pruned - self._pruned:
            if (job := self._spool.pruned.get(number)) is not None:
                self._count(job)
        self._pruned |= pruned
        for item in self._spool.catalog:
            if Mark.of(item) != self._marks.get(item.id):
                with passed_over(self._spool.entries.path(item.id, item.state)):  # counted once it can be read
                    if (job := self._spool.job(item.id)) is not None:
                        self._count(job)
        refusals, are_all = self._refused()
        for number, code in refusals.items():
            self.count_rejection(number, code, None)
        # Numbers are never used again: those of which nothing is left need not be kept.
        self._rejected = self._rejected & refusals.keys() if are_all else self._rejected
        self._pruned &= pruned
        known = {*pruned, *self._spool.corrupt.numbers(), *(job.id for job in self._spool.catalog)}
        self._marks = {number: mark for number, mark in self._marks.items() if number in known}

    def _refused(self) -> tuple[dict[int, str], bool]:
        """Return the code of every file in rejected/ by its number, and whether all could be read. One that is still
        claimed is not rejected yet."""
        codes: dict[int, str] = {}
        are_all = True
        try:
            claimed = {path.parent.name.partition(".")[0] for path in self._spool.claimed_dir.glob("[0-9]*/*")}
            paths = refusals.listed(self._spool.rejected)
        except OSError as error:
            log.warning("%s: the files in it are not counted: %s", self._spool.rejected_dir, error)
            return codes, False
        for path in paths:
            try:
                if (reason := refusals.read(path)) is not None and str(reason.number) not in claimed:
                    codes[reason.number] = reason.code
            except OSError as error:
                log.warning("%s: not counted: %s", path, error)
                are_all = False
        return codes, are_all

    def _read(self, content: bytes) -> bool:
        """Take the file's content. Returns True. Raises an exception if it is damaged."""
        data = json.loads(content)
        values, counted = values_of(data), data["counted"].items()
        self._marks = {number: Mark(*map(int, mark.split("."))) for mark, text in counted for number in _numbers(text)}
        self._pruned, self._rejected = (set(_numbers(data[key])) for key in ("pruned", "rejected"))
        self._values = values
        return True

    def _data(self) -> dict[str, object]:
        by_mark: dict[Mark, list[int]] = {}
        for number, mark in self._marks.items():
            by_mark.setdefault(mark, []).append(number)
        return {
            **self._values,
            "counted": {".".join(map(str, mark)): _spans(numbers) for mark, numbers in sorted(by_mark.items())},
            "pruned": _spans(self._pruned),
            "rejected": _spans(self._rejected),
        }


def read(path: Path) -> Values | None:
    """Return the values in the file; None if there is none, or a damaged one."""
    try:
        return values_of(json.loads(durable.read(path)))
    except (OSError, *DAMAGE):
        return None


def values_of(data: Mapping[str, Any]) -> Values:
    """Return the values in the file's content, and zero for those that it lacks. Raises one of DAMAGE if it is not what
    honed has written."""
    made = _zero()
    for name, values in made["counters"].items():
        values.update({str(label): float(value) for label, value in data["counters"].get(name, {}).items()})
    for name, observed in made["histograms"].items():
        for label, value in data["histograms"].get(name, {}).items():
            counts = [int(count) for count in value["counts"]]
            if len(counts) == len(HISTOGRAMS[name].bounds) + 1:  # else another honed's, with other buckets
                observed[str(label)] = {"counts": counts, "sum": float(value["sum"])}
    return made


def _zero() -> Values:
    counters: dict[str, dict[str, float]] = {name: {} if kind.label else {"": 0.0} for name, kind in COUNTERS.items()}
    histograms = {name: {} if kind.label else {"": _nothing(name)} for name, kind in HISTOGRAMS.items()}
    return {"counters": counters, "histograms": histograms}


def _nothing(name: str) -> Observed:
    return {"counts": [0] * (len(HISTOGRAMS[name].bounds) + 1), "sum": 0.0}


def _spans(numbers: Iterable[int]) -> str:
    """Return numbers as text: `1-9 12`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers that `_spans` has written. Raises ValueError for another text."""
    for span in text.split():
        first, _, last = span.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if len(numbers) > MAX_SPAN:
            raise ValueError(f"not a span of numbers: {span}")
        yield from numbers
