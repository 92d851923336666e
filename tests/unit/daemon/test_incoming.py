"""Arrivals are taken by turns of their users, and one that has just come is not behind a listing of all others."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from honed.daemon.arrivals import incoming
from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.checks import MAX_TOGETHER, Checks
from honed.daemon.arrivals.incoming import LISTING_REST, MAX_DENIALS, Incoming
from honed.daemon.arrivals.rejection import Rejection
from honed.daemon.arrivals.watcher import Watcher
from honed.job.arrival import Arrivals, Claim, Dropped
from honed.job.spool import Spool
from honed.run.helper import children
from honed.spec.config import Config
from honed.system.layout import Layout
from honed.system.personpath import PersonPath


class Door:
    """incoming/ and its clock; each listing takes a second, and no check ever ends."""

    def __init__(self, path: Path, arrivals_of: Callable[[Spool], Arrivals] = Arrivals) -> None:
        self.now = 0.0
        self.config = Config()
        layout = Layout(path)
        self.spool = Spool(layout)
        self.spool.recover()
        self.watcher = Watcher(self.spool.incoming_dir, settle_sec=0)
        self.checkers = Checkers(children(layout, ["sleep", "600"]))
        arrivals = arrivals_of(self.spool)
        self.checks = Checks(self.checkers, Config)
        self.incoming = Incoming(
            arrivals,
            self.watcher,
            self.checkers,
            self.checks,
            Rejection(arrivals),
            lambda: self.config,
            lambda _uid: (0, 0),
            clock=self.clock,
        )

    def clock(self) -> float:
        self.now += 0.5
        return self.now

    def drop(self, name: str, uid: int = 0) -> None:
        self.place(name, uid)
        self.tell(name)

    def place(self, name: str, uid: int = 0) -> None:
        """Rename a file in; its event is on the way."""
        hidden = self.spool.incoming_dir / f".{name}"
        hidden.write_text("{}")
        os.chown(hidden, uid, uid) if uid else None
        hidden.rename(hidden.with_name(name))

    def tell(self, name: str) -> None:
        """Let the event of a file that was renamed in come."""
        self.watcher.arrived(name, is_move=True)

    def order(self) -> list[str]:
        """Scan once, and return the names of all that are being checked, by their numbers."""
        self.incoming.scan(self.checks.numbers)
        return [each.claim.name for each in sorted(self.checks._pending.values(), key=lambda each: each.claim.id)]

    def taken(self) -> list[str]:
        """Scan once, and return the names of all that are being checked."""
        self.incoming.scan(self.checks.numbers)
        return sorted(each.claim.name for each in self.checks._pending.values())

    def num_taken(self) -> Counter[int]:
        """Scan once, and return the number of files of each user that are being checked."""
        self.incoming.scan(self.checks.numbers)
        return self.checks.num_by_user()

    def watch(self) -> None:
        """Let the watcher be one that watches, and that has done so at the last listing."""
        self.watcher._events = SimpleNamespace(read=lambda: ())  # type: ignore[assignment]
        assert self.order() == []
        self.now += LISTING_REST


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
        door.watcher.arrived(name, is_move=True)
    assert len(door.taken()) == MAX_TOGETHER + 3
    assert list(door.spool.incoming_dir.glob("*.json")) == []


def test_a_file_whose_event_comes_after_a_listing_has_seen_it_does_not_wait_for_the_next_one(door: Door) -> None:
    """Beside a flood the next listing is seconds away, and the reading of events behind."""
    door.watcher.settle_sec = 1e6
    door.place("late.json")
    assert door.taken() == []  # listed, looked at, and not known to be whole
    assert door.taken() == []
    door.tell("late.json")
    assert door.now < LISTING_REST / 2
    assert door.taken() == ["late.json"]


def test_a_file_that_is_whole_after_a_while_does_not_wait_for_the_next_listing(door: Door) -> None:
    now = [0.0]
    door.watcher.settle_sec, door.watcher._clock = 1.0, lambda: now[0]
    door.watcher._made_at = (0.0, 0.0)  # so that it is not older than the daemon
    door.place("copied.json")
    assert door.taken() == []
    now[0] = 2.0
    assert door.now < LISTING_REST / 2
    assert door.taken() == ["copied.json"]


def test_files_are_taken_in_the_order_of_their_events(door: Door) -> None:
    """Files of one tick of the kernel's clock have the same time."""
    door.watch()
    names = ["z.json", "a.json", "m.json"]
    for name in reversed(names):
        door.place(name)
    for name in names:
        door.tell(name)
    assert door.order() == names


def test_a_file_whose_event_comes_in_the_middle_of_a_scan_is_not_ahead_of_those_before_it(door: Door) -> None:
    door.watcher.settle_sec = 1e6
    for name in ("first.json", "second.json"):
        door.place(name)
    judged, coming = door.watcher.is_whole, ["first.json", "second.json"]

    def is_whole(path: PersonPath, as_of: float | None = None) -> bool:
        answer = judged(path, as_of)
        while path.name == "first.json" and coming:  # both events come between the looks at the two
            door.tell(coming.pop(0))
        return answer

    door.watcher.is_whole = is_whole  # type: ignore[method-assign]
    assert door.order() == []
    assert door.order() == ["first.json", "second.json"]


def test_time_that_passes_within_a_scan_lets_no_file_pass_another(door: Door) -> None:
    steps = itertools.cycle([0.01] * 20 + [1.0] * 20)  # some looks take long

    def clock() -> float:
        door.now += next(steps)
        return door.now

    door.watcher.settle_sec, door.watcher._clock = 2.0, clock
    door.watcher._made_at = (0.0, 0.0)  # so that nothing is older than the daemon
    names = [f"{number}.json" for number in range(8)]
    for name in names:
        door.place(name)
    taken: list[str] = []
    while len(taken) < len(names):
        taken = door.order()
        assert taken == names[: len(taken)]
        assert door.now < 1000


class Partial(Arrivals):
    """Its first listing of files misses one: a directory that changes may be read so."""

    missed = "first.json"

    def listing(self) -> Iterator[dict[str, int]]:
        for found in super().listing():
            found.pop(self.missed, None)
            self.missed = ""
            yield found


@pytest.mark.parametrize("has_events", [True, False])
def test_a_file_that_a_listing_has_missed_is_not_behind_the_later_ones_that_it_has_found(
    tmp_path: Path, has_events: bool
) -> None:
    door = Door(tmp_path, Partial)
    door.watch()
    for name in ("first.json", "second.json"):
        door.place(name)
        os.utime(door.spool.incoming_dir / name, (1e9, 1e9))  # whole by their age, event or not
    assert door.order() == []
    assert door.incoming.num_unsettled, "it must be looked at again soon"
    if has_events:
        door.tell("first.json")
        door.tell("second.json")
        assert door.order() == ["first.json", "second.json"]
    else:  # lost: they are taken a moment later
        for _ in range(3):
            door.now += LISTING_REST
            door.order()
        assert sorted(door.order()) == ["first.json", "second.json"]
    door.checkers.close()
    door.spool.close()


class Overlay(Arrivals):
    """Lists other inodes than `stat` has, as some overlays do. Its files cannot be moved away for a while."""

    num_faults = 0

    def listing(self) -> Iterator[dict[str, int]]:
        for found in super().listing():
            yield {name: inode + 1_000_000 for name, inode in found.items()}

    def claim_all(self, arrivals: Sequence[PersonPath]) -> list[Claim | Exception | None]:
        if not (self.num_faults and arrivals):
            return super().claim_all(arrivals)
        self.num_faults -= 1
        return [PermissionError(errno.EACCES, "Permission denied", str(path)) for path in arrivals]


def test_an_overlays_inodes_change_neither_the_order_nor_the_count_of_failures(tmp_path: Path) -> None:
    door = Door(tmp_path, Overlay)
    arrivals = door.incoming._arrivals
    assert isinstance(arrivals, Overlay)
    names = [f"{number}.json" for number in reversed(range(4))]
    arrivals.num_faults = 1
    for name in names:
        door.drop(name)
    assert door.order() == []
    door.now += LISTING_REST
    assert door.order() == names
    arrivals.num_faults = 10
    door.drop("never.json")
    for _ in range(MAX_DENIALS + 2):
        door.now += LISTING_REST
        door.order()
    assert arrivals.num_faults == 10 - MAX_DENIALS, "it is left after so many failures"
    arrivals.num_faults = 0
    door.drop("never.json")  # another file under that name
    assert door.order() == [*names, "never.json"]
    assert not door.incoming._listing._known
    door.checkers.close()
    door.spool.close()


def test_an_event_that_comes_late_moves_no_file_behind_those_after_it(door: Door) -> None:
    door.watch()
    names = [f"{number:02}.json" for number in range(MAX_TOGETHER + 8)]
    for name in names:
        door.place(name)
        os.utime(door.spool.incoming_dir / name, (1e9, 1e9))
    assert door.order() == []
    door.now += LISTING_REST
    assert door.order() == names[:MAX_TOGETHER]  # without their events
    for name in names[: MAX_TOGETHER + 4]:
        door.tell(name)
    assert door.order() == names


def test_what_lay_there_before_the_watch_is_not_behind_a_file_that_comes_as_it_begins(door: Door) -> None:
    for name in ("2.json", "1.json"):
        door.place(name)
        os.utime(door.spool.incoming_dir / name, (1e9, 1e9))
        time.sleep(0.02)  # a tick of the kernel's clock
    door.drop("0.json")
    assert door.order() == ["2.json", "1.json", "0.json"]


def test_a_file_in_place_of_one_that_could_not_be_taken_is_taken_even_with_its_inode(tmp_path: Path) -> None:
    door = Door(tmp_path, Overlay)
    door.watch()
    arrivals = door.incoming._arrivals
    assert isinstance(arrivals, Overlay)
    arrivals.num_faults = MAX_DENIALS
    door.drop("a.json")
    for _ in range(MAX_DENIALS):
        assert door.order() == []
    assert door.incoming._listing._left
    door.tell("a.json")
    assert door.order() == ["a.json"]
    door.checkers.close()
    door.spool.close()


def test_a_file_that_replaces_another_comes_behind_those_before_it(door: Door) -> None:
    for number in range(MAX_TOGETHER):
        door.drop(f"ahead-{number:02}.json")
    for name in ("a.json", "b.json", "c.json"):
        door.drop(name)
    assert len(door.order()) == MAX_TOGETHER
    door.drop("a.json")
    door.now += LISTING_REST
    assert door.order()[MAX_TOGETHER:] == ["b.json", "c.json", "a.json"]


class Counted(Arrivals):
    """Counts the files that are asked for."""

    num_looks = 0

    def dropped_of(self, names: Iterable[str]) -> list[Dropped]:
        names = list(names)
        self.num_looks += len(names)
        return super().dropped_of(names)


def test_a_listing_asks_for_no_file_that_an_earlier_one_has_seen(tmp_path: Path) -> None:
    """What a listing costs beside a flood that waits is the listing of its names."""
    door = Door(tmp_path, Counted)
    for number in range(500):
        door.drop(f"{number:03}.json")
    door.taken()
    arrivals = door.incoming._arrivals
    assert isinstance(arrivals, Counted)
    assert arrivals.num_looks == 500
    for number in range(5):
        door.drop(f"new-{number}.json")
        door.now += LISTING_REST  # the next listing is due
        door.taken()
    assert arrivals.num_looks == 505
    assert door.incoming.num_seen == 505 - len(door.checks.numbers)
    door.checkers.close()
    door.spool.close()


def test_files_that_are_removed_or_replaced_while_they_wait_are_forgotten_or_seen_anew(door: Door) -> None:
    for number in range(MAX_TOGETHER + 4):
        door.drop(f"{number:02}.json")
    door.taken()
    waiting = sorted(path.name for path in door.spool.incoming_dir.glob("*.json"))
    assert len(waiting) == 4
    (door.spool.incoming_dir / waiting[0]).unlink()
    door.drop(waiting[1])  # another file under its name
    door.now += LISTING_REST
    taken = door.taken()
    assert waiting[0] not in taken
    assert set(waiting[1:]) <= set(taken)
    assert door.incoming.num_seen == 0


ANNA, BERTA, CARL = 23001, 23002, 23003


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop files as several users")
@pytest.mark.parametrize("submits", [False, True])
def test_files_of_users_are_taken_by_turns_of_their_weights(door: Door, submits: bool) -> None:
    door.config = Config.model_validate({"users": {str(ANNA): {"weight": 3}, str(CARL): {"weight": 0.5}}})
    for number in range(40):
        for uid in (CARL, BERTA, ANNA):
            if submits and uid == BERTA:  # however they come
                door.incoming.submit(f"{uid}-{number}.json", b"{}", uid)
            else:
                door.drop(f"{uid}-{number}.json", uid)
    counts = [door.num_taken(), door.num_taken(), door.num_taken()]
    assert sum(counts[-1].values()) == 3 * MAX_TOGETHER
    for number, found in enumerate(counts, start=1):
        rounds = number * MAX_TOGETHER / 4.5
        shares = {ANNA: 3 * rounds, BERTA: rounds, CARL: rounds / 2}
        assert all(abs(found[uid] - share) <= 2 for uid, share in shares.items()), found
    own = sorted(each.claim.id for each in door.checks._pending.values() if each.copy.uid == ANNA)
    names = {each.claim.id: each.claim.name for each in door.checks._pending.values()}
    assert [names[number] for number in own] == [f"{ANNA}-{number}.json" for number in range(len(own))]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop files as several users")
def test_an_only_file_is_taken_in_the_next_pass_beside_a_flood_of_a_user_of_a_greater_weight(door: Door) -> None:
    door.config = Config.model_validate({"users": {str(ANNA): {"weight": 1000}, str(BERTA): {"weight": 0.001}}})
    for number in range(60):
        door.drop(f"{number}.json", ANNA)
    door.num_taken()
    door.drop("only.json", BERTA)
    assert door.num_taken()[BERTA] == 1


def test_a_long_listing_goes_on_over_passes_and_holds_up_nobody_elses_file(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "LISTING_SEC", 0.0)
    door.watch()
    for number in range(5000):
        (door.spool.incoming_dir / f"{number}.txt").write_text("{}")
    assert door.order() == []  # a part is listed
    door.place("theirs.json", uid=4711)
    door.tell("theirs.json")
    assert door.order() == ["theirs.json"]
    assert door.incoming.num_unsettled  # it goes on
    names = set[str]()
    for _ in range(100):
        door.now += LISTING_REST
        names = {name for own in door.incoming._listing.not_looked_at.values() for name in own}
        if len(names) > 4000:
            break
        door.order()
    assert len(names) > 4000


def test_of_a_users_flood_a_part_is_known_and_the_rest_is_taken_after_it(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "MAX_LISTED", 5)
    for number in range(20):
        door.drop(f"{number:02}.json")
    assert len(door.taken()) == 5
    assert door.incoming.num_unsettled
    for _ in range(20):
        door.now += LISTING_REST
        door.taken()
    assert len(door.taken()) == 20
