"""Checkpoints sealed beside the next steps: hashed, synced and renamed into place by a thread, one at a time.

The trainer's thread writes a checkpoint's files, as any trainer does, and goes on with the next step. The files are the
snapshot: nothing of it is kept in memory. Until its rename a checkpoint is not there, for this run as for a resume: it
is reported, and older ones are removed, afterwards. The best checkpoint of a run that ends with it is waited for: if it
finds no room, its weights must still be there to be written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Seconds between two looks at the progress of a checkpoint that is waited for.
LOOK_INTERVAL_SEC = 0.2

Beat = Callable[[], None]


@dataclass(frozen=True)
class Sealed:
    """A checkpoint in its place."""

    step: int
    path: Path


class _Work(threading.Thread):
    """The sealing of one checkpoint."""

    def __init__(self, step: int, seal: Callable[[Beat], Path]) -> None:
        super().__init__(name=f"checkpoint-{step}")
        self.step = step
        self.num_beats = 0
        self.path: Path | None = None
        self.problem: BaseException | None = None
        self._seal = seal

    def run(self) -> None:
        try:
            self.path = self._seal(self._beat)
        except BaseException as problem:  # noqa: BLE001 - the trainer's thread raises it
            self.problem = problem

    def _beat(self) -> None:
        self.num_beats += 1  # the pulse is the trainer's: a step that hangs must not be covered by this thread


class Sealing:
    """At most one checkpoint that is being sealed."""

    def __init__(self, beat: Beat) -> None:
        """Begin without one. `beat` is called while the trainer's thread waits for a checkpoint that progresses."""
        self._beat = beat
        self._work: _Work | None = None

    @property
    def is_idle(self) -> bool:
        """True if the outcome of each checkpoint has been taken."""
        return self._work is None

    @property
    def has_ended(self) -> bool:
        """True if there is an outcome to take without waiting."""
        return self._work is not None and not self._work.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if that outcome is an error."""
        return self.has_ended and self._work is not None and self._work.problem is not None

    def start(self, step: int, seal: Callable[[Beat], Path]) -> None:
        """Seal a checkpoint by calling `seal` in a thread; it returns the checkpoint's place."""
        assert self._work is None, "the outcome of the last checkpoint has not been taken"
        self._work = _Work(step, seal)
        self._work.start()

    def wait(self) -> Sealed | None:
        """Wait for the checkpoint, if there is one, and take its outcome. Raises the error that it ended with."""
        work = self._work
        if work is None:
            return None
        num_beats = work.num_beats
        while work.is_alive():
            work.join(LOOK_INTERVAL_SEC)
            if work.num_beats > num_beats:
                num_beats = work.num_beats
                self._beat()
        self._work = None
        if work.problem is not None:
            raise work.problem
        assert work.path is not None
        return Sealed(work.step, work.path)
