"""One running job: its worker, its events, its deadlines, and how it has ended.

State that must survive a kill of the daemon is written to the entry first: a job lies in running/ before its worker
starts, and its entry has the reason of a stop before its worker is asked to stop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from honed.daemon.following import Following
from honed.job.ahead import Pass
from honed.job.job import Attempt, Cut, Fallback, Job, Preemption, Stop
from honed.job.plan_file import PlanFile
from honed.job.row_cache import RowCache
from honed.job.spool import Spool
from honed.run import ending
from honed.run.deadline import Deadlines
from honed.run.outcome import Outcome, judge
from honed.run.runner import (
    NODES_VARIABLE,
    PROFILE_VARIABLE,
    RANKS_VARIABLE,
    TIME_LEFT_VARIABLE,
    Exit,
    NotNowError,
    Runner,
    UnreachedError,
)
from honed.spec import kind
from honed.spec.config import Config
from honed.system import durable, error, message, untrusted
from honed.system.clock import Moment
from honed.system.device import Device
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)

#: Passes of the loop after which an unreadable result is treated as none.
MAX_UNREAD = 60
#: Unforeseen errors in judging one job's result, before the job is settled by its exit status alone. Errors of other
#: steps say nothing of the result: a job whose success was left unread would run twice.
MAX_FAILED_JUDGEMENTS = 5
#: Seconds of a cluster's pause that lasts, after which its entry has the next of them.
KEEP_SEC = 60.0
#: Starts in a row that reached no worker, after which the job is failed: it may be what brings honed down.
MAX_UNREACHED = 3
#: Stages of a staged worker before it waits at its gate.
BEFORE_GATE = frozenset({"starting", "prepare", "data"})


@dataclass(frozen=True)
class Staged:
    """A worker that was started ahead of its job's turn: it waits at its gate until a device is free."""

    number: int  #: of the attempt that it becomes
    start: int  #: the number of its start
    backend: str
    device: str  #: the devices that it was staged for, as in an attempt
    since: float  #: seconds since the epoch


class Running:
    """A running job: its entry, its worker, its events. All but the entry may be lost."""

    def __init__(
        self,
        job: Job,
        following: Following,
        deadlines: Deadlines,
        layout: Layout,
        spool: Spool,
        runner: Runner,
        config: Callable[[], Config],
        rows: RowCache,
    ) -> None:
        self.job = job
        self._rows = rows
        self.following = following
        self.deadlines = deadlines
        self._layout = layout
        self._spool = spool
        self._runner = runner
        self._config = config
        self.ended: Exit | None = None
        self._waits_at_gate = False  # it was staged, and could not be let through
        self.not_started: OSError | None = None  #: why it has no worker; settled in the next pass
        self._num_unread = 0  # passes in which its result could not be read
        self._num_failed_judgements = 0

    @property
    def is_alive(self) -> bool:
        """True if it has a worker that has not ended, as far as known."""
        return self.ended is None and self.not_started is None

    @property
    def phase(self) -> str:
        """The phase that its worker is in, or was in last."""
        return self.deadlines.phase or self.following.narrator.stage

    @functools.cached_property
    def can_resume(self) -> bool:
        """True if it goes on from its checkpoint: merges and evaluations have none, and would begin again."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return kind.of(PlanFile.read(self._layout.files(self.job.id).plan_path).spec).resumes
        return False

    @property
    def left_sec(self) -> float | None:
        """Seconds until it ends at the latest, by its time limit and by its own estimate; None without either."""
        job, limits = self.job, []
        if job.time_limit_sec is not None:
            spent = sum(attempt.spent_sec for attempt in job.attempts[:-1]) + job.attempt.ran_sec(Moment.now())
            limits.append(job.time_limit_sec - spent)
        if isinstance(eta_sec := self.following.narrator.progress.get("eta_sec"), int | float):
            limits.append(eta_sec - (self.following.silent_sec))
        return max(0.0, min(limits)) if limits else None

    def update(self, **changes: Any) -> Job:
        """Change its entry, and return it."""
        self.job = self._spool.update(self.job, **changes)
        return self.job

    # -- its worker ---------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start its worker; on failure `not_started` has the reason."""
        job, attempt = self.job, self.job.attempt
        try:
            write_adjustments(self._layout, job)
        except OSError as problem:
            self.not_started = NotNowError(f"its assignment cannot be written: {problem}")
            return
        environment = worker_environment(self._layout, self._config(), job, gpu_of(attempt))
        environment |= self._rows.environment(job)
        try:
            self._runner.start(job.id, attempt.number, attempt.start, backend=attempt.backend, environment=environment)
        except OSError as problem:
            self.not_started = problem

    def let_through(self) -> None:
        """Let its staged worker use the device; on failure that is tried again in `enforce`."""
        attempt = self.job.attempt
        try:
            Pass(attempt.number, attempt.start, device_environment(gpu_of(attempt))).write(
                self._layout.files(self.job.id)
            )
            self._waits_at_gate = False
        except OSError as problem:
            if not self._waits_at_gate:
                log.warning("job %d (%s): its worker waits: %s", self.job.id, self.job.name, problem)
            self._waits_at_gate = True

    def adopt(self) -> None:
        """Take over the worker that the last daemon started, or start it if that daemon had no time to."""
        job = self.job
        self.following.record_fallback(job)
        if not self._runner.adopt(job.id, job.attempt.number, job.attempt.start):
            self._start_again()
            return
        if job.attempt.staged_at is not None and job.attempt.num_starts == 1:
            self.let_through()  # the last daemon may have had no time to
        if job.stop is not None:
            self.deadlines.ask(job.stop)

    def _start_again(self) -> None:
        """Make a start again that ended before a worker began, unless too many in a row have."""
        job = self.job
        if job.stop is not None or job.num_unreached >= MAX_UNREACHED:
            self.not_started = UnreachedError("it was stopped before it reached its worker")
            return
        log.warning("job %d (%s): its start reached no worker, and is made again", job.id, job.name)
        changed = job.with_attempt(first_start=job.attempt.first_start + 1)
        self.job = self._spool.update(changed, num_unreached=job.num_unreached + 1)
        self.launch()

    def stop(self, why: Stop, preemption: str = "", *, cut: Cut | None = None) -> None:
        """Ask it to stop; the reason is durable first. Cancel outranks hold, hold its sweep's halving, halving preempt,
        and preempt shutdown.

        `preemption`: the reason of one, for people; `cut`: that of its sweep.
        """
        rank = [Stop.SHUTDOWN, Stop.PREEMPT, Stop.HALVE, Stop.HOLD, Stop.CANCEL]
        if self.job.stop is not None and rank.index(why) <= rank.index(self.job.stop):
            return
        if why is Stop.PREEMPT:
            preempted = Preemption(preemption, self.job.attempt.ran_sec(Moment.now()))
            self.job = self._spool.update(self.job.with_attempt(preemption=preempted), stop=why)
            kind: dict[str, object] = about(self.job, message.PREEMPTED)
            log.info("job %d (%s): preempted: %s", self.job.id, self.job.name, preemption, extra=kind)
        elif cut is not None:
            self.update(stop=why, cut=cut)
            kind = about(self.job, message.STOPPED_EARLY, step=cut.step)
            log.info("job %d (%s): its sweep stops it: %s", self.job.id, self.job.name, cut.words, extra=kind)
        else:
            self.update(stop=why)
            log.info("job %d (%s): stop requested (%s)", self.job.id, self.job.name, why)
        if self.is_alive:
            self.deadlines.ask(why)

    def enforce(self, now: float) -> None:
        """Enforce its deadlines."""
        if self._waits_at_gate:
            self.let_through()
        if self.is_alive:
            self.deadlines.enforce(now, told_at=self.following.heard_at, stage=self.following.narrator.stage)
            self._keep_pauses()

    def _keep_pauses(self) -> None:
        new_sec = self.deadlines.paused_sec() - self.job.attempt.paused_sec
        if new_sec >= (KEEP_SEC if self.deadlines.is_suspended else 1.0):
            with contextlib.suppress(OSError):  # e.g. a full disk: tried again
                self.job = self._spool.update(self.job.with_attempt(paused_sec=self.job.attempt.paused_sec + new_sec))

    # -- its end ------------------------------------------------------------------------------------------------------

    def poll(self) -> Exit | None:
        """Return how its worker has ended; None while it is alive."""
        self.ended = self.ended or self._runner.poll(self.job.id)
        return self.ended

    def ended_at_gate(self, ended: Exit) -> bool:
        """Return True if its staged worker ended before it could use the device, and reported no error in the job."""
        attempt = self.job.attempt
        if attempt.staged_at is None or attempt.num_starts > 1 or self.job.stop is not None:
            return False
        was_early = ended.ended is not None and attempt.began.since(ended.ended) > 0
        stage, has_vanished = self.following.narrator.stage, ended.status is None and ended.signal is None
        if not was_early and stage != "staged" and not (has_vanished and stage in BEFORE_GATE):
            return False
        outcome = self._judge(ended)
        if was_early:
            return not is_of_job(outcome)
        return not outcome.phase or isinstance(outcome.error, error.InterruptedRunError)

    def conclude(self, ended: Exit, *, is_stopping: bool) -> Outcome | None:
        """Return the outcome of the attempt; None if it goes on with another backend. `is_stopping`: honed ends."""
        self.following.sync(self.job)
        outcome = self.deadlines.explain(
            self._judge(ended), ended, is_asked=self.job.stop is not None, stage=self.following.narrator.stage
        )
        if self.job.stop is None and (why := self._why_stopped(outcome, ended, is_stopping=is_stopping)) is not None:
            self.update(stop=why)
        if self.job.stop is None and ending.may_fall_back(self._layout, self.job, outcome):
            self._fall_back(outcome)
            self.ended = None
            return None
        continues_later = self.job.stop in {Stop.HOLD, Stop.PREEMPT, Stop.SHUTDOWN}
        if continues_later and ending.may_fall_back(self._layout, self.job, outcome):
            # Unsloth gave up while the job was asked to stop: the job continues without Unsloth when it starts again.
            self.job = self._spool.update(self.job.with_attempt(backend="transformers", num_starts=2))
            stopped = error.InterruptedRunError("stopped on request, before falling back from Unsloth to transformers")
            outcome = replace(outcome, code=stopped.code, error=stopped)
        return outcome

    def _judge(self, ended: Exit) -> Outcome:
        result_path = self._layout.files(self.job.id).attempt(self.job.attempt.number).result_path
        try:
            # The files that a worker has written may be the reason why its end cannot be judged: then they are not
            # read.
            return judge(result_path, ended, is_readable=self._num_failed_judgements < MAX_FAILED_JUDGEMENTS)
        except OSError as problem:
            # A worker can take the permission from its own result. With any other fault of the machine the job waits.
            self._num_unread += problem.errno in durable.OWNERS_ERRNOS
            if self._num_unread < MAX_UNREAD:
                raise
            return judge(result_path, ended, is_readable=False)
        except Exception:
            self._num_failed_judgements += 1
            raise

    def _why_stopped(self, outcome: Outcome, ended: Exit, *, is_stopping: bool) -> Stop | None:
        """Return the kind of a stop that honed did not ask for: SHUTDOWN (the machine or honed ends) or HOLD (a
        person)."""
        if outcome.code != "interrupted" and not (outcome.code == "killed" and ended.was_asked):
            return None
        is_after_pause = ended.is_after_pause and outcome.code == "interrupted" and not ended.was_asked
        if is_after_pause or is_stopping or ended.is_machine_going_down or self._runner.is_machine_going_down():
            return Stop.SHUTDOWN
        return Stop.HOLD if ended.was_asked else None

    def _fall_back(self, outcome: Outcome) -> None:
        """Start a new process without Unsloth, which cannot run the job as planned; no attempt is used up."""
        reason, public_reason = (outcome.error.message, outcome.error.shown) if outcome.error else ("", "")
        log.warning(
            "job %d (%s): falls back to transformers: %s",
            self.job.id,
            self.job.name,
            reason,
            extra=about(self.job, message.FALLBACK, code=outcome.code),
        )
        fallback = Fallback(time.time(), public_reason)
        changed = self.job.with_attempt(backend="transformers", num_starts=2, fallback=fallback)
        self.job = self._spool.update(changed, num_unreached=1)
        with contextlib.suppress(sqlite3.Error):  # recorded when the job is adopted, or caught up with
            self.following.record_fallback(self.job)
        self.deadlines.start_again()
        self.launch()


def is_of_job(outcome: Outcome) -> bool:
    """Return True if a worker said that the job itself is in error, which would end it at its turn, too."""
    return bool(outcome.phase) and isinstance(outcome.error, error.DatasetError | error.ModelError | error.SpecError)


def worker_environment(layout: Layout, config: Config, job: Job, gpu_uuid: str | None) -> dict[str, str]:
    """Return what honed adds to a worker's environment."""
    left_sec = None
    if job.time_limit_sec is not None:
        left_sec = max(0.0, job.time_limit_sec - sum(attempt.spent_sec for attempt in job.attempts[:-1]))
    return {
        **device_environment(gpu_uuid),
        "HF_HOME": os.environ.get("HF_HOME", str(layout.cache_dir)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "HONED_JOB": str(job.id),
        "HONED_MIN_STALL_SEC": f"{config.jobs.min_stall_timeout_sec:g}",
        "HONED_STOP_TIMEOUT_SEC": f"{config.jobs.stop_timeout_sec:g}",
        **({RANKS_VARIABLE: str(num_ranks)} if (num_ranks := job.num_gpus // job.num_nodes) > 1 else {}),
        **({NODES_VARIABLE: str(job.num_nodes)} if job.num_nodes > 1 else {}),
        **({PROFILE_VARIABLE: job.profile} if job.profile is not None else {}),
        **({TIME_LEFT_VARIABLE: f"{left_sec:g}"} if left_sec is not None else {}),
    }


def device_environment(gpu_uuids: str | None) -> dict[str, str]:
    """Return the part of a worker's environment that names its devices, separated by commas."""
    return {"CUDA_VISIBLE_DEVICES": gpu_uuids or ""}


def write_adjustments(layout: Layout, job: Job) -> None:
    """Write a job's out-of-memory adjustments for its worker; the entry has the authoritative ones. Raises OSError."""
    path = layout.files(job.id).adjustments_path
    if job.adjustments:
        untrusted.write_plain(path, durable.as_json([asdict(adjustment) for adjustment in job.adjustments]))
    else:
        untrusted.remove(path)


def gpu_of(attempt: Attempt) -> str | None:
    """Return the GPUs of an attempt as CUDA_VISIBLE_DEVICES names them; None without any."""
    return attempt.device if attempt.device not in {"cpu", "mps"} else None


def keys_of(devices: Sequence[Device]) -> str:
    """Return devices as entries and CUDA_VISIBLE_DEVICES name them."""
    return ",".join(device.uuid or device.kind for device in devices)


def names_of(devices: Sequence[Device]) -> str:
    """Return devices for people: `NVIDIA H100`, `2 × NVIDIA H100 (GPU 0, GPU 1)`."""
    if len(devices) == 1:
        return devices[0].name
    return f"{len(devices)} × {devices[0].name} ({', '.join(device.label for device in devices)})"


def next_number(job: Job) -> int:
    """Return the number of a job's next attempt."""
    return job.attempts[-1].number + 1 if job.attempts else 1


def clear(layout: Layout, job: Job) -> None:
    """Remove what a worker that was dropped before its turn has left in the directory of the next attempt."""
    attempt = layout.files(job.id).attempt(next_number(job))
    for path in (attempt.events_path, attempt.log_path, attempt.result_path, attempt.pulse_path):
        try:
            untrusted.remove(path)
        except OSError as problem:
            log.warning("job %d (%s): %s of its staged worker stays: %s", job.id, job.name, path.name, problem)
