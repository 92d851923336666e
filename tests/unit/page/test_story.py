"""What a page is made of: bounded, and of what it leaves out nothing that a reader looks for."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.job import history
from honed.job.database import Database
from honed.job.event import Event, Reading
from honed.job.job import State
from honed.job.spool import Spool
from honed.page import report, story
from honed.page.story import Curve, Point, Story
from honed.system.layout import Layout
from zoo.jobs import JOB


def curve(values: list[float], most: int) -> Curve:
    made = Curve(most)
    for step, value in enumerate(values):
        made.add(Point(step, value))
    return made


@pytest.mark.parametrize("num", [0, 1, 2, 63, 64])
def test_a_short_curve_has_all_of_its_values(num: int) -> None:
    values = [float(number % 7) for number in range(num)]
    assert [point[:2] for point in curve(values, 65).points] == list(enumerate(values))


@pytest.mark.parametrize("num", [65, 1000, 4096, 5001])
@pytest.mark.parametrize("seed", range(5))
def test_a_long_curve_has_its_ends_and_each_spike(num: int, seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.random() for _ in range(num)]
    spikes = {chance.randrange(num) for _ in range(8)}
    for step in spikes:
        values[step] = chance.choice([-1.0, 2.0]) * (1 + chance.random())
    made = curve(values, 64)
    steps = [point.step for point in made.points]
    assert (made.num, steps) == (num, sorted(set(steps)))
    assert len(steps) <= 2 * 64 + 2
    assert max(late - early for early, late in itertools.pairwise(steps)) <= 4 * num / 64
    assert {0, num - 1, values.index(min(values)), values.index(max(values))} <= set(steps)
    assert all(value == values[step] for step, value, _ in made.points)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "honed.db")


def tell(database: Database, *events: Event) -> None:
    database.apply(JOB, Reading(list(events), 10, 0))


def told(database: Database) -> Story:
    path = database.path
    curves = story._curves(path, 1)
    events = history.newest_events(path, 1, story._NEEDED, max_chars=story.MAX_EVENT_CHARS)
    examples, num_examples = history.examples(path, 1, num=story.MAX_SAMPLES, num_rows=story.MAX_ROUNDS)
    num_events = history.num_events(path, 1, story.ELSEWHERE)
    return Story(JOB, {}, curves, examples, num_examples, events, num_events, "", path)  # type: ignore[typeddict-item]


def test_curves_come_in_the_order_of_their_steps_and_a_repeated_step_once(database: Database) -> None:
    tell(
        database,
        Event("evaluation", 1.0, {"step": 0, "metrics": {"eval_loss": 4.0, "z": 1.0}}),
        *(Event("step", float(step), {"step": step, "loss": 1.0, "grad_norm": 2.0}) for step in (1, 2, 3, 2, 3)),
        Event("step", 9.0, {"step": 3, "loss": 0.5}),
    )
    found = told(database)
    assert list(found.curves) == ["eval_loss", "z", "loss", "grad_norm"]
    assert found.points("loss") == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert found.points("nothing") == []
    assert report._sampled(found) == ""


def test_each_metric_of_a_step_has_a_chart_with_that_of_the_evaluations(database: Database) -> None:
    for step in (1, 2):
        metrics = {"loss": 1.0, "mean_token_accuracy": step / 4, "unheard_of": 3.0}
        tell(database, Event("step", 1.0, {"step": step, **metrics}))
        tell(database, Event("evaluation", 1.0, {"step": step, "metrics": {"eval_mean_token_accuracy": step / 8}}))
    drawn = {str(item) for item in report._plots(told(database), is_served=False)}
    [accuracy] = [item for item in drawn if "mean token accuracy" in item]
    assert "training from 0.25 to 0.5" in accuracy
    assert "evaluation from 0.125 to 0.25" in accuracy
    assert any("unheard of" in item for item in drawn)


def test_a_sample_is_said_and_has_every_evaluation(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "MAX_STRETCHES", 64)
    evaluations = [Event("evaluation", 1.0, {"step": step, "metrics": {"eval_loss": 1.0}}) for step in range(500)]
    tell(database, *(Event("step", 1.0, {"step": step, "loss": 1 / (step + 1)}) for step in range(2000)), *evaluations)
    found = told(database)
    num = len(found.points("loss"))
    assert num < 200
    assert found.points("loss")[-1] == (1999, 1 / 2000)
    assert len(found.points("eval_loss")) == 500
    assert report._sampled(found).startswith(f"A sample of {num + 500:,} of 2,500 values: ")


def test_many_long_curves_share_the_room_of_a_page(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "MAX_ALL_STRETCHES", 210)
    metrics = [{f"m{number}": float(step == 77) for number in range(9)} for step in range(300)]
    tell(database, *(Event("evaluation", 1.0, {"step": step, "metrics": each}) for step, each in enumerate(metrics)))
    tell(database, *(Event("step", 1.0, {"step": step, "loss": 1.0}) for step in range(300)))
    found = told(database)
    assert len(found.points("loss")) == 300
    for number in range(9):
        points = found.points(f"m{number}")
        assert len(points) <= 2 * 20 + 2
        assert {(0, 0.0), (77, 1.0), (299, 0.0)} <= set(points)


def test_more_metrics_than_a_page_has_leave_the_loss_on_it(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "MAX_CURVES", 8)
    monkeypatch.setattr(report, "MAX_CURVES", 8)
    many = {f"a{number}": 1.0 for number in range(50)}
    tell(database, Event("evaluation", 1.0, {"step": 1, "metrics": {**many, "eval_loss": 1.0}}))
    tell(database, Event("step", 1.0, {"step": 1, "loss": 1.0}))
    read, pages = history._page, list[str]()

    def counted(path: Path, sql: str, *arguments: Any, **keys: Any) -> list[Any]:
        pages.append(sql)
        return read(path, sql, *arguments, **keys)

    monkeypatch.setattr(history, "_page", counted)
    found = told(database)
    assert {"loss", "eval_loss", "a0"} <= set(found.curves)
    assert len(found.curves) <= 8
    assert len(pages) < 50  # the others' names are not even read


def test_of_more_metrics_than_a_page_has_it_reads_but_its_own_and_the_result_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "MAX_CURVES", 8)
    layout = Layout(tmp_path)
    spool = Spool(layout)
    job = replace(JOB, state=State.SUCCEEDED)
    spool.entries.path(1, State.SUCCEEDED).write_bytes(job.to_json())
    result = layout.job(1).attempt(1).result_path
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"metrics": {"train_loss": 0.5, "a40": 3.0}}))
    layout.database_path.parent.mkdir(parents=True, exist_ok=True)
    database = Database(layout.database_path)
    many = {f"a{number}": 1.0 for number in range(50)}
    tell(database, Event("evaluation", 1.0, {"step": 1, "metrics": {**many, "eval_loss": 1.0}}))
    found = story.gather(spool, layout, job)
    assert set(found.shown["metrics"]) == {*found.curves, "train_loss", "a40"}
    assert found.shown["metrics"]["eval_loss"] == 1.0
    database.close()
    spool.close()


def test_examples_have_their_first_and_last_predictions_and_say_how_many_there_are(database: Database) -> None:
    for step in range(100):
        rows = [{"sample_index": index, "prediction": f"{step}/{index}"} for index in range(30)]
        tell(database, Event("predictions", 1.0, {"step": step, "rows": rows}))
    tell(database, Event("predictions", 1.0, {"step": 100, "rows": [{"sample_index": 40, "prediction": "late"}]}))
    found = told(database)
    assert found.num_examples == 31
    assert [each.sample_index for each in found.examples] == list(range(20))
    for each in found.examples:
        steps = [row["step"] for row in each.rows]
        assert (each.num_all, len(steps), steps[0], steps[-1]) == (100, 12, 0, 99)
        assert steps == [round(n * 99 / 11) for n in range(12)]
        assert [row["prediction"] for row in each.rows] == [f"{step}/{each.sample_index}" for step in steps]
    assert [row["prediction"] for row in history.last_predictions(database.path, 1, num=9, max_chars=99)] == ["late"]


def test_events_are_the_newest_of_each_kind(database: Database) -> None:
    tell(database, Event("started", 1.0, {"versions": {"honed": "1"}}), Event("thinned", 1.0, {"metrics": 3}))
    tell(database, *(Event(f"a{number}", 1.0, {"words": "x" * 100}) for number in range(history.MAX_KINDS + 9)))
    tell(database, *(Event("log", 1.0, {"level": "info", "message": str(number)}) for number in range(3000)))
    found = told(database)
    assert found.last("started")["versions"] == {"honed": "1"}
    assert found.last("thinned")["metrics"] == 3
    logged = [event["message"] for event in found.events if event["event"] == "log"]
    assert logged == [str(number) for number in range(3000 - history.PAGE_ROWS, 3000)]
    assert found.num_events == 3000 + history.MAX_KINDS + 9 + 1
    little = history.newest_events(database.path, 1, ("started", "log"), max_chars=1000)
    assert {"started", "log"} <= {event["event"] for event in little}
    assert len(little) < 50
