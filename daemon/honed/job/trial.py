"""Trials: a job run on eight of its rows for a few steps, and what the result predicts for the full run.

    jobs/<id>/trial/plan.json          the job's own plan, made small by `reduced`
    jobs/<id>/trial/attempts/<n>/      its worker's events, as for any job; `judge` reads them

All of the data is read and encoded, so that the rows and the duration of the full run are known. The eight rows are the
longest one and seven drawn with the job's seed; a larger batch repeats them, so that a step takes the same time and
memory as in the full run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job.comparison import is_right
from honed.job.event import Event
from honed.job.job import MAX_PRIORITY
from honed.job.plan_file import PlanFile
from honed.job.progress import duration, figure, size
from honed.job.shape import Segment
from honed.spec import export

#: Rows that a trial must memorize.
NUM_ROWS = 8
#: The minimum number of steps of a trial, and of epochs over its rows.
NUM_STEPS, NUM_EPOCHS = 30, 10
#: Final loss as a share of the initial loss: below the first the rows are learned, below the second they are being
#: learned.
LEARNED, LEARNING = 0.2, 0.8
#: Cost of a forward pass relative to a whole step, whose backward pass costs twice the forward pass.
FORWARD_SHARE = 1 / 3
#: Predictions in one batch; see worker/train/prediction.py.
PREDICTION_BATCH = 16
#: The first steps, which are slower than the rest.
NUM_SLOW = 2


@dataclass(frozen=True)
class Findings:
    """The results of a trial; a field is None if it could not be determined."""

    verdict: str  #: learns, learns_slowly, does_not_learn
    num_steps: int
    loss_before: float | None
    loss_after: float | None
    num_asked: int  #: rows that were both trained on and predicted
    num_right_before: int
    num_right: int
    data: dict[str, Any]  #: counts of the full data set, as in the event
    segments: list[Segment]  #: the first row, masked
    whole_steps: int | None
    step_sec: float | None  #: one step of the full run
    whole_sec: float | None  #: evaluations and predictions included
    peak_bytes: int | None
    available_bytes: int | None
    estimated_bytes: int | None
    device: str  #: cuda, cpu or mps
    warnings: list[str]  #: warnings that the worker logged

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Findings:
        return cls(**{name: data.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


def only(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the content of a job file changed so that the job only runs its trial, ahead of all others."""
    left_out = {"output_dir", "notify", "depends_on", "pin", "sweep", "group"}
    kept = {key: value for key, value in document.items() if key not in left_out}
    return {**kept, "trial": "only", "priority": MAX_PRIORITY, "name": f"trial of {document.get('name') or name}"[:100]}


def reduced(plan: PlanFile, output_dir: Path) -> PlanFile:
    """Return the plan of a job's trial: its learning rate, batch and precision, but no schedule or checkpoints."""
    spec = plan.spec
    training = {name: value for name, value in spec.get("training", {}).items() if name not in _LEFT_OUT}
    batch = int(training.get("per_device_train_batch_size", 8))
    steps = max(NUM_STEPS, NUM_EPOCHS * math.ceil(NUM_ROWS / batch))
    training |= {
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": 1,
    }
    predictions = {
        **spec.get("predictions", {}),
        "sample_frequency": "eval",
        "num_samples": max(NUM_ROWS, batch),
        "prompts": None,
    }
    spec |= {
        "trial": False,
        "training": training,
        "predictions": predictions,
        "save_interval_sec": None,
        "guard": None,
        "early_stopping_patience": None,
        "report_to": [],
        "notify": None,
        **export.NONE,
    }
    return plan.for_trial(spec, output_dir)


_LEFT_OUT = {
    "num_train_epochs",
    "warmup_steps",
    "lr_scheduler_kwargs",
    "eval_steps",
    "eval_delay",
    "eval_on_start",
    "save_steps",
    "save_total_limit",
    "save_on_each_node",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "logging_strategy",
    "logging_first_step",
    "max_steps",
}


def judge(events: Sequence[Event], plan: PlanFile) -> Findings:
    """Derive findings about the full run from a trial's events and the job's plan."""
    steps = [item for item in events if item.kind == "step"]
    losses = [item.data["loss"] for item in steps if isinstance(item.data.get("loss"), int | float)]
    data = _last(events, "data")
    training = plan.spec.get("training", {})
    per_epoch = max(1, math.ceil(NUM_ROWS / int(training.get("per_device_train_batch_size", 8))))
    before = statistics.fmean(losses[:per_epoch]) if losses else None
    after = statistics.fmean(losses[-per_epoch:]) if losses else None
    rounds = [_answers(item.data.get("rows", [])) for item in events if item.kind == "predictions"]
    right_before, right = (sum(rounds[at].values()) if rounds else 0 for at in (0, -1))
    num_asked = len(rounds[-1]) if rounds else 0
    memory, device = _last(events, "memory"), plan.device
    is_gpu = bool(memory.get("device_peak_bytes"))
    whole_steps, step_sec, whole_sec = _time(events, plan.spec, data, plan.parallel.num_ranks)
    return Findings(
        verdict=_verdict(before, after, right, num_asked),
        num_steps=len(steps),
        loss_before=before,
        loss_after=after,
        num_asked=num_asked,
        num_right_before=right_before,
        num_right=right,
        data=data,
        segments=_last(events, "example").get("segments", []),
        whole_steps=whole_steps,
        step_sec=step_sec,
        whole_sec=whole_sec,
        peak_bytes=memory.get("device_peak_bytes" if is_gpu else "resident_peak_bytes"),
        available_bytes=device.total_bytes if device else None,
        estimated_bytes=plan.memory.total_bytes if plan.memory else None,
        device=device.kind if device else "cpu",
        warnings=[
            str(item.data.get("evidence") or item.data.get("message"))
            for item in events
            if item.kind == "log" and item.data.get("level") == "warning"
        ],
    )


def _verdict(before: float | None, after: float | None, num_right: int, num_asked: int) -> str:
    if num_asked and num_right * 2 > num_asked:
        return "learns"
    if before is None or after is None or not before > 0:
        return "does_not_learn"
    return "learns" if after < LEARNED * before else "learns_slowly" if after < LEARNING * before else "does_not_learn"


def _answers(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Tell for every prompt whether its prediction is right; never if the reference exceeds the length limit."""
    return {str(row.get("prompt")): is_right(row) for row in rows}


def _last(events: Sequence[Event], kind: str) -> dict[str, Any]:
    return next((item.data for item in reversed(events) if item.kind == kind), {})


# -- how long ---------------------------------------------------------------------------------------------------------


def _time(
    events: Sequence[Event], spec: Mapping[str, Any], data: Mapping[str, Any], num_ranks: int
) -> tuple[int | None, float | None, float | None]:
    """Return the number of steps of the full run, the seconds of one, and the total seconds."""
    training, predictions = spec.get("training", {}), spec.get("predictions", {})
    times = [item.time for item in events if item.kind == "step"]
    took = [after - before for before, after in itertools.pairwise(times)][NUM_SLOW:]
    count, tokens = data.get("num_train"), data.get("num_tokens")
    tried = data.get("trial") or {}
    if not took or not count or not tokens or not tried.get("num_tokens"):
        return None, None, None
    batch = int(training.get("per_device_train_batch_size", 8))
    accumulation = int(training.get("gradient_accumulation_steps", 1))
    is_packed = bool(training.get("packing"))
    if is_packed:
        count = math.ceil(tokens / int(training.get("max_length") or 1024))
    per_epoch = math.ceil(math.ceil(count / batch / num_ranks) / accumulation)
    max_steps = int(training.get("max_steps", -1))
    steps = max_steps if max_steps > 0 else math.ceil(float(training.get("num_train_epochs", 3)) * per_epoch)
    # The duration of a batch grows with its tokens: all rows may be shorter on average than the longest and seven
    # others.
    shorter = 1.0 if is_packed else (tokens / count) / (tried["num_tokens"] / tried["num_rows"])
    forward_backward = statistics.median(took) * shorter
    num_evaluations = _occasions(training, steps, per_epoch) if data.get("num_eval") else 0
    evaluation = math.ceil(data.get("num_eval", 0) / batch / num_ranks) * forward_backward * FORWARD_SHARE
    asking = _prediction_sec(events) * math.ceil(int(predictions.get("num_samples", 5)) / PREDICTION_BATCH)
    match predictions.get("sample_frequency", "eval"):
        case "off":
            num_rounds = 0
        case "eval":
            num_rounds = 2 + num_evaluations
        case "epoch":
            num_rounds = 2 + math.ceil(steps / per_epoch)
        case every:
            num_rounds = 2 + steps // int(every)
    step_sec = forward_backward * accumulation
    seconds = _start_sec(events) + steps * step_sec + num_evaluations * evaluation + num_rounds * asking
    return steps, step_sec, seconds


def _occasions(training: Mapping[str, Any], steps: int, per_epoch: int) -> int:
    """Return the number of evaluations in a run that has evaluation data."""
    every = training.get("eval_steps")
    match training.get("eval_strategy") or ("steps" if every else "epoch"):
        case "no":
            return 0
        case "steps":
            every = float(every or training.get("logging_steps") or 500)
            return int(steps // max(1, every if every >= 1 else math.ceil(every * steps)))
        case _:
            return math.ceil(steps / per_epoch)


def _prediction_sec(events: Sequence[Event]) -> float:
    baseline = _moment(events, "baseline")
    at = next((item.time for item in events if item.kind == "predictions"), None)
    return max(0.0, at - baseline) if baseline is not None and at is not None else 0.0


def _start_sec(events: Sequence[Event]) -> float:
    baseline = _moment(events, "baseline")
    return max(0.0, baseline - events[0].time) if baseline is not None else 0.0


def _moment(events: Sequence[Event], stage: str) -> float | None:
    return next((item.time for item in events if item.kind == "stage" and item.data.get("stage") == stage), None)


# -- in words ---------------------------------------------------------------------------------------------------------

_VERDICTS = {
    "learns": "It learns",
    "learns_slowly": "It learns, but slowly",
    "does_not_learn": "It does not learn",
}


#: The first row of the result.
ASKED = "Does it learn?"


def headline(findings: Findings) -> str:
    """Return the verdict, with the losses, in one sentence."""
    loss = ""
    if findings.loss_before is not None and findings.loss_after is not None:
        word = "fell" if findings.loss_after < findings.loss_before else "went"
        loss = (
            f": the loss of {NUM_ROWS} rows {word} from {figure(findings.loss_before)} to {figure(findings.loss_after)}"
        )
    return f"{_VERDICTS[findings.verdict]}{loss} in {findings.num_steps} steps"


def words(findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs, except the first row's text."""
    before = findings.num_right_before
    asked = f"; {findings.num_right} of {findings.num_asked} answers match the reference, {before} before"
    yield ASKED, f"{headline(findings)}{asked if findings.num_asked else ''}."
    if findings.verdict != "learns":
        yield "What to do", _ADVICE[findings.verdict]
    yield "Training data", f"{_trained(findings.data)}."
    for warning in findings.warnings or ():
        yield "Warning", f"{warning}."
    yield "Duration", _how_long(findings)
    yield "Memory", _how_much(findings)


_ADVICE = {
    "learns_slowly": "Try a higher learning_rate, or train more of the model with the adapter (lora.r, "
    "target_modules); a long run may not need either.",
    "does_not_learn": "A working setup can memorize eight rows: check what is trained on (honectl preview FILE), "
    "and try another learning_rate.",
}


def _trained(data: Mapping[str, Any]) -> str:
    tokens, trained = data.get("num_tokens") or 0, data.get("num_trained_tokens") or 0
    share = f" ({trained / tokens:.0%})" if tokens else ""
    lost = [
        f"{data.get(key, 0)} {word}"
        for key, word in (("num_truncated", "truncated to max_length"), ("num_dropped", "skipped"))
    ]
    return (
        f"{data.get('num_train', 0)} rows, {data.get('num_eval', 0)} held out, {', '.join(lost)}; "
        f"{trained:,} of {tokens:,} tokens are trained on{share}"
    )


def _how_long(findings: Findings) -> str:
    if findings.whole_sec is None or findings.step_sec is None:
        return "Unknown: there were too few steps."
    return (
        f"About {duration(findings.whole_sec)} for the full job: {findings.whole_steps} steps of "
        f"{findings.step_sec:.2g} s, "
        "including startup, evaluations and predictions; without checkpoints and the export."
    )


def _how_much(findings: Findings) -> str:
    if not findings.peak_bytes:
        return "Unknown: the system does not report it."
    there = f", {size(findings.available_bytes)} available" if findings.available_bytes else ""
    batch = "with the longest row in a batch"
    if findings.device == "cuda":
        estimated = f" (estimated: {size(findings.estimated_bytes or 0)})" if findings.estimated_bytes else ""
        return f"{size(findings.peak_bytes)} GPU memory at peak{there}{estimated}, {batch}."
    # The measured memory is a whole process: for a small model mostly libraries, which no estimate includes.
    alone = f" The estimate for the model and its training alone is {size(findings.estimated_bytes or 0)}."
    return (
        f"{size(findings.peak_bytes)} peak memory of the process, including Python and its libraries{there}, "
        f"{batch}.{alone if findings.estimated_bytes else ''}"
    )
