"""The helpers of several submitters: one each, a few at a time, and nobody waits for another's for long."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.arrivals.checker import IDLE_SEC, Checker
from honed.daemon.arrivals.checkers import NUM_MORE_UNITS, START_GRACE_SEC, TURN_SEC, Checkers
from honed.daemon.arrivals.line import Request
from honed.run.helper import READY, STAGE_BYTES, ChildHelper, Watch, children
from honed.run.helper_slot import MAX_PAUSE_SEC
from honed.run.rehearsed import STAGE
from honed.run.reply import Passed
from honed.spec.config import Config
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from waiting import wait_for

MAX_UNITS = 1 + NUM_MORE_UNITS
#: Answers at once, except for files named hang and block, which wait until `<dir>/go` and `<dir>/unblock` exist.
HELPER = f"""
import json, os, pathlib, socket, sys, time
who, home = sys.argv[1], pathlib.Path(sys.argv[2])
if (home / f"broken-{{who}}").exists(): sys.exit(1)
if (home / f"silent-{{who}}").exists(): time.sleep(600)
print({READY.decode()!r}, flush=True)
(stage,), *_ = socket.recv_fds(socket.socket(fileno=os.dup(0)), 1, 1)[1:2]
for line in sys.stdin:
    request = json.loads(line)
    if request["spec_name"] == "rehearse.json": os.pwrite(stage, {STAGE.ljust(STAGE_BYTES).encode()!r}, 0)
    gate = {{"hang.json": "go", "block.json": "unblock", "rehearse.json": "go"}}.get(request["spec_name"])
    while gate is not None and not (home / gate).exists(): time.sleep(0.01)
    spec = {{"kind": "sft", "retry": {{"max_attempts": 1}}, "resources": {{"gpus": 0}}}}
    print(json.dumps({{"id": request["id"], "ok": True, "spec": spec, "plan": {{"who": who, "pid": os.getpid()}},
        "output_dir": "/o", "warnings": [], "lines": {{}}, "references": {{}}, "waits_for": {{}},
        "needs_fetch": None}}), flush=True)
"""


class Desk:
    """Checkers whose units are child processes that report their user."""

    def __init__(self, path: Path, num_helpers: int = 1) -> None:
        self.path = path
        self.ahead = 0.0
        self.selector = selectors.DefaultSelector()
        self.num_starts = 0
        layout = Layout(path)

        def of(who: object) -> Any:
            return children(layout, [sys.executable, "-S", "-c", HELPER, str(who), str(path)])

        self.weights: dict[int | None, float] = {}
        self.checkers = Checkers(
            of("honed"),
            of,
            self._follow,
            clock=self.clock,
            num_helpers=num_helpers,
            weight=lambda uid: self.weights.get(uid, 1.0),
        )
        self.answers: list[Passed] = []
        for name in ("plain", "hang", "block", "rehearse"):
            (path / f"{name}.json").write_text("{}")

    def clock(self) -> float:
        return time.monotonic() + self.ahead

    def _follow(self, old: int | None, new: int | None) -> None:
        if old is not None:
            self.selector.unregister(old)
        if new is not None:
            self.num_starts += 1
            self.selector.register(new, selectors.EVENT_READ)

    def submit(self, number: int, uid: int | None, name: str = "plain") -> None:
        self.checkers.submit(Request(number, PersonPath.own(self.path / f"{name}.json"), Config(), uid=uid))

    def turn(self) -> None:
        self.selector.select(0.02)
        for answer in self.checkers.poll():
            assert isinstance(answer, Passed), answer
            self.answers.append(answer)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, what="the checkers", account=lambda: self.answers, pause=lambda _sec: self.turn())

    def wait_answers(self, count: int) -> list[Passed]:
        self.wait(lambda: len(self.answers) >= count)
        return self.answers

    def whose(self) -> dict[int, str]:
        return {answer.id: answer.plan.document["who"] for answer in self.answers}

    def live(self) -> set[int]:
        """Return the users who have a helper."""
        return {uid for uid, checker in self.checkers._people.items() if checker.has_helper}

    def at_work(self) -> set[int]:
        return {uid for uid, checker in self.checkers._people.items() if not checker.is_between}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.checkers.close()
    made.selector.close()


def test_each_person_has_a_helper_and_accounts_of_the_system_share_ours(desk: Desk) -> None:
    for number, uid in enumerate((1000, 1001, 0, 999, None, 1000), start=1):
        desk.submit(number, uid)
    desk.wait_answers(6)
    assert desk.whose() == {1: "1000", 2: "1001", 3: "honed", 4: "honed", 5: "honed", 6: "1000"}
    pids = {answer.id: answer.plan.document["pid"] for answer in desk.answers}
    assert pids[1] == pids[6]
    assert len(set(pids.values())) == 3


def test_without_units_everything_is_ours(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.checkers._start_as = None
    desk.submit(1, 1000)
    desk.wait_answers(1)
    assert desk.whose() == {1: "honed"}
    desk.checkers.close()


def test_files_of_several_people_are_checked_at_once_and_of_more_in_turn(desk: Desk) -> None:
    people = [1000 + number for number in range(MAX_UNITS + 2)]
    for number, uid in enumerate(people, start=1):
        desk.submit(number, uid, "hang")
    desk.wait(lambda: len(desk.at_work()) == MAX_UNITS)
    for _ in range(20):
        desk.turn()
        assert len(desk.live()) <= MAX_UNITS
    assert desk.answers == []
    (desk.path / "go").touch()
    desk.wait_answers(len(people))
    assert len(desk.live()) <= MAX_UNITS


def test_who_comes_takes_the_place_that_had_nothing_to_do_for_the_longest(desk: Desk) -> None:
    for number in range(MAX_UNITS):
        desk.submit(number, 1000 + number)
        desk.wait_answers(number + 1)
        desk.turn()
        desk.ahead += 1
    desk.submit(10, 1000)
    desk.wait_answers(MAX_UNITS + 1)
    desk.turn()
    desk.submit(11, 2000)
    desk.wait_answers(MAX_UNITS + 2)
    assert desk.live() == {1000, *range(1002, 1000 + MAX_UNITS), 2000}


def test_a_flood_gives_way_when_its_turn_is_over(desk: Desk) -> None:
    """The flood continues after the others: nobody starves."""
    people = [1000 + number for number in range(MAX_UNITS)]
    for uid in people:
        for number in range(200):
            desk.submit(uid * 1000 + number, uid, {0: "hang", 100: "block"}.get(number, "plain"))
    desk.wait(lambda: desk.at_work() == set(people))
    desk.submit(1, 3000)
    desk.turn()
    assert 3000 not in desk.live()
    desk.ahead += TURN_SEC + 1
    (desk.path / "go").touch()
    desk.wait(lambda: 3000 in desk.live())  # it has a place, though half of each flood is still to be checked
    (desk.path / "unblock").touch()
    desk.wait_answers(200 * MAX_UNITS + 1)
    for uid in people:
        assert [number for number in desk.whose() if number // 1000 == uid] == [uid * 1000 + n for n in range(200)]
    assert desk.num_starts <= 2 * MAX_UNITS + 2


def test_turns_at_the_places_are_weighted_and_no_one_starves(desk: Desk) -> None:
    """Five users flood three places. After each turn, a place changes hands or is kept for another one."""
    people = [1000 + number for number in range(MAX_UNITS + 2)]
    desk.weights = {1000: 2.0, 1004: 0.5}
    desk.checkers._welcome = lambda _uid: None  # type: ignore[method-assign]  # who has just come is another test's
    num_submitted: Counter[int] = Counter()
    num_turns: Counter[int] = Counter()
    take = desk.checkers._turns.take

    def count(uid: int | None, present: Iterable[int | None]) -> None:
        num_turns[uid or 0] += 1
        take(uid, present)

    def top_up() -> None:
        num_answered = Counter(answer.id // 100_000 for answer in desk.answers)
        for uid in people:
            while num_submitted[uid] - num_answered[uid] < 50:
                desk.submit(uid * 100_000 + num_submitted[uid], uid)
                num_submitted[uid] += 1

    def is_settled() -> bool:
        top_up()
        live = desk.live()
        return len(live) == MAX_UNITS and not desk.checkers._ending and all(map(is_ready, live))

    def is_ready(uid: int) -> bool:
        return desk.checkers._people[uid].is_ready

    desk.wait(is_settled)
    desk.checkers._turns.take = count  # type: ignore[method-assign]
    for _ in range(11):
        desk.ahead += TURN_SEC
        desk.turn()
        desk.wait(is_settled)
    # By weight, of 33 turns 12, 6, 6, 6 and 3; nobody can have more than 11, one after another.
    assert num_turns[1000] > max(num_turns[uid] for uid in people[1:4]) + 1, num_turns
    assert min(num_turns[uid] for uid in people[1:4]) > num_turns[1004] >= 2, num_turns
    assert max(num_turns[uid] for uid in people[1:4]) - min(num_turns[uid] for uid in people[1:4]) <= 3, num_turns


def test_users_of_one_helper_take_turns(desk: Desk) -> None:
    desk.submit(1, 0, "hang")
    for number, uid in ((2, 0), (3, 0), (4, 0), (5, 999), (6, 998), (7, 999)):
        desk.submit(number, uid)
    (desk.path / "go").touch()
    desk.wait_answers(7)
    assert [answer.id for answer in desk.answers] == [1, 5, 6, 2, 7, 3, 4]


def test_one_whose_check_ran_into_its_deadline_comes_after_all_others_until_one_ends_in_time(desk: Desk) -> None:
    for number, uid, name in ((1, 0, "hang"), (2, 0, "plain"), (3, 0, "plain"), (4, 999, "plain"), (5, 999, "plain")):
        desk.submit(number, uid, name)
    found: list[int] = []

    def turn() -> None:
        desk.selector.select(0.02)
        found.extend(answer.id for answer in desk.checkers.poll())
        if not found and desk.num_starts == 1:
            desk.ahead += 10  # until its deadline is over

    wait_for(lambda: len(found) == 5, what="five answers", account=lambda: found, pause=lambda _sec: turn())
    assert found == [1, 4, 5, 2, 3]
    desk.submit(6, 0)
    desk.submit(7, 999)
    desk.wait_answers(2)
    assert [answer.id for answer in desk.answers] == [6, 7]  # it is not late any more


# --- Users who have just come -----------------------------------------------------------------------------------------

FLOOD = 300


def flood(desk: Desk, uid: int) -> None:
    """Let a user have many files checked, at least one of which has begun and none has ended."""
    for number in range(FLOOD):
        desk.submit(uid * 1000 + number, uid, "plain" if number else "hang")
    desk.wait(lambda: uid in desk.at_work())


def num_before(desk: Desk, uid: int) -> int:
    """Let all go on, and return how many checks have ended by the time that this user's begins."""
    (desk.path / "go").touch()
    desk.wait(lambda: uid in desk.at_work())
    return len(desk.answers)


def test_no_check_begins_while_the_unit_of_one_who_has_just_come_is_started(desk: Desk) -> None:
    flood(desk, 1000)
    desk.submit(1, 2000, "block")
    assert num_before(desk, 2000) <= 1  # the one that was under way
    desk.wait_answers(FLOOD)
    assert 1 not in desk.whose()


def test_a_flood_of_an_account_of_the_system_waits_for_a_persons_unit_too(desk: Desk) -> None:
    for number in range(FLOOD):
        desk.submit(10_000 + number, 0, "plain" if number else "hang")
    desk.wait(lambda: not desk.checkers._common.is_between)
    desk.submit(1, 2000, "block")
    assert num_before(desk, 2000) <= 1
    desk.wait_answers(FLOOD)


def test_who_has_just_come_takes_a_place_after_one_check_and_others_when_a_turn_is_over(desk: Desk) -> None:
    for uid in range(1000, 1000 + MAX_UNITS):
        flood(desk, uid)
    desk.submit(1, 2000, "block")
    assert num_before(desk, 2000) <= MAX_UNITS
    desk.ahead += TURN_SEC
    desk.wait_answers(MAX_UNITS * FLOOD)


def test_one_whose_unit_does_not_get_ready_holds_nobody_up_for_longer_than_the_grace(desk: Desk) -> None:
    (desk.path / "silent-2000").touch()
    flood(desk, 1000)
    desk.submit(1, 2000)
    (desk.path / "go").touch()
    desk.wait_answers(1)
    for _ in range(20):
        desk.turn()
    assert len(desk.answers) == 1
    desk.ahead += START_GRACE_SEC
    desk.wait_answers(FLOOD)
    assert 1 not in desk.whose()


def test_nobody_is_new_again_and_again(desk: Desk) -> None:
    desk.submit(1, 2000)
    desk.wait_answers(1)
    desk.ahead += IDLE_SEC
    desk.turn()
    assert desk.live() == set()
    flood(desk, 1000)
    desk.submit(2, 2000, "hang")
    assert desk.checkers._new == set()
    desk.ahead += START_GRACE_SEC
    desk.submit(3, 3000)
    assert desk.checkers._new == {3000}


# --- Several helpers --------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Desk]:
    """Three helpers in common."""
    made = Desk(tmp_path, num_helpers=3)
    yield made
    made.checkers.close()
    made.selector.close()


def under_check(desk: Desk) -> list[int]:
    return sorted(seat.current.id for seat in desk.checkers._common._seats if seat.current is not None)


def test_users_of_several_helpers_are_checked_at_once_and_one_helper_is_left_for_who_comes(three: Desk) -> None:
    for number in range(1, 6):
        three.submit(number, 0, "hang")
    three.wait(lambda: under_check(three) == [1, 2])
    for _ in range(20):
        three.turn()
    assert under_check(three) == [1, 2]
    three.submit(10, 999)
    three.submit(11, 999)
    three.wait(lambda: 10 in three.whose() and 11 in three.whose())
    assert three.num_starts == 3
    (three.path / "go").touch()
    three.wait_answers(7)
    assert [answer.id for answer in three.answers] == [10, 11, 1, 2, 3, 4, 5]


def test_nobody_has_two_helpers_while_somebody_waits_for_one(three: Desk) -> None:
    for number, uid in ((1, 0), (2, 0), (3, 999), (4, 999), (5, 998)):
        three.submit(number, uid, "hang")
    three.wait(lambda: len(under_check(three)) == 3)
    assert under_check(three) == [1, 3, 5]
    (three.path / "go").touch()
    three.wait_answers(5)


def test_answers_of_one_user_come_in_the_order_of_their_files(three: Desk) -> None:
    for number, name in ((1, "hang"), (2, "plain"), (3, "plain")):
        three.submit(number, 0, name)
    three.wait(lambda: three.num_starts == 2)
    three.wait(lambda: under_check(three) == [1] and not three.checkers._common._line)
    assert three.answers == []
    (three.path / "go").touch()
    three.wait_answers(3)
    assert [answer.id for answer in three.answers] == [1, 2, 3]


def test_a_helper_that_dies_changes_no_order(three: Desk) -> None:
    for number, name in ((1, "hang"), (2, "hang"), (3, "plain")):
        three.submit(number, 0, name)
    three.wait(lambda: under_check(three) == [1, 2])
    (seat,) = [each for each in three.checkers._common._seats if each.current is not None and each.current.id == 1]
    assert isinstance(seat.slot._helper, ChildHelper)
    seat.slot._helper.process.kill()
    three.wait(lambda: three.num_starts == 3 and under_check(three) == [1, 2])
    (three.path / "go").touch()
    three.wait_answers(3)
    assert [answer.id for answer in three.answers] == [1, 2, 3]


def test_slow_files_of_one_user_never_have_all_helpers_and_come_last_after_a_deadline(three: Desk) -> None:
    for number in range(1, 6):
        three.submit(number, 0, "hang")
    three.wait(lambda: under_check(three) == [1, 2])
    three.ahead += Config().spool.preflight_timeout_sec
    found: list[int] = []

    def turn(_sec: float) -> None:
        three.selector.select(0.02)
        found.extend(answer.id for answer in three.checkers.poll())

    wait_for(lambda: len(found) >= 2, what="two answers", account=lambda: found, pause=turn)
    assert found == [1, 2]
    line = three.checkers._common._line
    assert line.is_late
    (three.path / "go").touch()
    three.wait_answers(3)
    assert not line.is_late


def test_a_rehearsal_holds_up_its_user_alone(desk: Desk) -> None:
    """There is one helper in common; what waits behind a rehearsal are its user's own files."""
    desk.submit(1, 0, "rehearse")
    desk.submit(2, 0)
    desk.submit(3, 999)
    desk.wait(lambda: 3 in desk.whose())
    desk.submit(4, 999)
    desk.wait(lambda: 4 in desk.whose())
    assert under_check(desk) == [1]
    desk.ahead += 9 * Config().spool.preflight_timeout_sec
    desk.turn()
    (desk.path / "go").touch()
    desk.wait_answers(4)
    assert [answer.id for answer in desk.answers] == [3, 4, 1, 2]


def test_units_that_rehearse_keep_no_person_waiting(desk: Desk) -> None:
    for uid in range(1000, 1000 + MAX_UNITS):
        desk.submit(uid, uid, "rehearse")
    desk.wait(lambda: len(desk.at_work()) == MAX_UNITS)
    desk.submit(1, 2000)
    desk.wait(lambda: 1 in desk.whose())
    assert len(desk.at_work()) == MAX_UNITS
    (desk.path / "go").touch()
    desk.wait_answers(MAX_UNITS + 1)


def test_a_unit_that_rehearses_is_not_the_one_that_is_to_end(desk: Desk) -> None:
    """Of the units whose turn is over another ends, for a user who has been served before and comes back."""
    desk.submit(1, 1001, "rehearse")
    desk.submit(2, 2000)
    desk.wait(lambda: 2 in desk.whose())
    numbers = iter(range(100, 100_000))

    def feed() -> None:
        for uid in range(1002, 1002 + MAX_UNITS):
            checker = desk.checkers._people.get(uid)
            for _ in range(5 - (len(checker._line) if checker is not None else 0)):
                desk.submit(next(numbers), uid)
        desk.turn()

    feed()
    desk.ahead += IDLE_SEC
    for _ in range(40):
        feed()
    desk.submit(3, 2000)

    def is_answered() -> bool:
        feed()
        desk.ahead += 0.1
        return 3 in desk.whose()

    desk.wait(is_answered)
    assert 1 not in desk.whose()
    (desk.path / "go").touch()
    desk.wait_answers(4)


def test_helpers_beyond_the_first_end_without_work(three: Desk) -> None:
    for number, uid in ((1, 0), (2, 999), (3, 998)):
        three.submit(number, uid, "hang")
    three.wait(lambda: len(under_check(three)) == 3)
    (three.path / "go").touch()
    three.wait_answers(3)
    three.ahead += IDLE_SEC
    three.turn()
    first, *others = [not seat.slot.is_empty for seat in three.checkers._common._seats]
    assert first and not any(others)
    assert three.checkers.deadline is None


def test_where_no_helper_starts_one_says_so(three: Desk, caplog: pytest.LogCaptureFixture) -> None:
    (three.path / "broken-honed").touch()
    for number, uid in ((1, 0), (2, 999), (3, 998)):
        three.submit(number, uid)
    three.wait(lambda: three.checkers.stuck() == {1, 2, 3})
    (three.path / "broken-honed").unlink()
    three.ahead += 1000
    three.wait_answers(3)
    assert (three.checkers.stuck(), three.checkers.fault) == (set(), "")
    assert caplog.text.count("so job files wait") == 1


class PromptHelper(ChildHelper):
    """A helper that has always answered by the time that its answer is read."""

    is_asked = False

    def write(self, data: bytes) -> None:
        super().write(data)
        self.is_asked = True

    def read(self) -> bytes | None:
        if self.is_asked:
            select.select([self], [], [])
        data = super().read()
        self.is_asked = self.is_asked and not (data or b"").endswith(b"\n")
        return data


def test_the_daemon_is_not_kept_by_a_helper_that_answers_at_once(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text("{}")
    command = [sys.executable, "-S", "-c", HELPER, "honed", str(tmp_path)]
    checkers = Checkers(lambda stage_fd, watch: PromptHelper(command, stage_fd, watch))
    for number in range(20):
        checkers.submit(Request(number, PersonPath.own(tmp_path / "plain.json"), Config()))
    answers: list[int] = []
    wait_for(
        lambda: sum(answers) >= 20,
        what="20 answers",
        account=lambda: answers,
        pause=lambda _sec: answers.append(len(checkers.poll())),
    )
    checkers.close()
    assert (sum(answers), max(answers)) == (20, 1)


def test_one_that_starts_slowly_loses_no_turn_by_that(desk: Desk) -> None:
    for number in range(MAX_UNITS + 1):
        desk.submit(number, 1000 + number, "hang")
    desk.ahead += 2 * TURN_SEC
    desk.turn()
    assert desk.live() == {1000 + number for number in range(MAX_UNITS)}


def test_a_helper_is_kept_for_a_while_and_ended_then(desk: Desk) -> None:
    desk.submit(1, 1000)
    desk.wait_answers(1)
    desk.turn()
    assert desk.checkers.deadline is not None
    assert 0 < desk.checkers.deadline - desk.clock() <= IDLE_SEC
    desk.ahead += IDLE_SEC - 1
    desk.turn()
    assert desk.live() == {1000}
    desk.ahead += 1
    desk.turn()
    assert desk.live() == set()
    assert desk.checkers.deadline is None
    assert desk.checkers._people == {}
    desk.submit(2, 1000)
    desk.wait_answers(2)
    assert desk.answers[0].plan.document["pid"] != desk.answers[1].plan.document["pid"]


def test_one_whose_helper_cannot_be_started_is_in_nobodys_way(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    broken = [1000 + number for number in range(MAX_UNITS + 1)]
    for uid in broken:
        (desk.path / f"broken-{uid}").touch()
        desk.submit(uid, uid)
    desk.wait(lambda: all(desk.checkers.is_stuck(uid) for uid in broken))
    desk.submit(1, 5000)
    desk.submit(2, 0)
    desk.wait_answers(2)
    assert desk.whose() == {1: "5000", 2: "honed"}
    assert desk.checkers.stuck() == set(broken)
    assert not desk.checkers.is_stuck(5000)
    assert desk.checkers.fault
    desk.wait(lambda: not desk.live() and desk.checkers.deadline is not None)
    assert desk.checkers.deadline <= desk.clock() + MAX_PAUSE_SEC  # it is retried then, and not sooner
    assert caplog.text.count("cannot be started, so job files wait") == len(broken)
    for uid in broken:
        (desk.path / f"broken-{uid}").unlink()
    desk.ahead += 1000
    desk.wait_answers(2 + len(broken))
    assert desk.checkers.stuck() == set()
    assert desk.checkers.fault == ""


def test_the_words_of_the_log_name_whose_files_wait(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    uid = os.getuid() + 2**20
    (desk.path / f"broken-{uid}").touch()
    desk.submit(1, uid)
    desk.wait(lambda: desk.checkers.is_stuck(uid))
    assert f"the checking process for the user {uid} cannot be started, so job files wait" in caplog.text


@contextlib.contextmanager
def closed_to_us(path: Path) -> Iterator[None]:
    """Take our permission to read a file, which root has of every file."""
    path.chmod(0)
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o644)


def test_a_copy_that_cannot_be_read_waits_and_holds_up_nobody(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.submit(1, 0)
    desk.wait_answers(1)
    with closed_to_us(desk.path / "plain.json"):
        desk.submit(2, 0)
        desk.submit(3, 998)
    assert desk.checkers.stuck() == {2, 3}
    assert "Permission denied" in desk.checkers.fault
    assert desk.checkers.deadline is not None
    assert desk.checkers.deadline > desk.clock()  # it is no reason to try again and again
    desk.submit(4, 0, "rehearse")
    (desk.path / "go").touch()
    desk.wait(lambda: 4 in desk.whose())
    desk.ahead += MAX_PAUSE_SEC
    desk.wait_answers(4)
    assert desk.whose().keys() == {1, 2, 3, 4}
    assert (desk.checkers.stuck(), desk.checkers.fault, desk.num_starts) == (set(), "", 1)
    assert caplog.text.count("not checked yet") == 1


def test_a_person_whose_copy_cannot_be_read_has_a_unit_again_for_it(desk: Desk) -> None:
    desk.submit(1, 1000)
    desk.wait_answers(1)
    with closed_to_us(desk.path / "plain.json"):
        desk.submit(2, 1000)
    desk.checkers._people[1000].rest()
    desk.ahead += MAX_PAUSE_SEC
    desk.wait_answers(2)
    assert desk.whose() == {1: "1000", 2: "1000"}


def test_an_answer_is_kept_though_the_next_helper_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "hang.json").write_text("{}")
    command = [sys.executable, "-S", "-c", f"{HELPER}    break\n", "honed", str(tmp_path)]  # one answer each
    started: list[ChildHelper] = []

    def start(stage_fd: int, watch: Watch) -> ChildHelper:
        if len(started) == 1 and not failed:
            failed.append(True)
            raise RuntimeError("a fault of honed's own")
        started.append(ChildHelper(command, stage_fd, watch))
        return started[-1]

    failed: list[bool] = []
    checker = Checker(start)
    for number in (1, 2):
        checker.submit(Request(number, PersonPath.own(tmp_path / "hang.json"), Config()))
    wait_for(lambda: checker.poll() == [] and not checker.is_between, what="the first one sent")
    (tmp_path / "go").touch()
    started[0].process.wait(timeout=60)
    with pytest.raises(RuntimeError):
        checker.poll()
    assert [answer.id for answer in checker.poll()] == [1]
    found: list[int] = []
    wait_for(lambda: found.extend(each.id for each in checker.poll()) or found, what="the second answer")
    assert found == [2]
    checker.close()
