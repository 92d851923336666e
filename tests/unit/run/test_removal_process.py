"""The removal process: a child that hangs is given up, and a failed removal tried again, soon and then ever later."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.job import tree
from honed.job.spool import Spool
from honed.run import removal_process
from honed.run.removal_process import LEFT, OLD_ROWS, RemovalProcess
from honed.system.layout import Layout
from waiting import wait_for

now = [0.0]


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    now[0] = 0.0
    yield made
    made.close()


def finish(removals: RemovalProcess) -> None:
    """Wait for the end of the child."""

    def is_over() -> bool:
        removals.tend(now[0])
        return not removals.is_running

    wait_for(is_over, what="the child's end")


def test_a_child_that_hangs_is_given_up_and_only_the_item_that_it_was_at(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    old = spool.layout.rows_dir / ".old"
    (old / "entry").mkdir(parents=True)
    removals = RemovalProcess(spool, clock=lambda: now[0])
    removals.want("job:7")
    removals.want(OLD_ROWS)
    removals.tend(now[0])
    process = removals._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    now[0] = removal_process.STALL_SEC
    removals.tend(now[0])
    assert removals._process is process
    now[0] += 1
    removals.tend(now[0])
    finish(removals)
    assert not old.exists()
    assert process.wait(30) == -signal.SIGKILL
    assert [record.levelno for record in caplog.records if "no progress for 120 s" in record.message] == [logging.ERROR]
    assert removals.due_at == now[0] + removal_process.RETRY_SEC


def test_a_failed_removal_is_tried_again_ever_later_and_told_once(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    removals = RemovalProcess(spool, clock=lambda: now[0])
    removals.want("job:7")  # it is not pruned
    pauses = []
    for _ in range(9):
        removals.tend(now[0])
        finish(removals)
        pauses.append(removals.due_at - now[0])
        now[0] = removals.due_at
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert removals.done("job:7").problem == "job 7 is not pruned"


def test_what_is_left_is_tried_again_soon_though_something_else_has_been_left_for_long(spool: Spool) -> None:
    removals = RemovalProcess(spool, clock=lambda: now[0])
    for _ in range(5):
        removals._settle(LEFT, tree.Count(problem="it is mounted"))
    assert removals.due_at == 80
    removals._settle("job:7", tree.Count(problem="it is mounted", is_left=True))
    assert removals.due_at == 5
    assert not removals.is_pending("job:7")
