"""A version made by scripts/release: one number everywhere, a dated CHANGELOG, one commit and one tag."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from honed import __version__

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not ((ROOT / ".venv/bin/python").exists() and (ROOT / ".git").exists()),
    reason="needs a repository with the .venv of scripts/setup",
)
MAJOR, MINOR, PATCH = map(int, __version__.split("."))  # noqa: RUF048  (scripts/release makes no others)
NEXT = f"{MAJOR}.{MINOR + 1}.0"


def git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def release(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "scripts/release", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with this tree's files, and with a check that only this test decides about."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "tests")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "tests@localhost")
    made = tmp_path / "tree"
    made.mkdir()
    wanted = ("daemon", "docs/man", "docs/*.md", "etc", "scripts", "pyproject.toml")
    names = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "--", *wanted).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_bytes((ROOT / name).read_bytes())
            (made / name).chmod((ROOT / name).stat().st_mode)
    (made / "scripts/check").write_text('#!/bin/sh\n[ ! -e "$FAILS" ]\n')
    (made / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n\n- News.\n\n## 0.0.1 (2026-01-01)\n")
    (made / ".venv").symlink_to(ROOT / ".venv")
    (made / ".gitignore").write_text(".venv\n__pycache__\n")
    git(made, "init", "--quiet")
    git(made, "add", "--all")
    git(made, "commit", "--quiet", "--message", "all")
    return made


def test_a_release_is_one_commit_with_one_number_and_a_tag(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(tree, "rev-parse", "HEAD")
    dry = release(tree, "minor", "--dry-run")
    assert (dry.returncode, f"{__version__} -> {NEXT}" in dry.stdout) == (0, True), dry.stderr
    monkeypatch.setenv("FAILS", str(tmp_path))
    failed = release(tree, "minor")
    assert (failed.returncode, "check failed" in failed.stderr) == (1, True)
    assert (git(tree, "status", "--porcelain"), git(tree, "rev-parse", "HEAD"), git(tree, "tag")) == ("", head, "")
    monkeypatch.setenv("FAILS", os.devnull + "/none")
    done = release(tree, "minor")
    assert done.returncode == 0, done.stderr
    assert git(tree, "tag") == f"v{NEXT}"
    assert git(tree, "log", "--format=%s", f"{head}..v{NEXT}") == f"release: {NEXT}"
    assert git(tree, "status", "--porcelain") == ""
    assert f'version = "{NEXT}"' in (tree / "pyproject.toml").read_text()
    assert f'__version__ = "{NEXT}"' in (tree / "daemon/honed/__init__.py").read_text()
    assert (tree / "scripts/debian/changelog").read_text().startswith(f"honed ({NEXT}) ")
    assert f"honed {NEXT}" in (tree / "docs/man/honectl.1").read_text()
    news = (tree / "CHANGELOG.md").read_text()
    assert f"## Unreleased\n\n## {NEXT} (20" in news
    empty = release(tree, "patch")
    assert (empty.returncode, "nothing below" in empty.stderr) == (1, True)


def test_an_unclean_tree_and_a_number_that_is_not_next_are_refused(tree: Path) -> None:
    (tree / "docs/new.md").write_text("x")
    assert "not clean" in release(tree, "minor").stderr
    (tree / "docs/new.md").unlink()
    assert "is not after" in release(tree, "0.0.9").stderr
    git(tree, "tag", f"v{MAJOR}.{MINOR}.{PATCH + 1}")
    assert "exists already" in release(tree, "patch").stderr
