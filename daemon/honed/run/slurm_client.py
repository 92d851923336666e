"""The shared instance's side of its helper, honed-slurm@.service, which runs Slurm's commands as a job's submitter.

A request is a line of words, an answer a line of JSON: {"output", "fault"}.

    submit JOB-ATTEMPT-START [PROFILE]          sbatch
    withdraw, terminate, abort, kill, cancel JOB-ATTEMPT-START      scancel (slurm_batch.ENDS)
    list                                        squeue, of the jobs of this instance

The daemon has no network, and so asks the helper for lists, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from honed.run.slurm_desk import COMMAND_SEC
from honed.system import access
from honed.system.layout import Layout

SOCKET_PATH = Path("/run/honed-slurm.sock")
#: Bytes of an answer: a line of squeue has a hundred.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
#: Seconds that the helper has beyond those of a command.
ANSWER_SEC = 10.0


class Client:
    """The connections to the helper, one per thread."""

    def __init__(self, path: Path = SOCKET_PATH) -> None:
        self._path = path
        self._mine = threading.local()

    def ask(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:  # noqa: ARG002
        """Ask the helper. Returns the output, and the fault, empty if there was none."""
        try:
            line = self._connected()
            with contextlib.suppress(BrokenPipeError):  # it has refused us already, and its answer can be read
                line.write(" ".join(words).encode("ascii") + b"\n")
                line.flush()
            if not (reply := line.readline(MAX_ANSWER_BYTES)):
                raise ConnectionResetError("it ended: journalctl -u 'honed-slurm@*'")
            answer = json.loads(reply)
            return str(answer["output"]), str(answer["fault"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._close()
            return "", f"honed-slurm.socket: {error}"

    def _connected(self) -> io.BufferedRWPair:
        opened: io.BufferedRWPair | None = getattr(self._mine, "line", None)
        if opened is not None:
            return opened
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(COMMAND_SEC + ANSWER_SEC)
            connection.connect(str(self._path))
            self._mine.line = made = connection.makefile("rwb")
        return made

    def _close(self) -> None:
        if (line := getattr(self._mine, "line", None)) is not None:
            self._mine.line = None
            with contextlib.suppress(OSError):  # what it still held cannot be written
                line.close()


def why_none(layout: Layout) -> str:
    """Return why workers cannot be jobs of a Slurm cluster; empty if they can."""
    if layout.is_of_system:
        return why_not(layout)
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    return f"{', '.join(missing)} cannot be found: install slurm-client" if missing else ""


def why_not(layout: Layout, path: Path = SOCKET_PATH) -> str:
    """Return why the shared instance cannot run jobs as their submitters on a cluster; empty if it can."""
    try:
        is_there = stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        is_there = False
    if not is_there:
        return (
            "this instance is shared, and its jobs would run as honed's user on the cluster: enable the helper that "
            "submits each job as its submitter (systemctl enable --now honed-slurm.socket), or use an instance of one "
            "user's own (--root DIR, or --user)"
        )
    if not access.has_acls(layout.jobs_dir):
        return f"{layout.jobs_dir}: the file system has no POSIX ACLs, so jobs cannot run as their submitters"
    return ""


def why_not_as(uid: int) -> str:
    """Return why jobs of a user cannot run on the cluster; empty if they can."""
    ours = {person.uid for name in (access.DAEMON_USER, access.WORKERS_USER) if (person := access.person(name))}
    if not access.is_person(uid) or uid in ours:
        return f"jobs run as their submitters on the cluster, and those of {access.user_name(uid)} may not"
    return ""
