"""What a job asks of a Slurm cluster, as options of sbatch, and the words with which Slurm refuses.

Slurm's commands have no codes: a refusal is known by its words, which are those of slurm_strerror and of sbatch. Only
what no waiting changes counts as one; all else (a controller that is down, a limit on the number of jobs) may pass.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from honed.run.process import inherited
from honed.spec.config import SlurmConfig

#: Seconds that are left to a worker beyond its time limit, for its checkpoint, before Slurm ends it.
SLACK_SEC = 300.0
#: Seconds for one question whether Slurm would take a job.
TRY_SEC = 10.0
#: Seconds that a killed command has to end.
KILL_SEC = 1.0
#: Parts of refusals, in lower case.
REFUSALS = (
    *("invalid partition", "invalid account", "invalid qos", "invalid feature specification", "invalid wckey"),
    *("invalid generic resource", "invalid trackable resource", "invalid gres", "invalid node name specified"),
    *("requested node configuration is not available", "node count specification invalid", "invalid reservation"),
    *("more processors requested than permitted", "memory specification can not be satisfied", "invalid constraint"),
    *("requested time limit is invalid", "group not permitted to use this partition", "access/permission denied"),
    *("requested reservation is invalid", "unrecognized option", "invalid option", "invalid license", "invalid --"),
)
#: The refusal that may only mean that nodes are missing now.
NO_SUCH_NODES = "requested node configuration is not available"


@dataclass(frozen=True)
class Request:
    """The nodes of one job, and its time."""

    num_nodes: int = 1
    num_gpus: int = 0  #: on each node
    profile: str | None = None
    time_left_sec: float | None = None

    def options(self, config: SlurmConfig) -> list[str]:
        """Return the options of sbatch. Raises KeyError for a profile that is not configured."""
        options = [f"--nodes={self.num_nodes}", "--ntasks-per-node=1"]
        if self.num_gpus:
            options.append(f"--gpus-per-node={self.num_gpus}")
        if self.time_left_sec is not None:
            options.append(f"--time={math.ceil((self.time_left_sec + SLACK_SEC) / 60)}")
        return [*options, *config.profile(self.profile).as_options()]


def srun(num_nodes: int) -> list[str]:
    """Return the command that starts one task on every node of a job. The first that fails ends all."""
    step = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1", "--export=ALL"]
    return [*step, "--kill-on-bad-exit=1", "--wait=0", "--input=none"]


def is_refusal(words: str) -> bool:
    """Return True if Slurm says that it will never take a job."""
    lowered = words.lower()
    return any(part in lowered for part in REFUSALS)


def may_have_nodes(request: Request, config: SlurmConfig) -> bool:
    """Tell whether the nodes that Slurm does not have may only be missing now: where one is down, and for seconds after
    its own start, `sbatch --test-only` says that there are none, whatever states sinfo tells."""
    partition = config.profile(request.profile).partition
    command = ["sinfo", "--noheader", "--Node", "--format=%N", *([f"--partition={partition}"] if partition else [])]
    names = set(run(command, environment(), timeout_sec=TRY_SEC)[0].split())
    return not names or request.num_nodes <= len(names)


def environment() -> dict[str, str]:
    """Return the environment of Slurm's commands, which jobs inherit: without options of somebody's shell."""
    return {
        key: value
        for key, value in inherited().items()
        if key == "SLURM_CONF" or not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }


def try_out(request: Request, config: SlurmConfig) -> str:
    """Ask Slurm whether it would take such a job, which nothing submits. Returns its words; empty if it would."""
    script = ["--wrap=true", "--no-requeue", "--output=/dev/null"]
    return run(["sbatch", "--test-only", *script, *request.options(config)], environment(), timeout_sec=TRY_SEC)[1]


def run(
    command: Sequence[str], variables: Mapping[str, str], *, timeout_sec: float, stdin: str = "", **who: Any
) -> tuple[str, str]:
    """Run a command; `who` is the user, as subprocess.run takes one. Returns its output, and its fault, empty if there
    was none."""
    try:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            **who,
        )
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        output, words = process.communicate(stdin, timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        # One that hangs in a file system does not end then either, and is left.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SEC)
        return "", f"{command[0]} did not end within {timeout_sec:.0f} s"
    if process.returncode == 0:
        return output, ""
    return "", " ".join(words.split())[:300] or f"{command[0]} ended with status {process.returncode}"
