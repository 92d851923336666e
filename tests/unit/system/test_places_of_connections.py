"""The places of the control socket's connections: who has to give way, and to whom."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from honed.system import place
from honed.system.error import EnvironmentInvalidError
from honed.system.holder import UNKNOWN, Holders
from honed.system.place import MAX_KNOWN, MAX_OWN, MAX_PER_HOLDER, MAX_UNKNOWN, READING_SEC, SILENCE_SEC

ALICE, EVE = 70_001, 70_002


@dataclass(eq=False)
class One:
    holder: int
    since: float
    is_silent: bool = True


def test_one_user_has_sixteen_places_and_the_next_takes_that_of_the_longest_silence() -> None:
    held = [One(EVE, float(n)) for n in range(MAX_PER_HOLDER)]
    assert place.gives_way(held, ALICE, 1.0) is None
    with pytest.raises(EnvironmentInvalidError, match="you have 16"):
        place.gives_way(held, EVE, SILENCE_SEC - 1)
    assert place.gives_way(held, EVE, SILENCE_SEC + 1) is held[0]


def test_one_who_reads_its_answer_slowly_gives_way_after_thirty_seconds() -> None:
    held = [One(EVE, 0.0, is_silent=False) for _ in range(MAX_PER_HOLDER)]
    with pytest.raises(EnvironmentInvalidError):
        place.gives_way(held, EVE, SILENCE_SEC + 1)
    assert place.gives_way(held, EVE, READING_SEC) in held


def test_where_all_places_are_taken_the_user_with_the_most_gives_way_first() -> None:
    held = [One(80_000 + n, 0.0) for n in range(MAX_KNOWN - 2)] + [One(EVE, 5.0), One(EVE, 4.0)]
    assert place.gives_way(held, ALICE, 100.0) is held[-1]


def test_root_has_a_place_whatever_others_hold_and_the_newest_of_its_own() -> None:
    others = [One(80_000 + n, 0.0) for n in range(MAX_KNOWN)] + [One(UNKNOWN, 0.0)] * MAX_UNKNOWN
    assert place.gives_way(others, 0, 0.0) is None
    own = [One(0, float(n)) for n in range(MAX_OWN)]
    assert place.gives_way([*others, *own], 0, float(MAX_OWN)) is own[0]


def test_users_whom_the_machine_does_not_know_share_few_places() -> None:
    held = [One(UNKNOWN, 0.0) for _ in range(MAX_UNKNOWN)]
    with pytest.raises(EnvironmentInvalidError):
        place.gives_way(held, UNKNOWN, 1.0)
    assert place.gives_way(held, ALICE, 1.0) is None


def test_a_subordinate_user_is_its_owner(tmp_path: Path) -> None:
    subuid = tmp_path / "subuid"
    subuid.write_text(
        "nobody:300000:65536\n70002:400000:10\n# a comment\nghost-of-nobody:500000:10\nbroken:x:1\n0:60:1\n"
    )
    holders = Holders(subuid)
    assert holders.of(300_000) == holders.of(365_535) == 65_534
    assert holders.of(400_009) == EVE
    assert {holders.of(each) for each in (400_010, 500_001, 365_536)} == {UNKNOWN}
    assert holders.of(65_534) == 65_534  # a user of the machine
    assert holders.of(61_184) == 61_184  # and one of systemd's, as honed-web is
    assert holders.of(os.getuid()) == os.getuid()
    assert Holders(tmp_path / "none").of(300_000) == UNKNOWN
