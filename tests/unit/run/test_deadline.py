"""What a running worker's deadlines count, and what not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.job.job import Attempt, Job
from honed.run.deadline import Deadlines
from honed.run.outcome import Outcome, judge
from honed.run.process import ProcessRunner
from honed.run.runner import Exit
from honed.spec.config import Config
from honed.system.clock import Moment
from honed.system.layout import Layout
from honed.system.pauses import Pauses
from honed.system.personpath import PersonPath

STALL_SEC = Config().jobs.stall_timeout_sec
GRACE_SEC = Config().jobs.time_limit_grace_sec


class Cluster(ProcessRunner):
    """Workers of a cluster, as far as deadlines are concerned; it asks and dumps nobody."""

    def __init__(self, layout: Layout, began: Moment) -> None:
        super().__init__(layout)
        self.began_at = began
        self.suspends = False
        self.dumped: list[int] = []
        self.asked: list[int] = []

    is_cluster = True

    def is_left(self, job_id: int) -> bool:  # noqa: ARG002
        return self.is_cluster

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        pass

    def began(self, job_id: int) -> Moment | None:  # noqa: ARG002
        return self.began_at

    def is_suspended(self, job_id: int) -> bool:  # noqa: ARG002
        return self.suspends

    def dump(self, job_id: int) -> None:
        self.dumped.append(job_id)

    def stop(self, job_id: int) -> None:
        self.asked.append(job_id)


def job(
    began: Moment, *, time_limit_sec: float | None = None, paused_sec: float = 0.0, staged_paused_sec: float = 0.0
) -> Job:
    attempt = Attempt(
        1,
        "transformers",
        began.wall,
        started_monotonic=began.monotonic,
        boot_id=began.boot_id,
        paused_sec=paused_sec,
        staged_paused_sec=staged_paused_sec,
    )
    return Job(1, "it", 0.0, "it.json", 0, "/o", attempts=(attempt,), time_limit_sec=time_limit_sec)


def test_no_deadline_comes_nearer_while_a_cluster_suspends_a_job(tmp_path: Path) -> None:
    now, began = 0.0, Moment.now()
    runner = Cluster(Layout(tmp_path), began)
    deadlines = Deadlines(job(began, time_limit_sec=100.0), Layout(tmp_path), runner, Config, clock=lambda: now)

    def pass_until(then: float) -> None:
        nonlocal now
        while now < then:
            now = min(then, now + 10.0)
            deadlines.enforce(now, told_at=0.0, stage="train")

    pass_until(10.0)
    runner.suspends = True
    pass_until(10.0 + 10 * STALL_SEC)
    assert (runner.dumped, runner.asked, deadlines.is_suspended) == ([], [], True)
    assert deadlines.paused_sec() == 10 * STALL_SEC
    runner.suspends = False
    resumed_at = now
    pass_until(resumed_at + min(STALL_SEC, 100.0 + GRACE_SEC) - 20.0)
    assert (runner.dumped, runner.asked) == ([], [])
    pass_until(resumed_at + max(STALL_SEC, 100.0 + GRACE_SEC) + 10.0)
    assert runner.dumped or runner.asked


@pytest.mark.parametrize("paused_sec", [0.0, 50.0])
def test_what_an_attempt_took_is_without_its_pauses_until_its_end(tmp_path: Path, paused_sec: float) -> None:
    now = Moment.now()
    assert now.monotonic is not None
    began = Moment(now.wall - 1000, now.monotonic - 1000, now.boot_id)
    ended = Moment(now.wall + 200, now.monotonic + 200, now.boot_id)
    read = now.monotonic
    clock = Pauses(clock=lambda: read, cpu=lambda: 0.0)
    with clock.asleep(0.0):
        pass
    runner = ProcessRunner(Layout(tmp_path))
    deadlines = Deadlines(job(began, paused_sec=paused_sec), Layout(tmp_path), runner, Config, clock=clock)
    read += 150.0  # a pause
    clock()
    with clock.asleep(100.0):
        read += 100.0
    read += 5000.0  # another one, after its end
    assert deadlines.took_sec(Exit(0, None, ended=ended)) == pytest.approx(1050.0 - paused_sec, abs=1.0)


def test_a_time_limit_counts_no_pause_of_an_earlier_honed(tmp_path: Path) -> None:
    now, began = 0.0, Moment.now()
    assert began.monotonic is not None
    earlier = Moment(began.wall - 500, began.monotonic - 500, began.boot_id)
    runner = Cluster(Layout(tmp_path), began)
    runner.is_cluster = False
    for paused_sec, is_late in ((0.0, True), (450.0, False)):
        runner.asked.clear()
        deadlines = Deadlines(
            job(earlier, time_limit_sec=100.0, paused_sec=paused_sec),
            Layout(tmp_path),
            runner,
            Config,
            clock=lambda: now,
        )
        deadlines.enforce(GRACE_SEC + 1.0, told_at=GRACE_SEC + 1.0, stage="train")
        assert bool(runner.asked) is is_late


def test_of_a_cluster_the_shims_own_pauses_count(tmp_path: Path) -> None:
    now = Moment.now()
    assert now.monotonic is not None
    began = Moment(now.wall - 1000)
    deadlines = Deadlines(job(began), Layout(tmp_path), Cluster(Layout(tmp_path), began), Config, clock=lambda: 0.0)
    ended = Exit(0, None, ended=now, began=began, paused_sec=400.0)
    assert deadlines.took_sec(ended) == pytest.approx(600.0)
    assert deadlines.took_sec(Exit(0, None, ended=now, began=began, paused_sec=1e12)) == 0.0


def test_a_time_limit_counts_no_pause_that_only_the_shim_has_seen(tmp_path: Path) -> None:
    """After a freeze of a minute honed's own watchdog ends it, and the next one has seen nothing."""
    now = Moment.now()
    assert now.monotonic is not None
    began, layout = Moment(now.wall - 500, now.monotonic - 500, now.boot_id), Layout(tmp_path)
    runner = Cluster(layout, began)
    runner.is_cluster = False
    paused_path = layout.job(1).attempt(1).paused_path
    paused_path.parent.mkdir(parents=True)
    paused_path.write_text("450.000\n")
    deadlines = Deadlines(job(began, time_limit_sec=100.0), layout, runner, Config, clock=lambda: 0.0)
    deadlines.enforce(GRACE_SEC + 1.0, told_at=GRACE_SEC + 1.0, stage="train")
    assert runner.asked == []
    assert deadlines.paused_sec() == 450.0, "it goes into the entry, for the next honed"
    assert deadlines.took_sec(Exit(0, None, ended=now)) == pytest.approx(50.0, abs=1.0)
    deadlines.enforce(GRACE_SEC + 60.0, told_at=GRACE_SEC + 60.0, stage="train")
    assert runner.asked == [1]


def test_pauses_of_its_staged_worker_are_none_of_an_attempt(tmp_path: Path) -> None:
    now, layout = Moment.now(), Layout(tmp_path)
    assert now.monotonic is not None
    paused_path = layout.job(1).attempt(1).paused_path
    paused_path.parent.mkdir(parents=True)
    paused_path.write_text("450.000\n")
    for ran_sec, noted_sec_ago in ((0, 0), (0, 600), (500, 600)):
        os.utime(paused_path, (now.wall - noted_sec_ago, now.wall - noted_sec_ago))
        began = Moment(now.wall - ran_sec, now.monotonic - ran_sec, now.boot_id)
        deadlines = Deadlines(job(began), layout, ProcessRunner(layout), Config, clock=lambda: 0.0)
        assert deadlines.paused_sec() == pytest.approx(0.0, abs=100.0), (ran_sec, noted_sec_ago)


def test_of_the_pauses_of_a_shim_that_was_staged_those_before_the_attempt_do_not_count(tmp_path: Path) -> None:
    now, layout = Moment.now(), Layout(tmp_path)
    assert now.monotonic is not None
    began = Moment(now.wall - 1000, now.monotonic - 1000, now.boot_id)
    its_job = job(began, time_limit_sec=100.0, staged_paused_sec=450.0)
    paused_path = layout.job(1).attempt(1).paused_path
    paused_path.parent.mkdir(parents=True)
    deadlines = Deadlines(its_job, layout, ProcessRunner(layout), Config, clock=lambda: 0.0)
    ended = Exit(75, None, was_asked=True, ended=now, paused_sec=460.0, is_after_pause=True)
    assert deadlines.took_sec(ended) == pytest.approx(990.0, abs=1.0)
    assert deadlines.explain(Outcome("interrupted"), ended, is_asked=False, stage="train").code == "time_limit"
    ended = Exit(75, None, was_asked=True, ended=now, paused_sec=460.0)
    assert deadlines.explain(Outcome("interrupted"), ended, is_asked=False, stage="train").code == "time_limit"
    paused_path.write_text("460.000\n")
    assert Deadlines(its_job, layout, ProcessRunner(layout), Config, clock=lambda: 0.0).paused_sec() == 10.0
    deadlines.start_again()
    assert deadlines.took_sec(Exit(0, None, ended=now, paused_sec=460.0, is_after_pause=True)) == pytest.approx(
        540.0, abs=1.0
    )


@pytest.mark.parametrize(("is_after_pause", "took_sec"), [(True, 50.0), (False, 500.0)])
def test_what_a_watchdog_ended_after_a_pause_has_not_taken_it(
    tmp_path: Path, is_after_pause: bool, took_sec: float
) -> None:
    now, layout = Moment.now(), Layout(tmp_path)
    assert now.monotonic is not None
    began = Moment(now.wall - 500, now.monotonic - 500, now.boot_id)
    deadlines = Deadlines(job(began), layout, ProcessRunner(layout), Config, clock=lambda: 0.0)
    ended = Exit(None, 6, ended=now, paused_sec=450.0, is_after_pause=is_after_pause)
    assert deadlines.took_sec(ended) == pytest.approx(took_sec, abs=1.0)


@pytest.mark.parametrize("is_after_pause", [True, False])
def test_a_pause_that_only_the_shim_has_seen_is_taken_off_a_time_limit_once(
    tmp_path: Path, is_after_pause: bool
) -> None:
    now, layout = Moment.now(), Layout(tmp_path)
    assert now.monotonic is not None
    for spent_sec, code in ((100.0 + GRACE_SEC - 10, "interrupted"), (100.0 + GRACE_SEC + 10, "time_limit")):
        began = Moment(now.wall - 450 - spent_sec, now.monotonic - 450 - spent_sec, now.boot_id)
        deadlines = Deadlines(
            job(began, time_limit_sec=100.0), layout, ProcessRunner(layout), Config, clock=lambda: 0.0
        )
        ended = Exit(75, None, was_asked=True, ended=now, paused_sec=450.0, is_after_pause=is_after_pause)
        assert deadlines.explain(Outcome("interrupted"), ended, is_asked=False, stage="train").code == code


@pytest.mark.parametrize(("is_after_pause", "code"), [(True, "interrupted"), (False, "stalled")])
def test_a_watchdog_that_passed_in_a_pause_ends_no_attempt_as_stalled(
    tmp_path: Path, is_after_pause: bool, code: str
) -> None:
    layout = Layout(tmp_path)
    deadlines = Deadlines(job(Moment.now()), layout, ProcessRunner(layout), Config, clock=lambda: 0.0)
    ended = Exit(None, 6, service_result="watchdog", is_after_pause=is_after_pause)
    outcome = judge(PersonPath.own(layout.job(1).attempt(1).result_path), ended)
    assert deadlines.explain(outcome, ended, is_asked=False, stage="train").code == code
