"""Comparing rows: equal rows are on one side of a split, and all others stay where they were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import census, dataset
from honed.inputs.media import Media
from honed.inputs.row import Example, convert
from honed.system.error import DatasetError


def texts(*said: str) -> list[Example]:
    return [Example("text", text=text, row_index=number) for number, text in enumerate(said)]


def talk(*roles: str) -> Example:
    return Example("messages", [{"role": role, "content": "x"} for role in roles])


def test_rows_say_the_same_whatever_their_format_place_and_other_columns() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"instruction": "2+2?", "output": "4", "id": 1}, "alpaca"),
        ({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4\n"}]}, "messages"),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, "sharegpt"),
    ]
    digests = {census.digest(convert(row, form, row_index=n)) for n, (row, form) in enumerate(rows)}
    assert len(digests) == 1
    other = convert({"instruction": "2+2?", "output": "5"}, "alpaca")
    assert census.digest(other) not in digests


def test_rows_with_other_pictures_say_other_things() -> None:
    turns = talk("user", "assistant").messages
    media = [(Media("image", Path("/a.png")),), (Media("image", Path("/b.png")),), (Media("image", data=b"a"),), ()]
    assert len({census.digest(Example("messages", turns, media=each)) for each in media}) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_split_of_rows_that_all_differ_is_a_sample_of_the_seed(seed: int) -> None:
    examples = texts(*map(str, range(50)))
    held = set(random.Random(seed).sample(range(50), 5))
    assert [each.row_index for each in dataset.split(examples, 0.1, seed)[1]] == sorted(held)


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_say_the_same_are_on_one_side(seed: int) -> None:
    examples = texts(*(str(number % 7) for number in range(30)))
    train, held_out = dataset.split(examples, 0.2, seed)
    assert train
    assert held_out
    assert not {each.text for each in train} & {each.text for each in held_out}
    assert sorted([*train, *held_out], key=lambda each: each.row_index) == examples
    assert dataset.split(examples, 0.2, seed) == (train, held_out)


def test_rows_that_all_say_the_same_cannot_be_split() -> None:
    with pytest.raises(DatasetError, match="all 3 examples are identical"):
        dataset.split(texts("a", "a ", "a"), 0.5, 0)


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_each_side_has_a_row_where_two_say_different_things(share: float) -> None:
    for seed in range(10):
        train, held_out = dataset.split(texts("a", "b", "a", "b", "a", "a"), share, seed)
        assert {each.text for each in train} ^ {each.text for each in held_out} == {"a", "b"}


@pytest.mark.parametrize(
    ("roles", "odd"),
    [
        (["user", "assistant"], None),
        (["system", "user", "assistant", "user", "assistant"], None),
        (["user", "assistant", "tool", "assistant"], None),
        (["assistant", "user"], "swapped"),
        (["system", "assistant", "user", "assistant"], "opens"),
        (["user", "assistant", "user"], "unanswered"),
        (["user", "assistant", "tool"], "unanswered"),
        (["user", "user", "assistant"], "twice"),
    ],
)
def test_an_odd_order_of_roles_is_seen(roles: list[str], odd: str | None) -> None:
    assert census.order(talk(*roles)) == odd
    assert census.order(Example("text", text="a")) is None
