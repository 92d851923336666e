"""The places that a requeued job begins at, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from honed.daemon.changes import goes_on_from
from honed.job.job import Job, State
from honed.system.layout import Layout


@pytest.fixture
def failed(tmp_path: Path) -> tuple[Layout, Job]:
    layout = Layout(tmp_path)
    job = Job(1, "tiny", 0.0, "tiny.json", 4242, str(tmp_path), state=State.FAILED)
    (layout.job(1).checkpoints_dir / "checkpoint-4").mkdir(parents=True)
    return layout, job


def test_a_failed_job_goes_on_from_its_last_checkpoint_unless_it_shall_not(failed: tuple[Layout, Job]) -> None:
    layout, job = failed
    assert goes_on_from(layout, job, from_start=False) == "its last checkpoint"
    assert goes_on_from(layout, job, from_start=True) == "the start"


def test_a_job_that_succeeded_begins_at_the_start(failed: tuple[Layout, Job]) -> None:
    layout, job = failed
    assert goes_on_from(layout, replace(job, state=State.SUCCEEDED), from_start=False) == "the start"


def test_a_job_without_checkpoints_begins_at_the_start_and_the_reason_is_said(failed: tuple[Layout, Job]) -> None:
    layout, job = failed
    assert "pruned" in goes_on_from(layout, replace(job, are_checkpoints_pruned=True), from_start=False)
    (layout.job(1).checkpoints_dir / "checkpoint-4").rmdir()
    assert goes_on_from(layout, job, from_start=False) == "the start: it has no checkpoint"
    layout.job(1).checkpoints_dir.rmdir()
    assert goes_on_from(layout, job, from_start=False) == "the start: it has no checkpoint"
