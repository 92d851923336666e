"""Selection of what may be removed: finished jobs and rejected files beyond an age, a count or a size, unless they are
still needed.

Never removed are unfinished jobs, pinned jobs, and jobs whose files are needed by an unfinished or pinned job: through
`job:NAME`, `depends_on`, or a path into their directory. Nor are jobs of a sweep with `halving` that has not ended.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from honed.job import refusals, row_cache
from honed.job.brief import Listed
from honed.job.damaged import passed_over
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.query import Asker, find
from honed.job.refusals import Reason
from honed.job.row_cache import RowCache
from honed.job.shape import PruneAnswer, PrunedRow
from honed.job.spool import Spool
from honed.spec import problem
from honed.spec.config import RetentionConfig
from honed.system import access, untrusted
from honed.system.error import NotPermittedError, UsageError
from honed.system.holder import Holders
from honed.system.layout import Layout
from honed.system.part import Part
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

DAY_SEC = 86400.0
#: Files in rejected/; beyond it, the oldest of those users are removed who have the most.
MAX_REJECTED = 10_000
#: Jobs of which it is kept in memory what they need.
MAX_NEEDS = 50_000
#: Jobs whose removal is asked for in one request.
MAX_ASKED = 1000


@dataclass(frozen=True)
class Limits:
    """Retention limits; items beyond any of them are removed, oldest first."""

    max_age_sec: float | None = None
    max_count: int | None = None
    max_bytes: int | None = None
    is_divided: bool = False  #: `max_count` is divided among the users: nobody's items push out those of one with fewer

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.max_age_sec, self.max_count, self.max_bytes))


@dataclass(frozen=True)
class Item:
    """A candidate for removal: a job by its number, a rejected file by its name."""

    key: int | str
    changed_at: float  #: seconds since the epoch
    num_bytes: int = 0
    uid: int | None = None  #: whose it is; None if that is not known, or makes no difference


def excess(items: Iterable[Item], limits: Limits, *, now: float) -> list[Item]:
    """Return the items beyond the limits, oldest first; with `is_divided`, first those of who has the most."""
    newest_first = sorted(items, key=lambda item: (item.changed_at, _number(item.key)), reverse=True)
    if limits.is_divided:
        newest_first = _in_turns(newest_first)
    beyond, total = [], 0
    for rank, item in enumerate(newest_first):
        total += item.num_bytes
        is_old = limits.max_age_sec is not None and now - item.changed_at > limits.max_age_sec
        is_one_too_many = limits.max_count is not None and rank >= limits.max_count
        if is_old or is_one_too_many or (limits.max_bytes is not None and total > limits.max_bytes):
            beyond.append(item)
    return beyond[::-1]


def _in_turns(items: Iterable[Item]) -> list[Item]:
    """Return the items so that each user's first one precedes anybody's second one, and so on."""
    num_of: Counter[int | None] = Counter()
    ranked = []
    for item in items:
        ranked.append((num_of[item.uid], item))
        num_of[item.uid] += 1
    return [item for _, item in sorted(ranked, key=lambda one: one[0])]


def _number(key: int | str) -> int:
    return key if isinstance(key, int) else 0


# -- what is needed ---------------------------------------------------------------------------------------------------


class Needs:
    """The jobs that other jobs need, and why. Each plan is read once."""

    def __init__(self, spool: Spool, layout: Layout) -> None:
        self._spool = spool
        self._layout = layout
        self._path = re.compile(re.escape(str(layout.jobs_dir)) + r"/(\d+)(?:/|$)")
        self._named: dict[tuple[int, int], frozenset[int]] = {}

    def of(self, listed: Listed) -> frozenset[int]:
        """Return the other jobs whose files or success a job depends on."""
        key = (listed.id, listed.revision)
        if key not in self._named:
            job = listed if isinstance(listed, Job) else None
            with passed_over(self._spool.entries.path(listed.id, listed.state)):
                job = job or self._spool.job(listed.id)
            needed = frozenset((_named_by(job) | set(self._in_plan(listed))) - {listed.id})
            if job is None:  # its plan has the paths of what it needs
                return needed
            if len(self._named) >= MAX_NEEDS:
                self._named.clear()
            self._named[key] = needed
        return self._named[key]

    def reasons(self, jobs: Iterable[Listed]) -> dict[int, str]:
        """Return {number: reason to keep it} for all jobs that the given unfinished and pinned jobs need."""
        reasons: dict[int, str] = {}
        for job in jobs:
            for number in self.of(job):
                reasons.setdefault(number, f"job {job.id} ({job.name}), which is {_why(job)}, needs it")
        return reasons

    def _in_plan(self, job: Listed) -> Iterator[int]:
        """Yield jobs whose directories contain paths in the plan, whose links were resolved during the check."""
        try:
            texts = [*problem.texts(PlanFile.read(self._layout.files(job.id).plan_path).document)]
        except (OSError, ValueError, RecursionError):
            return
        for _, text in texts:
            if (match := self._path.match(text)) is not None:
                yield int(match[1])


def _named_by(job: Job | None) -> set[int]:
    return {int(name) for name in job.depends_on if name.isdecimal()} | {*job.inputs.values()} if job else set()


def _why(job: Listed) -> str:
    return "pinned" if job.state.is_final else str(job.state)


def output_hosts(layout: Layout, jobs: Iterable[Listed]) -> dict[int, str]:
    """Return the jobs whose directories contain another job's output, with the reason to keep them."""
    hosts: dict[int, str] = {}
    for job in jobs:
        path = Path(job.output_dir)
        names = path.relative_to(layout.jobs_dir).parts if path.is_relative_to(layout.jobs_dir) else ()
        if names and names[0].isdecimal() and int(names[0]) != job.id:
            hosts[int(names[0])] = f"the output of job {job.id} ({job.name}) is in its directory"
    return hosts


def why_kept(job: Listed, needed: dict[int, str]) -> str | None:
    """Return the reason why a job cannot be removed; None if it can."""
    if not job.state.is_final:
        return f"it is {job.state}"
    if job.is_pinned:
        return "it is pinned"
    return needed.get(job.id)


# -- what a person asks for -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """The arguments of `honectl prune`."""

    references: tuple[str, ...] = ()
    limits: Limits = Limits()
    states: frozenset[State] = frozenset()
    checkpoints: bool = False  #: only checkpoints; the jobs stay
    rejected: bool = False  #: rejected files instead of jobs
    rows: bool = False  #: cached rows instead of jobs

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Wish:
        """Parse a request from the control socket. Raises UsageError for arguments that honectl would not send."""
        try:
            limits = Limits(*(_figure(arguments.get(key)) for key in ("older_than_sec", "keep", "max_bytes")))
            return cls(
                tuple(dict.fromkeys(str(item) for item in arguments.get("ids") or ())),  # every one is looked up
                limits,
                frozenset(State(item) for item in arguments.get("states") or ()),
                bool(arguments.get("checkpoints")),
                bool(arguments.get("rejected")),
                bool(arguments.get("rows")),
            )
        except (TypeError, ValueError) as error:
            raise UsageError(f"prune: {error}") from error


def _figure(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise ValueError(f"not a number of at least 0: {value!r}")
    return value


@dataclass(frozen=True)
class Choice:
    """The jobs that a request selects."""

    jobs: list[Listed] = field(default_factory=list)
    #: Requested or beyond a limit, but kept, with the reason.
    kept: list[tuple[Listed, str]] = field(default_factory=list)


def asked(wish: Wish, spool: Spool, asker: Asker) -> list[int]:
    """Return the numbers of the jobs that a request names. Raises UsageError if it has neither jobs nor limits, or
    names one that is not there, and NotPermittedError for another user's job."""
    if not wish.references and not wish.limits:
        raise UsageError("nothing is selected", hint="name jobs, or add --older-than, --keep or --max-size")
    jobs = {job.id: job for job in (find(spool, reference, asker) for reference in wish.references)}
    for job in jobs.values():
        if not (asker.is_administrator or job.uid == asker.uid):
            raise NotPermittedError(
                f"job {job.id} belongs to another user", hint="only its owner and the administrators may prune it"
            )
    return list(jobs)


def choose(
    wish: Wish,
    named: Iterable[int],
    jobs: Sequence[Listed],
    needs: Needs,
    spool: Spool,
    asker: Asker,
    sizes: dict[int, int],
) -> Choice:
    """Return the jobs that a request selects among those that the asker may change; `named` are those that it names."""
    needed = needed_of(needs, spool, jobs)
    if wish.references:
        by_id = {job.id: job for job in jobs}
        wanted = [by_id[number] for number in named if number in by_id]
        if wish.limits or wish.states:
            wanted = _beyond(wanted, wish, spool, sizes)
    else:
        mine = [job for job in jobs if job.state.is_final and (asker.is_administrator or job.uid == asker.uid)]
        if wish.checkpoints and not wish.states:  # a failed job may still be requeued and resume from them
            mine = [job for job in mine if job.state is State.SUCCEEDED]
        # Pinned jobs do not count towards a limit for other jobs; a pinned job beyond a limit is listed as kept.
        wanted = _beyond([job for job in mine if not job.is_pinned], wish, spool, sizes)
        if any(job.is_pinned for job in mine):
            wanted = [*wanted, *(job for job in _beyond(mine, wish, spool, sizes) if job.is_pinned)]
    kept = [(job, why) for job in wanted if (why := why_kept(job, needed)) is not None]
    staying = {job.id for job, _ in kept}
    return Choice([job for job in wanted if job.id not in staying], kept)


def needed_of(needs: Needs, spool: Spool, jobs: Iterable[Listed]) -> dict[int, str]:
    """Return {number: reason to keep it} for all jobs that must stay."""
    jobs = list(jobs)
    hosts = output_hosts(spool.layout, jobs)
    return _compared(jobs) | hosts | needs.reasons(job for job in jobs if job.is_pinned or not job.state.is_final)


def _compared(jobs: Sequence[Listed]) -> dict[int, str]:
    """Return the ended jobs of sweeps whose others are still compared with them (`halving`), with the reason."""
    waiting: dict[tuple[int, int], Job] = {}
    for job in jobs:
        if isinstance(job, Job) and not job.state.is_final and job.group and job.group.get("halving"):
            waiting.setdefault((job.uid, job.group["id"]), job)
    return {
        job.id: f"job {other.id} ({other.name}) of its sweep, which is {_why(other)}, is compared with it"
        for job in jobs
        if job.state.is_final and job.sweep and (other := waiting.get((job.uid, job.sweep.id)))
    }


def _beyond(jobs: Iterable[Listed], wish: Wish, spool: Spool, sizes: dict[int, int]) -> list[Listed]:
    by_id = {job.id: job for job in jobs if not wish.states or job.state in wish.states}
    if not wish.limits:
        return list(by_id.values())
    items = []
    for job in by_id.values():
        try:
            items.append(Item(job.id, spool.changed_at(job), sizes.get(job.id, 0)))
        except FileNotFoundError:  # it changed state meanwhile
            continue
    return [by_id[int(item.key)] for item in excess(items, wish.limits, now=time.time())]


def report(chosen: Choice, sizes: dict[int, int], *, is_measured: bool) -> PruneAnswer:
    """Return the jobs that go and the jobs that stay, in the format of `prune --json`."""

    def row(job: Listed) -> PrunedRow:
        return {"id": job.id, "name": job.name, "state": job.state.value, "num_bytes": sizes.get(job.id)}

    return {
        "jobs": [row(job) for job in chosen.jobs],
        "kept": [{**row(job), "why": why} for job, why in chosen.kept],
        "is_measured": is_measured,
    }


# -- refused files ----------------------------------------------------------------------------------------------------


def look_at_refused(spool: Spool, reasons: list[Item], files: list[Item]) -> Iterator[None]:
    """Find what is in rejected/, a piece at a time: the reasons; and the files that were refused, with what else is
    there. A file and its reason are of about the same time and of one user, so that the limits of both remove both."""
    names = untrusted.names_in(spool.rejected, limit=None)
    is_full = len(names) > MAX_REJECTED  # only then it matters whose they are, which a reason says in its text
    # Thousands of subordinate users count as the one whose they are.
    holder_of = Holders().of if is_full and access.has_workers_user(spool.layout.root) else _oneself
    submitters: dict[str, int | None] = {}
    for name, info in untrusted.infos(spool.rejected, names):
        item = Item(name, info.st_ctime, info.st_size, holder_of(info.st_uid))
        if not name.endswith(refusals.SUFFIX):
            files.append(item)
        elif is_full and (reason := _readable(spool.rejected / name)) is not None:
            uid = reason.uid if reason.uid is None else holder_of(reason.uid)
            reasons.append(replace(item, uid=uid))
            if reason.kept_path is not None:
                submitters[reason.kept_path.name] = uid
        else:
            reasons.append(item)
        yield
    # A file that was submitted, and not dropped, is ours.
    files[:] = [replace(item, uid=submitters.get(str(item.key), item.uid)) for item in files]


def _oneself(uid: int) -> int:
    return uid


def _readable(path: PersonPath) -> Reason | None:
    """Return the reason in a file; None if it is none, or the disk does not give it."""
    with contextlib.suppress(OSError):
        return refusals.read(path)
    return None


def remove_refused(spool: Spool, name: str) -> bool:
    """Remove a file in rejected/. Logs a warning and returns False for a directory, which a person has made there."""
    path = spool.rejected / Path(name).name
    try:
        untrusted.remove(path)
    except IsADirectoryError:
        log.warning("%s: a directory, not removed; as root, rm -r it", path)
        return False
    return True


def prune_refused(spool: Spool, wish: Wish, asker: Asker, *, is_dry: bool, now: float) -> Iterator[Part]:
    """Remove refused files beyond the limits, or list them if `is_dry`: the asker's, or all for an administrator. It is
    done, and answered, a file at a time. Raises UsageError without limits."""
    if not wish.limits:
        raise UsageError(
            "nothing is selected", hint="--rejected needs --older-than, --keep or --max-size; --keep 0 removes all"
        )
    return _pruned_refused(spool, wish, asker, is_dry=is_dry, now=now)


def _pruned_refused(spool: Spool, wish: Wish, asker: Asker, *, is_dry: bool, now: float) -> Iterator[Part]:
    pruned: dict[str, tuple[str, PersonPath | None]] = {}  # of every reason the file, and where that is kept
    items: list[Item] = []
    yield {"rejected": []}
    for name in untrusted.names_in(spool.rejected, limit=None):
        yield None
        if not name.endswith(refusals.SUFFIX) or (reason := refusals.read(spool.rejected / name)) is None:
            continue
        if asker.is_administrator or reason.uid == asker.uid:
            pruned[name] = (reason.file, reason.kept_path)
            items.append(_with_file(reason))
    num_removed = 0
    for item in excess(items, wish.limits, now=now):
        file, kept_path = pruned[str(item.key)]
        if not is_dry:  # the file first: after a crash its reason is still listed, and removed later
            if kept_path is not None:
                remove_refused(spool, kept_path.name)
            num_removed += remove_refused(spool, str(item.key))
        yield {"rejected": [{"file": file, "num_bytes": item.num_bytes}]}
    if num_removed:
        log.info("%s: removed %d refused files, as requested by user %d", spool.rejected_dir, num_removed, asker.uid)
    if asker.is_administrator and not is_dry:
        yield from _remove_unexplained(spool, wish, {name: kept_path for name, (_, kept_path) in pruned.items()}, now)
    yield {"is_measured": True}


def _remove_unexplained(spool: Spool, wish: Wish, known: Mapping[str, PersonPath | None], now: float) -> Iterator[None]:
    """Remove refused files beyond the limits whose reasons are gone, a file at a time. `known`: where each reason's
    file is kept; of those that have come since, their reasons say so."""
    reasons: list[Item] = []
    files: list[Item] = []
    yield from look_at_refused(spool, reasons, files)
    explained = {kept_path.name for kept_path in known.values() if kept_path is not None}
    for name in {str(item.key) for item in reasons} - known.keys():
        if (reason := _readable(spool.rejected / name)) is not None and reason.kept_path is not None:
            explained.add(reason.kept_path.name)
    for item in excess((item for item in files if item.key not in explained), wish.limits, now=now):
        if remove_refused(spool, str(item.key)):
            log.info("%s: removed %s, whose reason is gone", spool.rejected_dir, item.key)
        yield


def _with_file(reason: Reason) -> Item:
    num_bytes = len(reason.text)
    if reason.kept_path is not None:
        with contextlib.suppress(FileNotFoundError):
            num_bytes += untrusted.info(reason.kept_path).st_size
    return Item(reason.path.name, reason.refused_at, num_bytes)


def prune_rows(cache: RowCache, wish: Wish, asker: Asker, *, is_dry: bool, now: float) -> PruneAnswer:
    """Remove cached rows beyond the limits, or list them if `is_dry`: the asker's, or all for an administrator.

    Those of running jobs stay.
    """
    if not wish.limits:
        raise UsageError(
            "nothing is selected", hint="--rows needs --older-than, --keep or --max-size; --keep 0 removes all"
        )
    mine = {f"{one.uid}/{one.name}": one for one in cache.listed(uid=None if asker.is_administrator else asker.uid)}
    items = [Item(key, one.used_at, one.num_bytes) for key, one in mine.items()]
    beyond = [mine[str(item.key)] for item in excess(items, wish.limits, now=now)]
    if not is_dry:
        cache.remove(beyond, f"requested by user {asker.uid}")
    return {"rows": row_cache.answer(beyond), "is_measured": True}


# -- what the configuration says --------------------------------------------------------------------------------------


def job_limits(config: RetentionConfig) -> Limits:
    return Limits(_days(config.max_job_age_days), config.max_jobs, config.max_job_bytes)


def checkpoint_limits(config: RetentionConfig) -> Limits:
    """Return the limits on checkpoints of all finished jobs, without the age limits, which depend on the outcome."""
    return Limits(max_bytes=config.max_checkpoint_bytes)


def refused_limits(config: RetentionConfig) -> Limits:
    return Limits(_days(config.max_rejected_age_days), MAX_REJECTED, is_divided=True)


def _days(value: float | None) -> float | None:
    return None if value is None else value * DAY_SEC
