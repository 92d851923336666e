"""The page on the architecture names every package exactly once."""

from __future__ import annotations

import re
from pathlib import Path

import honed

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_packages_names_each_once_and_modules_that_are_there() -> None:
    top = Path(honed.__file__).parent
    table = (DOCS / "architecture.md").read_text().partition("| package |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in table.splitlines()[2:]]
    assert sorted(row[0] for row in rows) == sorted(path.parent.name for path in top.glob("*/__init__.py"))
    missing = [
        f"{package}/{name}"
        for package, *names in rows
        for name in names
        if not (top / package / f"{name}.py").exists() and not (top / package / name).is_dir()
    ]
    assert missing == []
