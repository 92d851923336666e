"""honed.db's write-ahead log: copied beside the loop, and short."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from honed.job import wal
from honed.job.database import Database
from honed.job.event import Event, Reading
from honed.job.job import State
from waiting import wait_for
from zoo import jobs

JOB = replace(jobs.JOB, state=State.RUNNING)
#: Rows of a reading, with some 250 KiB of text.
NUM_EVENTS, TEXT = 250, "x" * 1000


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "honed.db")
    made.put_job(JOB)
    yield made
    made.close()


def write(database: Database, num_readings: int) -> None:
    for _ in range(num_readings):
        offset = database.offset(1, 1)
        told = [Event("log", 1.0, {"message": TEXT}) for _ in range(NUM_EVENTS)]
        database.apply(JOB, Reading(told, offset + 1, 0))


def num_copied(database: Database) -> int:
    """Return the rows in honed.db itself, without its log."""
    address = f"file:{database.path}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as db, contextlib.suppress(sqlite3.Error):
        return int(db.execute("SELECT count(*) FROM events").fetchone()[0])
    return 0


def log_bytes(database: Database) -> int:
    return database.path.with_name("honed.db-wal").stat().st_size


def test_a_long_log_is_copied_by_the_thread_and_not_by_a_commit(database: Database) -> None:
    write(database, 30)
    assert log_bytes(database) > wal.COPY_BYTES
    assert num_copied(database) == 0
    database.wal.tend()
    wait_for(lambda: num_copied(database) == 30 * NUM_EVENTS, what="the log copied")
    write(database, 1)
    assert log_bytes(database) < wal.COPY_BYTES


def test_a_short_log_is_left_alone(database: Database) -> None:
    write(database, 2)
    database.wal.tend()
    database.wal.close()
    assert num_copied(database) == 0


def test_the_log_stays_bounded_while_the_loop_writes_on(database: Database) -> None:
    longest = 0
    for _ in range(300):
        write(database, 1)
        database.wal.tend()
        longest = max(longest, log_bytes(database))
    assert longest < 1.5 * wal.MAX_PAGES * 4096


def test_without_the_thread_a_commit_copies_it(database: Database) -> None:
    write(database, 100)
    assert log_bytes(database) < 1.5 * wal.MAX_PAGES * 4096


def test_a_log_that_was_removed_with_its_database_is_not_made_again(database: Database, tmp_path: Path) -> None:
    write(database, 30)
    database.path.rename(tmp_path / "aside.db")
    database.wal.tend()
    database.wal.close()
    assert not database.path.exists()


def test_without_room_for_a_thread_commits_copy_it_and_honed_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    write(database, 30)
    database.wal.tend()
    database.wal.tend()
    database.close()
    with contextlib.closing(sqlite3.connect(database.path)) as db:
        assert db.execute("SELECT count(*) FROM events").fetchone() == (30 * NUM_EVENTS,)


def test_many_jobs_become_pending_in_one_write(database: Database) -> None:
    with database.made_again():
        pass
    before = log_bytes(database)
    database.pending.add(range(1, 1001))
    assert len(database.pending) == 1000
    assert log_bytes(database) - before < 200_000
    database.pending.add([7])
    database.pending.drop([*range(1, 1001)])
    assert not database.pending


def test_nothing_is_left_of_it_once_honed_has_ended(database: Database) -> None:
    write(database, 30)
    database.wal.tend()
    database.close()
    assert not database.path.with_name("honed.db-wal").exists()
    with sqlite3.connect(database.path) as db:
        assert db.execute("SELECT count(*) FROM events").fetchone() == (30 * NUM_EVENTS,)
