"""From a trainer to trained weights: the first checks, the baseline, and the training itself."""

from __future__ import annotations

from typing import Any

from honed.plan import pace
from honed.system.error import DatasetError, InterruptedRunError, TimeLimitError
from honed.worker.recipe.base import Run
from honed.worker.recipe.build import Built
from honed.worker.recipe.start import Start
from honed.worker.train.checkpoint import Progress


def train(run: Run, start: Start, built: Built) -> dict[str, float]:
    """Measure before the first step, and train to the end, from the last checkpoint if there is one.

    Return the figures of the last look. On a stop, and at a limit, a checkpoint is written.
    """
    trainer, exam, resumed, ranks = built.trainer, built.exam, start.resumed, run.ranks
    if resumed is None and not start.job.is_trial:
        _warn_of_pace(run, start, built)
    run.stage("baseline")
    if resumed is None:
        exam.begin(trainer.model, trainer.state)
    run.stage("train")
    if resumed is not None:
        run.step = resumed.step
        run.events.emit("resumed", step=resumed.step, path=str(resumed.path))
    exam.budget.train(run.step)
    figures: dict[str, float] = {}
    try:
        trainer.train(resume_from_checkpoint=str(resumed.path) if resumed else None)
        figures = exam.end(trainer.model, trainer.state, trainer.final_step())
        trainer.finish_save()
        trainer.check_stop()
    except (InterruptedRunError, TimeLimitError, DatasetError) as ended:
        # DatasetError: an image that has disappeared, on this rank alone; the others are agreed.
        if not start.job.is_trial and not (ranks.are_several and isinstance(ended, DatasetError)):
            trainer.save()
        ranks.notice()
        raise
    except Exception:
        ranks.notice()  # what follows may take a while
        raise
    finally:
        trainer.finish_after_error()
        run.step = max(run.step, trainer.state.global_step)
        run.metrics |= _metrics(trainer.state, start.progress) | figures
        run.memory = built.memory.trained(trainer.model)
    return figures


def _warn_of_pace(run: Run, start: Start, built: Built) -> None:
    """Warn of settings for which the run is too short, unless the check has done so in other words."""
    warned = {text.partition(":")[0] for text in start.job.plan.warnings}
    for text in pace.unfit(start.job.spec, built.trainer.num_steps()):
        if text.partition(":")[0] not in warned:
            run.warn(text)


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
