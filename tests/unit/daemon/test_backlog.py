"""The queued and held jobs follow the spool's catalog: what they wait for, and what a failed change leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.backlog import Backlog
from honed.daemon.shares import Shares
from honed.job.arrival import Arrivals
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.job.usage import Usage
from honed.spec.config import Config
from honed.system import durable
from honed.system.error import InternalError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath


class Desk:
    """A spool, and the backlog that follows it."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.spool = Spool(Layout(path))
        self.spool.recover()
        self.database = Database(Layout(path).database_path)
        self.backlog = Backlog(
            self.spool,
            self.database,
            Shares(Usage(Layout(path).usage_path), Config, lambda: ()),
            has_room=lambda _job: False,
            clock=lambda: self.now,
        )
        self.backlog.recover()

    def admit(self, **fields: Any) -> Job:
        path = self.spool.incoming_dir / "a.json"
        path.write_text("{}")
        arrivals = Arrivals(self.spool)
        claim = arrivals.claim(PersonPath.of(path, 1))
        assert claim is not None
        arrivals.copy(claim, max_bytes=100)
        common: dict[str, Any] = {
            "id": claim.id,
            "name": f"n{claim.id}",
            "submitted_at": 1.0,
            "source": claim.name,
            "uid": 0,
            "output_dir": f"/o/{claim.id}",
            "num_gpus": 0,
        }
        return arrivals.admit(Job(**{**common, **fields}), claim, PlanFile({}))

    def ready(self) -> list[int]:
        self.backlog.look_again()
        return [job.id for job in self.backlog.ready(for_gpu=[True, False], levels={})]

    def end(self, number: int, state: State) -> Job:
        job = self.spool.job(number)
        assert job is not None
        return self.spool.move(self.spool.move(job, State.RUNNING), state)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.database.close()
    desk.spool.close()


def test_the_most_urgent_come_first_then_the_first_to_come(desk: Desk) -> None:
    numbers = [desk.admit(priority=priority, num_gpus=gpus).id for priority, gpus in ((0, 0), (2, 1), (0, 1), (2, 0))]
    assert desk.ready() == [numbers[1], numbers[3], numbers[0], numbers[2]]
    assert [job.id for job in desk.backlog.ready(for_gpu=[False], levels={})] == [numbers[3], numbers[0]]


def test_a_job_that_started_is_here_no_more_and_is_here_again_when_it_is_put_back(desk: Desk) -> None:
    job = desk.admit()
    running = desk.spool.move(job, State.RUNNING)
    assert list(desk.backlog.jobs()) == []
    again = desk.spool.move(running, State.QUEUED)
    desk.backlog.delay(again, 10.0)
    assert desk.ready() == [job.id]
    assert (desk.backlog.delay_sec(again), desk.backlog.next_retry_sec()) == (10.0, 10.0)
    desk.backlog.end_delay(job.id)
    assert desk.backlog.delay_sec(again) <= 0


def test_a_job_waits_for_those_it_depends_on_and_is_held_if_one_fails(desk: Desk) -> None:
    first = desk.admit()
    second = desk.admit(depends_on=(str(first.id),))
    assert desk.ready() == [first.id]
    failed = desk.end(first.id, State.FAILED)
    assert desk.ready() == []
    held = desk.backlog.get(second.id)
    assert held is not None
    assert (held.state, held.held_for, desk.backlog.num_held) == (State.HELD, first.id, 1)
    assert desk.backlog.all_wait_for_a_person()
    desk.spool.move(failed, State.QUEUED)
    assert desk.ready() == [first.id]
    assert "was requeued" in (desk.backlog.get(second.id) or held).error["message"]  # type: ignore[index]
    desk.end(first.id, State.SUCCEEDED)
    assert desk.ready() == [second.id]


def test_a_deferred_job_is_to_be_planned_once_its_inputs_are_there(desk: Desk) -> None:
    maker = desk.admit()
    user = desk.admit(depends_on=(str(maker.id),), inputs={"m": maker.id}, is_deferred=True)
    assert desk.backlog.unplanned() == []
    made = desk.end(maker.id, State.SUCCEEDED)
    assert [job.id for job in desk.backlog.unplanned()] == [user.id]
    desk.spool.update(user, is_deferred=False)
    assert desk.ready() == [user.id]
    desk.backlog.defer_users_of(made)
    assert desk.ready() == []
    assert [job.id for job in desk.backlog.unplanned()] == [user.id]


def test_a_job_that_waits_for_room_is_left_to_a_person(desk: Desk) -> None:
    job = desk.admit()
    assert not desk.backlog.is_short(job)
    short = desk.spool.update(job, needs_bytes=1)
    assert (desk.ready(), desk.backlog.num_short, desk.backlog.is_short(short)) == ([job.id], 1, True)
    assert desk.backlog.all_wait_for_a_person()


def test_a_job_whose_failure_cannot_be_written_stays_in_the_queue(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_keys: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job = desk.admit()
    assert desk.ready() == [job.id]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(durable, "write_beside", full)
        desk.backlog.fail(job, InternalError("no", hint=""))
    assert (desk.ready(), list(desk.backlog.jobs())) == ([job.id], [job])
    desk.backlog.fail(job, InternalError("no", hint=""))
    assert (desk.ready(), list(desk.backlog.jobs()), desk.backlog.num_queued) == ([], [], 0)
