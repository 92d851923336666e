"""Examination of the model during a run: rounds of predictions with their scores, and the final remark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from honed.inputs import score
from honed.job import learning, trial
from honed.job.event import EventWriter
from honed.spec import metric_names
from honed.spec.spec import JobSpec
from honed.system.error import HonedError
from honed.text.chat import ChatFormat
from honed.worker.assignment import Assignment
from honed.worker.parallel import ALONE, Ranks
from honed.worker.rows import thumbnail
from honed.worker.train import prediction
from honed.worker.train.budget import Budget
from honed.worker.train.checkpoint import Progress
from honed.worker.train.guard import Guard, Scorer
from honed.worker.train.prediction import Predictor, Question
from honed.worker.train.together import TogetherPredictor

#: Share by which eval_loss may end above its start without a warning.
LOSS_TOLERANCE = 0.01


T = TypeVar("T")


def named_metrics(spec: JobSpec) -> list[str]:
    """Return the metrics that a spec asks for by name."""
    names = list(spec.predictions.metrics) if spec.predictions.metrics != "auto" else []
    guard = [metric_names.parts(spec.guard.metric)[0]] if spec.guard else []
    chooser = metric_names.chooser(spec.training.metric_for_best_model)
    return list(dict.fromkeys([*names, *guard, *([chooser] if chooser else [])]))


class Examiner:
    """Questions to the model, with their scores and reports. State that outlives this attempt is in `progress`."""

    def __init__(
        self,
        job: Assignment,
        data: Any,
        chat: ChatFormat,
        predictor: Predictor,
        *,
        progress: Progress,
        events: EventWriter,
        log: Callable[[str, str], None],
        ranks: Ranks = ALONE,
    ) -> None:
        """Choose questions and metrics. Raises DatasetError if the guard has nothing to compare answers with."""
        self._spec, self._predictor, self._progress = job.spec, predictor, progress
        self._events, self._log, self._ranks = events, log, ranks
        held_out = data.held_out
        examples = held_out.examples if held_out else data.train.examples
        if job.is_trial:
            examples = examples[: trial.NUM_ROWS]  # the others repeat these rows
        self._questions: list[Question] = []
        self._scorer = Scorer(log)
        self.guard: Guard | None = None
        if (spec := job.spec.guard) is not None:
            _, group = metric_names.parts(spec.metric)
            chosen = prediction.choose(
                examples, chat, num_samples=spec.num_samples, seed=job.seed, groups=data.groups, group=group
            )
            questions = [question for question in chosen if question.ground_truth.strip()]
            names = data.groups.names if data.groups is not None else []
            self.guard = Guard(spec, questions, predictor, self._scorer, progress, events, log, names)
        if job.spec.predictions.sample_frequency == "off":
            pass
        elif job.spec.predictions.prompts:
            self._questions = prediction.from_prompts(job.spec.predictions.prompts, chat)
        else:
            if not held_out and not job.is_trial:
                log("warning", "no rows are held out: predictions use training rows")
            self._questions = prediction.choose(
                examples,
                chat,
                num_samples=job.spec.predictions.num_samples,
                seed=job.seed,
                groups=data.groups,
                evenly=True,
            )
        asked = job.spec.predictions.metrics
        names = score.recognise([question.ground_truth for question in self._questions]) if asked == "auto" else asked
        chooser = metric_names.chooser(job.spec.training.metric_for_best_model)
        self._metrics = [score.find(name) for name in dict.fromkeys([*names, *([chooser] if chooser else [])])]
        self.budget = Budget(None if chooser else job.spec.predictions.max_share, progress)
        # Of all attempts up to the checkpoint, by step: no round is made twice.
        self._scores = {int(step): scores for step, scores in progress.scores.items()}
        self._needs_scores = chooser is not None
        self.num_answered = 0  #: questions of the last round for which there was time

    @property
    def num_questions(self) -> int:
        return len(self._questions)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt of text alone; a processor makes the others."""
        guarded = self.guard.questions if self.guard is not None else []
        return max((len(question.input_ids) for question in [*self._questions, *guarded]), default=0)

    def show(self) -> None:
        """Report the images of the questions."""
        thumbnail.emit(self._questions, self._events)

    def begin(self, model: Any, state: Any) -> None:
        """Measure before the first step. Raises the error that keeps the guard from measuring: the run would fail."""
        self.show()
        self._progress.figures_before |= self.predict(model, state)
        if (guard := self.guard) is not None:
            self._by_zero(lambda: guard.begin(model), model)

    def watch(self, model: Any, state: Any) -> bool:
        """Have the guard measure at an evaluation, and return whether it ends the training."""
        guard = self.guard
        return guard is not None and self._by_zero(lambda: guard.watch(model, state), model)

    def regression(self, figures: dict[str, float]) -> HonedError | None:
        """Return the guard's error for the final metrics, if there is one."""
        guard = self.guard
        return None if guard is None else self._ranks.by_zero(lambda: guard.regression(figures))

    def predict(self, model: Any, state: Any, may_wait: bool = False) -> dict[str, float]:
        """Make a round at this step, and return its scores.

        No round is made if there was one at this step, or if it may wait and the time for predictions is used up. Of
        several ranks, the first alone asks the model, unless it is divided.
        """
        return self._by_zero(lambda: self._predict(model, state, may_wait), model)

    def _by_zero(self, act: Callable[[], T], model: Any) -> T:
        """Have rank 0 act, and the others answer its questions with it where they have a part of the model each."""
        if isinstance(self._predictor, TogetherPredictor):
            return self._ranks.by_zero(act, self._predictor.helper(model))
        return self._ranks.by_zero(act)

    def _predict(self, model: Any, state: Any, may_wait: bool) -> dict[str, float]:
        step = state.global_step
        if self._spec.predictions.sample_frequency == "off":
            return {}
        if step in self._scores or (step == self._progress.predicted_step and not self._needs_scores):
            return self._scores.get(step, {})
        if may_wait and (why := self.budget.refusal(step, state.max_steps)) is not None:
            self._log("info", f"step {step}: predictions are skipped at this evaluation: {why} (predictions.max_share)")
            return {}
        return self._round(model, step, state.epoch or 0.0)

    def _round(self, model: Any, step: int, epoch: float) -> dict[str, float]:
        with self.budget.spend():
            answers = self._predictor.ask(model, self._questions)
        rows = [
            {"sample_index": n, "prompt": question.prompt, "ground_truth": question.ground_truth, "prediction": text}
            for n, (question, text) in enumerate(zip(self._questions, answers.texts, strict=True))
            if text is not None
        ]
        asked = [index for index in range(len(answers.texts)) if index not in answers.unasked]
        self.num_answered = len(asked)
        texts, questions = [answers.texts[index] for index in asked], [self._questions[index] for index in asked]
        scores = self._scorer.score(texts, questions, self._metrics)
        self._events.emit(
            "predictions", step=step, epoch=float(epoch), num_failed=answers.num_failed, rows=rows, scores=scores
        )
        if self._metrics and not scores and answers.num_failed:
            self._log(
                "warning",
                f"step {step}: no scores: {answers.num_failed} of {len(rows) + answers.num_failed} predictions failed",
            )
        self._scores[step] = self._progress.scores[str(step)] = scores
        self._progress.predicted_step = step
        return scores

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, model: Any, state: Any, step: int) -> dict[str, float]:
        """Measure after the last step, with the model as it was at `step`, the best or the last; return its metrics."""
        return self._by_zero(lambda: self._end(model, state, step), model)

    def _end(self, model: Any, state: Any, step: int) -> dict[str, float]:
        epochs = [entry.get("epoch", 0.0) for entry in state.log_history if entry.get("step") == step]
        epoch = epochs[-1] if epochs else state.epoch or 0.0
        figures: dict[str, float] = {}
        if step == state.global_step:
            scores = self._predict(model, state, may_wait=False)
        elif self._questions and step not in self._scores:
            scores = self._round(model, step, epoch)
        else:
            scores = self._scores.get(step, {})
        figures |= {f"{metric_names.PREFIX}{name}": value for name, value in scores.items()}
        if self.guard is not None:
            figures |= self.guard.end(model, step, epoch)
        evaluated = [entry for entry in state.log_history if entry.get("step") == step and "eval_loss" in entry]
        if evaluated:
            last = evaluated[-1].items()
            figures |= {name: value for name, value in last if name.partition("/")[0] == "eval_loss"}
        return figures

    def remark(self, state: Any, figures: dict[str, float]) -> str:
        """Return and log a remark on a run that succeeded but ended worse than it began, or learned nothing.

        Return an empty string if there is no remark.
        """
        return self._ranks.by_zero(lambda: self._remark(state, figures))

    def _remark(self, state: Any, figures: dict[str, float]) -> str:
        if worse := self._worse(figures) if self.guard is None else []:
            self._events.emit("worse", found=worse)
            remark = f"worse than it began: {', '.join(worse)}"
            self._log("warning", f"the model ended {remark}; with a guard: the job would fail")
            return remark
        training = self._spec.training
        if training.loss_type == "dft":
            return ""  # this loss rises before it falls
        losses = [
            learning.Told(entry["step"], entry["loss"], entry.get("epoch") or 0.0)
            for entry in state.log_history
            if isinstance(entry.get("loss"), int | float)
        ]
        is_ordered = training.train_sampling_strategy == "sequential"
        before, after = self._progress.figures_before.get("eval_loss"), figures.get("eval_loss")
        if remark := learning.remark(losses, before, after, is_ordered=is_ordered):
            self._log("warning", f"{remark}; check the learning rate, the trained tokens and the predictions")
        return remark

    def _worse(self, figures: dict[str, float]) -> list[str]:
        """Describe scores that fell by more than one answer, which chance may do, and an evaluation loss that rose."""
        before = self._progress.figures_before
        remarks = [
            f"{name} rose from {loss:.3f} to {figures[name]:.3f}"
            for name, loss in before.items()
            if name.partition("/")[0] == "eval_loss" and figures.get(name, 0.0) > loss * (1 + LOSS_TOLERANCE)
        ]
        scores = [(metric.name, name) for metric in self._metrics for name in before]
        for metric, name in scores:
            group = name.removeprefix(f"{metric}/") if name.startswith(f"{metric}/") else ""
            if name != metric and not group:
                continue
            asked = [question for question in self._questions if not group or group in question.groups]
            then, now = before[name], figures.get(f"{metric_names.PREFIX}{name}")
            if now is not None and then - now > 1 / max(len(asked), 1) + 1e-9:
                remarks.append(f"{name} fell from {then:.3f} to {now:.3f}")
        return remarks
