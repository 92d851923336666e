"""New plans of queued jobs, as far as the machine lets them be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.arrivals.replanning import Replanned
from honed.daemon.plans import Plans
from honed.job.plan_file import PlanFile
from honed.run.reply import Passed
from unit.daemon.test_shares import House

MADE = Passed(1, {}, PlanFile({}), "/o", (), {}, {}, {}, None)


class _Acceptance:
    """The helper has answered for one job, once; its plan can be written as soon as there is room."""

    def __init__(self, job_id: int) -> None:
        self.done = [Replanned(job_id, MADE)]
        self.numbers: frozenset[int] = frozenset()
        self.is_full = True

    @property
    def replanning(self) -> _Acceptance:
        return self

    def take_done(self) -> list[Replanned]:
        done, self.done = self.done, []
        return done

    def plan_of(self, *_: object) -> PlanFile:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return PlanFile({"made": "again"})


class _Others:
    """Nothing is edited, and no device is in use."""

    numbers: frozenset[int] = frozenset()

    def settle(self) -> None: ...

    def reread_plan(self, _job: object) -> None: ...


def test_a_plan_that_finds_no_room_is_kept_until_there_is_some(tmp_path: Path) -> None:
    house = House(tmp_path, {})
    job = house.admit()
    job = house.spool.update(job, staged_at=1.0)  # its worker has read the old plan
    files = house.spool.files(job.id)
    house.spool.layout.job(job.id).dir.mkdir(parents=True, exist_ok=True)
    acceptance: Any = _Acceptance(job.id)
    others: Any = _Others()
    plans = Plans(house.spool, house.backlog, others, acceptance, others)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            plans.settle()
        assert job.id in plans.numbers
    acceptance.is_full = False
    plans.settle()
    assert job.id not in plans.numbers
    assert PlanFile.read(files.plan_path).document["made"] == "again"
    changed = house.spool.job(job.id)
    assert changed is not None
    assert changed.staged_at is None
    house.database.close()
    house.spool.close()
