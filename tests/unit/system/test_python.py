"""No Python that honed starts takes a module from the directory where it starts."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import honed
from honed.system import python

PACKAGE = Path(honed.__file__).parent
#: Where `sys.executable` is not the beginning of a command: it is shown, or followed by the words of our own start.
OTHER_USES = {
    "cli/commands.py": "a command for a person",
    "cli/doctor.py": "shown",
    "cli/setup.py": "the Python of the environment that scripts/setup makes",
    "daemon/health.py": "our own start again",
}
#: The programs that run unasked.
PROTECTED = (
    "check/preflight.py",
    "daemon/loop.py",
    "inputs/fetch.py",
    "page/server.py",
    "run/jobunit.py",
    "run/slurm_helper.py",
    "send/sender.py",
    "worker/__main__.py",
)


def uses(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
            yield node.lineno


def test_there_is_no_second_way_to_start_a_python() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(uses(path))}
    assert found == {"system/python.py", *OTHER_USES}


@pytest.mark.parametrize("program", PROTECTED)
def test_what_a_program_starts_is_protected_too(program: str) -> None:
    (main,) = (
        node
        for node in ast.parse((PACKAGE / program).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in {"main", "start_main"}
    )
    assert "python.protect()" in [ast.unparse(line) for line in main.body]


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A directory with modules that leave a file when they are imported."""
    for name in ("argparse", "json", "honed", "tempfile", "typing"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write(__name__)\n")
    (tmp_path / "script").write_text("import argparse, json")
    return tmp_path


GRANDCHILD = (
    "import subprocess, sys; from honed.system import python; python.protect(); "
    "subprocess.run([sys.executable, '-c', 'import json, argparse'], check=True)"
)
COMMANDS = {
    "module": python.module("honed.cli.honectl", "--version"),
    "code": python.code("import argparse, json, honed"),
    "bare": python.bare("script"),
    "bare code": python.bare_code("import argparse, json"),
    "what a child starts": python.code(GRANDCHILD),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_modules_of_the_current_directory_are_not_imported(trap: Path, kind: str) -> None:
    subprocess.run(COMMANDS[kind], cwd=trap, check=True, capture_output=True)
    assert not (trap / "sprung").exists()


def test_the_trap_springs(trap: Path) -> None:
    subprocess.run([COMMANDS["module"][0], "-c", "import argparse"], cwd=trap, check=True, env={})
    assert (trap / "sprung").exists()
