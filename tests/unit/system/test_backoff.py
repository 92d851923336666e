"""The pauses between tries grow, up to a limit, and begin anew after a success."""

from __future__ import annotations

import pytest

from honed.system.backoff import Backoff


def pauses(backoff: Backoff, count: int) -> list[float]:
    return [backoff.next_sec() for _ in range(count)]


def test_each_pause_is_twice_the_last_one_up_to_the_longest() -> None:
    assert pauses(Backoff(1.0, 10.0), 6) == [1, 2, 4, 8, 10, 10]


def test_a_first_pause_beyond_the_longest_is_cut() -> None:
    assert pauses(Backoff(20.0, 10.0), 2) == [10, 10]


def test_pauses_begin_anew_after_a_success() -> None:
    backoff = Backoff(1.0, 60.0)
    pauses(backoff, 4)
    backoff.reset()
    assert pauses(backoff, 2) == [1, 2]


@pytest.mark.parametrize(("max_sec", "expected"), [(5.0, [5, 5]), (100.0, [16, 32])], ids=["shorter", "longer"])
def test_another_limit_holds_from_the_next_pause_on(max_sec: float, expected: list[float]) -> None:
    backoff = Backoff(1.0, 8.0)
    pauses(backoff, 5)
    backoff.limit(max_sec)
    assert pauses(backoff, 2) == expected


def test_jitter_shortens_a_pause_by_half_at_most_and_leaves_the_next_one_alone() -> None:
    made = [pauses(Backoff(1.0, 4.0, has_jitter=True), 4) for _ in range(50)]
    assert all(whole / 2 <= pause <= whole for row in made for pause, whole in zip(row, [1, 2, 4, 4], strict=True))
    assert len({row[3] for row in made}) > 1


def test_a_failure_that_lasts_for_years_overflows_nothing() -> None:
    backoff = Backoff(1.0, 300.0)
    assert pauses(backoff, 5000)[-1] == 300
