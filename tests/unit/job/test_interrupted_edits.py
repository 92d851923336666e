"""Edits that a crash has interrupted: the job is the old one or the new one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.job.editing import Edits
from honed.job.job import Attempt, Job, State
from honed.job.plan_file import PlanFile
from honed.job.recovery import recover
from honed.job.spool import Spool
from honed.system import durable
from honed.system.layout import Layout

OLD, NEW = b'{"priority": 1}', b'{"priority": 7}'


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    recover(made)
    yield made
    made.close()


@pytest.mark.parametrize("ahead_sec", [-3600.0, 0.0, 3600.0, 365 * 86400.0])
def test_an_edit_of_a_job_that_has_run_is_completed_whatever_the_clock_said_then(
    spool: Spool, ahead_sec: float
) -> None:
    """It ran while the clock was ahead: that start is not one after the edit."""
    files = spool.layout.job(1)
    durable.make_dir(files.dir)
    began = Attempt(1, "transformers", time.time() + ahead_sec, outcome="interrupted")
    job = Job(1, "a", 1.0, "a.json", os.getuid(), "/o", state=State.HELD, attempts=(began,), priority=1)
    durable.finish(spool.adding(job))
    (files.dir / "spec.json").write_bytes(OLD)
    edits = Edits(spool)
    path = edits.put(job, NEW, ".json")
    edits.begin(job, {"priority": 7})  # and then honed is killed
    recover(spool)
    taken_up = list(Edits(spool).take_up())
    assert [(each.id, each.priority, name) for each, name in taken_up] == [(1, 7, path)]
    job = edits.make(taken_up[0][0], path, {"priority": 7}, PlanFile({}))
    assert (job.is_being_edited, job.priority) == (False, 7)
    assert (files.dir / "spec.json").read_bytes() == NEW
