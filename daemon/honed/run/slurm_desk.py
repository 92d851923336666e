"""Slurm's commands, all with a deadline, in threads of their own: where the controller does not answer, a command
takes seconds to say so, and the daemon's loop waits for none.

One thread lists the instance's jobs at intervals. Another runs what the loop asks for, in order; the shared instance
has one per submitter, who could stop a command that runs as them, and so delays their own jobs alone. Its commands
are words to its helper (slurm_client.py).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from honed.run import slurm_batch
from honed.run.slurm_batch import Listed
from honed.run.slurm_request import run

log = logging.getLogger(__name__)

#: Seconds between two lists of jobs: of one user, whom the controller finds fast, and of all, for the shared instance.
LIST_INTERVAL_SEC, SHARED_INTERVAL_SEC = 1.0, 5.0
#: Seconds for one command.
COMMAND_SEC = 30.0
#: Seconds without a command after which a lane's thread ends.
IDLE_SEC = 60.0
#: Lanes at most, all with a connection to the helper: beyond them, some submitters share one.
MAX_LANES = 64
#: Runs a command in an environment; returns its output, and its fault, empty if there was none.
Run = Callable[[Sequence[str], Mapping[str, str]], tuple[str, str]]
#: Commands that wait: the job's name, the commands, their environment.
Waiting = queue.SimpleQueue[tuple[str, list[list[str]], Mapping[str, str]]]
#: States of a job that has ended.
OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)


@dataclass(frozen=True)
class Seen:
    """A job, as squeue lists it."""

    slurm_id: str
    state: str
    reason: str
    nodes: str

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class Snapshot:
    """All jobs of the instance that Slurm knew of, by name."""

    began: float
    jobs: Mapping[str, tuple[Seen, ...]]


@dataclass(frozen=True)
class Answer:
    """The end of commands: a fault does not mean that they had no effect."""

    commands: list[list[str]] = field(default_factory=list)
    fault: str = ""
    at: float = 0.0
    output: str = ""  #: by sbatch: the job's number


class Desk:
    """The commands of one instance, which `run` carries out, or has the helper carry out (`is_shared`). `clock` is
    monotonic seconds."""

    def __init__(
        self, prefix: str, run: Run, *, is_shared: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix = prefix
        self._is_shared = is_shared
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._answers: dict[str, Answer | None] = {}
        self.snapshot: Snapshot | None = None  #: the last one that Slurm gave
        self.fault = ""  #: why there is no newer one
        threading.Thread(target=self._list, name="slurm", daemon=True).start()

    def run(self, name: str, commands: list[list[str]], *, environment: Mapping[str, str], lane: int = 0) -> None:
        """Have commands run for a job, one after the other, and after those of the same lane."""
        with self._lock:
            if lane not in self._waiting and len(self._waiting) >= MAX_LANES:
                lane = sorted(self._waiting)[lane % MAX_LANES]
            waiting = self._waiting.get(lane)
            if waiting is None:
                waiting = queue.SimpleQueue()
                try:
                    threading.Thread(target=self._work, args=(lane, waiting), name="slurm", daemon=True).start()
                except RuntimeError as error:  # no more threads
                    self._answers[name] = Answer(commands, str(error), self._clock())
                    return
                self._waiting[lane] = waiting
            self._answers[name] = None
            waiting.put((name, commands, environment))

    def answer(self, name: str) -> Answer | None:
        """Return the end of a job's last commands; None while they wait or run."""
        return self._answers.get(name, Answer())

    def forget(self, name: str) -> None:
        """Forget a job."""
        self._answers.pop(name, None)

    def _work(self, lane: int, waiting: Waiting) -> None:
        while True:
            try:
                name, commands, environment = waiting.get(timeout=IDLE_SEC)
            except queue.Empty:
                with self._lock:
                    if waiting.empty():
                        del self._waiting[lane]
                        return
                continue
            results = [self._run(command, environment) for command in commands]
            faults = [fault for _, fault in results if fault]
            answer = Answer(commands, "; ".join(faults), self._clock(), "".join(output for output, _ in results))
            with self._lock:
                if name in self._answers:  # not forgotten meanwhile
                    self._answers[name] = answer

    def _list(self) -> None:
        while True:
            began, mark = self._clock(), slurm_batch.new_mark()
            command, variables = slurm_batch.listing(mark, f"--user={os.geteuid()}")
            if self._is_shared:
                command = ["list"]
            text, fault = self._run(command, {**_environment(), **variables})
            if fault != self.fault:
                self.fault = fault
                log.log(
                    logging.WARNING if fault else logging.INFO, "Slurm %s", f"fails: {fault}" if fault else "answers"
                )
            if not fault:
                jobs = map(Listed.parse, text.split("\n")) if self._is_shared else slurm_batch.listed(text, mark)
                self.snapshot = Snapshot(began, self._by_name(jobs))
            time.sleep(SHARED_INTERVAL_SEC if self._is_shared else LIST_INTERVAL_SEC)

    def _by_name(self, jobs: Iterable[Listed | None]) -> dict[str, tuple[Seen, ...]]:
        by_name: dict[str, tuple[Seen, ...]] = {}
        for job in jobs:
            if job is not None and job.name.startswith(self._prefix):
                by_name[job.name] = (*by_name.get(job.name, ()), Seen(job.slurm_id, job.state, job.reason, job.nodes))
        return by_name


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}


def run_here(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Run a command as our own user."""
    return run(command, environment, timeout_sec=COMMAND_SEC)
