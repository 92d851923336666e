"""The data that honed-web reads: the spool's entries, pages of database rows, and whether honed is up. It writes
nothing.

Spool      entries, read again only if its file has changed
query      the formats of `--json`, and the rights to read jobs
pages      a limited number of metrics or predictions: a cursor is a position in the order of an index, so that the last
           page costs as much as the first
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from honed.job import keyset, query
from honed.job.database import connect_read_only, progress_of
from honed.job.job import Job, State
from honed.job.query import Asker
from honed.job.shape import Progress, Row, Shown, Status, Telemetry, Wait
from honed.job.spool import Spool, read_entry
from honed.system.client import Client
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, UsageError
from honed.system.layout import Layout

T = TypeVar("T")

#: Bytes of text on one page of predictions; a larger row is a page of its own.
MAX_PAGE_BYTES = 1024 * 1024
#: Seconds for which a list of jobs is kept, and at least that multiple of the time it took to make: with ten thousand
#: jobs and many watchers, lists take a tenth of one core.
LIST_SEC = 1.0
REST = 10
#: Lists that are kept, one per asker.
MAX_LISTS = 32
#: Seconds that honed has for an answer.
CONTROL_SEC = 3.0
#: Queued jobs whose reasons for waiting are asked of honed, first ones first: ten thousand would keep it busy.
MAX_REASONS = 500


class Entries(Spool):
    """The spool of another user's instance, for frequent reads: an unchanged entry is not read again. Raises
    EnvironmentInvalidError if there is no spool, and never creates one."""

    def __init__(self, layout: Layout) -> None:
        expected = [layout.jobs_dir, *(layout.spool_dir / name for name in ("incoming", "claimed", "rejected", *State))]
        if missing := [path for path in expected if not path.is_dir()]:
            raise EnvironmentInvalidError(
                f"{missing[0]}: no such directory, or no permission to open it",
                hint="has honed ever run on this machine?",
            )
        super().__init__(layout, lock=False)
        self._known: dict[Path, tuple[tuple[int, int, int], Job | None]] = {}
        self._listed = Kept(self._list)

    def all_jobs(self) -> dict[int, Job]:
        """Return all jobs, as Spool does, up to a moment old."""
        return self._listed.get()

    def _list(self) -> dict[int, Job]:
        known: dict[Path, tuple[tuple[int, int, int], Job | None]] = {}
        for _ in range(2):  # as in Spool: an entry may move meanwhile into a directory already listed
            for state in State:
                for path, stamp in _stamped(self.state_dir(state)):
                    before = self._known.get(path)
                    if before is None or before[0] != stamp:
                        before = stamp, read_entry(path, state)
                    known[path] = before
        self._known = known
        jobs: dict[int, Job] = {}
        for _, job in known.values():
            if job is not None and (job.id not in jobs or job.revision > jobs[job.id].revision):
                jobs[job.id] = job
        return dict(sorted(jobs.items()))


class Kept(Generic[T]):
    """A value that all threads share, made anew by the first that asks after LIST_SEC or longer."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._until = 0.0
        self._lock = threading.Lock()

    def get(self) -> T:
        with self._lock:
            if (began := time.monotonic()) >= self._until:
                self._value = self._make()
                now = time.monotonic()
                self._until = now + max(LIST_SEC, REST * (now - began))
            return self._value


def _stamped(directory: Path) -> Iterator[tuple[Path, tuple[int, int, int]]]:
    """Yield the entries of a directory, with a stamp that changes when it is rewritten."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and entry.name.removesuffix(".json").isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    yield Path(entry.path), (info.st_ino, info.st_mtime_ns, info.st_size)


class NoSuchJobError(UsageError):
    """There is no job of that number."""


@dataclass(frozen=True)
class Page:
    """A page of rows, and the cursor of the next page; None on the last."""

    rows: Sequence[Mapping[str, object]]
    next: str | None


class StateRow(Row):
    """The changing data of a job."""

    attempt: int | None
    stage: str | None
    eval_loss: float | None
    predicted_step: int | None


class RunningRow(Progress):
    """The progress of a running job, with its training tokens."""

    num_tokens: int | None
    num_trained: float | None


class DaemonHealth(BaseModel, extra="forbid"):
    """The health of the honed daemon."""

    is_up: bool
    version: str | None
    is_paused: bool | None
    detail: str | None


class DatabaseHealth(BaseModel, extra="forbid"):
    """The health of honed.db."""

    is_open: bool
    num_jobs: int | None
    detail: str | None


class Health(BaseModel, extra="forbid"):
    """The overall health: ok with status 200, failing with 503."""

    status: str
    honed: DaemonHealth
    database: DatabaseHealth


class Source:
    """One instance, as seen by honed-web."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._entries: Entries | None = None
        self._opening = threading.Lock()
        self._lists: dict[Asker, Kept[list[Row]]] = {}
        self._listing = threading.Lock()
        self._reasons = Kept(self._ask)

    @property
    def entries(self) -> Entries:
        """The spool's entries. Raises EnvironmentInvalidError if there is no spool yet."""
        with self._opening:
            if self._entries is None:
                self._entries = Entries(self.layout)
            return self._entries

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def rows(self, asker: Asker) -> list[Row]:
        """Return the rows of `honectl list --json`, in its order; others' jobs with the few columns that everybody may
        see.

        The list is up to a moment old and must not be changed: all askers share it.
        """
        with self._listing:
            while asker not in self._lists and len(self._lists) >= MAX_LISTS:
                del self._lists[next(iter(self._lists))]
            return self._lists.setdefault(asker, Kept(partial(self._list, asker))).get()

    def _list(self, asker: Asker) -> list[Row]:
        rows = query.list_jobs(self.entries, self.layout, "", asker)
        for row in rows:
            self._explain(row, asker)
        return self._in_order(rows)

    def _in_order(self, rows: list[Row]) -> list[Row]:
        """Return the rows with the queue in honed's order, as far as it was asked for; the files do not have it."""
        positions = {number: position for position, number in enumerate(self._reasons.get() or ())}
        queued = [row for row in rows if row["state"] == State.QUEUED]
        queued.sort(key=lambda row: positions.get(row["id"], len(positions)))
        following = iter(queued)
        return [next(following) if row["state"] == State.QUEUED else row for row in rows]

    def jobs(self, asker: Asker, *, state: str | None, limit: int, cursor: str | None) -> Page:
        """Return a page of jobs, newest first."""
        before = _position(cursor, int)[0] if cursor else None
        jobs = sorted(
            (
                row
                for row in self.rows(asker)
                if (state is None or row["state"] == state) and (before is None or row["id"] < before)
            ),
            key=lambda row: -row["id"],
        )
        return Page(jobs[:limit], _cursor(jobs[limit - 1]["id"]) if len(jobs) > limit else None)

    def _explain(self, row: Row, asker: Asker) -> None:
        """Add to a row why its job waits: while honed is up, the files do not have that for queued jobs."""
        if row["state"] != State.QUEUED or (reasons := self._reasons.get()) is None:
            return
        why = reasons.get(row["id"])
        is_theirs = asker.reads_all or row["uid"] == asker.uid
        row["waiting_for"] = why if why is None or is_theirs else {**why, "detail": ""}

    def _ask(self) -> dict[int, Wait] | None:
        """Return the reasons of the queue's first jobs; None if honed does not answer."""
        try:
            rows: list[Row] = Client(self.layout.control_path, timeout_sec=CONTROL_SEC).ask(
                "list", states=[State.QUEUED.value], limit=MAX_REASONS
            )
            # The detail of a retry counts seconds: every change would be an event for all watchers.
            return {
                row["id"]: {**why, "detail": ""} if why["reason"] == "retry" else why
                for row in rows
                if (why := row["waiting_for"]) is not None
            }
        except (HonedError, ValueError, TypeError, KeyError):
            return None

    def job(self, job_id: int, asker: Asker) -> Job:
        """Return a job. Raises UsageError if there is none, and NotPermittedError for another user's."""
        job = self.entries.job(job_id)
        if job is None and (pruned := self.entries.pruned.get(job_id)) is not None and asker.may_read(pruned):
            raise NoSuchJobError(
                f"job {job_id} ({pruned.name}) {query.words_of_pruned(pruned)}",
                hint="GET /api/jobs lists the existing jobs",
            )
        if job is None:
            raise NoSuchJobError(f"no job {job_id}", hint="GET /api/jobs lists all jobs")
        if not asker.may_read(job):
            raise NotPermittedError(
                f"job {job_id} is not readable for everybody",
                hint="see policy.share_results, or use the token of honed-web",
            )
        return job

    def show(self, job_id: int, asker: Asker) -> Shown:
        """Return a job's details in the format of `honectl show --json`."""
        shown = query.show(self.entries, self.layout, str(self.job(job_id, asker).id), asker)
        self._explain(shown, asker)
        return shown

    # -- events of a job -----------------------------------------------------------------------------------------------

    def metrics(self, job_id: int, asker: Asker, *, name: str | None, limit: int, cursor: str | None) -> Page:
        """Return a page of logged metrics, ordered by name and step; repeated steps included."""
        self.job(job_id, asker)
        keys = ("attempt", "step", "epoch", "name", "value", "created_at")
        columns = f"rowid, {', '.join(keys)}"
        begin, *position = _position(cursor, str, int, int) if cursor is not None else (name or "", *keyset.FIRST)
        others = f"SELECT {columns} FROM metrics WHERE job_id = ? AND name > ? ORDER BY name, step, rowid LIMIT ?"
        with self.database() as db:
            rows = (
                db.execute(keyset.after(columns), (job_id, name or begin, *position, limit + 1)).fetchall()
                if db
                else []
            )
            if db and name is None and len(rows) <= limit:
                rows += db.execute(others, (job_id, begin, limit + 1 - len(rows))).fetchall()
        metrics = [dict(zip(keys, row[1:], strict=True)) for row in rows[:limit]]
        last = rows[limit - 1] if len(rows) > limit else None
        return Page(metrics, _cursor(last[4], last[2], last[0]) if last else None)

    def predictions(
        self, job_id: int, asker: Asker, *, step: int | None, sample_index: int | None, limit: int, cursor: str | None
    ) -> Page:
        """Return a page of predictions on held-out examples, by step; it ends early if its texts are long."""
        self.job(job_id, asker)
        keys = ("epoch", "step", "sample_index", "prompt", "ground_truth", "prediction", "created_at")
        where: list[str] = ["job_id = ?"]
        arguments: list[Any] = [job_id]
        for key, value in (("step", step), ("sample_index", sample_index)):
            if value is not None:
                where.append(f"{key} = ?")
                arguments.append(value)
        if cursor is not None:
            where.append("(step, sample_index) > (?, ?)")
            arguments += _position(cursor, int, int)
        sql = (
            f"SELECT {', '.join(keys)} FROM training_predictions WHERE {' AND '.join(where)}"
            " ORDER BY step, sample_index LIMIT ?"
        )
        predictions: list[dict[str, Any]] = []
        num_bytes = 0
        with self.database() as db:
            for row in db.execute(sql, (*arguments, limit + 1)) if db else ():
                num_bytes += sum(len(item) for item in row if isinstance(item, str))
                if predictions and (len(predictions) == limit or num_bytes > MAX_PAGE_BYTES):
                    return Page(predictions, _cursor(predictions[-1]["step"], predictions[-1]["sample_index"]))
                predictions.append(dict(zip(keys, row, strict=True)))
        return Page(predictions, None)

    def state(self, job_id: int, asker: Asker) -> StateRow:
        """Return the changing data of a job: its row, its stage, its last eval_loss, and the last step with
        predictions."""
        job = self.job(job_id, asker)
        with self.database() as db:
            progress, stage = _progress(db, job_id), _last_event(db, job_id, "stage")
            predicted = _one(db, "SELECT max(step) FROM training_predictions WHERE job_id = ?", job_id)
            eval_loss = _last_metric(db, job_id, "eval_loss")
        row = query.summary(job, progress)
        self._explain(row, asker)
        return {
            **row,
            "attempt": job.attempt.number if job.attempts else None,
            "stage": stage.get("stage"),
            "eval_loss": eval_loss,
            "predicted_step": predicted,
        }

    # -- the machine --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def database(self) -> Iterator[sqlite3.Connection | None]:
        """Yield a connection for one thread and one answer; None if there is no database yet.

        Raises EnvironmentInvalidError if it cannot be read.
        """
        path = self.layout.database_path
        if not path.is_file():  # a named pipe would hold us up for ever
            yield None
            return
        try:
            with contextlib.closing(connect_read_only(path)) as db:
                yield db
        except sqlite3.Error as error:
            raise EnvironmentInvalidError(f"{path}: {error}", hint="see honed's journal and honectl doctor") from error

    def health(self) -> Health:
        """Return whether honed answers on its socket, and whether its database can be read."""
        try:
            status: Status = Client(self.layout.control_path, timeout_sec=CONTROL_SEC).ask("status")
            daemon = DaemonHealth(
                is_up=True, version=status.get("version"), is_paused=status.get("is_paused"), detail=None
            )
        except (HonedError, ValueError) as error:
            daemon = DaemonHealth(is_up=False, version=None, is_paused=None, detail=str(error))
        try:
            with self.database() as db:
                num_jobs = _one(db, "SELECT count(*) FROM jobs")
            why = None if db is not None else "it does not exist yet"
            database = DatabaseHealth(is_open=db is not None, num_jobs=num_jobs, detail=why)
        except HonedError as error:
            database = DatabaseHealth(is_open=False, num_jobs=None, detail=error.message)
        is_well = daemon.is_up and database.is_open
        return Health(status="ok" if is_well else "failing", honed=daemon, database=database)

    def telemetry(self) -> Telemetry | None:
        """Return what honed tells of itself and of the GPUs; None if it does not answer."""
        try:
            telemetry: Telemetry = Client(self.layout.control_path, timeout_sec=CONTROL_SEC).ask("metrics")
        except (HonedError, ValueError):
            return None
        return telemetry

    def waiting(self) -> dict[str, int]:
        """Return how many of the queue's first jobs wait, by reason; empty if honed does not answer."""
        return Counter(why["reason"] for why in (self._reasons.get() or {}).values())

    def running(self, job_ids: list[int]) -> dict[int, RunningRow]:
        """Return the progress of these jobs, with its number of training tokens, and the number trained on at
        its last evaluation; None where the job has not reported them."""
        running: dict[int, RunningRow] = {}
        with self.database() as db:
            for job_id in job_ids if db else ():
                running[job_id] = {
                    **_progress(db, job_id),
                    "num_tokens": _last_event(db, job_id, "data").get("num_tokens"),
                    "num_trained": _last_metric(db, job_id, "eval_num_tokens"),
                }
        return running


def _one(db: sqlite3.Connection | None, sql: str, *arguments: Any) -> Any:
    row = db.execute(sql, arguments).fetchone() if db else None
    return row[0] if row else None


def _progress(db: sqlite3.Connection | None, job_id: int) -> Progress:
    return progress_of(json.loads(_one(db, "SELECT progress FROM jobs WHERE id = ?", job_id) or "{}"))


def _last_event(db: sqlite3.Connection | None, job_id: int, kind: str) -> dict[str, Any]:
    sql = "SELECT data FROM events WHERE job_id = ? AND kind = ? ORDER BY rowid DESC LIMIT 1"
    event: dict[str, Any] = json.loads(_one(db, sql, job_id, kind) or "{}")
    return event


def _last_metric(db: sqlite3.Connection | None, job_id: int, name: str) -> float | None:
    sql = "SELECT value FROM metrics WHERE job_id = ? AND name = ? ORDER BY step DESC, rowid DESC LIMIT 1"
    value: float | None = _one(db, sql, job_id, name)
    return value


def _cursor(*position: str | int) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def _position(cursor: str, *kinds: type) -> list[Any]:
    """Decode a cursor. Raises UsageError for one that `_cursor` has not made."""
    try:
        position = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
        is_ours = isinstance(position, list) and [type(item) for item in position] == list(kinds)
        is_ours = is_ours and all(abs(item) < 2**63 for item in position if isinstance(item, int))
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise UsageError("cursor: not a valid value", hint="follow the URL in `next`")
    return list(position)
