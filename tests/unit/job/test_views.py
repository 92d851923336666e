"""The views of honed.db: a stable interface for other tools."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

from honed.job import query, views
from honed.job.database import Database
from honed.job.event import Event, Reading
from honed.job.job import Attempt, Job, State
from honed.job.query import NO_PROGRESS
from honed.job.shape import Score

#: The contract: a name or a column that is missing here breaks somebody's dashboard.
CONTRACT = {
    "jobs_v1": [
        "id",
        "name",
        "state",
        "outcome",
        "priority",
        "submitted_at",
        "step",
        "num_steps",
        "epoch",
        "loss",
        "eta_sec",
    ],
    "metrics_v1": ["job_id", "job_name", "attempt", "step", "epoch", "name", "value", "created_at"],
    "predictions_v1": [
        "job_id",
        "job_name",
        "user_id",
        "step",
        "epoch",
        "sample_index",
        "prompt",
        "ground_truth",
        "prediction",
        "is_exact",
        "created_at",
    ],
}
JOB = Job(
    id=7,
    name="capitals",
    submitted_at=0,
    source="j",
    uid=1000,
    output_dir="/o",
    attempts=(Attempt(number=1, backend="transformers", started_at=0),),
)


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """Query as another tool would: read-only, through the views alone."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute(sql).fetchall()


def test_the_views_have_the_columns_that_were_promised(tmp_path: Path) -> None:
    Database(tmp_path / "honed.db").close()
    for name, columns in CONTRACT.items():
        with sqlite3.connect(tmp_path / "honed.db") as db:
            cursor = db.execute(f"SELECT * FROM {name}")
        assert [column[0] for column in cursor.description][: len(columns)] == columns
    assert {each.name for each in views.VIEWS} >= set(CONTRACT)
    for each in views.VIEWS:
        assert f"## {each.name}\n" in views.page()


def test_a_job_is_seen_with_its_progress_its_figures_once_and_its_predictions(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    database = Database(path)
    database.put_job(JOB)
    again = dataclasses.replace(JOB, attempts=(*JOB.attempts, dataclasses.replace(JOB.attempt, number=2)))
    for job, steps in ((JOB, (1, 2, 3)), (again, (3, 4))):  # killed after step 3, and gone on from the one before
        events = [
            Event(
                "step", 1.0, {"step": step, "num_steps": 4, "epoch": step / 4, "loss": job.attempt.number + step / 10}
            )
            for step in steps
        ]
        database.apply(job, Reading(events, 10, 0))
    answers = [
        {"sample_index": 0, "prompt": "p", "ground_truth": "Rome", "prediction": "<think>\n</think>\n\nRome\n"},
        {"sample_index": 1, "prompt": "q", "ground_truth": "Oslo", "prediction": None},
    ]
    database.apply(again, Reading([Event("predictions", 1.0, {"step": 4, "epoch": 1.0, "rows": answers})], 20, 0))
    assert rows(path, "SELECT name, step, num_steps, loss FROM jobs_v1") == [("capitals", 4, 4, 2.4)]
    assert rows(
        path, "SELECT step, value FROM metrics_v1 WHERE job_name = 'capitals' AND name = 'loss' ORDER BY step"
    ) == [(1, 1.1), (2, 1.2), (3, 2.3), (4, 2.4)]
    assert rows(path, "SELECT sample_index, is_exact, user_id FROM predictions_v1") == [(0, 1, "1000"), (1, 0, "1000")]


def test_a_database_of_an_earlier_honed_gets_the_views(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    Database(path).close()
    with sqlite3.connect(path) as db:
        db.execute("DROP VIEW metrics_v1")
    Database(path).close()
    assert rows(path, "SELECT * FROM metrics_v1") == []


def test_figures_of_a_part_of_the_rows_are_no_score() -> None:
    score: Score = {"name": "eval_loss", "value": 1.5}
    late = dataclasses.replace(JOB, state=State.FAILED, outcome="time_limit")
    assert query.summary(late, NO_PROGRESS, score)["score"] is None
    assert query.summary(late, {**NO_PROGRESS, "step": 4.0}, score)["score"] == score  # a training: that was whole
    assert query.summary(JOB, NO_PROGRESS, score)["score"] == score
