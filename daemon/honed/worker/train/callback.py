"""Callback of a run: steps, evaluations and predictions as events, and checks of the clock and the stop flag."""

# ruff: noqa: ARG002 - transformers hands every callback everything
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from honed.job.event import STEP_KEYS, EventWriter
from honed.spec.metric_names import PREFIX
from honed.system.error import InterruptedRunError
from honed.worker.parallel import ALONE, Ranks
from honed.worker.stop import Stop
from honed.worker.train.checkpoint import Progress

#: Keys of the trainer's log that only count what is done, and those that a step's event has already.
_NO_METRICS = STEP_KEYS | {"event", "time", "num_tokens", "num_input_tokens_seen"}


class RunCallback(TrainerCallback):
    """Reports to the daemon. Predictions precede an evaluation's report, so that one cut short is not half reported.

    `predict` receives the model, the trainer's state, and True if the round may be skipped; it returns the scores.
    `guard` returns True if training is to end; None without one.
    """

    def __init__(
        self,
        *,
        events: EventWriter,
        stop: Stop,
        progress: Progress,
        predict: Callable[[Any, Any, bool], dict[str, float]],
        guard: Callable[[Any, Any], bool] | None,
        sample_frequency: str | int,
        save_interval_sec: float | None,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks = ALONE,
    ) -> None:
        self._events = events
        self._stop = stop
        self._progress = progress
        self._predict = predict
        self._guard = guard
        self._frequency = sample_frequency
        self._save_interval_sec = save_interval_sec
        self._clock = clock
        self._ranks = ranks
        self._saved_at = clock()
        self._began: tuple[float, int] = (clock(), 0)
        self._is_save_deferred = False
        self.is_in_step = False  #: the end of a step is being handled, and not that of its epoch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = (self._clock(), state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self._events.emit(
            "step",
            step=state.global_step,
            num_steps=state.max_steps,
            epoch=state.epoch,
            eta_sec=self._eta_sec(state),
            **{name: value for name, value in _numbers(logs).items() if name not in _NO_METRICS},
        )

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop.beat()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._stop.beat()
        self.is_in_step = True
        interval = self._save_interval_sec
        if interval is not None and any(self._ranks.agree(self._clock() - self._saved_at >= interval)):
            control.should_save = True
        # The checkpoint of an epoch's last step follows all other work at the epoch's end, or a resume would miss that.
        if is_epoch_end(state):
            self._is_save_deferred, control.should_save = control.should_save, False
        if isinstance(self._frequency, int) and state.global_step % self._frequency == 0:
            self.predict(model, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        control.should_save = control.should_save or self._is_save_deferred
        self._is_save_deferred = False
        if self._frequency == "epoch":
            self.predict(model, state)
        self.is_in_step = False

    def predict(self, model: Any, state: Any) -> None:
        """Make a round without an evaluation. A stop leaves it to the next attempt, and this step is still logged."""
        self._progress.is_prediction_due = True
        with contextlib.suppress(InterruptedRunError):  # the next check of the stop flag raises it again
            self._predict(model, state, False)
            self._progress.is_prediction_due = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved_at = self._clock()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ranks.check(self._stop)

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        figures = _numbers(metrics or {})
        if self._frequency == "eval":
            scores = self._predict(model, state, True)
            if metrics is not None:  # the trainer, and early stopping after this callback, choose the best by them
                metrics.update({f"eval_{PREFIX}{name}": value for name, value in scores.items()})
        is_lost = self._guard is not None and self._guard(model, state)
        epoch = figures.pop("epoch", state.epoch) or 0.0
        self._events.emit("evaluation", step=state.global_step, epoch=epoch, metrics=figures)
        if is_lost:
            control.should_training_stop = True
        if state.global_step == 0 and "eval_loss" in figures:
            losses = {name: value for name, value in figures.items() if name.partition("/")[0] == "eval_loss"}
            self._progress.figures_before |= losses

    def _eta_sec(self, state: Any) -> float | None:
        began, step = self._began
        if state.global_step <= step:
            return None
        return (self._clock() - began) / (state.global_step - step) * (state.max_steps - state.global_step)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def is_epoch_end(state: Any) -> bool:
    """Return whether the step just done is the last of an epoch, or of the run."""
    return bool(state.epoch == int(state.epoch)) or state.global_step >= state.max_steps
