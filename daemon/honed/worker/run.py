"""One attempt at one job, read top to bottom: prepare, data, load, audit, mask, baseline, train, export, result.

Nothing here imports the training stack before the backend is chosen. A worker that was staged waits between data and
load until its device is free (gate.py); with Unsloth, whose import asks the device, before it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from honed.inputs import basemodel, modality, score
from honed.job import tree, trial
from honed.job.event import EventWriter, has_begun
from honed.plan import pace, position
from honed.plan import parallel as division_plan
from honed.system import durable, installed
from honed.system.error import (
    DatasetError,
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    InterruptedRunError,
    KilledError,
    OutOfMemoryError,
    SpecError,
    TimeLimitError,
    said,
)
from honed.system.layout import JobLayout
from honed.text.chat import ChatFormat
from honed.worker import assignment as assignments
from honed.worker import cause, imports, parallel
from honed.worker import trial as trials
from honed.worker.assignment import Assignment
from honed.worker.gate import Gate, read_ahead
from honed.worker.model import audit, cast, division, load, merge, token_rows, torchvision
from honed.worker.model.card import Facts
from honed.worker.parallel import ALONE, Ranks, Unwritten
from honed.worker.rows import mask
from honed.worker.stop import Stop
from honed.worker.train import checkpoint, disk_reserve, examiner, prediction, tracker
from honed.worker.train.together import TogetherPredictor

#: Seconds between log lines on the progress of a merge in the export.
MERGE_TOLD_INTERVAL_SEC = 30.0
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes")


def run(
    job_dir: Path,
    attempt: int,
    *,
    backend: str | None = None,
    stop: Stop | None = None,
    gate: Gate | None = None,
    tell: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _data: None,
    ranks: Ranks = ALONE,
) -> int:
    """Run one attempt. Write events and, once everything else is durable, result.json; return the exit status.

    Each event is also passed to `tell`. `gate`: before it the device is not used. Of several ranks, the first
    alone writes.
    """
    layout = JobLayout(job_dir).attempt(attempt)
    durable.make_dir(layout.dir)
    events = EventWriter(layout.events_path, tell=tell) if ranks.is_zero else Unwritten(tell)
    stop = stop or Stop()
    reserve = disk_reserve.Reserve(layout.dir) if ranks.is_zero else None
    story = _Story(events, stop, gate or Gate(JobLayout(job_dir), attempt, {}), ranks)

    def conclude(error: HonedError | None) -> int:
        """Write the result, and return the exit status."""
        match error:
            case None:
                outcome = "succeeded"
            case InterruptedRunError():
                outcome = "interrupted"
            case _:
                outcome = "failed"
                events.log("error", error.message, evidence=error.evidence, code=error.code)
        status = error.exit_status if error else 0
        if reserve is None:
            events.close()
            return status
        events.emit("finished", outcome=outcome, step=story.step, metrics=story.metrics)
        events.close()
        reserve.spend()
        durable.write_json(
            layout.result_path,
            {
                "outcome": outcome,
                "step": story.step,
                "metrics": {name: value for name, value in story.metrics.items() if math.isfinite(value)},
                "artifacts": story.artifacts,
                "memory": story.memory,
                "error": error.as_dict() if error else None,
                "remark": story.remark if error is None else "",
                "phase": stop.now_in,
                "needed_bytes": error.needed_bytes if isinstance(error, DiskShortError) else 0,
            },
        )
        return status

    def give_up(error: HonedError | None) -> None:
        """End this process, which waits for a rank that has failed or was lost."""
        os._exit(KilledError.exit_status if error is None else conclude(error))

    ranks.watch(give_up)
    error: HonedError | None = None
    try:
        torchvision.mend()
        job = assignments.read(job_dir, attempt, backend=backend)
        _check_ranks(job, ranks)
        with modality.naming(job.spec.parts.patterns):
            if job.spec.kind == "merge":
                story.artifacts = merge.tell(job, events, stop)
            else:
                story.try_first(job, attempt)
                if job.spec.trial != "only":
                    story.tell(job, attempt)
    except Exception as problem:  # noqa: BLE001 - every end of a worker is reported
        with contextlib.suppress(OSError):  # worker.log may be on the full disk, and the result is still to be written
            traceback.print_exc()
        error = ranks.fail(problem, explain(problem, job_dir.name))
        if error is None:
            events.close()
            return KilledError.exit_status
        ranks.wait_for_result(layout.result_path)
        if isinstance(problem, HonedError) and error.evidence:
            with contextlib.suppress(OSError):
                print(error.evidence, file=sys.stderr)
    return conclude(error)


def _check_ranks(job: Assignment, ranks: Ranks) -> None:
    """Raise SpecError for what several ranks cannot do yet."""
    planned = job.plan.parallel
    if planned.num_ranks != ranks.world and not job.is_trial:
        raise SpecError(
            f"the job is planned for {planned.num_ranks} processes, but {ranks.world} were started",
            hint="the daemon and the worker are of different versions: restart honed",
        )
    if not ranks.are_several:
        return
    if job.backend != "transformers":
        raise SpecError(f"backend: {job.backend} trains on one GPU only", hint="backend: transformers")
    if job.spec.kind == "merge":
        raise SpecError(f"kind: {job.spec.kind} runs on one GPU only", hint="resources: {gpus: 1}")


def explain(problem: Exception, job: str = "ID") -> HonedError:
    """Return honed's error for an exception; `job` is the number of the job that it ended."""
    text = f"{type(problem).__name__}: {said(problem)}"
    match problem:
        case HonedError():
            return problem
        case _ if load.is_out_of_memory(problem):
            return OutOfMemoryError(f"{type(problem).__name__}: {problem}".splitlines()[0], hint=_MEMORY_HINT)
        case ImportError():
            return EnvironmentInvalidError(text, hint="see `honectl doctor`")
        case _ if disk_reserve.is_no_room(problem):
            return DiskShortError(text, hint="free disk space; honectl requeue resumes from the last checkpoint")
        case PermissionError():
            return EnvironmentInvalidError(text, hint="give the worker's user read or write permission")
        case _:
            return cause.explain(problem, job)


#: The form of a checkpoint, by its `is_divided`.
_DIVISION = {True: "in parts, with parallel: fsdp", False: "whole, without fsdp"}
_MEMORY_HINT = (
    "use a smaller per_device_train_batch_size with more gradient_accumulation_steps, or a shorter max_length"
)


class _Story:
    """The state of the run so far, for its result."""

    def __init__(self, events: EventWriter, stop: Stop, gate: Gate, ranks: Ranks) -> None:
        self._events = events
        self._stop = stop
        self._gate = gate
        self._ranks = ranks
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.artifacts: dict[str, str] = {}
        self.remark = ""  #: a remark on a successful run
        self.memory: dict[str, int] = {}  #: bytes really held, as in the event `memory`

    def try_first(self, job: Assignment, attempt: int) -> None:
        """Run the job's trial, if the job asks for one and does not resume from a checkpoint.

        Of several ranks, the first runs it, on its own device: whether a job learns does not depend on their number.
        The others wait for it where they join.
        """
        if not self._ranks.is_zero:
            return
        has_begun = any(job.layout.checkpoints_dir.glob("checkpoint-*"))
        if not job.spec.trial or (has_begun and job.spec.trial != "only"):
            return
        self._pass_gate()
        self._stage("trial")

        def prepare() -> None:
            if job.spec.trial != "only" and not self._stop.is_set and imports.can_be_ahead(job):
                imports.ahead()

        found = trials.run(job, attempt=attempt, tell=self._log, stop=self._stop, meanwhile=prepare)
        self._events.emit("trial", **asdict(found))
        level = "info" if found.verdict == "learns" else "warning"
        self._log(level, f"trial: {trial.headline(found)}")

    def tell(self, job: Assignment, attempt: int) -> None:  # noqa: PLR0915 - a linear sequence stays in one piece
        """Run all stages; each begins with a check of the stop flag."""
        started, began = time.time(), time.monotonic()
        events, stop, spec, precision, ranks = self._events, self._stop, job.spec, job.precision, self._ranks
        events.emit("started", pid=os.getpid(), versions=versions(job.backend), backend=job.backend)
        if job.adjustments:
            events.emit("adjusted", steps=[asdict(each) for each in job.adjustments])

        # Prepare: the checkpoint of an earlier attempt, then the libraries, in the order that the backend needs.
        self._stage("prepare")
        ranks.join()
        job.layout.checkpoints_dir.mkdir(exist_ok=True)  # its mode is the umask's: honed may be in our group
        durable.sync_dir(job.layout.dir)
        resumed, set_aside = ranks.by_zero(lambda: checkpoint.find(job.layout.checkpoints_dir, beat=stop.check))
        if resumed and not ranks.is_zero:  # no path is taken from the network
            resumed = replace(resumed, path=job.layout.checkpoints_dir / f"checkpoint-{int(resumed.step)}")
        for item in set_aside:
            self._log("warning", f"{item.name} is damaged ({item.why}) and was renamed to {item.path.name}")
        if set_aside and resumed is None:
            self._log("error", "all checkpoints of this job are damaged: it starts from the beginning")
        if resumed is None and any(has_begun(job.layout.attempt(each).events_path) for each in range(1, attempt)):
            events.emit("started_over", reason="damaged" if set_aside else "no checkpoint")
        progress = resumed.progress if resumed else checkpoint.Progress(evaluates_by_length=True, predicts_evenly=True)
        if resumed and progress.num_ranks != ranks.world:
            self._log(
                "warning",
                f"the checkpoint is of {progress.num_ranks} processes, and the run continues with {ranks.world}: its "
                "figures will not be bit-identical, because the random numbers of each process differ",
            )
        is_divided = job.plan.parallel.mode == "fsdp"
        if resumed and progress.is_divided != is_divided:
            raise SpecError(
                f"{resumed.path.name} was written {_DIVISION[progress.is_divided]}, but the job is now planned "
                f"{_DIVISION[is_divided]}",
                hint=f"set parallel: {'fsdp' if progress.is_divided else 'ddp'} and the number of GPUs as before, or "
                "submit the job again",
            )
        job.check_inputs()
        if self._gate.is_closed:
            self._gate.watch(job.files())
        backend = load.choose(job.backend)
        tracker.prepare(job)
        if self._gate.is_closed:
            read_ahead(job.base_model_path)
            if job.backend == "unsloth":
                import torch  # noqa: F401 - all of the stack that may be imported before Unsloth

                self._pass_gate()
                self._stage("prepare")  # its turn has come
                began = time.monotonic()
        with imports.quick():
            backend.import_libraries()
            if not (self._gate.is_closed and imports.asks_device(job)):
                import honed.worker.train.watched  # noqa: F401 - TRL and peft
        if not self._gate.is_closed:
            self._load_metrics(job)

        self._stage("data")
        from honed.worker.rows import data as datas

        tokenizer = load.load_tokenizer(job, warn=lambda text: self._log("warning", text))
        chat = ChatFormat.of(spec, tokenizer, date=job.date)
        data = ranks.in_turn(
            lambda: datas.build(
                job,
                chat,
                stop,
                lambda: load.load_processor(job, tokenizer),
                warn=lambda text: self._log("warning", text),
                is_ahead=self._gate.is_closed,
            )
        )
        if resumed and progress.data_hashes not in ({}, data.hashes):
            self._log(
                "warning", "the data files changed after the checkpoint: the run continues with their current content"
            )
        progress.data_hashes = data.hashes
        events.emit("data", **data.counts)
        events.emit("rows", entries=data.entries, shared=data.shared_entries)
        for text in data.told():
            self._log("warning", text)
        if "messages" in data.train.kinds:
            if spec.training.eos_token is not None:
                chat.require_end(spec.training.eos_token)
            for level, text in chat.advice.notes(data.train.examples, basemodel.end_ids(job.base_model_path)):
                self._log("info" if level == "hint" else level, text)
        if is_divided and data.media is not None:  # not every row was inspected before
            words = f"parallel: fsdp: {division_plan.WITH_MEDIA}"
            raise SpecError(words, hint="write parallel: ddp", fix={"parallel": "ddp"})
        config = load.load_config(job)
        position.check_rows(spec, config.model_type, config.to_dict(), data.longest)
        was_ahead = self._gate.is_closed
        if was_ahead:
            self._pass_gate()
            started, began = time.time(), time.monotonic()

        self._stage("load")
        if was_ahead:
            job.check_inputs()
            self._load_metrics(job)
        with imports.quick():
            from honed.worker.train import evaluation, losscheck, rowcheck, usage
            from honed.worker.train import trainer as trainers
            from honed.worker.train.callback import RunCallback
            from honed.worker.train.watched import WatchedTrainer

        auditor = audit.Auditor(precision, events, backend=job.backend)
        loaded = load.load(backend, job, auditor, tokenizer)
        for text in loaded.told:
            self._log("warning", text)

        self._stage("audit")
        self._log("info", audit.describe(auditor.model(loaded.model, "adapted"), precision))
        # An adapter's wrapper of the embeddings has their weight, not their num_embeddings.
        num_embeddings = loaded.model.get_input_embeddings().weight.shape[0]
        datas.check_ids(data, chat.tokenizer, num_embeddings, job.base_model_path)
        if spec.kind == "sft" and not job.is_trial:
            for text in token_rows.remarks(loaded.model, data.train.lacking):
                self._log("warning", text)
        together = {"ranks": ranks} if is_divided else {}
        predictor = (TogetherPredictor if is_divided else prediction.Predictor)(
            chat,
            precision,
            **together,
            max_new_tokens=spec.predictions.max_new_tokens,
            stop=stop,
            warn=lambda text: self._log("warning", text),
            processor=data.media.processor if data.media else None,
            sample=spec.predictions.sample,
            settings=spec.predictions.settings,
            matches_autocast=spec.predictions.autocast == "match",
            batch_size=spec.predictions.batch_size,
            has_ladder=spec.retry.on_out_of_memory == "adjust" and not job.is_trial,
        )
        exam = examiner.Examiner(
            job, data, chat, predictor, progress=progress, events=events, log=self._log, ranks=ranks
        )
        num_tokens = max(data.longest + (spec.training.pad_to_multiple_of or 0), spec.training.max_length or 0)
        backend.make_room(loaded.model, max(num_tokens, exam.longest + spec.predictions.max_new_tokens))
        args = trainers.arguments(
            job,
            has_eval=data.held_out is not None,
            has_media=data.media is not None,
            is_resumed=resumed is not None,
            loss_type=progress.loss_type,
        )
        plain_loss = losscheck.PlainLoss(loaded.model)
        is_evaluation = spec.kind == "evaluate"
        with backend.building(), evaluation.untrained(loaded.model) if is_evaluation else contextlib.nullcontext():
            trainer = WatchedTrainer(
                assignment=job,
                data=data,
                loaded=loaded,
                events=events,
                stop=stop,
                progress=progress,
                args=args,
                resumed_step=resumed.step if resumed else None,
                auditor=auditor,
                callback=RunCallback(
                    events=events,
                    stop=stop,
                    progress=progress,
                    predict=exam.predict,
                    guard=exam.watch if exam.guard is not None else None,
                    sample_frequency=spec.predictions.sample_frequency,
                    save_interval_sec=spec.save_interval_sec,
                    ranks=ranks,
                ),
                ranks=ranks,
            )
        predictor.optimizer, predictor.rule = lambda: trainer.optimizer, loaded.rule
        if is_evaluation:  # a training ends between two steps
            predictor.is_late = lambda: trainer.is_late
        memory = usage.Usage(events)
        trainer.add_callback(memory)
        auditor.model(trainer.model, "built", mended=trainer.mended)
        auditor.trainer(trainer)
        ranks.check_equal(trainer.model)
        trainer.divide()
        memory.built(trainer.model)
        for text in parallel.told_repeats(trainer, ranks):
            self._log("info", text)

        self._stage("mask")
        events.emit("example", segments=data.train.first_segments)
        mask.check(trainer, data, chat, events)
        losscheck.check(
            trainer, data, job, plain_loss, progress=progress, is_resumed=resumed is not None, log=self._log
        )
        rowcheck.check(trainer, predictor, data, job, ranks=ranks, log=self._log)

        if is_evaluation:
            try:
                self._evaluate(exam, trainer, began)
            finally:
                self.memory = memory.trained(trainer.model)
            if job.shared_rows_dir is None:
                tree.remove(job.rows_dir)
            return

        if resumed is None and not job.is_trial:
            said = {text.partition(":")[0] for text in job.plan.warnings}  # at the check, in other words
            for text in pace.unfit(spec, trainer.num_steps()):
                if text.partition(":")[0] not in said:
                    self._log("warning", text)

        self._stage("baseline")
        if resumed is None:
            exam.begin(trainer.model, trainer.state)

        self._stage("train")
        if resumed is not None:
            self.step = resumed.step
            events.emit("resumed", step=resumed.step, path=str(resumed.path))
        exam.budget.train(self.step)
        figures: dict[str, float] = {}
        try:
            trainer.train(resume_from_checkpoint=str(resumed.path) if resumed else None)
            figures = exam.end(trainer.model, trainer.state, trainer.final_step())
            trainer.settle()
            trainer.check_stop()
        except (InterruptedRunError, TimeLimitError, DatasetError) as ended:
            # DatasetError: an image that has disappeared, on this rank alone; the others are agreed.
            if not job.is_trial and not (ranks.are_several and isinstance(ended, DatasetError)):
                trainer.save()
            ranks.notice()
            raise
        except Exception:
            ranks.notice()  # what follows may take a while
            raise
        finally:
            trainer.let_go()
            self.step = max(self.step, trainer.state.global_step)
            self.metrics |= _metrics(trainer.state, progress) | figures
            self.memory = memory.trained(trainer.model)
        regression = exam.regression(figures)

        if job.is_trial:
            return  # only the events of a trial are needed
        self.remark = exam.remark(trainer.state, figures) if regression is None else ""
        trainer.check_weights()
        self._stage("export")
        from honed.worker.model import export, likeness, proof

        facts: Facts = {
            "started": started,
            "versions": versions(job.backend),
            "step": self.step,
            "metrics": self.metrics,
            "data": data.hashes,
        }
        if loaded.basis is not None and (told := loaded.basis.uncarried(trainer.model)):
            self._log("warning", f"output: {told}")
            facts["changes"] = [told]
        told_at = time.monotonic()

        def compare(merged: Path) -> str:
            with prediction.undisturbed(trainer.model):
                return likeness.compare(
                    merged, job, likeness.rows_of(trainer, data), live=trainer.model, beat=stop.check
                )

        def merging(number: int, count: int) -> None:
            nonlocal told_at
            stop.check()
            if time.monotonic() - told_at >= MERGE_TOLD_INTERVAL_SEC:
                told_at = time.monotonic()
                self._log("info", f"merged {number} of {count} tensors")

        try:
            with division.whole(trainer.model, is_zero=ranks.is_zero) as is_here:
                if is_here:
                    if loaded.rule is None:
                        pass  # an adapter
                    elif why := cast.cast(trainer.model, precision, loaded.rule, trainer.optimizer):
                        self._log("warning", why)
                    else:
                        auditor.saved(trainer.model, loaded.rule)
                self.artifacts, fault = ranks.by_zero(
                    lambda: export.export(
                        job,
                        trainer.model,
                        loaded.tokenizer,
                        facts,
                        progress=merging,
                        note=lambda text: self._log("info", f"output: {text}"),
                        stop_ids=chat.stop_token_ids,
                        is_regressed=regression is not None,
                        prove=lambda made: proof.prove(made, job, trainer.model),
                        compare=compare,
                    )
                )
        except InterruptedRunError:
            trainer.save()  # the merge was stopped; the training before it must not be repeated
            raise
        if not ranks.is_zero:
            return
        for name, place in self.artifacts.items():
            events.emit("artifact", name=name, path=place, num_bytes=durable.num_bytes_below(Path(place)))
        if fault is not None:
            raise fault
        if regression is not None:
            raise regression
        for left, problem in export.remove_regressed(job):
            if problem is None:
                self._log("info", f"removed {left}, left by an earlier run of this job, because this one succeeded")
            else:
                self._log("warning", f"{left}, left by an earlier run of this job, cannot be removed: {problem}")
        if job.shared_rows_dir is None:  # else honed takes them first, and removes them
            tree.remove(job.rows_dir)  # no later attempt needs them

    def _evaluate(self, exam: examiner.Examiner, trainer: Any, began: float) -> None:
        """Measure the model as at the end of a training: the evaluation, and a round of predictions; as far as there is
        time."""
        self._stage("evaluate")
        exam.show()
        trainer.measure(began)
        self.metrics = exam.end(trainer.model, trainer.state, 0)
        self._stop.check()
        trainer.check_measured(*self._ranks.broadcast((exam.num_answered, exam.num_questions)))

    def _load_metrics(self, job: Assignment) -> None:
        """Load the administrator's metrics that the job names, which may fail; they could use the device."""
        for name in examiner.named_metrics(job.spec):
            score.find(name)

    def _pass_gate(self) -> None:
        """Wait for the device, if this worker was staged."""
        if self._gate.is_closed:
            self._stage("staged")
            self._gate.wait(warn=lambda text: self._log("warning", text))

    def _stage(self, name: str) -> None:
        self._stop.check()
        self._stop.now_in = name
        self._events.emit("stage", stage=name)

    def _log(self, level: str, message: str) -> None:
        self._events.log(level, message)


def versions(backend: str) -> dict[str, str]:
    """Return the versions of the packages that matter to this run, imported or not."""
    names = [*PACKAGES, *(["unsloth", "unsloth_zoo"] if backend == "unsloth" else [])]
    return {name: found for name in names if (found := installed.version(name)) is not None}


def _metrics(state: Any, progress: Any) -> dict[str, float]:
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
