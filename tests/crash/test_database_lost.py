"""honed.db is removed, damaged, of another version: its rows come back as they were, and nothing else suffers."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crash.scene import dump
from honed.daemon.rebuild import rebuild
from honed.job import database, event, history
from honed.job.database import Database, Reader
from honed.job.event import Event, Reading
from honed.job.job import State
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from process.harness import Instance
from waiting import wait_for
from zoo import jobs

DATA = Path(__file__).parents[1] / "data"
JOB = replace(jobs.JOB, state=State.SUCCEEDED)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    made = Instance(tmp_path)
    made.configure("[spool]\nsettle_sec = 0.1\n[jobs]\nretry_delay_sec = 0\npoll_interval_sec = 0.05\n")
    yield made
    made.end()


def finish_a_few(instance: Instance) -> None:
    """Jobs with figures, predictions, a retry and a fallback, so that every table has rows of every origin."""
    for name in ("report-3", "die-2", "fallback"):
        instance.drop(name, name=name, **({} if name == "fallback" else {"backend": "transformers"}))
        instance.wait_state(name, State.SUCCEEDED)
    # The entry comes first, its row after it.
    path = instance.layout.database_path
    wait_for(lambda: {row[2] for row in rows_of(path)["jobs"]} == {"succeeded"}, what="the rows")


def rows_of(path: Path) -> dict[str, frozenset[tuple[object, ...]]]:
    """Return what `dump` does; nothing of a database that is being replaced at this moment."""
    try:
        return collections.defaultdict(frozenset, dump(path))
    except sqlite3.DatabaseError:
        return collections.defaultdict(frozenset)


def files_of(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]


@pytest.mark.parametrize("num_removed", [1, 3])  # the file alone; with its journal
def test_a_database_removed_while_honed_runs_is_made_again_with_the_same_rows(
    instance: Instance, num_removed: int
) -> None:
    instance.start()
    finish_a_few(instance)
    path = instance.layout.database_path
    before = dump(path)
    assert {len(rows) > 0 for rows in before.values()} == {True}
    instance.drop("slow-100", name="slow-100")
    instance.wait_state("slow-100", State.RUNNING)
    for each in files_of(path)[:num_removed]:
        each.unlink()
    wait_for(lambda: before["metrics"] <= rows_of(path)["metrics"], what="the rows")
    instance.wait_state("slow-100", State.SUCCEEDED)
    wait_for(lambda: ("slow-100", "succeeded") in {row[1:3] for row in rows_of(path)["jobs"]}, what="its row")
    after = dump(path)
    assert {table: rows - after[table] for table, rows in before.items() if rows - after[table]} == {}
    instance.stop()
    assert "was removed or replaced" in instance.log
    assert "Traceback" not in instance.log
    assert rebuilt(instance) == dump(path)


def test_a_database_removed_while_honed_is_down_has_the_same_rows_after_its_start(instance: Instance) -> None:
    instance.start()
    finish_a_few(instance)
    instance.stop()
    before = dump(instance.layout.database_path)
    instance.layout.database_path.unlink()
    instance.start()
    instance.stop()
    assert dump(instance.layout.database_path) == before


def rebuilt(instance: Instance) -> dict[str, frozenset[tuple[object, ...]]]:
    path = instance.root / "again.db"
    again = Database(path)
    rebuild(again, instance.spool, instance.layout)
    again.close()
    return dump(path)


def garble(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lose_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 * 2)
        file.write(bytes(4096))


def take_a_column(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("DROP VIEW jobs_v1")
    db.execute("DROP TABLE events")
    db.execute("CREATE TABLE events (something TEXT)")
    db.close()


@pytest.mark.parametrize("damage", [garble, cut_short, empty, lose_a_page, take_a_column])
def test_a_damaged_database_is_made_again_with_the_same_rows(instance: Instance, damage: object) -> None:
    instance.start()
    finish_a_few(instance)
    instance.stop()
    path = instance.layout.database_path
    before = dump(path)
    assert callable(damage)
    damage(path)
    instance.start()
    instance.stop()
    assert dump(path) == before
    assert path.with_name("honed.db.damaged").exists() or damage is empty


def make_dir(path: Path) -> None:
    path.mkdir()
    (path / "inner").write_text("somebody's")


def link_to_a_text(path: Path) -> None:
    path.with_name("text").write_text("somebody's")
    path.symlink_to("text")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


#: What can be in the place of honed.db, and what the log says of it where it is moved.
OBSTACLES = {
    make_dir: "a directory, not a file",
    os.mkfifo: "not a regular file",
    link_to_itself: "Too many levels of symbolic links",
    link_to_a_text: "",
    link_to_nothing: "",
}


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(("make", "words"), OBSTACLES.items(), ids=[each.__name__ for each in OBSTACLES])
def test_what_is_no_database_in_its_place_neither_stops_honed_nor_costs_a_row(
    instance: Instance, make: Callable[[Path], None], words: str, is_up: bool
) -> None:
    instance.start()
    instance.drop("report-3", backend="transformers")
    instance.wait_state("report-3", State.SUCCEEDED)
    path = instance.layout.database_path
    wait_for(lambda: {row[2] for row in rows_of(path)["jobs"]} == {"succeeded"}, what="the row")
    before = dump(path)
    if not is_up:
        instance.stop()
    for each in files_of(path):
        each.unlink(missing_ok=True)
    make(path)
    if not is_up:
        instance.start()
    wait_for(lambda: path.is_file() and before["metrics"] <= rows_of(path)["metrics"], what="the rows")
    instance.drop("report-2", backend="transformers")
    instance.wait_state("report-2", State.SUCCEEDED)
    instance.stop()
    after = dump(path)
    assert {table: rows - after[table] for table, rows in before.items() if rows - after[table]} == {}
    assert "an error in the daemon's loop" not in instance.log  # a report that is being made may meet it
    aside = path.with_name("honed.db.damaged")
    if words:
        assert f"{words}; moved to {aside.name} and rebuilt" in instance.log
        assert os.path.lexists(aside)
    if make is make_dir:
        assert (aside / "inner").read_text() == "somebody's"
    if make is link_to_a_text:
        assert path.with_name("text").read_text() == "somebody's"


def test_a_second_directory_replaces_nothing_that_was_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    for _ in range(3):
        make_dir(path)
        Database(path).close()
        path.unlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "honed.db.damaged",
        "honed.db.damaged-2",
        "honed.db.damaged-3",
    ]


def test_damage_that_is_met_while_honed_runs_is_noticed_and_mended(tmp_path: Path) -> None:
    database_ = Database(tmp_path / "honed.db")
    with database_.made_again():
        database_.put_job(JOB)
    reading = Reading([Event("log", 1.0, {"message": "x" * 900})] * 200, 10, 0)
    database_.apply(JOB, reading)
    database_.close()
    database_ = Database(tmp_path / "honed.db")
    assert not database_.is_lost
    with (tmp_path / "honed.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom((tmp_path / "honed.db").stat().st_size - 4096))
    other = sqlite3.connect(tmp_path / "honed.db")
    other.execute(f"PRAGMA user_version = {database.SCHEMA_VERSION}")  # so that nothing is taken from the cache
    other.close()
    with pytest.raises(sqlite3.DatabaseError):
        database_.apply(JOB, reading)
    assert database_.is_lost
    database_.renew()
    assert database_.is_new
    assert not database_.is_lost
    database_.apply(JOB, Reading([Event("log", 1.0, {"message": "again"})], 10, 0))
    assert [row["message"] for row in history.present(history.events(database_.path, 1, ("log",)))] == ["again"]


def test_rows_that_are_made_again_are_all_there_or_none(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    made = Database(path)
    with pytest.raises(KeyboardInterrupt), made.made_again():
        made.put_job(JOB)
        raise KeyboardInterrupt  # the moment of a kill
    made.close()
    again = Database(path)
    assert again.is_new
    assert again.states() == {}
    with again.made_again():
        again.put_job(JOB)
    again.close()
    assert not Database(path).is_new


def test_what_was_told_between_an_entry_and_its_row_is_caught_up_with(instance: Instance) -> None:
    instance.start()
    finish_a_few(instance)
    instance.stop()
    path = instance.layout.database_path
    before = dump(path)
    db = sqlite3.connect(path)
    # As a power cut leaves it: the entries are durable, what the database was told last is not.
    db.execute("UPDATE jobs SET state = 'running', outcome = NULL")
    db.execute("DELETE FROM offsets")
    for table in ("events", "metrics", "training_predictions"):
        db.execute(f"DELETE FROM {table}")
    db.commit()
    db.close()
    instance.start()
    instance.stop()
    assert dump(path) == before


@pytest.mark.parametrize("is_killed", [False, True], ids=["up", "killed"])
def test_what_the_database_did_not_take_of_an_attempt_is_counted_when_its_job_runs_again(
    instance: Instance, is_killed: bool
) -> None:
    instance.start()
    path = instance.layout.database_path
    wait_for(path.exists, what="the database")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute(
            "CREATE TRIGGER busy BEFORE INSERT ON metrics WHEN NEW.attempt = 1 BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        instance.drop("die", name="die-2-300")
        job = wait_for(lambda: instance.job("die-2-300"), what="the job")
        wait_for(lambda: len(instance.starts(job)) == 2, what="the second attempt")
        assert instance.log.count("its last events were not counted") == 1
        if is_killed:
            instance.kill(signal.SIGKILL)
        holder.execute("DROP TRIGGER busy")
    if is_killed:
        instance.start()
    wait_for(lambda: {row[2] for row in rows_of(path)["jobs"]} == {"succeeded"}, what="its row")
    assert rebuilt(instance) == dump(path)


# -- versions ---------------------------------------------------------------------------------------------------------


NEXT = database.SCHEMA_VERSION + 1
#: A migration to the version that follows.
MADE_UP = "DROP INDEX events_by_kind; CREATE INDEX made_up ON events (kind)"


def made(path: Path) -> None:
    """Make a database of today's schema, with rows."""
    db = Database(path)
    with db.made_again():
        db.put_job(JOB)
    db.apply(JOB, Reading([Event("log", 1.0, {"message": "old"})], 10, 0))
    db.close()


def version_of(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_a_migrated_database_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "honed.db"
    made(path)
    before = dump(path)
    monkeypatch.setitem(database.MIGRATIONS, database.SCHEMA_VERSION, MADE_UP)
    monkeypatch.setattr(database, "SCHEMA_VERSION", NEXT)
    monkeypatch.setattr(
        database,
        "SCHEMA",
        database.SCHEMA.replace("events_by_kind ON events (job_id, kind)", "made_up ON events (kind)"),
    )
    migrated = Database(path)
    assert not migrated.is_new
    assert dump(path) == before
    assert version_of(path) == NEXT
    migrated.apply(JOB, Reading([Event("log", 1.0, {"message": "new"})], 20, 0))
    assert len(dump(path)["events"]) == len(before["events"]) + 1
    assert schema(path) == schema(Database(tmp_path / "fresh.db").path)


def schema(path: Path) -> set[tuple[str, str]]:
    return set(sqlite3.connect(path).execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))


def test_a_migration_cut_short_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    made(path)
    before = dump(path)
    # sqlite3 loses a transaction that was open, as it does in a kill.
    later = "import os, sqlite3, sys\nfrom honed.job import database\n"
    later += f"database.MIGRATIONS[database.SCHEMA_VERSION] = {MADE_UP!r} + sys.argv[2]\ndatabase.SCHEMA_VERSION += 1\n"
    later += "connect = sqlite3.connect\ndef connected(*arguments, **keys):\n    db = connect(*arguments, **keys)\n"
    later += "    db.create_function('die', 0, lambda: os._exit(9))\n    return db\n"
    later += "sqlite3.connect = connected\nfrom pathlib import Path\ndatabase.Database(Path(sys.argv[1]))\n"
    for end, status, version in (("; SELECT die()", 9, NEXT - 1), ("", 0, NEXT)):
        ended = subprocess.run([sys.executable, "-c", later, str(path), end], env=os.environ, check=False)
        assert (ended.returncode, version_of(path)) == (status, version)
        assert dump(path) == before


def test_a_database_of_a_later_honed_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.database_path.parent.mkdir(parents=True)
    made(layout.database_path)
    db = sqlite3.connect(layout.database_path)
    db.execute(f"PRAGMA user_version = {NEXT}")
    db.close()
    before = layout.database_path.read_bytes()
    command = [sys.executable, "-m", "honed.daemon.loop", "--root", str(tmp_path), "--drain"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert ended.returncode == 78
    assert "was written by a later honed" in ended.stderr
    assert "install the later honed again" in ended.stderr
    with pytest.raises(EnvironmentInvalidError, match="was written by a later honed"):
        Reader(layout.database_path)
    assert layout.database_path.read_bytes() == before


def test_events_are_read_up_to_where_the_loop_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [b'{"event": "log", "time": 1, "message": "%d"}\n' % number for number in range(3)]
    path.write_bytes(b"".join(lines))
    end = len(lines[0]) * 2
    reading = event.read(PersonPath.own(path), 0, end=end)
    assert (len(reading.events), reading.offset) == (2, end)
    assert event.read(PersonPath.own(path), end, end=end).events == []


def test_a_reader_takes_a_named_pipe_for_no_database(tmp_path: Path) -> None:
    """Opening it would wait for a writer, for ever."""
    os.mkfifo(tmp_path / "honed.db")
    with contextlib.closing(Reader(tmp_path / "honed.db")) as reader:
        assert reader.progress([1]) == {}
