"""From the base to a trainer: the model is loaded and audited, and the trainer's masks and losses are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from honed.spec import kind
from honed.worker import imports, parallel
from honed.worker.model import audit, load, token_rows
from honed.worker.recipe.base import Run
from honed.worker.recipe.start import Rows, Start
from honed.worker.rows import mask
from honed.worker.train import examiner, prediction
from honed.worker.train.together import TogetherPredictor

if TYPE_CHECKING:
    from honed.worker.train.losscheck import PlainLoss
    from honed.worker.train.usage import Usage
    from honed.worker.train.watched import Watched


@dataclass(frozen=True)
class Built:
    """A model that is ready to be trained or measured."""

    loaded: load.Loaded
    auditor: audit.Auditor
    exam: examiner.Examiner
    trainer: Watched
    predictor: prediction.Predictor
    plain_loss: PlainLoss
    memory: Usage


def sft_trainer() -> type[Watched]:
    """Import TRL's SFTTrainer, as honed's."""
    from honed.worker.train.trainer import WatchedTrainer

    return WatchedTrainer


def build(run: Run, start: Start, rows: Rows, trainer_class: Callable[[], type[Watched]] = sft_trainer) -> Built:
    """Load the model and build its trainer; raises if anything differs from the plan.

    `trainer_class` imports the trainer, after the backend has imported its libraries.
    """
    with imports.quick():
        import honed.worker.train.callback
        import honed.worker.train.rowcheck
        import honed.worker.train.trainer  # noqa: F401 - all at once, without garbage collection between them
        from honed.worker.train import losscheck, usage

    job, data = start.job, rows.data
    auditor = audit.Auditor(job.precision, run.events, backend=job.backend)
    loaded = load.load(start.backend, job, auditor, rows.chat.tokenizer)
    for text in loaded.messages:
        run.warn(text)

    run.stage("audit")
    _check_model(run, start, rows, loaded, auditor)
    predictor = _predictor(run, start, rows)
    exam = examiner.Examiner(
        job, data, rows.chat, predictor, progress=start.progress, events=run.events, log=run.log, ranks=run.ranks
    )
    num_tokens = max(data.longest + (job.spec.training.pad_to_multiple_of or 0), job.spec.training.max_length or 0)
    start.backend.make_room(loaded.model, max(num_tokens, exam.longest + job.spec.predictions.max_new_tokens))
    plain_loss = losscheck.PlainLoss(loaded.model)
    trainer = _trainer(run, start, rows, loaded, auditor, exam, trainer_class())
    predictor.optimizer, predictor.rule = lambda: trainer.optimizer, loaded.rule
    if kind.of(job.spec).freezes_base:  # a training ends between two steps
        predictor.is_late = lambda: trainer.is_late
    memory = usage.Usage(run.events)
    trainer.add_callback(memory)
    auditor.model(trainer.model, "built", mended=trainer.mended)
    auditor.trainer(trainer)
    run.ranks.check_equal(trainer.model)
    trainer.divide()
    memory.built(trainer.model)
    for text in parallel.told_repeats(trainer, run.ranks):
        run.log("info", text)
    return Built(loaded, auditor, exam, trainer, predictor, plain_loss, memory)


def _check_model(run: Run, start: Start, rows: Rows, loaded: load.Loaded, auditor: audit.Auditor) -> None:
    """Audit the model as it was loaded, and compare it with the rows."""
    from honed.worker.rows import data as datas

    job = start.job
    run.log("info", audit.describe(auditor.model(loaded.model, "adapted"), job.precision))
    # An adapter's wrapper of the embeddings has their weight, not their num_embeddings.
    num_embeddings = loaded.model.get_input_embeddings().weight.shape[0]
    datas.check_ids(rows.data, rows.chat.tokenizer, num_embeddings, job.base_model_path)
    if kind.of(job.spec).trains and not job.is_trial:
        for text in token_rows.remarks(loaded.model, rows.data.train.lacking):
            run.warn(text)


def _predictor(run: Run, start: Start, rows: Rows) -> prediction.Predictor:
    job, asked, media = start.job, start.job.spec.predictions, rows.data.media
    together: dict[str, Any] = {"ranks": run.ranks} if start.is_divided else {}
    return (TogetherPredictor if start.is_divided else prediction.Predictor)(
        rows.chat,
        job.precision,
        **together,
        max_new_tokens=asked.max_new_tokens,
        stop=run.stop,
        warn=run.warn,
        processor=media.processor if media else None,
        sample=asked.sample,
        settings=asked.settings,
        matches_autocast=asked.autocast == "match",
        batch_size=asked.batch_size,
        has_ladder=job.spec.retry.on_out_of_memory == "adjust" and not job.is_trial,
    )


def _trainer(
    run: Run,
    start: Start,
    rows: Rows,
    loaded: load.Loaded,
    auditor: audit.Auditor,
    exam: examiner.Examiner,
    trainer_class: type[Watched],
) -> Watched:
    from honed.worker.train import arguments, evaluation
    from honed.worker.train.callback import RunCallback

    job, data, resumed = start.job, rows.data, start.resumed
    args = arguments.arguments(
        job,
        has_eval=data.held_out is not None,
        padded=data.padded,
        is_resumed=resumed is not None,
        loss_type=start.progress.loss_type,
    )
    callback = RunCallback(
        events=run.events,
        stop=run.stop,
        progress=start.progress,
        predict=exam.predict,
        guard=exam.watch if exam.guard is not None else None,
        sample_frequency=job.spec.predictions.sample_frequency,
        save_interval_sec=job.spec.save_interval_sec,
        ranks=run.ranks,
    )
    is_evaluation = kind.of(job.spec).freezes_base
    with (
        start.backend.building(),
        evaluation.untrained(loaded.model) if is_evaluation else contextlib.nullcontext(),
    ):
        return trainer_class(
            assignment=job,
            data=data,
            loaded=loaded,
            events=run.events,
            stop=run.stop,
            progress=start.progress,
            args=args,
            resumed_step=resumed.step if resumed else None,
            auditor=auditor,
            callback=callback,
            ranks=run.ranks,
        )


def check_rows(run: Run, rows: Rows, built: Built) -> None:
    """Show the first row, and prove the masks of the first batches."""
    run.stage("mask")
    run.events.emit("example", segments=rows.data.train.first_segments)
    mask.check(built.trainer, rows.data, rows.chat, run.events)


def check_loss(run: Run, start: Start, rows: Rows, built: Built) -> None:
    """Prove on a row that a loss over the rows' own tokens is the one that the model's logits give."""
    from honed.worker.train import losscheck

    losscheck.check(
        built.trainer,
        rows.data,
        start.job,
        built.plain_loss,
        progress=start.progress,
        is_resumed=start.resumed is not None,
        log=run.log,
    )


def check_padding(run: Run, start: Start, rows: Rows, built: Built) -> None:
    """Have rows taken one at a time where padding would change them."""
    from honed.worker.train import rowcheck

    rowcheck.check(built.trainer, built.predictor, rows.data, start.job, ranks=run.ranks, log=run.log)
