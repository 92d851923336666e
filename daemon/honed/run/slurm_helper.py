"""The helper of the shared instance on a Slurm cluster, `honed-slurm`: runs Slurm's commands as a job's submitter.

honed-slurm.socket starts it, as root, for every connection of the daemon's. The kernel says who has connected, and
nobody but honed's user is heard. A request has a verb, the number of a start, and perhaps the name of a profile
(slurm_client.py). All else comes from files:

    /var/spool/honed/running/<id>.json    the submitter; the job's directory must let that user write, and no other
    /var/lib/honed/jobs/<id>/start.json   the start, as the daemon has recorded it
    /etc/honed/honed.toml                 the options of sbatch; only root may be able to change it

The first two must be files of honed's own, and no links; they are read with honed's permissions, as root may have none
on a file server. Root and system accounts are refused, and so are users that the machine does not know.

A command runs with the user's permissions and groups, and an environment of its own. The directory of the attempt is
made in the same way: a link that the user has planted leads nowhere where they may not go themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed.job.job import Job, State
from honed.job.spool import Entries
from honed.run import slurm_batch, slurm_client
from honed.run.slurm_batch import Handed
from honed.run.slurm_desk import COMMAND_SEC, run_here
from honed.run.slurm_request import run
from honed.spec import config as configs
from honed.spec.config import SlurmConfig
from honed.system import access, python, untrusted
from honed.system.access import Person
from honed.system.error import HonedError
from honed.system.layout import JobFiles, Layout
from honed.system.personpath import PersonPath

#: Seconds for the directory of an attempt.
MKDIR_SEC = 5.0
#: Bytes of a request.
MAX_REQUEST_BYTES = 256
#: JOB-ATTEMPT-START.
_START = re.compile(r"([1-9][0-9]{0,17})-([0-9]{1,9})-([0-9]{1,9})")
#: What the daemon may put into a worker's environment.
_VARIABLE = re.compile(
    r"HONED_[A-Z_]+|HF_HOME|HF_HUB_OFFLINE|CUDA_VISIBLE_DEVICES|TOKENIZERS_PARALLELISM|PYTHONUNBUFFERED"
)
_UCRED = struct.Struct("3i")


class RefusedError(Exception):
    """A request that is not carried out; the message is one sentence."""


@dataclass(frozen=True)
class _Start:
    job: JobFiles
    handed: Handed
    who: Person


class Helper:
    """Carries out the requests of one connection."""

    def __init__(self, layout: Layout, daemon: Person, *, worker: Sequence[str]) -> None:
        self._layout = layout
        self._daemon = daemon
        self._worker = worker

    def answer(self, request: str) -> tuple[str, str]:
        """Return the output of a command, and its fault. Raises RefusedError."""
        match request.split(" "):
            case ["list"]:
                return self._list()
            case ["submit", start, *profile] if len(profile) <= 1:
                return self._submit(self._find(start), "".join(profile))
            case [verb, start] if verb in slurm_batch.ENDS:
                # Without start.json, which the submitter can remove.
                who = self._submitter(*self._numbers(start)[:1])
                return _run(slurm_batch.ending(verb, f"honed-{self._instance()}-{start}", who.uid), who)
        raise RefusedError("not a request")

    def _submit(self, start: _Start, profile: str) -> tuple[str, str]:
        job, handed, options = start.job, replace(start.handed, profile=profile or None), self._options(profile)
        try:
            if strange := [name for name in handed.environment if not _VARIABLE.fullmatch(name)]:
                raise RefusedError(f"{job.start_path}: it sets {strange[0]}")
            # Limits of a job on its node are those of the node, and not of the helper's unit.
            command = ["sbatch", "--propagate=NONE", *slurm_batch.submission(job, handed, options)[1:]]
            script = slurm_batch.script(job, handed, self._worker)
        except (TypeError, AttributeError, KeyError) as error:
            raise RefusedError(f"{job.start_path}: {error}") from error
        # Both end before the daemon gives the answer up.
        made = _run(["mkdir", "-p", "--", str(job.attempt(handed.number).dir)], start.who, timeout_sec=MKDIR_SEC)
        return made if made[1] else _run(command, start.who, stdin=script)

    def _list(self) -> tuple[str, str]:
        """List the jobs that bear a job's name and are its submitter's: anybody can name theirs so."""
        # As root: a cluster may hide the jobs of other users from everybody else (PrivateData=).
        mark = slurm_batch.new_mark()
        command, variables = slurm_batch.listing(mark)
        output, fault = run_here(command, {**_environment(), **variables})
        owners: dict[int, int | None] = {}
        own = []
        for item in slurm_batch.listed(output, mark):
            job_id = int(item.name.split("-")[2])
            if job_id not in owners:
                with self._as_daemon():
                    owners[job_id] = access.job_user(self._layout.files(job_id).place)
            if item.uid == owners[job_id]:
                own.append(str(item))
        return "\n".join(own), fault

    def _options(self, profile: str) -> SlurmConfig:
        """Return the administrator's options, which have this profile. Raises RefusedError unless they are root's
        alone."""
        layout = self._layout
        made_later = layout.config_dropin_dir / "new.toml"
        for path in [layout.config_path, *sorted(layout.config_dropin_dir.glob("*.toml")), made_later]:
            if who := access.replacer(path) or _other_owner(path):
                raise RefusedError(f"{path}: {who} can change it, and not only root")
        try:
            options = configs.load(layout).slurm
        except HonedError as error:
            raise RefusedError(f"the configuration: {error.message}") from error
        if profile and profile not in options.profiles:
            raise RefusedError("no profile of honed.toml")
        return options

    # -- the start ----------------------------------------------------------------------------------------------------

    def _find(self, tag: str) -> _Start:
        job_id, number, start = self._numbers(tag)
        who, job = self._submitter(job_id), self._layout.files(job_id)
        try:
            with self._as_daemon():
                handed = slurm_batch.parse(self._read(job.place / "start.json"))
        except (OSError, ValueError) as error:
            raise RefusedError(f"{job.start_path}: {error}") from error
        if (handed.number, handed.start, handed.name) != (number, start, f"honed-{self._instance()}-{tag}"):
            raise RefusedError(f"{job.start_path}: not this start's")
        return _Start(job, handed, who)

    def _numbers(self, tag: str) -> tuple[int, int, int]:
        if (match := _START.fullmatch(tag)) is None:
            raise RefusedError("not the number of a start")
        job_id, number, start = map(int, match.groups())
        return job_id, number, start

    def _instance(self) -> str:
        try:
            with self._as_daemon():
                return self._read(self._layout.state_dir / "slurm-instance").decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise RefusedError(f"the instance's name in Slurm: {error}") from error

    def _submitter(self, job_id: int) -> Person:
        """Return a running job's submitter. Raises RefusedError."""
        try:
            with self._as_daemon():
                entry_path = Entries(self._layout).path(job_id, State.RUNNING)
                entry = Job.from_json(self._read(entry_path), State.RUNNING)
                uid = self._user(self._layout.files(job_id))
        except (OSError, ValueError) as error:
            raise RefusedError(f"job {job_id}: {error}") from error
        if why := slurm_client.why_not_as(entry.uid):
            raise RefusedError(f"job {job_id}: {why}")
        if entry.id != job_id or entry.uid != uid:
            raise RefusedError(f"job {job_id}: its entry and its directory do not name the same submitter")
        if not access.is_known(uid) or (who := access.person(uid)) is None:
            raise RefusedError(f"job {job_id}: its submitter, user {uid}, is not known to this machine")
        return who

    def _user(self, job: JobFiles) -> int | None:
        """Return the user whom a job's directory lets write."""
        with untrusted.directory(PersonPath(job.place.parent, (job.place.name,), is_own=True)) as fd:
            if os.fstat(fd).st_uid != self._daemon.uid:
                raise RefusedError(f"{job.dir}: not honed's")
            return access.job_user(fd)

    def _read(self, path: Path) -> bytes:
        """Read a file of honed's own. Raises OSError or RefusedError."""
        fd = untrusted.open_plain(PersonPath(path.parents[1], path.parts[-2:], is_own=True))
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if info.st_uid != self._daemon.uid or info.st_nlink != 1:
                raise RefusedError(f"{path}: not a file of honed's own")
            return file.read(untrusted.MAX_BYTES)

    @contextlib.contextmanager
    def _as_daemon(self) -> Iterator[None]:
        """Have honed's permissions on files, and no others, for a while."""
        os.setgroups(sorted(self._daemon.gids))
        os.setegid(pwd.getpwuid(self._daemon.uid).pw_gid)
        os.seteuid(self._daemon.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups([])


def _run(command: Sequence[str], who: Person, *, stdin: str = "", timeout_sec: float = COMMAND_SEC) -> tuple[str, str]:
    """Run a command as a user, with all their groups and no environment of ours."""
    user = pwd.getpwuid(who.uid)
    own: dict[str, Any] = {"user": who.uid, "group": user.pw_gid, "extra_groups": sorted(who.gids)}
    variables = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    environment = {**_environment(), **variables}
    return run(command, environment, timeout_sec=timeout_sec, stdin=stdin, umask=0o007, cwd="/", **own)


def _environment() -> dict[str, str]:
    """Return the environment of Slurm's commands, which jobs inherit: what a drop-in of the unit may set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in {"PATH", "SLURM_CONF"} or name.startswith(("GLOO_", "NCCL_"))
    }
    return {"LANG": "C.UTF-8", **kept}


def _other_owner(path: Path) -> str:
    """Describe who besides root can write a file; empty if nobody can, or there is none."""
    try:
        with path.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            return f"the user {access.user_name(owner)}" if owner else access.other_writers(file.fileno())
    except FileNotFoundError:
        return ""


def serve(connection: socket.socket, layout: Layout, *, worker: Sequence[str]) -> int:
    """Serve one connection to its end. Returns the exit status."""
    _pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    daemon = access.person(access.DAEMON_USER)
    with connection, connection.makefile("rwb") as line:
        if daemon is None or uid != daemon.uid:
            _answer(line, "", _refused(f"user {uid} is not honed's"))
            return 77  # EX_NOPERM
        helper = Helper(layout, daemon, worker=worker)
        while (request := line.readline(MAX_REQUEST_BYTES)).endswith(b"\n"):
            try:
                output, fault = helper.answer(request[:-1].decode("ascii"))
            except (RefusedError, UnicodeDecodeError) as error:
                output, fault = "", _refused(str(error))
            _answer(line, output, fault)
        if request:
            _answer(line, "", _refused("not a request"))
    return 0


def _refused(why: str) -> str:
    print(f"<4>refused: {why}", file=sys.stderr, flush=True)
    return f"refused: {why}"


def _answer(line: Any, output: str, fault: str) -> None:
    line.write(json.dumps({"output": output, "fault": fault}).encode() + b"\n")
    line.flush()


def main() -> int:
    """Run the `honed-slurm` command, with its connection as standard input."""
    python.protect()
    worker = python.module("honed.worker")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        return serve(socket.socket(fileno=os.dup(0)), Layout(Path("/")), worker=worker)
    return 0


if __name__ == "__main__":
    sys.exit(main())
