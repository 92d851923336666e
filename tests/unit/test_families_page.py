"""docs/families.md lists each family of the zoo once."""

from __future__ import annotations

import re
from pathlib import Path

from zoo.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs/families.md"


def test_the_page_of_families_lists_exactly_those_that_are_tried() -> None:
    assert re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE) == list(FAMILIES)
