"""A trainer of transformers whose run is the same whatever interrupts it: it stops at a boundary between two steps, its
checkpoints are whole, and it resumes with what was cut short there. Its other base is one of TRL's trainers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from accelerate.utils import AutocastKwargs
from transformers import PrinterCallback

from honed.job.event import EventWriter
from honed.spec.optimizer import EIGHT_BIT
from honed.system.error import InterruptedRunError
from honed.worker.assignment import Assignment
from honed.worker.model import division
from honed.worker.model.audit import Auditor
from honed.worker.parallel import ALONE, Ranks
from honed.worker.stop import Stop
from honed.worker.timelimit import TimeLimit
from honed.worker.train import optimizer
from honed.worker.train.arguments import optimizer_of
from honed.worker.train.callback import RunCallback, is_epoch_end
from honed.worker.train.checkpoint import Progress
from honed.worker.train.evaluation import TokenMeans
from honed.worker.train.measuring import Measuring
from honed.worker.train.prediction import random_state_kept
from honed.worker.train.saving import Saving
from honed.worker.train.sealing import Sealing


class Durable(Saving, Measuring):
    """One attempt's trainer, before what its kind adds."""

    mended: Sequence[str] = ()  #: what the other base has changed while it was built, and was put back

    def __init__(
        self,
        *,
        assignment: Assignment,
        loaded: Any,
        events: EventWriter,
        stop: Stop,
        progress: Progress,
        callback: RunCallback,
        resumed_step: int | None,
        auditor: Auditor,
        means: TokenMeans,
        ranks: Ranks = ALONE,
        **parts: Any,
    ) -> None:
        """`parts`: the arguments of the other base."""
        self._ranks = ranks
        self._states = []
        self._assignment = assignment
        self._auditor = auditor
        self._events = events
        self._stop = stop
        self._progress = progress
        self._limit = TimeLimit(assignment.spec.time_limit_sec, progress.elapsed_sec, assignment.attempt.paused_path)
        self._means = means
        self._sealing = Sealing(stop.beat)
        self._saved_step = resumed_step
        self._callback = callback
        self._resumed_path: str | None = None
        self._run_dir = None
        self._basis = loaded.basis
        if self._is_compensated:
            args = parts["args"]
            parts["optimizer_cls_and_kwargs"] = optimizer.compensated(args, optimizer_of(args))
        super().__init__(model=loaded.model, processing_class=loaded.tokenizer, **parts)
        self.remove_callback(PrinterCallback)  # the events report all of it

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
        if self._is_compensated and optimizer_of(self.args) in EIGHT_BIT:
            optimizer.keep_embeddings_wide(self.model)
        stepped = [item for group in self.optimizer.param_groups for item in group["params"]]
        assert not self.is_divided or all(map(division.is_part, stepped))
        return made

    # --- the boundary between two steps -----------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate at the end of every step and every epoch: the one place where a run is stopped."""
        self._progress.is_evaluation_due = self.control.should_evaluate
        if self._sealing.has_ended and not self._sealing.has_failed:
            self.finish_save()
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
        self._resume_boundary()
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return  # resumed from the checkpoint of its last step: transformers would train one more
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._resume_boundary()  # no epoch was left
        return super()._finalize_training(*args, **kwargs)

    def _resume_boundary(self) -> None:
        """Make up for what was cut short before the checkpoint: once, before the first step after it."""
        path, self._resumed_path = self._resumed_path, None
        if path is None:
            return
        progress, control = self._progress, self.control
        control.should_training_stop = progress.has_ended  # transformers has forgotten it
        control.should_log = control.should_evaluate = control.should_save = False
        if progress.logged_step is not None:
            self._restore_figures()
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

    def _prepare_for_training(self, max_steps: Any, dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self.is_divided:  # accelerate adds its autocast alone
            division.reshard(self.model)  # the optimizer is to get the parts
            # The cache of casts would keep a copy of every layer beyond the layer's own pass.
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
