"""A worker's events as text: for the daemon's log, and for `honectl logs` without a journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from honed.job import event
from honed.job.job import Job
from honed.job.progress import figure, progress_text
from honed.system import message
from honed.system.log import about

#: Seconds between progress lines of one job in the log.
PROGRESS_LOG_INTERVAL_SEC = 30.0
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}


#: Counts of a `data` event with their words, in display order.
_ROW_WORDS = {
    "num_train": "to train on",
    "num_eval": "held out",
    "num_tokens": "tokens",
    "num_trained_tokens": "trained tokens",
    "num_truncated": "truncated to training.max_length",
    "num_dropped": "skipped",
    "num_silenced": "skipped because the template removes an answer",
    "num_unusable": "unreadable",
    "num_twice": "repeat an earlier row",
    "num_in_both": "both held out and trained on",
    "num_asked_otherwise": "with a different prompt in predictions",
    "num_media": "images, videos and sounds",
    "num_broken": "with a broken image, video or sound",
    "num_too_long": "too long because of their images, videos or sounds",
}


def example_text(data: Mapping[str, Any]) -> str:
    """Return the first example as it is trained on: text between ⟦ and ⟧ is trained, the rest is masked."""
    return "".join(
        f"⟦{part.get('text')}⟧" if part.get("trained") else str(part.get("text"))
        for part in event.items(data, "segments")
        if isinstance(part, dict)
    )


def row_counts(data: Mapping[str, Any]) -> str:
    """Return `384 to train on, 48 held out, 3 cut at training.max_length`; counts of zero are left out."""
    counts = {key: value for key in _ROW_WORDS if type(value := data.get(key)) is int}
    return ", ".join(f"{value:,} {_ROW_WORDS[key]}" for key, value in counts.items() if value or key == "num_train")


@dataclass
class Narrator:
    """Logger of one job's worker events to the daemon's log; keeps the last reported progress and stage."""

    log: logging.Logger
    clock: Callable[[], float]  #: monotonic seconds
    progress: dict[str, Any] = field(default_factory=dict)
    stage: str = "starting"
    is_resumed: bool = False
    _logged_at: float = 0.0

    def words(self) -> str:
        """Return the worker's progress as text, or its stage if no step was reported yet."""
        return progress_text(self.progress) if self.progress else self.stage

    def log_event(self, job: Job, item: event.Event) -> None:
        """Log one event as text; unknown kinds are logged at debug level."""
        data = item.data
        match item.kind:
            case "step":
                self._tell_step(job, data)
            case "stage":
                self.stage = str(data.get("stage"))
                self._say(job, logging.DEBUG, f"stage {self.stage}", stage=self.stage)
            case "evaluation":
                metrics = data.get("metrics")
                figures = metrics.items() if isinstance(metrics, dict) else ()
                shown = ", ".join(f"{name} {figure(value)}" for name, value in figures if name.startswith("eval_loss"))
                words = f"evaluated at step {data.get('step')}: {shown or 'no loss'}"
                self._say(job, logging.INFO, words, stage="evaluate", step=data.get("step"))
            case "log":
                # The journal catalog has no explanation for codes that are not ours.
                code = str(data.get("code"))
                level = LEVELS.get(str(data.get("level")), logging.INFO)
                kind = message.BY_ERROR.get(code)
                words = str(data.get("message"))
                self._say(job, level, words, kind, stage=self.stage, code=code if kind else None)
            case "checkpoint":
                words = f"checkpoint at step {data.get('step')}"
                self._say(job, logging.INFO, words, message.CHECKPOINT, step=data.get("step"))
            case "resumed":
                self.is_resumed = True
                self._say(job, logging.INFO, f"resumes from step {data.get('step')}", step=data.get("step"))
            case "data":
                self._say(job, logging.INFO, f"rows: {row_counts(data)}", stage="data")
            case "rows" if data.get("shared"):
                self._say(job, logging.INFO, "its rows were encoded by an earlier job", stage="data")
            case "example":  # its text is private: shown in the report and `honectl preview`, not in the journal
                self._say(job, logging.DEBUG, "first example rendered", stage="data")
            case "predictions":
                num_rows = len(rows) if isinstance(rows := data.get("rows"), list) else 0
                num_failed = data.get("num_failed", 0)
                level = logging.WARNING if num_failed else logging.INFO
                words = f"step {data.get('step')}: {num_rows} predictions, {num_failed} failed"
                self._say(job, level, words, step=data.get("step"))
            case _:
                self._say(job, logging.DEBUG, item.kind)

    def _tell_step(self, job: Job, data: Mapping[str, Any]) -> None:
        self.progress = {key: data.get(key) for key in ("step", "num_steps", "epoch", "loss", "eta_sec")}
        now = self.clock()
        if now - self._logged_at >= PROGRESS_LOG_INTERVAL_SEC:
            self._logged_at = now
            words = progress_text(self.progress)
            self._say(job, logging.INFO, words, stage="train", step=data.get("step"), loss=data.get("loss"))

    def _say(self, job: Job, level: int, words: str, kind: str | None = None, **fields: object) -> None:
        extra = about(job, kind, **fields)
        self.log.log(level, "job %d (%s): %s", job.id, job.name, words, extra=extra, stacklevel=2)
