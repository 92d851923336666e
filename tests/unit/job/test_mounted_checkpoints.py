"""A file system that a user has mounted on the checkpoints of a job of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hanging import hanging, mounted, needs_fuse, needs_root
from honed.job import removal
from honed.job.spool import Spool
from honed.system.layout import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    Spool(made, lock=False)
    (made.jobs_dir / "7/checkpoints").mkdir(parents=True)
    return made


def weigh(layout: Layout) -> tuple[int, str | None]:
    count = removal.settle(Spool(layout, lock=False), layout, "weigh:7")
    return count.num_files, count.problem


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "mount",
    [pytest.param(mounted, marks=needs_root), pytest.param(hanging, marks=needs_fuse)],
    ids=["tmpfs", "hanging"],
)
def test_checkpoints_on_which_something_is_mounted_are_not_entered(
    layout: Layout, mount: Callable[[Path], contextlib.AbstractContextManager[None]]
) -> None:
    place = layout.jobs_dir / "7/checkpoints"
    (place / "checkpoint-1").touch()
    assert weigh(layout) == (1, None)
    with mount(place):
        if mount is mounted:
            for number in range(5):
                (place / str(number)).touch()
        assert weigh(layout) == (0, f"{place}: another file system is mounted there")
    assert weigh(layout) == (1, None)


@needs_root
def test_checkpoints_that_a_mount_keeps_are_no_error_of_retention(layout: Layout) -> None:
    place = layout.jobs_dir / "7/checkpoints"
    with mounted(place):
        assert not removal.set_aside_checkpoints(layout, 7)
    assert removal.set_aside_checkpoints(layout, 7)
    assert not place.exists()
