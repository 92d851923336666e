"""Durations that stay the same when somebody sets the wall clock."""

from __future__ import annotations

from typing import Any

import pytest

from honed.run.runner import exit_of
from honed.system.clock import Calendar, Moment, boot_id

HOUR_SEC = 3600.0
BEGAN = Moment(1.8e9, 500.0, "this boot")


@pytest.mark.parametrize(
    ("ended", "took_sec"),
    [
        (Moment(1.8e9 + 60, 560.0, "this boot"), 60),
        (Moment(1.8e9 + 24 * HOUR_SEC, 560.0, "this boot"), 60),
        (Moment(1.8e9 - 24 * HOUR_SEC, 560.0, "this boot"), 60),
        (Moment(1.8e9 + HOUR_SEC, 20.0, "the next boot"), HOUR_SEC),
        (Moment(1.8e9 + HOUR_SEC), HOUR_SEC),
        (Moment(1.8e9 - HOUR_SEC, 20.0, "the next boot"), 0),
        (Moment(1.8e9 - HOUR_SEC), 0),
    ],
)
def test_within_a_boot_nobody_can_set_what_counts(ended: Moment, took_sec: float) -> None:
    assert ended.since(BEGAN) == took_sec


def test_moments_of_unknown_boots_are_not_of_one() -> None:
    assert not Moment(1.0, 1.0).is_of_boot(Moment(2.0, 2.0))


def test_now_is_of_this_boot() -> None:
    assert Moment.now().is_of_boot(Moment.now())


class Wall:
    """A wall clock beside a clock that nobody sets; `says` is its time, and `calendar` observes both."""

    def __init__(self, says: float) -> None:
        self.ticks, self.says = 0.0, says
        self.calendar = Calendar(clock=lambda: self.ticks, now=lambda: self.says)

    def go_on(self, seconds: float, *, jump: float = 0.0) -> float:
        """Let time pass, and return by how much the wall clock was set according to the calendar."""
        self.ticks += seconds
        self.says += seconds + jump
        return self.calendar.look()

    def age(self, date: float) -> float:
        return self.says - self.calendar.date(date)


def test_what_is_dated_before_the_clock_was_set_forward_is_as_old_as_it_is() -> None:
    wall = Wall(1000 * HOUR_SEC)
    assert wall.go_on(60) == 0
    made = wall.says
    assert wall.go_on(60, jump=24 * HOUR_SEC) == 24 * HOUR_SEC
    later = wall.says
    assert wall.go_on(60) == 0
    assert wall.go_on(60, jump=48 * HOUR_SEC) == 48 * HOUR_SEC
    assert (wall.age(made), wall.age(later), wall.age(0)) == (180, 120, 1000 * HOUR_SEC + 240)


def test_what_is_older_than_a_clock_that_was_behind_until_it_was_set_right_is_old() -> None:
    """A machine boots in 1970; its files are from its previous boot."""
    wall = Wall(10.0)
    wall.go_on(60, jump=1.8e9)
    assert (wall.age(1.7e9), wall.age(30.0)) == (1e8 + 70, 40)


@pytest.mark.parametrize("back_sec", [24 * HOUR_SEC, 10 * HOUR_SEC, 1000 * HOUR_SEC])
def test_a_clock_that_was_set_forward_and_back_makes_nothing_older(back_sec: float) -> None:
    wall = Wall(1e4 * HOUR_SEC)
    made = wall.says
    wall.go_on(60, jump=24 * HOUR_SEC)
    assert wall.go_on(60, jump=-back_sec) == -back_sec
    assert wall.age(made) == min(120, 120 + 24 * HOUR_SEC - back_sec)


def test_a_clock_that_is_put_right_bit_by_bit_is_not_set() -> None:
    wall = Wall(1e4 * HOUR_SEC)
    assert [wall.go_on(60, jump=jump) for jump in (-1.0, 0.5, HOUR_SEC / 2)] == [0, 0, 0]


SHIMS = {"ended_at": 1.8e9, "ended_monotonic": 7.0, "boot_id": "b"}


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        ({}, Moment(1.8e9, 7.0, "b")),
        ({"boot_id": None}, Moment(1.8e9)),
        ({"boot_id": ["b"]}, Moment(1.8e9)),
        ({"ended_monotonic": float("nan")}, Moment(1.8e9)),
        ({"ended_monotonic": -1}, Moment(1.8e9)),
        ({"ended_monotonic": "7"}, Moment(1.8e9)),
        ({"ended_at": float("inf")}, None),
        ({"ended_at": 10**400}, None),
        ({"ended_at": None}, None),
    ],
)
def test_an_end_that_a_worker_could_have_written_is_a_moment_or_none(
    said: dict[str, Any], ended: Moment | None
) -> None:
    assert exit_of({**SHIMS, **said}).ended == ended


@pytest.mark.parametrize(
    ("said", "is_machine_going_down"),
    [
        ({"boot_id": boot_id()}, False),  # whatever the clock says: ended long ago, in this boot
        ({"boot_id": "another"}, True),
        ({"boot_id": "another", "system_state": "running"}, False),
        ({"boot_id": boot_id(), "system_state": "stopping"}, True),
        ({"boot_id": None}, True),  # not as the shim writes it: long before this boot, by the clock on the wall
    ],
)
def test_a_unit_that_had_nobody_to_ask_ended_in_a_shutdown_if_that_was_another_boot(
    said: dict[str, Any], is_machine_going_down: bool
) -> None:
    record = {"ended_at": 1.0, "ended_monotonic": 1.0, "system_state": "", **said}
    assert exit_of(record).is_machine_going_down == is_machine_going_down
