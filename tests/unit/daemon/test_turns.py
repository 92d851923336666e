"""Turns of users are weighted, and so are those at a helper; all are counted, and nothing is timed."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.arrivals.line import Line, Request
from honed.daemon.arrivals.turns import Turns
from honed.run.reply import Refused
from honed.spec.config import Config
from honed.system.error import SpecError
from honed.system.personpath import PersonPath

A, B, C = 1000, 1001, 1002


def taken(turns: Turns, users: list[int], count: int) -> list[int]:
    found = []
    for _ in range(count):
        found.append(turns.first(users))
        turns.take(found[-1], users)
    return found


@pytest.mark.parametrize(
    ("weights", "num_turns"),
    [
        ({A: 3.0, B: 1.0}, {A: 30, B: 10}),
        ({A: 1.0, B: 0.5}, {A: 20, B: 10}),
        ({A: 0.3, B: 0.1, C: 0.2}, {A: 30, B: 10, C: 20}),
        ({A: 1.0, B: 1.0, C: 1.0}, {A: 10, B: 10, C: 10}),
        ({A: 1000.0, B: 1.0}, {A: 1000, B: 1}),
        ({A: 1000.0, B: 0.01}, {A: 100_000, B: 1}),
    ],
)
def test_users_who_wait_have_turns_by_their_weights(weights: dict[int, float], num_turns: dict[int, int]) -> None:
    turns = Turns(lambda uid: weights[uid or 0])
    found = Counter(taken(turns, list(weights), sum(num_turns.values())))
    assert all(abs(found[uid] - number) <= 1 for uid, number in num_turns.items()), found


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=6), st.integers(1, 300))
def test_nobody_is_ever_off_by_more_than_a_turn_of_each_other_user(weights: list[float], count: int) -> None:
    turns = Turns(lambda uid: weights[uid or 0])
    found = Counter(taken(turns, list(range(len(weights))), count))
    whole = sum(map(Fraction, weights))
    for uid, weight in enumerate(weights):
        assert abs(found[uid] - count * Fraction(weight) / whole) <= len(weights)


def test_turns_of_the_same_weight_go_round_and_those_of_others_are_spread() -> None:
    assert taken(Turns(), [A, B, C], 7) == [A, B, C, A, B, C, A]
    weights = {A: 3.0, B: 1.0}
    found = taken(Turns(lambda uid: weights[uid or 0]), [A, B], 12)
    assert all(B in found[at : at + 5] for at in range(8)), found  # 4, but for rounding


def test_who_comes_is_next_and_has_saved_up_nothing() -> None:
    weights = {A: 3.0, B: 1.0, C: 0.5}
    turns = Turns(lambda uid: weights[uid or 0])
    taken(turns, [A, C], 100)
    assert turns.first([A, B, C]) == B
    found = Counter(taken(turns, [A, B], 40))
    assert abs(found[B] - 10) <= 1
    taken(turns, [A], 90)  # C has waited for nothing meanwhile
    assert Counter(taken(turns, [A, C], 70))[C] in (10, 11)


def test_who_comes_again_and_again_has_no_more_turns_than_by_waiting() -> None:
    weights = {A: 1.0, B: 0.1}
    turns = Turns(lambda uid: weights[uid or 0])
    found = []
    for _ in range(110):
        found += taken(turns, [A, B] if turns.first([A, B]) == B else [A], 1)
    assert Counter(found)[B] in (10, 11)


def test_a_weight_that_has_been_raised_counts_at_once_and_a_debt_ends_with_the_round() -> None:
    weights = {A: 1.0, B: 0.01}
    turns = Turns(lambda uid: weights[uid or 0])
    taken(turns, [A, B], 3)
    assert B not in taken(turns, [A, B], 50)
    weights[B] = 1.0
    assert B in taken(turns, [A, B], 2)
    weights[B] = 0.01
    assert B not in taken(turns, [A, B], 50)
    turns.end()
    assert turns.first([B, A]) == B


# --- Helpers ----------------------------------------------------------------------------------------------------------


class Row:
    """A line of job files before some helpers, each of which ends its checks in order."""

    def __init__(self, weights: dict[int, float], num_helpers: int = 1) -> None:
        self.line = Line(num_helpers, lambda uid: weights[uid or 0])
        self.number = 0
        self.at_work: list[Request] = []

    def add(self, uid: int, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            self.line.add(Request(self.number, PersonPath(Path()), Config(), uid=uid))

    def begin(self) -> list[int | None]:
        """Let all helpers that may take a request do so, and return whose these are."""
        found = []
        while (request := self.line.take()) is not None:
            self.at_work.append(request)
            found.append(request.uid)
        return found

    def end(self) -> list[int]:
        """End the oldest check, and return the numbers of the answers."""
        request = self.at_work.pop(0)
        return [each.id for each in self.line.end(request, Refused(request.id, SpecError("no")))]

    def checked(self, count: int) -> list[int | None]:
        """Return the users of the next checks."""
        found = self.begin()
        while len(found) < count:
            self.end()
            found += self.begin()
        return found


def test_checks_by_one_helper_are_weighted_and_a_users_files_keep_their_order() -> None:
    row = Row({A: 3.0, B: 1.0})
    row.add(A, 60)
    row.add(B, 60)
    users, answers = row.begin(), []
    while len(users) < 40:
        answers += row.end()
        users += row.begin()
    assert Counter(users) == {A: 30, B: 10}
    for numbers in (range(1, 61), range(61, 121)):
        own = [number for number in answers if number in numbers]
        assert own == list(numbers)[: len(own)]


def test_who_comes_is_checked_next_beside_a_flood_of_a_user_of_a_greater_weight() -> None:
    row = Row({A: 1000.0, B: 0.01})
    row.add(A, 100)
    row.checked(50)
    row.add(B)
    row.end()
    assert row.begin() == [B]


def test_a_check_that_is_put_back_costs_no_second_turn() -> None:
    row = Row({A: 1.0, B: 1.0})
    row.add(A, 20)
    row.add(B, 20)
    users = row.begin()
    for number in range(20):
        if number == 5:
            row.line.put_back(row.at_work.pop())
            assert row.begin() == [users[-1]]  # the same one, at once
        row.end()
        users += row.begin()
    assert Counter(users) in ({A: 11, B: 10}, {A: 10, B: 11})


def test_one_who_was_late_has_saved_up_nothing_when_a_check_ends_in_time() -> None:
    row = Row({A: 1.0, B: 1.0})
    row.add(B)
    row.begin()
    request = row.at_work.pop()
    row.line.end(request, Refused(request.id, SpecError("late")), is_late=True)
    row.add(A, 100)
    row.add(B, 100)
    assert set(row.checked(50)) == {A}
    row.line._late.clear()
    assert Counter(row.checked(40)[-40:])[A] in (19, 20, 21)


def test_several_helpers_are_shared_by_weight_and_each_user_who_waits_has_one() -> None:
    row = Row({A: 3.0, B: 1.0}, num_helpers=5)
    row.add(A, 200)
    row.add(B, 200)
    assert Counter(row.begin()) == {A: 3, B: 1}  # and one is left for whoever comes
    assert {A, B} <= {request.uid for request in row.at_work}
