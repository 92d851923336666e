"""What one job has reported, read by pages from honed.db, however much it is.

Between two items these iterators hold one page, and neither a connection nor a read transaction. None is no row: one
comes after each page, so that a caller with other work can do it.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from honed.job import keyset
from honed.job.database import Reader
from honed.job.shape import Prediction

T = TypeVar("T")

#: Rows of a page, and characters of its texts, whichever is reached first: some milliseconds of work.
PAGE_ROWS = 1000
PAGE_CHARS = 256 * 1024
#: Events that are read at a time: one may have megabytes.
PAGE_EVENTS = 50
#: Pages in which `last_metric` looks for the last attempt.
MAX_PAGES = 5

Last = tuple[int, int, int, float]  # attempt, step, rowid, value


def present(rows: Iterable[T | None]) -> Iterator[T]:
    """Yield the rows without the Nones between pages."""
    return (row for row in rows if row is not None)


def metric(path: Path, job_id: int, name: str) -> Iterator[tuple[int, float] | None]:
    """Yield (step, value) of one metric by step; of a repeated step all values, in the order of arrival."""
    place = keyset.FIRST
    while found := _page(path, keyset.after("step, rowid, value"), job_id, name, *place, PAGE_ROWS):
        place = found[-1][:2]
        yield from ((step, value) for step, _, value in found)
        yield None


def last_metrics(path: Path, job_id: int, attempt: int) -> Iterator[tuple[str, float] | None]:
    """Yield the last value of each metric, by name: that of the last attempt, and of its highest step. `attempt`: the
    job's latest, with whose first row the search ends."""
    name, than = "", ">="
    while True:
        sql = (
            f"SELECT name, attempt, step, rowid, value FROM metrics WHERE job_id = ? AND name {than} ?"
            " ORDER BY name, step, rowid LIMIT ?"
        )
        found = _page(path, sql, job_id, name, PAGE_ROWS)
        yield None
        for each, several in itertools.groupby(found, key=itemgetter(0)):
            last: Last | None = max(row[1:] for row in several)
            if each == found[-1][0] and len(found) == PAGE_ROWS:  # the next page would have more of it
                last = yield from _last(partial(_page, path), job_id, each, attempt)
            if last is not None:
                yield each, last[-1]
        if len(found) < PAGE_ROWS:
            return
        name, than = found[-1][0], ">"


def last_metric(reader: Reader, job_id: int, name: str, attempt: int) -> float | None:
    """Return one of `last_metrics`, in a bounded time: the last attempt is looked for among the highest steps."""
    search = _last(reader.page, job_id, name, attempt, max_pages=MAX_PAGES)
    while True:
        try:
            next(search)
        except StopIteration as end:
            found: Last | None = end.value
            return found[-1] if found is not None else None


def _last(
    page: Callable[..., list[Any]], job_id: int, name: str, attempt: int, *, max_pages: float = math.inf
) -> Generator[None, None, Last | None]:
    """Return the last row of a metric, after a None for each further page."""
    place, num_pages = keyset.LAST, 0
    best: Last | None = None
    while found := page(keyset.before("step, rowid, attempt, value"), job_id, name, *place, PAGE_ROWS):
        place, num_pages = found[-1][:2], num_pages + 1
        last = max((attempt, step, rowid, value) for step, rowid, attempt, value in found)
        best = last if best is None else max(best, last)
        if best[0] >= attempt or len(found) < PAGE_ROWS or num_pages >= max_pages:
            break
        yield None
    return best


def predictions(path: Path, job_id: int) -> Iterator[Prediction | None]:
    """Yield the predictions by step and example."""
    keys = ("epoch", "step", "sample_index", "prompt", "ground_truth", "prediction")
    sql = (
        f"SELECT {', '.join(keys)} FROM training_predictions WHERE job_id = ? AND (step, sample_index) > (?, ?)"
        " ORDER BY step, sample_index LIMIT ?"
    )
    place = keyset.FIRST
    while found := _page(path, sql, job_id, *place, PAGE_ROWS, max_chars=PAGE_CHARS):
        place = found[-1][1:3]
        yield from (cast("Prediction", dict(zip(keys, row, strict=True))) for row in found)
        yield None


def events(path: Path, job_id: int, kinds: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Yield the events of these kinds in the order of arrival."""
    numbers = heapq.merge(*(_numbers(path, job_id, kind) for kind in kinds))
    while some := list(itertools.islice(numbers, PAGE_EVENTS)):
        while some:
            marks = ", ".join("?" * len(some))
            sql = f"SELECT rowid, attempt, kind, data, created_at FROM events WHERE job_id = ? AND rowid IN ({marks})"
            found = _page(path, f"{sql} ORDER BY rowid", job_id, *some, max_chars=PAGE_CHARS)
            for _, attempt, kind, data, when in found:
                yield {**json.loads(data), "attempt": attempt, "event": kind, "created_at": when}
            yield None
            some = [number for number in some if found and number > found[-1][0]]


def _numbers(path: Path, job_id: int, kind: str) -> Iterator[int]:
    sql = "SELECT rowid FROM events WHERE job_id = ? AND kind = ? AND rowid > ? ORDER BY rowid LIMIT ?"
    last = -1
    while found := _page(path, sql, job_id, kind, last, PAGE_ROWS):
        yield from (number for (number,) in found)
        [last] = found[-1]


def _page(path: Path, sql: str, *arguments: object, max_chars: float = math.inf) -> list[Any]:
    with closing(Reader(path)) as reader:
        return reader.page(sql, *arguments, max_chars=max_chars)
