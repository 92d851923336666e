"""The running jobs: starts their attempts, follows their events, and settles how they ended.

    queued ── start ──► running ── event lines ──► database, log ── exit and result ──► outcome ──► another state

State that must survive a kill of the daemon is written to the entry first: a job lies in running/ before its worker
starts, and its entry has the reason of a stop before its worker is asked to stop.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from honed.daemon import rebuild
from honed.job import event, out_of_memory
from honed.job.database import Database
from honed.job.job import Adjustment, Attempt, Fallback, Job, State, Stop
from honed.job.narration import Narrator
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.run.outcome import Outcome, judge
from honed.run.runner import Exit, NotNowError, Runner
from honed.send.outbox import Outbox
from honed.spec.config import Config
from honed.system import durable, error, message, untrusted
from honed.system.clock import Moment
from honed.system.device import Device
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import of_error

log = logging.getLogger(__name__)

#: Seconds that a cancelled worker has to end by itself.
CANCEL_TIMEOUT_SEC = 30.0
#: Seconds between the dump of a hanging worker's stacks and its end.
DUMP_SEC = 5.0
#: Bytes of events that are still read after a worker has ended: a file can be endless.
MAX_REST_BYTES = 512 * 2**20
#: Passes of the loop after which an unreadable result is treated as none.
MAX_UNREAD = 60
#: Unforeseen failures in one job's steps, before the job is settled by its exit status alone.
MAX_FAILED_STEPS = 5
#: Errors that keep a worker from starting although its job and its program are in order.
MACHINE_ERRNOS = durable.MACHINE_ERRNOS | {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


@dataclass
class Running:
    """The daemon's knowledge of a running job beyond its entry; all of it may be lost."""

    job: Job
    offset: int
    narrator: Narrator
    heard_at: float  #: monotonic seconds
    kill_at: float | None = None
    was_killed: bool = False
    ended: Exit | None = None
    is_stalled: bool = False
    beat_at_ns: int = 0  #: the pulse file's time when it was last looked at
    phase: str = ""  #: the worker's phase, from its pulse file
    learned_sec: float | None = None  #: how long it may be silent in that phase, learned from its own steps
    overdue_at: float | None = None  #: monotonic seconds at which its time limit and the grace period are over
    is_overdue: bool = False
    are_earlier_counted: bool = True  #: False if an earlier attempt's events may be missing from the database
    put_out: event.Reading | None = None  #: in the outbox, and not in the database yet
    read_fault: str = ""  #: why its events could not be read; logged once
    num_unread: int = 0  #: passes in which its result could not be read
    num_failed_steps: int = 0  #: unforeseen failures
    not_started: OSError | None = None  #: why it has no worker; settled in the next pass


class Attempts:
    """The running jobs, by number. `clock` is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        config: Config,
        spool: Spool,
        database: Database,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self.config = config
        self._spool = spool
        self._database = database
        self._runner = runner
        self._clock = clock
        self.outbox: Outbox | None = None  #: where a metrics API is configured
        self.running: dict[int, Running] = {}
        self._put_back: list[Job] = []
        self.fault = ""  #: the machine's fault that keeps a job from being settled or followed
        self.is_stopping = False  #: honed itself was asked to stop

    # -- start --------------------------------------------------------------------------------------------------------

    def start(self, job: Job, device: Device, backend: str) -> None:
        """Start a job's next attempt. It moves to running/ first: a crash after that is an attempt that vanished."""
        number = job.attempts[-1].number + 1 if job.attempts else 1
        now = Moment.now()
        attempt = Attempt(
            number,
            backend,
            now.wall,
            device=device.uuid or device.kind,
            started_monotonic=now.monotonic,
            boot_id=now.boot_id,
        )
        offset = self._database.offset(job.id, number)  # an error here or in the move leaves the job in the queue
        job = self._spool.move(
            job,
            State.RUNNING,
            attempts=(*job.attempts, attempt),
            stop=None,
            outcome=None,
            error=None,
            remark="",
            needs_bytes=0,
        )
        self._follow(job, offset)
        log.info(
            "job %d (%s): attempt %d starts on %s with %s",
            job.id,
            job.name,
            number,
            device.name,
            backend,
            extra=about(job, message.STARTED, attempt=number, backend=backend),
        )
        self._launch(job, device.uuid)

    def _launch(self, job: Job, gpu_uuid: str | None) -> None:
        attempt = job.attempt
        try:
            self._write_adjustments(job)
        except OSError as problem:
            self.running[job.id].not_started = NotNowError(f"what it is to do cannot be written: {problem}")
            return
        environment = {
            "CUDA_VISIBLE_DEVICES": gpu_uuid or "",
            "HF_HOME": os.environ.get("HF_HOME", str(self._layout.cache_dir)),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "HONED_JOB": str(job.id),
            "HONED_MIN_STALL_SEC": f"{self.config.jobs.min_stall_timeout_sec:g}",
        }
        try:
            self._runner.start(
                job.id, attempt.number, attempt.num_starts, backend=attempt.backend, environment=environment
            )
        except OSError as problem:
            self.running[job.id].not_started = problem

    def _write_adjustments(self, job: Job) -> None:
        """Write the out-of-memory adjustments for the worker; the entry has the authoritative ones."""
        path = self._layout.job(job.id).adjustments_path
        if job.adjustments:
            durable.write_json(path, [asdict(each) for each in job.adjustments])
        else:
            path.unlink(missing_ok=True)

    def _settle_unstarted(self, running: Running, problem: OSError) -> Job | None:
        """Put a job back if its worker was not started for no fault of its own; else settle the attempt as failed."""
        job = running.job
        if isinstance(problem, NotNowError) or problem.errno in MACHINE_ERRNOS:
            self._not_now(job, problem)
            return None
        log.error("job %d (%s): its worker cannot be started: %s", job.id, job.name, problem)
        failure = error.EnvironmentInvalidError(f"the worker cannot be started: {problem}", hint="honectl doctor")
        return self._settle(running, Outcome(failure.code, failure))

    def _not_now(self, job: Job, problem: OSError) -> None:
        """Put back a job whose worker was not started; remove the attempt, unless its first start did run."""
        attempts = job.attempts[:-1]
        if job.attempt.num_starts > 1:  # the first start of the attempt did run
            took_sec = self._took_sec(job, None)
            attempts = job.with_attempt(ended_at=time.time(), outcome="interrupted", took_sec=took_sec).attempts
        if job.stop is Stop.CANCEL:
            job = self._spool.move(job, State.CANCELLED, attempts=attempts, outcome="cancelled", stop=None)
        else:
            state = State.HELD if job.stop is Stop.HOLD else State.QUEUED
            job = self._spool.move(job, state, attempts=attempts, stop=None)
        log.warning("job %d (%s): %s; tried again later", job.id, job.name, problem)
        del self.running[job.id]
        self._database.put_job(job)
        self._put_back.append(job)

    def put_back(self) -> list[Job]:
        """Return the jobs put back since the last call because their workers could not be started."""
        jobs, self._put_back = self._put_back, []
        return jobs

    def adopt(self, job: Job) -> None:
        """Take over a job that was running when the last daemon ended, whether its worker is alive or not."""
        self._follow(job, self._database.offset(job.id, job.attempt.number))
        self._tell_fallback(job)
        if not self._runner.adopt(job.id, job.attempt.number, job.attempt.num_starts):
            # The last daemon ended after it had written the entry and before it started the worker.
            if job.stop is not None:
                self.running[job.id].not_started = NotNowError("asked to stop before it was started")
                return
            self._launch(job, job.attempt.device if job.attempt.device not in {"cpu", "mps"} else None)
            return
        if job.stop is not None:
            self._ask(self.running[job.id], job.stop)

    def _follow(self, job: Job, offset: int) -> None:
        self._database.put_job(job)
        self.running[job.id] = Running(
            job, offset, Narrator(log, self._clock), heard_at=self._clock(), overdue_at=self._overdue_at(job)
        )
        self.running[job.id].are_earlier_counted = len(job.attempts) == 1

    def _overdue_at(self, job: Job) -> float | None:
        """Return when an attempt, started or taken over now, has used up the time limit and the grace period."""
        if job.time_limit_sec is None:
            return None
        spent = _spent_before(job) + Moment.now().since(job.attempt.began)
        return self._clock() + max(0.0, job.time_limit_sec - spent) + self.config.jobs.time_limit_grace_sec

    def _was_overdue(self, job: Job, ended: Exit) -> bool:
        """Return True if a worker that was asked to stop had used up its time; honed was down then, or was killed
        since.

        This derives `is_overdue` from what is durable.
        """
        if job.time_limit_sec is None or ended.ended is None or not ended.was_asked:
            return False
        if ended.is_machine_going_down:
            return False
        spent = _spent_before(job) + self._took_sec(job, ended)
        return spent >= job.time_limit_sec + self.config.jobs.time_limit_grace_sec

    def _took_sec(self, job: Job, ended: Exit | None) -> float:
        """Return the seconds that the latest attempt has taken: until its worker's recorded end, else until now.

        If the machine went down meanwhile: until the last sign of life. The time while the machine was off does not
        count.
        """
        began, until = job.attempt.began, Moment.now()
        if ended is not None and ended.ended is not None:
            until = ended.ended
        elif not until.is_of_boot(began):
            pulse_path = self._layout.job(job.id).attempt(job.attempt.number).pulse_path
            try:
                until = Moment(pulse_path.lstat().st_mtime)
            except OSError:
                until = began  # it never gave a sign of life
        return until.since(began)

    def is_left(self, job_id: int) -> bool:
        """Return True if a running job continues while honed is down."""
        return self._runner.is_supervised(job_id)

    def devices_in_use(self) -> set[str]:
        return {running.job.attempt.device or "" for running in self.running.values()}

    # -- stop ---------------------------------------------------------------------------------------------------------

    def stop(self, job_id: int, why: Stop) -> None:
        """Ask a running job to stop; the reason is durable first. Cancel outranks hold, hold outranks shutdown."""
        running = self.running[job_id]
        rank = [Stop.SHUTDOWN, Stop.HOLD, Stop.CANCEL]
        if running.job.stop is None or rank.index(why) > rank.index(running.job.stop):
            running.job = self._spool.update(running.job, stop=why)
            log.info("job %d (%s): asked to stop (%s)", job_id, running.job.name, why)
            self._ask(running, why)

    def _ask(self, running: Running, why: Stop) -> None:
        if running.ended is not None or running.not_started is not None:
            return
        self._runner.stop(running.job.id)
        if self._runner.is_supervised(running.job.id) and why is not Stop.CANCEL:
            return  # the unit's own stop timeout applies; a worker that writes its checkpoint extends it
        patience = CANCEL_TIMEOUT_SEC if why is Stop.CANCEL else self.config.jobs.stop_timeout_sec
        running.kill_at = self._clock() + min(patience, self.config.jobs.stop_timeout_sec)

    def enforce(self) -> None:
        """Kill workers that were asked to stop and did not; dump the stacks of hanging workers, then kill them."""
        now = self._clock()
        for running in self.running.values():
            if running.ended is not None or running.not_started is not None:
                continue
            self._feel_pulse(running, now)
            if running.kill_at is not None and now >= running.kill_at:
                log.warning("job %d (%s): killed: it did not end by itself", running.job.id, running.job.name)
                self._runner.kill(running.job.id, shim_too=running.was_killed)
                running.was_killed = True
                running.kill_at = now + DUMP_SEC
            elif running.overdue_at is not None and now >= running.overdue_at and not running.is_overdue:
                log.warning(
                    "job %d (%s): its time limit is over, and it did not end by itself; asked to stop",
                    running.job.id,
                    running.job.name,
                )
                running.is_overdue = True
                self._ask(running, Stop.HOLD)
                running.kill_at = now + self.config.jobs.stop_timeout_sec
            elif running.kill_at is None and self._is_stalled(running, now):
                log.warning(
                    "job %d (%s): no sign of life for %.0f s in %s; it hangs",
                    running.job.id,
                    running.job.name,
                    now - running.heard_at,
                    running.phase or running.narrator.stage,
                )
                running.is_stalled = True
                running.kill_at = now + DUMP_SEC
                self._runner.dump(running.job.id)

    def _is_stalled(self, running: Running, now: float) -> bool:
        """Return True if a worker gave no sign of life for too long; False for units, whose own watchdog hears more."""
        if self._runner.is_supervised(running.job.id):
            return False
        jobs = self.config.jobs
        learned_sec = jobs.stall_timeout_sec if running.learned_sec is None else running.learned_sec
        limit_sec = min(jobs.stall_timeout_sec, max(jobs.min_stall_timeout_sec, learned_sec))
        return now - running.heard_at >= limit_sec

    def _feel_pulse(self, running: Running, now: float) -> None:
        """Note whether the worker has moved since the last look; its pulse comes more often than its events."""
        path = self._layout.job(running.job.id).attempt(running.job.attempt.number).pulse_path
        try:
            beat_at_ns = path.lstat().st_mtime_ns
            if beat_at_ns == running.beat_at_ns:
                return
            # A pulse from before this daemon's start says nothing of now, and setting the clock must not move a
            # deadline.
            running.beat_at_ns, running.heard_at = beat_at_ns, now
            told = json.loads(untrusted.read_plain(path, max_bytes=4096))
            learned_sec = told.get("limit_sec")
            is_number = isinstance(learned_sec, int | float) and learned_sec > 0
            running.phase, running.learned_sec = str(told.get("phase", ""))[:32], learned_sec if is_number else None
        except (OSError, ValueError, AttributeError):
            return  # there is no pulse file yet, or it is being written

    # -- follow -------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Read the events that the workers have reported since the last pass."""
        for running in self.running.values():
            with self._alone(running):
                self._read_events(running)

    def _read_events(self, running: Running) -> int:
        if not running.are_earlier_counted:
            # The database may lack the end of an earlier attempt; if it were counted after this one's events, it would
            # overwrite them.
            rebuild.count(self._database, self._layout, running.job, len(running.job.attempts) - 1)
            running.are_earlier_counted = True
        path = self._layout.job(running.job.id).attempt(running.job.attempt.number).events_path
        # A reading that the database did not take is offered again unchanged: the outbox has it already.
        try:
            reading = running.put_out or event.read(path, running.offset)
        except OSError as problem:
            # A link, a pipe, or a file that we may not read: caused by the worker itself, or by the disk.
            if str(problem) != running.read_fault:
                log.warning("job %d (%s): its events cannot be read: %s", running.job.id, running.job.name, problem)
            running.read_fault = str(problem)
            return 0
        running.read_fault = ""
        if reading.offset == running.offset:
            return 0
        if reading.num_bad:
            log.warning("job %d (%s): %d lines that are no events", running.job.id, running.job.name, reading.num_bad)
        # The outbox first: a crash in between sends a row twice, under one key; the other way round it would be lost.
        num_lost = 0
        if self.outbox is not None and running.put_out is None:
            num_lost = self.outbox.put(running.job, reading)
            running.put_out = None if num_lost else reading
        self._database.apply(running.job, reading)
        running.put_out = None
        if self.outbox is not None:
            self.outbox.lose(num_lost)
        num_bytes, running.offset = reading.offset - running.offset, reading.offset
        running.heard_at = self._clock()
        for item in reading.events:
            running.narrator.tell(running.job, item)
        return num_bytes

    # -- reap ---------------------------------------------------------------------------------------------------------

    def reap(self) -> list[Job]:
        """Settle the jobs whose workers have ended. Returns them in their new state."""
        settled = []
        self.fault = ""
        for running in list(self.running.values()):
            with self._alone(running):
                if running.not_started is not None:
                    if (job := self._settle_unstarted(running, running.not_started)) is not None:
                        settled.append(job)
                    continue
                running.ended = running.ended or self._runner.poll(running.job.id)
                if running.ended is not None and (job := self._reap(running, running.ended)) is not None:
                    settled.append(job)
        return settled

    @contextlib.contextmanager
    def _alone(self, running: Running) -> Iterator[None]:
        """Log an unforeseen error in one job's step, to be tried again; other jobs are not affected."""
        try:
            yield
        except Exception as problem:
            if fault := durable.machine_fault(problem):
                self.fault = fault  # reported by the loop, and tried again until it is fixed
            else:
                log.exception("job %d (%s): a step failed", running.job.id, running.job.name)
                running.num_failed_steps += 1

    def _reap(self, running: Running, ended: Exit) -> Job | None:
        is_counted = self._read_the_rest(running)
        attempt = self._layout.job(running.job.id).attempt(running.job.attempt.number)
        try:
            untrusted.sync_plain(
                attempt.events_path
            )  # a worker that was killed has not; honed.db may have them already
        except FileNotFoundError:
            pass
        except OSError as problem:
            log.warning(
                "job %d (%s): its events may not outlast a power cut: %s", running.job.id, running.job.name, problem
            )
        result_path = attempt.result_path
        try:
            # The files that a worker has written may be the reason why its end cannot be judged: then they are not
            # read.
            outcome = judge(result_path, ended, is_readable=running.num_failed_steps < MAX_FAILED_STEPS)
        except OSError:
            running.num_unread += 1
            if running.num_unread < MAX_UNREAD:
                raise
            outcome = judge(result_path, ended, is_readable=False)
        if running.is_stalled and not outcome.is_success:
            outcome = replace(
                outcome,
                code="stalled",
                error=error.StalledError(
                    f"no sign of life in {running.phase or running.narrator.stage}", hint="its stacks are in its log"
                ),
            )
        is_overdue = running.is_overdue or self._was_overdue(running.job, ended)
        if is_overdue and running.job.stop is None and not outcome.is_success:
            late = error.TimeLimitError(
                f"time limit of {running.job.time_limit_sec:g} s reached, and it did not end by itself",
                hint="its last checkpoint is kept; its log shows where it was: honectl logs --raw",
            )
            outcome = replace(outcome, code=late.code, error=late)
        if running.job.stop is None and (why := self._why_stopped(outcome, ended)) is not None:
            running.job = self._spool.update(running.job, stop=why)
        if self._falls_back(running, outcome):
            running.ended = None
            return None
        if running.job.stop in {Stop.HOLD, Stop.SHUTDOWN} and self._may_fall_back(running.job, outcome):
            # Unsloth gave up while the job was asked to stop: the job continues without Unsloth when it starts again.
            running.job = self._spool.update(running.job.with_attempt(backend="transformers", num_starts=2))
            stopped = error.InterruptedRunError("stopped on request, before Unsloth gave way to transformers")
            outcome = replace(outcome, code=stopped.code, error=stopped)
        return self._settle(running, outcome, is_counted=is_counted)

    def _why_stopped(self, outcome: Outcome, ended: Exit) -> Stop | None:
        """Return the kind of a stop that honed did not ask for: SHUTDOWN (the machine or honed ends) or HOLD (a
        person)."""
        if outcome.code != "interrupted" and not (outcome.code == "killed" and ended.was_asked):
            return None
        if self.is_stopping or ended.is_machine_going_down or self._runner.is_machine_going_down():
            return Stop.SHUTDOWN
        return Stop.HOLD if ended.was_asked else None

    def _read_the_rest(self, running: Running) -> bool:
        """Read the last events of a worker that has ended. Returns False if some remain to be counted later.

        Events that cannot be counted now are logged and block nothing.
        """
        left = MAX_REST_BYTES
        try:
            while left > 0 and (num_bytes := self._read_events(running)):
                left -= num_bytes
            if left <= 0:
                log.warning(
                    "job %d (%s): not all of its last events are counted: there are more than %d MiB of them",
                    running.job.id,
                    running.job.name,
                    MAX_REST_BYTES // 2**20,
                )
        except Exception:
            log.exception("job %d (%s): its last events are not counted", running.job.id, running.job.name)
            return False
        return not running.read_fault  # a disk may return them in a moment

    def _falls_back(self, running: Running, outcome: Outcome) -> bool:
        """Start a new process without Unsloth if Unsloth cannot run the job as planned; no attempt is used up."""
        asked = running.job.stop
        if asked is not None or not self._may_fall_back(running.job, outcome):
            return False
        reason, told = (outcome.error.message, outcome.error.told) if outcome.error else ("", "")
        log.warning(
            "job %d (%s): falls back to transformers: %s",
            running.job.id,
            running.job.name,
            reason,
            extra=about(running.job, message.FALLBACK, code=outcome.code),
        )
        fallback = Fallback(time.time(), told)
        running.job = self._spool.update(
            running.job.with_attempt(backend="transformers", num_starts=2, fallback=fallback)
        )
        with contextlib.suppress(sqlite3.Error):  # recorded when the job is adopted, or caught up with
            self._tell_fallback(running.job)
        device = running.job.attempt.device
        self._launch(running.job, device if device not in {"cpu", "mps"} else None)
        return True

    def _tell_fallback(self, job: Job) -> None:
        """Record the fallback of the latest attempt in the database, once."""
        if (told := rebuild.fallback_event(job)) is not None and not self._database.has_event(job, told.kind):
            offset = self._database.offset(job.id, job.attempt.number)
            self._database.apply(job, event.Reading([told], offset, 0))

    def _may_fall_back(self, job: Job, outcome: Outcome) -> bool:
        attempt = job.attempt
        if not outcome.is_worth_another_backend or attempt.backend != "unsloth" or attempt.num_starts > 1:
            return False
        return bool(PlanFile.read(self._layout.job(job.id).plan_path).spec.get("backend") != "unsloth")

    def _settle(self, running: Running, outcome: Outcome, *, is_counted: bool = True) -> Job:
        """Record how the attempt ended, and move the job to its next state."""
        told = running.narrator.progress.get("step")
        step = outcome.step if outcome.step is not None else told if isinstance(told, int) else 0
        took_sec = self._took_sec(running.job, running.ended)
        job = running.job.with_attempt(ended_at=time.time(), outcome=outcome.code, step=step, took_sec=took_sec)
        remedy = self._remedy(running, job, outcome)
        if remedy.error is not None:
            outcome = replace(outcome, error=remedy.error)
        state, changes = destination(job, outcome, remedy)
        job = self._spool.move(job, state, **changes)
        del self.running[running.job.id]
        if is_counted:
            self._database.put_job(job)
        else:
            self._database.is_behind = True
        is_well = (outcome.is_success and not job.remark) or state in {State.HELD, State.CANCELLED}
        level = logging.INFO if is_well else logging.WARNING
        why = f": {outcome.error.message}" if outcome.error is not None else f", but {job.remark}" * bool(job.remark)
        log.log(
            level,
            "job %d (%s): attempt %d: %s%s; now %s",
            job.id,
            job.name,
            job.attempt.number,
            outcome.code,
            why,
            state,
            extra=about(
                job,
                _kind(job, outcome),
                code=outcome.code,
                step=step,
                hint=outcome.error.hint if outcome.error else None,
            ),
        )
        if remedy.adjustment is not None and state in {State.QUEUED, State.HELD}:
            log.warning(
                "job %d (%s): memory ran out; the next attempt goes on with %s",
                job.id,
                job.name,
                remedy.adjustment.text,
                extra=about(job, message.ADJUSTED, code=outcome.code),
            )
        if job.needs_bytes and state in {State.QUEUED, State.HELD}:
            log.warning(
                "job %d (%s): waits for %d MiB of free space",
                job.id,
                job.name,
                job.needs_bytes >> 20,
                extra=about(job, message.WAITS_FOR_ROOM, code=outcome.code),
            )
        return job

    def _remedy(self, running: Running, job: Job, outcome: Outcome) -> Remedy:
        """Return what a job that ran out of memory or disk space changes from now on."""
        match outcome.code:
            case error.OutOfMemoryError.code:
                return self._smaller(running, job, outcome)
            case error.DiskShortError.code if outcome.needed_bytes:
                # If there is room already, another limit such as a quota was hit: that counts as a failure.
                return Remedy(needs_bytes=outcome.needed_bytes if not self.has_room(job, outcome.needed_bytes) else 0)
            case _:
                return Remedy()

    def _smaller(self, running: Running, job: Job, outcome: Outcome) -> Remedy:
        problem = outcome.error
        assert problem is not None
        try:
            plan = PlanFile.read(self._layout.job(job.id).plan_path)
            spec = out_of_memory.adjusted(plan.spec, job.adjustments)
            media = out_of_memory.Media.of(plan.memory)
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log.warning("job %d (%s): its plan cannot be read: %s", job.id, job.name, error.said(fault))
            return Remedy()
        wish = (spec.get("retry") or {}).get("on_out_of_memory", "adjust")
        if wish != "adjust":
            return Remedy(is_last=wish == "fail")
        was_killed = not outcome.phase  # by the kernel, perhaps because another process needed memory
        phase = outcome.phase or running.phase or running.narrator.stage
        step = out_of_memory.next_step(
            spec, attempt=job.attempt.number, phase=phase, is_sure=not was_killed, media=media
        )
        if step is not None:
            return Remedy(adjustment=step)
        if was_killed and phase in out_of_memory.WITHOUT_BATCHES:
            return Remedy()
        words = f"{problem.message}; in {phase}, {out_of_memory.end_words(job.adjustments)}"
        leave = out_of_memory.leave(spec, media) if phase not in out_of_memory.WITHOUT_BATCHES else None
        hint = f"{leave}; or {_NO_STEP_HINT}" if leave else _NO_STEP_HINT
        return Remedy(error=error.OutOfMemoryError(words, hint=hint), is_last=True)

    def has_room(self, job: Job, num_bytes: int | None = None) -> bool:
        """Return True if the free disk space that a job waits for is available."""
        try:
            found = os.statvfs(self._layout.job(job.id).dir)
        except OSError:
            return True  # its start will show it
        return found.f_bavail * found.f_frsize >= (job.needs_bytes if num_bytes is None else num_bytes)


def _spent_before(job: Job) -> float:
    """Return the seconds that the attempts before the latest one took."""
    return sum(each.spent_sec for each in job.attempts[:-1])


_NO_STEP_HINT = (
    "quantization: 4bit, a smaller max_length, a smaller model, or a device with more memory; honectl requeue tries"
    " again from the top"
)


@dataclass(frozen=True)
class Remedy:
    """The change that lets a job continue after it ran out of memory or disk space, or the error if there is none."""

    adjustment: Adjustment | None = None
    needs_bytes: int = 0
    is_last: bool = False  #: no further attempt
    error: error.HonedError | None = None  #: replaces the worker's own error


def destination(job: Job, outcome: Outcome, remedy: Remedy = Remedy()) -> tuple[State, dict[str, Any]]:  # noqa: B008
    """Return the state that a job moves to after an attempt, and the changes of its entry."""
    problem = outcome.error.as_dict() if outcome.error is not None else None
    if outcome.is_success:
        return State.SUCCEEDED, {"outcome": outcome.code, "error": None, "stop": None, "remark": outcome.remark}
    match job.stop:
        case Stop.CANCEL:
            return State.CANCELLED, {"outcome": "cancelled", "error": None, "stop": None}
        case Stop.HOLD if outcome.code in {"interrupted", "killed"}:
            return State.HELD, {"outcome": "interrupted", "error": None, "stop": None}
        case Stop.SHUTDOWN if outcome.code in {"interrupted", "killed"}:
            return State.QUEUED, {"outcome": "interrupted", "error": None, "stop": None}
        case None if outcome.code == "interrupted":
            # Somebody stopped the worker without honed: a person, so a person has to release the job.
            return State.HELD, {"outcome": "interrupted", "error": problem, "stop": None}
    again = State.HELD if job.stop is Stop.HOLD else State.QUEUED
    if remedy.adjustment is not None:  # a ladder has its own end, and uses up no attempt
        adjustments = (*job.adjustments, remedy.adjustment)
        return again, {"outcome": outcome.code, "error": problem, "stop": None, "adjustments": adjustments}
    if remedy.needs_bytes:
        return again, {"outcome": outcome.code, "error": problem, "stop": None, "needs_bytes": remedy.needs_bytes}
    num_failures = job.num_failures + 1
    changes = {"outcome": outcome.code, "error": problem, "stop": None, "num_failures": num_failures}
    is_transient = outcome.error is not None and (outcome.error.is_transient or outcome.needed_bytes > 0)
    if is_transient and not remedy.is_last and num_failures < job.max_attempts:
        return again, changes
    return State.FAILED, changes


def _kind(job: Job, outcome: Outcome) -> message.Message:
    """Return the message that explains the end of an attempt."""
    match job.state:
        case State.SUCCEEDED:
            return message.SUCCEEDED
        case State.CANCELLED:
            return message.CANCELLED
        case State.HELD if outcome.code == "interrupted":
            return message.HELD
        case _:
            return of_error(outcome.code)
