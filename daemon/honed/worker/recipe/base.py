"""The run of one attempt, as its recipe sees it."""

from __future__ import annotations

import time

from honed.inputs import score
from honed.job.event import EventWriter
from honed.system import installed
from honed.worker.assignment import Assignment
from honed.worker.gate import Gate
from honed.worker.parallel import Ranks, Unwritten
from honed.worker.stop import Stop
from honed.worker.train import examiner

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes")


class Run:
    """What a recipe works with, and the result so far."""

    def __init__(self, events: EventWriter | Unwritten, stop: Stop, gate: Gate, ranks: Ranks) -> None:
        self.events = events
        self.stop = stop
        self.gate = gate
        self.ranks = ranks
        self.started = time.time()  #: seconds since the epoch; of a staged worker, when its turn came
        self.began = time.monotonic()  #: the same moment, in seconds of the monotonic clock
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.artifacts: dict[str, str] = {}
        self.remark = ""  #: a remark on a successful run
        self.memory: dict[str, int] = {}  #: bytes really held, as in the event `memory`

    def stage(self, name: str) -> None:
        """Begin a stage; raises InterruptedRunError if the run was asked to stop."""
        self.stop.check()
        self.stop.now_in = name
        self.events.emit("stage", stage=name)

    def log(self, level: str, message: str) -> None:
        self.events.log(level, message)

    def warn(self, message: str) -> None:
        self.events.log("warning", message)

    def pass_gate(self) -> None:
        """Wait for the device, if this worker was staged."""
        if self.gate.is_closed:
            self.stage("staged")
            self.gate.wait()
            self.started, self.began = time.time(), time.monotonic()

    def load_metrics(self, job: Assignment) -> None:
        """Load the administrator's metrics that the job names, which may fail; they could use the device."""
        for name in examiner.named_metrics(job.spec):
            score.find(name)


def versions(backend: str) -> dict[str, str]:
    """Return the versions of the packages that matter to a run, imported or not."""
    names = [*PACKAGES, *(["unsloth", "unsloth_zoo"] if backend == "unsloth" else [])]
    return {name: version for name in names if (version := installed.version(name)) is not None}
