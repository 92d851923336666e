"""A worker's time limit counts the time that passed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.worker.timelimit import MIN_PAUSE_SEC, NOTED_SEC, TimeLimit, paused_sec


class Process:
    """A worker's clocks, and its limit."""

    def __init__(self, path: Path, seconds: float | None) -> None:
        self.now, self.cpu, self.path = 50.0, 0.0, path
        self.limit = TimeLimit(seconds, 10.0, path, clock=lambda: self.now, cpu=lambda: self.cpu)

    def work(self, seconds: float) -> None:
        self.now, self.cpu = self.now + seconds, self.cpu + seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "paused"


def test_a_pause_that_the_shim_has_seen_does_not_count(path: Path) -> None:
    process = Process(path, 100.0)
    process.work(80.0)
    assert not process.limit.is_reached
    process.now += 1000.0
    assert not process.limit.is_reached  # the shim may be about to note it
    path.write_text("1000.000\n")
    process.work(NOTED_SEC)
    assert process.limit.elapsed_sec() == 93.0
    assert not process.limit.is_reached
    process.work(8.0)
    assert process.limit.is_reached


def test_a_silence_that_was_no_pause_counts(path: Path) -> None:
    process = Process(path, 100.0)
    process.now += 95.0
    assert not process.limit.is_reached
    process.work(NOTED_SEC)
    assert process.limit.is_reached


def test_a_long_step_that_works_is_counted_at_once(path: Path) -> None:
    process = Process(path, 100.0)
    process.work(90.0 + MIN_PAUSE_SEC)
    assert process.limit.is_reached


def test_a_pause_before_the_limit_began_is_not_taken_off(path: Path) -> None:
    path.write_text("1000.000\n")
    process = Process(path, 100.0)
    process.work(95.0)
    assert process.limit.is_reached


def test_without_a_limit_none_is_reached(path: Path) -> None:
    process = Process(path, None)
    process.work(1e9)
    assert not process.limit.is_reached


@pytest.mark.parametrize("text", ["", "nan", "-5", "1e999", "soon"])
def test_what_is_no_number_of_seconds_is_none(path: Path, text: str) -> None:
    path.write_text(text)
    assert paused_sec(path) == 0.0


def test_steps_that_wait_for_data_end_at_the_limit(path: Path) -> None:
    process = Process(path, 100.0)
    for _ in range(11):
        process.work(2.0)
        process.now += MIN_PAUSE_SEC + 1.0
        assert not process.limit.is_reached
    for _ in range(2):  # the first one after the limit may have been a pause
        process.work(2.0)
        process.now += MIN_PAUSE_SEC + 1.0
        is_reached = process.limit.is_reached
    assert is_reached
