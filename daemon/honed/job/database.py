"""honed.db, for other tools to read. It is derived from the spool and the jobs' directories and can be deleted.

    jobs                   one row per job: its state and its progress
    metrics                one row per value: loss, mean_token_accuracy, eval_loss, predictions/exact_match, …
    training_predictions   the model's answer for a held-out example, and the reference
    events                 all other events of workers
    offsets                bytes of every attempt's events.jsonl that were read; of attempt 0, see pending.py
    *_v1                   views for other tools, see views.py

An attempt's events and its offset change in one transaction, so a line counts once even if the daemon crashes.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import logging
import math
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from honed.job import views
from honed.job.brief import Listed
from honed.job.event import Event, Reading, Written, step_metrics, written_bytes
from honed.job.job import Job, State
from honed.job.pending import Pending
from honed.job.shape import Answer, LastPrediction, Progress, Score
from honed.job.thinning import ROW_BYTES, Added, Thinning, count_gone
from honed.job.wal import Wal
from honed.system.error import EnvironmentInvalidError
from honed.system.log import about
from honed.system.message import DATABASE_DAMAGED

log = logging.getLogger(__name__)

#: Statements that bring a database from a version to the next one. They keep rows of jobs whose files were removed
#: since, which could not be rebuilt. Views (views.py) are recreated at every start. A version without a change keeps an
#: earlier honed from an instance that it would misread: the database is the one file whose version every honed checks.
#: The schema of 0.2.0 has version 1.
MIGRATIONS: dict[int, str] = {}
#: The value of `user_version`; 0 marks a database whose rows have yet to be built.
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
#: Evaluations from a step on of which the first in time is found: only a resume repeats or adds any. And those that are
#: passed over for it, because their loss was no number.
MAX_REPEATED, MAX_WITHOUT = 16, 1000
#: Errors of stat(2) where there is no file.
GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
#: The highest integer of SQLite.
MAX_INTEGER = 2**63 - 1
#: Milliseconds that the daemon's own connection waits for a lock once it is open, and its loop with it. What could not
#: be written is written in a later turn.
BUSY_TIMEOUT_MSEC = 100
#: Metrics of one event, characters of one's name, and of an event's kind, at most: ours have some dozen.
MAX_METRICS = 1000
MAX_NAME = 256
#: Rows of a stretch of a metric that are averaged.
MAX_AVERAGED = 250
#: Jobs whose numbers of rows are remembered.
MAX_THINNED = 1000
#: Scores of predictions that a list reads of a job, and rows of each: a worker can report half a million.
MAX_SCORES, MAX_SCORED = 30, 200

_EVALUATION_AT = f"""
    SELECT * FROM (
        SELECT * FROM (SELECT step, value, created_at FROM metrics WHERE job_id = ? AND name = 'eval_loss' AND step >= ?
            ORDER BY step, rowid LIMIT {MAX_WITHOUT}) WHERE value IS NOT NULL LIMIT {MAX_REPEATED})
    ORDER BY created_at, step LIMIT 1"""
_OFFSET = "SELECT offset FROM offsets WHERE job_id = ? AND attempt = ?"
_HAS_EVENT = "SELECT 1 FROM events WHERE job_id = ? AND attempt = ? AND kind = ?"
_LAST_STEP = "SELECT max(step) FROM metrics WHERE job_id = ? AND attempt = ?"
_WRITTEN = "SELECT kind, data FROM events WHERE job_id = ? AND attempt = ? AND kind IN ('checkpoint', 'artifact')"
_EVALUATED = """
    SELECT (SELECT max(step) FROM metrics WHERE job_id = jobs.id AND name = 'eval_loss'), progress
    FROM jobs WHERE id = ?"""
#: The last value of every score of these jobs (a list in JSON): each name is looked for in the index, for its own rows.
_SCORES = f"""
    WITH RECURSIVE scored (job_id, name, num) AS (
        SELECT job.value, (SELECT name FROM metrics WHERE job_id = job.value
            AND name >= 'predictions/' AND name < 'predictions0' ORDER BY name LIMIT 1), 1 FROM json_each(?1) AS job
        UNION ALL
        SELECT job_id, (SELECT metrics.name FROM metrics WHERE metrics.job_id = scored.job_id
            AND metrics.name > scored.name AND metrics.name < 'predictions0' ORDER BY metrics.name LIMIT 1), num + 1
            FROM scored WHERE name IS NOT NULL AND num < {MAX_SCORES}),
    wanted (job_id, name) AS (
        SELECT job_id, name FROM scored WHERE name IS NOT NULL
        UNION SELECT value, 'eval_loss' FROM json_each(?1)
        UNION SELECT value, 'predictions/exact_match' FROM json_each(?1))
    SELECT job_id, name, (SELECT value FROM (
        SELECT attempt, step, value FROM metrics WHERE job_id = wanted.job_id AND name = wanted.name
            ORDER BY step DESC, rowid DESC LIMIT {MAX_SCORED})
        WHERE value IS NOT NULL ORDER BY attempt DESC, step DESC LIMIT 1) FROM wanted"""


def progress_of(data: Mapping[str, Any]) -> Progress:
    """Return the progress in a `step` event, or in a job's row."""
    return {
        "step": _number(data.get("step")),
        "num_steps": _number(data.get("num_steps")),
        "epoch": _number(data.get("epoch")),
        "loss": _number(data.get("loss")),
        "eta_sec": _number(data.get("eta_sec")),
    }


def timestamp(seconds: float) -> str:
    """Format seconds since the epoch as ISO 8601 in UTC, as in all `created_at` columns."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")


class Evaluation(NamedTuple):
    """One evaluation on the held-out rows."""

    step: int
    eval_loss: float
    time: str  #: as in `created_at`


class _Files:
    """The database's files, and whether their names still mean the files that were opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[tuple[int, int] | None] = []

    def note_opened(self) -> None:
        self._opened = self._identities()

    @property
    def are_replaced(self) -> bool:
        return self._identities() != self._opened

    def make_way(self) -> None:
        """Move aside what is there instead of a file, or remove the journal of a database that is gone."""
        if obstacle := self._obstacle:
            self.set_aside(obstacle)
        elif not self._path.exists():
            self.remove_journal()

    def remove(self) -> None:
        """Remove somebody else's file, perhaps without its journal; an obstacle stays."""
        if not self._obstacle:
            self._path.unlink(missing_ok=True)
        self.remove_journal()

    @property
    def _obstacle(self) -> str:
        """What is there instead of a file, or a link to one; empty if nothing is."""
        try:
            mode = self._path.stat().st_mode
        except OSError as error:
            if error.errno not in GONE:
                raise
            return os.strerror(error.errno) if error.errno == errno.ELOOP else ""
        if stat.S_ISREG(mode):
            return ""
        return "a directory, not a file" if stat.S_ISDIR(mode) else "not a regular file"

    def set_aside(self, why: str) -> None:
        aside = self._path.with_name(self._path.name + ".damaged")
        if aside.is_dir() or self._path.is_dir():  # one cannot replace the other
            more = (aside.with_name(f"{aside.name}-{number}") for number in itertools.count(2))
            names = itertools.chain((aside,), more)
            aside = next(name for name in names if not os.path.lexists(name))
        log.error("%s: %s; moved to %s and rebuilt", self._path, why, aside.name, extra=about(message=DATABASE_DAMAGED))
        self.remove_journal()
        self._path.rename(aside)

    def remove_journal(self) -> None:
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _identities(self) -> list[tuple[int, int] | None]:
        """Return the device and inode that the database's file names refer to now."""
        identities: list[tuple[int, int] | None] = []
        for suffix in ("", "-wal"):
            try:
                info = self._path.with_name(self._path.name + suffix).stat()
            except OSError as error:
                if error.errno not in GONE:
                    raise
                identities.append(None)
            else:
                identities.append((info.st_dev, info.st_ino))
        return identities


class Database:
    """One connection. `is_new` is true if there was no database, or a damaged one: its rows must be rebuilt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved: set[int] = set()  #: jobs whose state changed since a caller last read this set
        self.is_new = False
        self.is_behind = False  #: a write failed; see rebuild.catch_up
        self.is_catching_up = False  #: with what is behind or pending, over several turns
        self._thinnings: dict[int, Thinning] = {}
        self.pending: Pending  #: jobs with rows that are made later; set when it is opened
        self.uncounted: set[int] = set()  #: jobs with ended attempts whose events are not all in; see `put_job`
        self._is_damaged = False
        self._files = _Files(path)
        self.wal = Wal(path)
        self._db = self._open_or_begin()

    def _open_or_begin(self) -> sqlite3.Connection:
        self._files.make_way()
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise  # locked, or no room
            self._files.set_aside(str(error))
            return self._open()

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        try:
            _version(db, self.path)  # first: leave a later honed's database unchanged
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            _check(db)
            version = _migrate(db, self.path)
            db.executescript(SCHEMA)
            _make_views(db)
            self.wal.begin(db)
            db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MSEC}")
            self.pending = Pending(db)
        except BaseException:
            db.close()
            raise
        self.is_new = version == 0
        self._is_damaged = False
        self._files.note_opened()
        return db

    @property
    def is_lost(self) -> bool:
        """True if other processes no longer read the file that we write: it was removed, replaced or damaged."""
        return self._is_damaged or self._files.are_replaced

    def renew(self) -> None:
        """Replace a lost database with a new one."""
        old = self._db
        self._thinnings.clear()
        if self._is_damaged:
            self._files.set_aside("damaged while honed was running")
        else:
            log.warning("%s was removed or replaced; rebuilding it", self.path)
            self._files.remove()
        self._db = self._open_or_begin()
        with contextlib.suppress(sqlite3.Error):
            old.close()

    @contextlib.contextmanager
    def made_again(self) -> Iterator[None]:
        """Delete all rows and let the caller rebuild them in one transaction: after a crash it is still new."""
        with self._transaction():
            for table in ("jobs", "metrics", "training_predictions", "events", "offsets"):
                self._db.execute(f"DELETE FROM {table}")
            self.uncounted.clear()
            self._thinnings.clear()
            self.pending = Pending(self._db)
            yield
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.is_new = False

    def sync(self) -> None:
        """Make all writes so far durable; in WAL mode that takes one more commit, with `synchronous = FULL`."""
        with self._noting_damage():
            self._db.execute("PRAGMA synchronous = FULL")
            try:
                self._db.execute("UPDATE offsets SET offset = offset WHERE rowid = (SELECT max(rowid) FROM offsets)")
            finally:
                self._db.execute("PRAGMA synchronous = NORMAL")

    def states(self) -> dict[int, str]:
        """Return the state of every job as the database has it."""
        return dict(self._db.execute("SELECT id, state FROM jobs"))

    def close(self) -> None:
        self.wal.close()
        self._db.close()

    @property
    def is_writable(self) -> bool:
        """True if nobody else holds a lock on the database, and it can be written."""
        try:
            with self._transaction():
                self._db.execute("UPDATE offsets SET offset = offset WHERE rowid = (SELECT max(rowid) FROM offsets)")
        except sqlite3.Error:
            return False
        return True

    def put_job(self, job: Job) -> bool:
        """Write a job's row from its entry; its progress is kept. Returns False if it is left for later: a failed write
        is only logged.

        The row of an `uncounted` job stays as it is: by that the next daemon, too, finds that its events are not in.
        """
        self.moved.add(job.id)
        if job.id in self.uncounted:
            self.is_behind = True
            return False
        with self._logging_faults(f"job {job.id}"):
            self._db.execute(PUT_JOB, _job_row(job))
            return True
        return False

    def put_edits(self, job: Job) -> None:
        """Write the events of a job's edits, of which its entry alone has the times. A failed write is only logged."""
        with self._logging_faults(f"job {job.id}"), self._transaction():
            self._db.execute("DELETE FROM events WHERE job_id = ? AND kind = 'edited'", (job.id,))
            rows = [(job.id, timestamp(when)) for when in job.edited_at]
            self._db.executemany("INSERT INTO events VALUES (?, 0, 'edited', '{}', ?)", rows)

    def put_jobs(self, jobs: Iterable[Listed]) -> None:
        """Write the rows of all jobs, skipping rows that are up to date. A failed write is only logged."""
        with self._logging_faults("the rows of all jobs"):
            known = {row[0]: row for row in self._db.execute("SELECT id, name, state, outcome, priority FROM jobs")}
            changed = (job for job in jobs if known.get(job.id) != _shown(job))
            rows = [_job_row(job) for job in changed if job.id not in self.uncounted]
            self.moved |= {row[0] for row in rows if row[0] not in self.pending}
            with self._transaction():
                self._db.executemany(PUT_JOB, rows)

    @contextlib.contextmanager
    def _logging_faults(self, what: str) -> Iterator[None]:
        """Log a failed write outside of a transaction: the rows are behind from then on."""
        try:
            yield
        except sqlite3.Error as error:
            if self._db.in_transaction:
                raise
            self.is_behind = True
            self._is_damaged = self._is_damaged or _is_corrupt(error)
            log.error("%s: %s: %s", self.path, what, error)  # noqa: TRY400

    def evaluations(self, job_ids: Iterable[int], steps: Sequence[int]) -> dict[int, list[Evaluation]]:
        """Return the first evaluation loss of every job at or after each of these steps, in the order of their time; at
        steps that it has not reached there is none."""
        evaluations: dict[int, list[Evaluation]] = {}
        bounds = [min(step, MAX_INTEGER) for step in steps]  # a group in a job file may be anybody's
        with self._noting_damage():
            for job_id in job_ids:
                rows = [row for step in bounds for row in self._db.execute(_EVALUATION_AT, (job_id, step))]
                evaluations[job_id] = sorted({Evaluation(*row) for row in rows}, key=attrgetter("time", "step"))
        return evaluations

    def evaluated(self, job_id: int) -> tuple[int | None, float | None]:
        """Return the highest step at which a job was evaluated, and the steps that it makes in all, as it reported."""
        with self._noting_damage():
            row = self._db.execute(_EVALUATED, (job_id,)).fetchone()
        return (row[0], progress_of(json.loads(row[1]))["num_steps"]) if row else (None, None)

    def offset(self, job_id: int, attempt: int) -> int:
        """Return how many bytes of an attempt's events have been read."""
        row = self._db.execute(_OFFSET, (job_id, attempt)).fetchone()
        return row[0] if row else 0

    def has_event(self, job: Job, kind: str) -> bool:
        """Return True if the latest attempt has reported an event of this kind."""
        return self._db.execute(_HAS_EVENT, (job.id, job.attempt.number, kind)).fetchone() is not None

    def last_step(self, job: Job) -> int:
        """Return the last step that the latest attempt has reported, 0 if there is none."""
        return self._db.execute(_LAST_STEP, (job.id, job.attempt.number)).fetchone()[0] or 0

    def written_bytes(self, job: Job) -> Written:
        """Return the bytes that the latest attempt has reported as written."""
        rows = self._db.execute(_WRITTEN, (job.id, job.attempt.number))
        return written_bytes((kind, json.loads(data)) for kind, data in rows)

    def apply(self, job: Job, reading: Reading) -> None:
        """Store the events of the latest attempt, each exactly once."""
        attempt, added = job.attempt.number, list[Added]()
        with self._transaction():
            added += _apply_events(self._db, job, attempt, reading.events)
            self._db.execute(
                "INSERT INTO offsets VALUES (?, ?, ?, ?) ON CONFLICT (job_id, attempt)"
                " DO UPDATE SET offset = excluded.offset, num_bad = num_bad + excluded.num_bad",
                (job.id, attempt, reading.offset, reading.num_bad),
            )
        if any(event.kind in {"resumed", "started_over"} for event in reading.events):
            self._thinnings.pop(job.id, None)  # rows were removed
        # After the commit: rows that it could not write, as on a full disk, are not there.
        thinning = self._thinnings[job.id] = self._thinnings.pop(job.id, Thinning(job.id))
        thinning.note(self._db, Added(*map(sum, zip(*added, strict=True))) if added else Added())
        if len(self._thinnings) > MAX_THINNED:
            del self._thinnings[next(iter(self._thinnings))]

    def thin(self, job: Job, *, until: float = math.inf) -> bool:
        """Remove rows of a job that has too many, until a time of the monotonic clock. Returns False if some are left:
        then none are to be added before the next call."""
        if (thinning := self._thinnings.get(job.id)) is None:
            return True
        with self._noting_damage():
            return thinning.tend(self._db, job.attempt.number, until=until)

    def job_ids(self) -> set[int]:
        """Return the numbers of the jobs that have a row."""
        return {number for (number,) in self._db.execute("SELECT id FROM jobs")}

    def forget(self, job_id: int, *, max_rows: int) -> bool:
        """Delete up to `max_rows` of a job's rows per table, that in `jobs` last. Returns True once none is left."""
        for table in ("metrics", "training_predictions", "events", "offsets"):
            rows = f"SELECT rowid FROM {table} WHERE job_id = ? LIMIT ?"
            deleted = self._db.execute(f"DELETE FROM {table} WHERE rowid IN ({rows})", (job_id, max_rows))
            if deleted.rowcount >= max_rows:
                return False
        self._db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
        return True

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run in a transaction: the current one or a new one."""
        if self._db.in_transaction:
            yield
            return
        with self._noting_damage():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls back by itself if the disk is full
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._is_damaged = self._is_damaged or _is_corrupt(error)
            raise


def _apply_events(db: sqlite3.Connection, job: Job, attempt: int, events: Sequence[Event]) -> list[Added]:
    """Store these events, and the job's progress. Returns what each has added."""
    added = [_apply_event(db, job, attempt, event) for event in events]
    if num := sum(map(num_left_out, events)):
        count_gone(db, job.id, attempt, "names", num)
    if (last := next((item for item in reversed(events) if item.kind == "step"), None)) is not None:
        db.execute("UPDATE jobs SET progress = ? WHERE id = ?", (json.dumps(progress_of(last.data)), job.id))
    return added


def _apply_event(db: sqlite3.Connection, job: Job, attempt: int, event: Event) -> Added:
    """Store one event. Returns what it has added."""
    data, when = event.data, timestamp(event.time)
    step, epoch = place(event)
    rows = [(job.id, attempt, step, epoch, name, value, when) for name, value in figures(event).items()]
    db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    match event.kind:
        case "step" | "evaluation":
            return Added(len(rows))
        case "predictions":
            answered = answers(event)
            db.executemany(
                "INSERT OR REPLACE INTO training_predictions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(job.id, str(job.uid), epoch, step, *answer.values(), when) for answer in answered],
            )
            texts = (text for item in answered for text in (item["prompt"], item["ground_truth"], item["prediction"]))
            num_bytes = ROW_BYTES * len(answered) + sum(len(text.encode()) for text in texts if text is not None)
            return Added(len(rows), num_bytes)
        case _:
            if event.kind in {"resumed", "started_over"}:
                # Predictions after this step are written again; those that do not come again are not part of this
                # run.
                db.execute(
                    "DELETE FROM training_predictions WHERE job_id = ? AND step > ?",
                    (job.id, step if event.kind == "resumed" else -1),
                )
            text = json.dumps(data, ensure_ascii=False)
            sql = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
            db.execute(sql, (job.id, attempt, event.kind[:MAX_NAME], text, when))
            return Added(len(rows), 0, 1, len(text.encode()))


def _score(metrics: Mapping[str, float]) -> Score:
    """Return the metric that says most about a model: the exact match of its answers, unless it is always 0."""
    # The share of answers that could be read is no score.
    scores = {name: value for name, value in metrics.items() if not name.endswith("_parsable")} or metrics
    named = sorted(scores, key=lambda name: (not scores[name], name == "eval_loss", name != "exact_match", name))
    return {"name": named[0], "value": scores[named[0]]}


def _shown(job: Listed) -> tuple[Any, ...]:
    """Return the columns of a job's row that can change, after its number."""
    return (job.id, job.name, job.state.value, job.outcome, job.priority)


def _job_row(job: Listed) -> tuple[Any, ...]:
    return (*_shown(job), timestamp(job.submitted_at))


def _check(db: sqlite3.Connection) -> None:
    if (word := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(word)


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a short-lived read-only connection, even if the directory is read-only and no daemon is running.

    The first reader of a WAL database creates two files beside it. If it may not, and the last writer removed them, the
    database's own file is complete and is opened as immutable.
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


def is_locked(error: BaseException) -> bool:
    """Return True if another program holds a lock on the database."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _is_damage(error: sqlite3.Error) -> bool:
    """Tell whether opening failed because of the file itself: it is no database, or not one of ours (SQLITE_ERROR)."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF == sqlite3.SQLITE_ERROR or _is_corrupt(error)


def _migrate(db: sqlite3.Connection, path: Path) -> int:
    """Migrate the tables to our version; return it, or 0 for a new database."""
    version = _version(db, path)
    while 0 < version < SCHEMA_VERSION:
        # One transaction per step: after a crash the migration continues from there.
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[version]}; PRAGMA user_version = {version + 1}; COMMIT;")
        log.info("%s: migrated from version %d to %d", path, version, version + 1)
        version += 1
    return version


def _make_views(db: sqlite3.Connection) -> None:
    """Create missing views, and recreate those that differ from this version's definition."""
    stored = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'view'"))
    for made in views.VIEWS:
        if stored.get(made.name) != made.sql.replace("IF NOT EXISTS ", "").rstrip(";"):
            db.executescript(f"BEGIN IMMEDIATE; DROP VIEW IF EXISTS {made.name}; {made.sql} COMMIT;")


def _version(db: sqlite3.Connection, path: Path) -> int:
    """Return `user_version`. Raises EnvironmentInvalidError if a later honed wrote it."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise EnvironmentInvalidError(
            f"{path} was written by a later honed: it has version {version}, and this honed supports version "
            f"{SCHEMA_VERSION}",
            hint="install the later honed again; or move the file away, and honed rebuilds it from the jobs' files",
        )
    return version


class Reader:
    """Reader of a database that a daemon may be writing; where there is no such file, it reads as empty."""

    def __init__(self, path: Path) -> None:
        self._db = connect_read_only(path) if path.is_file() else None  # a named pipe would hold us up for ever
        with contextlib.suppress(sqlite3.DatabaseError):  # damaged or just being created: reads as empty
            if self._db is not None:
                _version(self._db, path)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def progress(self, job_ids: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of those of these jobs that have any. Pass at most a few hundred jobs."""
        some = ", ".join("?" * len(job_ids))
        sql = f"SELECT id, progress FROM jobs WHERE id IN ({some}) AND progress <> '{{}}'"
        return {number: progress_of(json.loads(text)) for number, text in self._rows(sql, *job_ids)}

    def overview(self, num_jobs: int, queue: Sequence[int] = ()) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return the first `num_jobs` jobs per group in list order, and the number of jobs per state. `queue`:
        the first queued jobs in their order; the others follow by priority and number."""
        numbers = ", ".join(map(str, queue))
        place = {number: place for place, number in enumerate(queue)}
        known = self._listed(f"state = 'queued' AND id IN ({numbers})", "id", num_jobs)
        known.sort(key=lambda row: place[row["id"]])
        num_left = max(0, num_jobs - len(known))
        listed = [
            *self._listed("state = 'running'", "-priority, id", num_jobs),
            *known,
            *self._listed(f"state = 'queued' AND id NOT IN ({numbers})", "-priority, id", num_left),
            *self._listed("state = 'held'", "-priority, id", num_jobs),
            *self._listed("state NOT IN ('running', 'queued', 'held')", "-id", num_jobs),
        ]
        return listed, dict(self._rows("SELECT state, count(*) FROM jobs GROUP BY state"))

    def _listed(self, condition: str, order: str, num_jobs: int) -> list[dict[str, Any]]:
        keys = ("id", "name", "state", "outcome", "priority", "submitted_at")
        sql = f"SELECT {', '.join(keys)}, progress FROM jobs WHERE {condition} ORDER BY {order} LIMIT ?"
        rows = self._rows(sql, num_jobs)
        listed = [{**dict(zip(keys, row[:-1], strict=True)), "progress": json.loads(row[-1])} for row in rows]
        for row in listed:
            if row["state"] != State.RUNNING:
                row["progress"].pop("eta_sec", None)
        return listed

    def scores(self, job_ids: Sequence[int]) -> dict[int, Score]:
        """Return the score of those of these jobs that have one, of the last attempt among the rows of their highest
        steps. Pass at most a few hundred jobs."""
        scores: dict[int, dict[str, float]] = {}
        for number, name, value in self._rows(_SCORES, json.dumps(job_ids)):
            if value is not None:
                scores.setdefault(number, {})[name.removeprefix("predictions/")] = value
        return {number: _score(item) for number, item in scores.items()}

    def course(self, job_id: int, name: str, *, num_points: int = 40) -> list[float]:
        """Return one metric over the steps, averaged to at most `num_points` values: each is the mean of the first
        MAX_AVERAGED rows of a stretch of steps."""
        last = "SELECT step FROM metrics WHERE job_id = ? AND name = ? ORDER BY step DESC LIMIT 1"
        num_steps = next((step + 1 for (step,) in self._rows(last, job_id, name)), 0)
        if num_steps < 1:
            return []
        sql = f"""
            WITH RECURSIVE stretch (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM stretch WHERE n + 1 < ?3)
            SELECT (SELECT avg(value) FROM (
                SELECT value FROM metrics WHERE job_id = ?1 AND name = ?2 AND value IS NOT NULL
                    AND step >= (n * ?4 + ?3 - 1) / ?3 AND step < ((n + 1) * ?4 + ?3 - 1) / ?3
                ORDER BY step LIMIT {MAX_AVERAGED})) FROM stretch"""
        rows = self._rows(sql, job_id, name, min(num_points, num_steps), num_steps)
        return [value for (value,) in rows if value is not None and math.isfinite(value)]  # the sum may be too large

    def stage(self, job_id: int) -> str | None:
        """Return the last reported stage."""
        sql = "SELECT data FROM events WHERE job_id = ? AND kind = 'stage' ORDER BY rowid DESC LIMIT 1"
        return next((str(json.loads(data).get("stage")) for (data,) in self._rows(sql, job_id)), None)

    def last_predictions(self, job_id: int, *, count: int = 3, max_chars: int = 2000) -> list[LastPrediction]:
        """Return the first few rows of the last step that has predictions, with every text truncated."""
        keys = ("step", "sample_index", "ground_truth", "prediction")
        sql = (
            "SELECT step, sample_index, substr(ground_truth, 1, ?2), substr(prediction, 1, ?2)"
            " FROM training_predictions WHERE job_id = ?1 AND step = (SELECT max(step) FROM training_predictions"
            " WHERE job_id = ?1) ORDER BY sample_index LIMIT ?3"
        )
        rows = self._rows(sql, job_id, max_chars, count)
        return cast("list[LastPrediction]", [dict(zip(keys, row, strict=True)) for row in rows])

    def page(self, sql: str, *arguments: Any, max_chars: float = math.inf) -> list[Any]:
        """Return the rows of a query, up to the one with which their texts have so many characters. Raises
        sqlite3.Error, where other readings find nothing: an answer of several pages is whole, or an error."""
        if self._db is None:
            return []
        page, num_chars = list[Any](), 0
        try:
            for row in self._db.execute(sql, arguments):
                page.append(row)
                num_chars += sum(len(item) for item in row if isinstance(item, str)) if max_chars < math.inf else 0
                if num_chars >= max_chars:
                    break
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_ERROR:  # that is: there is no such table yet
                raise
        return page

    def _rows(self, sql: str, *arguments: Any) -> list[Any]:
        if self._db is None:
            return []
        try:
            return self._db.execute(sql, arguments).fetchall()
        except sqlite3.OperationalError:  # the database was just created and has no tables yet
            return []


def place(event: Event) -> tuple[int, float | None]:
    """Return the step and the epoch of an event."""
    return _integer(event.data.get("step")), _number(event.data.get("epoch"))


def figures(event: Event) -> dict[str, float]:
    """Return the metrics in an event; empty for most kinds."""
    few = itertools.islice(_values(event).items(), MAX_METRICS)
    numbers = {name: _number(value) for name, value in few if len(name) <= MAX_NAME}
    return {name: number for name, number in numbers.items() if number is not None}


def num_left_out(event: Event) -> int:
    """Return how many of an event's metrics are not taken: those beyond MAX_METRICS, and those with long names."""
    values = _values(event)
    return max(0, len(values) - MAX_METRICS) + sum(
        len(name) > MAX_NAME for name in itertools.islice(values, MAX_METRICS)
    )


def _values(event: Event) -> Mapping[str, Any]:
    """Return an event's metrics as its worker reported them."""
    metrics, scores = event.data.get("metrics"), event.data.get("scores")
    match event.kind:
        case "step":
            return step_metrics(event.data)
        case "evaluation" if isinstance(metrics, dict):
            return metrics
        case "predictions" | "guard" if isinstance(scores, dict):
            return {f"{event.kind}/{name}": value for name, value in scores.items()}
        case _:
            return {}


def answers(event: Event) -> list[Answer]:
    """Return the predictions in an event, with their keys in the order of `Answer`."""
    rows = event.data.get("rows") if event.kind == "predictions" else None
    return [
        {
            "sample_index": _integer(row.get("sample_index")),
            "prompt": _text(row.get("prompt")),
            "ground_truth": _text(row.get("ground_truth")),
            "prediction": _text(row.get("prediction")),
        }
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def _number(value: Any) -> float | None:
    """Return a number that SQLite can store (finite; integers within 64 bits), else None."""
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
    """Return an integer; 0 if the value is not a usable number."""
    number = _number(value)
    return int(number) if number is not None and abs(number) < 2**62 else 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value).encode(errors="replace").decode()
