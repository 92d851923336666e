"""Count docstrings that open with a relative clause, and statements that the formatter is told to skip.

    check_words.py [--list [PATH…]]

A docstring opens with a noun phrase or an imperative verb. `# fmt: skip` is for tables alone. Exits with 1 if either
count is above its limit; --list names every such docstring, in these files and directories or in all.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENERS = frozenset(
    {"As", "How", "Of", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why", "That", "Those"}
)
MAX_SHARE = 0.05
MAX_SKIPS = 29
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def is_relative(text: str) -> bool:
    """Tell whether a docstring opens with a word that needs a sentence before it."""
    word = re.match(r"\w+", text)
    return word is not None and word[0] in OPENERS


def main() -> int:
    """Print the counts; return 1 if one is above its limit."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--list", action="store_true", help="name every such docstring")
    options.add_argument("paths", nargs="*", type=Path, help="files and directories")
    given = options.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    wanted = [path.resolve() for path in given.paths] or [ROOT]
    paths = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]
    paths = [path for path in paths if any(path.is_relative_to(each) for each in wanted)]
    every = [(path, line, text) for path in paths for line, text in docstrings(path)]
    relative = [item for item in every if is_relative(item[2])]
    skips = sum(path.read_text().count("# fmt:" + " skip") for path in paths)
    if given.list:
        for path, line, text in relative:
            print(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    print(
        f"{len(relative)} of {len(every)} docstrings open with a relative clause; {skips} statements are not formatted"
    )
    return int(len(relative) > MAX_SHARE * len(every) or skips > MAX_SKIPS)


if __name__ == "__main__":
    sys.exit(main())
