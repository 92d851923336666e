"""The daemon's end of housekeeping: it chooses in small bites what to remove, and a child removes it (removal.py).

    a finished job ── its entry renamed to pruned/: the commit ──► its rows ──► the child: staged copies, directory
    checkpoints ── the entry says so ── renamed to .checkpoints.<n>.old ──► the child

After a crash in between, the next start finds the unfinished work: a directory whose entry lies in pruned/, rows
without an entry, checkpoints under their old name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from honed.job import removal, retention
from honed.job.database import Database, timestamp
from honed.job.job import Job, State
from honed.job.query import Asker
from honed.job.retention import DAY_SEC, Choice, Item, Needs, Wish
from honed.job.spool import Spool
from honed.run.process import DAEMON_VARIABLES, SECRET_VARIABLES
from honed.spec.config import Config, RetentionConfig
from honed.system.clock import Calendar
from honed.system.error import UsageError
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)

#: Seconds of one turn of the loop that may be spent on choosing what to remove.
BITE_SEC = 0.02
#: Rows removed from a table in one turn.
BITE_ROWS = 2000
#: Items for one child: the length of a command line is limited.
MAX_ITEMS = 2000
#: Seconds before a failed removal is retried.
RETRY_SEC = 600.0
#: Last entries of pruned jobs that are kept, to answer questions about them.
MAX_REMEMBERED = 10_000


@dataclass
class Done:
    """The result of removing one requested item."""

    num_bytes: int = 0
    num_files: int = 0
    problem: str | None = None


@dataclass
class _Work:
    """The items that wait for a child, in order, and the items that the child is working on."""

    waiting: dict[str, None] = field(default_factory=dict)
    at_work: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    said: IO[bytes] | None = None  #: the child's output, read when it has ended


class Housekeeper:
    """Applies the retention limits and the prune requests.

    `unfinished` returns the jobs that are not over; `clock` is monotonic seconds, `now` seconds since the epoch.
    """

    def __init__(
        self,
        layout: Layout,
        config: Config,
        spool: Spool,
        database: Database,
        unfinished: Callable[[], Iterable[Job]],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._layout = layout
        self.config = config
        self._spool = spool
        self._database = database
        self._unfinished = unfinished
        self._clock = clock
        self._now = now
        self._needs = Needs(spool, layout)
        self._sizes: dict[tuple[int, int], int] = {}  # number and revision → bytes of the job's directory
        self._weights: dict[tuple[int, int], int] = {}  # the same → bytes of its checkpoints
        self._rows: list[int] = []  # pruned jobs whose rows still exist
        self._work = _Work()
        self._done: dict[str, Done] = {}
        self._retry: dict[str, float] = {}
        self._look: Iterator[None] | None = self._find_leftovers()
        self._look_at = clock() + config.retention.interval_sec
        self._calendar = Calendar(clock=clock, now=now)

    # -- the loop ----------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True if there is work to do at once."""
        return bool(self._rows or self._look or (self._work.waiting and self._work.process is None))

    def patience(self) -> float:
        """Return the seconds that the loop may sleep before housekeeping needs a turn."""
        if self.is_busy:
            return 0.0
        times = [self._look_at, *self._retry.values()]
        return 0.2 if self._work.process is not None else max(0.0, min(times) - self._clock())

    def tend(self) -> None:
        """Do one bite of the pending work."""
        now = self._clock()
        if self._look is None and now >= self._look_at:
            self._look, self._look_at = self._look_over(), now + self.config.retention.interval_sec
        self._bite()
        until = time.monotonic() + BITE_SEC
        while self._rows and time.monotonic() < until:
            self._forget_rows(self._rows[0])
        for item, due in list(self._retry.items()):
            if now >= due:
                del self._retry[item]
                if item.startswith("rows:"):
                    self._rows.append(int(item.removeprefix("rows:")))
                else:
                    self._want(item)
        if self._work.process is not None:
            self._reap()
        if self._work.process is None and self._work.waiting:
            self._start()

    def _forget_rows(self, number: int) -> None:
        """Delete a bite of a pruned job's rows; its directory is removed after the last of them."""
        try:
            if not self._database.forget(number, max_rows=BITE_ROWS):
                return
        except sqlite3.Error as error:
            log.error("job %d: its rows in %s stay for now: %s", number, self._database.path, error)  # noqa: TRY400
            self._retry[f"rows:{number}"] = self._clock() + RETRY_SEC
        self._rows.pop(0)
        self._database.moved.add(number)  # the index no longer lists it
        if f"rows:{number}" not in self._retry and self._spool.is_pruned(number):
            self._want(f"job:{number}")

    def _bite(self) -> None:
        """Continue the current look for a moment."""
        until = time.monotonic() + BITE_SEC
        while self._look is not None and time.monotonic() < until:
            try:
                next(self._look)
            except StopIteration:
                self._look = None
            except BaseException:
                self._look = None  # begun anew at the next interval, not in the next turn
                raise

    def close(self) -> None:
        """Kill the child: the next start finds its unfinished work."""
        if self._work.process is not None:
            self._work.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._work.process.wait(1.0)
            self._work = _Work()

    # -- the child ---------------------------------------------------------------------------------------------------

    def _want(self, item: str) -> None:
        if item not in self._work.at_work:
            self._work.waiting[item] = None

    def _start(self) -> None:
        items = list(self._work.waiting)[:MAX_ITEMS]
        command = [sys.executable, "-P", "-m", "honed.job.removal", "--root", str(self._layout.root), *items]
        hidden = {*DAEMON_VARIABLES, *SECRET_VARIABLES}
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        try:
            self._work.said = tempfile.TemporaryFile()  # noqa: SIM115
            self._work.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._work.said, env=environment, start_new_session=True
            )
        except OSError as error:
            log.warning("nothing is removed: %s", error)
            self._retry |= dict.fromkeys(items, self._clock() + RETRY_SEC)
        else:
            self._work.at_work = items
        for item in items:
            del self._work.waiting[item]

    def _reap(self) -> None:
        process, file = self._work.process, self._work.said
        assert process is not None
        assert file is not None
        if process.poll() is None:
            return
        said = {}
        file.seek(0)
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = json.loads(line)
                said[data["item"]] = Done(data["num_bytes"], data["num_files"], data["problem"])
        file.close()
        items, self._work.at_work, self._work.process = self._work.at_work, [], None
        for item in items:
            self._settle(item, said.get(item, Done(problem=f"the removal ended with status {process.returncode}")))

    def _settle(self, item: str, done: Done) -> None:
        kind, _, number = item.partition(":")
        if kind in {"measure", "weigh"}:
            job = self._spool.job(int(number))
            if job is not None:
                known = self._sizes if kind == "measure" else self._weights
                known[job.id, job.revision] = done.num_bytes
            return
        earlier = self._done.get(item, Done())
        self._done[item] = Done(earlier.num_bytes + done.num_bytes, earlier.num_files + done.num_files, done.problem)
        what = "its directory" if kind == "job" else "its old checkpoints"
        if done.problem:
            log.error(
                "job %s: %s cannot be removed, and is tried again in %.0f min: %s; root can: rm -r %s",
                number,
                what,
                RETRY_SEC / 60,
                done.problem,
                self._layout.job(int(number)).dir,
                extra=about(int(number)),
            )
            self._retry[item] = self._clock() + RETRY_SEC
        elif done.num_files:
            log.info(
                "job %s: removed %s, %d files, %d bytes",
                number,
                what,
                done.num_files,
                done.num_bytes,
                extra=about(int(number)),
            )

    # -- what goes ---------------------------------------------------------------------------------------------------

    def prune(self, jobs: Sequence[Job], why: str) -> None:
        """Prune finished jobs, with everything that belongs to them alone."""
        self._spool.prune(*jobs)
        for job in jobs:
            self._rows.append(job.id)
            self._sizes.pop((job.id, job.revision), None)
            self._done.pop(f"job:{job.id}", None)
            log.info("job %d (%s): pruned: %s", job.id, job.name, why, extra=about(job))

    def drop_checkpoints(self, job: Job, why: str) -> Job:
        """Remove a finished job's checkpoints; its entry is marked first, so that nobody relies on them."""
        changed = job if job.are_checkpoints_pruned else self._spool.annotate(job, are_checkpoints_pruned=True)
        self.forget_checkpoints(changed.id)
        log.info("job %d (%s): its checkpoints are removed: %s", job.id, job.name, why, extra=about(job))
        return changed

    def forget_checkpoints(self, job_id: int) -> None:
        """Set a job's checkpoints aside at once; their disk space is freed soon."""
        self._done.pop(f"checkpoints:{job_id}", None)
        if removal.set_aside_checkpoints(self._layout, job_id):
            self._want(f"checkpoints:{job_id}")

    def free_checkpoints(self, job_id: int) -> None:
        """Free the disk space of checkpoints that were already set aside."""
        self._want(f"checkpoints:{job_id}")

    def _find_leftovers(self) -> Iterator[None]:
        """Find the work that an earlier daemon had begun, a piece at a time."""
        pruned = self._spool.pruned_ids()
        yield
        known = {path.name for path in self._layout.jobs_dir.iterdir()}
        self._rows += sorted(number for number in pruned if str(number) in known)
        yield
        entries = self._spool.ids()
        # A power cut may have undone the deletion of a job's rows, or honectl has pruned while honed was down.
        self._rows += sorted(self._database.job_ids() - entries - set(self._rows))
        yield
        for name in known:
            if name.isdecimal() and any((self._layout.jobs_dir / name).glob(removal.OLD_CHECKPOINTS)):
                self._want(f"checkpoints:{name}")
            yield
        gone = sorted(number for number in pruned if str(number) not in known)
        self._spool.forget_pruned(set(gone[:-MAX_REMEMBERED]))

    def _look_over(self) -> Iterator[None]:
        """Find and remove what exceeds the configured retention, a piece at a time."""
        config = self.config.retention
        if jump := self._calendar.look():
            log.warning("the clock was set by %.0f s: nothing is removed for its age this time", jump)
            return
        yield from self._refused(config)
        if _wants_jobs(config):
            jobs: list[Job] = []
            for state in State:
                for job in self._spool.jobs(state):
                    jobs.append(job)
                    yield
            yield from self._over_jobs(config, jobs)
        if config.max_event_age_days is not None or config.max_events is not None:
            yield from self._over_events(config)
        yield from self._find_leftovers()

    def _refused(self, config: RetentionConfig) -> Iterator[None]:
        limits = retention.refused_limits(config)
        files = [self._as_of_now(item) for item in retention.refused_files(self._spool)] if limits else []
        beyond = retention.excess(files, limits, now=self._now())
        yield
        num_removed = 0
        for item in beyond:
            num_removed += retention.remove_refused(self._spool, str(item.key))
            yield
        if num_removed:
            log.info("%s: removed %d refused files", self._spool.rejected_dir, num_removed)

    def _over_jobs(self, config: RetentionConfig, jobs: list[Job]) -> Iterator[None]:
        for job in jobs:
            if job.is_pinned or not job.state.is_final:
                self._needs.of(job)
                yield
        needed = retention.needed_of(self._needs, self._spool, jobs)
        free = [job for job in jobs if retention.why_kept(job, needed) is None]
        are_missing = config.max_job_bytes is not None and self._measure(free, self._sizes, "measure")
        saved = []
        for job in free:
            saved += [job] if os.path.lexists(self._layout.job(job.id).checkpoints_dir) else []
            yield
        if config.max_checkpoint_bytes is not None:
            are_missing = self._measure(saved, self._weights, "weigh") or are_missing
        if are_missing:  # the rest at the next look: their sizes are known by then
            self._look_at = self._clock() + min(config.interval_sec, 1.0)
        yield
        items, by_id = [], {job.id: job for job in free}
        for job in free:
            with contextlib.suppress(FileNotFoundError):
                size = self._sizes.get((job.id, job.revision), 0)
                items.append(self._as_of_now(Item(job.id, self._spool.changed_at(job), size)))
            yield
        beyond = {item.key for item in retention.excess(items, retention.job_limits(config), now=self._now())}
        for item in items:
            if item.key in beyond and self._may_still_go(by_id[int(item.key)]):
                self.prune([by_id[int(item.key)]], "retention")
                yield
        yield from self._over_checkpoints(config, saved, [item for item in items if item.key not in beyond])

    def _over_checkpoints(self, config: RetentionConfig, saved: list[Job], staying: list[Item]) -> Iterator[None]:
        by_id = {job.id: job for job in saved}
        items = []
        for item in staying:
            if (job := by_id.get(int(item.key))) is not None:
                items.append(replace(item, num_bytes=self._weights.get((job.id, job.revision), 0)))
        limits = retention.checkpoint_limits(config)
        beyond = {item.key for item in retention.excess(items, limits, now=self._now())}
        for item in items:
            job = by_id[int(item.key)]
            days = (
                config.max_checkpoint_age_days
                if job.state is State.SUCCEEDED
                else (config.max_failed_checkpoint_age_days)
            )
            is_old = days is not None and self._now() - item.changed_at > days * DAY_SEC
            if (is_old or item.key in beyond) and self._may_still_go(job):
                self.drop_checkpoints(job, "retention")
            yield

    def _as_of_now(self, item: Item) -> Item:
        return replace(item, changed_at=self._calendar.date(item.changed_at))

    def _may_still_go(self, job: Job) -> bool:
        """Return True if a job is unchanged since it was looked at, and no job needs it: turns have passed since."""
        if self._spool.job(job.id) != job:
            return False
        return not any(job.id in self._needs.of(other) for other in self._unfinished())

    def _over_events(self, config: RetentionConfig) -> Iterator[None]:
        finished = {job.id for state in retention.FINAL for job in self._spool.jobs(state) if not job.is_pinned}
        yield
        surplus = 0
        if config.max_events is not None:
            for first in range(1, self._database.last_event() + 1, BITE_ROWS):
                surplus += len(self._database.events_of(first, BITE_ROWS, finished))
                yield
            surplus = max(0, surplus - config.max_events)
        days = config.max_event_age_days
        before = "" if days is None else timestamp(self._now() - days * DAY_SEC)
        total = 0
        for first in range(1, self._database.last_event() + 1, BITE_ROWS):
            rows = self._database.events_of(first, BITE_ROWS, finished)
            beyond = [number for rank, (number, when) in enumerate(rows) if when < before or total + rank < surplus]
            self._database.forget_events(beyond)
            total += len(beyond)
            yield
        if total:
            log.info("honed.db: removed %d events", total)

    # -- what a person asks for --------------------------------------------------------------------------------------

    def answer(self, arguments: dict[str, Any], find: Callable[[str], Job], asker: Asker) -> dict[str, Any]:
        """Answer `honectl prune`: list what would be removed, or remove it with `dry_run: false`. `is_measured` in the
        answer tells whether all sizes are known; if not, ask again."""
        wish = Wish.of(arguments)
        is_dry = bool(arguments.get("dry_run", True))
        if wish.rejected:
            return prune_refused(self._spool, wish, asker, is_dry=is_dry, now=self._now())
        jobs = list(self._spool.all_jobs().values())
        mine = [job for job in jobs if job.state.is_final and (asker.is_administrator or job.uid == asker.uid)]
        known = self._weights if wish.checkpoints else self._sizes
        if wish.limits.max_bytes is not None:
            self._measure(mine, known, "weigh" if wish.checkpoints else "measure")
        sizes = {number: size for (number, _revision), size in known.items()}
        chosen = retention.choose(wish, jobs, find, self._needs, self._spool, asker, sizes)
        missing = self._measure(chosen.jobs, known, "weigh" if wish.checkpoints else "measure")
        if wish.limits.max_bytes is not None:
            missing = missing or any((job.id, job.revision) not in known for job in mine)
        if is_dry or (wish.limits.max_bytes is not None and missing):
            return report(chosen, {number: size for (number, _r), size in known.items()}, is_measured=not missing)
        why = f"user {asker.uid} asked for it"
        for job in chosen.jobs if wish.checkpoints else ():
            self.drop_checkpoints(job, why)
        if not wish.checkpoints:
            self.prune(chosen.jobs, why)
        return report(chosen, sizes, is_measured=not missing)

    def _measure(self, jobs: Iterable[Job], known: dict[tuple[int, int], int], kind: str) -> bool:
        """Queue the measurement of all unknown sizes. Returns True if any size is unknown."""
        missing = [job for job in jobs if (job.id, job.revision) not in known]
        for job in missing:
            self._want(f"{kind}:{job.id}")
        return bool(missing)

    def pruned(self, arguments: dict[str, Any], asker: Asker) -> dict[str, Any]:
        """Return the finished items of a requested removal: {number: {num_bytes, num_files, problem}}."""
        kind = "checkpoints" if arguments.get("checkpoints") else "job"
        try:
            numbers = [int(each) for each in arguments.get("ids") or ()]
        except (TypeError, ValueError) as error:
            raise UsageError(f"pruned: {error}") from error
        busy = {*self._work.waiting, *self._work.at_work}
        found = {}
        for number in numbers:
            item = f"{kind}:{number}"
            job = self._spool.pruned(number) or self._spool.job(number)
            if job is not None and not asker.may_read(job):
                continue
            if item not in busy and number not in self._rows:
                found[str(number)] = self._done.get(item, Done()).__dict__
        return found


def _wants_jobs(config: RetentionConfig) -> bool:
    ages = (config.max_checkpoint_age_days, config.max_failed_checkpoint_age_days)
    limits = retention.job_limits(config) or retention.checkpoint_limits(config)
    return bool(limits) or any(age is not None for age in ages)


def report(chosen: Choice, sizes: dict[int, int], *, is_measured: bool) -> dict[str, Any]:
    """Return the jobs that go and the jobs that stay, in the format of `prune --json`."""

    def row(job: Job) -> dict[str, Any]:
        return {"id": job.id, "name": job.name, "state": job.state.value, "num_bytes": sizes.get(job.id)}

    return {
        "jobs": [row(job) for job in chosen.jobs],
        "kept": [{**row(job), "why": why} for job, why in chosen.kept],
        "is_measured": is_measured,
    }


def prune_refused(spool: Spool, wish: Wish, asker: Asker, *, is_dry: bool, now: float) -> dict[str, Any]:
    """Remove refused files beyond the limits, or list them if `is_dry`: the asker's, or all for an administrator."""
    if not wish.limits:
        raise UsageError("prune what?", hint="--rejected takes --older-than, --keep or --max-size; --keep 0 is all")
    mine = retention.refused_files(spool, uid=None if asker.is_administrator else asker.uid)
    beyond = retention.excess(mine, wish.limits, now=now)
    if not is_dry:
        beyond = [item for item in beyond if retention.remove_refused(spool, str(item.key))]
        if beyond:
            log.info("%s: removed %d refused files: user %d asked for it", spool.rejected_dir, len(beyond), asker.uid)
    files = [{"file": item.key, "num_bytes": item.num_bytes} for item in beyond]
    return {"rejected": files, "is_measured": True}
