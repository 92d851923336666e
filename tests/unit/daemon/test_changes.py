"""The places that a requeued job begins at, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from honed.daemon.changes import change, goes_on_from
from honed.job.job import Adjustment, Job, State
from honed.job.spool import Spool
from honed.system.durable import finish
from honed.system.error import UsageError
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


def test_a_job_that_succeeded_is_not_queued_again_and_the_way_to_a_new_one_is_said(failed: tuple[Layout, Job]) -> None:
    layout, job = failed
    spool = Spool(layout)
    try:
        with pytest.raises(UsageError, match="in place") as refused:
            change(spool, layout, "requeue", replace(job, state=State.SUCCEEDED))
    finally:
        spool.close()
    assert "honectl rerun 1" in refused.value.hint
    assert (layout.job(1).checkpoints_dir / "checkpoint-4").exists()


@pytest.mark.parametrize(("outcome", "from_start", "num_left"), [("stalled", False, 1), ("stalled", True, 0)])
def test_a_requeue_keeps_the_steps_down_the_ladder_unless_the_job_starts_over(
    failed: tuple[Layout, Job], outcome: str, from_start: bool, num_left: int
) -> None:
    layout, job = failed
    stepped = replace(job, outcome=outcome, adjustments=(Adjustment(1, "batch 2 → 1"),))
    spool = Spool(layout)
    try:
        finish(spool.adding(stepped))
        queued = change(spool, layout, "requeue", stepped, from_start=from_start)
    finally:
        spool.close()
    assert (queued.state, len(queued.adjustments)) == (State.QUEUED, num_left)


def test_a_job_without_checkpoints_begins_at_the_start_and_the_reason_is_said(failed: tuple[Layout, Job]) -> None:
    layout, job = failed
    assert "pruned" in goes_on_from(layout, replace(job, are_checkpoints_pruned=True), from_start=False)
    (layout.job(1).checkpoints_dir / "checkpoint-4").rmdir()
    assert goes_on_from(layout, job, from_start=False) == "the start: it has no checkpoint"
    layout.job(1).checkpoints_dir.rmdir()
    assert goes_on_from(layout, job, from_start=False) == "the start: it has no checkpoint"
