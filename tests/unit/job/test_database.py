"""honed.db: any event is counted once, and no content stops the daemon."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.job import history
from honed.job.database import Database, Reader
from honed.job.event import Event, Reading
from honed.job.job import Attempt, State
from honed.system import durable
from zoo.jobs import JOB

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["step", "num_steps", "epoch", "loss", "metrics", "rows", "eta_sec", "message", "level", "stage"]
)
ROW = st.fixed_dictionaries({"sample_index": ANYTHING, "prompt": ANYTHING, "prediction": ANYTHING})


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Database:
    made = Database(tmp_path_factory.mktemp("db") / "honed.db")
    made.put_job(JOB)
    return made


@settings(max_examples=80)
@pytest.mark.slow
@given(
    kind=st.sampled_from(["step", "evaluation", "predictions", "log", "data", "stage", "of_a_later_honed"]),
    data=st.dictionaries(KEYS, ANYTHING | st.lists(ROW, max_size=2), max_size=6),
)
def test_no_event_whatever_raises(database: Database, kind: str, data: dict[str, Any]) -> None:
    database.apply(JOB, Reading([Event(kind, 1.0, data)], 10, 0))


def test_every_number_that_a_step_reports_is_a_metric_but_not_those_of_its_progress(tmp_path: Path) -> None:
    database = Database(tmp_path / "honed.db")
    database.put_job(JOB)
    metrics = {"loss": 1.5, "mean_token_accuracy": 0.25, "rewards/margins": -3}
    step = {"step": 7, "num_steps": 9, "epoch": 0.5, "eta_sec": 3.0, **metrics, "grad_norm": None, "other": "text"}
    database.apply(JOB, Reading([Event("step", 1.0, step)], 10, 0))
    assert dict(history.present(history.last_metrics(database.path, 1, 1))) == metrics


def test_a_prediction_told_twice_stands_once(tmp_path: Path) -> None:
    database = Database(tmp_path / "honed.db")
    database.put_job(JOB)
    row = {"sample_index": 0, "prompt": "p", "ground_truth": "t", "prediction": "first"}
    for text in ("first", "second"):
        event = Event("predictions", 1.0, {"step": 4, "epoch": 0.5, "rows": [{**row, "prediction": text}]})
        database.apply(JOB, Reading([event], 10, 0))
    (stored,) = history.present(history.predictions(database.path, 1))
    assert (stored["prediction"], stored["step"], stored["epoch"]) == ("second", 4, 0.5)


def test_what_a_run_that_goes_on_has_not_done_yet_is_no_prediction_of_it(tmp_path: Path) -> None:
    database = Database(tmp_path / "honed.db")
    database.put_job(JOB)

    def left_after(kind: str, **data: Any) -> list[int]:
        row = {"sample_index": 0, "prompt": "p", "ground_truth": "t", "prediction": "x"}
        told = [Event("predictions", 1.0, {"step": step, "epoch": 0.5, "rows": [row]}) for step in (0, 4, 8)]
        database.apply(JOB, Reading([*told, Event(kind, 2.0, data)], 10, 0))
        return [row["step"] for row in history.present(history.predictions(database.path, 1))]

    assert left_after("checkpoint", step=4) == [0, 4, 8]
    assert left_after("resumed", step=4) == [0, 4]
    assert left_after("started_over", reason="damaged") == []


def test_events_and_their_offset_are_one_transaction(tmp_path: Path) -> None:
    database = Database(tmp_path / "honed.db")
    with pytest.raises(AttributeError):
        database.apply(JOB, Reading([Event("log", 1.0, {}), None], 99, 0))  # type: ignore[list-item]
    assert database.offset(1, 1) == 0
    assert history.newest_events(database.path, 1, (), max_chars=1000) == []


def test_a_locked_database_is_not_taken_for_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "honed.db"
    Database(path).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **keys: connect(*args, **{**keys, "timeout": 0.1}))
    with pytest.raises(sqlite3.OperationalError):
        Database(path)
    assert not path.with_name("honed.db.damaged").exists()
    holder.close()


def test_a_database_that_another_program_holds_locked_is_the_machines_fault_and_no_bug(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as theirs:
        theirs.executescript("CREATE TABLE a (b); BEGIN IMMEDIATE;")
        with contextlib.closing(sqlite3.connect(path, timeout=0)) as ours, pytest.raises(sqlite3.Error) as raised:
            ours.execute("INSERT INTO a VALUES (1)")
    assert durable.machine_fault(raised.value) == "the database: database is locked"


def test_the_overview_has_the_queue_in_the_order_that_is_given_and_the_rest_by_priority(tmp_path: Path) -> None:
    database = Database(tmp_path / "honed.db")
    states = {1: State.SUCCEEDED, 2: State.RUNNING, 3: State.HELD, **dict.fromkeys(range(4, 10), State.QUEUED)}
    for number, state in states.items():
        database.put_job(replace(JOB, id=number, state=state, priority=5 if number == 9 else 0))
    with contextlib.closing(Reader(tmp_path / "honed.db")) as reader:

        def listed(num_jobs: int, queue: list[int]) -> list[int]:
            return [row["id"] for row in reader.overview(num_jobs, queue)[0]]

        assert listed(20, []) == [2, 9, 4, 5, 6, 7, 8, 3, 1]
        assert listed(20, [6, 4, 2, 77]) == [2, 6, 4, 9, 5, 7, 8, 3, 1]  # 2 has started meanwhile
        assert listed(2, [6, 4]) == [2, 6, 4, 3, 1]
        assert listed(3, [6, 4]) == [2, 6, 4, 9, 3, 1]
        assert reader.overview(2, [6])[1]["queued"] == 6


def test_scores_and_evaluations_cost_no_more_however_many_a_worker_reports(tmp_path: Path) -> None:
    """A list of a few jobs with half a million evaluations each held up all others for more than a second."""
    database = Database(tmp_path / "honed.db")
    database.put_job(JOB)
    for begin in range(0, 60_000, 1000):
        told = [Event("evaluation", 1.0, {"step": step, "metrics": {"eval_loss": step / 4}}) for step in range(1000)]
        events = [replace(each, data=each.data | {"step": begin + each.data["step"]}) for each in told]
        database.apply(JOB, Reading(events, 10, 0))
    database.apply(
        JOB, Reading([Event("predictions", 1.0, {"step": 9, "scores": {f"a{n}": 0.0 for n in range(99)}})], 20, 0)
    )
    database.apply(JOB, Reading([Event("predictions", 1.0, {"step": 9, "scores": {"exact_match": 0.5}})], 30, 0))
    num_bites = 0

    def count() -> None:
        nonlocal num_bites
        num_bites += 1

    with contextlib.closing(Reader(database.path)) as reader:
        assert reader._db is not None
        reader._db.set_progress_handler(count, 1000)
        assert reader.scores([1, 7]) == {1: {"name": "exact_match", "value": 0.5}}
    assert num_bites < 20  # a thousand instructions of SQLite each
    num_bites = 0
    database._db.set_progress_handler(count, 1000)
    assert [each.step for each in database.evaluations([1], [50, 40_000, 70_000])[1]] == [50, 40_000]
    assert database.evaluated(1)[0] == 59_999
    assert num_bites < 5
    database.close()


def test_an_evaluation_at_a_step_is_the_first_in_time_and_has_a_loss(tmp_path: Path) -> None:
    """Resumed at step 10 with more evaluations, the second attempt has one at step 15, after that at step 20."""
    database = Database(tmp_path / "honed.db")
    database.put_job(JOB)
    told = [(1.0, 10, 3.0), (2.0, 20, 2.0), (3.0, 15, 5.0), (4.0, 20, 6.0), (5.0, 30, math.nan), (6.0, 40, 1.0)]
    events = [Event("evaluation", when, {"step": step, "metrics": {"eval_loss": loss}}) for when, step, loss in told]
    database.apply(JOB, Reading(events, 10, 0))
    found = database.evaluations([1, 7], [10, 15, 25, 50, 10**400])
    assert [(each.step, each.eval_loss) for each in found[1]] == [(10, 3.0), (20, 2.0), (40, 1.0)]
    assert found[7] == []
    database.close()


def test_the_score_of_a_long_run_is_read_without_its_steps(tmp_path: Path) -> None:
    database = Database(tmp_path / "honed.db")
    database.put_job(JOB)
    for attempt, steps in ((1, range(5000)), (2, range(100, 5000))):
        job = replace(JOB, attempts=(*JOB.attempts[:1], Attempt(number=attempt, backend="transformers", started_at=0)))
        events = [Event("step", 1.0, {"step": step, "loss": 1.0, "grad_norm": 1.0}) for step in steps]
        scores = Event("predictions", 1.0, {"step": 50 // attempt, "rows": [], "scores": {"exact_match": attempt / 4}})
        losses = [Event("evaluation", 1.0, {"step": 50 // attempt, "metrics": {"eval_loss": 1.0}}), scores]
        database.apply(job, Reading([*events, *losses], 10, 0))
    num_bites = 0

    def count() -> None:
        nonlocal num_bites
        num_bites += 1

    with contextlib.closing(Reader(database.path)) as reader:
        assert reader._db is not None
        reader._db.set_progress_handler(count, 1000)
        assert reader.scores([1, 2]) == {1: {"name": "exact_match", "value": 0.5}}  # of the last attempt
    assert num_bites < 2  # a thousand instructions of SQLite each
    database.close()
