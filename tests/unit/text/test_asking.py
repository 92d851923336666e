"""A generation prompt compared with the text before the turn in its row."""

from __future__ import annotations

import pytest

from honed.text import asking

USER = "<|im_start|>user\n2+2?<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("asked", "before", "turn", "is_fine"),
    [
        (USER + OPEN, USER + OPEN, "4", True),
        (USER + OPEN + "<think>\n", USER + OPEN, "<think>\nso\n</think>4", True),  # the turn begins so, too
        (USER + OPEN + "<think>\n\n</think>\n\n", USER + OPEN, "<think>\nso\n</think>4", False),
        (USER + OPEN + "<think>\n", USER + OPEN, "4", False),
        (USER + OPEN + "<think>\n", USER + OPEN + "<think>", "</think>4", False),
        (USER, USER + OPEN, "4", False),
        (USER[:-1], USER, "4", True),  # white space before the turn
        (USER.replace("\n2", "2") + OPEN, USER + OPEN, "4", True),  # white space further up
        (USER.replace("2+2", "3+3") + OPEN, USER + OPEN, "4", False),
    ],
)
def test_a_prompt_is_as_trained_or_not(asked: str, before: str, turn: str, is_fine: bool) -> None:
    found = asking.compare(asked, before + turn, len(before))
    assert (found is None) == is_fine
    # For two templates, only the text after the last message is compared.
    found = asking.compare_tails("A." + asked, "Be brief." + before + turn, len(before) + 9, "?")
    assert (found is None) == (is_fine or "3+3" in asked)


def test_the_first_of_the_rows_is_told_and_all_are_counted() -> None:
    found = asking.Mismatches()
    assert found.message(1, "") == ""
    mismatch = asking.compare(USER + OPEN + "<think>\n", USER + OPEN + "4", len(USER + OPEN))
    for place, each in (("row 1", None), ("row 2", mismatch), ("row 3", mismatch)):
        found.add(place, each, place)
    told = (asking.Mismatches() + found).message(3, "do this")
    assert "in 2 of 3 rows (the first: row 2: the generation prompt ends in" in told
    assert told.endswith("; do this")
    assert "<think>" in told
