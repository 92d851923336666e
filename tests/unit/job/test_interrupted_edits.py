"""Edits that a crash has interrupted: the job is the old one or the new one."""

from __future__ import annotations

import errno
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


@pytest.mark.parametrize("is_made", [False, True])
def test_the_file_of_an_edit_that_was_refused_or_made_goes_once_the_disk_lets_it(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    """Left for the next start, a refused edit would be taken up there: whoever asked for it was told otherwise."""
    files = spool.layout.job(1)
    durable.make_dir(files.dir)
    job = Job(1, "a", 1.0, "a.json", os.getuid(), "/o", state=State.HELD, priority=1)
    durable.finish(spool.adding(job))
    (files.dir / "spec.json").write_bytes(OLD)
    edits = Edits(spool)
    path = edits.put(job, NEW, ".json") if is_made else spool.dir / "edits/1.json"

    def fail(*_: object, **_keys: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        if is_made:
            edits.make(job, path, {"priority": 7}, PlanFile({}))
        else:
            real = durable.sync_and_close

            def fail_once(fd: int) -> None:  # of the directory, after the rename
                real(fd)
                if path.exists():
                    fail()

            patch.setattr(durable, "sync_and_close", fail_once)
            with pytest.raises(OSError, match="Read-only"):
                edits.put(job, NEW, ".json")
        assert path.read_bytes() == NEW
        edits.tend()
    edits.tend()
    assert not path.exists()
    assert edits.put(job, NEW, ".json").exists()
    edits.tend()
    assert path.exists()  # a later edit of that name is wanted
