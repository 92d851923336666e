"""honed, or its machine, goes down between a job's move to running/ and its worker's begin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, Instance

from honed.job.job import State, Stop
from waiting import wait_for


class UnreachedHoned(Instance):
    command = (sys.executable, str(HERE / "unreachedhoned.py"))

    def cut(self) -> None:
        """Start honed, which goes down as it starts a worker."""
        self.start()
        assert self.wait() == 137


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[UnreachedHoned]:
    made = UnreachedHoned(tmp_path)
    (tmp_path / "cut").write_text("")
    yield made
    made.end()


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_start_that_reached_no_worker_costs_no_attempt(cut: UnreachedHoned, when: str) -> None:
    (cut.root / "cut").write_text(when)
    cut.drop("succeed", retry={"max_attempts": 1})
    for number in (1, 2):
        cut.cut()
        job = cut.job("succeed")
        assert job is not None
        assert (job.state, job.num_unreached, len(job.attempts)) == (State.RUNNING, number, 1)
    (cut.root / "cut").unlink()
    assert cut.drain() == 0
    done = cut.job("succeed")
    assert done is not None
    assert (done.state, done.num_unreached, done.num_failures, len(done.attempts)) == (State.SUCCEEDED, 0, 0, 1)
    assert len(cut.starts(done)) == 1


def test_a_job_of_which_three_starts_in_a_row_reached_no_worker_is_failed(cut: UnreachedHoned) -> None:
    cut.drop("succeed", retry={"max_attempts": 100})
    for _ in range(3):
        cut.cut()
    (cut.root / "cut").unlink()
    cut.drop("succeed.other")
    assert cut.drain() == 0
    failed, other = cut.job("succeed"), cut.job("succeed.other")
    assert failed is not None
    assert other is not None
    assert (failed.state, failed.outcome, other.state) == (State.FAILED, "environment_invalid", State.SUCCEEDED)
    assert failed.error is not None
    assert "3 starts in a row reached no worker" in failed.error["message"]
    cut.start()
    assert cut.client.ask("requeue", id=str(failed.id))["state"] == "queued"
    done = cut.wait_state("succeed", State.SUCCEEDED)
    assert (len(done.attempts), done.num_unreached) == (2, 0)


def test_a_job_that_was_to_stop_is_put_back_and_starts_at_its_turn(cut: UnreachedHoned) -> None:
    cut.drop("succeed")
    cut.cut()
    job = cut.job("succeed")
    assert job is not None
    cut.spool.update(job, stop=Stop.HOLD)
    (cut.root / "cut").unlink()
    cut.start()
    held = cut.wait_state("succeed", State.HELD)
    assert (held.attempts, held.num_unreached) == ((), 1)
    cut.client.ask("release", id=str(job.id))
    done = cut.wait_state("succeed", State.SUCCEEDED)
    assert (len(done.attempts), done.attempt.first_start, done.num_unreached) == (1, 2, 0)
    assert wait_for(lambda: len(cut.starts(done)) == 1, what="its only start")
