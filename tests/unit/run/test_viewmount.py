"""Directories of a view: opened as their submitter within a time, mounted, and unmounted without a question."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hanging import hanging, needs_fuse, needs_root
from honed.job import tree
from honed.run import viewmount
from honed.run.viewmount import ViewError, opened_as
from honed.system.access import Person

NOBODY = Person(65534, frozenset({65534}), "nobody")


def soon() -> float:
    return time.monotonic() + 30


@needs_root
def test_a_directory_is_opened_with_the_submitters_rights_alone(tmp_path: Path) -> None:
    with opened_as(NOBODY, Path("/usr"), until=soon()) as fd:
        assert os.path.samestat(os.fstat(fd), Path("/usr").stat())
        assert not os.get_inheritable(fd)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/usr")
    root = Person(0, frozenset({0}), "root")
    for who, name, why in (
        (NOBODY, "", "Permission denied, for the user nobody"),
        (root, "file", "Not a directory"),
        (root, "link", "Not a directory"),
        (root, "gone", "No such file or directory"),
    ):
        with pytest.raises(ViewError, match=why), opened_as(who, tmp_path / name, until=soon()):
            pass
    assert os.geteuid() == 0


@needs_fuse
@pytest.mark.timeout(60)
def test_a_file_system_that_does_not_answer_is_left_alone(tmp_path: Path) -> None:
    place, target = tmp_path / "place", tmp_path / "view/target"
    place.mkdir()
    target.mkdir(parents=True)
    root = Person(0, frozenset({0}), "root")
    with hanging(place):
        does_not_answer = pytest.raises(ViewError, match="place: a file system there does not answer")
        with does_not_answer, opened_as(root, place, until=time.monotonic() + 0.5):
            pass
        fd = os.open(place, os.O_PATH)
        try:
            viewmount.mount(fd, target)
            viewmount.mount(fd, target)
        finally:
            os.close(fd)
        assert tree.mounts_below(tmp_path / "view") == [target, target]
        viewmount.unmount_below(tmp_path / "view")
        assert tree.mounts_below(tmp_path / "view") == []
        tree.clear(tmp_path / "view")
