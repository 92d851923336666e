"""The deadlines of a running worker.

    asked to stop ── stop timeout ──► killed ── DUMP_SEC ──► killed once more, and its shim
    time limit and grace period over ──► asked to stop, likewise
    no sign of life ── stall limit ──► its stacks dumped ── DUMP_SEC ──► killed, likewise

A unit's own stop timeout and watchdog replace the first and the last.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from honed.job.job import Job, Stop
from honed.run.outcome import Outcome
from honed.run.runner import Exit, Runner
from honed.spec.config import Config
from honed.system import error, untrusted
from honed.system.clock import Moment
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds that a cancelled worker has to end by itself.
CANCEL_TIMEOUT_SEC = 30.0
#: Seconds between the dump of a hanging worker's stacks and its end.
DUMP_SEC = 5.0


class Pulse:
    """The pulse file of a worker: signs of life, more often than its events."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._beat_at_ns = 0  # the file's time when it was last looked at
        self.heard_at = now  #: monotonic seconds
        self.phase = ""  #: the worker's phase
        self.learned_sec: float | None = None  #: how long it may be silent in that phase, learned from its own steps

    def feel(self, now: float) -> None:
        """Note whether the worker has moved since the last look."""
        try:
            beat_at_ns = self._path.lstat().st_mtime_ns
            if beat_at_ns == self._beat_at_ns:
                return
            # A pulse from before this daemon's start says nothing of now, and setting the clock must not move a
            # deadline.
            self._beat_at_ns, self.heard_at = beat_at_ns, now
            told = json.loads(untrusted.read_plain(self._path, max_bytes=4096))
            learned_sec = told.get("limit_sec")
            is_number = isinstance(learned_sec, int | float) and learned_sec > 0
            self.phase, self.learned_sec = str(told.get("phase", ""))[:32], learned_sec if is_number else None
        except (OSError, ValueError, AttributeError, RecursionError):
            return  # there is no pulse file yet, or it is being written

    def last_beat(self) -> Moment | None:
        """Return the time of the last sign of life; None if there was none."""
        try:
            return Moment(self._path.lstat().st_mtime)
        except OSError:
            return None


class Deadlines:
    """The deadlines of one attempt, counted from its start or its adoption. `clock` is monotonic seconds."""

    def __init__(
        self, job: Job, layout: Layout, runner: Runner, config: Callable[[], Config], *, clock: Callable[[], float]
    ) -> None:
        self._job = job  # of its entry only what stays the same during an attempt
        self._runner = runner
        self._config = config
        self._clock = clock
        self._pulse = Pulse(layout.job(job.id).attempt(job.attempt.number).pulse_path, clock())
        self._kill_at: float | None = None
        self._was_killed = False
        self._is_stalled = False
        self._began: Moment | None = None  # when it began on a cluster
        self._has_begun = False  # its present start has
        self._overdue_at = self._when_overdue()  # when its time limit and the grace period are over
        self._is_overdue = False

    @property
    def phase(self) -> str:
        """The worker's phase, from its pulse file; empty if unknown."""
        return self._pulse.phase

    def ask(self, why: Stop) -> None:
        """Ask the worker to stop, and set the time at which it is killed."""
        self._runner.stop(self._job.id)
        if self._runner.is_supervised(self._job.id) and why is not Stop.CANCEL:
            return  # the unit's own stop timeout applies; a worker that writes its checkpoint extends it
        stop_timeout_sec = self._config().jobs.stop_timeout_sec
        patience = CANCEL_TIMEOUT_SEC if why is Stop.CANCEL else stop_timeout_sec
        self._kill_at = self._clock() + min(patience, stop_timeout_sec)

    def enforce(self, now: float, *, told_at: float, stage: str) -> None:
        """Kill a worker that was asked to stop and did not; dump the stacks of a hanging worker, then kill it.

        `told_at`: when it last reported an event, in this `stage`.
        """
        job = self._job
        told_at = self._waited_until(now, told_at)
        self._pulse.feel(now)
        heard_at = max(told_at, self._pulse.heard_at)
        if self._kill_at is not None and now >= self._kill_at:
            log.warning("job %d (%s): killed: it did not stop", job.id, job.name)
            self._runner.kill(job.id, shim_too=self._was_killed)
            self._was_killed = True
            self._kill_at = now + DUMP_SEC
        elif self._overdue_at is not None and now >= self._overdue_at and not self._is_overdue:
            log.warning(
                "job %d (%s): exceeded its time limit and did not stop; sending a stop request", job.id, job.name
            )
            self._is_overdue = True
            self.ask(Stop.HOLD)
            self._kill_at = now + self._config().jobs.stop_timeout_sec
        elif self._kill_at is None and self._has_stalled(now - heard_at):
            log.warning(
                "job %d (%s): hung: no sign of life for %.0f s in %s",
                job.id,
                job.name,
                now - heard_at,
                self.phase or stage,
            )
            self._is_stalled = True
            self._kill_at = now + DUMP_SEC
            self._runner.dump(job.id)

    def _waited_until(self, now: float, told_at: float) -> float:
        """Let the time that it waits for a cluster's node count for nothing; returns when it was last heard."""
        if not self._is_of_cluster or self._has_begun:
            return told_at
        began = self._runner.began(self._job.id)
        self._has_begun, self._began = began is not None, self._began or began
        self._overdue_at = self._when_overdue() if began else None
        return now

    def start_again(self) -> None:
        """Wait for the attempt's second start."""
        self._has_begun = False

    @property
    def _is_of_cluster(self) -> bool:
        return self._runner.is_left(self._job.id) and not self._runner.is_supervised(self._job.id)

    def _has_stalled(self, silent_sec: float) -> bool:
        """Return True if a worker gave no sign of life for too long; False for units, whose own watchdog hears more."""
        if self._runner.is_supervised(self._job.id):
            return False
        jobs, learned_sec = self._config().jobs, self._pulse.learned_sec
        learned_sec = jobs.stall_timeout_sec if learned_sec is None else learned_sec
        return silent_sec >= min(jobs.stall_timeout_sec, max(jobs.min_stall_timeout_sec, learned_sec))

    def explain(self, outcome: Outcome, ended: Exit, *, is_asked: bool, stage: str) -> Outcome:
        """Return the outcome of a worker that has ended, as `stalled` or over its time limit if that was the reason.

        `is_asked`: its entry has a reason for its stop.
        """
        if self._is_stalled and not outcome.is_success:
            stalled = error.StalledError(
                f"no sign of life in {self.phase or stage}", hint="its log contains its stacks"
            )
            outcome = replace(outcome, code="stalled", error=stalled)
        is_overdue = self._is_overdue or self._was_overdue(ended)
        if is_overdue and not is_asked and not outcome.is_success:
            late = error.TimeLimitError(
                f"time limit of {self._job.time_limit_sec:g} s reached, and the worker did not stop",
                hint="its last checkpoint is kept; its log shows what it was doing: honectl logs --raw",
            )
            outcome = replace(outcome, code=late.code, error=late)
        return outcome

    def took_sec(self, ended: Exit | None) -> float:
        """Return the seconds that the attempt has taken: until its worker's recorded end, else until now.

        If the machine went down meanwhile: until the last sign of life. The time while the machine was off does not
        count.
        """
        self._began = self._began or (ended.began if ended is not None else None)
        if self._is_of_cluster and self._began is None:
            return 0.0  # it has only waited for a node
        began, until = self._began or self._job.attempt.began, Moment.now()
        if ended is not None and ended.ended is not None:
            until = ended.ended
        elif not until.is_of_boot(began):
            until = self._pulse.last_beat() or began
        return until.since(began)

    def _when_overdue(self) -> float | None:
        """Return when an attempt, started or taken over now, has used up the time limit and the grace period."""
        if self._job.time_limit_sec is None:
            return None
        spent = self._spent_before() + Moment.now().since(self._began or self._job.attempt.began)
        left = max(0.0, self._job.time_limit_sec - spent)
        return self._clock() + left + self._config().jobs.time_limit_grace_sec

    def _was_overdue(self, ended: Exit) -> bool:
        """Return True if a worker that was asked to stop had used up its time; honed was down then, or was killed
        since.

        This derives `_is_overdue` from what is durable.
        """
        if self._job.time_limit_sec is None or ended.ended is None or not ended.was_asked:
            return False
        if ended.is_machine_going_down:
            return False
        spent = self._spent_before() + self.took_sec(ended)
        return spent >= self._job.time_limit_sec + self._config().jobs.time_limit_grace_sec

    def _spent_before(self) -> float:
        """Return the seconds that the attempts before this one took."""
        return sum(each.spent_sec for each in self._job.attempts[:-1])
