"""The end of an attempt: a remedy for a lack of memory or disk space, the job's next state, and the log entry."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from honed.job import out_of_memory, preemption
from honed.job.job import STOPPED_EARLY, Adjustment, Job, State, Stop
from honed.job.plan_file import PlanFile
from honed.run.outcome import Outcome
from honed.system import durable, error, message
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)

#: What a plan raises that a worker has removed, damaged or closed.
UNREADABLE_PLAN = (OSError, ValueError, KeyError, TypeError, AttributeError)
_NO_STEP_HINT = (
    "use quantization: 4bit, a smaller max_length, a smaller model, or a device with more memory; honectl requeue "
    "retries from the first step of the ladder"
)


@dataclass(frozen=True)
class Remedy:
    """The change that lets a job continue after it ran out of memory or disk space, or the error if there is none."""

    adjustment: Adjustment | None = None
    needs_bytes: int = 0
    is_last: bool = False  #: no further attempt
    error: error.HonedError | None = None  #: replaces the worker's own error


def may_fall_back(layout: Layout, job: Job, outcome: Outcome) -> bool:
    """Return True if the attempt may continue without Unsloth; False for a plan that cannot be read, as its worker may
    have left it. Raises OSError if the machine prevents reading it."""
    attempt = job.attempt
    if not outcome.is_worth_another_backend or attempt.backend != "unsloth" or attempt.num_starts > 1:
        return False
    try:
        return bool(PlanFile.read(layout.files(job.id).plan_path).spec.get("backend") != "unsloth")
    except UNREADABLE_PLAN as fault:
        _log_unreadable(job, fault)
        return False


def _log_unreadable(job: Job, fault: Exception) -> None:
    """Log that a job's plan cannot be read. Raises the error again if it is a fault of the machine."""
    if durable.fault_at_persons(fault):
        raise fault
    log.warning("job %d (%s): its plan cannot be read: %s", job.id, job.name, error.said(fault))


def remedy_for(layout: Layout, job: Job, outcome: Outcome, phase: str) -> Remedy:
    """Return what a job that ran out of memory or disk space changes from now on. `phase`: its last known one. Raises
    OSError if the machine prevents reading its plan."""
    match outcome.code:
        case error.OutOfMemoryError.code:
            return _smaller(layout, job, outcome, phase)
        case error.DiskShortError.code if outcome.needed_bytes:
            # If there is room already, another limit such as a quota was hit: that counts as a failure.
            needs_bytes = outcome.needed_bytes
            return Remedy(needs_bytes=needs_bytes if not has_room(layout, job, needs_bytes) else 0)
        case _:
            return Remedy()


def _smaller(layout: Layout, job: Job, outcome: Outcome, last_phase: str) -> Remedy:
    problem = outcome.error
    assert problem is not None
    try:
        plan = PlanFile.read(layout.files(job.id).plan_path)
        spec = out_of_memory.adjusted(plan.spec, job.adjustments)
        media = out_of_memory.Media.of(plan.memory)
    except UNREADABLE_PLAN as fault:
        _log_unreadable(job, fault)
        return Remedy()
    wish = (spec.get("retry") or {}).get("on_out_of_memory", "adjust")
    if wish != "adjust":
        return Remedy(is_last=wish == "fail")
    was_killed = not outcome.phase  # by the kernel, perhaps because another process needed memory
    phase = outcome.phase or last_phase
    step = out_of_memory.next_step(spec, attempt=job.attempt.number, phase=phase, is_sure=not was_killed, media=media)
    if step is not None:
        return Remedy(adjustment=step)
    if was_killed and phase in out_of_memory.WITHOUT_BATCHES:
        return Remedy()
    words = f"{problem.message}; in {phase}, {out_of_memory.end_words(job.adjustments)}"
    leave = out_of_memory.leave(spec, media) if phase not in out_of_memory.WITHOUT_BATCHES else None
    hint = f"{leave}; or {_NO_STEP_HINT}" if leave else _NO_STEP_HINT
    return Remedy(error=error.OutOfMemoryError(words, hint=hint), is_last=True)


def has_room(layout: Layout, job: Job, num_bytes: int) -> bool:
    """Return True if a job's directory has that much free disk space."""
    try:
        disk = os.statvfs(layout.files(job.id).place)
    except OSError:
        return True  # its start will show it
    return disk.f_bavail * disk.f_frsize >= num_bytes


def destination(job: Job, outcome: Outcome, remedy: Remedy = Remedy()) -> tuple[State, dict[str, Any]]:  # noqa: B008
    """Return the state that a job moves to after an attempt, and the changes of its entry."""
    problem = outcome.error.as_dict() if outcome.error is not None else None
    if outcome.is_success:
        return State.SUCCEEDED, {"outcome": outcome.code, "error": None, "stop": None, "remark": outcome.remark}
    match job.stop:
        case Stop.CANCEL:
            return State.CANCELLED, {"outcome": "cancelled", "error": None, "stop": None}
        case Stop.HALVE if outcome.code in {"interrupted", "killed"}:
            return State.CANCELLED, {"outcome": STOPPED_EARLY, "error": None, "stop": None}
        case Stop.HALVE:  # hopeless, and so not tried again
            return State.FAILED, {"outcome": outcome.code, "error": problem, "stop": None}
        case Stop.HOLD if outcome.code in {"interrupted", "killed"}:
            return State.HELD, {"outcome": "interrupted", "error": None, "stop": None}
        case Stop.PREEMPT | Stop.SHUTDOWN if outcome.code in {"interrupted", "killed"}:
            return State.QUEUED, {"outcome": "interrupted", "error": None, "stop": None}
        case None if outcome.code == "interrupted":
            # Somebody stopped the worker without honed: a person, so a person has to release the job.
            return State.HELD, {"outcome": "interrupted", "error": problem, "stop": None}
    again = State.HELD if job.stop is Stop.HOLD else State.QUEUED
    if remedy.adjustment is not None:  # a ladder has its own end, and uses up no attempt
        adjustments, attempts = (*job.adjustments, remedy.adjustment), job.with_attempt(is_adjusted=True).attempts
        end = {"outcome": outcome.code, "error": problem, "stop": None}
        return again, {**end, "adjustments": adjustments, "attempts": attempts}
    if remedy.needs_bytes:
        return again, {"outcome": outcome.code, "error": problem, "stop": None, "needs_bytes": remedy.needs_bytes}
    num_failures = job.num_failures + 1
    changes = {"outcome": outcome.code, "error": problem, "stop": None, "num_failures": num_failures}
    is_transient = outcome.error is not None and (outcome.error.is_transient or outcome.needed_bytes > 0)
    if is_transient and not remedy.is_last and num_failures < job.max_attempts:
        return again, changes
    return State.FAILED, changes


def log_end(job: Job, outcome: Outcome, step: int, remedy: Remedy) -> None:
    """Log the end of an attempt. `job` is in its new state."""
    preempted = job.state is State.QUEUED and job.outcome == "interrupted" and job.preemption
    is_well = (outcome.is_success and not job.remark) or job.state in {State.HELD, State.CANCELLED} or preempted
    level = logging.INFO if is_well else logging.WARNING
    why = f": {outcome.error.message}" if outcome.error is not None else f", but {job.remark}" * bool(job.remark)
    if preempted:
        why = f": preempted because {preempted.reason}; {preemption.cost(job)}"
    log.log(
        level,
        "job %d (%s): attempt %d: %s%s; now %s",
        job.id,
        job.name,
        job.attempt.number,
        outcome.code,
        why,
        job.state,
        extra=about(
            job,
            _kind(job, outcome),
            code=outcome.code,
            step=step,
            hint=outcome.error.hint if outcome.error else None,
        ),
    )
    if remedy.adjustment is not None and job.state in {State.QUEUED, State.HELD}:
        log.warning(
            "job %d (%s): out of memory; the next attempt continues with %s",
            job.id,
            job.name,
            remedy.adjustment.text,
            extra=about(job, message.ADJUSTED, code=outcome.code),
        )
    if job.needs_bytes and job.state in {State.QUEUED, State.HELD}:
        log.warning(
            "job %d (%s): waiting for %d MiB of free space",
            job.id,
            job.name,
            job.needs_bytes >> 20,
            extra=about(job, message.WAITS_FOR_ROOM, code=outcome.code),
        )


def _kind(job: Job, outcome: Outcome) -> str:
    """Return the message that explains the end of an attempt."""
    match job.state:
        case State.SUCCEEDED:
            return message.SUCCEEDED
        case State.CANCELLED:
            return message.STOPPED_EARLY if job.was_stopped_early else message.CANCELLED
        case State.HELD if outcome.code == "interrupted":
            return message.HELD
        case _:
            return of_error(outcome.code)
