"""The daemon's end of housekeeping: it chooses in small bites what to remove, and a child removes it (removal.py).

    a finished job ── its entry renamed to pruned/: the commit ──► its rows ──► the child: its copies, directory
    checkpoints ── the entry says so ── renamed to .checkpoints.<n>.old ──► the child

    honectl ──► Housekeeper ─┬─► Pruning ──► RemovalProcess: the child
    [retention] ──► Sweep ───┘

After a crash in between, the next start finds the unfinished work: a directory whose entry lies in pruned/, rows
without an entry, checkpoints under their old name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from honed.daemon.verb import verb
from honed.job import removal, retention
from honed.job.brief import Listed
from honed.job.damaged import passed_over
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.query import Asker
from honed.job.retention import DAY_SEC, Item, Needs, Wish
from honed.job.row_cache import RowCache
from honed.job.shape import PruneAnswer, Removed
from honed.job.spool import Spool
from honed.run.removal_process import LEFT, OLD_ROWS, RETRY_SEC, RemovalProcess
from honed.spec.config import Config, RetentionConfig
from honed.system import untrusted
from honed.system.clock import Calendar
from honed.system.control import Parts, Request
from honed.system.error import UsageError
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.part import Part

log = logging.getLogger(__name__)

#: Seconds for which the sum of a user's bytes holds.
SUM_AGE_SEC = 5.0
#: Seconds between looks at all jobs; and until the next one if sizes were not known.
INTERVAL_SEC, REMEASURE_SEC = 3600.0, 1.0
#: Seconds of one turn of the loop that may be spent on choosing what to remove.
BITE_SEC = 0.02
#: Rows removed from a table in one turn.
BITE_ROWS = 2000
#: Last entries of pruned jobs that are kept, to answer questions about them.
MAX_REMEMBERED = 10_000


class Pruning:
    """Takes finished jobs and their checkpoints away: entries first, then rows, then files."""

    def __init__(self, spool: Spool, database: Database, removals: RemovalProcess, row_cache: RowCache) -> None:
        self._spool = spool
        self._row_cache = row_cache
        self._layout = spool.layout
        self._database = database
        self._removals = removals
        self._rows: list[int] = []  # pruned jobs whose rows still exist
        self._retry: dict[int, float] = {}  # those whose rows could not be removed, and when that is tried again
        self._half_pruned: list[Listed] = []  # those whose renames may not be durable
        self._half_due = math.inf

    @property
    def is_busy(self) -> bool:
        """True if rows are to be removed."""
        return bool(self._rows)

    @property
    def due_at(self) -> float:
        """The time of the next retry."""
        return min(*self._retry.values(), self._half_due, math.inf)

    def prune(self, jobs: Sequence[Listed], why: str) -> None:
        """Prune finished jobs, with everything that belongs to them alone. Raises OSError if one could not be."""
        try:
            self._spool.prune(*jobs)
        except OSError as error:
            done = [job for job in jobs if self._spool.listed(job.id) is None]  # the disk may fail again
            self._half_pruned += done
            self._half_due = 0.0  # in the next turn
            self._forget(done, why)
            if len(done) < len(jobs):
                raise
            log.warning("%s: pruned jobs are removed later: %s", self._spool.pruned.dir, error)
        else:
            self._rows += [job.id for job in jobs]
            self._forget(jobs, why)

    def _forget(self, jobs: Sequence[Listed], why: str) -> None:
        for job in jobs:
            self._removals.sizes.forget(job)
            self._removals.forget(f"job:{job.id}")
            log.info("job %d (%s): pruned: %s", job.id, job.name, why, extra=about(job))
        self._row_cache.forget(job.id for job in jobs)

    def drop_checkpoints(self, listed: Listed, why: str) -> None:
        """Remove a finished job's checkpoints; its entry is marked first, so that nobody relies on them."""
        job = None
        with passed_over(self._spool.entries.path(listed.id, listed.state)):
            job = self._spool.job(listed.id)
        if job is None:
            return  # its entry cannot be read: others' checkpoints go all the same
        if not job.are_checkpoints_pruned:
            self._spool.annotate(job, are_checkpoints_pruned=True)
        item = f"checkpoints:{job.id}"
        self._removals.forget(item)
        if removal.set_aside_checkpoints(self._layout, job.id):
            self._removals.want(item)
        log.info("job %d (%s): removing its checkpoints: %s", job.id, job.name, why, extra=about(job))

    def has_rows(self, number: int) -> bool:
        """Return True if a pruned job's rows still exist."""
        return number in self._rows or any(job.id == number for job in self._half_pruned)

    def find_leftovers(self) -> Iterator[None]:
        """Find the work that an earlier daemon had begun, a piece at a time."""
        half = {job.id for job in self._half_pruned}  # a power cut may bring their entries back
        pruned = self._spool.pruned.ids() - half
        if self._layout.left_path.exists():
            self._removals.want(LEFT)
        yield
        known = {path.name for path in self._layout.jobs_dir.iterdir()}
        self._rows += sorted(number for number in pruned if str(number) in known)
        yield
        entries = self._spool.entries.ids() | self._spool.corrupt.numbers() | half
        # A power cut may have undone the deletion of a job's rows, or honectl has pruned while honed was down.
        self._rows += sorted(self._database.job_ids() - entries - set(self._rows))
        yield
        self._row_cache.forget_all_but(entries)
        self._row_cache.trim()
        yield
        for name in known:
            if name.isdecimal() and removal.may_have_set_aside(self._layout, int(name)):
                self._removals.want(f"checkpoints:{name}")
            yield
        gone = sorted(number for number in pruned if str(number) not in known)
        self._spool.pruned.forget(set(gone[:-MAX_REMEMBERED]))
        yield
        yield from self._spool.pruned.read_names()
        yield from self._spool.catalog.shorten()
        yield from self._spool.entries.ended_index.tend(self._spool.catalog.ended())

    def tend(self, now: float) -> None:
        """Delete a bite of the pruned jobs' rows."""
        if now >= self._half_due:
            self._finish_pruning(now)
        until = time.monotonic() + BITE_SEC
        while self._rows and time.monotonic() < until:
            self._forget_rows(self._rows[0], now)
        for number, due in list(self._retry.items()):
            if now >= due:
                del self._retry[number]
                self._rows.append(number)

    def _finish_pruning(self, now: float) -> None:
        try:
            self._spool.finish_prune(*self._half_pruned)
        except OSError:
            self._half_due = now + RETRY_SEC
            return
        self._rows += [job.id for job in self._half_pruned]
        self._half_pruned, self._half_due = [], math.inf

    def _forget_rows(self, number: int, now: float) -> None:
        """Delete a bite of a pruned job's rows; its directory is removed after the last of them."""
        try:
            if not self._database.forget(number, max_rows=BITE_ROWS):
                return
        except sqlite3.Error as error:
            log.error("job %d: its rows in %s were not removed: %s", number, self._database.path, error)  # noqa: TRY400
            self._retry[number] = now + RETRY_SEC
        is_pruned = self._spool.pruned.has(number)  # an error leaves the job to the next turn
        self._rows.pop(0)
        self._database.moved.add(number)  # the index no longer lists it
        if number not in self._retry and is_pruned:
            self._removals.want(f"job:{number}")


class Sweep:
    """Applies the retention limits at intervals: a look at all jobs, in bites, which removes what exceeds them.

    `clock` is monotonic seconds, `now` seconds since the epoch.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        spool: Spool,
        database: Database,
        pruning: Pruning,
        removals: RemovalProcess,
        needs: Needs,
        unfinished: Callable[[], Iterable[Job]],
        *,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._spool = spool
        self._database = database
        self._pruning = pruning
        self._removals = removals
        self._needs = needs
        self._unfinished = unfinished
        self._clock = clock
        self._now = now
        self._calendar = Calendar(clock=clock, now=now)
        self._look: Iterator[None] | None = pruning.find_leftovers()
        self.due_at = clock() + INTERVAL_SEC  #: the time of the next look

    @property
    def is_busy(self) -> bool:
        """True during a look."""
        return self._look is not None

    def restart(self, now: float) -> None:
        """End the current look, which goes by limits that no longer hold; the next one is due now."""
        self._look, self.due_at = None, now

    def tend(self, now: float) -> None:
        """Continue the current look for a moment, or begin the next one."""
        if self._look is None and now >= self.due_at:
            self._look, self.due_at = self._look_over(), now + INTERVAL_SEC
        until = time.monotonic() + BITE_SEC
        while self._look is not None and time.monotonic() < until:
            try:
                next(self._look)
            except StopIteration:
                self._look = None
            except BaseException:
                self._look = None  # it starts again at the next interval, not in the next turn
                raise

    def _look_over(self) -> Iterator[None]:
        """Find and remove what exceeds the configured retention, a piece at a time."""
        config = self._config().retention
        if jump := self._calendar.look():
            log.warning("the system clock was set by %.0f s: nothing is removed for its age this time", jump)
            return
        yield from self._refused(config)
        ages = (config.max_checkpoint_age_days, config.max_failed_checkpoint_age_days)
        limits = retention.job_limits(config) or retention.checkpoint_limits(config)
        if limits or any(age is not None for age in ages):
            yield from self._over_jobs(config, list(self._spool.catalog))
        yield from self._pruning.find_leftovers()

    def _refused(self, config: RetentionConfig) -> Iterator[None]:
        limits = retention.refused_limits(config)
        reasons: list[Item] = []
        files: list[Item] = []
        yield from retention.look_at_refused(self._spool, reasons, files)
        num_removed = 0  # files and their reasons are of one number
        for items in (reasons, files):
            beyond = retention.excess(map(self._as_of_now, items), limits, now=self._now())
            yield
            num = 0
            for item in beyond:
                num += retention.remove_refused(self._spool, str(item.key))
                yield
            num_removed = max(num_removed, num)
        if num_removed:
            log.info("%s: removed %d refused files", self._spool.rejected_dir, num_removed)

    def _over_jobs(self, config: RetentionConfig, jobs: list[Listed]) -> Iterator[None]:
        removals = self._removals
        for job in jobs:
            if job.is_pinned or not job.state.is_final:
                self._needs.of(job)
                yield
        needed = retention.needed_of(self._needs, self._spool, jobs)
        free = [job for job in jobs if retention.why_kept(job, needed) is None]
        are_missing = config.max_job_bytes is not None and removals.measure(free, removals.sizes)
        saved = []
        for job in free:
            saved += [job] if untrusted.exists(self._spool.files(job.id).checkpoints_dir) else []
            yield
        if config.max_checkpoint_bytes is not None:
            are_missing = removals.measure(saved, removals.weights) or are_missing
        if are_missing:  # the rest at the next look: their sizes are known by then
            self.due_at = self._clock() + REMEASURE_SEC
        yield
        items, by_id = [], {job.id: job for job in free}
        for job in free:
            with contextlib.suppress(FileNotFoundError):
                size = removals.sizes.of(job) or 0
                items.append(self._as_of_now(Item(job.id, self._spool.changed_at(job), size)))
            yield
        beyond = {item.key for item in retention.excess(items, retention.job_limits(config), now=self._now())}
        for item in items:
            if item.key in beyond and self._may_still_go(by_id[int(item.key)]):
                self._pruning.prune([by_id[int(item.key)]], "retention")
                yield
        yield from self._over_checkpoints(config, saved, [item for item in items if item.key not in beyond])

    def _over_checkpoints(self, config: RetentionConfig, saved: list[Listed], staying: list[Item]) -> Iterator[None]:
        by_id = {job.id: job for job in saved}
        items = []
        for item in staying:
            if (job := by_id.get(int(item.key))) is not None:
                items.append(replace(item, num_bytes=self._removals.weights.of(job) or 0))
        limits = retention.checkpoint_limits(config)
        beyond = {item.key for item in retention.excess(items, limits, now=self._now())}
        for item in items:
            job = by_id[int(item.key)]
            has_succeeded = job.state is State.SUCCEEDED
            days = config.max_checkpoint_age_days if has_succeeded else config.max_failed_checkpoint_age_days
            is_old = days is not None and self._now() - item.changed_at > days * DAY_SEC
            if (is_old or item.key in beyond) and self._may_still_go(job):
                self._pruning.drop_checkpoints(job, "retention")
            yield

    def _as_of_now(self, item: Item) -> Item:
        return replace(item, changed_at=self._calendar.date(item.changed_at))

    def _may_still_go(self, job: Listed) -> bool:
        """Return True if a job is unchanged since it was looked at, and no job needs it: turns have passed since."""
        if self._spool.listed(job.id) != job:
            return False
        return not any(job.id in self._needs.of(other) for other in self._unfinished())


class Housekeeper:
    """Prunes for the retention limits and for people who ask.

    `unfinished` returns the jobs that are not over; `clock` is monotonic seconds, `now` seconds since the epoch.
    """

    def __init__(
        self,
        layout: Layout,
        config: Config,
        spool: Spool,
        database: Database,
        unfinished: Callable[[], Iterable[Job]],
        rows: RowCache | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._row_cache = rows or RowCache(layout, lambda: self._config.retention.max_row_bytes)
        self._spool = spool
        self._clock = clock
        self._now = now
        self._sums: dict[int, tuple[float, int]] = {}  # uid → when it was summed up, and the bytes
        self._needs = Needs(spool, layout)
        self._removals = RemovalProcess(spool, clock=clock)
        self._pruning = Pruning(spool, database, self._removals, self._row_cache)
        self._sweep = Sweep(
            lambda: self._config,
            spool,
            database,
            self._pruning,
            self._removals,
            self._needs,
            unfinished,
            clock=clock,
            now=now,
        )

    # -- the loop ----------------------------------------------------------------------------------------------------

    def patience(self) -> float:
        """Return the seconds that the loop may sleep before housekeeping needs a turn."""
        if self._sweep.is_busy or self._pruning.is_busy or self._removals.is_busy:
            return 0.0
        if self._removals.is_running:
            return 0.2
        return max(0.0, min(self._sweep.due_at, self._pruning.due_at, self._removals.due_at) - self._clock())

    def tend(self) -> None:
        """Do one bite of the pending work."""
        now = self._clock()
        self._sweep.tend(now)
        self._pruning.tend(now)
        if self._row_cache.has_old and not self._removals.is_pending(OLD_ROWS):
            self._row_cache.has_old = False
            self._removals.want(OLD_ROWS)
        self._removals.tend(now)

    def reload(self, config: Config) -> None:
        """Apply a new configuration, with a look at all jobs now."""
        self._config = config
        self._sweep.restart(self._clock())

    def close(self) -> None:
        """Kill the child: the next start finds its unfinished work."""
        self._removals.close()

    # -- what a person asks for --------------------------------------------------------------------------------------

    @verb("prune")  # of the asker's own jobs; administrators of all
    def prune(self, request: Request, asker: Asker) -> PruneAnswer | Parts:
        """Answer `honectl prune`: list what would be removed, or remove it with `dry_run: false`. `is_measured` in the
        answer tells whether all sizes are known; if not, ask again."""
        wish = Wish.of(request.arguments)
        is_dry = bool(request.arguments.get("dry_run", True))
        if wish.rejected:
            return Parts(retention.prune_refused(self._spool, wish, asker, is_dry=is_dry, now=self._now()))
        if wish.rows:
            return retention.prune_rows(self._row_cache, wish, asker, is_dry=is_dry, now=self._now())
        return Parts(self._prune_jobs(wish, retention.asked(wish, self._spool, asker), asker, is_dry=is_dry))

    def _prune_jobs(self, wish: Wish, named: Sequence[int], asker: Asker, *, is_dry: bool) -> Iterator[Part]:
        """Prune jobs or their checkpoints, all in one turn, once it is known what the others need: that takes turns."""
        for job in self._spool.catalog:
            if job.is_pinned or not job.state.is_final:
                self._needs.of(job)
                yield None
        jobs = list(self._spool.all_jobs().values())
        mine = [job for job in jobs if job.state.is_final and (asker.is_administrator or job.uid == asker.uid)]
        known = self._removals.weights if wish.checkpoints else self._removals.sizes
        is_by_size = wish.limits.max_bytes is not None
        are_missing = is_by_size and self._removals.measure(mine, known)
        sizes = known.by_number()
        chosen = retention.choose(wish, named, jobs, self._needs, self._spool, asker, sizes)
        are_missing = self._removals.measure(chosen.jobs, known) or are_missing
        if not (is_dry or (is_by_size and are_missing)):
            why = f"requested by user {asker.uid}"
            for job in chosen.jobs if wish.checkpoints else ():
                self._pruning.drop_checkpoints(job, why)
            if not wish.checkpoints:
                self._pruning.prune(chosen.jobs, why)
        yield {**retention.report(chosen, sizes, is_measured=not are_missing)}

    @verb("pruned")
    def pruned(self, request: Request, asker: Asker) -> dict[str, Removed]:
        """Return the finished items of a requested removal, by number."""
        kind = "checkpoints" if request.arguments.get("checkpoints") else "job"
        try:
            numbers = [int(one) for one in request.arguments.get("ids") or ()]
            if len(numbers) > retention.MAX_ASKED:  # each is looked for on the disk
                raise ValueError(f"at most {retention.MAX_ASKED} numbers at a time")
        except (TypeError, ValueError) as error:
            raise UsageError(f"pruned: {error}") from error
        removed: dict[str, Removed] = {}
        for number in numbers:
            item = f"{kind}:{number}"
            job = self._spool.pruned.get(number) or self._spool.listed(number)
            if job is not None and not asker.may_read(job):
                continue
            if not self._removals.is_pending(item) and not self._pruning.has_rows(number):
                removed[str(number)] = self._removals.done(item).as_dict()
        return removed

    def num_bytes(self, uid: int) -> int:
        """Return the bytes of a user's cached rows, and of the directories of the user's jobs that do not run, as far
        as they are measured; the others are measured now. The sum is kept for SUM_AGE_SEC."""
        now = self._clock()
        if uid not in self._sums or now - self._sums[uid][0] >= SUM_AGE_SEC:
            jobs = [job for job in self._spool.catalog if job.uid == uid and job.state is not State.RUNNING]
            sizes = self._removals.sizes
            self._removals.measure(jobs, sizes)
            total = self._row_cache.num_bytes(uid) + sum(sizes.of(job) or 0 for job in jobs)
            if any(sizes.of(job) is None for job in jobs):
                return total  # not all are measured yet
            self._sums[uid] = (now, total)
        return self._sums[uid][1]

    def listen(self, listener: Callable[[str, int], None]) -> None:
        """Register a callback for every removal: it gets the kind, `job` or `checkpoints`, and the bytes."""
        self._removals.listeners.append(listener)

    def remove_copies(self, job: Job) -> None:
        """Remove the copies that `submit --stage` made for a job that has succeeded."""
        self._removals.want(f"copies:{job.id}")

    def free_checkpoints(self, job_id: int) -> None:
        """Free the disk space of checkpoints that were already set aside."""
        self._removals.want(f"checkpoints:{job_id}")
