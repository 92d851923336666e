"""Successive halving: which jobs of a sweep go on at a rung, by their evaluation losses and the order of these."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.daemon.halving import Halvings, cut_of, rungs
from honed.daemon.rebuild import fill, rebuild
from honed.job.database import Database, Evaluation
from honed.job.event import Event, Reading
from honed.job.job import Attempt, Cut, Group, Halving, Job, State, Stop
from honed.job.spool import Spool
from honed.system.failures import Failures
from honed.system.layout import Layout

HALF: Halving = {"min_steps": 10, "eta": 2}


def course(began: int, losses: Mapping[int, float]) -> list[Evaluation]:
    """Return the evaluations of a job that began in this minute, by step: one a second."""
    return [
        Evaluation(step, loss, f"2026-11-24T10:{began:02}:{at:02}.000+00:00")
        for at, (step, loss) in enumerate(losses.items())
    ]


def cuts(losses: Sequence[float], halving: Halving, *, num_steps: int = 100) -> list[Cut | None]:
    """Return what becomes of jobs that run one after another, each with one loss at all of its evaluations."""
    steps = range(0, num_steps + 1, 10)
    ran: dict[int, list[Evaluation]] = {}
    found = []
    for number, loss in enumerate(losses):
        ran[number] = course(number, dict.fromkeys(steps, loss))
        found.append(cut := cut_of(number, ran, halving, num_steps=num_steps))
        if cut is not None:
            ran[number] = [each for each in ran[number] if each.step <= cut.step]
    return found


def test_the_rungs_are_before_the_last_step() -> None:
    assert list(rungs({"min_steps": 50, "eta": 3}, 1000)) == [50, 150, 450]
    assert list(rungs({"min_steps": 50, "eta": 2}, 100)) == [50]
    assert list(rungs({"min_steps": 50, "eta": 2}, 50)) == []


def test_of_jobs_that_run_one_after_another_the_better_half_goes_on() -> None:
    found = cuts([3.0, 1.0, 2.0, 4.0, 5.0, 0.5], HALF)
    assert [each is None for each in found] == [True, True, True, False, False, True]
    cut = found[3]
    assert cut is not None
    assert (cut.rung, cut.step, cut.eval_loss, cut.place, cut.num, cut.num_kept) == (1, 10, 4.0, 4, 4, 2)
    assert cut.words == "at step 10 (rung 1) its eval_loss 4 was number 4 of 4, and the best 2 go on"
    assert sum(each is None for each in cuts([*map(float, range(12))], {"min_steps": 10, "eta": 4})) == 1


def test_the_best_job_is_never_ended_whatever_the_order_is() -> None:
    for order in itertools.permutations([1.0, 2.0, 3.0, 4.0, 5.0]):
        found = cuts(order, {"min_steps": 10, "eta": 3})
        assert found[order.index(1.0)] is None
        assert found[0] is None


def test_equal_losses_count_alike_and_the_last_step_is_no_rung() -> None:
    assert cuts([1.0] * 6, HALF) == [None] * 6
    assert cuts([1.0, 2.0], HALF, num_steps=10) == [None, None]


def test_a_later_rung_ends_a_job_that_the_first_one_let_go_on() -> None:
    ran = {1: course(1, {10: 2.0, 20: 1.0, 40: 0.5}), 2: course(2, {10: 1.0, 20: 3.0})}
    cut = cut_of(2, ran, HALF, num_steps=80)
    assert cut is not None
    assert (cut.rung, cut.step, cut.num) == (2, 20, 2)
    assert cut_of(1, ran, HALF, num_steps=80) is None


def test_an_evaluation_after_a_rung_counts_at_it_and_later_jobs_change_no_decision() -> None:
    ran = {1: course(1, {0: 9.0, 15: 2.0}), 2: course(2, {0: 9.0, 15: 1.0}), 3: course(3, {0: 9.0, 15: 1.5})}
    first = cut_of(2, ran, HALF, num_steps=80)
    assert first is None
    cut = cut_of(1, ran, HALF, num_steps=80)
    assert cut is None  # it came first, although two are better by now
    ran[3] = course(3, {0: 9.0, 15: 2.5})
    third = cut_of(3, ran, HALF, num_steps=80)
    assert third is not None
    assert (third.step, third.num, third.num_kept) == (15, 3, 2)


@pytest.mark.parametrize("again", [0.5, 5.0])
def test_an_evaluation_that_is_repeated_after_a_resume_counts_as_it_was_first(again: float) -> None:
    ran = {1: course(1, {10: 1.0}), 2: [*course(2, {10: 2.0}), *course(3, {10: again})]}
    cut = cut_of(2, ran, HALF, num_steps=80)
    assert cut is not None
    assert cut.eval_loss == 2.0


@dataclass
class Reporting:
    """What halving asks of a running job."""

    job: Job
    following: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(offset=100))
    cuts: list[Cut] = field(default_factory=list)

    def stop(self, _why: Stop, *, cut: Cut) -> None:
        self.cuts.append(cut)


@pytest.mark.parametrize(("own", "is_ended"), [(2.0, False), (6.0, True)])
def test_no_job_is_ended_while_rows_of_its_sweep_are_still_made(tmp_path: Path, own: float, is_ended: bool) -> None:
    """The second best of four goes on; of the two whose rows are there it would be the worse one, and end."""
    spool = Spool(Layout(tmp_path))
    group: Group = {"id": 9, "name": "s", "file": "s.yaml", "values": {}, "halving": HALF}
    for number in (1, 2, 3, 4):
        state = State.RUNNING if number == 4 else State.SUCCEEDED
        attempt = Attempt(1, "transformers", 10.0, ended_at=None if number == 4 else 20.0)
        job = Job(number, f"n{number}", 1.0, "s.yaml", 0, f"/o/{number}", attempts=(attempt,), group=group, state=state)
        spool.entries.path(number, state).write_bytes(job.to_json())
        path = spool.layout.job(number).attempt(1).events_path
        path.parent.mkdir(parents=True)
        step = {"event": "step", "time": 11.0, "step": 1, "num_steps": 80, "loss": 1.0}
        loss = {1: 5.0, 2: 4.0, 3: 1.0, 4: own}[number]
        evaluation = {"event": "evaluation", "time": 12.0 + number, "step": 10, "metrics": {"eval_loss": loss}}
        path.write_text("".join(json.dumps(each) + "\n" for each in (step, evaluation)))
    spool.recover()
    spool.layout.database_path.parent.mkdir(parents=True, exist_ok=True)
    database = Database(spool.layout.database_path)
    rebuild(database, spool, spool.layout, is_late=lambda: True)
    assert [number in database.pending for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert [len(each) for each in database.evaluations((1, 2, 3, 4), [10]).values()] == [0, 0, 1, 1]
    running = Reporting(next(spool.jobs(State.RUNNING)))
    attempts: Any = SimpleNamespace(running={4: running}, failures=Failures(logging.getLogger("test")))
    halvings = Halvings(spool, database, attempts)
    halvings.tend()
    assert running.cuts == []
    fill(database, spool, spool.layout)
    halvings.tend()
    assert len(running.cuts) == is_ended
    database.close()
    spool.close()


def test_an_evaluation_that_is_read_late_ends_a_job_that_went_on_without_it(tmp_path: Path) -> None:
    """Two jobs run beside each other; of one, the events are read after the other has passed the rung."""
    spool = Spool(Layout(tmp_path))
    spool.layout.database_path.parent.mkdir(parents=True, exist_ok=True)
    group: Group = {"id": 9, "name": "s", "file": "s.yaml", "values": {}, "halving": HALF}
    attempts = (Attempt(1, "transformers", 10.0),)
    jobs = [
        Job(number, f"n{number}", 1.0, "s.yaml", 0, f"/o/{number}", attempts=attempts, group=group, state=State.RUNNING)
        for number in (1, 2)
    ]
    for job in jobs:
        spool.entries.path(job.id, job.state).write_bytes(job.to_json())
    spool.recover()
    database = Database(spool.layout.database_path)
    database.put_jobs(jobs)

    def read(job: Job, *told: tuple[float, int, float]) -> None:
        evaluations = [
            Event("evaluation", at, {"step": step, "metrics": {"eval_loss": loss}}) for at, step, loss in told
        ]
        step = Event("step", told[0][0], {"step": 1, "num_steps": 80, "loss": 1.0})
        database.apply(job, Reading([step, *evaluations], 10, 0))

    late, running = jobs[0], Reporting(jobs[1])
    attempts_of: Any = SimpleNamespace(running={2: running}, failures=Failures(logging.getLogger("test")))
    halvings = Halvings(spool, database, attempts_of)
    for at, step in ((20.0, 10), (21.0, 15)):
        read(running.job, (at, step, 2.0))
        running.following.offset += 1
        halvings.tend()
        assert len(running.cuts) == (step == 15), step
        read(late, (12.0, 10, 1.0))
    database.close()
    spool.close()
