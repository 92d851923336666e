"""Arrivals are taken by turns of their users, and one that has just come is not behind a listing of all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from watchdog.events import FileMovedEvent

from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.checks import MAX_TOGETHER, Checks
from honed.daemon.arrivals.incoming import LISTING_REST, Incoming
from honed.daemon.arrivals.rejection import Rejection
from honed.daemon.arrivals.watcher import Watcher
from honed.job.arrival import Arrivals
from honed.job.spool import Spool
from honed.run.helper import children
from honed.spec.config import Config
from honed.system.layout import Layout


class Door:
    """incoming/ and its clock; each listing takes a second, and no check ever ends."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        layout = Layout(path)
        self.spool = Spool(layout)
        self.spool.recover()
        self.watcher = Watcher(self.spool.incoming_dir, settle_sec=0, wake=lambda: None)
        self.checkers = Checkers(children(layout, ["sleep", "600"]))
        arrivals = Arrivals(self.spool)
        self.checks = Checks(self.checkers, Config)
        self.incoming = Incoming(
            arrivals,
            self.watcher,
            self.checkers,
            self.checks,
            Rejection(arrivals),
            Config,
            lambda _uid: (0, 0),
            clock=self.clock,
        )

    def clock(self) -> float:
        self.now += 0.5
        return self.now

    def drop(self, name: str) -> None:
        hidden = self.spool.incoming_dir / f".{name}"
        hidden.write_text("{}")
        hidden.rename(hidden.with_name(name))
        self.watcher.hint(FileMovedEvent(str(hidden), str(hidden.with_name(name))))

    def taken(self) -> list[str]:
        """Scan once, and return the names of all that are being checked."""
        self.incoming.scan(self.checks.numbers)
        return sorted(each.claim.name for each in self.checks._pending.values())


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    yield made
    made.checkers.close()
    made.spool.close()


def test_a_file_that_comes_between_two_listings_is_taken_at_once(door: Door) -> None:
    door.drop("first.json")
    assert door.taken() == ["first.json"]
    door.drop("second.json")
    door.drop(".hidden")
    assert door.now < LISTING_REST / 2  # the next listing is not due
    assert door.taken() == ["first.json", "second.json"]
    assert door.incoming.num_seen == 0
    door.now += LISTING_REST
    assert door.taken() == ["first.json", "second.json"]


def test_a_file_that_is_hinted_at_again_is_taken_once(door: Door) -> None:
    for number in range(MAX_TOGETHER + 2):
        door.drop(f"{number:02}.json")
    assert len(door.taken()) == MAX_TOGETHER
    door.drop("new.json")
    for name in (f"{MAX_TOGETHER}.json", "new.json"):
        path = str(door.spool.incoming_dir / name)
        door.watcher.hint(FileMovedEvent(path, path))
    assert len(door.taken()) == MAX_TOGETHER + 3
    assert list(door.spool.incoming_dir.glob("*.json")) == []
