"""A prune of which an operation failed after its commit: it is completed, and nothing of the job is forgotten."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.daemon.housekeeper import RETRY_SEC, Housekeeper
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.query import Asker
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system import durable
from honed.system.control import Parts, Request
from honed.system.layout import Layout
from honed.system.part import joined
from waiting import wait_for

US = Asker(os.getuid(), is_administrator=True, reads_all=True)


class Scene:
    """A housekeeper, and two jobs that have failed."""

    def __init__(self, root: Path) -> None:
        self.ahead = 0.0
        self.layout = Layout(root)
        self.spool = Spool(self.layout)
        self.spool.recover()
        self.database = Database(self.layout.database_path)
        self.keeper = Housekeeper(
            self.layout, Config(), self.spool, self.database, list, clock=lambda: time.monotonic() + self.ahead
        )
        for number in (1, 2):
            durable.make_dir(self.layout.jobs_dir / str(number))
            job = Job(number, f"job {number}", 1.0, "a.json", os.getuid(), "/o", state=State.QUEUED)
            durable.finish(self.spool.adding(job))
            job = self.spool.move(job, State.RUNNING)
            self.database.put_job(self.spool.move(job, State.FAILED))

    def prune(self, *numbers: int) -> None:
        ids = [str(number) for number in numbers]
        answer = self.keeper.prune(Request("prune", {"ids": ids, "dry_run": False}, os.getuid()), US)
        assert isinstance(answer, Parts)
        joined(answer.parts)

    def pruned(self, number: int) -> bool:
        request = Request("pruned", {"ids": [number]}, os.getuid())
        return str(number) in self.keeper.pruned(request, US)

    def tend(self) -> None:
        self.keeper.tend()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.keeper.close()
    made.database.close()
    made.spool.close()


def test_a_prune_that_the_disk_interrupted_is_completed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        scene.prune(1)  # its entry is renamed: that is the commit
        scene.tend()
        scene.ahead += RETRY_SEC
        assert not scene.pruned(1)
        assert scene.database.job_ids() == {1, 2}  # a power cut may bring its entry back
    wait_for(lambda: scene.pruned(1), what="the removal", pause=lambda _sec: scene.tend())
    assert not (scene.layout.jobs_dir / "1").exists()
    assert scene.database.job_ids() == {2}
    assert (scene.spool.job(1), scene.spool.job(2) is not None) == (None, True)


def test_of_two_jobs_of_which_one_cannot_be_pruned_the_other_one_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "2.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="Input/output error"):
            scene.prune(1, 2)
    assert (scene.spool.job(1), scene.spool.job(2) is not None) == (None, True)
    wait_for(lambda: not (scene.layout.jobs_dir / "1").exists(), what="the removal", pause=lambda _sec: scene.tend())
    assert scene.database.job_ids() == {2}
