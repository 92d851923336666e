"""`honectl doctor` on a Slurm cluster: whether the commands work, and the nodes have what jobs need, by a tiny job.

A job that does not start soon is withdrawn: a busy cluster is no fault.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from honed.run.choice import why_no_slurm
from honed.run.slurm_client import why_not_as
from honed.spec.config import Config
from honed.system.layout import Layout

Status = Literal["ok", "warning", "error"]
#: Seconds for a command, for the start of the tiny job, and for all of it.
COMMAND_SEC, START_SEC, JOB_SEC = 15, 10, 40
#: Seconds by which the clocks may differ.
MAX_SKEW_SEC = 5.0
#: What the tiny job does in a directory of the instance, whose lock we hold.
_PROBE = """
import fcntl, json, os, sys, time
place = sys.argv[1]
told = {"now": time.time(), "user": os.geteuid()}
with open(place + "/new", "w") as file: file.write("new")
os.rename(place + "/new", place + "/old")
fd = os.open(place + "/log", os.O_WRONLY | os.O_APPEND); os.write(fd, b"two\\n"); os.close(fd)
with open(place + "/lock", "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        told["lock"] = False
    except BlockingIOError:
        told["lock"] = True
print(json.dumps(told))
"""


def findings(layout: Layout, config: Config) -> Iterator[tuple[Status, str, str]]:
    """Yield status, detail and hint of each check."""
    if problem := why_no_slurm(layout):
        yield "error", problem, "see docs/cluster.md"
        return
    done = _run(["squeue", "--noheader", f"--user={os.geteuid()}"], COMMAND_SEC)
    if isinstance(done, str):
        yield "error", f"the controller does not answer: {done}", "scontrol ping; systemctl status slurmctld munge"
        return
    if not layout.is_of_system:
        yield "ok", "jobs run on the cluster as this instance's own user", ""
        yield _prove(layout.state_dir, config)
        return
    yield "ok", "each job runs on the cluster as its submitter", ""
    if problem := why_not_as(os.geteuid()):
        yield "ok", f"nodes are not tried: {problem}", "run honectl doctor as somebody who submits jobs"
    elif not os.access(layout.staged_dir, os.W_OK | os.X_OK):
        yield "warning", "nodes are not tried: you may not submit jobs", "adduser NAME honed-submit"
    else:
        yield _prove(layout.staged_dir, config)


def _prove(place_dir: Path, config: Config) -> tuple[Status, str, str]:
    """Have a node use a directory below this one."""
    try:
        with tempfile.TemporaryDirectory(dir=place_dir, prefix=".doctor-") as made, _held(Path(made)):
            place = Path(made)
            (place / "log").write_text("one\n")
            own = ["--nodes=1", "--ntasks=1", "--time=1", "--job-name=honed-doctor", f"--immediate={START_SEC}"]
            command = ["srun", *own, *config.slurm.as_options(), sys.executable, "-I", "-S", "-c", _PROBE, made]
            began = time.time()
            done = _run(command, JOB_SEC)
            took_sec = time.time() - began
            if isinstance(done, str):
                if "immediate" in done.lower() or "did not end" in done:
                    return "warning", f"no node was free for a tiny job within {START_SEC} s: not proved", "try later"
                hint = "honed, its directory and Python must have the same paths on every node"
                return "error", f"a tiny job fails on a node: {done}", hint
            told = json.loads(done.stdout)
            if not told["lock"]:
                return "error", "a lock that is held here is not seen on a node", "use a file system with locks"
            if not (place / "old").exists() or (place / "log").read_text() != "one\ntwo\n":
                return "error", "what a node has written is not seen here", "use one shared file system"
            if not began - MAX_SKEW_SEC <= told["now"] <= began + took_sec + MAX_SKEW_SEC:
                return "warning", f"the clock of a node differs by {told['now'] - began:.0f} s", "use NTP"
    except (OSError, ValueError, KeyError) as error:
        return "error", f"a tiny job cannot be tried: {error}", ""
    return "ok", "a node has the same path, renames, appends, locks and time", ""


@contextlib.contextmanager
def _held(place: Path) -> Iterator[None]:
    """Hold a lock for a while."""
    with (place / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], timeout_sec: float) -> subprocess.CompletedProcess[str] | str:
    """Run a command. Returns its fault if it has one."""
    try:
        done = subprocess.run(
            command, timeout=timeout_sec, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {timeout_sec:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return done if done.returncode == 0 else " ".join(done.stderr.split())[-300:] or f"status {done.returncode}"
