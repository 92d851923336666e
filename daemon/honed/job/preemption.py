"""Preemptions as text and as rows: why a job gave up its device, and what that cost."""

from __future__ import annotations

from honed.job.job import Attempt, Job, State
from honed.job.progress import duration
from honed.job.shape import PreemptionRow


def row(attempt: Attempt) -> PreemptionRow | None:
    """Return the preemption of an attempt; None if there was none."""
    if attempt.preemption is None:
        return None
    return {
        "reason": attempt.preemption.reason,
        "stop_sec": _stop_sec(attempt),
        "lost_steps": 0 if attempt.outcome == "interrupted" else None,
    }


def current(job: Job) -> PreemptionRow | None:
    """Return the preemption of a job that has not started again since; None if there is none."""
    is_current = job.state in {State.QUEUED, State.RUNNING} and job.attempts
    return row(job.attempt) if is_current else None


def cost(job: Job) -> str:
    """Describe what the preemption of the latest attempt cost; empty while its worker has not ended."""
    attempt = job.attempt
    stop_sec = _stop_sec(attempt)
    if stop_sec is None:
        return ""
    if attempt.outcome == "interrupted":
        where = f"it continues from step {attempt.step}" if attempt.step else "it continues from its last checkpoint"
        where = where if any(item.step for item in job.attempts) else "it begins again, because it has no checkpoint"
        return f"stopped after {duration(stop_sec)}; {where}"
    return f"killed after {duration(stop_sec)}; steps since its last checkpoint are repeated"


def _stop_sec(attempt: Attempt) -> float | None:
    """Return the seconds from the request to the end of the worker; None before that."""
    if attempt.preemption is None or attempt.took_sec is None:
        return None
    return max(0.0, round(attempt.took_sec - attempt.preemption.after_sec, 3))
