"""The choice of the next job: what a parked job changes for others, and what a pass over a long queue costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.daemon.availability import Availability
from honed.daemon.dispatch import MAX_LOOKS, Selection
from honed.daemon.obstacles import Obstacles
from honed.daemon.placement import Placement
from honed.daemon.plans import Plans
from honed.job.job import Attempt, Job, State
from honed.spec.config import Config
from honed.system.device import Device
from unit.daemon.test_shares import House

#: One GPU, which is taken.
GPU = Device("cuda", "GPU 0", 0, "GPU-0", (9, 0), 80 * 2**30, 80 * 2**30)


class _Attempts:
    """One job runs on the GPU, and takes time."""

    is_stopping = False

    def __init__(self) -> None:
        attempt = Attempt(1, "transformers", 0.0, device="GPU-0")
        self.running: dict[int, Any] = {99: SimpleNamespace(job=SimpleNamespace(id=99, attempt=attempt))}


class _Nothing:
    """Nothing is being planned again."""

    numbers: frozenset[int] = frozenset()
    has_room = True

    @property
    def replanning(self) -> _Nothing:
        return self


class _Staged:
    """Staged workers that are to end."""

    def __init__(self) -> None:
        self.ending: set[int] = set()
        self.stuck: set[int] = set()

    def is_ending(self, job_id: int) -> bool:
        return job_id in self.ending

    def is_stuck(self, job_id: int) -> bool:
        return job_id in self.stuck


class Room(House):
    """The queue of several users, with the real choice of the next job."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        super().__init__(path, config)
        self.staged = _Staged()
        staged: Any = self.staged
        self.fence = SimpleNamespace(fault="")
        fence: Any = self.fence
        self.attempts = _Attempts()
        attempts: Any = self.attempts
        nothing: Any = _Nothing()
        availability = Availability(self.spool, lambda: self.config, now=lambda: 0.0)
        placement = Placement(
            path, lambda: self.config, attempts, availability, probe=lambda _gpus: [GPU], clock=lambda: self.now
        )  # type: ignore[arg-type]
        plans = Plans(self.spool, self.backlog, placement, nothing, nothing)
        obstacles = Obstacles(
            self.spool, lambda: self.config, attempts, self.backlog, plans, placement, self.shares, fence
        )
        self.selection = Selection(self.spool, attempts, self.backlog, plans, placement, self.shares, staged, obstacles)

    def startable(self) -> list[int]:
        return [job.uid for job in self.selection.startable()]


Made = Callable[..., Room]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Made]:
    made: list[Room] = []

    def make(**config: Any) -> Room:
        made.append(Room(tmp_path / str(len(made)), config))
        return made[-1]

    yield make
    for each in made:
        each.database.close()
        each.spool.close()


def limited(room: Room, _job: Job) -> None:
    room.config = Config.model_validate({"users": {"1": {"max_running": 0}}})


def delayed(room: Room, job: Job) -> None:
    room.backlog.delay(job, 1000.0)


def short(room: Room, job: Job) -> None:
    room.spool.update(job, needs_bytes=2**40)


def held(room: Room, job: Job) -> None:
    room.spool.move(job, State.HELD)


@pytest.mark.parametrize("park", [limited, delayed, short, held])
def test_a_parked_job_of_a_user_who_has_used_nothing_saves_nothing_up_for_others(room: Made, park: Any) -> None:
    """While it counted as waiting, its user's level, 0, was the floor for ever: whoever came back after a month started
    there, before all who had stayed."""
    fair = room()
    parked = fair.admit(uid=1, num_gpus=1)
    fair.admit(uid=2, num_gpus=1)
    fair.startable()
    park(fair, parked)
    fair.use(2, 1000.0)
    fair.startable()
    fair.admit(uid=3, num_gpus=1)
    fair.startable()
    assert fair.shares.usage.level(3) == 1000.0
    assert fair.shares.usage.level(1) == 0.0


def test_a_user_whose_staged_worker_ends_loses_nothing_by_that(room: Made) -> None:
    fair = room()
    waits = fair.admit(uid=1, num_gpus=1)
    fair.admit(uid=2, num_gpus=1)
    fair.startable()
    fair.use(2, 1000.0)
    fair.staged.ending.add(waits.id)
    assert fair.startable() == [2]
    fair.staged.ending.clear()
    assert fair.startable() == [1, 2]
    assert fair.shares.usage.level(1) == 0.0


def test_a_job_whose_staged_worker_ends_keeps_its_turn(room: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    fair = room()
    first, second = fair.admit(uid=1, num_gpus=1), fair.admit(uid=1, num_gpus=1)
    fair.attempts.running.clear()
    monkeypatch.setattr(Placement, "holds_on", lambda _self, _job, _device: True)

    def chosen() -> int | None:
        found = fair.selection.next_that_fits()
        return found.job.id if found is not None else None

    assert chosen() == first.id
    fair.staged.ending.add(first.id)
    assert chosen() is None
    assert fair.selection.could_start(first)
    fair.spool.update(fair.spool.job(first.id), num_staged=1)
    assert fair.selection.could_start(first)
    fair.staged.stuck.add(first.id)
    assert chosen() == second.id


def test_a_pass_asks_each_users_limits_once_and_looks_at_few_jobs(room: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    fair = room()
    users = (1, 2, 3)
    for number in range(60):
        fair.admit(uid=users[number % 3], num_gpus=1)
    asked: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            asked[name] += 1
            return real(*arguments)

        return call

    placement = fair.selection._placement
    monkeypatch.setattr(fair.shares, "obstacle", counted("limits", fair.shares.obstacle))
    monkeypatch.setattr(fair.shares, "levels", counted("levels", fair.shares.levels))
    monkeypatch.setattr(placement, "obstacle", counted("obstacles", placement.obstacle))
    monkeypatch.setattr(fair.shares, "place", counted("places", fair.shares.place))
    monkeypatch.setattr(fair.shares, "turn", counted("turns", fair.shares.turn))
    next(fair.selection.startable())
    assert asked.pop("places") == 60  # each job's conditions, once
    asked.clear()
    next(fair.selection.startable())
    assert asked == {"limits": 3, "levels": 1, "obstacles": 3, "turns": 3}
    asked.clear()
    assert len(fair.startable()) == 60
    assert asked == {"limits": 3, "levels": 1, "obstacles": 3, "turns": 60}
    assert 3 * MAX_LOOKS < 60  # what a pass looks at where no job of a user can start


def test_what_keeps_all_jobs_from_starting_is_what_is_shown(room: Made) -> None:
    fair = room()
    job = fair.admit(uid=1, num_gpus=1)
    fair.attempts.running.clear()

    def shown() -> str:
        found = fair.selection.waits_for(job.id)
        assert found is not None
        assert fair.selection.could_start(job) is (found["reason"] == "turn")
        return found["reason"]

    assert shown() == "turn"
    fair.fence.fault = "running workers cannot be listed"
    assert shown() == "environment"
    fair.fence.fault = ""
    fair.attempts.is_stopping = True
    assert shown() == "paused"
    fair.attempts.is_stopping = False
    fair.spool.pause(True)
    assert shown() == "paused"
