"""The early end of hopeless jobs of a sweep: asynchronous successive halving (ASHA), by evaluation loss.

    sweep: {…, halving: {min_steps: 50, eta: 2}}     rungs at 50, 100, 200, … steps

A job reaches a rung with its first evaluation at or after that step. Of the n jobs of its sweep that have reached the
rung by then, itself included, the best n / eta go on (rounded up; equal losses count alike); if it is not one of them,
it writes a checkpoint and ends as `stopped_early`. Those that went on earlier stay: jobs of a sweep mostly run one
after another, so nothing waits for the others. The last step is no rung.

Each decision follows from the evaluations in honed.db and their times, and is made again after a restart.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence

from honed.daemon.attempts import Attempts
from honed.daemon.running import Running
from honed.job.database import Database, Evaluation
from honed.job.job import Cut, Halving, Job, Stop
from honed.job.spool import Spool

#: Rungs of one job, at most.
MAX_RUNGS = 30


class Halvings:
    """The sweeps' decisions on their running jobs."""

    def __init__(self, spool: Spool, database: Database, attempts: Attempts) -> None:
        self._spool = spool
        self._database = database
        self._attempts = attempts
        self._seen: dict[int, tuple[int, int | None]] = {}  # job number → offset of its events, and its last evaluation

    def tend(self) -> None:
        """Stop the running jobs that a rung has ended; if the machine prevents it, in a later turn."""
        self._seen = {number: seen for number, seen in self._seen.items() if number in self._attempts.running}
        for running in self._attempts.running.values():
            with self._attempts.failures.alone(f"job {running.job.id} ({running.job.name})"):
                self._look_at(running)

    def _look_at(self, running: Running) -> None:
        job = running.job
        if (halving := _halving(job)) is None or job.stop in {Stop.HALVE, Stop.HOLD, Stop.CANCEL}:
            return
        offset, known = self._seen.get(job.id, (-1, None))
        if offset == running.following.offset:
            return
        try:
            last, num_steps = self._database.evaluated(job.id)
            if num_steps is None:  # reported with the loss of the first steps
                return
            # Each evaluation is a reason to look: those of the others, which came first, may be read after its own.
            ours = self._sweep_of(job) if last != known else []
            reached = self._reached(job, rungs(halving, num_steps)) if ours else []
            if any(number in self._database.pending for number in ours):  # not all that it is compared with is there
                return
            evaluations = self._database.evaluations(ours, reached)
            cut = cut_of(job.id, evaluations, halving, num_steps=num_steps) if ours else None
        except sqlite3.Error:  # it is built again, and the job is looked at again with its next event
            return
        if cut is not None:
            running.stop(Stop.HALVE, cut=cut)
        self._seen[job.id] = running.following.offset, last

    def _reached(self, job: Job, steps: Iterable[int]) -> list[int]:
        return list(itertools.takewhile(lambda step: self._database.evaluations([job.id], [step])[job.id], steps))

    def _sweep_of(self, job: Job) -> list[int]:
        """Return the jobs of its sweep, itself included, of its user: anybody may write a group into a file."""
        assert job.group is not None
        number = job.group["id"]
        in_sweep = (item for item in self._spool.catalog if item.sweep and item.sweep.id == number)
        return [item.id for item in in_sweep if item.uid == job.uid]


def _halving(job: Job) -> Halving | None:  # none once the job has been ended early
    return job.group.get("halving") if job.group and job.cut is None else None


def rungs(halving: Halving, last_step: float) -> Iterator[int]:
    """Yield the steps of the rungs before the last step."""
    step = halving["min_steps"]
    for _ in range(MAX_RUNGS):
        if step >= last_step:
            return
        yield step
        step *= halving["eta"]


def cut_of(
    job_id: int, evaluations: Mapping[int, Sequence[Evaluation]], halving: Halving, *, num_steps: float
) -> Cut | None:
    """Return the first rung that ends a job, which makes `num_steps`; None if it goes on. `evaluations`: of the jobs of
    its sweep, by number."""
    for number, step in enumerate(rungs(halving, num_steps), 1):
        reached = {item: first for item in evaluations if (first := _at(evaluations[item], step)) is not None}
        if (own := reached.get(job_id)) is None or own.step >= num_steps:
            return None
        # Those that came first; two in the same millisecond in the order of their numbers.
        earlier = {item: first for item, first in reached.items() if (first.time, item) <= (own.time, job_id)}
        num_better = sum(evaluation.eval_loss < own.eval_loss for evaluation in earlier.values())
        num_kept = -(-len(earlier) // halving["eta"])
        if num_better >= num_kept:
            return Cut(number, own.step, own.eval_loss, num_better + 1, len(earlier), num_kept)
    return None


def _at(evaluations: Sequence[Evaluation], step: int) -> Evaluation | None:
    """Return a job's evaluation at a rung: its first one there, also if it was repeated after a resume."""
    return next((evaluation for evaluation in evaluations if evaluation.step >= step), None)
