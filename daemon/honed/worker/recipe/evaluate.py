"""An evaluation: the model is measured as at the end of a training, and nothing is trained or written."""

from __future__ import annotations

from honed.job import tree
from honed.worker.assignment import Assignment
from honed.worker.recipe import build, start
from honed.worker.recipe.base import Run


def run(this: Run, job: Assignment, attempt: int) -> None:
    """Run the evaluation, and a round of predictions, as far as there is time."""
    begun = start.begin(this, job, attempt)
    rows = start.read_rows(this, begun)
    built = build.build(this, begun, rows)
    exam, trainer = built.exam, built.trainer
    build.check_rows(this, rows, built)
    build.check_loss(this, begun, rows, built)
    build.check_padding(this, begun, rows, built)
    try:
        this.stage("evaluate")
        exam.show()
        trainer.measure(this.began)
        this.metrics = exam.end(trainer.model, trainer.state, 0)
        this.stop.check()
        trainer.check_measured(*this.ranks.broadcast((exam.num_answered, exam.num_questions)))
    finally:
        this.memory = built.memory.trained(trainer.model)
    if job.shared_rows_dir is None:
        tree.remove(job.rows_dir)
