"""What could not be removed: renamed once, remembered, and removed as soon as that is possible."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.cli import doctor
from honed.job import leftover
from honed.job.tree import no_tick
from honed.system.layout import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    for name in ("7/output/stuck", "7/plan.json", "8/file"):
        (made.jobs_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (made.jobs_dir / name).touch()
    return made


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A fault: files of this name cannot be removed."""
    unlink = os.unlink

    def fail(name: str, *, dir_fd: int | None = None) -> None:
        if name == "stuck":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        yield patch


def names(layout: Layout) -> list[str]:
    return sorted(path.name for path in layout.jobs_dir.iterdir())


def test_what_cannot_be_removed_gets_another_name_and_goes_later(layout: Layout, stuck: pytest.MonkeyPatch) -> None:
    count = leftover.remove(layout, layout.jobs_dir / "7", no_tick)
    assert (count.num_files, count.is_left) == (1, True)
    assert names(layout) == [".7.left", "8"]
    [left] = leftover.listed(layout)
    assert left.path == str(layout.jobs_dir / ".7.left")
    assert left.problem == f"{layout.jobs_dir}/7/output/stuck: Operation not permitted"
    [finding] = [each for each in doctor._leftovers(layout) if each.check == "leftovers"]
    assert (finding.status, left.path in finding.detail) == ("warning", True)
    assert leftover.remove_again(layout, no_tick).problem is not None
    assert [each.since for each in leftover.listed(layout)] == [left.since]
    stuck.undo()
    assert leftover.remove_again(layout, no_tick).problem is None
    assert names(layout) == ["8"]
    assert not layout.left_path.exists()
    assert doctor._leftovers(layout) == []


def test_a_name_that_is_taken_is_not_replaced(layout: Layout, stuck: pytest.MonkeyPatch) -> None:
    (layout.jobs_dir / ".7.left").mkdir()
    leftover.remove(layout, layout.jobs_dir / "7", no_tick)
    assert names(layout) == [".7.2.left", ".7.left", "8"]
    assert [each.path for each in leftover.listed(layout)] == [str(layout.jobs_dir / ".7.2.left")]


def test_what_cannot_be_renamed_either_stays_and_is_not_remembered(layout: Layout, stuck: pytest.MonkeyPatch) -> None:
    def busy(*_given: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    stuck.setattr(Path, "rename", busy)
    count = leftover.remove(layout, layout.jobs_dir / "7", no_tick)
    assert (count.is_left, names(layout), leftover.listed(layout)) == (False, ["7", "8"], [])


def test_a_list_that_is_damaged_is_empty(layout: Layout) -> None:
    layout.left_path.write_text('[{"path": 1')
    assert leftover.listed(layout) == []


def test_a_name_that_is_no_utf8_is_remembered(layout: Layout, stuck: pytest.MonkeyPatch) -> None:
    (layout.jobs_dir / "7" / os.fsdecode(b"\xff")).mkdir()
    (layout.jobs_dir / "7" / os.fsdecode(b"\xff") / "stuck").touch()
    (layout.jobs_dir / "7" / "output" / "stuck").rename(layout.jobs_dir / "7" / "output" / "other")
    assert leftover.remove(layout, layout.jobs_dir / "7", no_tick).is_left
    [left] = leftover.listed(layout)
    assert os.fsdecode(b"\xff") in left.problem
    assert leftover.remove_again(layout, no_tick).problem is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_root_leaves_is_honeds_to_read(layout: Layout, stuck: pytest.MonkeyPatch) -> None:
    os.chown(layout.state_dir, 4711, 4712)
    leftover.remove(layout, layout.jobs_dir / "7", no_tick)
    info = layout.left_path.stat()
    assert (info.st_uid, info.st_gid) == (4711, 4712)
