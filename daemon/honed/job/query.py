"""Descriptions of jobs in the shapes of `--json`, read from the spool and the database: by the daemon for its control
socket, and by honectl itself if honed is down.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shlex
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Any, cast

from honed.job import history, preemption, refusals
from honed.job.brief import Listed, as_known
from honed.job.catalog import Catalog
from honed.job.database import MAX_METRICS, Reader, figures, progress_of, timestamp
from honed.job.event import Event
from honed.job.job import Attempt, Halving, Job, State, SweepName
from honed.job.plan_file import PlanFile
from honed.job.refusals import Reason
from honed.job.shape import (
    AttemptRow,
    Glance,
    GroupJob,
    GroupShown,
    OnCluster,
    Overview,
    Prediction,
    Progress,
    Refusal,
    Refused,
    Row,
    Score,
    Shown,
    StoppedEarly,
    Wait,
    on_cluster,
)
from honed.job.spool import Spool
from honed.spec import kind
from honed.system import durable, untrusted
from honed.system.error import NotPermittedError, TimeLimitError, UsageError, plain
from honed.system.layout import JobFiles, Layout
from honed.system.part import Part, joined
from honed.system.personpath import PersonPath

#: Digits of a job's number.
MAX_DIGITS = 18
_WHO_READS = "its owner and the administrators can read it; see policy.share_results"

#: The queued jobs in the order in which they start.
Queue = Callable[[], Iterator[Job]]
#: Rows of a list that are built, and jobs that are looked at, at a time, so that no request blocks the daemon.
ROWS_AT_ONCE, LOOKED_AT_ONCE = 64, 500
#: Rows of a list that are chosen at once.
MAX_FEW = 1000
#: Bytes of what a job's worker left that an answer reads: some milliseconds of work for any JSON. Ours have some
#: kilobytes.
MAX_TOLD_BYTES = 64 * 1024
#: Refused files that are looked at, the newest.
MAX_REFUSED = 200
#: Refused files of one name that are looked at, the newest: of ten thousand, an answer would take a second.
MAX_OF_A_NAME = 1000
#: Jobs per group in an overview.
OVERVIEW_JOBS = 20

#: Kinds of events in `show`.
SHOWN_EVENTS = {
    "adjusted",
    "artifact",
    "audit",
    "data",
    "fallback",
    "memory",
    "resumed",
    "started_over",
    "trial",
    "worse",
}
#: The progress of a job that has reported none.
NO_PROGRESS = progress_of({})
#: A uid that no user has.
NOBODY_UID = -1


@dataclass(frozen=True)
class Asker:
    """The user who sends a query, and whether they may read and change every job."""

    uid: int
    is_administrator: bool
    reads_all: bool  #: administrators, or everybody if results are shared

    def may_read(self, job: Listed) -> bool:
        return self.reads_all or job.uid == self.uid


#: A reader of the files themselves: the file system has already decided what they may see.
ANYBODY = Asker(os.getuid(), is_administrator=True, reads_all=True)


def find(spool: Spool, reference: str, asker: Asker = ANYBODY) -> Job:
    """Return a job by its number, or by an unambiguous name among the jobs that the asker may read.

    Raises UsageError, which lists the candidates. Any job is found by number; permissions are checked afterwards.
    """
    if reference.isdecimal() and len(reference) <= MAX_DIGITS and (job := spool.job(int(reference))) is not None:
        return job
    named = [job for job in spool.named(reference) if asker.may_read(job)]
    if not named and (pruned := spool.pruned.get(reference)) is not None and asker.may_read(pruned):
        raise UsageError(f"job {pruned.id} ({pruned.name}) {words_of_pruned(pruned)}", hint="submit its job file again")
    if not named and (members := [job for job in spool.all() if _is_of(job, reference) and asker.may_read(job)]):
        first, last = min(job.id for job in members), max(job.id for job in members)
        raise UsageError(
            f"{reference!r} is a sweep of {len(members)} jobs, {first} to {last}",
            hint=f"name one of them, such as {first}; honectl show {shlex.quote(reference)} lists them",
        )
    if not named:
        raise UsageError(f"no job {reference!r}", hint="honectl list shows all jobs")
    active = [job for job in named if not job.state.is_final]
    match active or named:
        case [listed]:
            if (job := spool.job(listed.id)) is not None:
                return job
            raise UsageError(f"the entry of job {listed.id} cannot be read", hint="honectl doctor")
        case several:
            numbers = ", ".join(str(job.id) for job in several)
            raise UsageError(f"{len(several)} jobs are named {reference!r}", hint=f"use its number: {numbers}")


def _is_of(job: Listed, reference: str) -> bool:
    return job.sweep is not None and reference in (job.sweep.name, str(job.sweep.id))


def words_of_pruned(pruned: Job) -> str:
    """Describe how a pruned job ended."""
    ended = {State.SUCCEEDED: "succeeded", State.FAILED: "failed"}.get(pruned.state, "was cancelled")
    return f"{ended} and was pruned: its output is gone"


def _readable(spool: Spool, reference: str, asker: Asker) -> Job:
    """Return a job as `find` does. Raises NotPermittedError if the asker may not read it."""
    job = find(spool, reference, asker)
    if not asker.may_read(job):
        raise NotPermittedError(
            f"job {job.id} belongs to another user",
            hint=_WHO_READS,
        )
    return job


@dataclass(frozen=True)
class Choice:
    """A filter on the list of jobs; the default selects all."""

    states: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()  #: names or numbers; sets, since a request has room for 60,000
    limit: int | None = None
    after: int | None = None  #: only jobs listed after this one

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Choice:
        """Parse a request. Raises UsageError if its arguments are invalid."""
        limit, after = arguments.get("limit"), arguments.get("after")
        if any(value is not None and (not isinstance(value, int) or value < 0) for value in (limit, after)):
            raise UsageError("limit and after must be numbers", hint="honectl list --limit 50 --after 7")
        states, names = arguments.get("states") or [], arguments.get("names") or []
        if not isinstance(states, list | tuple) or not isinstance(names, list | tuple):
            raise UsageError("states and names must be lists", hint="honectl list --state running qa facts")
        return cls(frozenset(map(str, states)), frozenset(map(str, names)), limit, after)

    def has(self, job: Listed, asker: Asker) -> bool:
        if self.states and job.state not in self.states:
            return False
        if not self.names or str(job.id) in self.names:
            return True
        is_named = job.name in self.names or (
            job.sweep is not None and (job.sweep.name in self.names or str(job.sweep.id) in self.names)
        )
        return is_named and asker.may_read(job)


def list_jobs(spool: Spool, layout: Layout, _reference: str = "", asker: Asker = ANYBODY) -> list[Row]:
    """Return all jobs: running first, then the queue in order, then held jobs, then finished jobs, newest first."""
    return [row for row in rows(spool, layout, Choice(), asker) if row is not None]


def rows(
    spool: Spool, layout: Layout, choice: Choice, asker: Asker = ANYBODY, queue: Queue | None = None
) -> Iterator[Row | None]:
    """Iterate over the chosen jobs' rows, with None after many jobs without one. The jobs and their order are fixed
    now, each once; each row is built when it is requested. `queue` returns the queued jobs in their order; without it
    they are listed by priority and number."""
    jobs = spool.all()
    if choice.limit is not None and choice.limit <= MAX_FEW and not choice.names:
        chosen = (job for job in _ordered(jobs, choice.after, queue) if choice.has(job, asker))
        return _rows(layout, jobs, list(islice(chosen, choice.limit)), asker)
    fixed = queue if queue is None else partial(iter, list(queue()))
    return _rows(layout, jobs, _chosen(_ordered(jobs, choice.after, fixed), choice, asker), asker)


def _chosen(jobs: Iterator[Listed], choice: Choice, asker: Asker) -> Iterator[Listed | None]:
    has = (job if choice.has(job, asker) else None for job in jobs)
    if choice.limit == 0:
        return
    num_chosen = 0
    for num, job in enumerate(has, 1):
        if job is not None or num % LOOKED_AT_ONCE == 0:
            yield job
        num_chosen += job is not None
        if num_chosen == choice.limit:
            return


def _rows(layout: Layout, jobs: Catalog, chosen: Iterable[Listed | None], asker: Asker) -> Iterator[Row | None]:
    some: list[Listed] = []
    for job in chosen:
        if job is None:
            yield None
            continue
        some.append(job)
        if len(some) == ROWS_AT_ONCE:
            yield from _built(layout, jobs, some, asker)
            some = []
    yield from _built(layout, jobs, some, asker)


def _built(layout: Layout, jobs: Catalog, chosen: Sequence[Listed], asker: Asker) -> Iterator[Row]:
    for first in range(0, len(chosen), ROWS_AT_ONCE):
        some = [job for item in chosen[first : first + ROWS_AT_ONCE] if (job := _whole(jobs, item)) is not None]
        with contextlib.closing(Reader(layout.database_path)) as reader:
            numbers = [job.id for job in some]
            progress, scores = reader.progress(numbers), reader.scores(numbers)
        for job in some:
            yield _row(job, progress.get(job.id, NO_PROGRESS), scores.get(job.id), asker)


def _whole(jobs: Catalog, listed: Listed) -> Job | None:
    """Return a job of a list; None if it is gone. Of one whose entry cannot be read, there is what is in memory: it
    keeps no other out of the list."""
    try:
        return jobs.get(listed.id)
    except OSError as error:
        return replace(as_known(listed), remark=f"its entry cannot be read: {error.strerror}")


def _ordered(jobs: Catalog, after: int | None, queue: Queue | None) -> Iterator[Listed]:
    """Iterate over all jobs in list order, from the start or after the job `after`."""
    last = jobs.listed(after) if after is not None else None
    if queue is None or (last is not None and last.state not in (State.RUNNING, State.QUEUED)):
        return jobs.ordered(after)
    ordered = chain(jobs.of_state(State.RUNNING), queue(), jobs.of_state(State.HELD), jobs.ended())
    return ordered if last is None else islice(dropwhile(lambda job: job.id != after, ordered), 1, None)


def overview(
    spool: Spool, layout: Layout, choice: Choice, asker: Asker = ANYBODY, queue: Queue | None = None
) -> Overview:
    """Return the first jobs of every group and the number of jobs in every state; `queue` as for `rows`."""
    jobs = spool.all()
    num = choice.limit if choice.limit is not None else OVERVIEW_JOBS
    counts = {state.value: jobs.num(state) for state in State if not choice.states or state in choice.states}
    if choice.names:
        chosen = [job for job in _ordered(jobs, None, queue) if choice.has(job, asker)]
        counts = {state: sum(job.state == state for job in chosen) for state in counts}
    else:
        chosen = list(_heads(jobs, choice, num, queue))
    return {
        "jobs": list(_built(layout, jobs, chosen, asker)),
        "counts": counts,
        "refused": refused(spool, asker, limit=1),
    }


def _heads(jobs: Catalog, choice: Choice, num: int, queue: Queue | None) -> Iterator[Listed]:
    for state in (State.RUNNING, State.QUEUED, State.HELD):
        if not choice.states or state in choice.states:
            heads = queue() if queue is not None and state is State.QUEUED else jobs.of_state(state)
            yield from islice(heads, num)
    yield from islice((job for job in jobs.ended() if not choice.states or job.state in choice.states), num)


def accepted(
    spool: Spool, layout: Layout, source: str, asker: Asker, since: str, *, number: int | None = None
) -> Row | None:
    """Return the newest job made since then from a file with this name, or the job with this number; None if none."""
    jobs = spool.all()
    if number is not None:
        job = jobs.listed(number) or _made_by(jobs, number, asker)
        return next(_built(layout, jobs, [job], asker), None) if job is not None and asker.may_read(job) else None
    begin = _seconds(since)
    for job in jobs.newest():
        if job.submitted_at < begin:
            return None
        if source in (job.source, job.sweep.file if job.sweep else None) and asker.may_read(job):
            return next(_built(layout, jobs, [job], asker), None)
    return None


def _seconds(when: str) -> float:
    """Return a time of a request; without a valid one, the beginning of all."""
    try:
        return datetime.fromisoformat(when).timestamp()
    except (ValueError, OverflowError):
        return -math.inf


def _made_by(jobs: Catalog, number: int, asker: Asker) -> Listed | None:
    later = itertools.takewhile(lambda job: job.id > number, jobs.newest())
    return next((job for job in later if job.sweep and job.sweep.id == number and asker.may_read(job)), None)


def group(spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY) -> GroupShown:
    """Return the jobs of a sweep, by its number, or by its name if the asker may read one sweep of that name."""
    return cast("GroupShown", joined(grouped(spool, layout, reference, asker)))


def grouped(spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY) -> Iterator[Part]:
    """Return the same in parts. Raises UsageError and NotPermittedError at once."""
    groups: dict[int, tuple[SweepName, list[int]]] = {}
    is_others = False
    jobs = spool.all()
    for job in jobs:
        if not _is_of(job, reference):
            continue
        assert job.sweep is not None
        if asker.may_read(job):
            groups.setdefault(job.sweep.id, (job.sweep, []))[1].append(job.id)
        else:
            is_others = is_others or reference == str(job.sweep.id)
    if numbered := {number: groups[number] for number in groups if reference == str(number)}:
        groups = numbered
    if not groups and is_others:
        raise NotPermittedError(f"sweep {reference} belongs to another user", hint=_WHO_READS)
    if not groups:
        raise UsageError(f"no sweep {reference!r}", hint="honectl list shows all jobs")
    if len(groups) > 1:
        numbers = ", ".join(map(str, sorted(groups)))
        raise UsageError(f"{len(groups)} sweeps are named {reference!r}", hint=f"use its number: {numbers}")
    [(sweep, members)] = groups.values()
    return _members(layout, jobs, sweep, sorted(members))


def _members(layout: Layout, jobs: Catalog, sweep: SweepName, numbers: Sequence[int]) -> Iterator[Part]:
    yield {**sweep._asdict(), "jobs": []}
    best: GroupJob | None = None
    halving: Halving | None = None
    for number in numbers:  # one at a time: of every ended one, its entry is read, and a result of any worker's
        if (member := jobs.get(number)) is None or member.group is None:
            continue
        halving = member.group.get("halving")
        with contextlib.closing(Reader(layout.database_path)) as reader:
            job = _group_job(layout, reader, member)
        loss, least = job["eval_loss"], best["eval_loss"] if best is not None else None
        if job["state"] == State.SUCCEEDED and loss is not None and (least is None or loss < least):
            best = job
        yield {"jobs": [job]}
    yield {"best": best["id"] if best is not None else None, "halving": halving}


def _group_job(layout: Layout, reader: Reader, job: Job) -> GroupJob:
    assert job.group is not None
    eval_loss = _eval_loss(reader, job)
    if job.state.is_final and job.attempts:
        result = _result(layout.files(job.id), job)
        final = figures(Event("evaluation", 0.0, {"metrics": result.get("metrics")}))
        eval_loss = final.get("eval_loss", eval_loss)
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state.value,
        "outcome": job.outcome,
        "values": job.group["values"],
        "eval_loss": eval_loss,
        "stopped_early": _stopped_early(job),
    }


def _eval_loss(reader: Reader, job: Job) -> float | None:
    return history.last_metric(reader, job.id, "eval_loss", job.attempt.number if job.attempts else 0)


def _stopped_early(job: Job) -> StoppedEarly | None:
    if (cut := job.cut) is None or not job.was_stopped_early:
        return None
    return {"rung": cut.rung, "step": cut.step, "eval_loss": cut.eval_loss, "reason": cut.words}


def _row(job: Job, progress: Progress, score: Score | None, asker: Asker) -> Row:
    """Return a job's row; for another user's job only the facts that people behind it in the queue need."""
    if asker.may_read(job):
        return summary(job, progress, score)
    row = summary(job, {**progress, "epoch": None, "loss": None})
    row |= {
        "name": "",
        "outcome": None,
        "remark": "",
        "source": None,
        "preemption": None,
        "class": None,
        "group": None,
        "model": None,
        "data": [],
        "elapsed_sec": None,
    }
    return row if row["waiting_for"] is None else {**row, "waiting_for": {**row["waiting_for"], "detail": ""}}


def summary(job: Job, progress: Progress = NO_PROGRESS, score: Score | None = None) -> Row:
    """Return one row of `list --json`."""
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state.value,
        "outcome": job.outcome,
        "remark": job.remark,
        "priority": job.priority,
        "class": job.job_class,
        "submitted_at": timestamp(job.submitted_at),
        "uid": job.uid,
        "source": job.source,
        "is_pinned": job.is_pinned,
        "waiting_for": _waiting_for(job),
        "staged_at": timestamp(job.staged_at) if job.staged_at is not None else None,
        "preemption": preemption.current(job),
        "progress": progress if job.state is State.RUNNING else {**progress, "eta_sec": None},
        "needs_bytes": job.needs_bytes or None,
        "group": job.group,
        "model": job.model or None,
        "data": list(job.data),
        "elapsed_sec": job.elapsed_sec(time.time()),
        "score": None if _is_of_a_part(job, progress) else score,
    }


def _is_of_a_part(job: Job, progress: Progress) -> bool:
    """Tell whether a job's figures are of a part of the rows: an evaluation, at step 0, that its time limit ended."""
    return job.outcome == TimeLimitError.code and not progress["step"]


def _waiting_for(job: Job) -> Wait | None:
    """Return the reason why a job waits according to its entry; the daemon adds the reasons of queued jobs."""
    match job.state, job.error:
        case State.HELD, {"message": str(message)}:
            return {"reason": "person" if job.held_for is None else "dependency", "detail": message}
        case State.HELD, _:
            return {"reason": "person", "detail": f"it is held: honectl release {job.id}"}
        case State.QUEUED, _:
            return {"reason": "honed", "detail": "honed is not running"}
        case _:
            return None


def show(spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY) -> Shown:
    """Return a job's details."""
    return cast("Shown", joined(shown(spool, layout, reference, asker)))


def shown(
    spool: Spool,
    layout: Layout,
    reference: str,
    asker: Asker = ANYBODY,
    *,
    explain: Callable[[Row], Row] = lambda row: row,
    has_events: bool = True,
    names: Container[str] | None = None,
) -> Iterator[Part]:
    """Return a job's details in parts, each read in a few milliseconds: first those of a limited length, with their row
    as `explain` returns it. Without `has_events` there are none; of the metrics of its events only these `names`, if
    they are given. Raises UsageError and NotPermittedError at once."""
    job = _readable(spool, reference, asker)
    files = layout.files(job.id)
    with contextlib.closing(Reader(layout.database_path)) as reader:
        progress, score = reader.progress([job.id]).get(job.id, NO_PROGRESS), reader.scores([job.id]).get(job.id)
    plan = dict(_plan(files).document)
    spec = plan.pop("spec", {})
    result = _result(files, job) if job.attempts else {}
    artifacts = value if isinstance(value := result.get("artifacts"), dict) else {}
    report = str(files.report_path) if untrusted.exists(files.report_path) else None
    head = {
        **explain(summary(job, progress, score)),
        "spec": spec,
        "plan": plan,
        "attempts": [_attempt(attempt) for attempt in job.attempts],
        "error": job.error,
        "adjustments": [
            {"attempt": adjustment.attempt, "text": adjustment.text, "changes": adjustment.changes}
            for adjustment in job.adjustments
        ],
        "num_preemptions": job.num_preemptions,
        "artifacts": {
            "output_dir": _text(artifacts.get("output_dir")) or (job.output_dir if kind.of(spec).makes else None),
            "report": report,
            "merged": _text(artifacts.get("merged")),
        },
        "depends_on": list(job.depends_on),
        "stopped_early": _stopped_early(job),
        "edited_at": [timestamp(when) for when in job.edited_at],
        "job_dir": str(files.dir),
        **_on_cluster(layout, job),
    }
    parts = _reported(layout, job, plan.get("memory") or {}, result, has_events=has_events, names=names)
    return chain([head], parts)


def _reported(
    layout: Layout,
    job: Job,
    estimated: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    has_events: bool,
    names: Container[str] | None,
) -> Iterator[Part]:
    """Yield the parts of a job's details that have any length, those of a key one after the other."""
    path, attempt = layout.database_path, job.attempt.number if job.attempts else 0
    yield {"metrics": {}}
    for metric in history.last_metrics(path, job.id, attempt):
        is_wanted = metric is not None and (names is None or metric[0] in names)
        yield {"metrics": dict([metric])} if metric is not None and is_wanted else None
    yield {"metrics": figures(Event("evaluation", 0.0, {"metrics": result.get("metrics")}))}
    used: dict[str, int] = {}
    yield {"events": []}
    for event in history.events(path, job.id, SHOWN_EVENTS if has_events else ("memory",)):
        if event is not None and event["event"] == "memory":
            used = dict(itertools.islice((used | _memory_used(event)).items(), MAX_METRICS))
        yield {"events": [event]} if event is not None and has_events else None
    yield {"memory": {"estimated": estimated, "used": used}}


def _on_cluster(layout: Layout, job: Job) -> OnCluster:
    start = _read_json(layout.files(job.id).start_path)
    return on_cluster(start) if job.attempts and start.get("number") == job.attempt.number else {}


def _text(value: Any) -> str | None:
    """Return a path written by the worker's user as plain text; None if it is not a string."""
    return plain(value) if isinstance(value, str) else None


def _memory_used(event: Mapping[str, Any]) -> dict[str, int]:
    """Return the worker's memory use in a `memory` event; a later one replaces what it reports again."""
    return {
        key: value
        for key, value in event.items()
        if key.endswith("_bytes") and type(value) is int and abs(value) < 2**63
    }


def _attempt(attempt: Attempt) -> AttemptRow:
    return {
        "number": attempt.number,
        "backend": attempt.backend,
        "started_at": timestamp(attempt.started_at),
        "ended_at": timestamp(attempt.ended_at) if attempt.ended_at is not None else None,
        "outcome": attempt.outcome,
        "step": attempt.step,
        "num_starts": attempt.num_starts,
        "staged_at": timestamp(attempt.staged_at) if attempt.staged_at is not None else None,
        "device": attempt.device,
        "preemption": preemption.row(attempt),
    }


def predictions(spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY) -> list[Prediction]:
    """Return the predictions for every held-out example, by step."""
    return list(history.present(iter_predictions(spool, layout, reference, asker)))


def iter_predictions(
    spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY
) -> Iterator[Prediction | None]:
    """Iterate over the predictions, with None after every page. Raises UsageError and NotPermittedError at once."""
    return history.predictions(layout.database_path, _readable(spool, reference, asker).id)


def losses(spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY) -> list[tuple[int, float]]:
    """Return the reported (step, loss) pairs of one job, by step; those of a repeated step in their order."""
    return list(history.present(iter_losses(spool, layout, reference, asker)))


def iter_losses(
    spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY
) -> Iterator[tuple[int, float] | None]:
    """Iterate over the losses, with None after every page. Raises UsageError and NotPermittedError at once."""
    losses = history.metric(layout.database_path, _readable(spool, reference, asker).id, "loss")
    return (row and row[:2] for row in losses)


def glance(spool: Spool, layout: Layout, reference: str, asker: Asker = ANYBODY) -> Glance:
    """Return a short summary for watching a job: its loss curve, its memory, its last predictions."""
    job = _readable(spool, reference, asker)
    with contextlib.closing(Reader(layout.database_path)) as reader:
        progress, score = reader.progress([job.id]).get(job.id, NO_PROGRESS), reader.scores([job.id]).get(job.id)
        stage, course = reader.stage(job.id), reader.course(job.id, "loss")
        eval_loss, last_predictions = _eval_loss(reader, job), reader.last_predictions(job.id)
    resident_bytes, cpu_sec = _worker(layout, job) if job.state is State.RUNNING and job.attempts else (None, None)
    return {
        **summary(job, progress, score),
        "stage": stage,
        "course": course,
        "predictions": last_predictions,
        "eval_loss": eval_loss,
        "resident_bytes": resident_bytes,
        "cpu_sec": cpu_sec,
        "estimated_bytes": _estimated_bytes(layout, job),
        "device": job.attempt.device if job.attempts else None,
        "error": job.error,
    }


def _estimated_bytes(layout: Layout, job: Job) -> int | None:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        memory = _plan(layout.files(job.id)).memory
        return memory.total_bytes if memory else None
    return None


def _worker(layout: Layout, job: Job) -> tuple[int | None, float | None]:
    """Return the resident bytes and the CPU seconds of a running worker; None if it is gone or /proc does not say."""
    if _on_cluster(layout, job):
        return None, None  # it runs on another machine
    pid = _read_json(layout.files(job.id).attempt(job.attempt.number).lock_path).get("worker_pid")
    try:
        directory = Path(f"/proc/{int(pid or 0)}")
        pages = int((directory / "statm").read_text(encoding="ascii").split()[1])
        # utime and stime are fields 14 and 15; field 2 is a name that may contain anything.
        stat = (directory / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])
    except (OSError, ValueError, TypeError, IndexError):
        return None, None
    return pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")


def refusal(spool: Spool, file_name: str, asker: Asker = ANYBODY, *, number: int | None = None) -> Refusal | None:
    """Return the newest rejection of a file with this name that the asker may see, or of the arrival with this number;
    None if there is none. Of thousands of files of one name, others' too, only the newest are looked at.
    """
    if number is not None:
        numbered = list(_reasons(refusals.places(spool.rejected, file_name, number), asker))
        return next((_refusal(reason) for reason in numbered if reason.number == number), None)
    stem = Path(file_name).stem
    begins = (f"{file_name}.", f"{stem}.", *([stem[:45]] if len(stem) > 45 else []))  # a long name is cut
    named = [
        name
        for name in os.listdir(spool.rejected_dir)  # noqa: PTH208 - there may be thousands
        if name.startswith(begins) or name.endswith(f"~{refusals.SUFFIX}")
    ]
    infos = sorted(((info.st_mtime, name) for name, info in untrusted.infos(spool.rejected, named)), reverse=True)
    newest = _reasons([spool.rejected / name for _, name in infos[:MAX_OF_A_NAME]], asker)
    return next((_refusal(reason) for reason in newest if reason.file == refusals.shown(file_name)), None)


def refused(spool: Spool, asker: Asker = ANYBODY, *, limit: int = MAX_REFUSED) -> Refused:
    """Return the newest refused files that the asker may see, with at most `limit` of their reasons."""
    listed = refusals.listed(spool.rejected)
    reasons = list(_reasons(listed[:MAX_REFUSED], asker))
    files = [_refusal(reason) for reason in reasons[:limit]]
    return {"files": files, "num": len(reasons), "are_all": len(listed) <= MAX_REFUSED}


def _reasons(paths: Iterable[PersonPath], asker: Asker) -> Iterator[Reason]:
    for path in paths:
        if (reason := refusals.read(path)) is not None and (asker.reads_all or reason.uid == asker.uid):
            yield reason


def _refusal(reason: Reason) -> Refusal:
    return {"file": reason.file, "reason": reason.text, "refused_at": reason.refused_at}


def _plan(files: JobFiles) -> PlanFile:
    try:
        return PlanFile.read(files.plan_path)
    except (OSError, ValueError):
        return PlanFile({})


def _result(files: JobFiles, job: Job) -> dict[str, Any]:
    """Return the result of a job's last attempt; empty if it is larger than an answer has time for."""
    return _read_json(files.attempt(job.attempt.number).result_path)


def _read_json(path: PersonPath) -> dict[str, Any]:
    return durable.json_object(lambda: untrusted.read_plain(path, max_bytes=MAX_TOLD_BYTES))
