"""A spool on a file system that sends no events for changes by other hosts, like NFS: the rescan finds files.

honed runs on an overlay, in a mount namespace of its own; the tests write files directly into the layer below.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, Instance
from watchdog.events import FileClosedEvent, FileCreatedEvent, FileModifiedEvent, FileMovedEvent, FileSystemEvent
from watchdog.events import FileSystemEventHandler as Handler
from watchdog.observers import Observer

from honed.job.job import State
from honed.system.client import Client
from honed.system.layout import Layout
from waiting import wait_for
from zoo import plain

MOUNT = "mount --make-rprivate / && mount -t overlay overlay -o lowerdir=$1,upperdir=$2,workdir=$3 $4"


class RemoteInstance(Instance):
    """An instance whose `root` is the overlay's upper layer: the tests write and read there, behind honed's back."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "upper")
        self.places = [directory / name for name in ("lower", "upper", "work", "merged")]
        for place in self.places:
            place.mkdir(exist_ok=True)
        self.command = self.inside(f"exec {sys.executable} {HERE / 'fakehoned.py'} $4")

    def inside(self, then: str) -> tuple[str, ...]:
        """Return a command that runs with the overlay mounted."""
        return ("unshare", "--mount", "sh", "-c", f"{MOUNT} && {then}", "sh", *map(str, self.places))

    @property
    def seen_by_honed(self) -> Layout:
        """The instance's layout as honed sees it."""
        assert self.process is not None
        return Layout(Path(f"/proc/{self.process.pid}/root{self.places[-1]}"))


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteInstance]:
    made = RemoteInstance(tmp_path)
    tried = subprocess.run(made.inside("true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no overlay can be mounted here: {tried.stderr.strip()}")
    yield made
    made.end()


class Spy(Handler):
    """An inotify watch on incoming/ as honed sees it, beside honed's own."""

    def __init__(self, remote: RemoteInstance) -> None:
        self.arrivals: set[str] = set()  #: files with an event that could have made honed look
        self._observer = Observer()
        self._observer.schedule(self, str(remote.seen_by_honed.spool_dir / "incoming"))
        self._observer.start()

    def dispatch(self, event: FileSystemEvent) -> None:
        match event:
            case FileMovedEvent():
                self.arrivals.add(Path(os.fsdecode(event.dest_path)).name)
            case FileCreatedEvent() | FileModifiedEvent() | FileClosedEvent():
                self.arrivals.add(Path(os.fsdecode(event.src_path)).name)

    def stop(self) -> None:
        self._observer.stop()
        self._observer.join()


@pytest.fixture
def spy(remote: RemoteInstance) -> Iterator[Spy]:
    remote.configure("[spool]\nrescan_interval_sec = 1\nsettle_sec = 3\n")
    remote.start()
    assert Client(remote.seen_by_honed.control_path).ask("status")["is_watching"]
    spy = Spy(remote)
    yield spy
    spy.stop()


def test_a_file_of_which_no_event_tells_is_found_by_the_rescan(remote: RemoteInstance, spy: Spy) -> None:
    text = json.dumps(plain.spec(remote.model, remote.dataset))
    remote.drop("succeed")  # renamed into the spool, which sends no event either
    (remote.incoming_dir / "succeed-2.json").write_text(text)
    for name in ("succeed", "succeed-2"):
        remote.wait_state(name, State.SUCCEEDED)
    assert spy.arrivals == set()
    (remote.seen_by_honed.spool_dir / "incoming/succeed-3.json").write_text(text)
    remote.wait_state("succeed-3", State.SUCCEEDED)
    # What honed's own machine writes is told of.
    wait_for(lambda: spy.arrivals == {"succeed-3.json"}, what="a sign that the spy is awake")


def test_a_file_that_is_still_being_written_elsewhere_is_let_settle(remote: RemoteInstance, spy: Spy) -> None:
    text = json.dumps(plain.spec(remote.model, remote.dataset))
    with (remote.incoming_dir / "succeed.json").open("w") as file:
        for letter in text[:-1]:
            file.write(letter)
            file.flush()
            time.sleep(4 / len(text))  # over several rescans, and for longer than a whole file would have to lie still
        assert remote.job("succeed") is None
        file.write(text[-1])
    remote.wait_state("succeed", State.SUCCEEDED)
    assert remote.rejected() == {}
    assert spy.arrivals == set()
