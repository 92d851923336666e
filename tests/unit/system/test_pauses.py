"""A clock that stands still while its process cannot run."""

from __future__ import annotations

import threading

from honed.system.pauses import LOOK_SEC, MIN_PAUSE_SEC, Lookout, Pauses


class Process:
    """A process whose times a test sets, and its clock."""

    def __init__(self) -> None:
        self.now, self.cpu = 1000.0, 3.0
        self.clock = Pauses(clock=lambda: self.now, cpu=lambda: self.cpu)
        with self.clock.asleep(0.0):
            pass

    def sleep(self, asked_sec: float, took_sec: float) -> None:
        with self.clock.asleep(asked_sec):
            self.now += took_sec


def test_what_passes_in_a_sleep_that_was_asked_for_or_with_work_is_no_pause() -> None:
    process = Process()
    process.sleep(30.0, 30.0)
    process.now, process.cpu = process.now + 20.0, process.cpu + 20.0
    assert process.clock() == 1050.0
    assert process.clock.between(0.0, process.now) == 0.0


def test_a_sleep_that_takes_longer_is_a_pause_and_a_little_longer_is_none() -> None:
    process = Process()
    process.sleep(0.5, 0.5 + MIN_PAUSE_SEC - 1.0)
    assert process.clock() == 1000.0 + MIN_PAUSE_SEC - 0.5
    before = process.clock()
    process.sleep(0.5, 3600.5)
    assert process.clock() == before + 0.5
    assert process.clock.between(0.0, process.now) == 3600.0


def test_a_file_system_that_hangs_is_a_pause_which_the_next_step_knows() -> None:
    process = Process()
    before = process.clock()
    process.now += 600.0  # in a step of the loop, without CPU time
    assert process.clock() == before
    process.now += 1.0
    assert process.clock() == before + 1.0


def test_a_pause_counts_as_far_as_it_lies_between_two_times() -> None:
    process = Process()
    process.sleep(1.0, 101.0)  # the pause is from 1001 to 1101
    assert process.clock.between(900.0, 1051.0) == 50.0
    assert process.clock.between(1051.0, 1200.0) == 50.0
    assert process.clock.between(1101.0, 1200.0) == 0.0


def test_another_thread_reads_the_clock_and_finds_no_pause() -> None:
    process = Process()
    process.now += 600.0
    read: list[float] = []
    thread = threading.Thread(target=lambda: read.append(process.clock()))
    thread.start()
    thread.join()
    assert read == [1600.0]
    assert process.clock() == 1000.0


def test_before_the_first_sleep_a_disk_may_take_its_time() -> None:
    now = 0.0
    clock = Pauses(clock=lambda: now, cpu=lambda: 0.0)
    now = 100.0
    assert clock() == 100.0


def test_a_lookout_sees_each_pause_of_its_process_and_no_load() -> None:
    now, late = 0.0, iter([0.0, MIN_PAUSE_SEC - LOOK_SEC, 600.0, 0.0, 60.0])

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + next(late)

    lookout = Lookout(clock=lambda: now, sleep=sleep)
    for _ in range(5):
        lookout.look()
    assert lookout.paused_sec == 660.0
