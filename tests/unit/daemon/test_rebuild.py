"""honed.db, made again from the entries and the events."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.rebuild import begin, fill, rebuild, tend
from honed.job.database import Database
from honed.job.event import Event, Reading
from honed.job.job import Attempt, Fallback, Job, State
from honed.job.spool import Spool
from honed.system.failures import Failures
from honed.system.layout import Layout
from waiting import wait_for


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    yield made
    made.close()


def put(spool: Spool, number: int, *, fallback: Fallback | None = None) -> Job:
    """Put an ended job with two attempts into the spool."""
    attempts = (
        Attempt(1, "transformers", 10.0, num_starts=2, ended_at=20.0, outcome="killed", fallback=fallback),
        Attempt(2, "transformers", 30.0, ended_at=40.0, outcome="succeeded"),
    )
    job = Job(number, f"n{number}", 1.0, "n.yaml", 0, "/o", attempts=attempts, state=State.SUCCEEDED)
    spool.entries.path(number, State.SUCCEEDED).write_bytes(job.to_json())
    return job


def test_each_job_has_its_row_and_its_events_whether_its_directory_is_there_or_not(spool: Spool) -> None:
    put(spool, 1)
    put(spool, 2, fallback=Fallback(15.0, "no kernel"))
    put(spool, 3)
    for attempt in (1, 2):
        path = spool.layout.job(3).attempt(attempt).events_path
        path.parent.mkdir(parents=True)
        steps = [{"event": "step", "time": 11.0, "step": step, "num_steps": 9, "loss": 1.0} for step in (1, 2)]
        path.write_text("".join(json.dumps(each) + "\n" for each in steps))
    spool.recover()
    spool.layout.database_path.parent.mkdir(parents=True, exist_ok=True)
    database = Database(spool.layout.database_path)
    database.uncounted.add(3)  # of a database that was removed while honed ran
    rebuild(database, spool, spool.layout)
    assert database.states() == dict.fromkeys((1, 2, 3), "succeeded")
    assert [database.offset(3, attempt) > 0 for attempt in (1, 2)] == [True, True]
    assert not database.pending
    first = {job.id: replace(job, attempts=job.attempts[:1]) for job in spool.entries.all().values()}
    assert [number for number, job in first.items() if database.has_event(job, "fallback")] == [2]
    assert database.evaluated(3)[1] == 9
    database.close()


def tell(spool: Spool, number: int, attempt: int, *kinds: str) -> None:
    """Write an attempt's events: a step each second, or events of these kinds."""
    path = spool.layout.job(number).attempt(attempt).events_path
    path.parent.mkdir(parents=True)
    events = [{"event": kind, "time": 11.0 + at, "step": at, "num_steps": 9} for at, kind in enumerate(kinds)]
    path.write_text("".join(json.dumps(each) + "\n" for each in events))


def opened(spool: Spool) -> Database:
    spool.layout.database_path.parent.mkdir(parents=True, exist_ok=True)
    return Database(spool.layout.database_path)


def test_what_is_not_made_in_time_is_made_later_also_by_the_next_daemon(spool: Spool) -> None:
    for number in (1, 2, 3):
        put(spool, number)
        tell(spool, number, 1, "step", "step")
    put(spool, 4)  # has no files
    spool.recover()
    database = opened(spool)
    rebuild(database, spool, spool.layout, is_late=lambda: True)
    assert not database.is_new
    assert database.states() == dict.fromkeys((1, 2, 3, 4), "succeeded")  # what the entries say is there at once
    assert 4 not in database.pending
    assert [number for number in (1, 2, 3) if number in database.pending] == [1, 2, 3]
    assert database.moved == {4}  # the pages of the others are not made without their figures
    fill(database, spool, spool.layout, is_late=lambda: True)
    assert [database.evaluated(number)[1] for number in (1, 2, 3)] == [None, None, 9]
    assert database.moved == {3, 4}
    database.close()
    database = opened(spool)
    assert len(database.pending) == 2
    spool.prune(*[job for job in spool.all_jobs().values() if job.id == 2])
    while database.pending:
        tend(database, spool, dict)
    assert [database.evaluated(number)[1] for number in (1, 2, 3)] == [9, None, 9]
    database.close()
    database = opened(spool)
    assert not database.pending
    database.close()


def test_a_job_that_runs_again_before_its_rows_are_made_has_each_event_once(spool: Spool) -> None:
    job = put(spool, 1)
    tell(spool, 1, 1, "step", "log")
    tell(spool, 1, 2, "step", "log")
    tell(spool, 1, 3, "step", "log")
    spool.recover()
    database = opened(spool)
    rebuild(database, spool, spool.layout, is_late=lambda: True)
    database.pending.add([1])
    queued = spool.move(job, State.QUEUED)
    attempts = (*queued.attempts, Attempt(3, "transformers", 50.0))
    spool.move(queued, State.RUNNING, attempts=attempts)
    fill(database, spool, spool.layout)
    assert not database.pending
    assert [database.offset(1, attempt) > 0 for attempt in (1, 2, 3)] == [True, True, False]  # it is followed
    rows = sqlite3.connect(database.path).execute("SELECT attempt FROM events WHERE kind = 'log'").fetchall()
    assert rows == [(1,), (2,)]
    database.close()


def test_a_fallback_stands_between_its_two_workers_whenever_the_rows_are_made(spool: Spool) -> None:
    put(spool, 1, fallback=Fallback(15.0, "no kernel"))
    tell(spool, 1, 1, "started", "log", "started", "log")
    put(spool, 2)
    tell(spool, 2, 1, "step")
    spool.recover()
    database = opened(spool)
    rebuild(database, spool, spool.layout, is_late=lambda: True)
    assert 1 in database.pending
    fill(database, spool, spool.layout)
    rows = sqlite3.connect(database.path).execute("SELECT kind FROM events WHERE job_id = 1 ORDER BY rowid")
    assert [kind for (kind,) in rows] == ["started", "log", "fallback", "started", "log"]
    database.close()


def test_a_start_makes_the_rows_of_jobs_that_the_database_does_not_know(spool: Spool) -> None:
    """As those of an older copy of honed.db: with their progress, which is a part of the row."""
    database = opened(spool)
    with database.made_again():
        pass
    for number in (1, 2):
        put(spool, number)
        tell(spool, number, 1, "step")
    spool.recover()
    begin(database, spool, outbox=None, failures=Failures(logging.getLogger("test")), alive=lambda: None)
    while database.pending:
        tend(database, spool, dict)
    assert database.states() == {1: "succeeded", 2: "succeeded"}
    assert [database.evaluated(number)[1] for number in (1, 2)] == [9, 9]
    assert not database.is_behind
    database.close()


def test_a_flood_of_last_events_does_not_keep_honed_from_starting(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("honed.daemon.rebuild.START_SEC", 0.0)
    database = opened(spool)
    with database.made_again():
        pass
    job = put(spool, 1)
    tell(spool, 1, 1, *["step"] * 5000)
    spool.recover()
    database.put_job(replace(job, state=State.RUNNING))
    begin(database, spool, outbox=None, failures=Failures(logging.getLogger("test")), alive=lambda: None)
    assert database.is_catching_up
    database.put_job(job)  # as another step does
    assert database.states() == {1: "running"}
    while database.is_behind:
        tend(database, spool, dict)
    assert database.states() == {1: "succeeded"}
    assert database.offset(1, 1) == spool.layout.job(1).attempt(1).events_path.stat().st_size
    database.close()


def test_a_job_whose_events_cannot_be_counted_holds_up_no_other(spool: Spool) -> None:
    for number in (1, 2, 3):
        put(spool, number)
        tell(spool, number, 1, "step")
    spool.recover()
    database = opened(spool)
    rebuild(database, spool, spool.layout, is_late=lambda: True)
    with sqlite3.connect(database.path) as db:
        db.execute("CREATE TRIGGER odd BEFORE UPDATE ON jobs WHEN new.id = 2 BEGIN SELECT RAISE(ABORT, 'odd'); END")
    failures = Failures(logging.getLogger("test"))
    tend(database, spool, dict, failures=failures)
    assert [database.evaluated(number)[1] for number in (1, 2, 3)] == [9, None, 9]
    assert (failures.num_unforeseen, database.pending.newest_first(), database.is_catching_up) == (1, [2], False)
    with sqlite3.connect(database.path) as db:
        db.execute("DROP TRIGGER odd")
    tend(database, spool, dict, failures=failures)
    assert (database.evaluated(2)[1], len(database.pending)) == (9, 0)
    database.close()


def test_while_another_program_locks_the_database_nothing_is_tried_again_at_once(spool: Spool) -> None:
    for number in range(1, 9):
        put(spool, number)
        tell(spool, number, 1, "step")
    spool.recover()
    database = opened(spool)
    rebuild(database, spool, spool.layout, is_late=lambda: True)
    failures = Failures(logging.getLogger("test"))
    with contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as theirs:
        theirs.execute("BEGIN IMMEDIATE")
        tend(database, spool, dict, failures=failures)  # the step itself does not fail: it would slow the whole loop
    assert ("locked" in failures.fault, len(database.pending), database.is_catching_up) == (True, 8, False)
    while database.pending:
        tend(database, spool, dict, failures=failures)
    assert [database.evaluated(number)[1] for number in range(1, 9)] == [9] * 8
    database.close()


def test_a_fault_of_the_machine_leaves_out_no_rows_for_good(spool: Spool) -> None:
    put(spool, 1)
    tell(spool, 1, 1, "step")
    spool.recover()
    database = opened(spool)
    with database.made_again():
        database.pending.add([1])
        database.put_jobs(spool.all_jobs().values())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        fill(database, spool, spool.layout)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert 1 in database.pending
    fill(database, spool, spool.layout)
    assert (database.evaluated(1)[1], len(database.pending)) == (9, 0)
    database.close()


def test_a_turn_keeps_the_log_of_the_database_short(spool: Spool) -> None:
    database = opened(spool)
    with database.made_again():
        pass
    job = replace(put(spool, 1), attempts=(Attempt(1, "transformers", 10.0),))
    told = [Event("log", 1.0, {"message": "x" * 1000})] * 250
    for offset in range(30):
        database.apply(job, Reading(told, offset, 0))
    assert rows_itself(database) == 0
    tend(database, spool, dict)
    wait_for(lambda: rows_itself(database) == 30 * 250, what="the log copied")
    database.close()


def test_a_log_that_is_being_copied_gets_into_no_new_database(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    has_opened, may_go_on, connect = threading.Event(), threading.Event(), sqlite3.connect

    def slow(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made = connect(*arguments, **options)
        if threading.current_thread() is not threading.main_thread():
            has_opened.set()
            may_go_on.wait(30.0)
        return made

    monkeypatch.setattr(sqlite3, "connect", slow)
    job = put(spool, 1)
    tell(spool, 1, 1, *["step"] * 9)
    spool.recover()
    database = opened(spool)
    with database.made_again():
        pass
    told = [Event("log", 1.0, {"message": "x" * 1000})] * 250
    for offset in range(30):
        database.apply(replace(job, attempts=job.attempts[:1]), Reading(told, offset, 0))
    database.wal.tend()
    has_opened.wait(30.0)
    database.path.unlink()
    tend(database, spool, dict)
    assert database.is_lost
    may_go_on.set()
    wait_for(lambda: not database.wal.is_copying, what="the thread's end")
    tend(database, spool, dict)
    assert not database.is_lost
    database.close()
    with contextlib.closing(sqlite3.connect(database.path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("SELECT count(*) FROM events").fetchone() == (0,)
        assert db.execute("SELECT offset > 0 FROM offsets").fetchall() == [(1,)]


def rows_itself(database: Database) -> int:
    """Return the events in honed.db itself, without its log."""
    address = f"file:{database.path}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as db, contextlib.suppress(sqlite3.Error):
        return int(db.execute("SELECT count(*) FROM events").fetchone()[0])
    return 0
