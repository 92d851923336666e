"""Supervised fine-tuning: rows, model, first checks, baseline, training, output."""

from __future__ import annotations

from typing import Any

from honed.job import tree
from honed.plan import pace
from honed.system.error import DatasetError, InterruptedRunError, TimeLimitError
from honed.worker.assignment import Assignment
from honed.worker.recipe import build, output, start
from honed.worker.recipe.base import Run
from honed.worker.recipe.build import Built
from honed.worker.recipe.start import Start
from honed.worker.train.checkpoint import Progress


def run(this: Run, job: Assignment, attempt: int) -> None:
    """Train, from the last checkpoint if there is one, and write the output."""
    begun = start.begin(this, job, attempt)
    rows = start.read_rows(this, begun)
    built = build.build(this, begun, rows)
    build.check_first_batch(this, begun, rows, built)
    if begun.resumed is None and not job.is_trial:
        _warn_of_pace(this, job, built)
    this.stage("baseline")
    if begun.resumed is None:
        built.exam.begin(built.trainer.model, built.trainer.state)
    figures = _train(this, begun, built)
    if not job.is_trial:  # of which only the events are needed
        output.write(this, begun, rows, built, figures)
        if this.ranks.is_zero and job.shared_rows_dir is None:  # else honed takes them first, and removes them
            tree.remove(job.rows_dir)  # no later attempt needs them


def _warn_of_pace(this: Run, job: Assignment, built: Built) -> None:
    """Warn of settings for which the run is too short, unless the check has done so in other words."""
    warned = {text.partition(":")[0] for text in job.plan.warnings}
    for text in pace.unfit(job.spec, built.trainer.num_steps()):
        if text.partition(":")[0] not in warned:
            this.warn(text)


def _train(this: Run, begun: Start, built: Built) -> dict[str, float]:
    """Train to the end, and return the figures of the last look. On a stop, and at a limit, a checkpoint is written."""
    trainer, exam, resumed, ranks = built.trainer, built.exam, begun.resumed, this.ranks
    this.stage("train")
    if resumed is not None:
        this.step = resumed.step
        this.events.emit("resumed", step=resumed.step, path=str(resumed.path))
    exam.budget.train(this.step)
    figures: dict[str, float] = {}
    try:
        trainer.train(resume_from_checkpoint=str(resumed.path) if resumed else None)
        figures = exam.end(trainer.model, trainer.state, trainer.final_step())
        trainer.finish_save()
        trainer.check_stop()
    except (InterruptedRunError, TimeLimitError, DatasetError) as ended:
        # DatasetError: an image that has disappeared, on this rank alone; the others are agreed.
        if not begun.job.is_trial and not (ranks.are_several and isinstance(ended, DatasetError)):
            trainer.save()
        ranks.notice()
        raise
    except Exception:
        ranks.notice()  # what follows may take a while
        raise
    finally:
        trainer.finish_after_error()
        this.step = max(this.step, trainer.state.global_step)
        this.metrics |= _metrics(trainer.state, begun.progress) | figures
        this.memory = built.memory.trained(trainer.model)
    return figures


def _metrics(state: Any, progress: Progress) -> dict[str, float]:
    """Return metrics of the whole run, earlier attempts included: transformers' own averages restart with each."""
    metrics: dict[str, float] = {"num_trained_tokens": progress.num_trained_tokens}
    losses, last = [], 0
    for entry in state.log_history:
        if "loss" in entry:
            losses.append((entry["loss"], entry["step"] - last))
            last = entry["step"]
        if "eval_loss" in entry:
            metrics["eval_loss"] = entry["eval_loss"]
    if last:
        metrics["train_loss"] = sum(loss * num_steps for loss, num_steps in losses) / last
    return metrics
