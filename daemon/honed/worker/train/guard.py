"""The guard: a metric that must not fall during a run, measured on rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from honed.inputs import score
from honed.inputs.score import Metric
from honed.job.event import EventWriter
from honed.spec import metric_names
from honed.spec.spec import GuardSpec
from honed.system.error import BY_CODE, DatasetError, HonedError, RegressedError
from honed.worker.train.checkpoint import Progress
from honed.worker.train.prediction import Answers, Predictor, Question


class Scorer:
    """Scores of answers. Every fault of a metric is logged once."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._told: set[str] = set()

    def score(self, texts: list[str | None], questions: list[Question], metrics: list[Metric]) -> dict[str, float]:
        """Return the scores of all answers, and under `name/group` those of every group of rows."""
        figures = self._score(texts, questions, metrics)
        for group in sorted(frozenset[str]().union(*(question.groups for question in questions))):
            ours = [index for index, question in enumerate(questions) if group in question.groups]
            some = self._score([texts[index] for index in ours], [questions[index] for index in ours], metrics)
            names = [metric.name for metric in metrics if metric.name in some]
            figures |= {f"{name}/{group}": some[name] for name in names}
        return figures

    def _score(self, texts: list[str | None], questions: list[Question], metrics: list[Metric]) -> dict[str, float]:
        scores = score.score(texts, [question.ground_truth for question in questions], metrics)
        for fault in set(scores.faults) - self._told:
            self._told.add(fault)
            self._log("warning", fault)
        return scores.figures


@dataclass
class Guard:
    """The guard's questions and measurements. State that outlives this attempt is in `progress`.

    Raises DatasetError if it has nothing to compare answers with.
    """

    spec: GuardSpec
    questions: list[Question]
    predictor: Predictor
    scorer: Scorer
    progress: Progress
    events: EventWriter
    log: Callable[[str, str], None]
    groups: Sequence[str] = ()  #: names of all groups of held-out rows
    _unmeasured: HonedError | None = None  #: why the last measurement has no result

    def __post_init__(self) -> None:
        if not self.questions:
            _, group = metric_names.parts(self.spec.metric)
            which = f" of {group}" if group else ""
            there = f"guard.metric may name {', '.join(self.groups)}; or" if group and self.groups else ""
            raise DatasetError(
                f"guard: no held-out row{which} has a reference answer", hint=f"{there} remove the guard".strip()
            )
        # Of all attempts up to the checkpoint, by step.
        self._measured = {int(step): value for step, value in self.progress.guarded.items()}

    def begin(self, model: Any) -> None:
        """Measure before the first step. Raises the error that keeps it from measuring: the run would fail."""
        self.progress.guard_before = self._measure(model, 0, 0.0)
        if self._unmeasured is not None:
            raise self._unmeasured

    def watch(self, model: Any, state: Any) -> bool:
        """Measure at an evaluation, and return whether the guard ends the training."""
        guard, before = self.spec, self.progress.guard_before
        if guard.patience is None or before is None or state.global_step == 0:
            return False
        value = self._measure(model, state.global_step, state.epoch or 0.0)
        if value is None:
            return False  # this evaluation neither counts nor ends a series
        self.progress.num_below = self.progress.num_below + 1 if before - value > guard.max_drop else 0
        if self.progress.num_below < guard.patience:
            return False
        self.log(
            "warning",
            f"{guard.metric} was below {before - guard.max_drop:.3f} at {self.progress.num_below} evaluations in a"
            f" row: training ends at step {state.global_step}",
        )
        return True

    def end(self, model: Any, step: int, epoch: float) -> dict[str, float]:
        """Measure after the last step, with the model as it was at `step`; return the figures of before and after."""
        after = self._measured[step] if step in self._measured else self._measure(model, step, epoch)
        figures = {"guard_after": after, "guard_before": self.progress.guard_before}
        return {name: value for name, value in figures.items() if value is not None}

    def regression(self, figures: dict[str, float]) -> HonedError | None:
        """Return the guard's error for the final metrics, or the error that kept it from measuring; else None."""
        guard, before = self.spec, self.progress.guard_before
        if before is None:
            self.log("warning", "the guard has no value from before training to compare with")
            return None
        if (after := figures.get("guard_after")) is None:
            return self._unmeasured
        if before - after <= guard.max_drop:
            return None
        return RegressedError(
            f"{guard.metric} fell from {before:.3f} to {after:.3f}, by more than {guard.max_drop:g}",
            hint="the output is next to its directory, as *.regressed; check the predictions, the masks and the data",
        )

    def _measure(self, model: Any, step: int, epoch: float) -> float | None:
        """Return the guard's metric; None where too many answers failed, with the reason in `_unmeasured`."""
        guard = self.spec
        answers = self.predictor.ask(model, self.questions)
        metric, _ = metric_names.parts(guard.metric)
        scores = self.scorer.score(answers.texts, self.questions, [score.find(metric)])
        before = self.progress.guard_before
        line = None if before is None else before - guard.max_drop
        self.events.emit(
            "guard",
            step=step,
            epoch=float(epoch),
            metric=guard.metric,
            line=line,
            num_failed=answers.num_failed,
            scores=scores,
        )
        num_asked, num_failed = len(answers.texts), answers.num_failed
        if guard.metric not in scores:
            self.log("warning", f"step {step}: the guard has no result: {num_failed} of its {num_asked} answers failed")
            self._unmeasured = self._why(answers, step)
            return None
        self._unmeasured = None
        if num_failed:
            self.log(
                "warning",
                f"step {step}: {num_failed} of the guard's {num_asked} answers failed: its {guard.metric} covers "
                f"only the other {num_asked - num_failed}",
            )
        self._measured[step] = self.progress.guarded[str(step)] = scores[guard.metric]
        return scores[guard.metric]

    def _why(self, answers: Answers, step: int) -> HonedError:
        assert answers.fault is not None
        fault = answers.fault
        end = "; the output is next to its directory, as *.regressed; honectl requeue measures it again" if step else ""
        return BY_CODE[fault.code](
            f"guard: {self.spec.metric} could not be measured {'after' if step else 'before'} training: "
            f"{answers.num_failed} of {len(answers.texts)} answers failed; the first: {fault.said}",
            hint=f"{fault.hint or 'fix the failure'}, or remove the guard{end}",
        )
