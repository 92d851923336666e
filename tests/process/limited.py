"""A honed whose real workers have a memory limit, and the check of a job that went down the ladder because of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, Instance

import warm
from honed.job.job import Job, State


class LimitedInstance(Instance):
    """A daemon whose real workers have a memory limit."""

    command = (sys.executable, str(HERE / "limitedhoned.py"))

    def __init__(self, root: Path) -> None:
        warm.address("worker")
        super().__init__(root)

    def run(self, num_bytes: int) -> None:
        self.start("--bytes", str(num_bytes), "--drain")
        assert self.wait(deadline_sec=800.0) == 0


def check_stepped_down(instance: Instance, name: str, *texts: str) -> Job:
    """Check that the job succeeded after these steps, that each was logged, and that no failure was counted."""
    job = instance.job(name)
    assert job is not None
    assert job.state is State.SUCCEEDED, instance.log
    assert [attempt.outcome for attempt in job.attempts] == [*["out_of_memory"] * len(texts), "succeeded"]
    assert job.num_failures == 0
    assert [each.text for each in job.adjustments] == list(texts)
    for text in texts:
        assert f"out of memory; the next attempt continues with {text}" in instance.log
    return job


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[LimitedInstance]:
    made = LimitedInstance(tmp_path)
    yield made
    made.end()
