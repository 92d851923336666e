"""The staged workers: started ahead of their jobs' turns, while the devices are busy (see worker/gate.py).

    queued ── next for a busy device ──► staged ── its turn, and a device is free ──► running, through its gate
       ▲            (ahead.py)             │
       └── anything else: its worker is dropped, and no attempt is used
           (what it found wrong in a job that could start is an attempt that has failed)

A staged job lies in queued/, and its entry says so before the worker starts. Nothing of a staged worker is recovered:
the next honed ends those of the last one, and a job whose worker was dropped starts cold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from honed.daemon.attempts import Attempts
from honed.daemon.running import (
    MAX_UNREAD,
    Staged,
    clear,
    is_of_job,
    keys_of,
    names_of,
    next_number,
    worker_environment,
    write_adjustments,
)
from honed.job.ahead import NO_DEVICE_KEY, STAGED_VARIABLE
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.run.outcome import judge
from honed.run.pulse import Pulse
from honed.run.runner import Exit, Live, Runner
from honed.spec.config import Config
from honed.system.device import Device
from honed.system.error import InterruptedRunError, said
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds that a staged worker has to end by itself: it has nothing to save, and its job, or the end of honed, waits.
END_SEC = 5.0
#: Seconds between two kills of one that did not.
KILL_INTERVAL_SEC = 5.0
#: Seconds for which a device is kept for a job whose staged worker is to end.
MAX_END_SEC = END_SEC + 2 * KILL_INTERVAL_SEC
#: Device of an attempt that ended before it had one.
NO_DEVICE = Device("cpu", "no device", uuid=NO_DEVICE_KEY)


@dataclass
class Worker:
    """One staged worker."""

    job_id: int
    name: str  #: of its job
    staged: Staged
    pulse: Pulse
    asked_at: float | None = None  #: monotonic seconds; set once it was asked to end
    kill_at: float | None = None  #: likewise
    was_killed: bool = False
    unwanted_since: float | None = None
    ended: Exit | None = None  #: kept until it is settled: the runner reports it once
    ended_at: float | None = None  #: monotonic seconds
    num_failed: int = 0  #: turns in which it could not be settled

    def is_stuck(self, now: float) -> bool:
        """Return True if it should have ended long ago."""
        since = self.asked_at if self.asked_at is not None else self.ended_at
        return since is not None and now - since >= MAX_END_SEC

    def look(self, runner: Runner, now: float) -> None:
        """Look whether it has ended."""
        if self.ended is None and (ended := runner.poll(self.job_id)) is not None:
            self.ended, self.ended_at = ended, now

    def end(self, runner: Runner, now: float) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.kill_at is None:
            self.asked_at, self.kill_at = now, now + END_SEC
            runner.stop(self.job_id)
        elif now >= self.kill_at:
            self.kill_at = now + KILL_INTERVAL_SEC
            runner.kill(self.job_id, shim_too=self.was_killed)
            self.was_killed = True


class StagedWorkers:
    """The staged workers, by job number. `clock` is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        spool: Spool,
        config: Callable[[], Config],
        runner: Runner,
        attempts: Attempts,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._spool = spool
        self._config = config
        self._runner = runner
        self._attempts = attempts
        self._clock = clock
        self._workers: dict[int, Worker] = {}
        self._given_up: dict[int, int] = {}  # jobs not staged again for an attempt, with its number

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    @property
    def numbers(self) -> Set[int]:
        """The jobs whose workers are followed here."""
        return self._workers.keys()

    def is_ending(self, job_id: int) -> bool:
        """Return True if a job's staged worker is to end, or has ended: until that is settled, the job cannot start."""
        worker = self._workers.get(job_id)
        return worker is not None and (worker.ended is not None or not self.is_wanted(worker))

    def is_stuck(self, job_id: int) -> bool:
        """Return True if a job's staged worker should have ended long ago: others need not wait for that job."""
        worker = self._workers.get(job_id)
        return worker is not None and worker.is_stuck(self._clock())

    # -- steps --------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take over the workers that an earlier daemon staged, by the entries, to end them."""
        for job in list(self._spool.jobs(State.QUEUED)):
            if job.staged_at is not None and not self._adopt(job.id, job.name, next_number(job), job.num_staged):
                self._spool.update(job, staged_at=None)

    def take_over(self, workers: Iterable[Live]) -> None:
        """Take over staged workers that live and are not followed, to end them."""
        for live in workers:
            job = self._spool.job(live.job_id)
            if live.job_id in self._workers or (job is not None and job.state is State.RUNNING):
                continue
            if live.attempt is not None:
                self._adopt(live.job_id, job.name if job is not None else f"job-{live.job_id}", *live.attempt)
            elif job is not None:  # else it cannot be followed; the fence reports it
                self._adopt(job.id, job.name, next_number(job), job.num_staged)

    def _adopt(self, job_id: int, name: str, number: int, start: int) -> bool:
        """Follow a worker to its end: no entry wants it. Returns False if there is none."""
        is_there = self._runner.adopt(job_id, number, start, is_staged=True)
        if is_there:
            self._follow(job_id, name, Staged(number, start, "", "", 0.0))
        return is_there

    def _follow(self, job_id: int, name: str, staged: Staged) -> None:
        path = self._layout.files(job_id).attempt(staged.number).pulse_path
        self._workers[job_id] = Worker(job_id, name, staged, Pulse(path, self._clock()))

    def start(self, job: Job, devices: Sequence[Device], backend: str) -> None:
        """Stage a job. Its entry says so first: a crash after that is a worker that vanished, at no cost."""
        staged = Staged(next_number(job), job.next_start, backend, keys_of(devices), time.time())
        clear(self._layout, job)
        job = self._spool.update(job, staged_at=staged.since, num_staged=staged.start)
        environment = worker_environment(
            self._layout, self._config(), job, ",".join(device.uuid for device in devices if device.uuid)
        )
        try:
            write_adjustments(self._layout, job)
            self._runner.start(
                job.id,
                staged.number,
                staged.start,
                backend=backend,
                environment={**environment, **self._attempts.rows.environment(job), STAGED_VARIABLE: str(staged.start)},
            )
        except OSError as problem:
            log.warning("job %d (%s): cannot be staged: %s", job.id, job.name, problem)
            self.give_up(job)
            return
        self._follow(job.id, job.name, staged)
        log.info(
            "job %d (%s): staged for %s: its worker prepares, and waits for it", job.id, job.name, names_of(devices)
        )

    def settle(self, may_fail: Callable[[Job], bool]) -> None:
        """Settle the staged workers that have ended, and end those that are not wanted. `may_fail`: True for a job that
        could start now, so that what its worker found wrong is the job's end."""
        for number, worker in list(self._workers.items()):
            try:
                worker.look(self._runner, self._clock())
                if worker.ended is not None:
                    self._settle(worker, worker.ended, may_fail)
                elif not self.is_wanted(worker):
                    worker.end(self._runner, self._clock())
            except Exception as problem:  # noqa: BLE001 - the others are settled all the same, and this one in the next turn
                worker.num_failed += 1
                if worker.num_failed == 1:
                    log.warning("job %d (%s): its staged worker: %s", number, worker.name, said(problem))

    def of(self, job: Job) -> Staged | None:
        """Return a job's staged worker, for its attempt; None without one."""
        worker = self._workers.get(job.id)
        if worker is None or not self.is_wanted(worker):
            return None
        worker.look(self._runner, self._clock())
        return worker.staged if worker.ended is None else None

    def forget(self, job: Job) -> None:
        """Leave a job's staged worker to the attempt that has started with it."""
        self._workers.pop(job.id, None)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def is_wanted(self, worker: Worker) -> bool:
        """Return True if a worker is the one that its job's entry means."""
        job = self._spool.job(worker.job_id)
        return job is not None and job.state is State.QUEUED and job.staged_at == worker.staged.since

    def drop(self, worker: Worker, *, for_good: bool = False) -> None:
        """Take the worker out of its job's entry: it ends, and the job may be staged again, unless `for_good`."""
        if for_good:
            self._given_up[worker.job_id] = worker.staged.number
        job = self._spool.job(worker.job_id)
        if job is not None and job.staged_at is not None:
            self._spool.update(job, staged_at=None)

    def drop_all(self) -> None:
        """Take all workers out of their jobs' entries; a full disk may prevent it for one of them."""
        for worker in self:
            with self._attempts.failures.alone(f"job {worker.job_id} ({worker.name})"):
                self.drop(worker)

    def give_up(self, job: Job) -> None:
        """Do not stage a job again before its next attempt; its staged worker, if there is one, ends."""
        self._given_up[job.id] = next_number(job)
        if job.staged_at is not None:
            self._spool.update(job, staged_at=None)

    def has_given_up(self, job: Job) -> bool:
        """Return True if a job is not to be staged before its next attempt."""
        return self._given_up.get(job.id) == next_number(job)

    def _settle(self, worker: Worker, ended: Exit, may_fail: Callable[[Job], bool]) -> None:
        """Settle a worker that has ended at its gate, or before it."""
        job = self._spool.job(worker.job_id)
        if job is None or not self.is_wanted(worker):
            self.drop(worker)
            del self._workers[worker.job_id]
            return
        result_path = self._layout.files(job.id).attempt(worker.staged.number).result_path
        outcome = judge(result_path, ended, is_readable=worker.num_failed < MAX_UNREAD)
        if is_of_job(outcome) and may_fail(job):
            log.info("job %d (%s): its staged worker found an error", job.id, job.name)
            running = self._attempts.start(job, [NO_DEVICE], worker.staged.backend, worker.staged)
            running.ended = ended
        else:
            level = logging.INFO if outcome.code == InterruptedRunError.code else logging.WARNING
            why = outcome.error.message if outcome.error is not None else "it did not wait"
            log.log(
                level,
                "job %d (%s): its staged worker has ended, and the job starts at its turn: %s",
                *(job.id, job.name, why),
            )
            self.give_up(job)
        del self._workers[worker.job_id]
