"""The choice of what is staged: what is next for a busy device, one at a time, and nothing that cannot start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.ahead import LOOK_INTERVAL_SEC, REPLACE_AFTER_SEC, STEP_BACK_SEC, Ahead
from honed.job.job import Job
from honed.spec.config import Config
from honed.system import usage
from honed.system.device import cpu
from honed.system.layout import Layout
from unit.daemon.test_staged import Place
from waiting import wait_for


class _Queue:
    """Jobs in the order in which they start."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def startable(self) -> Iterator[Job]:
        return iter(self.jobs)

    def is_ready(self, job_id: int) -> bool:
        return any(job.id == job_id for job in self.jobs)


class _Placement:
    """One device, that suits all jobs."""

    def all(self) -> list[Any]:
        return [cpu()]

    def suits(self, _job: Job, _device: Any) -> bool:
        return True


class Chooser(Place):
    """An instance with a queue of which job 1 is staged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config = Config.model_validate({"jobs": {"stage_ahead": True, "stage_min_available_bytes": 0}})
        self.queue = _Queue()
        self.queue.jobs = [self.job()]
        attempts: Any = self.attempts
        placement: Any = _Placement()
        self.ahead = Ahead(
            Layout(path), self.staged, lambda: self.config, attempts, placement, group="", clock=lambda: self.now
        )

    def tend(self, after_sec: float = LOOK_INTERVAL_SEC) -> None:
        self.now += after_sec
        self.ahead.tend(self.queue, may_stage=True)

    @property
    def is_kept(self) -> bool:
        return self.job().staged_at is not None


@pytest.fixture
def chooser(tmp_path: Path) -> Iterator[Chooser]:
    made = Chooser(tmp_path)
    yield made
    made.kill()
    made.database.close()
    made.spool.close()


def test_a_job_that_waits_for_something_else_is_not_kept_staged(chooser: Chooser) -> None:
    chooser.tend()
    assert chooser.is_kept
    chooser.queue.jobs = []
    chooser.tend()
    assert not chooser.is_kept


def test_a_worker_that_still_prepares_is_replaced_as_any_other(chooser: Chooser) -> None:
    chooser.queue.jobs = [chooser.add(2), *chooser.queue.jobs]
    chooser.tend()
    assert chooser.is_kept
    chooser.tend(REPLACE_AFTER_SEC)
    assert not chooser.is_kept


def test_a_worker_that_hangs_while_it_prepares_ends_and_its_job_is_not_staged_again(chooser: Chooser) -> None:
    chooser.tend(chooser.config.jobs.stall_timeout_sec - 1)
    assert chooser.is_kept
    chooser.tend(2)
    assert not chooser.is_kept
    assert chooser.staged.has_given_up(chooser.job())


@pytest.mark.parametrize("hostile", ["[" * 4000, "[]", '{"phase": {}}', "\xff"])
def test_a_pulse_that_is_none_stops_nothing(chooser: Chooser, hostile: str) -> None:
    chooser.layout.job(1).attempt(1).pulse_path.write_text(hostile)
    chooser.tend()
    assert chooser.is_kept


def test_after_memory_was_short_nothing_is_staged_for_a_while(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]
    monkeypatch.setattr(usage, "available_bytes", lambda _group="": left[0])
    chooser.config = Config.model_validate({"jobs": {"stage_ahead": True, "stage_min_available_bytes": 100}})
    chooser.tend()
    assert not chooser.is_kept
    chooser.turn()
    wait_for(lambda: chooser.runner.live() == [], what="no worker lives")
    chooser.turn()
    looked: list[int] = []
    monkeypatch.setattr(chooser.ahead, "_stage_next", lambda _queue: looked.append(1))
    left[0] = 1000
    chooser.queue.jobs = [chooser.job()]
    chooser.attempts.running[9] = Any  # type: ignore[assignment]
    chooser.tend()
    assert not looked
    chooser.tend(STEP_BACK_SEC)
    assert looked
    chooser.attempts.running.clear()
