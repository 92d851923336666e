"""honed.db, made again from the entries and the events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from honed.daemon.rebuild import rebuild
from honed.job.database import Database
from honed.job.job import Attempt, Fallback, Job, State
from honed.job.spool import Spool
from honed.system.layout import Layout


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
    first = {job.id: replace(job, attempts=job.attempts[:1]) for job in spool.all_jobs().values()}
    assert [number for number, job in first.items() if database.has_event(job, "fallback")] == [2]
    assert database.num_steps(3) == 9
    database.close()
