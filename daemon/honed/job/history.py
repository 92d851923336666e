"""What one job has reported, read by pages from honed.db, however much it is.

Between two items these iterators hold one page, and neither a connection nor a read transaction. None is no row: one
comes after every page, so that a caller with other work can do it.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from honed.job import keyset
from honed.job.database import Reader
from honed.job.shape import Prediction

T = TypeVar("T")

#: Rows of a page, and characters of its texts, whichever is reached first: some milliseconds of work.
PAGE_ROWS = 1000
PAGE_CHARS = 256 * 1024
#: Events that are read at a time: one may have megabytes.
PAGE_EVENTS = 50
#: Kinds of events, beside those that are known.
MAX_KINDS = 100
#: Pages in which `last_metric` looks for the last attempt.
MAX_PAGES = 5

#: The keys of a prediction, as the columns of its row.
KEYS = ("epoch", "step", "sample_index", "prompt", "ground_truth", "prediction")

Last = tuple[int, int, int, float]  # attempt, step, rowid, value


def present(rows: Iterable[T | None]) -> Iterator[T]:
    """Yield the rows without the Nones between pages."""
    return (row for row in rows if row is not None)


def names(path: Path, job_id: int) -> Iterator[str]:
    """Yield the names of the metrics."""
    name, than = "", ">="
    while True:
        sql = f"SELECT name FROM metrics WHERE job_id = ? AND name {than} ? ORDER BY name LIMIT 1"
        if not (page := _page(path, sql, job_id, name)):
            return
        [(name,)], than = page, ">"
        yield name


def metric(path: Path, job_id: int, name: str) -> Iterator[tuple[int, float, str] | None]:
    """Yield (step, value, created_at) of one metric by step; of a repeated step all, in the order of arrival."""
    place = keyset.FIRST
    columns = "step, rowid, value, created_at"
    while page := _page(path, keyset.after(columns), job_id, name, *place, PAGE_ROWS):
        place = page[-1][:2]
        yield from ((step, value, when) for step, _, value, when in page)
        yield None


def last_metrics(path: Path, job_id: int, attempt: int) -> Iterator[tuple[str, float] | None]:
    """Yield the last value of every metric, by name: that of the last attempt, and of its highest step. `attempt`: the
    job's latest, with whose first row the search ends."""
    name, than = "", ">="
    while True:
        sql = (
            f"SELECT name, attempt, step, rowid, value FROM metrics WHERE job_id = ? AND name {than} ?"
            " ORDER BY name, step, rowid LIMIT ?"
        )
        rows = _page(path, sql, job_id, name, PAGE_ROWS)
        yield None
        for item, several in itertools.groupby(rows, key=itemgetter(0)):
            last: Last | None = max(row[1:] for row in several)
            if item == rows[-1][0] and len(rows) == PAGE_ROWS:  # the next page would have more of it
                last = yield from _last(partial(_page, path), job_id, item, attempt)
            if last is not None:
                yield item, last[-1]
        if len(rows) < PAGE_ROWS:
            return
        name, than = rows[-1][0], ">"


def last_metric(reader: Reader, job_id: int, name: str, attempt: int) -> float | None:
    """Return one of `last_metrics`, in a bounded time: the last attempt is looked for among the highest steps."""
    search = _last(reader.page, job_id, name, attempt, max_pages=MAX_PAGES)
    while True:
        try:
            next(search)
        except StopIteration as end:
            last: Last | None = end.value
            return last[-1] if last is not None else None


def _last(
    page: Callable[..., list[Any]], job_id: int, name: str, attempt: int, *, max_pages: float = math.inf
) -> Generator[None, None, Last | None]:
    """Return the last row of a metric, after a None for every further page."""
    place, num_pages = keyset.LAST, 0
    best: Last | None = None
    while rows := page(keyset.before("step, rowid, attempt, value"), job_id, name, *place, PAGE_ROWS):
        place, num_pages = rows[-1][:2], num_pages + 1
        last = max((attempt, step, rowid, value) for step, rowid, attempt, value in rows)
        best = last if best is None else max(best, last)
        if best[0] >= attempt or len(rows) < PAGE_ROWS or num_pages >= max_pages:
            break
        yield None
    return best


def predictions(path: Path, job_id: int) -> Iterator[Prediction | None]:
    """Yield the predictions by step and example."""
    sql = (
        f"SELECT {', '.join(KEYS)} FROM training_predictions WHERE job_id = ? AND (step, sample_index) > (?, ?)"
        " ORDER BY step, sample_index LIMIT ?"
    )
    place = keyset.FIRST
    while page := _page(path, sql, job_id, *place, PAGE_ROWS, max_chars=PAGE_CHARS):
        place = page[-1][1:3]
        yield from (cast("Prediction", dict(zip(KEYS, row, strict=True))) for row in page)
        yield None


class Example(NamedTuple):
    """A held-out example: some of its predictions, by step, and the number of all."""

    sample_index: int
    rows: list[Prediction]
    num_all: int


def examples(path: Path, job_id: int, *, num: int, num_rows: int) -> tuple[list[Example], int]:
    """Return the first examples, each with its first prediction, its last, and evenly spaced ones between them; and the
    number of all examples."""
    sql = "SELECT count(DISTINCT sample_index) FROM training_predictions WHERE job_id = ?"
    num_all = sum(number for (number,) in _page(path, sql, job_id))
    sql = (
        "SELECT sample_index, count(*) FROM training_predictions WHERE job_id = ? GROUP BY sample_index"
        " ORDER BY sample_index LIMIT ?"
    )
    counts: dict[int, int] = dict(_page(path, sql, job_id, num))
    wanted = {index: _spread(count, num_rows) for index, count in counts.items()}
    seen, chosen = Counter[int](), list[tuple[int, int]]()
    sql = (
        "SELECT step, sample_index FROM training_predictions WHERE job_id = ? AND (step, sample_index) > (?, ?)"
        " ORDER BY step, sample_index LIMIT ?"
    )
    place = keyset.FIRST
    while page := _page(path, sql, job_id, *place, PAGE_ROWS):
        place = page[-1]
        for step, index in page:
            if seen[index] in wanted.get(index, ()):
                chosen.append((step, index))
            seen[index] += 1
    sql = f"SELECT {', '.join(KEYS)} FROM training_predictions WHERE job_id = ? AND step = ? AND sample_index = ?"
    rows: dict[int, list[Prediction]] = {index: [] for index in counts}
    for step, index in chosen:
        rows[index] += (
            cast("Prediction", dict(zip(KEYS, row, strict=True))) for row in _page(path, sql, job_id, step, index)
        )
    return [Example(index, rows[index], counts[index]) for index in counts if rows[index]], num_all


def _spread(num: int, most: int) -> set[int]:
    """Return the places of at most so many of `num` rows: the first, the last, and evenly spaced ones between them."""
    return set(range(num)) if num <= most else {round(n * (num - 1) / (most - 1)) for n in range(most)}


def last_predictions(path: Path, job_id: int, *, num: int, max_chars: int) -> list[Prediction]:
    """Return the first predictions of the last step, up to a number of them and of characters."""
    sql = (
        f"SELECT {', '.join(KEYS)} FROM training_predictions WHERE job_id = ?1"
        " AND step = (SELECT max(step) FROM training_predictions WHERE job_id = ?1) ORDER BY sample_index LIMIT ?2"
    )
    rows = _page(path, sql, job_id, num, max_chars=max_chars)
    return [cast("Prediction", dict(zip(KEYS, row, strict=True))) for row in rows]


def events(path: Path, job_id: int, kinds: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Yield the events of these kinds in the order of arrival."""
    numbers = heapq.merge(*(_numbers(path, job_id, kind) for kind in kinds))
    while some := list(itertools.islice(numbers, PAGE_EVENTS)):
        while some:
            marks = ", ".join("?" * len(some))
            sql = f"SELECT rowid, attempt, kind, data, created_at FROM events WHERE job_id = ? AND rowid IN ({marks})"
            page = _page(path, f"{sql} ORDER BY rowid", job_id, *some, max_chars=PAGE_CHARS)
            yield from (_event(*row[1:]) for row in page)
            yield None
            some = [number for number in some if page and number > page[-1][0]]


def newest_events(path: Path, job_id: int, first: Iterable[str], *, max_chars: int) -> list[dict[str, Any]]:
    """Return the newest events per kind, in the order of arrival: those of the kinds `first` before those of others
    while their texts have room."""
    kinds = [*first, *(kind for kind in itertools.islice(_kinds(path, job_id), MAX_KINDS) if kind not in first)]
    newest: dict[int, tuple[int, str, str, str]] = {}
    for kind in kinds:
        if max_chars <= 0:
            break
        sql = (
            "SELECT rowid, attempt, kind, data, created_at FROM events WHERE job_id = ? AND kind = ?"
            " ORDER BY rowid DESC LIMIT ?"
        )
        rows = _page(path, sql, job_id, kind, PAGE_ROWS, max_chars=min(PAGE_CHARS, max_chars))
        newest |= {row[0]: row[1:] for row in rows}
        max_chars -= sum(len(row[3]) for row in rows)
    return [_event(*newest[number]) for number in sorted(newest)]


def _kinds(path: Path, job_id: int) -> Iterator[str]:
    kind, than = "", ">="
    while page := _page(
        path, f"SELECT kind FROM events WHERE job_id = ? AND kind {than} ? ORDER BY kind LIMIT 1", job_id, kind
    ):
        [(kind,)], than = page, ">"
        yield kind


def num_events(path: Path, job_id: int, besides: Iterable[str]) -> int:
    """Return the number of events of other kinds."""
    kinds = list(besides)
    sql = f"SELECT count(*) FROM events WHERE job_id = ? AND kind NOT IN ({', '.join('?' * len(kinds))})"
    return sum(number for (number,) in _page(path, sql, job_id, *kinds))


def _event(attempt: int, kind: str, data: str, when: str) -> dict[str, Any]:
    return {**json.loads(data), "attempt": attempt, "event": kind, "created_at": when}


def _numbers(path: Path, job_id: int, kind: str) -> Iterator[int]:
    sql = "SELECT rowid FROM events WHERE job_id = ? AND kind = ? AND rowid > ? ORDER BY rowid LIMIT ?"
    last = -1
    while page := _page(path, sql, job_id, kind, last, PAGE_ROWS):
        yield from (number for (number,) in page)
        [last] = page[-1]


def _page(path: Path, sql: str, *arguments: object, max_chars: float = math.inf) -> list[Any]:
    with closing(Reader(path)) as reader:
        return reader.page(sql, *arguments, max_chars=max_chars)
