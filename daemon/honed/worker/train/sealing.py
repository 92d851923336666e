"""Checkpoints sealed beside the next steps: hashed, synced and renamed into place by a thread, one at a time.

The trainer's thread writes a checkpoint's files, as any trainer does, and goes on with the next step. The files are the
snapshot: nothing of it is kept in memory. Until its rename a checkpoint is not there, for this run as for a resume: it
is reported, and older ones are removed, afterwards. The best checkpoint of a run that ends with it is waited for: if it
finds no room, its weights must still be there to be written again. One that is not in place when a run is stopped is
given up where the time for the stop does not suffice for it and for the one of the last step.
"""

from __future__ import annotations

import math
import threading
import time
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
        self.began = time.monotonic()
        self.took_sec = 0.0
        self.is_given_up = False
        self._seal = seal

    def run(self) -> None:
        try:
            self.path = self._seal(self._beat)
        except BaseException as problem:  # noqa: BLE001 - the trainer's thread raises it
            self.problem = problem
        self.took_sec = time.monotonic() - self.began

    def _beat(self) -> None:
        self.num_beats += 1  # the pulse is the trainer's: a step that hangs must not be covered by this thread
        if self.is_given_up:
            raise _GivenUpError


class _GivenUpError(Exception):
    """The end of a sealing that was given up."""


class Sealing:
    """At most one checkpoint that is being sealed."""

    def __init__(self, beat: Beat) -> None:
        """Begin without one. `beat` is called while the trainer's thread waits for a checkpoint that progresses."""
        self._beat = beat
        self._work: _Work | None = None
        self._took_sec = 0.0  # for the last checkpoint that is in place

    @property
    def step(self) -> int | None:
        """The step of the checkpoint whose outcome has not been taken."""
        return self._work.step if self._work is not None else None

    @property
    def is_idle(self) -> bool:
        """True if the outcome of every checkpoint has been taken."""
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

    def hurry(self, left_sec: float) -> None:
        """Give the checkpoint up, if there is one, where another one, which takes as long as the last, would not be in
        place in `left_sec` after it, but without it."""
        if self._work is not None and 0.0 < self._took_sec < left_sec:
            self.join(max_sec=left_sec - self._took_sec)
            self._work.is_given_up = self._work.is_alive()

    def join(self, *, max_sec: float = math.inf) -> None:
        """Wait for the checkpoint, if there is one, for so long at most."""
        work, until = self._work, time.monotonic() + max_sec
        num_beats = work.num_beats if work is not None else 0
        while work is not None and work.is_alive() and time.monotonic() < until:
            work.join(LOOK_INTERVAL_SEC)
            if work.num_beats > num_beats:
                num_beats = work.num_beats
                self._beat()

    def wait(self) -> Sealed | None:
        """Wait for the checkpoint, if there is one, and take its outcome; None if it was given up. Raises the error
        that it ended with."""
        self.join()
        work, self._work = self._work, None
        if work is None or isinstance(work.problem, _GivenUpError):
            return None
        if work.problem is not None:
            raise work.problem
        self._took_sec = work.took_sec
        assert work.path is not None
        return Sealed(work.step, work.path)
