"""The page that says where everything lives names every module, each once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from honed import doctor

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_modules_names_each_of_the_daemons_side_once() -> None:
    table = (DOCS / "architecture.md").read_text().partition("| module | what lives there |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.count("|") > 2]
    named = Counter(name for cell in cells for name in re.findall(r"`(\w+)`", cell))
    there = {path.stem for path in Path(doctor.__file__).parent.glob("*.py")} - {"__init__"}
    assert named == Counter(there)
