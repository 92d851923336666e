"""The shapes of `--json` and of the control socket's answers: query.py and retention.py make them, honectl, the report
and honed-web read them.

A specification and a plan have the keys that a user and the preflight gave them, and an event those that its worker
gave it: they stay mappings of any value.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from honed.job.job import Group, Halving
from honed.system.error import ErrorRecord, plain
from honed.system.usage import Usage

# -- jobs --------------------------------------------------------------------------------------------------------------


class _Named(TypedDict):
    id: int
    name: str


class _Listed(_Named):
    state: str


class Progress(TypedDict):
    """A job's progress as last reported; None where it is not known."""

    step: float | None
    num_steps: float | None
    epoch: float | None
    loss: float | None
    eta_sec: float | None


class Wait(TypedDict):
    """The reason why a job does not run: a code for programs, a text for people."""

    reason: str
    """Reason for programs: person, dependency, plan, retry, disk, paused, device, hours, drained, reserved, turn,
    honed, …"""
    detail: str
    "Reason as text; empty for another user's job, and if it changes every second."


class Score(TypedDict):
    """A metric of a job's last evaluation: the first one of its predictions, else the loss."""

    name: str
    value: float


_Class = TypedDict("_Class", {"class": str | None})


class PreemptionRow(TypedDict):
    """A request to give up the device, and its cost."""

    reason: str
    stop_sec: float | None  #: seconds from the request to the end of the worker; None before that
    lost_steps: int | None  #: 0 if it wrote a checkpoint; None if it did not, or not yet


class Row(_Listed, _Class):
    """One row of `list`. Another user's has None, or an empty list, where the key would reveal the job's content.

    The docstrings are those of the web API (page/api.py).
    """

    outcome: str | None
    """Outcome: succeeded, cancelled, stopped_early (by its sweep), or the error's code."""
    remark: str
    "Remark on a success: its loss did not fall, or the model ended worse."
    priority: int
    submitted_at: str
    """ISO 8601, UTC."""
    uid: int
    """User who submitted the job."""
    source: str | None
    """Name of the submitted file."""
    is_pinned: bool
    """True if the job is kept regardless of [retention]."""
    waiting_for: Wait | None
    """Reason for waiting; given for held jobs and the first 500 of the queue."""
    staged_at: str | None
    """Start of its worker ahead of its turn, ISO 8601, UTC; null if it has none."""
    needs_bytes: int | None
    """Free disk space in bytes that it needs to be started again."""
    preemption: PreemptionRow | None
    """Request to give up its device, of a job that has not started again since: reason, stop_sec, lost_steps."""
    progress: Progress
    model: str | None
    """Base model as the job file names it; null for another user's job."""
    data: list[str]
    """Paths of the data sets."""
    elapsed_sec: float | None
    """Seconds of all attempts; null before the first."""
    score: Score | None
    """Score of the last evaluation; null before the first."""
    group: NotRequired[Group | None]  #: of a job that a sweep made


class StoppedEarly(TypedDict):
    """The rung at which its sweep ended a job."""

    rung: int  #: from 1
    step: int
    eval_loss: float
    reason: str  #: for people


class GroupJob(_Listed):
    """A job of a sweep."""

    outcome: str | None
    values: dict[str, Any]
    eval_loss: float | None  #: the last one reported; at the end that of the model that was saved
    stopped_early: StoppedEarly | None


class GroupShown(_Named):
    """The answer to `group`: the jobs of a sweep that the asker may read."""

    file: str
    jobs: list[GroupJob]
    best: int | None  #: the job with the lowest eval_loss of those that succeeded
    halving: Halving | None  #: the settings by which hopeless jobs are ended early


class Begin(TypedDict, total=False):
    """Where a requeued job begins, in words; empty for other verbs."""

    goes_on_from: str


class ChangedRow(Row, Begin):
    """The answer to a verb that changes a job."""


class Edited(TypedDict):
    """What became of an edit."""

    id: int
    state: str  #: checking, edited or refused; unknown if honed was started since
    error: ErrorRecord | None  #: the reason of a refusal


class Overview(TypedDict):
    """The first jobs of every group, and the number of jobs in every state."""

    jobs: list[Row]
    counts: dict[str, int]
    refused: Refused  #: with the newest one


class AttemptRow(TypedDict):
    """One attempt of a job."""

    number: int
    backend: str
    started_at: str
    ended_at: str | None
    outcome: str | None
    step: int
    num_starts: int
    staged_at: str | None  #: if its worker was started ahead of its turn
    device: str | None
    preemption: PreemptionRow | None


class AdjustmentRow(TypedDict):
    """One out-of-memory adjustment; see job.Adjustment."""

    attempt: int
    text: str
    changes: dict[str, Any]


class Segment(TypedDict):
    """A piece of a row's text."""

    text: str
    trained: bool


class Artifacts(TypedDict):
    """The paths of what a job has made."""

    output_dir: str | None  #: None of an evaluation, which makes no output
    report: str | None
    merged: str | None


class MemoryShown(TypedDict):
    """Memory in bytes: the plan's estimate, and the worker's use as last reported."""

    estimated: dict[str, Any]
    used: dict[str, int]


class SlurmRow(TypedDict):
    """An attempt's job on a Slurm cluster, as Slurm last reported."""

    name: str
    id: str
    state: str
    reason: str  #: why it waits
    nodes: str


class OnCluster(TypedDict):
    slurm: NotRequired[SlurmRow]  #: where the last attempt was handed to a cluster


def on_cluster(start: dict[str, Any]) -> OnCluster:
    """Return what start.json says of a job on a cluster; empty for one that runs elsewhere."""
    if not isinstance(start.get("name"), str):
        return {}
    name, number, state, reason, nodes = (
        plain(str(start.get(key, ""))) for key in ("name", "slurm_id", "state", "reason", "nodes")
    )
    return {"slurm": SlurmRow(name=name, id=number, state=state, reason=reason, nodes=nodes)}


class Shown(Row, OnCluster):
    """The answer to `show`."""

    spec: dict[str, Any]
    plan: dict[str, Any]
    attempts: list[AttemptRow]
    error: ErrorRecord | None
    artifacts: Artifacts
    metrics: dict[str, float]
    """Last value of every metric."""
    adjustments: list[AdjustmentRow]
    """Changes since the job ran out of memory, one per step: attempt, text, changes."""
    num_preemptions: int
    """Number of requests to give up its device."""
    depends_on: list[str]
    """Numbers and names of the jobs that it waits for."""
    edited_at: list[str]
    """Times at which its job file was edited."""
    stopped_early: StoppedEarly | None
    """Rung at which its sweep ended it: rung, step, eval_loss, reason."""
    job_dir: str
    memory: MemoryShown
    """Memory in bytes, as `estimated` and as `used`."""
    events: list[dict[str, Any]]


class _Predicted(TypedDict):
    sample_index: int
    ground_truth: str | None
    prediction: str | None


class Answer(_Predicted):
    """A prediction for a held-out example."""

    prompt: str | None


class Prediction(Answer):
    """One row of `predictions`."""

    epoch: float | None
    step: int


class LastPrediction(_Predicted):
    """A prediction of the last step that has any, with its texts truncated."""

    step: int


class Glance(Row):
    """The answer to `glance`."""

    stage: str | None
    course: list[float]  #: the loss, averaged to some points
    predictions: list[LastPrediction]
    eval_loss: float | None
    resident_bytes: int | None
    cpu_sec: float | None
    estimated_bytes: int | None
    device: str | None
    error: ErrorRecord | None


# -- arrivals ----------------------------------------------------------------------------------------------------------


class Submitted(_Named):
    """The number and the name that a job file was given."""


class Refusal(TypedDict):
    """The reason of a rejection."""

    file: str
    reason: str
    refused_at: float  #: seconds since the epoch


class Refused(TypedDict):
    """The newest refused files of a user, and the number of all; `are_all` is False if there may be more."""

    files: list[Refusal]
    num: int
    are_all: bool


class Arrival(_Listed):
    """An arrival or a job that waits for a fetch; see daemon.arrivals.fetches."""

    uid: int | None
    source: str | None
    repo_id: str | None
    revision: str | None
    repo_type: str
    num_bytes: int
    total_bytes: int | None
    problem: str | None


class Closure(TypedDict):
    """A reason why no job, or only some jobs, may start on a device."""

    reason: str  #: drained, hours or reserved
    detail: str  #: a text that follows `GPU 0 is`


class DeviceRow(TypedDict):
    """A device, and what closes it."""

    device: str  #: a GPU's UUID, or the kind of another device
    label: str  #: `GPU 0`
    name: str | None  #: the model; None if it does not respond
    closures: list[Closure]


class Status(TypedDict):
    """The answer to `status`."""

    status: str
    pid: int
    version: str
    is_watching: bool
    is_paused: bool
    takes_drops: bool
    num_arriving: int
    limit: str  #: the asker's limit that keeps their job files waiting, in words; empty without one
    arrivals: list[Arrival]
    devices: list[DeviceRow]


class Gpu(TypedDict):
    """The current load of a GPU; None for what it does not report."""

    index: int
    uuid: str
    name: str
    busy_percent: int | None
    used_bytes: int
    total_bytes: int
    power_watts: float | None
    temperature_celsius: int | None
    num_jobs: int  #: jobs of honed's on it


class Telemetry(TypedDict):
    """The answer to `metrics`."""

    faults: dict[str, bool]  #: by kind, True while honed is degraded by it
    num_damaged: int  #: entries in corrupt/
    gpus: list[Gpu]
    process: Usage


# -- removal -----------------------------------------------------------------------------------------------------------


class PrunedRow(_Listed):
    """A job that is to be removed."""

    num_bytes: int | None  #: None until it is measured


class KeptRow(PrunedRow):
    """A job that was requested or is beyond a limit, but stays."""

    why: str


class RefusedRow(TypedDict):
    """A rejected file that is to be removed."""

    file: str
    num_bytes: int


class CachedRows(TypedDict):
    """Encoded rows in a user's cache that are to be removed."""

    uid: int
    key: str
    num_bytes: int


class PruneAnswer(TypedDict):
    """The answer to `prune`: jobs or, with `--rejected`, files, or with `--rows`, entries of the cache."""

    jobs: NotRequired[list[PrunedRow]]
    kept: NotRequired[list[KeptRow]]
    rejected: NotRequired[list[RefusedRow]]
    rows: NotRequired[list[CachedRows]]
    is_measured: bool  #: False while sizes are missing: ask again


class Removed(TypedDict):
    """What a removal has freed; `problem` is its first failure."""

    num_bytes: int
    num_files: int
    problem: str | None


class RemovedRow(_Listed, Removed):
    """A job that was removed."""
