"""One start of a job, as Slurm gets it: the arguments of sbatch and scancel, and the batch script.

All follow from files of the daemon's own and the configuration. So the daemon of one user's own instance makes them,
and so does the helper of the shared one (slurm_helper.py), which takes only the start's number.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict, TypeAdapter, ValidationError

from honed.run.process import SHIM
from honed.run.slurm_request import Request, srun
from honed.spec.config import SLOT, SlurmConfig
from honed.system import durable, python, untrusted
from honed.system.layout import JobFiles

#: The name of a start: honed-INSTANCE-JOB-ATTEMPT-START.
NAME = re.compile(r"honed-([0-9a-f]{8})-([1-9][0-9]{0,17})-([1-9][0-9]{0,8})-([1-9][0-9]{0,8})")
#: What a list of jobs says of a job: number, state, nodes, user, reason of waiting, and last its name, which anybody
#: chooses.
_LISTED = re.compile(
    r"([0-9]{1,18})\|([A-Z_]{1,30})\|([^|\s]{0,4000})\|([0-9]{1,10})\|([^|\n]{0,500})\|([^|\n]{1,200})"
)
#: The ways to end a job or its worker, as options of scancel. A signal reaches the batch step, which is the shim.
ENDS = {
    "withdraw": ("--state=PENDING",),
    "terminate": ("--batch", "--signal=TERM"),
    "abort": ("--batch", "--signal=ABRT"),
    "kill": ("--full", "--signal=KILL"),
    "cancel": (),
}
#: Begins a command on one node: which node it is, and where the ranks meet, at srun's own node, which has rank 0.
ON_NODE = (
    *("/bin/sh", "-c"),
    'HONED_NODE="$SLURM_NODEID" HONED_MEET_AT="$SLURM_LAUNCH_NODE_IPADDR" exec "$@"',
    "honed",
)


@dataclass(frozen=True)
class Listed:
    """A job, as Slurm lists it."""

    slurm_id: str
    state: str
    nodes: str
    uid: int
    reason: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Listed | None:
        """Parse a list's entry; None for one that is not a job of ours."""
        match = _LISTED.fullmatch(text)
        if match is None or NAME.fullmatch(match[6]) is None:
            return None
        slurm_id, state, nodes, uid, reason, name = match.groups()
        return cls(slurm_id, state, nodes, int(uid), "".join(c if c.isprintable() else " " for c in reason), name)

    def __str__(self) -> str:
        return f"{self.slurm_id}|{self.state}|{self.nodes}|{self.uid}|{self.reason}|{self.name}"


@dataclass(frozen=True)
class Handed:
    """The content of start.json: a start that was handed to Slurm, or is about to be."""

    __pydantic_config__ = ConfigDict(extra="forbid")

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
    is_over: bool = False  #: it has ended: a job of its name is none of honed's

    def write(self, job: JobFiles) -> None:
        untrusted.write_plain(job.start_path, durable.as_json(self.__dict__), mode=0o644)


_START: TypeAdapter[Handed] = TypeAdapter(Handed)


def parse(data: bytes) -> Handed:
    """Parse start.json. Raises ValueError if it is none of Slurm's."""
    try:
        return _START.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a start file of a Slurm job: {where or 'it'}: {first['msg'].lower()}") from None


def listing(mark: str, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that lists jobs, and its environment. Each job begins with `mark`, which nobody can know: a
    job's name may have line ends, and would pass for another job."""
    return ["squeue", "--noheader", "--states=all", *options], {"SQUEUE_FORMAT": f"{mark}%A|%T|%N|%U|%r|%j"}


def listed(text: str, mark: str) -> list[Listed]:
    """Parse the output of `listing`."""
    jobs = (Listed.parse(part.removesuffix("\n")) for part in text.split(mark)[1:])
    return [item for item in jobs if item is not None]


def new_mark() -> str:
    return secrets.token_hex(16)


def submission(job: JobFiles, handed: Handed, config: SlurmConfig) -> list[str]:
    """Return the command that submits a start, without its script. Raises KeyError if its profile is not configured."""
    command = ["sbatch", "--parsable", "--no-requeue", "--open-mode=append", f"--job-name={handed.name}"]
    command += [f"--output={job.attempt(handed.number).log_path}", f"--chdir={job.dir}"]
    has_gpus = handed.device.startswith(SLOT) and config.profile(handed.profile).gpu_bytes > 0
    num_gpus = handed.num_gpus if has_gpus else 0
    return [*command, *Request(handed.num_nodes, num_gpus, handed.profile, handed.time_left_sec).options(config)]


def script(job: JobFiles, handed: Handed, command: Sequence[str]) -> str:
    """Return the batch script of a start. `command` starts a worker."""
    worker = [*command, str(job.dir), str(handed.number), "--backend", handed.backend]
    shim, attempt_dir = python.bare(SHIM), str(job.attempt(handed.number).dir)
    if handed.num_nodes > 1:
        worker = [*srun(handed.num_nodes), *ON_NODE, *shim, "--node", attempt_dir, *worker]
    shim += [attempt_dir, str(handed.start), *worker]
    lines = ["#!/bin/sh", *(f"export {key}={shlex.quote(value)}" for key, value in handed.environment.items())]
    # srun does not take this from sbatch.
    lines.append('[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    # exec: the signals to the batch step reach the shim, which hands them on.
    return "\n".join([*lines, f"exec {shlex.join(shim)}", ""])


def ending(verb: str, name: str, uid: int) -> list[str]:
    """Return the command that ends a start; `verb` is one of ENDS."""
    return ["scancel", f"--user={uid}", f"--name={name}", *ENDS[verb]]
