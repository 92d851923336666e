"""Each attempt counts once for its user, whatever is killed, pruned or full."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from honed.job.ahead import NO_DEVICE_KEY
from honed.job.catalog import Catalog
from honed.job.job import Attempt, Job, State
from honed.job.usage import MAX_AGE_SEC, NUM_RECENT, TYPICAL_SEC, Usage

DAY = 86400.0
NOW = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.jsonl"


def begun(path: Path, clock: Clock) -> Usage:
    """A usage whose file is there, as that of an instance that has run before."""
    usage = Usage(path, now=clock)
    usage.catch_up(Catalog([]), lambda _uid: 1.0)
    return usage


def job(number: int, uid: int, *seconds: float | None, ended_at: float = NOW, num_gpus: int = 1) -> Job:
    """A job whose attempts took so many seconds; None: one that still runs."""
    attempts = tuple(
        Attempt(at, "transformers", ended_at - (sec or 0), ended_at=None if sec is None else ended_at, took_sec=sec)
        for at, sec in enumerate(seconds, start=1)
    )
    return Job(
        id=number,
        name=f"n{number}",
        submitted_at=1.0,
        source="a.json",
        uid=uid,
        output_dir="/o",
        num_gpus=num_gpus,
        attempts=attempts,
        state=State.QUEUED,
    )


def test_each_attempt_that_has_ended_counts_once_by_devices_and_weight(path: Path, clock: Clock) -> None:
    usage = begun(path, clock)
    usage.charge(job(1, 1000, 100.0, 20.0, None), 2.0)
    usage.charge(job(1, 1000, 100.0, 20.0, 30.0), 2.0)
    usage.charge(job(2, 1001, 50.0, num_gpus=0), 1.0)  # the processor is a device, too
    usage.charge(job(3, 1001, 50.0, num_gpus=4), 1.0)
    usage.flush()
    assert (usage.level(1000), usage.used_sec(1000, DAY)) == (75.0, 150.0)
    assert (usage.level(1001), usage.used_sec(1001, DAY)) == (250.0, 250.0)
    again = Usage(path, now=clock)
    again.catch_up(Catalog([job(1, 1000, 100.0, 20.0, 30.0)]), lambda _uid: 2.0)
    assert (again.level(1000), again.used_sec(1000, DAY)) == (75.0, 150.0)
    assert (again.level(1001), again.used_sec(1001, DAY)) == (250.0, 250.0)


def test_what_a_crash_has_left_out_is_added_at_the_next_start(path: Path, clock: Clock) -> None:
    begun(path, clock).charge(job(1, 1000, 100.0), 1.0)  # and never written
    again = Usage(path, now=clock)
    again.catch_up(Catalog([job(1, 1000, 100.0)]), lambda _uid: 4.0)
    assert (again.level(1000), again.used_sec(1000, DAY)) == (25.0, 100.0)


def test_the_history_of_an_instance_without_the_file_fills_the_window_and_puts_nobody_behind(
    path: Path, clock: Clock
) -> None:
    usage = Usage(path, now=clock)
    usage.catch_up(Catalog([job(1, 1000, 5000.0), job(2, 1000, 9.0, ended_at=NOW - MAX_AGE_SEC - 1)]), lambda _uid: 1.0)
    assert (usage.level(1000), usage.used_sec(1000, DAY)) == (0.0, 5000.0)
    assert Usage(path, now=clock).used_sec(1000, DAY) == 5000.0


def test_only_the_part_within_the_window_counts(path: Path, clock: Clock) -> None:
    usage = begun(path, clock)
    usage.charge(job(1, 1000, 1000.0, ended_at=NOW - DAY + 300), 1.0)
    usage.charge(job(2, 1000, 40.0), 1.0)
    assert usage.used_sec(1000, DAY) == 340.0
    clock.now += 300
    assert usage.used_sec(1000, DAY) == 40.0
    assert usage.level(1000) == 1040.0  # it never falls


def test_old_lines_go_at_a_start_and_levels_stay(path: Path, clock: Clock) -> None:
    usage = begun(path, clock)
    for number in range(1, 50):
        usage.charge(job(number, 1000, 10.0), 1.0)
    usage.flush()
    clock.now += MAX_AGE_SEC + 1
    usage.charge(job(50, 1000, 10.0, ended_at=clock.now), 1.0)
    usage.flush()
    assert Usage(path, now=clock).level(1000) == 500.0
    assert len(path.read_text().splitlines()) == 3  # the last attempt, the user's level, and the floor
    third = Usage(path, now=clock)
    third.catch_up(Catalog([job(1, 1000, 10.0)]), lambda _uid: 1.0)  # too old to be counted again
    assert (third.level(1000), third.used_sec(1000, DAY)) == (500.0, 10.0)


def test_a_line_that_is_cut_off_or_damaged_costs_no_other(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    usage = begun(path, clock)
    usage.charge(job(1, 1000, 10.0), 1.0)
    usage.charge(job(2, 1000, 20.0), 1.0)
    usage.flush()
    whole = path.read_bytes().splitlines(keepends=True)
    nan = b'{"uid": 1000, "level": NaN}\n'
    path.write_bytes(whole[0] + whole[1] + b"\0\0\n" + nan + whole[2][:-9])
    again = Usage(path, now=clock)
    assert "3 damaged lines were left out" in caplog.text
    again.catch_up(Catalog([job(1, 1000, 10.0), job(2, 1000, 20.0)]), lambda _uid: 1.0)
    assert (again.level(1000), again.used_sec(1000, DAY)) == (30.0, 30.0)
    assert [json.loads(line)["level"] for line in path.read_text().splitlines()] == [10.0, 0.0, 10.0, 30.0]


def test_two_halves_of_a_line_are_not_a_line(path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(b'{"uid": 1000, "level": 5.0}\n{"uid": 1000\n"level": 9.0}\n{"uid": 1001, "level": 7.0}\n')
    again = Usage(path, now=clock)
    assert "2 damaged lines were left out" in caplog.text
    assert (again.level(1000), again.level(1001)) == (5.0, 7.0)


def test_a_full_disk_loses_nothing_and_leaves_no_half_line(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = begun(path, clock)
    usage.charge(job(1, 1000, 10.0), 1.0)
    usage.flush()
    before, real = path.read_bytes(), os.write

    def write(fd: int, data: bytes) -> int:
        real(fd, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    usage.charge(job(2, 1000, 20.0), 1.0)
    with pytest.raises(OSError, match="No space"):
        usage.flush()
    assert path.read_bytes() == before
    assert usage.level(1000) == 30.0
    monkeypatch.setattr(os, "write", real)
    usage.flush()
    assert Usage(path, now=clock).level(1000) == 30.0


def test_the_last_attempts_tell_how_long_the_next_one_takes(path: Path, clock: Clock) -> None:
    usage = begun(path, clock)
    assert usage.typical_sec == TYPICAL_SEC
    for number in range(1, NUM_RECENT + 3):
        usage.charge(job(number, 1000, 9000.0 if number < 3 else 40.0), 1.0)
    assert usage.typical_sec == 40.0


def test_an_attempt_that_had_no_device_counts_for_nothing(path: Path, clock: Clock) -> None:
    usage = begun(path, clock)
    ended = job(1, 1000, 50.0)
    usage.charge(replace(ended, attempts=(replace(ended.attempts[0], device=NO_DEVICE_KEY),)), 1.0)
    assert (usage.typical_sec, usage.level(1000)) == (TYPICAL_SEC, 0.0)


def test_a_level_is_raised_and_never_lowered(path: Path, clock: Clock) -> None:
    usage = begun(path, clock)
    usage.charge(job(1, 1000, 10.0), 1.0)
    usage.raise_to(5.0, [1000, 1001])
    usage.flush()
    again = Usage(path, now=clock)
    assert (again.level(1000), again.level(1001), again.used_sec(1001, DAY)) == (10.0, 5.0, 0.0)
