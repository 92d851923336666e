"""The moment at which an arriving file is complete."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from honed.daemon.arrivals.watcher import CLOSED_SETTLE_SEC, Watcher
from honed.system.personpath import PersonPath
from waiting import DEADLINE_SEC, wait_for

SETTLE_SEC = 1000.0


@pytest.fixture
def woken() -> threading.Event:
    return threading.Event()


@pytest.fixture
def watcher(tmp_path: Path, woken: threading.Event) -> Iterator[Watcher]:
    directory = tmp_path / "incoming"
    directory.mkdir()
    made = Watcher(directory, settle_sec=SETTLE_SEC, wake=woken.set)
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
    wait_for(lambda: not watcher._moved, what="nothing is moving")
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
        wait_for(lambda: "a.json" not in watcher._moved, what="the event")
        assert not becomes(lambda: is_whole(watcher, path), within_sec=2 * CLOSED_SETTLE_SEC)


@pytest.mark.parametrize("jump_sec", [86400.0, -86400.0])
def test_a_clock_that_is_set_makes_no_file_whole(tmp_path: Path, jump_sec: float) -> None:
    jumps = [0.0]
    blind = Watcher(tmp_path, settle_sec=1000, wake=lambda: None, now=lambda: time.time() + jumps[0])
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


def test_a_file_written_on_after_it_was_closed_must_lie_still_again(tmp_path: Path, woken: threading.Event) -> None:
    now = [0.0]
    path = tmp_path / "a.json"
    watcher = Watcher(tmp_path, settle_sec=SETTLE_SEC, wake=woken.set, clock=lambda: now[0])
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


def test_every_drop_wakes_the_loop(watcher: Watcher, tmp_path: Path, woken: threading.Event) -> None:
    (tmp_path / "incoming/a.json").write_text("{}")
    assert woken.wait(DEADLINE_SEC)


def test_a_replaced_directory_is_watched_again(watcher: Watcher, tmp_path: Path, woken: threading.Event) -> None:
    (tmp_path / "incoming").rename(tmp_path / "old")
    (tmp_path / "incoming").mkdir()
    time.sleep(0.2)
    watcher.rearm()
    woken.clear()
    (tmp_path / "incoming/a.json").write_text("{}")
    assert woken.wait(DEADLINE_SEC)


def test_without_inotify_a_file_that_lies_still_is_whole(tmp_path: Path) -> None:
    blind = Watcher(tmp_path / "nowhere", settle_sec=0.2, wake=lambda: None)
    blind.start()
    assert not blind.is_watching
    path = tmp_path / "a.json"
    path.write_text("{}")
    assert not blind.is_whole(PersonPath.of(path, 1))
    wait_for(lambda: blind.is_whole(PersonPath.of(path, 1)), what="a whole file")
