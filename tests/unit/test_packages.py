"""The docstring of each package answers what a newcomer asks, by a path."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "daemon/honed"
PACKAGES = sorted(SOURCE.glob("**/__init__.py"))
QUESTIONS = {
    "Who renames an entry into failed/?": "job/spool.py",
    "Why does this job wait?": "daemon/obstacles.py",
    "Where does another trainer go?": "worker/recipe/sft.py",
    "Which test holds a given promise?": "tests/README.md",
    "Where is the memory estimate compared?": "check/checklist.py",
    "What may the daemon not import?": "pyproject.toml",
    "Who may read a job's report?": "page/guard.py",
    "Where does a row become tokens?": "text/chat.py",
    "What happens when the worker dies?": "daemon/settling.py",
    "Where is a key of the job file declared?": "spec/spec.py",
}


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_the_paths_that_the_packages_name_exist() -> None:
    named = [
        (path.parent, name)
        for path in PACKAGES
        for name in re.findall(r"[\w./-]+\.(?:py|toml|md)\b", docstring(path).replace("honed.toml", ""))
    ]
    assert len(named) > len(QUESTIONS)
    wrong = [name for parent, name in named if not any((place / name).is_file() for place in (SOURCE, parent, ROOT))]
    assert wrong == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_newcomer_asks_is_answered_by_a_path(question: str) -> None:
    answers = [line.partition(question)[2] for path in PACKAGES for line in docstring(path).splitlines()]
    assert [answer for answer in answers if QUESTIONS[question] in answer]
