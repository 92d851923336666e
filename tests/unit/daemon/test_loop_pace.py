"""The share of the loop's time that the events of jobs have."""

from __future__ import annotations

import pytest

from honed.daemon.pace import JOB_SEC, STEP_SEC, Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock=clock)


def test_what_is_left_is_read_after_as_long_as_the_readings_of_the_turn_took(pace: Pace, clock: Clock) -> None:
    for sec in (0.02, 0.1):  # the steps of one turn
        with pace.step():
            assert not pace.is_resting
            clock.now += sec
    assert pace.rest() == pytest.approx(0.12)
    clock.now += 0.06
    assert pace.is_resting
    clock.now += 0.07
    assert not pace.is_resting


def test_a_turn_that_reads_nothing_lets_a_rest_end_when_it_would(pace: Pace, clock: Clock) -> None:
    with pace.step():
        clock.now += 0.1
    pace.rest()
    for _ in range(9):
        with pace.step():
            clock.now += 0.005
        assert pace.is_resting
        pace.rest()
        clock.now += 0.005
    assert pace.rest() == pytest.approx(0.01)


def test_the_jobs_of_a_step_have_a_time_each_and_one_together(pace: Pace, clock: Clock) -> None:
    with pace.step():
        assert pace.left_sec == JOB_SEC
        clock.now += STEP_SEC - JOB_SEC / 2
        assert pace.left_sec == pytest.approx(JOB_SEC / 2)
        assert not pace.is_over
        clock.now += JOB_SEC
        assert pace.left_sec == 0.0
        assert pace.is_over


def test_a_step_that_fails_counts_too(pace: Pace, clock: Clock) -> None:
    with pytest.raises(OSError), pace.step():
        clock.now += 0.1
        raise OSError
    assert pace.rest() == pytest.approx(0.1)
