"""Checkpoints that a thread makes whole while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.worker.train import sealing as sealings
from honed.worker.train.sealing import Sealed, Sealing

PLACE = Path("/checkpoints/checkpoint-5")
DEADLINE_SEC = 60.0


def test_a_checkpoint_is_sealed_beside_its_caller_who_takes_the_outcome_once() -> None:
    sealing, may_end = Sealing(lambda: None), threading.Event()

    def seal(_beat: Callable[[], None]) -> Path:
        assert may_end.wait(DEADLINE_SEC)
        return PLACE

    assert sealing.wait() is None
    sealing.start(5, seal)
    assert not sealing.is_idle
    assert not sealing.has_ended
    may_end.set()
    assert sealing.wait() == Sealed(5, PLACE)
    assert sealing.is_idle
    assert sealing.wait() is None


def test_an_error_is_raised_where_the_outcome_is_taken() -> None:
    sealing, has_begun = Sealing(lambda: None), threading.Event()

    def seal(_beat: Callable[[], None]) -> Path:
        has_begun.set()
        raise OSError(5, "Input/output error")

    sealing.start(5, seal)
    assert has_begun.wait(DEADLINE_SEC)
    with pytest.raises(OSError, match="Input/output error"):
        sealing.wait()
    assert sealing.is_idle
    assert not sealing.has_failed


def test_there_is_no_second_before_the_outcome_of_the_first_is_taken() -> None:
    sealing = Sealing(lambda: None)
    sealing.start(5, lambda _beat: PLACE)
    with pytest.raises(AssertionError):
        sealing.start(6, lambda _beat: PLACE)
    assert sealing.wait() == Sealed(5, PLACE)


def test_who_waits_gives_signs_of_life_as_long_as_there_is_progress_and_only_then() -> None:
    beats: list[str] = []
    is_heard, may_end = threading.Event(), threading.Event()

    def beat() -> None:
        beats.append(threading.current_thread().name)
        is_heard.set()

    def seal(progress: Callable[[], None]) -> Path:
        while not is_heard.wait(0.05):
            progress()  # a piece is hashed
        is_silent = not may_end.wait(1.0)  # a disk that hangs
        assert is_silent
        return PLACE

    sealing = Sealing(beat)
    sealing.start(5, seal)
    sealing.wait()
    assert 1 <= len(beats) <= 2, "beats without progress"
    assert set(beats) == {threading.current_thread().name}, "the pulse is the trainer's thread's"


class Clock:
    """Seconds that pass while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.5
        return self.now


@pytest.mark.parametrize(
    ("left_sec", "is_given_up"),
    [(1000.0, False), (130.0, True), (5.0, False)],
    ids=["time for both", "time for one", "time for none"],
)
def test_a_checkpoint_is_given_up_for_the_last_step_s_where_there_is_time_for_one_of_them(
    monkeypatch: pytest.MonkeyPatch, left_sec: float, is_given_up: bool
) -> None:
    clock, has_begun, may_end = Clock(), threading.Event(), threading.Event()
    monkeypatch.setattr(sealings, "time", clock)
    monkeypatch.setattr(sealings, "LOOK_INTERVAL_SEC", 0.001)
    sealing = Sealing(lambda: None)

    def first(_beat: Callable[[], None]) -> Path:
        clock.now += 100.0
        return PLACE

    def second(beat: Callable[[], None]) -> Path:
        has_begun.set()
        while not may_end.is_set() and clock.now < 500.0:
            beat()  # a piece is hashed
        return PLACE

    sealing.start(5, first)
    assert sealing.wait() == Sealed(5, PLACE)
    sealing.start(6, second)
    assert has_begun.wait(DEADLINE_SEC)
    sealing.hurry(left_sec)
    if not is_given_up:
        may_end.set()
    assert sealing.wait() == (None if is_given_up else Sealed(6, PLACE))
    assert sealing.is_idle
