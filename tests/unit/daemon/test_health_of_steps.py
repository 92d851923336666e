"""The daemon's health: what fails in a turn, and what that means for the next one."""

from __future__ import annotations

import errno
import os

from honed.daemon.health import Health


def broken() -> None:
    raise LookupError("ours")


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_each_step_runs_whatever_the_others_do() -> None:
    health, done = Health(clock=lambda: 0.0), list[int]()
    assert health.run([broken, lambda: done.append(1), full, lambda: done.append(2)]) == "No space left on device"
    assert done == [1, 2]
    assert not health.is_sound
    assert health.run([full]) == "No space left on device"
    assert health.is_sound  # the machine is at fault, and a restart does not help
    assert health.run([lambda: None]) == ""


def test_an_item_that_fails_neither_slows_the_loop_nor_leaves_it_to_the_watchdog() -> None:
    health = Health(clock=lambda: 0.0)

    def step() -> None:
        for each in (broken, full):
            with health.failures.alone("job 1"):
                each()

    for _ in range(10):
        assert health.run([step]) == "No space left on device"
        assert health.is_sound
        assert health.pause() == 0.0


def test_a_step_that_keeps_failing_is_tried_ever_more_slowly() -> None:
    health = Health(clock=lambda: 0.0)
    for _ in range(3):
        health.run([broken])
    assert health.pause() == 3.0
    health.run([lambda: None])
    assert health.pause() == 0.0


def test_a_question_between_the_steps_that_fails_has_an_answer_all_the_same() -> None:
    health = Health(clock=lambda: 0.0)

    def patience() -> float:
        raise OSError(errno.EIO, "stat of spool/paused")

    assert health.ask(patience, otherwise=1.0) == 1.0
    assert health.ask(lambda: 7.0, otherwise=1.0) == 7.0
