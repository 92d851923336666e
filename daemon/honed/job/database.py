"""honed.db: what other tools read. Derived from the spool and the jobs' directories; it can be deleted at any time.

    jobs                   one row a job: where it is, and its progress
    metrics                one row a figure: loss, learning_rate, grad_norm, eval_loss, predictions/exact_match, …
    training_predictions   what the model wrote for a held-out example, and the truth
    events                 the rest of what workers told
    offsets                how far each attempt's events.jsonl was read
    *_v1                   views for other tools, see view.py

An attempt's events and its offset change in one transaction, so a line counts once, however often the daemon dies.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import sqlite3
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from honed.job import views
from honed.job.event import Event, Reading
from honed.job.job import Job
from honed.system.error import EnvironmentInvalidError
from honed.system.log import about
from honed.system.message import DATABASE_DAMAGED

log = logging.getLogger(__name__)

#: What brings a database of an older honed to the next version, by the version that it has: rows whose job's files
#: were removed since could not be made again. Views (view.py) are made anew with each start.
MIGRATIONS = {
    1: "DROP INDEX events_by_job; CREATE INDEX events_by_kind ON events (job_id, kind)",
}
#: Stands in `user_version`; 0 is a database whose rows are still to be made.
SCHEMA_VERSION = len(MIGRATIONS) + 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, outcome TEXT, priority INTEGER NOT NULL,
    submitted_at TEXT NOT NULL, progress TEXT NOT NULL DEFAULT '{}');
CREATE TABLE IF NOT EXISTS metrics (
    job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, step INTEGER NOT NULL, epoch REAL, name TEXT NOT NULL,
    value REAL, created_at TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS metrics_by_job ON metrics (job_id, name, step);
CREATE TABLE IF NOT EXISTS training_predictions (
    job_id INTEGER NOT NULL, user_id TEXT NOT NULL, epoch REAL, step INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    prompt TEXT, ground_truth TEXT, prediction TEXT, created_at TEXT NOT NULL,
    PRIMARY KEY (job_id, step, sample_index));
CREATE TABLE IF NOT EXISTS events (
    job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL,
    created_at TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_kind ON events (job_id, kind);
CREATE TABLE IF NOT EXISTS offsets (
    job_id INTEGER NOT NULL, attempt INTEGER NOT NULL, offset INTEGER NOT NULL, num_bad INTEGER NOT NULL,
    PRIMARY KEY (job_id, attempt));
"""
PUT_JOB = (
    "INSERT INTO jobs (id, name, state, outcome, priority, submitted_at) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET name = excluded.name, state = excluded.state,"
    " outcome = excluded.outcome, priority = excluded.priority"
)
#: Figures of a `step` event that become metrics.
STEP_METRICS = ("loss", "learning_rate", "grad_norm")
PROGRESS_KEYS = ("step", "num_steps", "epoch", "loss", "eta_sec")


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC, as all `created_at` are."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


class Database:
    """One connection. `is_new`: there was no database, or a damaged one, and its rows must be made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved: set[int] = set()  #: jobs whose state has changed since somebody last took them from here
        self.is_new = False
        self.is_behind = False  #: something could not be written; see rebuild.catch_up
        self._is_damaged = False
        self._db = self._open_or_begin()

    def _open_or_begin(self) -> sqlite3.Connection:
        if not self.path.exists():
            self._remove_journal()  # of a database that is gone
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise  # locked, or no room
            self._set_aside(str(error))
            return self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        try:
            _version(db, self.path)  # first: a database of a later honed stays as it is
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            _check(db)
            version = _migrate(db, self.path)
            db.executescript(SCHEMA)
            _make_views(db)
        except BaseException:
            db.close()
            raise
        self.is_new = version == 0
        self._is_damaged = False
        self._files = self._identities()
        return db

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_name(self.path.name + ".damaged")
        log.error(
            "%s: %s; set aside as %s and made again", self.path, why, aside.name, extra=about(message=DATABASE_DAMAGED)
        )
        self._remove_journal()
        self.path.rename(aside)

    def _remove_journal(self) -> None:
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _identities(self) -> list[tuple[int, int] | None]:
        """The files that the names of the database mean now."""
        found: list[tuple[int, int] | None] = []
        for suffix in ("", "-wal"):
            try:
                info = self.path.with_name(self.path.name + suffix).stat()
            except FileNotFoundError:
                found.append(None)
            else:
                found.append((info.st_dev, info.st_ino))
        return found

    @property
    def is_lost(self) -> bool:
        """Whether what we write to is not what others read any more: somebody removed it, or it is damaged."""
        return self._is_damaged or self._identities() != self._files

    def renew(self) -> None:
        """Begin a new database in the place of one that is lost."""
        old = self._db
        if self._is_damaged:
            self._set_aside("damaged while honed was running")
        else:
            log.warning("%s was removed or replaced; it is made again", self.path)
            self.path.unlink(missing_ok=True)  # whatever was put there; its journal may be gone
            self._remove_journal()
        self._db = self._open_or_begin()
        with contextlib.suppress(sqlite3.Error):
            old.close()

    @contextlib.contextmanager
    def made_again(self) -> Iterator[None]:
        """All rows are made in here, or none: who dies in between leaves a database that is still new."""
        with self._transaction():
            for table in ("jobs", "metrics", "training_predictions", "events", "offsets"):
                self._db.execute(f"DELETE FROM {table}")
            yield
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.is_new = False

    def sync(self) -> None:
        """Make all that was written so far durable; with WAL that is the next commit's affair."""
        with self._noting_damage():
            self._db.execute("PRAGMA synchronous = FULL")
            try:
                self._db.execute("UPDATE offsets SET offset = offset WHERE rowid = (SELECT max(rowid) FROM offsets)")
            finally:
                self._db.execute("PRAGMA synchronous = NORMAL")

    def states(self) -> dict[int, str]:
        """The state of each job as it stands here."""
        return dict(self._db.execute("SELECT id, state FROM jobs"))

    def close(self) -> None:
        self._db.close()

    def put_job(self, job: Job) -> None:
        """Set a job's row to what its entry says; its progress stays. A row that cannot be written harms no job."""
        self.moved.add(job.id)
        try:
            self._db.execute(PUT_JOB, _job_row(job))
        except sqlite3.Error as error:
            if self._db.in_transaction:
                raise
            self.is_behind = True
            self._is_damaged = self._is_damaged or _is_corrupt(error)
            log.error("%s: job %d: %s", self.path, job.id, error)  # noqa: TRY400

    def put_jobs(self, jobs: Iterable[Job]) -> None:
        """As put_job, of all jobs there are; those whose rows say so already are not touched."""
        try:
            known = {row[0]: row for row in self._db.execute("SELECT id, name, state, outcome, priority FROM jobs")}
            rows = [row for row in map(_job_row, jobs) if known.get(row[0]) != row[:5]]
            self.moved |= {row[0] for row in rows}
            with self._transaction():
                self._db.executemany(PUT_JOB, rows)
        except sqlite3.Error as error:
            if self._db.in_transaction:
                raise
            self.is_behind = True
            self._is_damaged = self._is_damaged or _is_corrupt(error)
            log.error("%s: the rows of all jobs: %s", self.path, error)  # noqa: TRY400

    def offset(self, job_id: int, attempt: int) -> int:
        """Bytes of an attempt's events that have been counted."""
        row = self._db.execute(
            "SELECT offset FROM offsets WHERE job_id = ? AND attempt = ?", (job_id, attempt)
        ).fetchone()
        return row[0] if row else 0

    def has_event(self, job: Job, kind: str) -> bool:
        """Whether the latest attempt has told such an event."""
        sql = "SELECT 1 FROM events WHERE job_id = ? AND attempt = ? AND kind = ?"
        return self._db.execute(sql, (job.id, job.attempt.number, kind)).fetchone() is not None

    def apply(self, job: Job, reading: Reading) -> None:
        """Count a reading of the latest attempt's events, once."""
        attempt = job.attempt.number
        with self._transaction():
            for event in reading.events:
                self._apply_event(job, attempt, event)
            self._db.execute(
                "INSERT INTO offsets VALUES (?, ?, ?, ?) ON CONFLICT (job_id, attempt)"
                " DO UPDATE SET offset = excluded.offset, num_bad = num_bad + excluded.num_bad",
                (job.id, attempt, reading.offset, reading.num_bad),
            )

    def job_ids(self) -> set[int]:
        """The jobs that have a row."""
        return {number for (number,) in self._db.execute("SELECT id FROM jobs")}

    def forget(self, job_id: int, *, max_rows: int) -> bool:
        """Remove a job's rows, at most so many at a time. Returns whether none is left; its own goes last."""
        for table in ("metrics", "training_predictions", "events", "offsets"):
            rows = f"SELECT rowid FROM {table} WHERE job_id = ? LIMIT ?"
            found = self._db.execute(f"DELETE FROM {table} WHERE rowid IN ({rows})", (job_id, max_rows))
            if found.rowcount >= max_rows:
                return False
        self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
        return True

    def last_event(self) -> int:
        """The number of the newest row in `events`."""
        return int(self._db.execute("SELECT coalesce(max(rowid), 0) FROM events").fetchone()[0])

    def events_of(self, first: int, count: int, jobs: Container[int]) -> list[tuple[int, str]]:
        """Among `count` rows of `events` from a number on, those of these jobs: their numbers and times."""
        sql = "SELECT rowid, job_id, created_at FROM events WHERE rowid >= ? AND rowid < ?"
        found = self._db.execute(sql, (first, first + count))
        return [(rowid, created_at) for rowid, job_id, created_at in found if job_id in jobs]

    def forget_events(self, numbers: Iterable[int]) -> None:
        """Remove rows of `events`."""
        with self._transaction():
            self._db.executemany("DELETE FROM events WHERE rowid = ?", [(number,) for number in numbers])

    def _apply_event(self, job: Job, attempt: int, event: Event) -> None:
        data, when = event.data, timestamp(event.time)
        step, epoch = place(event)
        match event.kind:
            case "step":
                self._add_metrics(job.id, attempt, step, epoch, figures(event), when)
                progress = {key: _number(data.get(key)) for key in PROGRESS_KEYS}
                self._db.execute("UPDATE jobs SET progress = ? WHERE id = ?", (json.dumps(progress), job.id))
            case "evaluation":
                self._add_metrics(job.id, attempt, step, epoch, figures(event), when)
            case "predictions":
                self._add_metrics(job.id, attempt, step, epoch, figures(event), when)
                self._add_predictions(job, step, epoch, answers(event), when)
            case _:
                if event.kind in {"resumed", "started_over"}:
                    # What comes is written anew; what then does not come was never part of this run.
                    self._db.execute(
                        "DELETE FROM training_predictions WHERE job_id = ? AND step > ?",
                        (job.id, step if event.kind == "resumed" else -1),
                    )
                self._add_metrics(job.id, attempt, step, epoch, figures(event), when)
                self._db.execute(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
                    (job.id, attempt, event.kind, json.dumps(data, ensure_ascii=False), when),
                )

    def _add_metrics(
        self, job_id: int, attempt: int, step: int, epoch: float | None, metrics: dict[str, float], when: str
    ) -> None:
        rows = [(job_id, attempt, step, epoch, name, value, when) for name, value in metrics.items()]
        self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def _add_predictions(self, job: Job, step: int, epoch: float | None, rows: Iterable[Any], when: str) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO training_predictions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    job.id,
                    str(job.uid),
                    epoch,
                    step,
                    row["sample_index"],
                    row["prompt"],
                    row["ground_truth"],
                    row["prediction"],
                    when,
                )
                for row in rows
            ],
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """One of its own, or the one that we are in."""
        if self._db.in_transaction:
            yield
            return
        with self._noting_damage():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it by itself
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._is_damaged = self._is_damaged or _is_corrupt(error)
            raise


def _job_row(job: Job) -> tuple[Any, ...]:
    return (job.id, job.name, str(job.state), job.outcome, job.priority, timestamp(job.submitted_at))


def _check(db: sqlite3.Connection) -> None:
    """Raises DatabaseError where the file is damaged."""
    if (word := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(word)


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, for short: also where its directory is read-only and no daemon runs.

    The first reader of a database in WAL mode makes two files beside it. Where it may not, and the last writer has
    tidied them up, nothing is missing from the database's own file, which is then read as one that nobody changes.
    """
    address = f"file:{quote(str(path))}?mode=ro"
    db = sqlite3.connect(address, uri=True, timeout=10)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        is_closed = not path.with_name(f"{path.name}-wal").exists()
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN and is_closed:
            db.close()
            return sqlite3.connect(f"{address}&immutable=1", uri=True)
    return db


def _is_corrupt(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether what opening met is the file's own fault: it is no database, or not one of ours (SQLITE_ERROR)."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF == sqlite3.SQLITE_ERROR or _is_corrupt(error)


def _migrate(db: sqlite3.Connection, path: Path) -> int:
    """Bring the tables to our version; returns it, or 0 for a database that is new."""
    version = _version(db, path)
    while 0 < version < SCHEMA_VERSION:
        # One transaction a step: who is killed in between goes on from there.
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[version]}; PRAGMA user_version = {version + 1}; COMMIT;")
        log.info("%s: brought from version %d to %d", path, version, version + 1)
        version += 1
    return version


def _make_views(db: sqlite3.Connection) -> None:
    """Make the views that are not there, and those anew that an older honed has made otherwise."""
    stored = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'view'"))
    for made in views.VIEWS:
        if stored.get(made.name) != made.sql.replace("IF NOT EXISTS ", "").rstrip(";"):
            db.executescript(f"BEGIN IMMEDIATE; DROP VIEW IF EXISTS {made.name}; {made.sql} COMMIT;")


def _version(db: sqlite3.Connection, path: Path) -> int:
    """`user_version`. Raises EnvironmentInvalidError for that of a later honed."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise EnvironmentInvalidError(
            f"{path} is of a later honed: its version is {version}, and this one knows {SCHEMA_VERSION}",
            hint="install that honed again; or move it away, and its rows are made again from the jobs' own files",
        )
    return version


class Reader:
    """Reads a database that a daemon may be writing; what is not there reads as empty."""

    def __init__(self, path: Path) -> None:
        self._db = connect_read_only(path) if path.exists() else None
        with contextlib.suppress(sqlite3.DatabaseError):  # damaged, or just being made: nothing is found in it
            if self._db is not None:
                _version(self._db, path)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def progress(self, job_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The progress of each of these jobs that has any: step, num_steps, epoch, loss, eta_sec. A few hundred at a
        time."""
        some = ", ".join("?" * len(job_ids))
        sql = f"SELECT id, progress FROM jobs WHERE id IN ({some}) AND progress <> '{{}}'"
        return {number: json.loads(text) for number, text in self._rows(sql, *job_ids)}

    def overview(self, num_jobs: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The first so many jobs of each kind, in the order of the list, and how many there are of each state."""
        keys = ("id", "name", "state", "outcome", "priority", "submitted_at")
        found: list[dict[str, Any]] = []
        for condition, order in (
            ("state = 'running'", "-priority, id"),
            ("state = 'queued'", "-priority, id"),
            ("state = 'held'", "-priority, id"),
            ("state NOT IN ('running', 'queued', 'held')", "-id"),
        ):
            sql = f"SELECT {', '.join(keys)}, progress FROM jobs WHERE {condition} ORDER BY {order} LIMIT ?"
            for row in self._rows(sql, num_jobs):
                found.append({**dict(zip(keys, row[:-1], strict=True)), "progress": json.loads(row[-1])})
        return found, dict(self._rows("SELECT state, count(*) FROM jobs GROUP BY state"))

    def latest_metrics(self, job_id: int) -> dict[str, float]:
        """The last value of each figure."""
        rows = self._rows("SELECT name, value FROM metrics WHERE job_id = ? ORDER BY attempt, step, rowid", job_id)
        return dict(rows)

    def metrics(self, job_id: int, name: str) -> list[tuple[int, float]]:
        """(step, value) of one figure, in the order in which they came."""
        sql = "SELECT step, value FROM metrics WHERE job_id = ? AND name = ? ORDER BY attempt, step, rowid"
        return list(self._rows(sql, job_id, name))

    def course(self, job_id: int, name: str, *, num_points: int = 40) -> list[float]:
        """One figure over the steps, averaged to at most so many values."""
        sql = (
            "SELECT avg(value) FROM metrics, (SELECT max(step) + 1 AS num_steps FROM metrics WHERE job_id = ?1"
            " AND name = ?2) WHERE job_id = ?1 AND name = ?2 AND value IS NOT NULL"
            " GROUP BY CASE WHEN num_steps > ?3 THEN step * ?3 / num_steps ELSE step END ORDER BY step"
        )
        return [value for (value,) in self._rows(sql, job_id, name, num_points)]

    def stage(self, job_id: int) -> str | None:
        """The stage that was told last."""
        sql = "SELECT data FROM events WHERE job_id = ? AND kind = 'stage' ORDER BY rowid DESC LIMIT 1"
        return next((str(json.loads(data).get("stage")) for (data,) in self._rows(sql, job_id)), None)

    def last_predictions(self, job_id: int, *, count: int = 3, max_chars: int = 2000) -> list[dict[str, Any]]:
        """The first few rows of the last step that has any, each text cut."""
        keys = ("step", "sample_index", "ground_truth", "prediction")
        sql = (
            "SELECT step, sample_index, substr(ground_truth, 1, ?2), substr(prediction, 1, ?2)"
            " FROM training_predictions WHERE job_id = ?1 AND step = (SELECT max(step) FROM training_predictions"
            " WHERE job_id = ?1) ORDER BY sample_index LIMIT ?3"
        )
        return [dict(zip(keys, row, strict=True)) for row in self._rows(sql, job_id, max_chars, count)]

    def figures(self, job_id: int) -> list[tuple[str, int, float, str]]:
        """(name, step, value, created_at) of every figure, by step; of a step that was done again, the last."""
        sql = "SELECT name, step, value, created_at FROM metrics WHERE job_id = ? ORDER BY attempt, rowid"
        last = {(name, step): (name, step, value, when) for name, step, value, when in self._rows(sql, job_id)}
        return sorted((row for row in last.values() if row[2] is not None), key=lambda row: row[1])

    def predictions(self, job_id: int) -> list[dict[str, Any]]:
        keys = ("epoch", "step", "sample_index", "prompt", "ground_truth", "prediction")
        sql = f"SELECT {', '.join(keys)} FROM training_predictions WHERE job_id = ? ORDER BY step, sample_index"
        return [dict(zip(keys, row, strict=True)) for row in self._rows(sql, job_id)]

    def events(self, job_id: int) -> list[dict[str, Any]]:
        sql = "SELECT attempt, kind, data, created_at FROM events WHERE job_id = ? ORDER BY rowid"
        return [
            {**json.loads(data), "attempt": attempt, "event": kind, "created_at": when}
            for attempt, kind, data, when in self._rows(sql, job_id)
        ]

    def _rows(self, sql: str, *arguments: Any) -> list[Any]:
        if self._db is None:
            return []
        try:
            return self._db.execute(sql, arguments).fetchall()
        except sqlite3.OperationalError:  # made this moment, and its tables are not there yet
            return []


def place(event: Event) -> tuple[int, float | None]:
    """The step and the epoch that an event is of."""
    return _integer(event.data.get("step")), _number(event.data.get("epoch"))


def figures(event: Event) -> dict[str, float]:
    """The metrics that an event brings; none for most kinds."""
    metrics, scores = event.data.get("metrics"), event.data.get("scores")
    match event.kind:
        case "step":
            found = {name: event.data.get(name) for name in STEP_METRICS}
        case "evaluation" if isinstance(metrics, dict):
            found = metrics
        case "predictions" | "guard" if isinstance(scores, dict):
            found = {f"{event.kind}/{name}": value for name, value in scores.items()}
        case _:
            return {}
    numbers = {str(name): _number(value) for name, value in found.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def answers(event: Event) -> list[dict[str, Any]]:
    """What the model wrote, where an event brings that: sample_index, prompt, ground_truth, prediction."""
    rows = event.data.get("rows") if event.kind == "predictions" else None
    return [
        {
            "sample_index": _integer(row.get("sample_index")),
            **{key: _text(row.get(key)) for key in ("prompt", "ground_truth", "prediction")},
        }
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def _number(value: Any) -> float | None:
    """A figure that SQLite can hold, or None: finite, and in 64 bits where it is whole."""
    match value:
        case bool():
            return None
        case float() if math.isfinite(value):
            return value
        case int() if abs(value) < 2**63:
            return value
        case _:
            return None


def _integer(value: Any) -> int:
    """A garbled step is step 0."""
    number = _number(value)
    return int(number) if number is not None and abs(number) < 2**62 else 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value).encode(errors="replace").decode()
