"""Workers as jobs of a Slurm cluster, behind the same shim.

    start     start.json with a name of its own, durable ──► sbatch --no-requeue ──► shim on a node ──► worker
    end       the shim writes exit.json, and that counts first; Slurm's word counts where there is none

The name, honed-INSTANCE-JOB-ATTEMPT-START, is unique, and jobs are found by it alone: Slurm may give the number of a
lost job to another one. Whether a failed sbatch has submitted is not known, so the name is looked up first, and
submitted again only if Slurm knows none. Two jobs of one name cannot both start a worker: the shim takes a lock, and
starts nothing for a start that has ended. What Slurm does not answer is not known, and nothing is decided on it.

No command runs in the daemon's loop (slurm_desk.py). An instance of one user's own runs the commands itself. The shared
instance never does: it asks the helper, which runs them as the job's submitter (slurm_helper.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from honed.job.fence import VARIABLE as FENCE_VARIABLE
from honed.run import slurm_batch
from honed.run.process import inherited
from honed.run.runner import Exit, Live, exit_of, read_exit_record, read_lock_record
from honed.run.slurm_batch import Handed
from honed.run.slurm_client import Client
from honed.run.slurm_desk import Desk, Seen, Snapshot, run_here
from honed.spec.config import SLOT, SlurmConfig
from honed.system import durable, untrusted
from honed.system.clock import Moment
from honed.system.layout import AttemptLayout, JobLayout, Layout

log = logging.getLogger(__name__)

#: Seconds for which exit.json may come later than Slurm's word of the end: a node's file system delays it.
GONE_SEC = 10.0
#: Seconds before a job that Slurm does not know is submitted again.
AGAIN_SEC = 10.0
#: The time that is left to a worker, in its environment.
TIME_LEFT_VARIABLE = "HONED_TIME_LEFT_SEC"
NODE_FAIL = "NODE_FAIL"


@dataclass
class _Job:
    handed: Handed
    attempt: AttemptLayout
    submitted_at: float  #: when it was last handed over
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    gone_at: float | None = None  #: since when Slurm says that it is over, or knows nothing of it
    asked: list[list[str]] = field(default_factory=list)  #: the commands that end it
    is_asked: bool = False


class SlurmRunner:
    """Workers as jobs of a Slurm cluster."""

    name = "slurm"

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
        self._command = list(command or [sys.executable, "-m", "honed.worker"])
        self._clock = clock
        self._prefix = f"honed-{_instance(layout)}-"
        #: Jobs of the shared instance run as their submitters, by the helper.
        self._is_shared = layout.is_of_system
        self._desk = Desk(self._prefix, Client().ask if self._is_shared else run_here, clock=clock)
        self._jobs: dict[int, _Job] = {}

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        files = self._layout.job(job_id)
        variables = dict(environment)
        device = variables.get("CUDA_VISIBLE_DEVICES") or "cpu"
        if device.startswith(SLOT):
            del variables["CUDA_VISIBLE_DEVICES"]  # Slurm chooses the GPUs, and names them
        left = variables.pop(TIME_LEFT_VARIABLE, None)
        variables[FENCE_VARIABLE] = f"{start}:{files.attempt(number).exit_path}"
        handed = Handed(
            number,
            start,
            f"{self._prefix}{job_id}-{number}-{start}",
            device,
            time_left_sec=float(left) if left is not None else None,
            num_gpus=int(variables.get("HONED_NUM_RANKS", "1")),
            backend=backend,
            environment=variables,
        )
        if not self._is_shared:  # else the helper makes both, the directory as the submitter
            durable.make_dir(files.attempt(number).dir)
            script = slurm_batch.script(files, handed, self._command)
            durable.write(_script(files.attempt(number)), script.encode(), mode=0o700)
        handed.write(files)  # the intent is durable before anything is submitted
        self._add(job_id, handed)
        self._submit(job_id)

    def _add(self, job_id: int, handed: Handed) -> None:
        files = self._layout.job(job_id)
        if self._is_shared:
            command = ["submit", _tag(job_id, handed)]
        else:
            attempt = files.attempt(handed.number)
            command = [*slurm_batch.submission(files, handed, self._config()), str(_script(attempt))]
        self._jobs[job_id] = _Job(handed, files.attempt(handed.number), -math.inf, command)

    def _submit(self, job_id: int) -> None:
        job = self._jobs[job_id]
        job.submitted_at, job.gone_at = self._clock(), None
        self._desk.run(job.handed.name, [job.argv], environment=_environment())

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:  # noqa: ARG002
        files = self._layout.job(job_id)
        try:
            handed = read(files)
        except (OSError, ValueError):
            handed = None
        if handed is None or (handed.number, handed.start) != (number, start):
            attempt = files.attempt(number)
            if not read_lock_record(attempt, start) and read_exit_record(attempt, start) is None:
                return False  # an intent is durable before it is handed over
            handed = Handed(number, start, f"{self._prefix}{job_id}-{number}-{start}", "cpu")
            handed.write(files)
        self._add(job_id, handed)
        return True

    def live(self) -> list[Live]:
        snapshot = self._desk.snapshot
        if snapshot is None:
            raise OSError(f"Slurm has not answered yet{f': {self._desk.fault}' if self._desk.fault else ''}")
        found = [self._live(name) for name, jobs in snapshot.jobs.items() if any(not job.is_over for job in jobs)]
        return [each for each in found if each is not None]

    def _live(self, name: str) -> Live | None:
        """Return the worker of a Slurm job; None if its end is recorded."""
        try:
            job_id, number, start = map(int, name.removeprefix(self._prefix).split("-"))
        except ValueError:
            return None
        files = self._layout.job(job_id)
        if not files.dir.is_dir() or read_exit_record(files.attempt(number), start) is not None:
            return None
        device = None
        with contextlib.suppress(OSError, ValueError):
            device = read(files).device
        return Live(job_id, (number, start), device)

    def is_supervised(self, job_id: int) -> bool:  # noqa: ARG002
        return False

    def is_left(self, job_id: int) -> bool:  # noqa: ARG002
        return True

    def began(self, job_id: int) -> Moment | None:
        job = self._jobs[job_id]
        at = read_lock_record(job.attempt, job.handed.start).get("started_at")
        return Moment(float(at)) if isinstance(at, int | float) else None

    def is_machine_going_down(self) -> bool:
        return False

    def stop(self, job_id: int) -> None:
        """Withdraw a job that waits; have one that runs write a checkpoint. Slurm's own state stays as it is."""
        self._ask(job_id, "withdraw", "terminate")

    def dump(self, job_id: int) -> None:
        self._ask(job_id, "abort")

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        self._ask(job_id, *["kill"] * shim_too, "cancel")

    def _ask(self, job_id: int, *verbs: str) -> None:
        job = self._jobs[job_id]
        if self._is_shared:
            job.asked = [[verb, _tag(job_id, job.handed)] for verb in verbs]
        else:
            job.asked = [slurm_batch.ending(verb, job.handed.name, os.geteuid()) for verb in verbs]
        job.is_asked = True
        self._send(job)

    def _send(self, job: _Job) -> None:
        """Hand over the commands that end a job, once nothing of it is under way."""
        if job.asked and self._desk.answer(job.handed.name) is not None:
            self._desk.run(job.handed.name, job.asked, environment=_environment())
            job.asked = []

    def poll(self, job_id: int) -> Exit | None:
        job = self._jobs[job_id]
        if (record := read_exit_record(job.attempt, job.handed.start)) is not None:
            return self._ended(job_id, record)
        answer = self._desk.answer(job.handed.name)
        if answer is None:
            return None
        if answer.commands and answer.commands[0] != job.argv and answer.fault and not job.asked:
            job.asked = answer.commands  # not heard, perhaps: once more
        self._send(job)
        snapshot = self._desk.snapshot
        if snapshot is None or snapshot.began < max(job.submitted_at, answer.at):
            self._note(job_id, Seen("", "", answer.fault, ""))
            return None
        return self._look(job_id, job, snapshot, answer.fault)

    def _look(self, job_id: int, job: _Job, snapshot: Snapshot, fault: str) -> Exit | None:
        """Decide by Slurm's word, where there is no exit.json."""
        seen = snapshot.jobs.get(job.handed.name, ())
        going = [each for each in seen if not each.is_over]
        if going or seen:
            self._note(job_id, (going or seen)[0])
        if going:
            job.gone_at = None
            return None
        if job.gone_at is None:
            job.gone_at = snapshot.began
        is_lost = any(each.state == NODE_FAIL for each in seen)
        # Slurm itself cancels a job that got the number of one that the controller had forgotten and a node had not.
        is_withdrawn = any(each.state == "CANCELLED" and each.nodes for each in seen)
        is_unknown = not seen or is_withdrawn
        if is_unknown and not job.is_asked and not read_lock_record(job.attempt, job.handed.start):
            self._note(job_id, Seen("", "", fault or "not known to Slurm", ""))
            if (job.handed.backend or _script(job.attempt).exists()) and self._clock() - job.submitted_at >= AGAIN_SEC:
                what = "cancelled" if is_withdrawn else "does not know"
                log.warning("job %d: Slurm %s %s: submitted again", job_id, what, job.handed.name)
                self._submit(job_id)
            return None
        if not is_lost and snapshot.began - job.gone_at < GONE_SEC:
            return None
        if (record := self._settle(job, seen, is_lost=is_lost)) is None:
            return None
        return self._ended(job_id, record)

    def _settle(self, job: _Job, seen: Sequence[Seen], *, is_lost: bool) -> dict[str, Any] | None:
        """Record an end that no shim has recorded, so that no late one may start the worker, and a worker that goes on
        on a lost node puts nothing into place. None if the worker lives, as far as its lock shows."""
        with contextlib.ExitStack() as stack:
            try:
                fd = untrusted.open_plain(job.attempt.dir / "lock", flags=os.O_CREAT | os.O_RDWR, mode=0o664)
                stack.callback(os.close, fd)
                if not is_lost:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as error:  # its submitter planted something there
                log.warning("%s: its lock cannot be taken: %s", job.handed.name, error)
            record = read_exit_record(job.attempt, job.handed.start)
            if record is None:
                states = {each.state for each in seen}
                lost = {"service_result": "node-lost"} if is_lost else {}
                asked = {"was_asked": True} if states & {"CANCELLED"} else {}
                record = {"start": job.handed.start, "status": None, "signal": None, **lost, **asked}
                record |= {"was_out_of_memory": "OUT_OF_MEMORY" in states, "ended_at": time.time()}
                try:
                    untrusted.write_plain(job.attempt.exit_path, durable.as_json(record))
                except OSError as error:
                    log.warning("%s: its end cannot be recorded: %s", job.handed.name, error)
        return record

    def _ended(self, job_id: int, record: dict[str, Any]) -> Exit:
        began = self.began(job_id)
        job = self._jobs.pop(job_id)
        self._desk.forget(job.handed.name)
        return replace(exit_of(record), began=began)

    def _note(self, job_id: int, seen: Seen) -> None:
        """Keep what Slurm says of a job, for `honectl show`."""
        job = self._jobs[job_id]
        told = replace(
            job.handed,
            slurm_id=seen.slurm_id or job.handed.slurm_id,
            state=seen.state or job.handed.state,
            reason="" if seen.reason == "None" else seen.reason,
            nodes=seen.nodes or job.handed.nodes,
        )
        if told != job.handed:
            told.write(self._layout.job(job_id))
            job.handed = told


def read(job: JobLayout) -> Handed:
    """Read start.json. Raises ValueError or OSError if there is none of Slurm's."""
    return slurm_batch.parse(job.start_path.read_bytes())


def _tag(job_id: int, handed: Handed) -> str:
    """Return a start as the helper knows it."""
    return f"{job_id}-{handed.number}-{handed.start}"


def _script(attempt: AttemptLayout) -> Path:
    return attempt.dir / "slurm.sh"


def _environment() -> dict[str, str]:
    """Return the environment of Slurm's commands, which jobs inherit: without options of somebody's shell."""
    return {
        key: value
        for key, value in inherited().items()
        if key == "SLURM_CONF" or not key.startswith(("SLURM_", "SBATCH_"))
    }


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
