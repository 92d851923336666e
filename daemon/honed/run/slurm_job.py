"""One worker as a job of a Slurm cluster, from its submission to its end.

    submitted ── not known to Slurm, after a pause ──► submitted again ──► … ──► refused, or cancelled too often: ended
        └────────► runs ──► exit.json, or Slurm's word where there is none: ended

Whether a failed sbatch has submitted is not known, so the name is looked up first, and submitted again only if Slurm
knows none, after growing pauses. If Slurm says twice that it will never take the job, the start ends. What Slurm does
not answer is not known, and nothing is decided on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from honed.run import slurm_batch
from honed.run.runner import Exit, NotNowError, exit_of, read_exit_record, read_lock_record, seconds
from honed.run.slurm_batch import Handed
from honed.run.slurm_desk import OVER, Desk, Seen, Snapshot
from honed.run.slurm_request import environment, is_refusal
from honed.system import durable, error, untrusted
from honed.system.backoff import Backoff
from honed.system.clock import Moment
from honed.system.layout import AttemptFiles, Layout
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Seconds for which exit.json may come later than Slurm's word of the end: a node's file system delays it.
GONE_SEC = 10.0
#: Seconds before a job that Slurm does not know is submitted again, for the first time and at most.
AGAIN_SEC, MAX_AGAIN_SEC = 10.0, 300.0
#: Seconds before a command that ends a job is sent once more, if it was not carried out.
ASK_SEC = 2.0
#: Seconds after which a job that Slurm calls over, or that was asked to end, ends whoever holds its lock.
LOCK_SEC = 300.0
#: Refusals in a row that end a start: a controller that has just begun may not know its nodes.
NUM_REFUSALS = 2
#: Launches that Slurm has cancelled, after which a start ends: where a node cannot launch jobs, Slurm cancels them.
NUM_CANCELLED = 5
#: Seconds for which Slurm may say why it has stopped a worker, before that counts as a person's wish.
WORD_SEC = 60.0
NODE_FAIL = "NODE_FAIL"
#: Characters of Slurm's words.
MAX_WORDS = 400
#: States in which a job that has begun does not run: it was suspended, or put back into the queue.
NOT_RUNNING = frozenset({"SUSPENDED", "STOPPED", "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
#: Those of them in which it will run again by itself.
PUT_BACK = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED"})
#: States of jobs that Slurm itself has stopped: honed queues them again. Without a state, the reason of a lost node.
STOPPED_BY_SLURM, NODE_DOWN = frozenset({NODE_FAIL, "BOOT_FAIL", "PREEMPTED", "TIMEOUT"}), "NodeDown"


@dataclass
class _Submission:
    """The submission of a start, and what has become of it."""

    argv: list[str]  #: empty while its profile is not configured
    at: float  #: when it was last handed over
    again_at: float  #: not before, once more
    again: Backoff = field(default_factory=lambda: Backoff(AGAIN_SEC, MAX_AGAIN_SEC))
    num_refusals: int = 0
    cancelled: dict[str, str] = field(default_factory=dict)  #: launches that Slurm has cancelled: ids, and their nodes


@dataclass
class _Wish:
    """The wish of honed that a job ends."""

    is_there: bool = False
    commands: list[list[str]] = field(default_factory=list)  #: that are still to be handed over
    again_at: float = 0.0  #: not before, once more
    again: Backoff = field(default_factory=lambda: Backoff(ASK_SEC, MAX_AGAIN_SEC))


class SlurmJob:
    """One worker, as a job of Slurm.

    `submission` returns the command that submits a start, or raises NotNowError; `argv` is what it has returned, if
    anything. `lane`: of commands that wait for each other (slurm_desk.py).
    """

    def __init__(
        self,
        layout: Layout,
        job_id: int,
        handed: Handed,
        desk: Desk,
        submission: Callable[[int, Handed], list[str]],
        argv: list[str],
        *,
        lane: int,
        clock: Callable[[], float],
    ) -> None:
        self.id = job_id
        self.handed = handed
        self._layout = layout
        self._attempt = layout.files(job_id).attempt(handed.number)
        self._desk = desk
        self._make_submission = submission
        self._lane = lane
        self._clock = clock
        now = clock()  # a command of the honed before this start may still be under way
        self._submission = _Submission(argv, now, now + AGAIN_SEC)
        self._wish = _Wish()
        #: Since when its end is recorded, and it is not known who has stopped it.
        self._recorded_at: float | None = None
        #: Since when Slurm says that it is over, or knows nothing of it.
        self._gone_at: float | None = None
        self._began_at: float | None = None

    def submit(self) -> None:
        """Have it submitted."""
        submission = self._submission
        submission.at, self._gone_at = self._clock(), None
        submission.again_at = submission.at + submission.again.next_sec()
        self._run([submission.argv])

    def end(self, *verbs: str) -> None:
        """Have it ended, in these ways (slurm_batch.ENDS)."""
        if self._layout.is_of_system:
            self._wish.commands = [[verb, tag(self.id, self.handed)] for verb in verbs]
        else:
            self._wish.commands = [slurm_batch.ending(verb, self.handed.name, os.geteuid()) for verb in verbs]
        self._wish.is_there = True
        self._send()

    def _send(self) -> None:
        """Hand over the commands that end it, once nothing of it is under way."""
        wish = self._wish
        if wish.commands and self._desk.answer(self.handed.name) is not None:
            self._run(wish.commands)
            wish.commands, wish.again_at = [], self._clock() + wish.again.next_sec()

    def _run(self, commands: list[list[str]]) -> None:
        self._desk.run(self.handed.name, commands, environment=environment(), lane=self._lane)

    def began(self) -> Moment | None:
        """Return when its worker began, if it has."""
        at = seconds(read_lock_record(self._attempt, self.handed.start), "started_at")
        if at is not None:  # its submitter can write it: it is never later than it was once, and never to come
            self._began_at = min(at, time.time(), self._began_at or at)
        return Moment(self._began_at) if self._began_at is not None else None

    def is_suspended(self) -> bool:
        """Tell whether Slurm has suspended it, or put it back into its queue."""
        snapshot = self._desk.snapshot
        seen = snapshot.jobs.get(self.handed.name, ()) if snapshot is not None else ()
        going = [item.state for item in seen if not item.is_over]
        return bool(going) and all(state in NOT_RUNNING for state in going)

    def poll(self) -> Exit | None:
        """Return how it has ended; None while it has not."""
        if (record := read_exit_record(self._attempt, self.handed.start)) is not None:
            was_stopped = record.get("was_asked") is True and not self._wish.is_there
            return None if was_stopped and not self._is_explained() else self._ended(record)
        answer = self._desk.answer(self.handed.name)
        if answer is None:
            return None
        wish = self._wish
        if answer.commands and answer.commands[0] != self._submission.argv and answer.fault and not wish.commands:
            if self._clock() >= wish.again_at:
                wish.commands = answer.commands  # not heard, perhaps: once more
        elif not self.handed.slurm_id and (number := answer.output.partition(";")[0].strip()).isdecimal():
            self._note(Seen(number, "", "", ""))
        self._send()
        snapshot = self._desk.snapshot
        if snapshot is None or snapshot.began < max(self._submission.at, answer.at):
            self._note(Seen("", "", answer.fault, ""))
            return None
        return self._look(snapshot, answer.fault)

    def _look(self, snapshot: Snapshot, fault: str) -> Exit | None:
        """Decide by Slurm's word, where there is no exit.json."""
        seen = snapshot.jobs.get(self.handed.name, ())
        going = [item for item in seen if not item.is_over]
        if going:
            self._note(going[0])
            self._gone_at = None
            return None
        if self._gone_at is None:
            self._gone_at = snapshot.began
        gone_sec = snapshot.began - self._gone_at
        is_lost = any(item.state == NODE_FAIL for item in seen)
        # Slurm itself cancels a job that got the number of one that the controller had forgotten and a node had not.
        cancelled = {item.slurm_id: item.nodes for item in seen if item.state == "CANCELLED" and item.nodes}
        is_unknown, is_asked = not seen or bool(cancelled), self._wish.is_there
        if is_unknown and not is_asked and not read_lock_record(self._attempt, self.handed.start):
            self._submission.cancelled |= cancelled
            return self._again(fault, waits=gone_sec < LOCK_SEC)
        if seen:
            self._note(seen[0])
        if not is_lost and gone_sec < GONE_SEC:
            return None
        # A submitter can hold the lock for ever, without a worker.
        is_over = gone_sec >= LOCK_SEC and (bool(seen) or is_asked or self.handed.state in OVER)
        end = {"service_result": "node-lost"} if is_lost else {}
        return self._settled(seen, end=end, waits=not (is_lost or is_over))

    def _again(self, fault: str, *, waits: bool) -> Exit | None:
        """Submit a start again that Slurm does not have, once it is time; end one that Slurm refuses, or cannot launch,
        and whose lock nobody holds (`waits`)."""
        submission = self._submission
        what = fault or "not known to Slurm"
        nodes = [*submission.cancelled.values()][-1:]
        if nodes:
            times = f"{len(submission.cancelled)} of {NUM_CANCELLED} launches"
            what = f"Slurm has cancelled {times}, the last on {nodes[0]}" + f"; {fault}" * bool(fault)
        self._note(Seen("", "", what, ""))
        if len(submission.cancelled) >= NUM_CANCELLED:
            return self._settled((), end=_unlaunched("not-launched", nodes[0]), waits=waits)
        if self._clock() < submission.again_at or not (
            self.handed.backend or untrusted.exists(script_path(self._attempt))
        ):
            return None
        submission.num_refusals = submission.num_refusals + 1 if is_refusal(fault) else 0
        if submission.num_refusals >= NUM_REFUSALS:
            return self._settled((), end=_unlaunched("refused", fault), waits=waits)
        log.warning("job %d: %s, submitted again: %s", self.id, self.handed.name, what)
        if not submission.argv:
            with contextlib.suppress(NotNowError):  # its profile may be there again
                submission.argv = self._make_submission(self.id, self.handed)
        if submission.argv:
            self.submit()
        return None

    def _is_explained(self) -> bool:
        """Tell whether Slurm has reported why it has stopped a worker whose end is recorded, or says nothing for too
        long."""
        now, snapshot = self._clock(), self._desk.snapshot
        self._recorded_at = now if self._recorded_at is None else self._recorded_at
        if now - self._recorded_at >= WORD_SEC:
            return True
        if snapshot is None or snapshot.began < self._recorded_at:
            return False
        seen = snapshot.jobs.get(self.handed.name, ())
        return _was_put_back(seen) or all(item.is_over or item.reason == NODE_DOWN for item in seen)

    def _settled(self, seen: Sequence[Seen], *, end: Mapping[str, Any], waits: bool) -> Exit | None:
        """Record an end that no shim has recorded, so that no late one may start the worker, and a worker that goes on
        on a lost node puts nothing into place. None if the worker lives, as far as its lock shows."""
        with contextlib.ExitStack() as stack:
            try:
                fd = untrusted.open_plain(self._attempt.lock_path, flags=os.O_CREAT | os.O_RDWR, mode=0o664)
                stack.callback(os.close, fd)
                if waits:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError as fault:  # its submitter has put something else there
                log.warning("job %d: the lock of %s cannot be taken: %s", self.id, self.handed.name, fault)
            record = read_exit_record(self._attempt, self.handed.start)
            if record is None:
                states = {item.state for item in seen}
                asked = {"was_asked": True} if states & {"CANCELLED", "PREEMPTED"} else {}
                record = {"start": self.handed.start, "status": None, "signal": None, **end, **asked}
                record |= {"was_out_of_memory": "OUT_OF_MEMORY" in states, "ended_at": time.time()}
                try:
                    untrusted.write_plain(self._attempt.exit_path, durable.as_json(record))
                except OSError as fault:
                    log.warning("job %d: the end of %s cannot be recorded: %s", self.id, self.handed.name, fault)
        return self._ended(record)

    def _ended(self, record: dict[str, Any]) -> Exit:
        began, snapshot = self.began(), self._desk.snapshot
        seen = snapshot.jobs.get(self.handed.name, ()) if snapshot is not None else ()
        if seen:
            self._note(seen[0])
        self._write(replace(self.handed, is_over=True))
        by_slurm = any(item.state in STOPPED_BY_SLURM or item.reason == NODE_DOWN for item in seen)
        ended = exit_of(record)
        is_going_down = (by_slurm or _was_put_back(seen)) and not self._wish.is_there and ended.was_asked
        if is_going_down and _was_put_back(seen):
            self.end("withdraw")  # a start that has begun never begins again
        return replace(ended, began=began, is_machine_going_down=is_going_down, problem=_problem(ended, record))

    def _note(self, seen: Seen) -> None:
        """Keep what Slurm says of it, for `honectl show`."""
        noted = replace(
            self.handed,
            slurm_id=seen.slurm_id or self.handed.slurm_id,
            state=seen.state or self.handed.state,
            reason="" if seen.reason == "None" else seen.reason,
            nodes=seen.nodes or self.handed.nodes,
        )
        if noted != self.handed:
            self._write(noted)
            self.handed = noted

    def _write(self, handed: Handed) -> None:
        """Write start.json, if its submitter has not put something else there."""
        try:
            handed.write(self._layout.files(self.id))
        except OSError as fault:
            if durable.machine_fault(fault):
                raise
            log.warning("job %d: start.json cannot be written: %s", self.id, fault)


def _unlaunched(result: str, words: str) -> dict[str, Any]:
    return {"service_result": result, "words": words, "ran": False}


def _problem(ended: Exit, record: Mapping[str, Any]) -> error.HonedError | None:
    """Return what an end means that is Slurm's own; None for that of a process."""
    words = error.plain(str(record.get("words", "")), max_chars=MAX_WORDS)
    match ended.service_result:
        case "node-lost":
            return error.KilledError("the node of the worker was lost", hint="see sinfo -R, and the node's own log")
        case "not-launched":
            return error.KilledError(
                f"Slurm cancelled each of its launches before its worker began, the last on {words}",
                hint="the logs of slurmctld, and of slurmd on that node, say who or what cancelled it; a node that "
                "cannot start jobs is taken out with scontrol update nodename=NODE state=drain reason=WHY",
            )
        case "refused":
            return error.ClusterRefusedError(
                f"Slurm refuses the job: {words}",
                hint="correct [slurm] or the profile in honed.toml, or resources in the job file, then honectl requeue",
            )
    return None


def _was_put_back(seen: Sequence[Seen]) -> bool:
    """Tell whether Slurm has put a job that had begun back into its queue (`scontrol requeue`), not as held."""
    return bool(seen) and all(item.state in PUT_BACK and not item.reason.startswith("JobHeld") for item in seen)


def tag(job_id: int, handed: Handed) -> str:
    """Return a start as the helper knows it."""
    return f"{job_id}-{handed.number}-{handed.start}"


def script_path(attempt: AttemptFiles) -> PersonPath:
    return attempt.dir / "slurm.sh"
