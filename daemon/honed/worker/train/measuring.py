"""Evaluations whose means are over all tokens, whatever the batches, and that leave no trace in the training."""

from __future__ import annotations

import time
from typing import Any

import transformers
from accelerate.data_loader import prepare_data_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers.optimization import GreedyLR
from transformers.trainer_utils import IntervalStrategy

from honed.spec import kind, metric_names
from honed.text.maskcheck import IGNORED
from honed.worker import timelimit
from honed.worker.assignment import Assignment
from honed.worker.parallel import Ranks
from honed.worker.timelimit import TimeLimit
from honed.worker.train.checkpoint import Progress
from honed.worker.train.evaluation import Timely, TokenMeans
from honed.worker.train.prediction import random_state_kept


class Measuring(transformers.Trainer):
    """A trainer's evaluations; the attributes are those of the trainer that it is a part of (durable.py)."""

    control: Any
    _assignment: Assignment
    _has_best: bool
    _limit: TimeLimit
    _means: TokenMeans
    _progress: Progress
    _ranks: Ranks
    _timely: Timely | None = None  #: the batches of an evaluation job

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
        outputs = super().prediction_step(model, inputs, *args, **kwargs)
        self._means.add(outputs[0])
        return outputs

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with means over all tokens, whatever the batches."""
        self._means.begin()
        is_averaged = self.args.average_tokens_across_devices
        if self._ranks.are_several:
            self.args.average_tokens_across_devices = False  # a batch's loss is its own mean, as it is weighed below
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
        """Return whether an evaluation judges the model: not if it goes by answers that failed, without a score."""
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
