"""The torture of scripts/torture --trees, short: no tree that a person planted keeps honed from starting, from taking
another user's file, and from removing the jobs that it lies in."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import trees
from crash.trees import EVERY, SLOW, Found, Size
from hanging import needs_fuse


def check(found: Found) -> None:
    print(found)
    assert found.broken == []


@pytest.mark.timeout(600)
def test_trees_in_all_places_keep_honed_from_nothing(tmp_path: Path) -> None:
    found = trees.started_on(EVERY, tmp_path / "it", Size())
    check(found)
    assert not [words for words in found.left if ".left:" in words]


@needs_fuse
@pytest.mark.timeout(600)
def test_a_file_system_that_never_answers_in_all_places_keeps_honed_from_nothing(tmp_path: Path) -> None:
    found = trees.started_on(SLOW, tmp_path / "it", Size())
    check(found)
    assert [words for words in found.left if ".left:" in words]
