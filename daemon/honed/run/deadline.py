"""The deadlines of a running worker.

    asked to stop ── stop timeout ──► killed ── DUMP_SEC ──► killed once more, and its shim
    time limit and grace period over ──► asked to stop, likewise
    no sign of life ── stall limit ──► its stacks dumped ── DUMP_SEC ──► killed, likewise

A unit's own stop timeout and watchdog replace the first and the last.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from honed.job.job import Attempt, Job, Stop
from honed.run.outcome import Outcome
from honed.run.pulse import Pulses, Silence
from honed.run.runner import Exit, Runner
from honed.spec.config import Config
from honed.system import error, untrusted
from honed.system.clock import Moment
from honed.system.layout import AttemptFiles, Layout
from honed.system.pauses import Pauses, noted_sec

log = logging.getLogger(__name__)

#: Seconds that a cancelled worker has to end by itself.
CANCEL_TIMEOUT_SEC = 30.0
#: Seconds between the dump of a hanging worker's stacks and its end.
DUMP_SEC = 5.0


class _Suspension:
    """The time for which a cluster has suspended a worker, as far as honed has looked."""

    def __init__(self, now: float) -> None:
        self.sec = 0.0
        self.is_there = False
        self.until = -math.inf  #: the time of the last look at which it was suspended
        self._looked_at = now

    def look(self, now: float, *, is_there: bool) -> float:
        """Return the seconds since the last look, if it has been suspended since."""
        since_sec, self._looked_at = now - self._looked_at, now
        lasted_sec = since_sec if is_there else 0.0
        self.sec, self.is_there, self.until = self.sec + lasted_sec, is_there, now if is_there else self.until
        return lasted_sec


def _unseen_sec(attempt: Attempt, files: AttemptFiles) -> float:
    """Return the seconds of an attempt in which it was paused and no honed has seen it, but its shim has: honed's own
    watchdog ends it after a freeze. What was noted before it began was before its turn."""
    try:
        is_older = untrusted.info(files.paused_path).st_mtime < attempt.began.wall
    except OSError:
        return 0.0
    ran_sec = Moment.now().since(attempt.began)
    paused_sec = noted_sec(files.paused_path) - _noted_before_sec(attempt)
    return 0.0 if is_older else max(0.0, min(paused_sec, ran_sec) - attempt.paused_sec)


def _noted_before_sec(attempt: Attempt) -> float:
    """Return the seconds of pauses that the shim of an attempt's present start had noted before it began."""
    return attempt.staged_paused_sec if attempt.num_starts == 1 else 0.0


class Deadlines:
    """The deadlines of one attempt, counted from its start or its adoption. `clock` is monotonic seconds; one that
    knows of pauses also tells how long they were."""

    def __init__(
        self, job: Job, layout: Layout, runner: Runner, config: Callable[[], Config], *, clock: Callable[[], float]
    ) -> None:
        self._job = job  # of its entry only what stays the same during a start
        self._runner = runner
        self._config = config
        self._clock = clock
        self._since = Moment.now()
        self._suspension = _Suspension(clock())
        files = layout.files(job.id).attempt(job.attempt.number)
        self._unseen_sec = _unseen_sec(job.attempt, files)
        self._pulses = Pulses(files, max(1, job.num_gpus), clock())
        self._kill_at: float | None = None
        self._was_killed = False
        self._stalled = ""  #: who gave no sign of life, and where; empty while none was missed
        self._began: Moment | None = None  # when it began on a cluster
        self._has_begun = False  # its present start has
        self._overdue_at = self._when_overdue()  # when its time limit and the grace period are over
        self._is_overdue = False

    @property
    def phase(self) -> str:
        """The worker's phase, from its pulse file; empty if unknown."""
        return self._pulses.first.phase

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
        told_at = self._not_suspended(now, told_at)
        self._pulses.feel(now)
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
        elif self._kill_at is None and (silent := self._silent(now, told_at)):
            self._stalled = self._describe(silent, stage)
            seconds = f" for {max(item.sec for item in silent):.0f} s"
            log.warning("job %d (%s): hung: %s", job.id, job.name, self._describe(silent, stage, seconds))
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

    def _not_suspended(self, now: float, told_at: float) -> float:
        """Put off all deadlines while a cluster suspends it; returns when it was last heard."""
        skipped_sec = self._suspension.look(now, is_there=self._has_begun and self._runner.is_suspended(self._job.id))
        self._pulses.skip(skipped_sec)
        if self._kill_at is not None:
            self._kill_at += skipped_sec
        if self._overdue_at is not None:
            self._overdue_at += skipped_sec
        return max(told_at, self._suspension.until)

    @property
    def is_suspended(self) -> bool:
        """True while a cluster suspends it."""
        return self._suspension.is_there

    def paused_sec(self, until: Moment | None = None) -> float:
        """Return the seconds of the attempt, until then or now, that did not pass for it."""
        since, until = self._since, until or Moment.now()
        seen_sec = 0.0
        if isinstance(self._clock, Pauses) and until.is_of_boot(since):
            assert since.monotonic is not None
            seen_sec = self._clock.between(since.monotonic, until.monotonic or 0.0)
        return self._job.attempt.paused_sec + self._unseen_sec + self._suspension.sec + seen_sec

    def start_again(self) -> None:
        """Wait for the attempt's second start."""
        self._has_begun = False
        self._job = self._job.with_attempt(num_starts=2)

    @property
    def _is_of_cluster(self) -> bool:
        return self._runner.is_left(self._job.id) and not self._runner.is_supervised(self._job.id)

    def _silent(self, now: float, told_at: float) -> list[Silence]:
        """Return the ranks that gave no sign of life for too long. For a unit, rank 0 is heard by its own watchdog."""
        is_supervised, jobs, hung = self._runner.is_supervised(self._job.id), self._config().jobs, []
        for silence in self._pulses.silences(now, told_at):
            learned_sec = jobs.stall_timeout_sec if silence.learned_sec is None else silence.learned_sec
            is_hung = silence.sec >= min(jobs.stall_timeout_sec, max(jobs.min_stall_timeout_sec, learned_sec))
            if is_hung and not (is_supervised and silence.rank == 0):
                hung.append(silence)
        return hung

    def _describe(self, silent: Sequence[Silence], stage: str, seconds: str = "") -> str:
        numbers = [item.rank for item in silent] or [0]
        who, phase = self._pulses.who_hangs(numbers), self._pulses.phase_of(numbers) or self.phase or stage
        return f"{f'{who} gave ' if who else ''}no sign of life{seconds} in {phase}"

    def explain(self, outcome: Outcome, ended: Exit, *, is_asked: bool, stage: str) -> Outcome:
        """Return the outcome of a worker that has ended, as `stalled` or over its time limit if that was the reason.

        `is_asked`: its entry has a reason for its stop.
        """
        if outcome.code == error.StalledError.code and ended.is_after_pause and not self._stalled:
            problem = error.InterruptedRunError("its unit's watchdog ended it after a pause in which it could not run")
            return replace(outcome, code=problem.code, error=problem)
        if outcome.code == error.StalledError.code and self._job.num_gpus > 1:
            self._stalled = self._stalled or self._describe([], stage)  # systemd's watchdog was first
        if self._stalled and not outcome.is_success:
            stalled = error.StalledError(self._stalled, hint="its log contains its stacks")
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
            until = self._pulses.first.last_beat() or began
        paused_sec = self.paused_sec(until)
        if ended is not None and self._shares_pauses(ended):
            paused_sec = max(paused_sec, ended.paused_sec - _noted_before_sec(self._job.attempt))
        return max(0.0, until.since(began) - paused_sec)

    def _shares_pauses(self, ended: Exit) -> bool:
        """Return True if the pauses of its shim are no part of what it took: it was suspended, or frozen, with it."""
        return self._is_of_cluster or ended.is_after_pause

    def _when_overdue(self) -> float | None:
        """Return when an attempt, started or taken over now, has used up the time limit and the grace period."""
        if self._job.time_limit_sec is None:
            return None
        ran_sec = Moment.now().since(self._began or self._job.attempt.began) - self.paused_sec()
        spent = self._spent_before() + max(0.0, ran_sec)
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
        if not self._shares_pauses(ended):
            spent -= max(0.0, ended.paused_sec - _noted_before_sec(self._job.attempt) - self.paused_sec(ended.ended))
        return spent >= self._job.time_limit_sec + self._config().jobs.time_limit_grace_sec

    def _spent_before(self) -> float:
        return sum(attempt.spent_sec for attempt in self._job.attempts[:-1])
