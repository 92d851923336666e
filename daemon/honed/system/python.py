"""Commands that start a Python, none of which takes modules from the directory where it starts.

That directory may be anybody's: a worker starts in its job's, honectl where its user stands. What the programs that run
unasked start in turn, libraries' processes, too, is kept from it by `protect`.
"""

from __future__ import annotations

import os
import sys
from os import PathLike


def protect() -> None:
    """Have no Python that this process or a child starts take modules from where it starts."""
    os.environ["PYTHONSAFEPATH"] = "1"


def module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of our environment."""
    return [sys.executable, "-P", "-m", name, *arguments]


def code(text: str, *arguments: str) -> list[str]:
    """Return the command that runs a program that is given as text."""
    return [sys.executable, "-P", "-c", text, *arguments]


def bare(script: str | PathLike[str], *arguments: str) -> list[str]:
    """Return the command that runs a script which needs nothing but Python's own library."""
    return [sys.executable, "-I", "-S", str(script), *arguments]


def bare_code(text: str, *arguments: str) -> list[str]:
    """Return the command that runs a program, given as text, which needs nothing but Python's own library."""
    return [sys.executable, "-I", "-S", "-c", text, *arguments]
