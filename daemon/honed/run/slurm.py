"""Workers as jobs of a Slurm cluster, behind the same shim.

    start     start.json with a name of its own, durable ──► sbatch --no-requeue ──► shim on a node ──► worker
    end       the shim writes exit.json, and that counts first; Slurm's word counts where there is none

A job of several nodes is one shim on the first of them, whose command is srun, which starts one on every node
(shim.py).

The name, honed-INSTANCE-JOB-ATTEMPT-START, is unique, and jobs are found by it alone: Slurm may give the number of a
lost job to another one. Two jobs of one name cannot both start a worker: the shim takes a lock, and starts nothing for
a start that has ended. What becomes of one job, and when it is submitted again: slurm_job.py.

No command runs in the daemon's loop (slurm_desk.py). An instance of one user's own runs the commands itself. The shared
instance never does: it asks the helper, which runs them as the job's submitter (slurm_helper.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from honed.job.fence import VARIABLE as FENCE_VARIABLE
from honed.run import slurm_batch
from honed.run.runner import (
    NODES_VARIABLE,
    PROFILE_VARIABLE,
    RANKS_VARIABLE,
    TIME_LEFT_VARIABLE,
    Exit,
    Live,
    NotNowError,
    Runner,
    has_ended,
    read_exit_record,
    read_lock_record,
)
from honed.run.slurm_batch import Handed
from honed.run.slurm_client import Client
from honed.run.slurm_desk import Desk, run_here
from honed.run.slurm_job import SlurmJob, script_path, tag
from honed.spec.config import SLOT, SlurmConfig
from honed.system import access, durable, python, untrusted
from honed.system.clock import Moment
from honed.system.device import Device
from honed.system.layout import JobFiles, Layout

log = logging.getLogger(__name__)


class SlurmRunner(Runner):
    """Workers as jobs of a Slurm cluster."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], SlurmConfig],
        *,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._config = config
        self._command = list(command or python.module("honed.worker"))
        self._clock = clock
        self._prefix = f"honed-{_instance(layout)}-"
        #: Jobs of the shared instance run as their submitters, by the helper.
        self._is_shared = layout.is_of_system
        self._desk = Desk(
            self._prefix, Client().ask if self._is_shared else run_here, is_shared=self._is_shared, clock=clock
        )
        self._jobs: dict[int, SlurmJob] = {}

    def devices(self, gpus: list[int] | None) -> list[Device]:  # noqa: ARG002
        return self._config().devices()

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        files = self._layout.files(job_id)
        variables = dict(environment)
        device = variables.get("CUDA_VISIBLE_DEVICES") or "cpu"
        if device.startswith(SLOT):
            del variables["CUDA_VISIBLE_DEVICES"]  # Slurm chooses the GPUs, and names them
        left, profile = variables.pop(TIME_LEFT_VARIABLE, None), variables.pop(PROFILE_VARIABLE, None)
        variables[FENCE_VARIABLE] = f"{start}:{files.attempt(number).exit_path}"
        handed = Handed(
            number,
            start,
            f"{self._prefix}{job_id}-{number}-{start}",
            device,
            time_left_sec=float(left) if left is not None else None,
            num_gpus=int(variables.get(RANKS_VARIABLE, "1")),
            num_nodes=int(variables.get(NODES_VARIABLE, "1")),
            profile=profile,
            backend=backend,
            environment=variables,
        )
        command = self._submission(job_id, handed)
        if not self._is_shared:  # else the helper makes both, the directory as the submitter
            untrusted.make_dirs(files.attempt(number).dir)
            script = slurm_batch.script(files, handed, self._command)
            untrusted.write_plain(script_path(files.attempt(number)), script.encode(), mode=0o700)
        handed.write(files)  # the intent is durable before anything is submitted
        self._add(job_id, handed, command)
        self._jobs[job_id].submit()

    def _submission(self, job_id: int, handed: Handed) -> list[str]:
        """Return the command that submits a start. Raises NotNowError if its profile is not configured any more."""
        files = self._layout.files(job_id)
        try:
            command = slurm_batch.submission(files, handed, self._config())
        except KeyError:
            raise NotNowError(f"resources.profile: {handed.profile} is not in honed.toml any more") from None
        if self._is_shared:
            return ["submit", tag(job_id, handed), *filter(None, [handed.profile])]
        return [*command, str(script_path(files.attempt(handed.number)))]

    def _add(self, job_id: int, handed: Handed, command: list[str]) -> None:
        lane = 0
        if self._is_shared:  # a job whose directory cannot be looked at waits for itself alone
            lane = access.job_user(self._layout.files(job_id).place) or -job_id
        self._jobs[job_id] = SlurmJob(
            self._layout, job_id, handed, self._desk, self._submission, command, lane=lane, clock=self._clock
        )

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:  # noqa: ARG002
        files = self._layout.files(job_id)
        try:
            handed = read(files)
        except (OSError, ValueError) as error:
            if durable.fault_at_persons(error):
                raise  # it may have started
            handed = None
        name = f"{self._prefix}{job_id}-{number}-{start}"
        if handed is None or (handed.number, handed.start, handed.name) != (number, start, name):
            attempt = files.attempt(number)
            if not read_lock_record(attempt, start) and read_exit_record(attempt, start) is None:
                return False  # an intent is durable before it is handed over
            handed = Handed(number, start, name, "cpu")
            handed.write(files)
        try:
            command = self._submission(job_id, handed)
        except NotNowError as problem:
            log.warning("job %d: %s: it is not submitted again if Slurm does not know it", job_id, problem)
            command = []
        self._add(job_id, handed, command)
        return True

    def live(self) -> list[Live]:
        snapshot = self._desk.snapshot
        if snapshot is None:
            raise OSError(f"Slurm has not answered yet{f': {self._desk.fault}' if self._desk.fault else ''}")
        workers = [self._live(name) for name, jobs in snapshot.jobs.items() if any(not job.is_over for job in jobs)]
        return [item for item in workers if item is not None]

    def _live(self, name: str) -> Live | None:
        """Return the worker of a Slurm job; None if its end is recorded, or if it is not honed that has submitted it:
        a submitter can give their own jobs any name."""
        try:
            job_id, number, start = map(int, name.removeprefix(self._prefix).split("-"))
        except ValueError:
            return None
        files = self._layout.files(job_id)
        if not files.place.is_dir() or has_ended(files.attempt(number), start):
            return None
        handed = None
        with contextlib.suppress(OSError, ValueError):
            handed = read(files)
        # An intent is durable before any submission.
        is_ours = handed is not None and handed.name == name and not handed.is_over
        if self._is_shared and not is_ours:
            return None
        return Live(job_id, (number, start), handed.device if handed is not None else None)

    def is_left(self, job_id: int) -> bool:  # noqa: ARG002
        return True

    def began(self, job_id: int) -> Moment | None:
        return self._jobs[job_id].began()

    def is_suspended(self, job_id: int) -> bool:
        return self._jobs[job_id].is_suspended()

    def stop(self, job_id: int) -> None:
        """Withdraw a job that waits; have one that runs write a checkpoint. Slurm's own state stays as it is."""
        self._jobs[job_id].end("withdraw", "terminate")

    def dump(self, job_id: int) -> None:
        self._jobs[job_id].end("abort")

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        self._jobs[job_id].end(*["kill"] * shim_too, "cancel")

    def poll(self, job_id: int) -> Exit | None:
        job = self._jobs[job_id]
        ended = job.poll()
        if ended is not None:  # what fails before is tried again
            del self._jobs[job_id]
            self._desk.forget(job.handed.name)
        return ended


def read(job: JobFiles) -> Handed:
    """Read start.json. Raises ValueError or OSError if there is none of Slurm's, or if it is not honed's own: the
    submitter may write into the directory."""
    fd = untrusted.open_plain(job.start_path)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_nlink != 1:
            raise PermissionError(errno.EPERM, "not a file of honed's own", str(job.start_path))
        return slurm_batch.parse(file.read(untrusted.MAX_BYTES))


def _instance(layout: Layout) -> str:
    """Return the instance's name in Slurm, made once."""
    path = layout.state_dir / "slurm-instance"
    with contextlib.suppress(FileNotFoundError):
        if name := path.read_text().strip():
            return name
    name = uuid.uuid4().hex[:8]
    durable.make_dir(path.parent)
    durable.write(path, f"{name}\n".encode(), mode=0o644)
    return name
