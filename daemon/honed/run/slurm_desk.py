"""Slurm's commands, each with a deadline, in threads of their own: where the controller does not answer, a command
takes seconds to say so, and the daemon's loop waits for none.

One thread lists the instance's jobs at intervals, a second runs what the loop asks for, in order. The commands of the
shared instance are words to its helper (slurm_client.py).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from honed.run import slurm_batch
from honed.run.slurm_request import run

log = logging.getLogger(__name__)

#: Seconds between two lists of jobs: of one user, whom the controller finds fast, and of all, for the shared instance.
LIST_INTERVAL_SEC, SHARED_INTERVAL_SEC = 1.0, 5.0
#: Seconds for one command.
COMMAND_SEC = 30.0
#: Runs a command in an environment; returns its output, and its fault, empty if there was none.
Run = Callable[[Sequence[str], Mapping[str, str]], tuple[str, str]]
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
    """The commands of one instance, which `run` carries out. `clock` is monotonic seconds."""

    def __init__(self, prefix: str, run: Run, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._run = run
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
            faults = [fault for each in commands if (fault := self._run(each, environment)[1])]
            self._answers[name] = Answer(commands, "; ".join(faults), self._clock())

    def _list(self) -> None:
        is_own = self._run is run_here
        command = [*slurm_batch.LISTING, f"--user={os.geteuid()}"] if is_own else ["list"]
        while True:
            began = self._clock()
            text, fault = self._run(command, os.environ)
            if fault != self.fault:
                self.fault = fault
                log.log(
                    logging.WARNING if fault else logging.INFO, "Slurm %s", f"fails: {fault}" if fault else "answers"
                )
            if not fault:
                self.snapshot = Snapshot(began, self._parsed(text))
            time.sleep(LIST_INTERVAL_SEC if is_own else SHARED_INTERVAL_SEC)

    def _parsed(self, text: str) -> dict[str, tuple[Seen, ...]]:
        found: dict[str, tuple[Seen, ...]] = {}
        for line in text.splitlines():
            fields = line.split("|", 5)
            if len(fields) == 6 and fields[4].startswith(self._prefix):
                slurm_id, state, nodes, _uid, name, reason = fields
                found[name] = (*found.get(name, ()), Seen(slurm_id, state, reason, nodes))
        return found


def run_here(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Run a command as our own user."""
    return run(command, environment, timeout_sec=COMMAND_SEC)
