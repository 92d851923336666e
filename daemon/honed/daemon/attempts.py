"""The running jobs: starts their attempts, follows their events, and settles how they ended.

queued ── start ──► running ── event lines ──► database, log ── exit and result ──► outcome ──► another state

Attempts ─┬─ Running ─┬─ Following   its events: outbox, database, log
          │           └─ Deadlines   its pulse; when it is asked to stop, dumped, killed
          └─ Settling   the next state of a job whose worker has ended
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

from honed.daemon.following import Following
from honed.daemon.pace import Pace
from honed.daemon.running import Running, Staged, clear, keys_of, names_of, next_number
from honed.daemon.settling import Settling
from honed.daemon.shares import Use
from honed.job import recovery, row_cache
from honed.job.database import Database
from honed.job.event import Event
from honed.job.job import Attempt, Job, State, Stop
from honed.job.row_cache import RowCache
from honed.job.spool import Spool
from honed.run import ending
from honed.run.deadline import Deadlines
from honed.run.runner import Runner
from honed.send.outbox import Outbox
from honed.spec.config import Config
from honed.system import message
from honed.system.clock import Moment
from honed.system.device import Device
from honed.system.failures import Failures
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.pauses import noted_sec

log = logging.getLogger(__name__)


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
        failures: Failures | None = None,
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
        self.rows = RowCache(
            layout,
            lambda: self.config.retention.max_row_bytes,
            working=lambda: {job.id: job.uid for job in spool.with_worker()},
        )
        self._settling = Settling(layout, lambda: self.config, spool, database, self.rows, self.running)
        self.failures = failures or Failures(log)  #: of single jobs' steps
        self.is_stopping = False  #: honed itself was asked to stop
        self._unadopted: dict[int, Job] = {}  # not taken over yet, for an error
        self._pace = Pace()

    def is_left(self, job_id: int) -> bool:
        """Return True if a running job continues while honed is down."""
        return self._runner.is_left(job_id)

    def devices_in_use(self) -> set[str]:
        """Return the devices of all running jobs; an empty name for one whose devices are not known."""
        return {key for running in self.running.values() for key in running.job.attempt.devices or ("",)}

    def in_use(self) -> Iterator[Use]:
        """Yield what every running job takes of the devices."""
        now = Moment.now()
        for running in self.running.values():
            sec = running.job.attempt.ran_sec(now) * max(1, running.job.num_gpus)
            yield Use(running.job.uid, sec)

    def has_room(self, job: Job) -> bool:
        """Return True if the free disk space that a job waits for is available."""
        return ending.has_room(self._layout, job, job.needs_bytes)

    # -- start --------------------------------------------------------------------------------------------------------

    def start(
        self,
        job: Job,
        devices: Sequence[Device],
        backend: str,
        staged: Staged | None = None,
        *,
        passed: Sequence[int] = (),
    ) -> Running:
        """Start a job's next attempt. It moves to running/ first, and counts the start: a crash after that is a start
        that reached no worker, and is made again.

        `staged`: its worker, which waits at its gate; it is let through. `passed`: jobs that wait for more devices, and
        that it is started before.
        """
        number = next_number(job)
        now = Moment.now()
        if staged is None and job.next_start > 1:
            clear(self._layout, job)
        attempt = Attempt(
            number,
            backend,
            now.wall,
            device=keys_of(devices),
            passed=tuple(passed),
            started_monotonic=now.monotonic,
            boot_id=now.boot_id,
            first_start=staged.start if staged is not None else job.next_start,
            staged_at=staged.since if staged is not None else None,
            staged_paused_sec=noted_sec(self._layout.files(job.id).attempt(number).paused_path) if staged else 0.0,
        )
        offset = self._database.offset(job.id, number)  # an error here or in the move leaves the job in the queue
        job = self._spool.move(
            job,
            State.RUNNING,
            attempts=(*job.attempts, attempt),
            num_unreached=job.num_unreached + (staged is None),
            stop=None,
            outcome=None,
            error=None,
            remark="",
            needs_bytes=0,
        )
        running = self._add(job, offset)
        log.info(
            "job %d (%s): attempt %d starts on %s with %s%s",
            job.id,
            job.name,
            number,
            names_of(devices),
            backend,
            ", staged before" if staged is not None else "",
            extra=about(job, message.STARTED, attempt=number, backend=backend),
        )
        if staged is not None:
            running.let_through()
        else:
            running.launch()
        return running

    def adopt(self, job: Job) -> None:
        """Take over a job that was running when the last daemon ended, whether its worker is alive or not; after an
        error, in a later pass."""
        self._unadopted[job.id] = job
        with self._alone(job):
            self._add(job, self._database.offset(job.id, job.attempt.number)).adopt()
            del self._unadopted[job.id]
        if job.id in self._unadopted:
            self.running.pop(job.id, None)

    def _add(self, job: Job, offset: int) -> Running:
        def config() -> Config:
            return self.config

        self._database.put_job(job)
        following = Following(
            job, offset, self._layout, self._database, lambda: self.outbox, clock=self._clock, heard=self._hear
        )
        deadlines = Deadlines(job, self._layout, self._runner, config, clock=self._clock)
        running = Running(job, following, deadlines, self._layout, self._spool, self._runner, config, self.rows)
        self.running[job.id] = running
        return running

    def _hear(self, job: Job, item: Event) -> None:
        if item.kind == "rows":
            self.rows.take(job, row_cache.names(item.data))

    # -- while they run -----------------------------------------------------------------------------------------------

    def stop(self, job_id: int, why: Stop) -> None:
        """Ask a running job to stop; see `Running.stop`."""
        self.running[job_id].stop(why)

    def preempt(self, job_id: int, reason: str) -> None:
        """Ask a running job to write a checkpoint and return to the queue. `reason`, for people, becomes durable first:
        `the hours of GPU 0 ended`. Without effect if the job was preempted, held or cancelled before."""
        self.running[job_id].stop(Stop.PREEMPT, reason)

    def check_entries(self) -> None:
        """Write the entries of running jobs again that somebody else has removed or damaged."""
        for running in self.running.values():
            with self._alone(running.job):
                running.job = recovery.renewed(self._spool, running.job)

    def enforce(self) -> None:
        """Kill workers that were asked to stop and did not; dump the stacks of hanging workers, then kill them."""
        now = self._clock()
        for running in self.running.values():
            with self._alone(running.job):
                running.enforce(now)

    def follow(self) -> None:
        """Read the events that the workers have reported since the last pass, by turns: those of one job, which writes
        them as fast as it can, hold up neither the others' nor the loop."""
        order, num_read = list(self.running), 0
        with self._pace.step():
            for number in order:
                running = self.running[number]
                if self._may_read(running):
                    with self._alone(running.job):
                        running.following.read(running.job, sec=self._pace.left_sec)
                num_read += 1
                if self._pace.is_over:
                    break
        for number in order[: num_read % len(order)] if order else ():  # the others first in the next pass
            self.running[number] = self.running.pop(number)

    def _may_read(self, running: Running) -> bool:
        return self.is_stopping or not (running.following.has_more and self._pace.is_resting)

    def patience(self) -> float:
        """Return the seconds until more events can be read; infinite if there are none."""
        rest_sec = self._pace.rest()
        if not any(running.following.has_more for running in self.running.values()):
            return math.inf
        return 0.0 if self.is_stopping else rest_sec

    def _alone(self, job: Job) -> contextlib.AbstractContextManager[None]:
        return self.failures.alone(f"job {job.id} ({job.name})")

    # -- end ----------------------------------------------------------------------------------------------------------

    def reap(self) -> list[Job]:
        """Settle the jobs whose workers have ended. Returns them in their new state."""
        settled = list[Job]()
        for unadopted in list(self._unadopted.values()):
            self.adopt(unadopted)
        with self._pace.step():
            for running in filter(self._may_read, list(self.running.values())):
                with self._alone(running.job):
                    job = self._settling.settle(running, sec=self._pace.left_sec, is_stopping=self.is_stopping)
                    if job is not None:
                        settled.append(job)
        return settled

    def put_back(self) -> list[Job]:
        """Return the jobs put back since the last call because their workers could not be started."""
        jobs, self._settling.put_back = self._settling.put_back, []
        return jobs
