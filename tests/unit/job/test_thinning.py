"""A job's rows in honed.db are bounded, whatever its worker reports, and what says most of them stays."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.job import history, thinning
from honed.job.database import MAX_METRICS, MAX_NAME, Database, Reader
from honed.job.event import Event, Reading
from honed.page import report
from honed.page.story import Story
from zoo.jobs import JOB


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(thinning, "MAX_METRIC_ROWS", 3000)
    monkeypatch.setattr(thinning, "MARGIN_ROWS", 500)
    monkeypatch.setattr(thinning, "MAX_PREDICTION_BYTES", 100_000)
    monkeypatch.setattr(thinning, "MAX_EVENT_ROWS", 500)
    monkeypatch.setattr(thinning, "MAX_EVENT_BYTES", 100_000)
    monkeypatch.setattr(thinning, "BITE_ROWS", 100)
    made = Database(tmp_path / "honed.db")
    made.put_job(JOB)
    yield made
    made.close()


def put(database: Database, *events: tuple[str, dict[str, Any]]) -> None:
    database.apply(JOB, Reading([Event(kind, 1.0, data) for kind, data in events], 10, 0))
    while not database.thin(JOB, until=0.0):  # a bite at a time
        pass


def rows(database: Database, sql: str) -> list[Any]:
    with sqlite3.connect(database.path) as db:
        return db.execute(sql).fetchall()


def steps(database: Database, name: str) -> list[int]:
    return [step for (step,) in rows(database, f"SELECT step FROM metrics WHERE name = '{name}' ORDER BY step")]


def losses(database: Database, count: int, best: int) -> None:
    for begin in range(0, count, 100):
        numbers = range(begin, begin + 100)
        put(
            database,
            *(("step", {"step": each, "loss": 0.01 if each == best else 1.0, "a/b": 1.0}) for each in numbers),
            ("evaluation", {"step": begin, "metrics": {"eval_loss": 1.0}}),
        )


def test_every_second_row_of_older_steps_goes_but_never_evaluations_the_first_the_last_and_the_best(
    database: Database,
) -> None:
    losses(database, 20_000, best=4321)
    assert rows(database, "SELECT count(*) FROM metrics")[0][0] <= thinning.MAX_METRIC_ROWS
    left = steps(database, "loss")
    assert left[0] == 0
    assert left[-1] == 19_999
    assert 4321 in left
    assert steps(database, "eval_loss") == list(range(0, 20_000, 100))
    # The newest ones are whole, and the older ones ever sparser.
    assert left[-200:] == list(range(19_800, 20_000))
    older, newer = [each for each in left if each < 10_000], [each for each in left if each >= 10_000]
    assert 20 < len(older) < len(newer)
    assert len(steps(database, "a/b")) < 5000  # a step's metric of any name


def thinned_events(database: Database) -> list[dict[str, Any]]:
    return list(history.present(history.events(database.path, 1, ("thinned",))))


def test_what_is_gone_is_counted_in_one_event(database: Database) -> None:
    losses(database, 10_000, best=0)
    (thinned,) = thinned_events(database)
    left = rows(database, "SELECT count(*) FROM metrics")[0][0]
    assert thinned["metrics"] == 20_000 + 100 - left


def test_a_job_within_the_limits_keeps_every_row(database: Database) -> None:
    losses(database, 1000, best=5)
    assert steps(database, "loss") == list(range(1000))
    assert not thinned_events(database)


@pytest.mark.parametrize("step", [0, None])
def test_neither_evaluations_alone_nor_very_many_metrics_get_beyond_the_limit(
    database: Database, step: int | None
) -> None:
    for number in range(400):
        names = {f"eval_{number}_{each}": 1.0 for each in range(50)} if step is None else {"eval_loss": 1.0, "a": 2.0}
        put(database, *(("evaluation", {"step": step or number, "metrics": names}) for _ in range(10)))
        assert rows(database, "SELECT count(*) FROM metrics")[0][0] <= thinning.MAX_METRIC_ROWS


def test_an_event_has_so_many_metrics_of_so_many_characters(database: Database) -> None:
    put(database, ("evaluation", {"metrics": {"x" * 10_000: 1.0, **{f"m{each}": 1.0 for each in range(5000)}}}))
    assert rows(database, "SELECT count(*), max(length(name)) FROM metrics")[0] <= (1000, 256)


def test_predictions_of_the_baseline_and_of_the_last_step_stay(database: Database) -> None:
    for step in range(50):
        answers = [{"sample_index": each, "prompt": "p", "prediction": "é" * 1000} for each in range(5)]
        put(database, ("predictions", {"step": step, "rows": answers}))
    size = rows(database, "SELECT sum(length(CAST(prediction AS BLOB))) FROM training_predictions")[0][0]
    assert size <= thinning.MAX_PREDICTION_BYTES
    left = {step for (step,) in rows(database, "SELECT DISTINCT step FROM training_predictions")}
    assert {0, 48, 49} <= left
    assert len(left) >= 8


def test_predictions_written_again_and_again_remove_no_others(database: Database) -> None:
    for _ in range(100):
        answers = [{"sample_index": each, "prompt": "p", "prediction": "x" * 1000} for each in range(5)]
        put(database, ("predictions", {"step": 0, "rows": answers}), ("predictions", {"step": 1, "rows": answers}))
    assert rows(database, "SELECT count(*) FROM training_predictions") == [(10,)]


def test_one_step_with_very_many_predictions_is_bounded_too(database: Database) -> None:
    for number in range(100):
        put(database, ("predictions", {"step": 0, "rows": [{"sample_index": number, "prediction": "x" * 5000}]}))
    size, first = rows(database, "SELECT sum(length(prediction)), min(sample_index) FROM training_predictions")[0]
    assert size <= thinning.MAX_PREDICTION_BYTES
    assert first == 0


def test_predictions_without_a_text_are_bounded_too(database: Database) -> None:
    for step in range(100):
        put(database, ("predictions", {"step": step, "rows": [{"sample_index": each} for each in range(100)]}))
    (num,) = rows(database, "SELECT count(*) FROM training_predictions")[0]
    assert num * thinning.ROW_BYTES <= thinning.MAX_PREDICTION_BYTES


@pytest.mark.parametrize("kind", ["log", "many kinds"])
def test_other_events_are_bounded_by_number_and_size(database: Database, kind: str) -> None:
    put(database, ("stage", {"stage": "train"}))
    for number in range(2000):
        put(database, (kind if kind == "log" else f"kind {number}", {"message": "x" * 300}))
    num, size = rows(database, "SELECT count(*), sum(length(data)) FROM events")[0]
    assert num <= thinning.MAX_EVENT_ROWS + 1
    assert size <= thinning.MAX_EVENT_BYTES + 1000
    assert Reader(database.path).stage(1) == "train"


def test_what_a_worker_calls_thinned_is_no_count() -> None:
    assert thinning.thinned_counts(json.loads('{"metrics": "many", "events": 3, "x": 4}')) == {"events": 3}
    assert thinning.thinned_counts([1]) == {}


def test_a_worker_s_number_of_thousands_of_digits_keeps_none_of_its_events_out(database: Database) -> None:
    put(database, ("thinned", {"names": int("9" * 4300)}))
    put(database, ("evaluation", {"metrics": {"x" * (MAX_NAME + 1): 1.0, "y": 2.0}}))
    assert rows(database, "SELECT name FROM metrics") == [("y",)]
    assert [told["names"] for told in thinned_events(database)] == [1]


def test_the_report_says_what_is_left_out(database: Database) -> None:
    losses(database, 5_000, best=0)
    events = thinned_events(database)
    story = Story(JOB, {}, {}, [], 0, events, 0, "", database.path)  # type: ignore[typeddict-item]
    num_gone = 10_000 + 50 - rows(database, "SELECT count(*) FROM metrics")[0][0]
    assert f"Left out here: {num_gone:,} metrics; attempts/*/events.jsonl has them all." in report._thinned(story)
    assert not report._thinned(replace(story, events=[]))


def test_metrics_that_are_not_taken_are_counted_and_the_report_says_so(database: Database) -> None:
    few = {"eval_loss": 1.0, "x" * MAX_NAME: 2.0, "y" * (MAX_NAME + 1): 3.0}
    many = {f"m{number}": 1.0 for number in range(MAX_METRICS + 7)}
    put(database, ("evaluation", {"step": 1, "metrics": few}), ("predictions", {"step": 1, "scores": many}))
    put(database, ("step", {"step": 2, "loss": 1.0}), ("evaluation", {"step": 2, "metrics": {"eval_loss": 1.0}}))
    put(database, ("evaluation", {"step": 3, "metrics": few}))
    told = thinned_events(database)
    assert [each["names"] for each in told] == [1 + 7 + 1]
    words = report._thinned(Story(JOB, {}, {}, [], 0, told, 0, "", database.path))  # type: ignore[typeddict-item]
    assert words.startswith("Left out here: 9 metrics of events with too many of them, or with too long names;")


class FullDisk:
    """A connection to a database on a full disk, which shows when a transaction ends."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            self._db.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(sql, *arguments)


def test_rows_that_a_full_disk_did_not_take_count_for_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(database, 200, best=50)
    kept = steps(database, "loss")
    bite = Reading([Event("step", 1.0, {"step": 1000 + at, "loss": 1.0}) for at in range(100)], 10, 0)

    with monkeypatch.context() as patch:
        patch.setattr(database, "_db", FullDisk(database._db))
        for _ in range(100):
            with pytest.raises(sqlite3.OperationalError):
                database.apply(JOB, bite)
    assert database.thin(JOB)
    assert steps(database, "loss") == kept


def test_what_was_counted_and_is_not_there_ends_no_job(database: Database) -> None:
    losses(database, 200, best=50)
    kept = steps(database, "loss")
    counted = thinning.Thinning(JOB.id)
    with database._transaction():
        counted.note(database._db, thinning.Added())
        for _ in range(3):
            counted.note(database._db, thinning.Added(metric_rows=10_000, event_rows=10_000))
    assert counted.tend(database._db, 1, until=float("inf"))
    assert steps(database, "loss") == kept
