"""Supervised fine-tuning: rows, model, first checks, baseline, training, output."""

from __future__ import annotations

from honed.worker.assignment import Assignment
from honed.worker.recipe import build, output, start, train
from honed.worker.recipe.base import Run


def run(this: Run, job: Assignment, attempt: int) -> None:
    """Train, from the last checkpoint if there is one, and write the output."""
    begun = start.begin(this, job, attempt)
    rows = start.read_rows(this, begun)
    built = build.build(this, begun, rows)
    build.check_rows(this, rows, built)
    build.check_loss(this, begun, rows, built)
    build.check_padding(this, begun, rows, built)
    figures = train.train(this, begun, built)
    if not job.is_trial:  # of which only the events are needed
        output.write(this, begun, rows, built, figures)
