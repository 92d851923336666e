"""Slurm's commands, each with a deadline, in threads of their own: where the controller does not answer, a command
takes seconds to say so, and the daemon's loop waits for none.

One thread lists the instance's jobs at intervals, a second runs what the loop asks for, in order.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from honed.run.slurm_request import run

log = logging.getLogger(__name__)

#: Seconds between two lists of jobs, and for one command.
LIST_INTERVAL_SEC, COMMAND_SEC = 1.0, 30.0
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
    """The end of commands: a fault does not tell that they had no effect."""

    commands: list[list[str]] = field(default_factory=list)
    fault: str = ""
    at: float = 0.0


class Desk:
    """The commands of one instance. `clock` is monotonic seconds."""

    def __init__(self, prefix: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._clock = clock
        self._waiting: queue.SimpleQueue[tuple[str, list[list[str]], Mapping[str, str]]] = queue.SimpleQueue()
        self._answers: dict[str, Answer | None] = {}
        self.snapshot: Snapshot | None = None  #: the last one that Slurm gave
        self.fault = ""  #: why there is no newer one
        for work in (self._list, self._work):
            threading.Thread(target=work, name="slurm", daemon=True).start()

    def run(self, name: str, commands: list[list[str]], *, environment: Mapping[str, str]) -> None:
        """Have commands run for a job, one after the other."""
        self._answers[name] = None
        self._waiting.put((name, commands, environment))

    def answer(self, name: str) -> Answer | None:
        """Return the end of a job's last commands; None while they wait or run."""
        return self._answers.get(name, Answer())

    def forget(self, name: str) -> None:
        """Forget a job."""
        self._answers.pop(name, None)

    def _work(self) -> None:
        while True:
            name, commands, environment = self._waiting.get()
            faults = [fault for each in commands if (fault := _act(each, environment))]
            self._answers[name] = Answer(commands, "; ".join(faults), self._clock())

    def _list(self) -> None:
        form = "%A|%T|%N|%j|%r"
        command = ["squeue", "--noheader", "--states=all", f"--user={os.geteuid()}", f"--format={form}"]
        while True:
            began = self._clock()
            text, fault = run(command, os.environ, timeout_sec=COMMAND_SEC)
            if fault != self.fault:
                self.fault = fault
                log.log(
                    logging.WARNING if fault else logging.INFO, "Slurm %s", f"fails: {fault}" if fault else "answers"
                )
            if not fault:
                self.snapshot = Snapshot(began, self._parsed(text))
            time.sleep(LIST_INTERVAL_SEC)

    def _parsed(self, text: str) -> dict[str, tuple[Seen, ...]]:
        found: dict[str, tuple[Seen, ...]] = {}
        for line in text.splitlines():
            fields = line.split("|", 4)
            if len(fields) == 5 and fields[3].startswith(self._prefix):
                slurm_id, state, nodes, name, reason = fields
                found[name] = (*found.get(name, ()), Seen(slurm_id, state, reason, nodes))
        return found


def _act(command: list[str], environment: Mapping[str, str]) -> str:
    """Run a command that changes something. Returns its fault."""
    if command[0] == "sbatch":
        return submit(command, environment)
    return run(command, environment, timeout_sec=COMMAND_SEC)[1]


def submit(command: list[str], environment: Mapping[str, str]) -> str:
    """Submit a job. Returns why that failed: then it may have been submitted, or not; empty if it was."""
    return run(command, environment, timeout_sec=COMMAND_SEC)[1]
