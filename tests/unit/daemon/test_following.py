"""The events of a running job: in bites, each once, whoever holds the database meanwhile."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from honed.daemon import following, rebuild
from honed.daemon.following import MAX_LOCKED_SEC, Following
from honed.job import event
from honed.job.database import Database
from honed.job.job import State
from honed.job.spool import Spool
from honed.system import durable
from honed.system.layout import Layout
from zoo import jobs

JOB = replace(jobs.JOB, state=State.RUNNING)


class Scene:
    """A running job, its events and honed.db."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        self.path = Path(str(self.layout.job(1).attempt(1).events_path))
        self.path.parent.mkdir(parents=True)
        self.layout.state_dir.mkdir(parents=True, exist_ok=True)
        self.database = Database(self.layout.database_path)
        self.database.put_job(JOB)
        self.now = 0.0
        self.following = Following(JOB, 0, self.layout, self.database, lambda: None, clock=lambda: self.now)

    def write(self, *events: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps({"time": 1.0, **each}) + "\n" for each in events)

    def write_steps(self, count: int) -> None:
        self.write(*({"event": "step", "step": number, "loss": 0.5} for number in range(count)))

    def steps(self) -> list[int]:
        with sqlite3.connect(self.layout.database_path) as db:
            return [step for (step,) in db.execute("SELECT step FROM metrics WHERE name = 'loss' ORDER BY rowid")]

    def lock(self) -> sqlite3.Connection:
        """Hold the lock that a writer needs."""
        other = sqlite3.connect(self.layout.database_path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return other


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.database.close()


def test_a_backlog_is_read_over_several_turns_each_event_once(scene: Scene) -> None:
    scene.write_steps(10_000)
    num_turns = 0
    while scene.following.read(JOB, sec=0.0):
        num_turns += 1
        assert scene.following.offset <= num_turns * event.BITE_BYTES
    assert not scene.following.has_more
    assert num_turns >= scene.path.stat().st_size / event.BITE_BYTES
    assert scene.steps() == list(range(10_000))


def test_with_time_enough_all_is_read_and_nothing_is_left(scene: Scene) -> None:
    scene.write_steps(5_000)
    assert scene.following.read(JOB) == scene.path.stat().st_size
    assert not scene.following.has_more


def test_a_line_longer_than_a_bite_is_read_whole(scene: Scene) -> None:
    scene.write({"event": "log", "message": "x" * 3 * event.BITE_BYTES})
    scene.write_steps(1)
    while scene.following.read(JOB, sec=0.0):
        pass
    assert scene.steps() == [0]
    with sqlite3.connect(scene.layout.database_path) as db:
        assert db.execute("SELECT count(*) FROM events WHERE kind = 'log'").fetchone() == (1,)


def test_of_many_evaluations_read_together_the_last_one_alone_is_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene.write(*({"event": "evaluation", "step": number, "metrics": {"eval_loss": 1.0}} for number in range(50)))
    scene.following.read(JOB)
    assert [each.message for each in caplog.records if "evaluated" in each.message] == [
        "job 1 (j): evaluated at step 49: eval_loss 1"
    ]
    assert len(scene.database.evaluations([1], range(100))[1]) == 50


def test_the_last_events_are_read_over_several_turns_too(scene: Scene) -> None:
    scene.write_steps(10_000)
    answers = []
    while not answers or answers[-1] is None:
        answers.append(scene.following.read_rest(JOB, sec=0.0))
    assert len(answers) > 3
    assert answers[-1] is True
    assert scene.steps() == list(range(10_000))


def test_the_end_of_honed_leaves_the_last_events_of_a_flood_to_the_next_start(scene: Scene) -> None:
    scene.write_steps(10_000)
    assert scene.following.read_rest(JOB, sec=0.0, max_sec=5.0) is None
    scene.now += 6.0
    assert scene.following.read_rest(JOB, sec=0.0, max_sec=5.0) is False
    assert not scene.following.has_more
    before = scene.steps()
    assert before == list(range(len(before)))
    assert len(before) < 10_000
    assert rebuild.count(scene.database, scene.layout, JOB, 1)
    assert scene.steps() == list(range(10_000))


def test_beyond_a_limit_the_last_events_are_left_once_however_often_the_end_is_tried(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end itself may fail again and again, for a full disk: each time as many events would be read."""
    monkeypatch.setattr(following, "MAX_REST_BYTES", 1)
    scene.write_steps(20_000)
    assert scene.following.read_rest(JOB, sec=0.0) is True
    offset = scene.following.offset
    assert [scene.following.read_rest(JOB, sec=0.0) for _ in range(3)] == [True] * 3
    assert (scene.following.offset, scene.following.has_more) == (offset, False)
    assert 0 < offset < scene.path.stat().st_size
    assert caplog.text.count("were not counted") == 1


def test_after_a_fallback_the_last_events_of_the_other_worker_are_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MAX_REST_BYTES", 1)
    scene.write_steps(20_000)
    assert scene.following.read_rest(JOB, sec=0.0) is True
    monkeypatch.undo()
    scene.following.record_fallback(JOB)
    while scene.following.read_rest(JOB, sec=1.0) is None:
        pass
    assert scene.steps() == list(range(20_000))


def test_the_last_step_is_known_though_an_earlier_honed_has_read_it(scene: Scene) -> None:
    assert scene.following.last_step(JOB) == 0
    scene.write_steps(8)
    scene.following.read(JOB)
    offset = scene.following.offset
    after = Following(JOB, offset, scene.layout, scene.database, lambda: None, clock=lambda: scene.now)
    assert after.read_rest(JOB, sec=1.0)
    assert (scene.following.last_step(JOB), after.last_step(JOB)) == (7, 7)


def test_a_lock_is_waited_for_and_the_last_events_are_not_lost(scene: Scene) -> None:
    scene.write_steps(3)
    other = scene.lock()
    assert scene.following.read_rest(JOB, sec=1.0) is None
    assert not scene.following.has_more  # else the loop would not sleep meanwhile
    other.execute("ROLLBACK")
    assert scene.following.read_rest(JOB, sec=1.0) is True
    assert scene.steps() == [0, 1, 2]


def test_a_lock_without_end_holds_up_no_end_and_its_events_are_counted_later(scene: Scene, tmp_path: Path) -> None:
    scene.write_steps(3)
    other = scene.lock()
    assert scene.following.read_rest(JOB, sec=1.0) is None
    scene.now += MAX_LOCKED_SEC
    assert scene.following.read_rest(JOB, sec=1.0) is False
    other.execute("ROLLBACK")
    # The job ends, and somebody changes it before its events are in: it still counts as behind.
    scene.database.uncounted.add(1)
    ended = replace(JOB, state=State.SUCCEEDED)
    spool = Spool(scene.layout)
    queued = replace(JOB, state=State.QUEUED)
    durable.finish(spool.adding(queued))
    spool.move(spool.move(queued, State.RUNNING), State.SUCCEEDED)
    scene.database.put_job(ended)
    assert scene.database.states() == {1: "running"}
    assert scene.database.is_behind
    while scene.database.is_behind:
        rebuild.catch_up(scene.database, spool, scene.layout, is_late=lambda: True)
    assert scene.steps() == [0, 1, 2]
    assert scene.database.states() == {1: "succeeded"}
    spool.close()


def test_the_open_connection_waits_a_moment_only(scene: Scene) -> None:
    assert scene.database._db.execute("PRAGMA busy_timeout").fetchone() == (100,)
