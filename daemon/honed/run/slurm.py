"""Workers as jobs of a Slurm cluster, behind the same shim.

    start     start.json with a name of its own, durable ──► sbatch --no-requeue ──► shim on a node ──► worker
    end       the shim writes exit.json, and that counts first; Slurm's word counts where there is none

A job of several nodes is one shim on the first of them, whose command is srun, which starts one on each (shim.py).

The name, honed-INSTANCE-JOB-ATTEMPT-START, is unique, and jobs are found by it alone: Slurm may give the number of a
lost job to another one. Whether a failed sbatch has submitted is not known, so the name is looked up first, and
submitted again only if Slurm knows none, after growing pauses. If Slurm says twice that it will never take the job, the
start ends. Two jobs of one name cannot both start a worker: the shim takes a lock, and
starts nothing for a start that has ended. What Slurm does not answer is not known, and nothing is decided on it.

No command runs in the daemon's loop (slurm_desk.py). An instance of one user's own runs the commands itself. The shared
instance never does: it asks the helper, which runs them as the job's submitter (slurm_helper.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
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
from honed.run.runner import (
    NODES_VARIABLE,
    PROFILE_VARIABLE,
    RANKS_VARIABLE,
    TIME_LEFT_VARIABLE,
    Exit,
    Live,
    NotNowError,
    exit_of,
    read_exit_record,
    read_lock_record,
    seconds,
)
from honed.run.slurm_batch import Handed
from honed.run.slurm_client import Client
from honed.run.slurm_desk import OVER, Desk, Seen, Snapshot, run_here
from honed.run.slurm_request import environment, is_refusal
from honed.spec.config import SLOT, SlurmConfig
from honed.system import access, durable, untrusted
from honed.system.backoff import Backoff
from honed.system.clock import Moment
from honed.system.layout import AttemptLayout, JobLayout, Layout

log = logging.getLogger(__name__)

#: Seconds for which exit.json may come later than Slurm's word of the end: a node's file system delays it.
GONE_SEC = 10.0
#: Seconds before a job that Slurm does not know is submitted again, for the first time and at most.
AGAIN_SEC, MAX_AGAIN_SEC = 10.0, 300.0
#: Seconds before a command that ends a job is sent once more, if it was not carried out.
ASK_SEC = 2.0
#: Seconds after which a job that Slurm calls over, or that was told to end, ends whoever holds its lock.
LOCK_SEC = 300.0
#: Refusals in a row that end a start: a controller that has just begun may not know its nodes.
NUM_REFUSALS = 2
#: Launches that Slurm has cancelled, after which a start ends: where a node cannot launch jobs, Slurm cancels them.
NUM_CANCELLED = 5
#: Seconds for which Slurm may say why it has stopped a worker, before that counts as a person's wish.
WORD_SEC = 60.0
NODE_FAIL = "NODE_FAIL"
#: States of jobs that Slurm itself has stopped: honed queues them again. Without a state, the reason of a lost node.
STOPPED_BY_SLURM, NODE_DOWN = frozenset({NODE_FAIL, "BOOT_FAIL", "PREEMPTED", "TIMEOUT"}), "NodeDown"


@dataclass
class _Job:
    handed: Handed
    attempt: AttemptLayout
    submitted_at: float  #: when it was last handed over
    argv: list[str]
    lane: int  #: of commands that wait for each other: the submitter's uid, of the shared instance
    again: Backoff = field(default_factory=lambda: Backoff(AGAIN_SEC, MAX_AGAIN_SEC))
    again_at: float = 0.0
    num_refusals: int = 0
    cancelled: dict[str, str] = field(default_factory=dict)  #: launches that Slurm has cancelled: ids, and their nodes
    recorded_at: float | None = None  #: since when its end is recorded, and it is not known who has stopped it
    gone_at: float | None = None  #: since when Slurm says that it is over, or knows nothing of it
    asked: list[list[str]] = field(default_factory=list)  #: the commands that end it
    is_asked: bool = False
    asking: Backoff = field(default_factory=lambda: Backoff(ASK_SEC, MAX_AGAIN_SEC))
    ask_at: float = 0.0  #: not before, once more
    began_at: float | None = None


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
        self._command = list(command or [sys.executable, "-P", "-m", "honed.worker"])
        self._clock = clock
        self._prefix = f"honed-{_instance(layout)}-"
        #: Jobs of the shared instance run as their submitters, by the helper.
        self._is_shared = layout.is_of_system
        self._desk = Desk(
            self._prefix, Client().ask if self._is_shared else run_here, is_shared=self._is_shared, clock=clock
        )
        self._jobs: dict[int, _Job] = {}

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        files = self._layout.job(job_id)
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
            durable.make_dir(files.attempt(number).dir)
            script = slurm_batch.script(files, handed, self._command)
            durable.write(_script(files.attempt(number)), script.encode(), mode=0o700)
        handed.write(files)  # the intent is durable before anything is submitted
        self._add(job_id, handed, command)
        self._submit(job_id)

    def _submission(self, job_id: int, handed: Handed) -> list[str]:
        """Return the command that submits a start. Raises NotNowError if its profile is not configured any more."""
        files = self._layout.job(job_id)
        try:
            command = slurm_batch.submission(files, handed, self._config())
        except KeyError:
            raise NotNowError(f"resources.profile: {handed.profile} is not in honed.toml any more") from None
        if self._is_shared:
            return ["submit", _tag(job_id, handed), *filter(None, [handed.profile])]
        return [*command, str(_script(files.attempt(handed.number)))]

    def _add(self, job_id: int, handed: Handed, command: list[str]) -> None:
        attempt = self._layout.job(job_id).attempt(handed.number)
        now = self._clock()  # a command of an earlier honed may still be under way
        lane = 0
        if self._is_shared:  # a job whose directory cannot be looked at waits for itself alone
            lane = access.job_user(self._layout.job(job_id).dir) or -job_id
        self._jobs[job_id] = _Job(handed, attempt, now, command, lane, again_at=now + AGAIN_SEC)

    def _submit(self, job_id: int) -> None:
        job = self._jobs[job_id]
        job.submitted_at, job.gone_at = self._clock(), None
        job.again_at = job.submitted_at + job.again.next_sec()
        self._desk.run(job.handed.name, [job.argv], environment=environment(), lane=job.lane)

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:  # noqa: ARG002
        files = self._layout.job(job_id)
        try:
            handed = read(files)
        except (OSError, ValueError):
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
        found = [self._live(name) for name, jobs in snapshot.jobs.items() if any(not job.is_over for job in jobs)]
        return [each for each in found if each is not None]

    def _live(self, name: str) -> Live | None:
        """Return the worker of a Slurm job; None if its end is recorded, or if it is not honed that has submitted it:
        a submitter can give their own jobs any name."""
        try:
            job_id, number, start = map(int, name.removeprefix(self._prefix).split("-"))
        except ValueError:
            return None
        files = self._layout.job(job_id)
        if not files.dir.is_dir() or read_exit_record(files.attempt(number), start) is not None:
            return None
        handed = None
        with contextlib.suppress(OSError, ValueError):
            handed = read(files)
        # An intent is durable before any submission.
        is_ours = handed is not None and handed.name == name and not handed.is_over
        if self._is_shared and not is_ours:
            return None
        return Live(job_id, (number, start), handed.device if handed is not None else None)

    def is_supervised(self, job_id: int) -> bool:  # noqa: ARG002
        return False

    def is_left(self, job_id: int) -> bool:  # noqa: ARG002
        return True

    def began(self, job_id: int) -> Moment | None:
        job = self._jobs[job_id]
        at = seconds(read_lock_record(job.attempt, job.handed.start), "started_at")
        if at is not None:  # its submitter can write it: it is never later than it was once, and never to come
            job.began_at = min(at, time.time(), job.began_at or at)
        return Moment(job.began_at) if job.began_at is not None else None

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
            self._desk.run(job.handed.name, job.asked, environment=environment(), lane=job.lane)
            job.asked, job.ask_at = [], self._clock() + job.asking.next_sec()

    def poll(self, job_id: int) -> Exit | None:
        job = self._jobs[job_id]
        if (record := read_exit_record(job.attempt, job.handed.start)) is not None:
            was_stopped = record.get("was_asked") is True and not job.is_asked
            return (
                None
                if was_stopped and not _is_explained(job, self._clock(), self._desk.snapshot)
                else self._ended(job_id, record)
            )
        answer = self._desk.answer(job.handed.name)
        if answer is None:
            return None
        if answer.commands and answer.commands[0] != job.argv and answer.fault and not job.asked:
            if self._clock() >= job.ask_at:
                job.asked = answer.commands  # not heard, perhaps: once more
        elif not job.handed.slurm_id and (number := answer.said.partition(";")[0].strip()).isdecimal():
            self._note(job_id, Seen(number, "", "", ""))
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
        if going:
            self._note(job_id, going[0])
            job.gone_at = None
            return None
        if job.gone_at is None:
            job.gone_at = snapshot.began
        is_lost = any(each.state == NODE_FAIL for each in seen)
        # Slurm itself cancels a job that got the number of one that the controller had forgotten and a node had not.
        cancelled = {each.slurm_id: each.nodes for each in seen if each.state == "CANCELLED" and each.nodes}
        is_unknown = not seen or bool(cancelled)
        if is_unknown and not job.is_asked and not read_lock_record(job.attempt, job.handed.start):
            job.cancelled |= cancelled
            return self._again(job_id, job, fault, waits=snapshot.began - job.gone_at < LOCK_SEC)
        if seen:
            self._note(job_id, seen[0])
        if not is_lost and snapshot.began - job.gone_at < GONE_SEC:
            return None
        # A submitter can hold the lock for ever, without a worker.
        is_over = snapshot.began - job.gone_at >= LOCK_SEC and (bool(seen) or job.is_asked or job.handed.state in OVER)
        end = {"service_result": "node-lost"} if is_lost else {}
        if (record := _settle(job_id, job, seen, end=end, waits=not (is_lost or is_over))) is None:
            return None
        return self._ended(job_id, record)

    def _again(self, job_id: int, job: _Job, fault: str, *, waits: bool) -> Exit | None:
        """Submit a start again that Slurm does not have, once it is time; end one that Slurm refuses, or cannot launch,
        and whose lock nobody holds (`waits`)."""
        what = fault or "not known to Slurm"
        nodes = [*job.cancelled.values()][-1:]
        if nodes:
            times = f"{len(job.cancelled)} of {NUM_CANCELLED} launches"
            what = f"Slurm has cancelled {times}, the last on {nodes[0]}" + f"; {fault}" * bool(fault)
        self._note(job_id, Seen("", "", what, ""))
        end = {}
        if len(job.cancelled) >= NUM_CANCELLED:
            end = {"service_result": "not-launched", "words": nodes[0]}
        elif self._clock() < job.again_at or not (job.handed.backend or _script(job.attempt).exists()):
            return None
        else:
            job.num_refusals = job.num_refusals + 1 if is_refusal(fault) else 0
            if job.num_refusals >= NUM_REFUSALS:
                end = {"service_result": "refused", "words": fault}
        if end:
            record = _settle(job_id, job, (), end=end, waits=waits)
            return self._ended(job_id, record) if record is not None else None
        log.warning("job %d: %s, submitted again: %s", job_id, job.handed.name, what)
        if not job.argv:
            with contextlib.suppress(NotNowError):  # its profile may be there again
                job.argv = self._submission(job_id, job.handed)
        if job.argv:
            self._submit(job_id)
        return None

    def _ended(self, job_id: int, record: dict[str, Any]) -> Exit:
        began, snapshot = self.began(job_id), self._desk.snapshot
        job = self._jobs[job_id]
        if snapshot is not None and (last := snapshot.jobs.get(job.handed.name)):
            self._note(job_id, last[0])
        self._write(job_id, replace(job.handed, is_over=True))
        del self._jobs[job_id]  # last: what fails before is tried again
        self._desk.forget(job.handed.name)
        seen = snapshot.jobs.get(job.handed.name, ()) if snapshot is not None and not job.is_asked else ()
        by_slurm = any(each.state in STOPPED_BY_SLURM or each.reason == NODE_DOWN for each in seen)
        found = exit_of(record)
        return replace(found, began=began, is_machine_going_down=by_slurm and found.was_asked)

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
            self._write(job_id, told)
            job.handed = told

    def _write(self, job_id: int, handed: Handed) -> None:
        """Write start.json, if its submitter has not put something else there."""
        try:
            handed.write(self._layout.job(job_id))
        except OSError as error:
            if durable.machine_fault(error):
                raise
            log.warning("job %d: start.json cannot be written: %s", job_id, error)


def _is_explained(job: _Job, now: float, snapshot: Snapshot | None) -> bool:
    """Tell whether Slurm has said why it has stopped a worker whose end is recorded, or says nothing for too long."""
    job.recorded_at = now if job.recorded_at is None else job.recorded_at
    if now - job.recorded_at >= WORD_SEC:
        return True
    if snapshot is None or snapshot.began < job.recorded_at:
        return False
    return all(each.is_over or each.reason == NODE_DOWN for each in snapshot.jobs.get(job.handed.name, ()))


def _settle(
    job_id: int, job: _Job, seen: Sequence[Seen], *, end: Mapping[str, str], waits: bool = True
) -> dict[str, Any] | None:
    """Record an end that no shim has recorded, so that no late one may start the worker, and a worker that goes on
    on a lost node puts nothing into place. None if the worker lives, as far as its lock shows."""
    with contextlib.ExitStack() as stack:
        try:
            fd = untrusted.open_plain(job.attempt.dir / "lock", flags=os.O_CREAT | os.O_RDWR, mode=0o664)
            stack.callback(os.close, fd)
            if waits:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError as error:  # its submitter has put something else there
            log.warning("job %d: the lock of %s cannot be taken: %s", job_id, job.handed.name, error)
        record = read_exit_record(job.attempt, job.handed.start)
        if record is None:
            states = {each.state for each in seen}
            asked = {"was_asked": True} if states & {"CANCELLED", "PREEMPTED"} else {}
            record = {"start": job.handed.start, "status": None, "signal": None, **end, **asked}
            record |= {"was_out_of_memory": "OUT_OF_MEMORY" in states, "ended_at": time.time()}
            try:
                untrusted.write_plain(job.attempt.exit_path, durable.as_json(record))
            except OSError as error:
                log.warning("job %d: the end of %s cannot be recorded: %s", job_id, job.handed.name, error)
    return record


def read(job: JobLayout) -> Handed:
    """Read start.json. Raises ValueError or OSError if there is none of Slurm's, or if it is not honed's own: the
    submitter may write into the directory."""
    fd = untrusted.open_plain(job.start_path, num_names=2)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_nlink != 1:
            raise PermissionError(errno.EPERM, "not a file of honed's own", str(job.start_path))
        return slurm_batch.parse(file.read(untrusted.MAX_BYTES))


def _tag(job_id: int, handed: Handed) -> str:
    """Return a start as the helper knows it."""
    return f"{job_id}-{handed.number}-{handed.start}"


def _script(attempt: AttemptLayout) -> Path:
    return attempt.dir / "slurm.sh"


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
