"""One job's rows by pages: joined they are the whole, and no page costs more than its rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from honed.job import history, keyset
from honed.job.database import MAX_AVERAGED, Database, Reader
from honed.job.event import Event, Reading
from honed.job.job import Attempt, Job

JOB = Job(id=1, name="j", submitted_at=0, source="j", uid=1000, output_dir="/o")
NUM = 3 * history.PAGE_ROWS + 7


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "honed.db")


def tell(database: Database, attempt: int, *events: Event) -> None:
    begun = Attempt(number=attempt, backend="transformers", started_at=0)
    database.apply(replace(JOB, attempts=(begun,)), Reading(list(events), 10, 0))


def step(number: int, loss: float, **more: float) -> Event:
    return Event("step", 1.0, {"step": number, "loss": loss, **more})


def last(database: Database, attempt: int) -> dict[str, float]:
    return dict(history.present(history.last_metrics(database.path, 1, attempt)))


def test_the_pages_of_a_metric_are_all_of_its_rows_by_step(database: Database) -> None:
    told = [(number // 2 % 1700, float(number)) for number in range(NUM)]  # twice and three times, some later
    tell(database, 1, *(step(*each) for each in told))
    tell(database, 2, step(5, -1.0))
    found = list(history.metric(database.path, 1, "loss"))
    assert found.count(None) > 3
    assert [row[:2] for row in history.present(found)] == sorted([*told, (5, -1.0)], key=lambda row: row[0])
    assert list(history.metric(database.path, 2, "loss")) == []


def test_rows_of_one_step_are_read_once_each(database: Database) -> None:
    """`(step, rowid) > (?, ?)` reads all rows of the step again for each page."""
    tell(database, 1, *(step(0, 1.0) for _ in range(20 * history.PAGE_ROWS)))
    num_bites = 0

    def count() -> None:
        nonlocal num_bites
        num_bites += 1

    with closing(sqlite3.connect(database.path)) as db:
        (end,) = db.execute("SELECT max(rowid) FROM metrics").fetchone()
        db.set_progress_handler(count, 1000)
        for sql, place in ((keyset.after("step, rowid"), (0, end - 50)), (keyset.before("step, rowid"), (0, 50))):
            assert len(db.execute(sql, (1, "loss", *place, 50)).fetchall()) in {49, 50}
    assert num_bites < 5  # a thousand instructions of SQLite each


def test_the_last_value_is_that_of_the_last_attempt_at_its_highest_step(database: Database) -> None:
    many = range(1, NUM)
    tell(database, 1, *(step(number, 1.0, grad_norm=number, learning_rate=0.1) for number in many))
    few = {f"m{number}": float(number) for number in range(900)}
    tell(database, 1, Event("evaluation", 1.0, {"step": 3, "metrics": {**few, "eval_loss": 3.0}}))
    tell(database, 1, Event("evaluation", 1.0, {"step": 2, "metrics": {**few, "m7": 0.5}}))
    expected = {**few, "eval_loss": 3.0, "loss": 1.0, "grad_norm": NUM - 1, "learning_rate": 0.1}
    assert last(database, 1) == expected
    tell(database, 2, step(10, 0.25))
    assert last(database, 2) == {**expected, "loss": 0.25}  # far below the steps of the first attempt
    assert list(last(database, 2)) == sorted(expected)
    with closing(Reader(database.path)) as reader:
        assert history.last_metric(reader, 1, "loss", 2) == 0.25
        assert history.last_metric(reader, 1, "m7", 2) == 7.0
        assert history.last_metric(reader, 1, "nothing", 2) is None


def test_more_metrics_than_a_page_has_rows(database: Database) -> None:
    names = [f"n{number:05}" for number in range(2 * history.PAGE_ROWS + 1)]
    for few in (names[:900], names[900:1800], names[1800:]):
        tell(database, 1, *(Event("evaluation", 1.0, {"step": at, "metrics": dict.fromkeys(few, at)}) for at in (1, 2)))
    assert last(database, 1) == dict.fromkeys(names, 2.0)


def test_the_pages_of_predictions_are_all_of_them_and_end_with_their_texts(database: Database) -> None:
    long = "é" * (history.PAGE_CHARS // 3)
    for number in (4, 0, 8):
        rows = [{"sample_index": index, "prompt": long, "prediction": f"{number}/{index}"} for index in range(5)]
        tell(database, 1, Event("predictions", 1.0, {"step": number, "epoch": 0.5, "rows": rows}))
    found = list(history.predictions(database.path, 1))
    assert found.count(None) >= 5
    expected = [f"{number}/{index}" for number in (0, 4, 8) for index in range(5)]
    assert [row["prediction"] for row in history.present(found)] == expected


def test_the_events_of_some_kinds_come_in_their_order_and_with_their_data(database: Database) -> None:
    kinds = ("data", "stage", "audit")
    told = [Event(kinds[number % 3], 1.0, {"number": number}) for number in range(4 * history.PAGE_EVENTS)]
    told += [Event("audit", 1.0, {"number": len(told), "words": "x" * 2 * history.PAGE_CHARS})] * 3
    tell(database, 3, *told)
    found = list(history.present(history.events(database.path, 1, ("audit", "data", "nothing"))))
    assert [each["number"] for each in found] == [each.data["number"] for each in told if each.kind != "stage"]
    assert {(each["event"], each["attempt"]) for each in found} == {("audit", 3), ("data", 3)}
    assert list(history.events(database.path, 2, kinds)) == []


def test_a_course_is_the_mean_of_each_stretch_of_steps(database: Database) -> None:
    tell(database, 1, *(step(number, float(number)) for number in range(100)))
    with closing(Reader(database.path)) as reader:
        assert reader.course(1, "loss", num_points=4) == [12.0, 37.0, 62.0, 87.0]
        assert reader.course(1, "loss", num_points=200) == [float(number) for number in range(100)]
        assert reader.course(1, "nothing") == []
        tell(database, 1, *(step(0, 100.0) for _ in range(2 * MAX_AVERAGED)))
        (first,) = reader.course(1, "loss", num_points=1)
        assert 99 < first < 100  # the first rows of the stretch alone
        tell(database, 2, *(step(number, 1.7e308) for number in range(2)))
        assert reader.course(2, "loss", num_points=1) == []  # their sum is no number


def test_a_page_of_a_database_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    assert list(history.predictions(path, 1)) == []
    with closing(sqlite3.connect(path, isolation_level=None)) as theirs:
        theirs.execute("PRAGMA journal_mode = DELETE")
        assert list(history.predictions(path, 1)) == []  # no tables yet
        theirs.executescript("CREATE TABLE a (b); BEGIN EXCLUSIVE;")
        with closing(Reader.__new__(Reader)) as reader:
            reader._db = sqlite3.connect(path, timeout=0)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                reader.page("SELECT 1 FROM a")
