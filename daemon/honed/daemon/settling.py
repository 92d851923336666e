"""The ends of attempts: from how a worker has ended to the job's next state.

exit and result ── outcome ──► succeeded/ failed/ cancelled/ held/, or queued/ for another attempt
no worker, for no fault of the job ── put back ──► queued/, and no attempt is counted
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from honed.daemon.running import Running
from honed.job.database import Database
from honed.job.job import Job, State, Stop
from honed.job.row_cache import RowCache
from honed.job.spool import Spool
from honed.run import ending
from honed.run.outcome import Outcome
from honed.run.runner import NotNowError, UnreachedError
from honed.spec.config import Config
from honed.system import durable, error
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Errors of a program that cannot be started at all; with any other machine's fault its job waits.
PROGRAM_ERRNOS = {errno.ENOEXEC, errno.E2BIG, errno.ELIBBAD}

#: Seconds for which the end of honed reads the last events of a job. What is left is counted at the next start.
STOP_SEC = 5.0


class Settling:
    """Settles the jobs whose workers have ended, and takes them out of `running`."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], Config],
        spool: Spool,
        database: Database,
        rows: RowCache,
        running: dict[int, Running],
    ) -> None:
        self._layout = layout
        self._config = config
        self._spool = spool
        self._database = database
        self._rows = rows
        self._running = running
        self.put_back: list[Job] = []  #: jobs whose workers could not be started

    def settle(self, running: Running, *, sec: float, is_stopping: bool) -> Job | None:
        """Settle a running job if its worker has ended, and return it in its new state, unless it was put back. `sec`:
        seconds in which its last events are read, else in a later turn."""
        if running.not_started is not None:
            return self._unstarted(running, running.not_started)
        if (ended := running.poll()) is None:
            return None
        max_sec = STOP_SEC if is_stopping else math.inf
        if (is_counted := running.following.read_rest(running.job, sec=sec, max_sec=max_sec)) is None:
            return None  # in a later turn
        if running.ended_at_gate(ended):
            self._not_now(running, NotNowError("its worker ended before it used the device"), has_run=True)
            return None
        outcome = running.conclude(ended, is_stopping=is_stopping)
        if outcome is not None and outcome.is_success:
            self._rows.finish(running.job)
        return self._record(running, outcome, is_counted=is_counted) if outcome is not None else None

    def _unstarted(self, running: Running, problem: OSError) -> Job | None:
        """Put a job back if its worker was not started for no fault of its own; else settle the attempt as failed."""
        job = running.job
        if isinstance(problem, UnreachedError) and job.stop is None:
            log.error("job %d (%s): %d starts in a row reached no worker", job.id, job.name, job.num_unreached)
            failure = error.EnvironmentInvalidError(
                f"{job.num_unreached} starts in a row reached no worker: each time honed or the machine went down",
                hint=f"the journal shows why: journalctl -u honed; then honectl requeue {job.id}",
            )
            return self._record(running, Outcome(failure.code, failure))
        is_machines = durable.machine_fault(problem) is not None and problem.errno not in PROGRAM_ERRNOS
        if isinstance(problem, NotNowError) or is_machines or problem.errno == errno.EAGAIN:  # too many processes
            self._not_now(running, problem)
            return None
        log.error("job %d (%s): its worker cannot be started: %s", job.id, job.name, problem)
        failure = error.EnvironmentInvalidError(f"the worker cannot be started: {problem}", hint="see honectl doctor")
        return self._record(running, Outcome(failure.code, failure))

    def _not_now(self, running: Running, problem: OSError, *, has_run: bool = False) -> None:
        """Put back a job whose worker was not started; remove the attempt, unless its first start did run, or this one
        wrote events (`has_run`)."""
        job = running.job
        changes: dict[str, Any] = {"attempts": job.attempts[:-1], "stop": None}
        if job.attempt.num_starts > 1 or has_run:
            took_sec = running.deadlines.took_sec(running.ended)
            ended = job.with_attempt(ended_at=time.time(), outcome="interrupted", took_sec=took_sec)
            changes |= {"attempts": ended.attempts, "num_unreached": 0}
        elif not isinstance(problem, UnreachedError):  # it is known that it has not begun, and why
            changes["num_unreached"] = max(0, job.num_unreached - 1)
        if job.stop is Stop.CANCEL:
            job = self._spool.move(job, State.CANCELLED, outcome="cancelled", **changes)
        else:
            job = self._spool.move(job, State.HELD if job.stop is Stop.HOLD else State.QUEUED, **changes)
        log.warning("job %d (%s): %s; retrying later", job.id, job.name, problem)
        del self._running[job.id]
        self._database.put_job(job)
        self.put_back.append(job)

    def _record(self, running: Running, outcome: Outcome, *, is_counted: bool = True) -> Job:
        """Record how the attempt ended, and move the job to its next state."""
        step = outcome.step if outcome.step is not None else running.following.last_step(running.job)
        took_sec = running.deadlines.took_sec(running.ended)
        ended = {"ended_at": time.time(), "outcome": outcome.code, "step": step, "took_sec": took_sec}
        written = running.following.written_bytes(running.job)
        ended |= {"checkpoint_bytes": written.checkpoints, "output_bytes": written.outputs}
        job = running.job.with_attempt(**ended, is_resumed=running.following.is_resumed(running.job))
        remedy = ending.remedy_for(self._layout, job, outcome, running.phase)
        if remedy.error is not None:
            outcome = replace(outcome, error=remedy.error)
        state, changes = ending.destination(job, outcome, remedy)
        job = self._spool.move(job, state, num_unreached=0, **changes)
        del self._running[job.id]
        if is_counted:
            self._database.put_job(job)
        else:
            self._database.is_behind = True
            self._database.uncounted.add(job.id)
        ending.log_end(job, outcome, step, remedy)
        return job
