"""Signs of life of the ranks of an attempt, and which of them the others wait for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from honed.job.event import ENDED
from honed.job.job import Attempt, Job
from honed.run.deadline import Deadlines
from honed.run.outcome import Outcome
from honed.run.process import ProcessRunner
from honed.run.pulse import FROZEN_SEC, Pulses
from honed.run.runner import Exit
from honed.spec.config import Config
from honed.system.error import KilledError
from honed.system.layout import AttemptFiles, AttemptLayout, Layout
from honed.system.personpath import PersonPath


@pytest.fixture
def place(tmp_path: Path) -> AttemptLayout:
    (tmp_path / "ranks").mkdir()
    return AttemptLayout(tmp_path)


def beat(place: AttemptLayout, rank: int, at: float, phase: str = "train", limit_sec: float | None = None) -> None:
    place.pulse_of(rank).write_text(json.dumps({"phase": phase, "limit_sec": limit_sec}))
    os.utime(place.pulse_of(rank), (at, at))


def live(place: AttemptLayout, rank: int, at: float, num_calls: int) -> None:
    place.alive_of(rank).write_text(f"{num_calls:<20}")
    os.utime(place.alive_of(rank), (at, at))


def test_each_rank_is_silent_since_its_own_last_sign_of_life(place: AttemptLayout) -> None:
    pulses = Pulses(AttemptFiles(PersonPath(place.dir)), 3, 0.0)
    beat(place, 0, 1000.0, limit_sec=4.0)
    beat(place, 1, 1000.0, limit_sec=5.0)
    pulses.feel(10.0)
    assert [(each.rank, each.sec, each.learned_sec) for each in pulses.silences(12.0, 0.0)] == [(0, 2, 4), (1, 2, 5)]
    beat(place, 0, 1001.0, limit_sec=4.0)
    pulses.feel(14.0)
    assert [(each.rank, each.sec) for each in pulses.silences(15.0, 0.0)] == [(0, 1), (1, 5)]
    assert [(each.rank, each.sec) for each in pulses.silences(15.0, 14.5)] == [(0, 0.5), (1, 5)]  # an event of rank 0


def test_a_rank_that_has_not_begun_or_has_ended_is_not_silent(place: AttemptLayout) -> None:
    pulses = Pulses(AttemptFiles(PersonPath(place.dir)), 2, 0.0)
    beat(place, 0, 1000.0)
    beat(place, 1, 1000.0, phase=ENDED)
    pulses.feel(1.0)
    assert [each.rank for each in pulses.silences(9.0, 0.0)] == [0]


def test_a_rank_whose_process_does_not_run_is_named(place: AttemptLayout) -> None:
    pulses = Pulses(AttemptFiles(PersonPath(place.dir)), 3, 0.0)
    for rank in range(3):
        beat(place, rank, 1000.0, phase=f"phase {rank}")
        live(place, rank, 1000.0 - (FROZEN_SEC + 1) * (rank == 1), 7)
    pulses.feel(1.0)
    assert (pulses.who_hangs([0, 1, 2]), pulses.phase_of([0, 1, 2])) == ("rank 1 of 3", "phase 1")


def test_of_running_ranks_those_are_named_that_the_others_wait_for(place: AttemptLayout) -> None:
    pulses = Pulses(AttemptFiles(PersonPath(place.dir)), 4, 0.0)
    for rank, num_calls in enumerate((8, 7, 8, 7)):
        beat(place, rank, 1000.0)
        live(place, rank, 1000.0, num_calls)
    pulses.feel(1.0)
    assert pulses.who_hangs([0]) == "ranks 1 and 3 of 4"


def test_where_all_have_come_as_far_the_silent_ones_are_named(place: AttemptLayout) -> None:
    pulses = Pulses(AttemptFiles(PersonPath(place.dir)), 2, 0.0)
    for rank in range(2):
        beat(place, rank, 1000.0)
        live(place, rank, 1000.0, 7)
    pulses.feel(1.0)
    assert pulses.who_hangs([0, 1]) == "ranks 0 and 1 of 2"
    place.alive_of(1).write_text("-- no number")
    os.utime(place.alive_of(1), (1000.0, 1000.0))
    assert pulses.who_hangs([1]) == "rank 1 of 2"


def test_one_rank_has_no_number(place: AttemptLayout) -> None:
    assert Pulses(AttemptFiles(PersonPath(place.dir)), 1, 0.0).who_hangs([0]) == ""


class Supervised(ProcessRunner):
    """Workers that are units, as far as deadlines are concerned."""

    num_dumped = 0

    def is_supervised(self, job_id: int) -> bool:  # noqa: ARG002
        return True

    def dump(self, job_id: int) -> None:  # noqa: ARG002
        self.num_dumped += 1


def test_of_a_unit_honed_watches_all_ranks_but_the_first_which_its_watchdog_hears(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    job = Job(1, "it", 0.0, "it.json", 0, "/o", num_gpus=2, attempts=(Attempt(1, "transformers", 0.0),))
    place = layout.job(1).attempt(1)
    (place.dir / "ranks").mkdir(parents=True)
    runner, now = Supervised(layout), 0.0
    deadlines = Deadlines(job, layout, runner, Config, clock=lambda: now)
    for rank in range(2):
        beat(place, rank, 1000.0)
    deadlines.enforce(0.0, told_at=0.0, stage="train")
    limit_sec = Config().jobs.stall_timeout_sec
    beat(place, 1, 1001.0)
    deadlines.enforce(limit_sec - 1, told_at=0.0, stage="train")
    deadlines.enforce(limit_sec + 1, told_at=0.0, stage="train")
    assert runner.num_dumped == 0  # rank 0 alone is silent
    deadlines.enforce(2 * limit_sec, told_at=2 * limit_sec, stage="train")
    assert runner.num_dumped == 1
    outcome = deadlines.explain(
        Outcome("killed", KilledError("the worker was killed")), Exit(None, 6), is_asked=False, stage="train"
    )
    assert (outcome.code, str(outcome.error)) == ("stalled", "rank 1 of 2 gave no sign of life in train")
