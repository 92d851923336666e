"""Trees that are removed although something in them cannot be: mounts, closed directories, faults of the disk."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path
from typing import Any

import pytest

import honed
from hanging import hanging, mounted, needs_fuse, needs_root
from honed.job import tree
from honed.job.tree import Count

SOURCE = Path(honed.__file__).parent


def made(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")
    return place


@needs_root
def test_what_is_mounted_in_a_tree_is_left_and_the_rest_goes(tmp_path: Path) -> None:
    top = made(tmp_path / "tree", "a/file", "a d/mount/below", "z/file")
    with mounted(top / "a d/mount"):
        made(top / "a d/mount", "precious")
        count = tree.remove(top)
        assert count.num_files == 2
        assert count.problem == f"{top}/a d/mount: another file system is mounted there"
        assert (top / "a d/mount/precious").exists()
        assert not (top / "a").exists()
        assert not (top / "z").exists()
    assert tree.remove(top) == Count(1, 1)
    assert not top.exists()


@needs_fuse
@pytest.mark.timeout(30)
def test_a_file_system_that_hangs_is_not_even_asked(tmp_path: Path) -> None:
    top = made(tmp_path / "tree", "a/file", "file", "z/file")
    (top / "dir").mkdir()
    with hanging(top / "dir"), hanging(top / "file"):
        assert tree.measure(top).num_files == 2
        assert "is mounted there" in str(tree.remove(top).problem)
        assert sorted(os.listdir(top)) == ["dir", "file"]  # noqa: PTH208 - Path.iterdir does the same
    assert tree.remove(top).problem is None


@needs_root
def test_a_tree_below_a_directory_that_may_only_be_passed_through_is_opened_up_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jobs/ is such a directory to the users of jobs."""
    top = made(tmp_path / "jobs" / "tree", "private/file")
    (top / "private").chmod(0o700)
    for path in (tmp_path, top, *top.rglob("*")):
        os.chown(path, 65534, 65534)
    (tmp_path / "jobs").chmod(0o711)
    monkeypatch.chdir(tmp_path)
    os.seteuid(65534)
    try:
        tree.open_up(Path("jobs/tree"))
        mode = Path("jobs/tree/private").stat().st_mode
        count = tree.remove(Path("jobs/tree/private"))
    finally:
        os.seteuid(0)
    assert mode & 0o770 == 0o770
    assert count == Count(1, 1)


@needs_root
def test_a_directory_of_our_own_that_is_closed_to_us_is_opened_and_anothers_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "tree", "closed/within/file", "read-only/file", "others/file", "z/file")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 65534, 65534)
    for name, mode in (("closed/within", 0), ("closed", 0), ("read-only", 0o400), ("others", 0)):
        (tmp_path / "tree" / name).chmod(mode)
    os.chown(tmp_path / "tree/others", 1, 1)
    monkeypatch.chdir(tmp_path)
    os.seteuid(65534)
    try:
        count = tree.remove(Path("tree"))
    finally:
        os.seteuid(0)
    assert count.num_files == 3
    assert count.problem == "tree/others: Permission denied"
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["others"]


def test_a_fault_of_the_disk_in_one_directory_leaves_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = made(tmp_path / "tree", "a/file", "bad/file", "z/file")
    bad, scandir = (top / "bad").stat().st_ino, os.scandir

    def fail(fd: int) -> Any:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(fd)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="tree/bad: Input/output error"):
        tree.clear(top)
    monkeypatch.undo()
    assert [str(path.relative_to(top)) for path in top.rglob("*")] == ["bad", "bad/file"]


def test_a_removal_can_be_watched_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "TICK", 10)
    top = made(tmp_path / "tree", *(f"{number}" for number in range(100)))
    num_ticks = 0

    def tick() -> None:
        nonlocal num_ticks
        num_ticks += 1
        if num_ticks == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tree.remove(top, tick)
    assert 0 < len(list(top.iterdir())) < 100


def test_a_closed_directory_is_opened_to_the_group_whatever_is_beside_it(tmp_path: Path) -> None:
    top = made(tmp_path / "tree", "closed/within/file", "file")
    (top / "closed").chmod(0o700)
    (top / "link").symlink_to(tmp_path)
    (top / "file").chmod(0o600)
    tree.open_up(top)
    modes = [path.lstat().st_mode & 0o770 for path in (top / "closed", top / "closed/within", top / "file", tmp_path)]
    assert modes == [0o770, 0o770, 0o600, 0o700]


#: Who may use these: no tree that others can write in is removed by them.
ALLOWED = {
    "TemporaryDirectory": {  # with the rights of the person who calls honectl, or of the job's own user
        *("check/rehearsal.py", "cli/again.py", "run/slurm_doctor.py", "cli/editing.py", "cli/init.py"),
        *("cli/submission.py", "inputs/hubdata.py", "spec/relative.py"),
    },
    "walk": {"cli/stage.py", "inputs/hubdata.py", "system/durable.py"},  # they remove nothing
    "rmtree": set(),
    "fwalk": set(),
    "removedirs": set(),
}


def test_nothing_else_removes_a_tree() -> None:
    """Recursion ends at a depth that anybody can make, and a walk by names leads where a link leads."""
    found: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="os" | "shutil" | "tempfile"), attr=name) | ast.alias(name=name):
                    if name in found:
                        found[name].add(str(path.relative_to(SOURCE)))
    assert found == ALLOWED


@needs_root
def test_a_directory_that_may_be_listed_and_not_entered_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "tree", "a/file", "listed/file", "z/file")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(tmp_path / "tree/listed", 1, 1)
    (tmp_path / "tree/listed").chmod(0o744)
    monkeypatch.chdir(tmp_path)
    os.seteuid(65534)
    try:
        count = tree.remove(Path("tree"))
    finally:
        os.seteuid(0)
    assert (count.num_files, count.problem) == (2, "tree/listed: Permission denied")
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["listed"]


def test_a_hole_in_a_file_takes_no_room(tmp_path: Path) -> None:
    with made(tmp_path / "tree", "file").joinpath("file").open("r+b") as file:
        file.truncate(2**50)
    assert tree.measure(tmp_path / "tree").num_bytes < 2**20
