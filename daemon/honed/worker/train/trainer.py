"""TRL's SFTTrainer, with checkpoints that are whole, a resume that is the same run, and a stop at any boundary.

It is imported after the backend has imported its libraries: under Unsloth, SFTTrainer is Unsloth's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import AutocastKwargs
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PrinterCallback
from transformers.optimization import GreedyLR
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import SFTConfig, SFTTrainer

from honed.job import tree
from honed.job.event import EventWriter
from honed.spec import kind, metric_names
from honed.spec.optimizer import EIGHT_BIT
from honed.spec.training import TrainingSpec
from honed.system import durable, manual
from honed.system.error import InterruptedRunError, SpecError, said
from honed.text.maskcheck import IGNORED
from honed.worker import timelimit
from honed.worker.assignment import Assignment
from honed.worker.model import adapter, division, generation
from honed.worker.model.audit import Auditor
from honed.worker.parallel import ALONE, Ranks
from honed.worker.rows import prefix
from honed.worker.rows.collator import Collator
from honed.worker.rows.data import Data
from honed.worker.stop import Stop
from honed.worker.timelimit import TimeLimit
from honed.worker.train import checkpoint, optimizer, parts, share, weights
from honed.worker.train.callback import RunCallback, is_epoch_end
from honed.worker.train.checkpoint import Progress
from honed.worker.train.evaluation import Timely, TokenMeans, by_length, kinds_by_length
from honed.worker.train.prediction import random_state_kept
from honed.worker.train.sealing import Sealing
from honed.worker.train.share import Shares

#: Number of checkpoints that are kept, if the spec does not say.
SAVE_TOTAL_LIMIT = 2
#: Arguments that Unsloth's SFTTrainer sets while it is built, and that nothing reads before an evaluation. With one of
#: the first two set, an evaluation outside of training casts the whole model, adapters too, for good.
_PUT_BACK = ("bf16_full_eval", "fp16_full_eval", "per_device_eval_batch_size", "eval_accumulation_steps")
#: Keys of a spec that may end up different: the first is set by honed, and so is the second in a resumed run;
#: transformers has another name for the third.
_SAID_OTHERWISE = ("save_total_limit", "eval_on_start", "include_num_input_tokens_seen")


def arguments(
    assignment: Assignment,
    *,
    has_eval: bool,
    has_media: bool = False,
    is_resumed: bool = False,
    loss_type: str | None = None,
) -> SFTConfig:
    """Return the SFTConfig: the user's keys override honed's defaults and TRL's, and the plan's decisions override all.

    `loss_type` is the one with which a resumed run was begun.
    """
    spec, precision = assignment.spec, assignment.precision
    asked = spec.training.as_kwargs()
    defaults: dict[str, Any] = {"logging_steps": 1}  # every step is an event
    if has_eval:
        defaults["eval_strategy"] = spec.eval_strategy
        defaults["eval_on_start"] = spec.eval_strategy != "no"  # the baseline
    if not torch.cuda.is_available():
        defaults["dataloader_pin_memory"] = False
    if (loss_type := _loss_type(assignment, pinned=loss_type)) is not None:
        defaults["loss_type"] = loss_type
    if spec.early_stopping_patience is not None:
        # It goes by the best evaluation, and restores its checkpoint.
        defaults |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        defaults |= _saved_as_evaluated(defaults | asked)
    elif spec.training.load_best_model_at_end and not {"save_strategy", "save_steps"} & set(asked):
        defaults |= _saved_as_evaluated(defaults | asked)
    needs_preparing = asked.get("packing") or asked.get("shuffle_dataset") or asked.get("use_liger_kernel")
    if has_media and (unfit := [name for name in _NOT_BESIDE_MEDIA if asked.get(name)]):
        raise SpecError(
            f"training.{unfit[0]}: not supported for rows with images, videos or sounds",
            hint="such rows are padded, one per line of the batch; remove the key",
        )
    settled: dict[str, Any] = {
        "output_dir": str(assignment.layout.checkpoints_dir),
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "use_cpu": not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        "report_to": spec.report_to or "none",
        "run_name": assignment.name,
        "disable_tqdm": True,
        **({"optim": precision.optim} if precision.optim is not None else {}),
        "save_total_limit": None,  # honed removes them: see checkpoint.rotate
        "logging_nan_inf_filter": False,  # or a loss that is not a number would be shown as the one before it
        "restore_callback_states_from_checkpoint": True,
        "dataset_kwargs": None if needs_preparing and not has_media else {"skip_prepare_dataset": True},
    }
    settled |= _batch(assignment)
    if is_resumed:
        settled["eval_on_start"] = False  # the run began in an earlier attempt
    if has_media:
        settled["remove_unused_columns"] = False  # our collator reads more than a model does
    if "max_seq_length" in (field.name for field in dataclasses.fields(SFTConfig)):
        # Unsloth's own key; without it, Unsloth takes a max_length equal to TRL's default for one that nobody has set.
        settled["max_seq_length"] = spec.training.max_length
    if not has_eval and (defaults | asked).get("eval_strategy", "no") != "no":
        raise SpecError(
            "training.eval_strategy: there is nothing to evaluate on", hint="set eval_split or eval_datasets"
        )
    try:
        made = SFTConfig(**{**_promised(), **defaults, **asked, **settled})
    except (TypeError, ValueError) as error:
        raise SpecError(f"training: {said(error)}", hint=manual.all_keys("honed-job.5")) from error
    if made.world_size > 1 and made.device.type == "cpu":
        vars(made)["_setup_devices"] = torch.device("cpu")  # of several ranks it has a number, which torch.load rejects
    return made


def _batch(assignment: Assignment) -> dict[str, int]:
    """Return the batch of one rank and its accumulation, where the plan divides the job's effective batch.

    A batch that was made smaller for lack of memory is divided anew, so that the effective one stays.
    """
    planned = assignment.plan.parallel
    if planned.num_ranks == 1 or planned.effective_batch is None or planned.per_device_train_batch_size is None:
        return {}
    size = planned.per_device_train_batch_size
    if any("training.per_device_train_batch_size" in each.changes for each in assignment.adjustments):
        size = min(size, assignment.spec.training.per_device_train_batch_size)
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": max(1, planned.effective_batch // (size * planned.num_ranks)),
    }


def _loss_type(assignment: Assignment, *, pinned: str | None) -> str | None:
    """Return the plan's loss; a resumed run keeps the one with which it was begun. None: the backend's own."""
    has_gpu = torch.cuda.is_available()
    if pinned is not None and (has_gpu or pinned != "chunked_nll"):
        return pinned
    planned = assignment.plan.loss.type
    return planned if planned is not None or has_gpu else "nll"


def _promised() -> dict[str, Any]:
    """Return each default by name: those of docs/job-spec.md, and TRL's own for the rest.

    Unsloth replaces TRL's SFTConfig by a subclass with other defaults: of learning rate, batch, optimizer, seed.
    """
    own = next(each for each in reversed(SFTConfig.__mro__) if each.__name__ == SFTConfig.__name__)
    fields = {field.name: field.default for field in dataclasses.fields(own) if field.init}
    fields |= {name: info.default for name, info in TrainingSpec.model_fields.items() if name in fields}
    # The type of the loss is left to the backend: Unsloth has kernels of its own.
    return {
        name: default for name, default in fields.items() if name != "loss_type" and default is not dataclasses.MISSING
    }


#: TRL's changes to a data set before training that would separate rows from their media.
_NOT_BESIDE_MEDIA = ("packing", "padding_free", "shuffle_dataset")


def _saved_as_evaluated(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a checkpoint with each evaluation, so that the best can be restored."""
    steps = {"save_steps": chosen["eval_steps"]} if chosen.get("eval_steps") is not None else {}
    return {"save_strategy": chosen.get("eval_strategy", "no"), **steps}


class _Before:
    """The values that SFTTrainer, or Unsloth's, changes while it is built."""

    def __init__(self, model: Any, args: SFTConfig) -> None:
        self._adapters = {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}
        self._arguments = {name: getattr(args, name) for name in _PUT_BACK}

    def put_back(self, trainer: Any) -> list[str]:
        """Restore arguments. Return what was done."""
        changed = {
            name: found for name, value in self._arguments.items() if (found := getattr(trainer.args, name)) != value
        }
        for name in changed:
            setattr(trainer.args, name, self._arguments[name])
        if changed.keys() & {"bf16_full_eval", "fp16_full_eval"} and not trainer.is_model_parallel:
            trainer._move_model_to_device(trainer.model, trainer.args.device)  # it was postponed under these flags
        return [
            f"the trainer had set {name} to {found}, now {self._arguments[name]}" for name, found in changed.items()
        ]

    def restore(self, model: Any) -> list[str]:
        """Restore the values of adapters. Return what was done.

        SFTTrainer casts a quantized model's adapters to bfloat16, whatever is planned; casting back would leave them
        rounded.
        """
        num_cast = 0
        for name, parameter in model.named_parameters():
            if name in self._adapters and parameter.dtype != self._adapters[name].dtype:
                parameter.data = self._adapters[name].to(parameter.device)
                num_cast += 1
        return [f"SFTTrainer had cast {num_cast} adapter weights to another dtype; restored"] if num_cast else []


def _changed(assignment: Assignment, args: SFTConfig) -> Iterator[str]:
    """Yield a warning for each key of the job that the backend changes: its own log mentions them at most."""
    for name, asked in assignment.spec.training.as_kwargs().items():
        found = getattr(args, name)
        if name in _batch(assignment):  # the plan has reported it
            continue
        if name not in _SAID_OTHERWISE and isinstance(asked, bool | int | float | str) and found != asked:
            yield f"training.{name}: the job sets {asked}, but {assignment.backend} changes it to {found}"


class Trainer(SFTTrainer):
    """One attempt's trainer."""

    control: Any
    _timely: Timely | None = None  #: the batches of an evaluation job

    def __init__(
        self,
        *,
        assignment: Assignment,
        data: Data,
        loaded: Any,
        args: SFTConfig,
        events: EventWriter,
        stop: Stop,
        progress: Progress,
        callback: RunCallback,
        resumed_step: int | None,
        auditor: Auditor,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.is_divided = assignment.plan.parallel.mode == "fsdp"
        self._states: list[dict[str, Any]] = []  #: of each rank, for the checkpoint that is being written
        self._assignment = assignment
        self._auditor = auditor
        self._events = events
        self._stop = stop
        self._progress = progress
        self._limit = TimeLimit(assignment.spec.time_limit_sec, progress.elapsed_sec, assignment.attempt.paused_path)
        kinds = kinds_by_length(data, args)
        self._means = TokenMeans(kinds, ranks)
        if kinds is None and data.groups is not None and data.groups.names:
            events.log(
                "info", "rows that are packed or shuffled have no evaluation loss by data set and tag, only scores"
            )
        self._sealing = Sealing(stop.beat)
        self._shares = Shares(ranks)
        self._saved_step = resumed_step  #: of the last checkpoint in its place
        self._callback = callback
        self._resumed_path: str | None = None
        self._has_best = False
        self._run_dir: Path | None = None
        patience = assignment.spec.early_stopping_patience
        before = _Before(loaded.model, args)
        self._is_compensated = assignment.precision.master_weights == "compensated"
        self._is_adapted = assignment.precision.adapter_dtype is not None
        self._basis = loaded.basis
        super().__init__(
            model=loaded.model,
            args=args,
            train_dataset=data.train.dataset,
            eval_dataset=_held_out(data, args),
            # The tokenizer, not the processor: TRL's own support for images makes another mask.
            processing_class=loaded.tokenizer,
            data_collator=_collator(assignment, data, loaded.tokenizer, args),
            callbacks=[callback, *([EarlyStoppingCallback(patience)] if patience is not None else [])],
            optimizer_cls_and_kwargs=optimizer.compensated(args, _name_of(args)) if self._is_compensated else None,
        )
        self.remove_callback(PrinterCallback)  # the events report all of it
        self.mended = [*before.put_back(self), *before.restore(self.model)]
        if args.router_aux_loss_coef is not None:
            share.set_coefficient(self.model, args.router_aux_loss_coef)
        for text in _changed(assignment, self.args):
            events.log("warning", text)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave a model in main memory that reaches the device in parts."""
        if not self.is_divided:
            super()._move_model_to_device(model, device)

    def divide(self) -> None:
        """Divide the model between the ranks, if the plan says so: from now on each has a part of every weight."""
        if self.is_divided:
            division.divide(self.model, self.args.device)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        made = super().create_optimizer(*args, **kwargs)
        if self._is_compensated and _name_of(self.args) in EIGHT_BIT:
            optimizer.keep_embeddings_wide(self.model)
        stepped = [each for group in self.optimizer.param_groups for each in group["params"]]
        assert not self.is_divided or all(map(division.is_part, stepped))
        return made

    # --- the boundary between two steps -----------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate at the end of each step and each epoch: the one place where a run is stopped."""
        self._progress.is_evaluation_due = self.control.should_evaluate
        if self._sealing.has_ended and not self._sealing.has_failed:
            self.settle()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.control.should_training_stop:
            return  # finishing is quicker than resuming
        if self._callback.is_in_step and is_epoch_end(self.state):
            return  # the epoch's end comes next, and is a boundary, too
        is_stopped, is_over = self._ranks.agree(self._stop.is_set, self._limit.is_reached)
        if is_stopped or is_over:
            self._end_early(is_stopped=is_stopped)

    def check_stop(self) -> None:
        """Raise InterruptedRunError on all ranks once one of them was asked to stop."""
        self._ranks.check(self._stop)

    def _end_early(self, *, is_stopped: bool) -> None:
        if is_stopped:
            raise InterruptedRunError(
                f"stopped on request at step {self.state.global_step}", hint="it resumes from its last checkpoint"
            )
        raise self._limit.error(self.state.global_step)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._go_on()
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return  # resumed from the checkpoint of its last step: transformers would train one more
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._go_on()  # no epoch was left
        return super()._finalize_training(*args, **kwargs)

    def _go_on(self) -> None:
        """Make up for what was cut short before the checkpoint: once, before the first step after it."""
        path, self._resumed_path = self._resumed_path, None
        if path is None:
            return
        progress, control = self._progress, self.control
        control.should_training_stop = progress.has_ended  # transformers has forgotten it
        control.should_log = control.should_evaluate = control.should_save = False
        if progress.logged_step is not None:
            _restore_figures(self, progress)
        self._load_rng_state(path)  # transformers does it later; a checkpoint that is made here has to have it
        if progress.is_prediction_due:
            self._callback.predict(self.model, self.state)
        if progress.is_evaluation_due:
            self._determine_best_metric(metrics=self._evaluate(None, None), trial=None)
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = path
        if progress.is_epoch_end_due:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._maybe_log_save_evaluate(self._tr_loss, None, self.model, None, self.state.epoch, None, time.time())

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate without a trace in the random state, so that an evaluation that was cut short can be repeated."""
        may_step = not kwargs.pop("skip_scheduler", False)
        with random_state_kept():
            metrics = super()._evaluate(*args, skip_scheduler=True, **kwargs)
            if may_step and isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR) and self._may_judge(metrics):
                self.lr_scheduler.step(metrics[f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"])
        self._progress.is_evaluation_due = False
        return metrics

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ranks.are_several and "attention_mask" in inputs:
            num_real = self._means.num_real(len(self.eval_dataset), self.args.eval_batch_size)
            inputs["labels"][num_real:] = IGNORED  # the others are rows that accelerate repeats
        self._means.count(inputs["labels"])
        found = super().prediction_step(model, inputs, *args, **kwargs)
        self._means.add(found[0])
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with means over all tokens, whatever the batches."""
        self._means.begin()
        is_averaged = self.args.average_tokens_across_devices
        if self._ranks.are_several:
            self.args.average_tokens_across_devices = False  # each batch's loss is its own mean, as it is weighed below
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = is_averaged
        self._means.weigh(output.metrics, "eval_loss", self._metrics["eval"])
        output.metrics.update(self._means.of_groups("eval_loss"))
        if self._timely is not None and self._timely.is_cut:  # transformers would reckon its speed by all rows
            output = output._replace(num_samples=self._means.num_measured(self.args.eval_batch_size))
        return output

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = self._eval_loader(*args, **kwargs)
        if kind.of(self._assignment.spec).freezes_base:  # a training ends between two steps
            self._timely = loader = Timely(loader, lambda: any(self._ranks.agree(self.is_late)))
        return loader

    def _eval_loader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super().get_eval_dataloader(*args, **kwargs)
        if (batches := self._means.batches(self.args.eval_batch_size)) is None:
            return loader
        own = DataLoader(
            loader.dataset,
            batch_sampler=batches,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )
        if not self._ranks.are_several:
            return self.accelerator.prepare(own)
        device = self.accelerator.device  # the batches are dealt to the ranks already
        return prepare_data_loader(own, device, num_processes=1, process_index=0, put_on_device=True)

    def _may_judge(self, metrics: dict[str, float]) -> bool:
        """Tell whether an evaluation judges the model: not if it goes by answers that failed, without a score."""
        asked = self._assignment.spec.predictions
        is_by_answers = metric_names.chooser(self.args.metric_for_best_model) and asked.sample_frequency == "eval"
        has_scores = any(name.startswith(f"eval_{metric_names.PREFIX}") for name in metrics)
        return bool(has_scores or not is_by_answers or asked.prompts is not None)

    def _determine_best_metric(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> bool:
        """Determine the best metric, and save a checkpoint of the best model, whatever `save_steps` says.

        Where models are compared by their answers, an evaluation whose answers failed has no score and cannot be the
        best.
        """
        if not self._may_judge(metrics):
            return False
        is_best = bool(super()._determine_best_metric(metrics, *args, **kwargs))
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _prepare_for_training(self, max_steps: Any, dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self.is_divided:  # accelerate adds its autocast alone
            division.settle(self.model)  # the optimizer is to get the parts
            # The cache of casts would keep a copy of each layer beyond the layer's own pass.
            self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            self.model._is_accelerate_prepared = True
        prepared = super()._prepare_for_training(max_steps, dataloader, resume_from_checkpoint)
        self._auditor.trainer(self)  # the last check before the first step
        self._resumed_path = resume_from_checkpoint
        return prepared

    def take_singly(self) -> None:
        """Train and evaluate on one row at a time; a step has the same rows."""
        self.args.gradient_accumulation_steps *= self.args.per_device_train_batch_size
        self.args.per_device_train_batch_size = self.args.per_device_eval_batch_size = 1
        self._train_batch_size = self.args.train_batch_size

    def num_steps(self) -> int:
        """Return the number of steps of the whole run, from the rows as they are packed and batched."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        with random_state_kept():
            num_batches = len(self.get_train_dataloader())
        return math.ceil(self.args.num_train_epochs * math.ceil(num_batches / self.args.gradient_accumulation_steps))

    @property
    def is_late(self) -> bool:
        """True once the time limit is reached."""
        return self._limit.is_reached

    def measure(self, began: float) -> None:
        """Evaluate a model that is not trained, as at the end of a training, as far as there is time.

        It is counted from `began`, in monotonic seconds: an evaluation has no checkpoint that would outlive its loss.
        """
        paused_path = self._assignment.attempt.paused_path
        elapsed_sec = time.monotonic() - began - timelimit.paused_sec(paused_path)
        self._limit = TimeLimit(self._assignment.spec.time_limit_sec, elapsed_sec, paused_path)
        self._evaluate(None, None, skip_scheduler=True)

    def check_measured(self, num_answered: int, num_questions: int) -> None:
        """Raise TimeLimitError if the time was over before everything was measured."""
        measured, num_batches = (self._timely.num_batches, len(self._timely)) if self._timely is not None else (0, 0)
        if measured < num_batches or num_answered < num_questions:
            raise self._limit.error_of(
                f"{measured} of {num_batches} batches and {num_answered} of {num_questions} predictions"
            )

    def final_step(self) -> int:
        """Return the step of the model with which training has ended; evaluate the last step if necessary."""
        best = self.state.best_global_step
        if self._has_best and best is not None and best != self.state.global_step:
            return int(best)
        is_evaluated = any(
            "eval_loss" in entry and entry["step"] == self.state.global_step for entry in self.state.log_history
        )
        if self.args.eval_strategy != IntervalStrategy.NO and not is_evaluated:
            self._evaluate(None, None, skip_scheduler=True)
        return int(self.state.global_step)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._progress.num_trained_tokens += self._shares.begin(batches)
        return batches, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        return prefix.trained(self.model, super()._prepare_inputs(inputs))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._shares.next()
        return self._shares.reported(super().training_step(*args, **kwargs))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a batch; in training it counts by its share of the step."""
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        shares, metrics = self._shares, self._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        shares.settle(metrics, lengths)
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func):  # the mean over the batch's own tokens
            factor = shares.weight(0)
            loss = loss * factor
        else:
            factor = shares.num_batches * (self._ranks.world if self.args.average_tokens_across_devices else 1)
        balance: Any = getattr(outputs, "aux_loss", None)
        if torch.is_tensor(balance) and balance.requires_grad:
            shares.weigh_balance(balance, shares.weight(1) / factor if factor else 0.0, self.accelerator.scaler)
        return (loss, outputs) if return_outputs else loss

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint of the step just done, unless there is one, and wait until it is in place."""
        self.settle()
        step = self.state.global_step
        if self._ranks.broadcast(bool(step and self._saved_step != step)):
            self._save_checkpoint(self.model, None)
            self.settle()
        self._ranks.barrier()

    def settle(self) -> None:
        """Wait until the last checkpoint is in place. Raises the error for which it is not."""
        if (sealed := self._sealing.wait()) is not None:
            self._saved_step = sealed.step
            num_bytes = durable.num_bytes_below(sealed.path)
            self._events.emit("checkpoint", step=sealed.step, path=str(sealed.path), num_bytes=num_bytes)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place. It is sealed and renamed into place beside the next steps."""
        checkpoints_dir, step = self._assignment.layout.checkpoints_dir, self.state.global_step
        best = self.state.best_global_step
        if best and (best == step or (checkpoints_dir / f"checkpoint-{best}").is_dir()):
            self.state.best_model_checkpoint = str(checkpoints_dir / f"checkpoint-{best}")
        best_path = self.state.best_model_checkpoint
        self._run_dir = new_dir = self._run_dir or checkpoint.new_dir(checkpoints_dir)
        made = new_dir / f"checkpoint-{step}"
        try:
            with generation.savable(self.model), self._without_barrier():
                super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint != best_path:  # transformers takes the path of writing for its place
                self.state.best_model_checkpoint = best_path
                self.state.save_to_json(str(made / TRAINER_STATE_NAME))
            if self._basis is not None:
                self._basis.write(made, self.model)
            self._remember()
        except BaseException:
            tree.remove(new_dir)  # where the disk is full, the room is needed
            raise
        finally:
            self._run_dir = None
        limit = self._assignment.spec.training.as_kwargs().get("save_total_limit") or SAVE_TOTAL_LIMIT
        commit = functools.partial(
            checkpoint.commit,
            made,
            copy.deepcopy(self._progress),  # it goes on changing
            checkpoints_dir,
            limit=limit,
            keep=self._kept(),
        )
        self._sealing.start(step, lambda beat: commit(beat=beat))

    @contextlib.contextmanager
    def _without_barrier(self) -> Iterator[None]:
        """Have transformers write a checkpoint on rank 0 alone: it would wait for the others under this strategy."""
        strategy = self.args.save_strategy
        if self._ranks.are_several:
            self.args.save_strategy = SaveStrategy.NO
        try:
            yield
        finally:
            self.args.save_strategy = strategy

    def begin_parts(self) -> None:
        """Make the directory of a checkpoint to which each rank adds its part."""
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        self._run_dir = checkpoint.new_dir(checkpoints_dir)
        checkpoint.place_of_new(checkpoints_dir, self.state.global_step).mkdir()

    def write_part(self, made: Path) -> None:
        """Write this rank's part of a checkpoint."""
        parts.write(made, self.model, self.optimizer, self._ranks)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_divided:  # else the parts are there
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights of a checkpoint, and their digests."""
        made = Path(str(output_dir))
        if self._is_adapted:
            with adapter.without_card(self.model):
                super()._save(output_dir, state_dict)
            adapter.write_digests(self.model, made)
            return
        made.mkdir(parents=True, exist_ok=True)
        weights.write(made, self.model)
        for part in (self.model.config, self.model.generation_config, self.processing_class):
            if part is not None:
                part.save_pretrained(made)  # for whoever opens the checkpoint as a model

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_divided:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/{SCHEDULER_NAME}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_divided or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            parts.load_optimizer(Path(checkpoint), self.optimizer, self._ranks)
            self.lr_scheduler.load_state_dict(torch.load(f"{checkpoint}/{SCHEDULER_NAME}", weights_only=True))

    def store_flos(self) -> None:
        if not self._ranks.are_several:
            super().store_flos()
            return
        num_flos: float = self.current_flos  # type: ignore[has-type]
        self.state.total_flos += num_flos * self._ranks.world  # without asking the others
        self.current_flos = 0

    def gather_states(self) -> None:
        """Take each rank's part of the next checkpoint, which rank 0 writes."""
        if self._ranks.are_several:
            self._states = self._ranks.gather({"random": _random_state(), "running_loss": float(self._tr_loss)})

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._ranks.are_several:
            super()._save_rng_state(output_dir)
        for rank, state in enumerate(self._states):
            torch.save(state["random"], f"{output_dir}/rng_state_{rank}.pth")

    def _remember(self) -> None:
        """Keep the state that transformers and TRL leave out of a checkpoint, or lose when they resume from it."""
        self._progress.num_ranks = self._ranks.world
        self._progress.is_divided = self.is_divided
        self._progress.running_losses = [state["running_loss"] for state in self._states]
        self._progress.elapsed_sec = self._limit.elapsed_sec()
        self._progress.has_ended = self.control.should_training_stop
        self._progress.is_epoch_end_due = self._callback.is_in_step and (
            self._progress.has_ended or is_epoch_end(self.state)
        )
        _keep_figures(self, self._progress)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory for checkpoints: while one is written, the directory beside their place."""
        return str(self._run_dir) if self._run_dir is not None else str(super()._get_output_dir(trial))

    def _kept(self) -> set[Any]:
        if not self.args.load_best_model_at_end or self.state.best_model_checkpoint is None:
            return set()
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        return {checkpoints_dir / str(self.state.best_model_checkpoint).rsplit("/", 1)[-1]}

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a checkpoint needs no model card."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint: transformers would leave out what is named otherwise than in the model."""
        assert model is None or model is self.model
        self._restore(Path(resume_from_checkpoint), "resumed")

    def _restore(self, path: Path, when: str) -> None:
        """Load a checkpoint's weights, before an optimizer is made for them; audit and compare them."""
        if self.is_divided:
            parts.load_weights(path, self.model, self._ranks)
        elif self._is_adapted:
            adapter.load(self.model, path, hint=weights.hint(path))
        else:
            weights.load(path, self.model)
        if self._basis is not None:
            self._basis.restore(path, self.model)
        self._auditor.model(self.model, when)

    def _load_best_model(self) -> None:
        """Load the best checkpoint if it is whole: it may be older than those that a resume has checked."""
        self.settle()
        self._ranks.barrier()
        path = Path(str(self.state.best_model_checkpoint))
        if (why := checkpoint.read(path, beat=self._stop.beat)[1]) != "":
            self._events.log(
                "error",
                f"{path.name}, the best checkpoint, is damaged ({why}): using the model of the last step instead",
            )
            return
        self._restore(path, "restored")
        if self._is_compensated:
            optimizer.take_remainders(self.optimizer, path / "optimizer.pt")
        self._has_best = True


def _keep_figures(trainer: Any, progress: Progress) -> None:
    """Keep the figures since the last log."""
    progress.running_loss = float(trainer._tr_loss)
    progress.logged_step = int(trainer._globalstep_last_logged)
    progress.num_seen_tokens = int(trainer._total_train_tokens)
    figures = trainer._metrics["train"].items()
    progress.running_figures = {name: [float(value) for value in values] for name, values in figures}


def _restore_figures(trainer: Any, progress: Progress) -> None:
    running_loss, losses, rank = progress.running_loss, progress.running_losses, trainer.args.process_index
    if losses:  # their mean is what is logged
        running_loss = losses[rank] if len(losses) == trainer.args.world_size else sum(losses) / len(losses)
    trainer._tr_loss = torch.tensor(running_loss, device=trainer.args.device)
    trainer._globalstep_last_logged = progress.logged_step
    trainer._total_train_tokens = progress.num_seen_tokens
    trainer._metrics["train"].update({name: list(values) for name, values in progress.running_figures.items()})


def _random_state() -> dict[str, Any]:
    """Return this process's random state, as transformers keeps it in a checkpoint of several."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def _name_of(args: SFTConfig) -> str:
    """Return the optimizer's name as in training.optim."""
    return str(getattr(args.optim, "value", args.optim))


def _held_out(data: Data, args: SFTConfig) -> Any:
    """Return the rows to evaluate on, in the order in which they are batched."""
    if data.held_out is None:
        return None
    return by_length(data.held_out, args)


def _collator(assignment: Assignment, data: Data, tokenizer: Any, args: SFTConfig) -> Any:
    """Return honed's collator for rows with media, and None, for TRL's own, for rows of text."""
    if data.media is None:
        return None
    return Collator(
        data.media.processor,
        data.media.sources,
        dtype=assignment.precision.load_dtype,
        pad_token_id=tokenizer.pad_token_id,
        pad_to_multiple_of=args.pad_to_multiple_of,
    )
