"""Slurm's commands, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest

from honed.run import slurm_desk
from honed.run.slurm_desk import Answer, Desk
from waiting import wait_for

ALICE, BOB = 1001, 1002


class Slurm:
    """Commands, which last until they are let go."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.ran: list[str] = []
        self.changed = threading.Condition()

    def run(self, command: Sequence[str], _: Mapping[str, str]) -> tuple[str, str]:
        if command[0] in {"list", "squeue"}:
            return "", ""
        with self.changed:
            self.changed.wait_for(lambda: command[0] not in self.held, 30)
            self.ran.append(command[0])
        return f"{command[0]} done", ""

    def let_go(self, command: str) -> None:
        with self.changed:
            self.held.discard(command)
            self.changed.notify_all()


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    made = Slurm()
    yield made
    for each in list(made.held):
        made.let_go(each)


def said(desk: Desk, name: str) -> str:
    wait_for(lambda: desk.answer(name) is not None, what=f"the answer to {name}")
    found = desk.answer(name)
    assert isinstance(found, Answer)
    return found.output


def test_a_submitter_who_stops_their_commands_delays_nobody_else(slurm: Slurm) -> None:
    slurm.held = {"alice-1"}
    desk = Desk("honed-", slurm.run, is_shared=True)
    desk.run("job-1", [["alice-1"]], environment={}, lane=ALICE)
    desk.run("job-2", [["alice-2"]], environment={}, lane=ALICE)
    desk.run("job-3", [["bob-1"], ["bob-2"]], environment={}, lane=BOB)
    assert said(desk, "job-3") == "bob-1 donebob-2 done"
    assert (desk.answer("job-1"), desk.answer("job-2")) == (None, None)
    slurm.let_go("alice-1")
    assert said(desk, "job-2") == "alice-2 done"
    assert slurm.ran == ["bob-1", "bob-2", "alice-1", "alice-2"]


def test_there_are_no_more_lanes_than_connections_and_each_goes_on(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_desk, "MAX_LANES", 2)
    before = set(threading.enumerate())
    desk = Desk("honed-", slurm.run, is_shared=True)
    slurm.held = {"7"}
    for lane in (7, 8, 9, 11, 12):
        desk.run(f"job-{lane}", [[str(lane)]], environment={}, lane=lane)
    assert said(desk, "job-8") == "8 done"
    assert len(set(threading.enumerate()) - before) == 3
    slurm.let_go("7")
    assert [said(desk, f"job-{lane}") for lane in (7, 9, 11, 12)] == ["7 done", "9 done", "11 done", "12 done"]


def test_a_lane_without_a_thread_is_begun_anew(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk("honed-", slurm.run, is_shared=True)

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", fail)
        desk.run("job-1", [["alice-1"]], environment={}, lane=ALICE)
    answer = desk.answer("job-1")
    assert answer is not None
    assert answer.fault == "can't start new thread"
    desk.run("job-1", [["alice-1"]], environment={}, lane=ALICE)
    assert said(desk, "job-1") == "alice-1 done"


def test_a_thread_without_work_ends_and_another_begins(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_desk, "IDLE_SEC", 0.02)
    before = set(threading.enumerate())
    desk = Desk("honed-", slurm.run, is_shared=True)
    for number in range(3):
        desk.run(f"job-{number}", [[f"alice-{number}"]], environment={}, lane=ALICE)
        assert said(desk, f"job-{number}") == f"alice-{number} done"
        wait_for(lambda: len(set(threading.enumerate()) - before) == 1, what="the thread of the lists alone")
