"""The staged workers: started ahead of their jobs' turns, while the devices are busy (see worker/gate.py).

    queued ── next for a busy device ──► staged ── its turn, and a device is free ──► running, through its gate
       ▲                                   │
       └── cancelled, held, planned again, replaced by another, lost: its worker ends, and no attempt is used
           (what it found wrong in the job itself is an attempt that has failed)

A staged job lies in queued/, and its entry says so before the worker starts. Its turn comes by the queue's order, as
ever: a job that comes first then starts first, staged or not. It loses its place to another one if it is not among the
next for REPLACE_AFTER_SEC.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Protocol

from honed.daemon.attempts import Attempts, clear, next_number, worker_environment, write_adjustments
from honed.daemon.placement import Placement
from honed.job.ahead import STAGED_VARIABLE
from honed.job.job import Job, Staged, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.run.deadline import CANCEL_TIMEOUT_SEC, DUMP_SEC
from honed.run.outcome import judge
from honed.run.runner import Exit, Live, Runner
from honed.spec.config import Config, JobsConfig
from honed.system import untrusted, usage
from honed.system.device import Device
from honed.system.error import DatasetError, InterruptedRunError, ModelError, SpecError, said
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds between looks for a job to stage.
LOOK_INTERVAL_SEC = 1.0
#: Seconds after which a staged job that is not among the next any more gives up its place.
REPLACE_AFTER_SEC = 30.0
#: Phases of a running job in which the next one may be staged: it has its data and its model.
STEADY = frozenset({"train", "evaluate", "predict", "save", "export"})
#: Processors of a machine on which jobs are staged: one trains.
MIN_PROCESSORS = 2
#: Errors that are the job's own and would end it at its turn, too.
OF_THE_JOB = (DatasetError, ModelError, SpecError)
#: Device of an attempt that ended before it had one.
NO_DEVICE = Device("cpu", "no device", uuid="none")


class Queue(Protocol):
    """The jobs that wait for nothing but a device, in the order in which they start."""

    def startable(self) -> Iterator[Job]: ...


@dataclass
class _Worker:
    """One staged worker."""

    job: Job  #: as it was staged
    staged: Staged
    plan: tuple[int, int]  #: inode and time of change of its plan
    kill_at: float | None = None  #: monotonic seconds; set once it was asked to end
    unwanted_since: float | None = None
    ended: Exit | None = None  #: kept until it is settled: the runner tells it once
    is_told: bool = False  #: the machine's fault that keeps it from being settled was logged
    was_killed: bool = field(default=False)


def _is_stageable(job: Job, plan: PlanFile) -> bool:
    """Return True if something of a job can be done before its turn: not of a merge, nor of a job that begins with a
    trial. Code of the model's own is not run then: it could use the device."""
    spec = plan.spec
    begins_with_trial = bool(spec.get("trial")) and not job.attempts
    return spec.get("kind", "sft") == "sft" and not begins_with_trial and not spec.get("trust_remote_code")


def why_not(config: JobsConfig, *, share: float = 1.0, num_bytes: int = 0) -> str:
    """Return why no worker may be staged; empty if one may. `share`: of the memory that must be available; `num_bytes`:
    what its rows take besides."""
    if not config.stage_ahead:
        return "jobs.stage_ahead is off"
    if len(os.sched_getaffinity(0)) < MIN_PROCESSORS:
        return "the machine has one processor"
    if usage.available_bytes() < share * config.stage_min_available_bytes + num_bytes:
        return "little memory is available"
    return ""


class Ahead:
    """The staged workers, by job number. `clock` is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        spool: Spool,
        config: Callable[[], Config],
        runner: Runner,
        attempts: Attempts,
        placement: Placement,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._spool = spool
        self._config = config
        self._runner = runner
        self._attempts = attempts
        self._placement = placement
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._given_up: dict[int, int] = {}  # jobs not staged again for an attempt, with its number
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def numbers(self) -> Set[int]:
        """The jobs whose workers are followed here."""
        return self._workers.keys()

    @property
    def num_not_left(self) -> int:
        """The number of staged workers that do not continue without honed."""
        return sum(not self._is_left(number) for number in self._workers)

    def is_ending(self, job_id: int) -> bool:
        """Return True if a job's staged worker is to end: until it has, the job cannot start."""
        worker = self._workers.get(job_id)
        return worker is not None and not self._is_wanted(worker)

    # -- steps --------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take over the workers that an earlier daemon staged, by the entries."""
        for job in list(self._spool.jobs(State.QUEUED)):
            if job.staged is not None:
                self._adopt(job, job.staged)

    def take_over(self, live: Iterable[Live]) -> None:
        """Take over staged workers that live and that no entry knows, to end them."""
        for found in live:
            if found.job_id not in self._workers and found.attempt is not None:
                job = self._spool.job(found.job_id)
                if job is not None and job.state is not State.RUNNING:
                    number, start = found.attempt
                    self._adopt(job, Staged(number, start, "", found.device or "", time.time()))

    def _adopt(self, job: Job, staged: Staged) -> None:
        if self._runner.adopt(job.id, staged.number, staged.start):
            self._workers[job.id] = _Worker(job, staged, self._plan_of(job))
        elif job.staged is not None:
            self._spool.update(job, staged=None)

    def settle(self) -> None:
        """Settle the staged workers that have ended, and end those that are not wanted."""
        for number, worker in list(self._workers.items()):
            try:
                worker.ended = worker.ended or self._runner.poll(number)
                if worker.ended is not None:
                    self._settle(worker, worker.ended)
                elif not self._is_wanted(worker):
                    self._end(worker)
            except Exception as problem:  # noqa: BLE001 - the others are settled all the same, and this one in the next turn
                if not worker.is_told:
                    log.warning("job %d (%s): its staged worker: %s", number, worker.job.name, said(problem))
                worker.is_told = True

    def tend(self, queue: Queue, *, may_stage: bool) -> None:
        """Stage the next job, from time to time; end staged workers where memory is short."""
        now = self._clock()
        if now < self._look_at or not (self._workers or self._attempts.running):
            return
        self._look_at = now + LOOK_INTERVAL_SEC
        if why := why_not(self._config().jobs, share=0.5):
            self._step_back(why)
        elif may_stage and not why_not(self._config().jobs) and all(map(self._is_ready, self._workers.values())):
            self._stage_next(queue)

    def of(self, job: Job) -> Staged | None:
        """Return a job's staged worker, for its attempt; None without one."""
        worker = self._workers.get(job.id)
        return worker.staged if worker is not None and worker.ended is None and self._is_wanted(worker) else None

    def forget(self, job: Job) -> None:
        """Leave a job's staged worker to the attempt that has started with it."""
        self._workers.pop(job.id, None)

    def end_all(self) -> None:
        """End the workers that do not continue without honed; call it in each turn until there are none."""
        for number, worker in self._workers.items():
            if not self._is_left(number):
                self._end(worker)
                self._give_back(worker)

    # -- staging ------------------------------------------------------------------------------------------------------

    def _step_back(self, why: str) -> None:
        for worker in self._workers.values():
            if worker.kill_at is None:
                log.info("job %d (%s): its staged worker ends: %s", worker.job.id, worker.job.name, why)
                self._give_up(worker)

    def _stage_next(self, queue: Queue) -> None:
        """Stage the first job without a worker that a busy device would suit, and let go of one that is late now."""
        waiting = [worker for worker in self._workers.values() if self._is_wanted(worker)]
        reserved = {worker.staged.device for worker in waiting}
        busy = self._busy()
        first = list(itertools.islice(queue.startable(), len(busy) + len(waiting)))
        self._replace(waiting, {job.id for job in first[: max(len(busy), 1)]})
        for job in first:
            if job.id in self._workers or self._given_up.get(job.id) == next_number(job):
                continue
            device = next(
                (each for each in busy if each.key not in reserved and self._placement.suits(job, each)), None
            )
            if device is not None:
                self._stage(job, device)
                return

    def _is_ready(self, worker: _Worker) -> bool:
        """Return True if a worker waits: it will need no more memory before its turn."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            path = self._layout.job(worker.job.id).attempt(worker.staged.number).pulse_path
            return bool(json.loads(untrusted.read_plain(path, max_bytes=4096)).get("phase") == "staged")
        return False

    def _busy(self) -> list[Device]:
        """Return the devices whose jobs are past their own start, and go on."""
        keys = {
            running.job.attempt.device
            for running in self._attempts.running.values()
            if running.job.stop is None and running.is_alive and running.phase in STEADY
        }
        return [each for each in self._placement.all() if each.key in keys]

    def _replace(self, waiting: list[_Worker], next_ones: set[int]) -> None:
        now = self._clock()
        for worker in waiting:
            if worker.job.id in next_ones:
                worker.unwanted_since = None
            elif worker.unwanted_since is None:
                worker.unwanted_since = now
            elif now - worker.unwanted_since >= REPLACE_AFTER_SEC:
                log.info("job %d (%s): its staged worker ends: other jobs come first", worker.job.id, worker.job.name)
                self._give_back(worker)

    def _stage(self, job: Job, device: Device) -> None:
        """Stage a job. Its entry says so first: a crash after that is a worker that vanished, at no cost."""
        try:
            plan = PlanFile.read(self._layout.job(job.id).plan_path)
            is_stageable = _is_stageable(job, plan)
            if is_stageable and why_not(self._config().jobs, num_bytes=plan.row_memory_bytes):
                return  # looked at again, as the other jobs' memory changes
            backend = (
                job.attempts[-1].backend if job.attempts and job.attempts[-1].num_starts > 1 else plan.backend.name
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            is_stageable, backend = False, ""  # its turn will tell
        if not is_stageable:
            self._given_up[job.id] = next_number(job)
            return
        staged = Staged(next_number(job), job.num_staged + 1, backend, device.uuid or device.kind, time.time())
        clear(self._layout, job)
        job = self._spool.update(job, staged=staged, num_staged=staged.start)
        worker = _Worker(job, staged, self._plan_of(job))
        environment = worker_environment(self._layout, self._config(), job, device.uuid)
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
            self._give_up(worker)
            return
        self._workers[job.id] = worker
        log.info("job %d (%s): staged for %s: its worker prepares, and waits for it", job.id, job.name, device.name)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _is_wanted(self, worker: _Worker) -> bool:
        job = self._spool.job(worker.job.id)
        return (
            job is not None
            and job.state is State.QUEUED
            and job.staged == worker.staged
            and self._plan_of(job) == worker.plan
        )

    def _plan_of(self, job: Job) -> tuple[int, int]:
        with contextlib.suppress(OSError):
            info = self._layout.job(job.id).plan_path.stat()
            return info.st_ino, info.st_mtime_ns
        return 0, 0

    def _is_left(self, job_id: int) -> bool:
        return self._config().jobs.on_stop == "leave" and self._runner.is_supervised(job_id)

    def _end(self, worker: _Worker) -> None:
        """Ask a worker to end, and kill it if it does not."""
        now = self._clock()
        if worker.kill_at is None:
            worker.kill_at = now + CANCEL_TIMEOUT_SEC
            self._runner.stop(worker.job.id)
        elif now >= worker.kill_at:
            worker.kill_at = now + DUMP_SEC
            self._runner.kill(worker.job.id, shim_too=worker.was_killed)
            worker.was_killed = True

    def _give_back(self, worker: _Worker) -> None:
        """Take the worker out of its job's entry: it ends, and the job may be staged again."""
        job = self._spool.job(worker.job.id)
        if job is not None and job.staged == worker.staged:
            self._spool.update(job, staged=None)

    def _give_up(self, worker: _Worker) -> None:
        """Do not stage a job again before its next attempt."""
        self._given_up[worker.job.id] = worker.staged.number
        self._give_back(worker)

    def _settle(self, worker: _Worker, ended: Exit) -> None:
        """Settle a worker that has ended at its gate, or before it."""
        job = self._spool.job(worker.job.id)
        if job is None or not self._is_wanted(worker):
            self._give_back(worker)
            del self._workers[worker.job.id]
            return
        outcome = judge(self._layout.job(job.id).attempt(worker.staged.number).result_path, ended)
        if outcome.phase and isinstance(outcome.error, OF_THE_JOB):  # it said so itself
            log.info("job %d (%s): its staged worker found an error", job.id, job.name)
            running = self._attempts.start(job, NO_DEVICE, worker.staged.backend, worker.staged)
            running.ended = ended
        else:
            level = logging.INFO if outcome.code == InterruptedRunError.code else logging.WARNING
            why = outcome.error.message if outcome.error is not None else "it did not wait"
            log.log(
                level,
                "job %d (%s): its staged worker has ended, and the job starts at its turn: %s",
                job.id,
                job.name,
                why,
            )
            self._give_up(worker)
        del self._workers[worker.job.id]
