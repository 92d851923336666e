"""The verbs that change one job, as honectl, the daemon and honectl without a daemon know them."""

from __future__ import annotations

from dataclasses import dataclass

from honed.job.job import State


@dataclass(frozen=True)
class Change:
    """A verb that changes a job."""

    words: str  #: for help
    states: tuple[State, ...] = tuple(State)  #: of the jobs that it applies to

    @property
    def allowed(self) -> str:
        """Return the states in words."""
        *others, last = (state.value for state in self.states)
        return f"{', '.join(others)} or {last}" if others else last


CHANGES = {
    "cancel": Change("cancel queued, held or running jobs", (State.QUEUED, State.HELD, State.RUNNING)),
    "hold": Change(
        "keep a queued job from starting, or stop a running one at a checkpoint", (State.QUEUED, State.RUNNING)
    ),
    "release": Change("queue a held job again", (State.HELD,)),
    "requeue": Change(
        "queue a failed or cancelled job again; it resumes from its last checkpoint, if any",
        (State.FAILED, State.CANCELLED),
    ),
    "pin": Change("protect a job from removal by prune and retention"),
    "unpin": Change("allow prune and retention to remove a job again"),
}
