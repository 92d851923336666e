"""The names of test files: pytest imports each as a module of that name, whatever folder it lies in."""

from __future__ import annotations

import collections
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_files_without_a_package_have_one_name() -> None:
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if not (path.parent / "__init__.py").exists():
            places[path.name].append(str(path.relative_to(TESTS)))
    assert len(places) > 300
    assert [paths for paths in places.values() if len(paths) > 1] == []
