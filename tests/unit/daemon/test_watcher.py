"""The moment at which an arriving file is complete."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from honed.daemon.arrivals.watcher import CLOSED_SETTLE_SEC, Watcher
from honed.system.personpath import PersonPath
from waiting import DEADLINE_SEC, wait_for

SETTLE_SEC = 1000.0


@pytest.fixture
def followed() -> list[int | None]:
    """The descriptors that the loop was told to follow, the last one being the present one."""
    return []


@pytest.fixture
def watcher(tmp_path: Path, followed: list[int | None]) -> Iterator[Watcher]:
    directory = tmp_path / "incoming"
    directory.mkdir()
    made = Watcher(directory, settle_sec=SETTLE_SEC, follow=lambda _old, new: followed.append(new))
    made.start()
    assert made.is_watching
    yield made
    made.stop()


def becomes(condition: Callable[[], bool], *, within_sec: float) -> bool:
    deadline = time.monotonic() + within_sec
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def is_whole(watcher: Watcher, path: Path) -> bool:
    watcher.take_hinted()
    return watcher.is_whole(PersonPath.of(path, 1))


def test_a_file_renamed_in_is_whole_at_once(watcher: Watcher, tmp_path: Path) -> None:
    temporary = tmp_path / "incoming/.a.tmp"
    temporary.write_text("{}")
    path = temporary.rename(tmp_path / "incoming/a.json")
    wait_for(lambda: is_whole(watcher, path), what="a whole file")


def test_a_file_moved_in_from_elsewhere_is_whole_at_once(watcher: Watcher, tmp_path: Path) -> None:
    outside = tmp_path / "a.json"
    outside.write_text("{}")
    path = outside.rename(tmp_path / "incoming/a.json")
    wait_for(lambda: is_whole(watcher, path), what="a whole file")
    path.rename(outside)
    wait_for(lambda: watcher.read() or not watcher._moved, what="nothing is moving")
    with path.open("w") as file:  # another file of that name
        file.write("{")
        assert not becomes(lambda: is_whole(watcher, path), within_sec=2 * CLOSED_SETTLE_SEC)


def test_a_file_moved_in_from_elsewhere_is_whole_if_it_is_old(watcher: Watcher, tmp_path: Path) -> None:
    outside = tmp_path / "a.json"
    outside.write_text("{}")
    os.utime(outside, (1e9, 1e9))
    path = outside.rename(tmp_path / "incoming/a.json")
    wait_for(lambda: is_whole(watcher, path), what="a whole file")


@pytest.mark.parametrize("aside", [".a.json", "b.json"])
def test_a_file_written_under_the_name_of_one_that_was_moved_aside_is_not_whole_while_it_is_written(
    watcher: Watcher, tmp_path: Path, aside: str
) -> None:
    outside = tmp_path / "a.json"
    outside.write_text("{}")
    path = outside.rename(tmp_path / "incoming/a.json")
    wait_for(lambda: is_whole(watcher, path), what="a whole file")
    path.rename(path.with_name(aside))
    with path.open("w") as file:
        file.write("{")
        wait_for(lambda: watcher.read() and "a.json" not in watcher._moved, what="the event")
        assert not becomes(lambda: is_whole(watcher, path), within_sec=2 * CLOSED_SETTLE_SEC)


@pytest.mark.parametrize("jump_sec", [86400.0, -86400.0])
def test_a_clock_that_is_set_makes_no_file_whole(tmp_path: Path, jump_sec: float) -> None:
    jumps = [0.0]
    blind = Watcher(tmp_path, settle_sec=1000, now=lambda: time.time() + jumps[0])
    path, old = tmp_path / "a.json", tmp_path / "old.json"
    for each in (path, old):
        each.write_text("{}")
    os.utime(old, (1e9, 1e9))
    jumps[0] = jump_sec
    assert (blind.is_whole(PersonPath.of(path, 1)), blind.is_whole(PersonPath.of(old, 1))) == (False, True)
    os.utime(path, (time.time() + jump_sec,) * 2)  # it goes on being written
    assert not blind.is_whole(PersonPath.of(path, 1))


def test_a_copied_file_is_whole_soon_after_it_is_closed(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "incoming/a.json"
    path.write_text("{}")
    wait_for(lambda: is_whole(watcher, path), what="a whole file")


def test_a_file_that_is_open_for_writing_is_never_whole(watcher: Watcher, tmp_path: Path) -> None:
    path = tmp_path / "incoming/a.json"
    with path.open("w") as file:
        file.write("{")
        file.flush()
        os.utime(path, (1e9, 1e9))  # however old it looks
        assert not becomes(lambda: is_whole(watcher, path), within_sec=2 * CLOSED_SETTLE_SEC)
        file.write("}")
    wait_for(lambda: is_whole(watcher, path), what="a whole file")


def test_a_file_written_on_after_it_was_closed_must_lie_still_again(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "a.json"
    watcher = Watcher(tmp_path, settle_sec=SETTLE_SEC, clock=lambda: now[0])
    watcher.start()
    for _ in range(40):
        with path.open("a") as file:
            file.write(".")
        assert not watcher.is_whole(PersonPath.of(path, 1))
        now[0] += CLOSED_SETTLE_SEC * 0.9
    assert not watcher.is_whole(PersonPath.of(path, 1))
    now[0] += CLOSED_SETTLE_SEC * 0.2
    # The event that it was closed may still be on its way.
    wait_for(lambda: is_whole(watcher, path), what="a whole file")
    watcher.stop()


def is_readable(followed: list[int | None]) -> bool:
    fd = followed[-1]
    assert fd is not None
    return bool(select.select([fd], [], [], DEADLINE_SEC)[0])


def test_every_drop_wakes_the_loop(watcher: Watcher, tmp_path: Path, followed: list[int | None]) -> None:
    assert not watcher.read()
    (tmp_path / "incoming/a.json").write_text("{}")
    assert is_readable(followed)
    assert watcher.read()
    assert watcher.take_hinted() == ["a.json"]
    (tmp_path / "incoming/.hidden").write_text("{}")
    assert is_readable(followed)
    assert not watcher.read()


def test_of_a_flood_a_part_is_read_at_once_and_what_was_lost_is_known(watcher: Watcher, tmp_path: Path) -> None:
    one = tmp_path / "incoming/.one"
    one.write_text("{}")
    path = tmp_path / "incoming/moved.json"
    one.rename(path)
    assert watcher.take_hinted() == ["moved.json"]
    assert is_whole(watcher, path)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for number in range(limit + 10):
        os.link(path, tmp_path / f"incoming/{number}")
        (tmp_path / f"incoming/{number}").unlink()
        if number == 100:
            assert watcher.read()
    num_reads = 1
    while watcher.read():
        num_reads += 1
    assert num_reads > 5
    assert not watcher._moved  # it may be written again: the event was lost
    assert watcher.is_watching


def test_a_replaced_directory_is_watched_again(watcher: Watcher, tmp_path: Path, followed: list[int | None]) -> None:
    (tmp_path / "incoming").rename(tmp_path / "old")
    (tmp_path / "incoming").mkdir()
    watcher.rearm()
    assert not watcher.read()
    (tmp_path / "incoming/a.json").write_text("{}")
    assert is_readable(followed)
    assert watcher.take_hinted() == ["a.json"]


def test_one_that_ends_leaves_no_descriptor(watcher: Watcher, followed: list[int | None]) -> None:
    fd = followed[-1]
    watcher.stop()
    assert followed[-1] is None
    assert not watcher.is_watching
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd or -1)


def test_without_inotify_a_file_that_lies_still_is_whole(tmp_path: Path) -> None:
    blind = Watcher(tmp_path / "nowhere", settle_sec=0.2)
    blind.start()
    assert not blind.is_watching
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert not blind.is_whole(PersonPath.of(path, 1))
    wait_for(lambda: blind.is_whole(PersonPath.of(path, 1)), what="a whole file")
