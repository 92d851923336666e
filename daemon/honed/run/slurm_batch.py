"""One start of a job, as Slurm gets it: the arguments of sbatch and scancel, and the batch script.

All follow from files of the daemon's own and the configuration. So the daemon of one user's own instance makes them,
and so does the helper of the shared one (slurm_helper.py), which takes only the start's number.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from honed.run.process import SHIM
from honed.run.slurm_request import Request, srun
from honed.spec.config import SLOT, SlurmConfig
from honed.system import durable
from honed.system.layout import JobLayout

#: The name of a start: honed-INSTANCE-JOB-ATTEMPT-START.
NAME = re.compile(r"honed-([0-9a-f]{8})-([1-9][0-9]{0,17})-([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
#: Lists jobs, one a line: number, state, nodes, user, name, reason of waiting.
LISTING = ("squeue", "--noheader", "--states=all", "--format=%A|%T|%N|%U|%j|%r")
#: The ways to end a job or its worker, as options of scancel. A signal reaches the batch step, which is the shim.
ENDS = {
    "withdraw": ("--state=PENDING",),
    "terminate": ("--batch", "--signal=TERM"),
    "abort": ("--batch", "--signal=ABRT"),
    "kill": ("--full", "--signal=KILL"),
    "cancel": (),
}


@dataclass(frozen=True)
class Handed:
    """The content of start.json: a start that was handed to Slurm, or is about to be."""

    number: int
    start: int
    name: str
    device: str
    time_left_sec: float | None = None
    num_gpus: int = 1  #: on each node
    num_nodes: int = 1
    profile: str | None = None
    slurm_id: str = ""  #: a hint for people
    state: str = ""
    reason: str = ""  #: why it waits
    nodes: str = ""
    backend: str = ""  #: empty: it cannot be submitted again
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, job: JobLayout) -> None:
        durable.write_json(job.start_path, self.__dict__, mode=0o644)


def parse(data: bytes) -> Handed:
    """Parse start.json. Raises ValueError if it is none of Slurm's."""
    raw = json.loads(data)
    try:
        if not isinstance(raw["name"], str):
            raise ValueError("start.json: the name is not a text")
        return Handed(**raw)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a start file of a Slurm job: {error!r}") from error


def submission(job: JobLayout, handed: Handed, config: SlurmConfig) -> list[str]:
    """Return the command that submits a start, without its script. Raises KeyError if its profile is not configured."""
    command = ["sbatch", "--parsable", "--no-requeue", "--open-mode=append", f"--job-name={handed.name}"]
    command += [f"--output={job.attempt(handed.number).log_path}", f"--chdir={job.dir}"]
    has_gpus = handed.device.startswith(SLOT) and config.profile(handed.profile).gpu_bytes > 0
    num_gpus = handed.num_gpus if has_gpus else 0
    return [*command, *Request(handed.num_nodes, num_gpus, handed.profile, handed.time_left_sec).options(config)]


def script(job: JobLayout, handed: Handed, command: Sequence[str]) -> str:
    """Return the batch script of a start. `command` starts a worker."""
    worker = [*command, str(job.dir), str(handed.number), "--backend", handed.backend]
    shim, attempt_dir = [sys.executable, "-I", "-S", str(SHIM)], str(job.attempt(handed.number).dir)
    if handed.num_nodes > 1:
        worker = [*srun(handed.num_nodes), *shim, "--node", attempt_dir, *worker]
    shim += [attempt_dir, str(handed.start), *worker]
    lines = ["#!/bin/sh", *(f"export {key}={shlex.quote(value)}" for key, value in handed.environment.items())]
    # srun does not take this from sbatch.
    lines.append('[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    # exec: the signals to the batch step reach the shim, which hands them on.
    return "\n".join([*lines, f"exec {shlex.join(shim)}", ""])


def ending(verb: str, name: str, uid: int) -> list[str]:
    """Return the command that ends a start; `verb` is one of ENDS."""
    return ["scancel", f"--user={uid}", f"--name={name}", *ENDS[verb]]
