"""Users take turns by class, by what they have used, and by arrival; what is beyond a limit waits with its numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.daemon import backlog
from honed.daemon.shares import Shares, Use
from honed.job import queue_order
from honed.job.job import Job, State
from honed.job.usage import Usage
from honed.spec.config import Config
from honed.system import access
from unit.daemon.test_backlog import Desk

Fair = Callable[..., "House"]


class House(Desk):
    """A backlog of several users, ordered by a configuration."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        super().__init__(path)
        self.root = path
        self.config = Config.model_validate(config)
        self.in_use: list[Use] = []
        self.num_bytes: dict[int, int] = {}
        usage = Usage(path / "own.jsonl", now=lambda: 1e9)
        self.shares = Shares(usage, lambda: self.config, lambda: self.in_use, lambda uid: self.num_bytes.get(uid, 0))
        self.backlog = backlog.Backlog(
            self.spool, self.database, self.shares, has_room=lambda _job: False, clock=lambda: 0.0
        )
        self.backlog.recover()

    def use(self, uid: int, sec: float) -> None:
        """Let a user have used the devices for so long."""
        self.shares.usage.raise_to(self.shares.usage.level(uid) + sec, [uid])

    def users(self, count: int = 10) -> list[int]:
        """Return whose jobs come next, in order."""
        return [job.uid for _, job in zip(range(count), self.order(), strict=False)]

    def order(self) -> list[Job]:
        self.backlog.look_again()
        levels = self.shares.levels(self.backlog.first_ones(1))
        return list(self.backlog.ready(for_gpu=(True, False), levels=levels))


@pytest.fixture
def house(tmp_path: Path) -> Fair:
    made = []

    def make(**config: Any) -> House:
        made.append(House(tmp_path / str(len(made)), config))
        return made[-1]

    yield make
    for each in made:
        each.database.close()
        each.spool.close()


def test_whoever_has_used_least_comes_first_and_then_whoever_came_first(house: Fair) -> None:
    fair = house()
    for uid in (1, 1, 2, 3):
        fair.admit(uid=uid)
    assert fair.users() == [1, 1, 2, 3]
    fair.use(1, 10.0)
    assert fair.users() == [2, 3, 1, 1]
    fair.use(2, 5.0)
    assert fair.users() == [3, 2, 1, 1]


def test_a_weight_of_two_lets_a_user_use_twice_as_much(house: Fair) -> None:
    fair = house(users={"2": {"weight": 2.0}})
    for uid in (1, 2):
        fair.admit(uid=uid)
    fair.in_use = [Use(1, 1000.0), Use(2, 1900.0)]
    assert fair.users() == [2, 1]
    fair.in_use = [Use(1, 1000.0), Use(2, 2100.0)]
    assert fair.users() == [1, 2]


def test_a_running_job_counts_for_at_least_as_long_as_jobs_mostly_take(house: Fair) -> None:
    fair = house()
    for uid in (1, 1, 2):
        fair.admit(uid=uid)
    assert fair.users(1) == [1]
    fair.in_use = [Use(1, 0.0)]  # it started this moment
    assert fair.users(1) == [2]


def test_a_user_who_comes_back_is_level_with_the_lowest_and_does_not_take_all_devices(house: Fair) -> None:
    fair = house()
    for uid in (1, 1, 1, 2, 2, 2):
        fair.admit(uid=uid)
    fair.use(1, 1000.0)
    fair.use(2, 900.0)
    assert fair.users(1) == [2]
    fair.admit(uid=3)
    fair.admit(uid=3)
    assert fair.users(1) == [2]  # as level as 3, and there before
    assert fair.shares.usage.level(3) == 900.0
    fair.use(2, 50.0)
    assert fair.users(2) == [3, 3]


def test_an_idle_moment_and_a_restart_save_nothing_up(house: Fair) -> None:
    fair = house()
    job = fair.admit(uid=1)
    assert fair.users() == [1]
    fair.use(1, 2_592_000.0)  # alone on the machine, for a month
    fair.spool.move(job, State.CANCELLED)
    assert fair.users() == []
    fair.shares.usage.flush()
    fair.shares = Shares(Usage(fair.root / "own.jsonl", now=lambda: 1e9), lambda: fair.config, lambda: fair.in_use)
    for uid in (2, 2, 1):
        fair.admit(uid=uid)
    fair.users()
    assert fair.shares.usage.level(2) == 2_592_000.0
    fair.in_use = [Use(2, 1.0)]
    assert fair.users(1) == [1]


def test_whoever_comes_back_pays_no_estimate_of_what_others_run(house: Fair) -> None:
    fair = house()
    fair.admit(uid=1)
    fair.in_use = [Use(1, 5.0)] * 4
    assert fair.users() == [1]
    fair.admit(uid=2)
    fair.users()
    assert fair.shares.usage.level(2) == 0.0  # those four may end at once
    assert fair.users(1) == [2]


def test_the_rank_of_a_class_precedes_shares_and_the_priority_counts_among_a_users_own_jobs(house: Fair) -> None:
    fair = house(classes={"urgent": {"rank": 10}, "night": {"rank": -1}, "normal": {"default": True}})
    one = fair.admit(uid=1, priority=1_000_000).id
    two = [fair.admit(uid=2, **fields).id for fields in ({}, {"priority": 5}, {"job_class": "urgent"})]
    night = fair.admit(uid=3, job_class="night").id
    gone = fair.admit(uid=4, job_class="removed").id  # from the configuration since: as the default
    fair.use(2, 10.0)
    fair.use(4, 20.0)
    assert [job.id for job in fair.order()] == [two[2], one, two[1], two[0], gone, night]


def test_an_administrator_may_let_the_priority_count_across_users(house: Fair) -> None:
    fair = house(fair_share={"priority_across_users": True})
    low, high, other = (fair.admit(uid=uid, priority=priority).id for uid, priority in ((1, 0), (2, 7), (3, 0)))
    fair.use(2, 100.0)
    assert [job.id for job in fair.order()] == [high, low, other]


def test_with_one_user_nothing_but_priority_and_arrival_counts(house: Fair) -> None:
    fair = house()
    numbers = [fair.admit(uid=os.getuid(), priority=priority).id for priority in (0, 3, 0, -1)]
    fair.in_use = [Use(os.getuid(), 99.0)]
    assert [job.id for job in fair.order()] == [numbers[1], numbers[0], numbers[2], numbers[3]]


def test_a_reload_orders_the_queue_anew(house: Fair) -> None:
    fair = house()
    first, second = fair.admit(uid=1).id, fair.admit(uid=1, job_class="urgent").id
    assert [job.id for job in fair.order()] == [first, second]
    fair.config = Config.model_validate({"classes": {"urgent": {"rank": 1}}})
    fair.backlog.reorder()
    assert [job.id for job in fair.order()] == [second, first]
    fair.spool.move(fair.order()[0], State.CANCELLED)
    assert [job.id for job in fair.order()] == [first]


def test_a_user_who_is_left_out_costs_the_others_nothing(house: Fair) -> None:
    fair = house()
    for uid in (1, 1, 1, 2):
        fair.admit(uid=uid)
    fair.backlog.look_again()
    out: set[int] = set()
    seen = []
    for job in fair.backlog.ready(for_gpu=(True, False), levels={}, but=out):
        seen.append(job.uid)
        out.add(job.uid)
    assert seen == [1, 2]


def test_each_limit_is_told_with_its_numbers(house: Fair) -> None:
    day = 86400.0
    fair = house(
        users={
            "1": {"max_running": 2},
            "2": {"max_device_sec": 7200.0},
            "3": {"max_job_bytes": 2**30},
            "*": {"max_running": 5},
        },
        fair_share={"window_sec": day},
    )
    assert [fair.shares.obstacle(uid) for uid in (1, 2, 3, 4)] == [""] * 4
    fair.in_use = [Use(1, 10.0), Use(1, 10.0), Use(2, 7199.0), *([Use(4, 1.0)] * 5)]
    fair.num_bytes[3] = 2**30
    assert fair.shares.obstacle(1) == f"2 jobs of {access.user_name(1)} are running, the maximum (max_running)"
    assert (fair.shares.obstacle(2), fair.shares.obstacle(3)) == ("", "")
    assert fair.shares.obstacle(4).startswith("5 jobs of ")
    fair.in_use = [Use(2, 7200.0)]
    fair.num_bytes[3] += 2**29
    assert [fair.shares.room(uid) for uid in (1, 5)] == [2, 5]
    assert [fair.shares.waits_for_a_person(uid) for uid in (1, 2, 3)] == [False, False, True]
    assert "has used 2.0 h of the devices within 24.0 h, and the maximum is 2.0 h" in fair.shares.obstacle(2)
    assert "take 1.5 GiB of disk space, and the maximum is 1.0 GiB" in fair.shares.obstacle(3)


def expected(fair: House) -> list[int]:
    """Return the queue in its order, by `Backlog.ready` as `Selection.queue` calls it."""
    fair.backlog.look_again()
    levels = fair.shares.expected_levels(fair.backlog.first_ones(1))
    ready = fair.backlog.ready(for_gpu=(True, False), levels=levels, spends=fair.shares.start_costs)
    return [job.id for job in ready]


@pytest.mark.parametrize("across", [False, True])
def test_the_queue_is_told_in_the_order_in_which_jobs_of_the_same_duration_start_one_by_one(
    house: Fair, across: bool
) -> None:
    fair = house(
        users={"2": {"weight": 3.0}, "3": {"weight": 0.4}},
        classes={"high": {"rank": 5}, "low": {"rank": -1, "default": True}},
        fair_share={"priority_across_users": across},
    )
    for number in range(40):
        uid = 1 + number % 4
        fair.admit(uid=uid, priority=number % 3, job_class="high" if number % 11 == 0 else None)
    for uid in range(1, 5):
        fair.use(uid, 700.0 * uid)
    told = expected(fair)
    assert expected(fair) == told  # a question changes nothing
    started = []
    for job in iter(lambda: next(iter(fair.order()), None), None):
        started.append(job.id)
        fair.spool.move(job, State.CANCELLED)
        fair.use(job.uid, fair.shares.usage.typical_sec / fair.shares._entitlements.weight(job.uid))
    assert started == told
    assert len(told) == 40


def test_without_honed_the_queue_is_told_by_the_shares_as_they_were_written(house: Fair) -> None:
    fair = house(users={"2": {"weight": 3.0}}, classes={"high": {"rank": 5}})
    for number in range(24):
        fair.admit(uid=1 + number % 3, priority=number % 2, job_class="high" if number % 7 == 0 else None)
    for uid in (1, 2, 3):
        fair.use(uid, 900.0 * uid)
    told = expected(fair)
    fair.shares.usage.flush()
    path = fair.root / "own.jsonl"
    path.write_bytes(path.read_bytes() + b'{"uid": 1, "lev')  # honed was killed while it wrote
    before = path.read_bytes()
    found = queue_order.expected(path, fair.config, fair.spool.catalog)
    assert [job.id for job in found] == told
    assert path.read_bytes() == before
