"""From a trained model to the job's output, which is proven before it is put in place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.job import tree
from honed.system import durable
from honed.system.error import HonedError, InterruptedRunError
from honed.worker.model import cast, division
from honed.worker.model.card import Facts
from honed.worker.recipe.base import Run, versions
from honed.worker.recipe.build import Built
from honed.worker.recipe.start import Rows, Start
from honed.worker.train import prediction

if TYPE_CHECKING:
    from honed.worker.model.writer import Writer

#: Seconds between log lines on the progress of a merge.
MERGE_LOG_INTERVAL_SEC = 30.0


def write(run: Run, start: Start, rows: Rows, built: Built, figures: dict[str, float]) -> None:
    """Write the output. A regression is raised after it: the output has another name then, and stays for a person."""
    trainer, exam = built.trainer, built.exam
    regression = exam.regression(figures)
    run.remark = exam.remark(trainer.state, figures) if regression is None else ""
    trainer.check_weights()
    run.stage("export")
    facts: Facts = {
        "started": run.started,
        "versions": versions(start.job.backend),
        "step": run.step,
        "metrics": run.metrics,
        "data": rows.data.hashes,
    }
    if built.loaded.basis is not None and (lacking := built.loaded.basis.uncarried(trainer.model)):
        run.warn(f"output: {lacking}")
        facts["changes"] = [lacking]
    try:
        with division.whole(trainer.model, is_zero=run.ranks.is_zero) as is_here:
            if is_here:
                _cast(run, start, built)
            fault = _export(run, start, rows, built, facts, is_regressed=regression is not None)
    except InterruptedRunError:
        trainer.save()  # the merge was stopped; the training before it must not be repeated
        raise
    if not run.ranks.is_zero:
        return
    for name, path in run.artifacts.items():
        run.events.emit("artifact", name=name, path=path, num_bytes=durable.num_bytes_below(Path(path)))
    if fault is not None:
        raise fault
    if regression is not None:
        raise regression
    _remove_regressed(run, start)
    if start.job.shared_rows_dir is None:  # else honed takes them first, and removes them
        tree.remove(start.job.rows_dir)  # no later attempt needs them


def _cast(run: Run, start: Start, built: Built) -> None:
    """Give full fine-tuning's weights the dtypes in which they are saved; an adapter has its own already."""
    rule, trainer = built.loaded.rule, built.trainer
    if rule is None:
        return
    if why := cast.cast(trainer.model, start.job.precision, rule, trainer.optimizer):
        run.warn(why)
    else:
        built.auditor.saved(trainer.model, rule)


def _export(run: Run, start: Start, rows: Rows, built: Built, facts: Facts, *, is_regressed: bool) -> HonedError | None:
    """Write the output by rank 0. Returns the fault of a part of it that could not be made."""
    from honed.worker.model import export, likeness, proof

    job, trainer, logged_at = start.job, built.trainer, time.monotonic()

    def compare(writer: Writer, written: Path) -> str:
        with prediction.undisturbed(trainer.model):
            lines = likeness.rows_of(trainer, rows.data)
            return writer.compare(written, job, lines, live=trainer.model, beat=run.stop.check)

    def merging(number: int, count: int) -> None:
        nonlocal logged_at
        run.stop.check()
        if time.monotonic() - logged_at >= MERGE_LOG_INTERVAL_SEC:
            logged_at = time.monotonic()
            run.log("info", f"merged {number} of {count} tensors")

    def made() -> Any:
        return export.export(
            job,
            trainer.model,
            built.loaded.tokenizer,
            facts,
            progress=merging,
            note=lambda text: run.log("info", f"output: {text}"),
            stop_ids=rows.chat.stop_token_ids,
            is_regressed=is_regressed,
            prove=lambda output: proof.prove(output, job, trainer.model),
            compare=compare,
        )

    run.artifacts, fault = run.ranks.by_zero(made)
    return fault


def _remove_regressed(run: Run, start: Start) -> None:
    """Remove what an earlier run of this job has left under the name of a regression."""
    from honed.worker.model import export

    for path, problem in export.remove_regressed(start.job):
        if problem is None:
            run.log("info", f"removed {path}, left by an earlier run of this job, because this one succeeded")
        else:
            run.warn(f"{path}, left by an earlier run of this job, cannot be removed: {problem}")
