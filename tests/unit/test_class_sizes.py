"""Classes and functions are small enough to be held in mind: their lines, and what an object keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import honed

TOP = Path(honed.__file__).parent
MAX_LINES = 250
MAX_FUNCTION_LINES = 90
MAX_ATTRIBUTES = 15
#: A record of that many keys in a file: what a checkpoint has beside weights and state.
RECORDS = {"Progress"}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield all classes, with the paths of their modules."""
    for path in sorted(TOP.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        yield from ((str(path.relative_to(TOP)), node) for node in nodes if isinstance(node, ast.ClassDef))


def attributes(of: ast.ClassDef) -> set[str]:
    """Return the names that a constructor sets in `self`, and the fields of a dataclass that is not frozen."""
    found = {
        node.attr
        for method in of.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    decorators = [ast.unparse(each) for each in of.decorator_list]
    if any("dataclass" in each and "frozen=True" not in each for each in decorators):
        found |= {ast.unparse(each.target) for each in of.body if isinstance(each, ast.AnnAssign)}
    return found


def test_no_class_is_too_large() -> None:
    sizes = [((each.end_lineno or 0) - each.lineno + 1, path, each.name) for path, each in classes()]
    assert any(name == "Daemon" for _, _, name in sizes)
    large = [f"{path}: {name} has {size} lines" for size, path, name in sizes if size > MAX_LINES]
    assert not large, "\n".join(large)


def test_no_function_is_too_long() -> None:
    sizes = [
        ((node.end_lineno or 0) - node.lineno + 1, path.relative_to(TOP), node.name)
        for path in sorted(TOP.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(sizes) > 1000
    long = [f"{path}: {name} has {size} lines" for size, path, name in sizes if size > MAX_FUNCTION_LINES]
    assert not long, "\n".join(long)


def test_no_class_keeps_too_much() -> None:
    kept = [(len(attributes(each)), path, each.name) for path, each in classes() if each.name not in RECORDS]
    full = [f"{path}: {name} has {num} attributes" for num, path, name in kept if num > MAX_ATTRIBUTES]
    assert not full, "\n".join(full)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n  def __init__(self, x):\n    self.a, self.b = x\n    self.c: int = 1\n    x.d = self.e", "abc"),
        ("@dataclass\nclass A:\n  a: int\n  b: int = 1", "ab"),
        ("@dataclasses.dataclass(slots=True)\nclass A:\n  a: int", "a"),
        ("@dataclass(frozen=True)\nclass A:\n  a: int", ""),
    ],
)
def test_what_counts_as_kept(source: str, names: str) -> None:
    (of,) = ast.parse(source).body
    assert isinstance(of, ast.ClassDef)
    assert attributes(of) == set(names)
