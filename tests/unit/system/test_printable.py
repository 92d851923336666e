"""Text from elsewhere moves no cursor and fakes no line."""

from __future__ import annotations

import pytest

from honed.system.printable import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, ünïcode, 漢字", "plain, ünïcode, 漢字"),
        ("a\x1b[2Jb", "a�[2Jb"),
        ("a\r\nb\tc", "a��b�c"),
        ("half a character \ud800", "half a character �"),
        ("turned \u202eround", "turned �round"),
    ],
)
def test_what_is_not_printable_is_replaced(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_what_is_kept_stays_and_the_rest_is_replaced_as_asked() -> None:
    assert printable("a\nb\x07c", keep="\n", instead="·") == "a\nb·c"
