"""One accepted spec and its history: an immutable value; a change makes a new one.

A job's state is not stored in it: it is the directory that holds its entry (see spool.py). All other data that must
survive the daemon is here and nowhere else: the database can be deleted and is rebuilt from these entries.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

from honed.system.clock import Moment
from honed.system.error import ErrorRecord


class State(StrEnum):
    """The directory of a job's entry."""

    QUEUED = "queued"  #: waits for its turn
    HELD = "held"  #: waits for a person
    RUNNING = "running"  #: has an attempt; its worker may be starting, training or ending
    SUCCEEDED = "succeeded"
    FAILED = "failed"  #: it is not retried unless somebody requeues it
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in {State.SUCCEEDED, State.FAILED, State.CANCELLED}


#: All allowed moves; any other is a bug in honed.
MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.HELD, State.CANCELLED, State.FAILED}),
    State.HELD: frozenset({State.QUEUED, State.CANCELLED}),
    State.RUNNING: frozenset({State.QUEUED, State.HELD, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    State.SUCCEEDED: frozenset({State.QUEUED}),
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}


#: Puts a trial at the head of the queue.
MAX_PRIORITY = 1_000_000


class Stop(StrEnum):
    """The reason why a running job was asked to stop; it decides the next state."""

    CANCEL = "cancel"  #: to cancelled
    HOLD = "hold"  #: to held
    HALVE = "halve"  #: to cancelled, as `stopped_early`: other jobs of its sweep are better
    PREEMPT = "preempt"  #: to queued: its device is needed for something else, or its hours are over
    SHUTDOWN = "shutdown"  #: to queued: honed or the machine is shutting down


@dataclass(frozen=True, slots=True)
class Fallback:
    """The time and the reason of a fallback from Unsloth to transformers."""

    time: float  #: seconds since the epoch
    reason: str


@dataclass(frozen=True, slots=True)
class Preemption:
    """The reason why an attempt was asked to give up its device; its end is that of the attempt."""

    reason: str  #: for people: `the hours of GPU 0 ended`
    after_sec: float  #: seconds from the attempt's start to the request


@dataclass(frozen=True, slots=True)
class Attempt:
    """One numbered attempt: one worker start, or two with a fallback."""

    number: int
    backend: str
    started_at: float  #: seconds since the epoch
    num_starts: int = 1  #: 2 once the backend fell back
    first_start: int = 1  #: the number of its first start; higher if starts ahead of its turn, or others, were in vain
    staged_at: float | None = None  #: seconds since the epoch, if its worker was started ahead of its turn
    ended_at: float | None = None
    outcome: str | None = None
    step: int = 0  #: the last step that it reported
    device: str | None = None  #: the devices it ran on: GPUs' uuids, separated by commas, or cpu
    fallback: Fallback | None = None  #: between its two starts
    started_monotonic: float | None = None  #: seconds of CLOCK_MONOTONIC; None if that is not known
    boot_id: str | None = None  #: the boot that started_monotonic belongs to
    is_resumed: bool = False  #: ended, and had resumed from a checkpoint
    is_adjusted: bool = False  #: ended, and its lack of memory was answered with an Adjustment
    checkpoint_bytes: int = 0  #: ended, and bytes of the checkpoints that it had written, by its own account
    output_bytes: int = 0  #: the same for its output directory
    took_sec: float | None = None  #: duration until the worker ended, unaffected by clock changes; None while it runs
    preemption: Preemption | None = None  #: why honed asked it to give up its device
    paused_sec: float = 0.0  #: seconds that did not pass for it: honed could not run, or a cluster had suspended it
    staged_paused_sec: float = 0.0  #: seconds of pauses that its first start's shim had noted before it began
    passed: tuple[int, ...] = ()  #: jobs that waited for more devices, and that it was started before

    @property
    def start(self) -> int:
        """The number of its latest start."""
        return self.first_start + self.num_starts - 1

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices it ran on; none if they are not known."""
        return tuple(self.device.split(",")) if self.device else ()

    @property
    def began(self) -> Moment:
        return Moment(self.started_at, self.started_monotonic, self.boot_id)

    def ran_sec(self, now: Moment) -> float:
        """Return the duration so far of an attempt that runs."""
        return max(0.0, now.since(self.began) - self.paused_sec)

    @property
    def spent_sec(self) -> float:
        """The duration of a finished attempt; 0 while it runs."""
        return self.took_sec or 0.0


#: Outcome of a job that its sweep has ended early.
STOPPED_EARLY = "stopped_early"


@dataclass(frozen=True, slots=True)
class Cut:
    """The rung at which its sweep's halving ended a job. Once it has one, no rung ends it again."""

    rung: int  #: from 1
    step: int  #: of the evaluation that counted
    eval_loss: float
    place: int  #: from 1, among the jobs that had reached the rung
    num: int  #: of these
    num_kept: int  #: of these, the best that go on

    @property
    def words(self) -> str:
        go_on = "the best one goes on" if self.num_kept == 1 else f"the best {self.num_kept} go on"
        return (
            f"at step {self.step} (rung {self.rung}) its eval_loss {self.eval_loss:.4g} was number {self.place} of "
            f"{self.num}, and {go_on}"
        )


class Notify(TypedDict, total=False):
    """The recipients of a job's end notification, and the final states that are reported."""

    webhook: str | None
    mail: str | None
    states: list[str]


class Halving(TypedDict):
    """The settings by which a sweep ends hopeless jobs early."""

    min_steps: int  #: of the first rung
    eta: int  #: of `n` jobs that have reached a rung, the best n / eta go on; and the next rung is so many times as far


class Group(TypedDict):
    """The sweep that made a job."""

    id: int  #: the number of the sweep's own job file
    name: str
    file: str  #: that job file's name
    values: dict[str, Any]  #: dotted key → value, of the keys that the sweep varies
    halving: NotRequired[Halving | None]


class SweepName(NamedTuple):
    """Which sweep a job is of."""

    id: int
    name: str
    file: str


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One out-of-memory adjustment of a job: a step down the ladder; see out_of_memory.py."""

    attempt: int  #: the number of the attempt that ran out of memory
    text: str  #: for people: `per_device_train_batch_size 8 → 4, gradient_accumulation_steps 1 → 2`
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  #: keys of the spec, dotted


#: Maximum number of characters of every text of an error in an entry, and of the paths of a job's data together: all
#: entries are in the daemon's memory. The job file, the worker's result and its log have the whole.
MAX_CHARS, MAX_PATH_CHARS = 2000, 4000


def _brief(error: ErrorRecord) -> ErrorRecord:
    texts = {
        key: f"{value[: MAX_CHARS - 1]}…"
        for key, value in error.items()
        if isinstance(value, str) and len(value) > MAX_CHARS
    }
    brief = cast("ErrorRecord", error | texts) if texts else error
    if "fix" in brief and len(json.dumps(brief["fix"], default=str)) > MAX_CHARS:
        brief = brief.copy()
        del brief["fix"]
    return brief


def _first(paths: tuple[str, ...]) -> tuple[str, ...]:
    if sum(map(len, paths)) <= MAX_PATH_CHARS:
        return paths
    ends = itertools.accumulate(map(len, paths), initial=len("… and 100,000 more"))
    num = sum(end <= MAX_PATH_CHARS for end in itertools.islice(ends, 1, None))
    return (*paths[:num], f"… and {len(paths) - num:,} more")


@dataclass(frozen=True, slots=True)
class Job:
    """An entry. Equality is by value; `revision` grows with every change, so that the newer of two copies is known."""

    id: int
    name: str
    submitted_at: float  #: seconds since the epoch, when it was accepted
    source: str  #: the dropped file's name
    uid: int  #: the user who submitted it
    output_dir: str
    priority: int = 0
    job_class: str | None = None  #: a class of the administrator's [classes]; None: the default class
    max_attempts: int = 3
    num_gpus: int = 1  #: on all nodes together
    num_nodes: int = 1
    profile: str | None = None  #: kind of jobs on the cluster; None: the default one
    is_of_cluster: bool = False  #: the cluster chooses its devices, and it takes one place here, whatever it uses there
    depends_on: tuple[str, ...] = ()
    inputs: dict[str, int] = dataclasses.field(default_factory=dict)  #: what `job:NAME` means: name → that job's number
    is_deferred: bool = False  #: planned only once those jobs have succeeded, because their files must be inspected
    revision: int = 1
    attempts: tuple[Attempt, ...] = ()
    num_failures: int = 0  #: attempts that count against max_attempts; a clean stop does not
    stop: Stop | None = None
    outcome: str | None = None
    error: ErrorRecord | None = None
    remark: str = ""  #: a caveat about a success: the model learned nothing, or the wrong thing
    adjustments: tuple[Adjustment, ...] = ()  #: out-of-memory adjustments, applied to the next attempt
    needs_bytes: int = 0  #: free space that its checkpoints need; below it the job is not started again
    is_pinned: bool = False  #: kept by a user: neither retention nor prune removes it
    are_checkpoints_pruned: bool = False  #: it cannot resume from a checkpoint
    time_limit_sec: float | None = None  #: limit in seconds for all attempts together, from its spec
    held_for: int | None = None  #: the failed dependency it is held for: it is released when that job succeeds
    notify: Notify | None = None  #: from its spec
    arrived_at: float | None = None  #: seconds since the epoch; None in an entry that was made again
    staged_at: float | None = None  #: seconds since the epoch, while it is queued and has a worker ahead of its turn
    num_staged: int = 0  #: workers that were started ahead of its turn so far
    num_unreached: int = 0  #: its last starts, of which no worker is known to have begun
    group: Group | None = None  #: of a job that a sweep made
    cut: Cut | None = None  #: why its sweep has ended it early
    model: str = ""  #: the base model as its spec names it; empty in an entry that was made again
    data: tuple[str, ...] = ()  #: the paths of its data sets, likewise
    ends: tuple[str, ...] = ()  #: the outcome of every time it finished: a requeued job finishes again
    edited_at: tuple[float, ...] = ()  #: seconds since the epoch, of every edit of its job file
    is_being_edited: bool = False  #: its job file and its plan are being replaced: see editing.py
    state: State = dataclasses.field(default=State.QUEUED, compare=False)  #: the state in which the entry was found

    def __post_init__(self) -> None:
        """Shorten what its user can make long."""
        if self.error is not None and (error := _brief(self.error)) is not self.error:
            object.__setattr__(self, "error", error)
        if (data := _first(self.data)) is not self.data:
            object.__setattr__(self, "data", data)

    @property
    def num_places(self) -> int:
        """The number of devices, as honed counts them here, that it takes at the same time; 0 for the processor."""
        return min(1, self.num_gpus) if self.is_of_cluster else self.num_gpus

    @property
    def next_start(self) -> int:
        """The number of its next start: higher than that of every earlier one for the same attempt."""
        return self.num_staged + self.num_unreached + 1

    @property
    def attempt(self) -> Attempt:
        """The latest attempt. Raises IndexError if there is none."""
        return self.attempts[-1]

    @property
    def preemption(self) -> Preemption | None:
        """The preemption of the latest attempt; None once the job has started again, or if there was none."""
        return self.attempts[-1].preemption if self.attempts else None

    @property
    def is_editable(self) -> bool:
        """True if it may get another job file."""
        return self.state in {State.QUEUED, State.HELD}

    @property
    def was_stopped_early(self) -> bool:
        """True if its sweep has ended it, and it has not been queued again since."""
        return self.cut is not None and self.state is State.CANCELLED and self.outcome == STOPPED_EARLY

    def elapsed_sec(self, now: float) -> float | None:
        """Return the duration of all attempts so far; None before the first."""
        if not self.attempts:
            return None
        spent = sum(attempt.spent_sec for attempt in self.attempts if attempt.ended_at is not None)
        last = self.attempts[-1]
        return spent if last.ended_at is not None else spent + max(0.0, now - last.started_at - last.paused_sec)

    @property
    def num_preemptions(self) -> int:
        return sum(attempt.preemption is not None for attempt in self.attempts)

    @property
    def sweep(self) -> SweepName | None:
        """The sweep that made it; None if none did."""
        return SweepName(*(self.group.get(key) for key in SweepName._fields)) if self.group else None  # type: ignore[arg-type]

    @property
    def has_started(self) -> bool:
        return bool(self.attempts)

    @property
    def last_ended(self) -> int:
        """The number of its last attempt that has ended; 0 before the first."""
        return max((attempt.number for attempt in self.attempts if attempt.ended_at is not None), default=0)

    @property
    def last_ended_at(self) -> float:
        """Seconds since the epoch, of the latest end of an attempt; 0 before the first."""
        return max((attempt.ended_at for attempt in self.attempts if attempt.ended_at is not None), default=0.0)

    @property
    def num_ends(self) -> int:
        """How often it has finished."""
        return len(self.ends)

    @property
    def has_own_events(self) -> bool:
        """True if some of its events are in its entry, and in no file of its worker's."""
        return bool(self.edited_at) or any(attempt.fallback for attempt in self.attempts)

    def with_attempt(self, **changes: Any) -> Job:
        """Return the same job with its latest attempt changed."""
        return dataclasses.replace(
            self, attempts=(*self.attempts[:-1], dataclasses.replace(self.attempts[-1], **changes))
        )

    def to_json(self) -> bytes:
        data = dataclasses.asdict(self)
        del data["state"]
        return (json.dumps(data, ensure_ascii=False, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, state: State) -> Job:
        """Parse an entry; unknown keys of a later honed are ignored. Raises ValueError if it is not an entry."""
        try:
            raw = json.loads(data.decode())
        except RecursionError as error:
            raise ValueError("not a job entry: nested too deeply") from error
        if not isinstance(raw, dict) or not isinstance(raw.get("id"), int):
            raise ValueError("not a job entry")
        try:
            made = known(cls, raw)
            made["attempts"] = tuple(_attempt(item) for item in raw["attempts"])
            made["adjustments"] = tuple(Adjustment(**known(Adjustment, item)) for item in raw.get("adjustments", ()))
            made["depends_on"] = tuple(raw.get("depends_on", ()))
            made["ends"] = tuple(map(sys.intern, map(str, raw.get("ends", ()))))
            made["edited_at"] = tuple(raw.get("edited_at", ()))
            made["data"] = tuple(map(sys.intern, map(str, raw.get("data", ()))))
            for key in _SHARED_OF_JOB:
                if type(value := made.get(key)) is str:
                    made[key] = sys.intern(value)
            if raw.get("cut") is not None:
                made["cut"] = Cut(**known(Cut, raw["cut"]))
            if raw.get("group") is not None:
                made["group"] = {**raw["group"]}
            made["stop"] = Stop(raw["stop"]) if raw.get("stop") else None
            made["state"] = state
            job = cls(**made)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a job entry: {error}") from error
        if state is State.RUNNING and not job.attempts:
            raise ValueError("not the entry of a running job: it has no attempts")
        return job


#: Keys whose few values many attempts, and many jobs, share; in memory every value is there once.
_SHARED = ("backend", "outcome", "device", "boot_id")
_SHARED_OF_JOB = ("name", "outcome", "model")


def _attempt(raw: Mapping[str, Any]) -> Attempt:
    made = known(Attempt, raw)
    if made.get("fallback") is not None:
        made["fallback"] = Fallback(**known(Fallback, made["fallback"]))
    if made.get("preemption") is not None:
        made["preemption"] = Preemption(**known(Preemption, made["preemption"]))
    made["passed"] = tuple(made.get("passed") or ())
    for key in _SHARED:
        if type(value := made.get(key)) is str:
            made[key] = sys.intern(value)
    return Attempt(**made)


@functools.cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))


def known(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a dataclass has of a mapping; keys of later versions are left out."""
    names = _names(cls)
    if raw.keys() <= names:
        return dict(raw)
    return {key: value for key, value in raw.items() if key in names}
