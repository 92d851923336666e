"""The limits of one job's rows in honed.db, whatever its worker reports; its events.jsonl stays whole.

    metrics               beyond MAX_METRIC_ROWS, every second row of the older steps goes: first of the steps' own
                          metrics, and of evaluations only if there are too many of these alone
    training_predictions  beyond MAX_PREDICTION_BYTES, the predictions of older steps go: those of the first one, the
                          baseline, and of the last one stay
    events                beyond MAX_EVENT_ROWS or MAX_EVENT_BYTES, the older half of the most frequent kind goes

The first and the last row of a metric stay, and of every bite of the older rows the lowest value, so the best one, too.
What goes is counted in an event of the kind `thinned`, which the report shows.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from honed.job import keyset

#: Rows of one job's metrics, at most. Thinning begins a little earlier, by what one bite of events can add.
MAX_METRIC_ROWS = 500_000
MARGIN_ROWS = 20_000
#: Bytes of one job's predictions, at most: of their texts, and of every row beside these.
MAX_PREDICTION_BYTES = 64 * 2**20
ROW_BYTES = 100
#: One job's other events, at most.
MAX_EVENT_ROWS = 100_000
MAX_EVENT_BYTES = 64 * 2**20
#: Rows that are looked at, or removed, between two looks at the clock: some milliseconds of work.
BITE_ROWS = 2000

#: Beginnings of the names of metrics that are not of single steps: few, and each of a whole round.
_KEPT_LONGER = ("eval_", "predictions/", "guard/")
_TEXTS = ("prompt", "ground_truth", "prediction")
_SIZE_OF_PREDICTION = " + ".join([str(ROW_BYTES), *(f"coalesce(length(CAST({text} AS BLOB)), 0)" for text in _TEXTS)])
_SIZE_OF_DATA = "length(CAST(data AS BLOB))"


class Added(NamedTuple):
    """What a reading has added to a job's rows."""

    metric_rows: int = 0
    prediction_bytes: int = 0
    event_rows: int = 0
    event_bytes: int = 0


@dataclass
class _Sizes:
    metric_rows: int
    prediction_bytes: int
    event_rows: int
    event_bytes: int


class Thinning:
    """One job's rows. What it knows of them is counted in the database when it is first needed. `clock` is seconds."""

    def __init__(self, job_id: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._job_id = job_id
        self._clock = clock
        self._sizes: _Sizes | None = None
        self._work: Iterator[None] | None = None  # what is under way, continued by `tend`

    def note(self, db: sqlite3.Connection, added: Added) -> None:
        """Note that rows were added."""
        sizes = self._sizes
        if sizes is None:
            self._sizes = self._counted(db)
            return
        sizes.metric_rows += added.metric_rows
        sizes.prediction_bytes += added.prediction_bytes
        sizes.event_rows += added.event_rows
        sizes.event_bytes += added.event_bytes

    def tend(self, db: sqlite3.Connection, attempt: int, *, until: float) -> bool:
        """Remove rows that are too many, until a time of the clock. Returns False if some are left: then no events are
        to be added before the next call. Each removal is one statement, so a crash leaves nothing half done."""
        while (work := self._work or self._begun(db, attempt)) is not None:
            self._work = work
            try:
                next(work)
            except StopIteration:
                self._work = None
            except BaseException:
                self._work = self._sizes = None  # counted once more
                raise
            if self._clock() >= until:
                break
        self._work = self._work or self._begun(db, attempt)
        return self._work is None

    def _counted(self, db: sqlite3.Connection) -> _Sizes:
        one = (self._job_id,)
        (metric_rows,) = db.execute("SELECT count(*) FROM metrics WHERE job_id = ?", one).fetchone()
        sql = f"SELECT coalesce(sum({_SIZE_OF_PREDICTION}), 0) FROM training_predictions WHERE job_id = ?"
        (prediction_bytes,) = db.execute(sql, one).fetchone()
        sql = f"SELECT count(*), coalesce(sum({_SIZE_OF_DATA}), 0) FROM events WHERE job_id = ?"
        event_rows, event_bytes = db.execute(sql, one).fetchone()
        return _Sizes(metric_rows, prediction_bytes, event_rows, event_bytes)

    def _begun(self, db: sqlite3.Connection, attempt: int) -> Iterator[None] | None:
        """Return the work that is to be done now; None if nothing is too large."""
        if (sizes := self._sizes) is None:
            return None
        if sizes.metric_rows > MAX_METRIC_ROWS - MARGIN_ROWS:
            return self._thin_metrics(db, attempt, sizes)
        if sizes.prediction_bytes > MAX_PREDICTION_BYTES:
            return self._thin_predictions(db, attempt, sizes)
        if sizes.event_rows > MAX_EVENT_ROWS or sizes.event_bytes > MAX_EVENT_BYTES:
            return self._thin_events(db, attempt, sizes)
        return None

    # -- metrics ------------------------------------------------------------------------------------------------------

    def _thin_metrics(self, db: sqlite3.Connection, attempt: int, sizes: _Sizes) -> Iterator[None]:
        """Remove every second row of the older half of the steps' metrics; of all metrics, if that is not enough."""
        rows = "SELECT name, count(*) FROM metrics WHERE job_id = ? GROUP BY name"
        counts: dict[str, int] = dict(db.execute(rows, (self._job_id,)).fetchall())
        sizes.metric_rows = sum(counts.values())  # a transaction around these may have been taken back
        yield
        if sizes.metric_rows <= MAX_METRIC_ROWS - MARGIN_ROWS:
            return
        steps = {name: num for name, num in counts.items() if not name.startswith(_KEPT_LONGER)}
        are_enough = sum(steps.values()) > sizes.metric_rows // 4
        num_gone = 0
        for name, num in (steps if are_enough else counts).items():
            for gone in self._thin_metric(db, name, num // 2):
                sizes.metric_rows -= gone
                num_gone += gone
                yield
        if not num_gone:  # one of very many metrics has but a few rows: they are no course of anything
            sql = (
                "DELETE FROM metrics WHERE rowid IN (SELECT rowid FROM metrics WHERE job_id = ? ORDER BY name LIMIT ?)"
            )
            while sizes.metric_rows > MAX_METRIC_ROWS // 2:
                gone = db.execute(sql, (self._job_id, BITE_ROWS)).rowcount
                if not gone:
                    break
                sizes.metric_rows -= gone
                num_gone += gone
                yield
        count_gone(db, self._job_id, attempt, "metrics", num_gone)

    def _thin_metric(self, db: sqlite3.Connection, name: str, num_older: int) -> Iterator[int]:
        """Remove half of one metric's oldest rows, so that the others lie evenly over their steps; yields the number
        removed after every bite."""
        if num_older < 2:
            return
        sql = "SELECT step FROM metrics WHERE job_id = ? AND name = ? ORDER BY step, rowid LIMIT 1 OFFSET ?"
        first, last = (db.execute(sql, (self._job_id, name, place)).fetchone()[0] for place in (0, num_older - 1))
        kept_step, gap = first, 2 * (last - first) / num_older
        sql = keyset.after("step, rowid, value")
        step, rowid, num_left = first - 1, -1, num_older
        while num_left > 0:
            rows = db.execute(sql, (self._job_id, name, step, rowid, min(num_left, BITE_ROWS))).fetchall()
            if not rows:
                return
            best = min((row for row in rows if row[2] is not None), key=_value, default=None)
            gone = list[int]()
            for number, row in enumerate(rows):
                is_first = num_left == num_older and number == 0
                if is_first or row is best or (row[0] - kept_step >= gap if gap else number % 2 == 0):
                    kept_step = row[0]
                else:
                    gone.append(row[1])
            db.execute(f"DELETE FROM metrics WHERE rowid IN ({', '.join(map(str, gone))})")
            num_left -= len(rows)
            step, rowid, _ = rows[-1]
            yield len(gone)

    # -- predictions --------------------------------------------------------------------------------------------------

    def _thin_predictions(self, db: sqlite3.Connection, attempt: int, sizes: _Sizes) -> Iterator[None]:
        """Remove the predictions of the oldest steps after the first, a step at a time; then, if the first and the last
        step alone are too large, their last rows."""
        num_gone, sizes.prediction_bytes = 0, self._counted(db).prediction_bytes  # some were replaced by others
        yield
        size = f"SELECT coalesce(sum({_SIZE_OF_PREDICTION}), 0) FROM training_predictions WHERE job_id = ? AND step = ?"
        while sizes.prediction_bytes > MAX_PREDICTION_BYTES:
            sql = "SELECT DISTINCT step FROM training_predictions WHERE job_id = ? ORDER BY step LIMIT 3"
            steps = [step for (step,) in db.execute(sql, (self._job_id,))]
            if len(steps) < 3:
                break
            (num_bytes,) = db.execute(size, (self._job_id, steps[1])).fetchone()
            sql = "DELETE FROM training_predictions WHERE job_id = ? AND step = ?"
            num_gone += db.execute(sql, (self._job_id, steps[1])).rowcount
            sizes.prediction_bytes -= num_bytes
            yield
        while sizes.prediction_bytes > MAX_PREDICTION_BYTES:
            sql = (
                f"SELECT rowid, {_SIZE_OF_PREDICTION} FROM training_predictions WHERE job_id = ?"
                " ORDER BY step DESC, sample_index DESC LIMIT ?"
            )
            rows = db.execute(sql, (self._job_id, BITE_ROWS // 10)).fetchall()
            if not rows:
                break
            db.execute(f"DELETE FROM training_predictions WHERE rowid IN ({', '.join(str(row[0]) for row in rows)})")
            sizes.prediction_bytes -= sum(row[1] for row in rows)
            num_gone += len(rows)
            yield
        count_gone(db, self._job_id, attempt, "predictions", num_gone)

    # -- events -------------------------------------------------------------------------------------------------------

    def _thin_events(self, db: sqlite3.Connection, attempt: int, sizes: _Sizes) -> Iterator[None]:
        """Remove the older half of the events of the kind that takes the most room, but its first one."""
        sql = (
            "SELECT kind, count(*) FROM events WHERE job_id = ? GROUP BY kind"
            " ORDER BY sum(length(data)) + 100 * count(*)"
        )
        kinds = db.execute(sql, (self._job_id,)).fetchall()
        real = self._counted(db)
        sizes.event_rows, sizes.event_bytes = real.event_rows, real.event_bytes
        yield
        if not kinds or (sizes.event_rows <= MAX_EVENT_ROWS and sizes.event_bytes <= MAX_EVENT_BYTES):
            return
        kind, num = kinds[-1]
        first = "SELECT min(rowid) FROM events WHERE job_id = ?1 AND kind = ?2"
        sql = (
            f"SELECT rowid, {_SIZE_OF_DATA} FROM events WHERE job_id = ?1 AND kind = ?2 AND rowid > ({first}) LIMIT ?3"
        )
        num_left, num_gone = (num + 1) // 2, 0
        while num_left > 0:
            rows = db.execute(sql, (self._job_id, kind, min(num_left, BITE_ROWS))).fetchall()
            rows = rows or db.execute(sql.replace("rowid > (", "rowid >= ("), (self._job_id, kind, 1)).fetchall()
            db.execute(f"DELETE FROM events WHERE rowid IN ({', '.join(str(row[0]) for row in rows)})")
            sizes.event_rows -= len(rows)
            sizes.event_bytes -= sum(row[1] for row in rows)
            num_left -= max(1, len(rows))
            num_gone += len(rows)
            yield
        count_gone(db, self._job_id, attempt, "events", num_gone)


def count_gone(db: sqlite3.Connection, job_id: int, attempt: int, what: str, num: int) -> None:
    """Count what has gone, or was never taken, in the job's `thinned` event."""
    sql = "SELECT rowid, data FROM events WHERE job_id = ? AND kind = 'thinned' ORDER BY rowid LIMIT 1"
    row = db.execute(sql, (job_id,)).fetchone()
    counts = thinned_counts(json.loads(row[1]) if row else {})
    counts[what] = counts.get(what, 0) + num
    if row is not None:
        db.execute("UPDATE events SET data = ? WHERE rowid = ?", (json.dumps(counts), row[0]))
    elif num:
        sql = "INSERT INTO events VALUES (?, ?, 'thinned', ?, strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now'))"
        db.execute(sql, (job_id, attempt, json.dumps(counts)))


#: What is counted in a `thinned` event, and what the report calls it.
KINDS = {
    "metrics": "metrics",
    "predictions": "predictions",
    "events": "events",
    "names": "metrics of events with too many of them, or with too long names",
}


def thinned_counts(data: object) -> dict[str, int]:
    """Return how many rows are gone of every kind, by the data of a `thinned` event; a worker may have written one."""
    items = data.items() if isinstance(data, dict) else ()
    # Of its number with thousands of digits, Python cannot print the next one.
    return {str(key): value for key, value in items if key in KINDS and type(value) is int and 0 <= value < 2**53}


def _value(row: tuple[int, int, float]) -> float:
    return row[2]
