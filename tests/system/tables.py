"""Tables of docs/security.md that tests make: each below a comment `table: NAME`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/security.md"
WRITE = "HONED_WRITE_TABLES"


def grouped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows with those that differ in their first cell alone as one, in the order of the first of each."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    return [[", ".join(same), *cells] for cells, same in names.items()]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(each.replace("|", "\\|") or "–" for each in line) + " |" for line in lines)


def holds(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Hold the page's table of that name against these rows, grouped; with HONED_WRITE_TABLES, write it."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(?<=<!-- table: {name} -->\n\n)(?:\|.*\n)+")
    found = pattern.search(text)
    assert found is not None, f"docs/security.md has no table {name}"
    made = markdown(head, grouped(rows)) + "\n"
    if WRITE in os.environ:
        PAGE.write_text(pattern.sub(lambda _: made, text), encoding="utf-8")
        return
    assert found[0] == made, f"docs/security.md: the table {name} is another one: {WRITE}=1 writes it"
