"""What the code asks of a job's kind."""

from __future__ import annotations

import ast
from pathlib import Path

from honed.spec.kind import KINDS

SOURCE = Path(__file__).parents[3] / "daemon/honed"


def test_the_code_asks_what_a_kind_does_and_hardly_ever_which_it_is() -> None:
    own = [SOURCE / "spec/kind.py", *(SOURCE / "worker/recipe").glob("*.py")]
    compared = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if path not in own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.MatchValue)
        and any(isinstance(part, ast.Constant) and part.value in KINDS for part in ast.walk(node))
    ]
    assert 0 < len(compared) <= 8, compared
