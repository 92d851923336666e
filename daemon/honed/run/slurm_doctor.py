"""What `honectl doctor` asks of a Slurm cluster: whether the commands work, and the nodes have what jobs need, by a
tiny job.

A job that does not start soon is withdrawn: a busy cluster is no fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from honed.run import slurm_request
from honed.run.slurm_client import why_none, why_not_as
from honed.run.slurm_request import Request
from honed.spec.config import Config, SlurmConfig
from honed.system import python
from honed.system.device import TOLERANCE
from honed.system.layout import Layout

Status = Literal["ok", "warning", "error"]
#: Seconds for a command, for the start of the tiny job, and for all of it.
COMMAND_SEC, START_SEC, JOB_SEC = 15, 10, 40
#: Seconds by which the clocks may differ.
MAX_SKEW_SEC = 5.0
#: Nodes on which the tiny job runs, if so many are free.
MAX_NODES = 4
#: What the tiny job does on every node, in a directory of the instance, whose lock we hold.
_PROBE = """
import fcntl, json, os, subprocess, sys, time
directory, node = sys.argv[1], os.environ["SLURMD_NODENAME"]
facts = {"node": node, "now": time.time(), "user": os.geteuid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
with open(f"{directory}/{node}.new", "w") as file: file.write(node)
os.rename(f"{directory}/{node}.new", f"{directory}/{node}.old")
os.link(f"{directory}/{node}.old", f"{directory}/{node}.link")
for number in range(20):
    fd = os.open(f"{directory}/{node}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{number}\\n".encode())
    os.close(fd)
with open(directory + "/lock", "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts["lock"] = False
    except BlockingIOError:
        facts["lock"] = True
try:
    ask = ["nvidia-smi", "--query-gpu=memory.total,compute_cap", "--format=csv,noheader,nounits"]
    facts["gpu"] = subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.split("\\n")[0]
except OSError:
    facts["gpu"] = ""
print(json.dumps(facts))
"""


def findings(layout: Layout, config: Config) -> Iterator[tuple[Status, str, str]]:
    """Yield status, detail and hint of every check."""
    if problem := why_none(layout):
        yield "error", problem, "see docs/cluster.md"
        return
    _, fault = slurm_request.run(
        ["squeue", "--noheader", f"--user={os.geteuid()}"], os.environ, timeout_sec=COMMAND_SEC
    )
    if fault:
        yield "error", f"the controller does not answer: {fault}", "scontrol ping; systemctl status slurmctld munge"
        return
    if not layout.is_of_system:
        yield "ok", "jobs run on the cluster as this instance's own user", ""
        yield from _try_profiles(config.slurm)
        yield _prove(layout.state_dir, config.slurm.profile(None))
        return
    yield "ok", "each job runs on the cluster as its submitter", ""
    if problem := why_not_as(os.geteuid()):
        yield "ok", f"profiles and nodes are not tried: {problem}", "run honectl doctor as somebody who submits jobs"
    elif not os.access(layout.staged_dir, os.W_OK | os.X_OK):
        yield "warning", "profiles and nodes are not tried: you may not submit jobs", "adduser NAME honed-submit"
    else:
        yield from _try_profiles(config.slurm)
        yield _prove(layout.staged_dir, config.slurm.profile(None))


def _try_profiles(slurm: SlurmConfig) -> Iterator[tuple[Status, str, str]]:
    """Yield what Slurm says to a job of every profile that it would refuse, or not answer."""
    for name in (None, *slurm.profiles):
        num_gpus = int(slurm.profile(name).gpu_bytes > 0)
        if words := slurm_request.try_out(Request(num_gpus=num_gpus, profile=name), slurm):
            where = f"slurm.profiles.{name}" if name else "slurm"
            status: Status = "error" if slurm_request.is_refusal(words) else "warning"
            yield status, f"a job of [{where}] would not start: {words}", f"correct [{where}] in honed.toml"


def _prove(place_dir: Path, slurm: SlurmConfig) -> tuple[Status, str, str]:
    """Have nodes use a directory below this one."""
    own = [f"--nodes={_num_idle(slurm)}", "--ntasks-per-node=1", "--time=1", "--job-name=honed-doctor"]
    own += [f"--immediate={START_SEC}", *["--gpus-per-node=1"] * (slurm.gpu_bytes > 0), *slurm.as_options()]
    try:
        with tempfile.TemporaryDirectory(dir=place_dir, prefix=".doctor-") as made, _held(Path(made)):
            directory = Path(made)
            began = time.time()
            command = ["srun", *own, *python.bare_code(_PROBE, made)]
            output, failure = slurm_request.run(command, os.environ, timeout_sec=JOB_SEC)
            took_sec = time.time() - began
            if failure:
                if "immediate" in failure.lower() or "did not end" in failure:
                    return "warning", f"no node was free for a tiny job within {START_SEC} s: not proved", "try later"
                hint = "honed, its directory and Python must have the same paths on every node"
                return "error", f"a tiny job fails on a node: {failure}", hint
            answers = [json.loads(line) for line in output.splitlines()]
            nodes = ", ".join(sorted(str(item["node"]) for item in answers))
            if fault := _fault(directory, answers):
                return "error", f"{fault[0]} ({nodes})", fault[1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return "error", f"a tiny job cannot be tried: {error}", ""
    if late := [item for item in answers if not began - MAX_SKEW_SEC <= item["now"] <= began + took_sec + MAX_SKEW_SEC]:
        return "warning", f"the clock of {late[0]['node']} differs by {late[0]['now'] - began:.0f} s", "use NTP"
    if slurm.gpu_bytes and (warning := _gpu_fault(slurm, answers)):
        return warning
    return "ok", f"the same path, renames, links, appends, locks and time on {nodes}", ""


def _num_idle(slurm: SlurmConfig) -> int:
    partition = [f"--partition={slurm.partition}"] if slurm.partition else []
    command = ["sinfo", "--noheader", "--states=idle", "--Node", "--format=%N", *partition]
    names = set(slurm_request.run(command, os.environ, timeout_sec=COMMAND_SEC)[0].split())
    return max(1, min(MAX_NODES, len(names)))


def _fault(directory: Path, answers: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Return what the shared file system does not do, and what to do about it."""
    if any(not item["lock"] for item in answers):
        return "a lock that is held here is not seen on a node", "use a file system with locks"
    lines = [str(number) for number in range(20)]
    if any((directory / f"{item['node']}.log").read_text().splitlines() != lines for item in answers):
        return "lines that a node has appended to a file are lost", "use a file system with O_APPEND"
    if any((directory / f"{item['node']}.link").read_text() != item["node"] for item in answers):
        return "what a node has written is not seen here", "use one shared file system"
    if any(item["user"] != os.geteuid() for item in answers):
        return "a job runs as another user than this instance", "give users the same numbers on all machines"
    return None


def _gpu_fault(slurm: SlurmConfig, answers: list[dict[str, Any]]) -> tuple[Status, str, str] | None:
    """Return a difference between the GPUs that jobs get and those that they are planned for."""
    for item in answers:
        if not item["gpus"]:
            return (
                "error",
                f"a job on {item['node']} got no GPU from Slurm",
                "see gres.conf, or set slurm.gpu_bytes = 0",
            )
        memory, _, capability = str(item["gpu"]).partition(",")
        if memory.strip().isdecimal() and int(memory) * 2**20 < slurm.gpu_bytes * (1 - TOLERANCE):
            detail = f"a GPU on {item['node']} has {int(memory) * 2**20} bytes, but slurm.gpu_bytes is more"
            return "warning", detail, "set slurm.gpu_bytes to the smallest GPU's, or make a profile for each kind"
        planned = ".".join(map(str, slurm.gpu_compute_capability))
        if capability and capability.strip() != planned:
            detail = f"a GPU on {item['node']} has compute capability {capability.strip()}, planned is {planned}"
            return "warning", detail, "set slurm.gpu_compute_capability, or make a profile for each kind of GPU"
    return None


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
