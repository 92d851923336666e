"""Rebuild honed.db from its sources: the entries, and the events that the workers have reported.

The rows come out as they were: events in their original order, each with its worker's time.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

from honed.job import event
from honed.job.brief import Listed
from honed.job.damaged import is_of_item
from honed.job.database import Database
from honed.job.event import Event, Reading
from honed.job.job import Job, State
from honed.job.spool import Spool, names_in
from honed.send.outbox import Outbox
from honed.system import durable
from honed.system.failures import Failures
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Bytes of one attempt's events that are counted at all: a file can be endless.
MAX_EVENT_BYTES = 512 * 2**20
#: Seconds of a turn in which the loop updates the database after a failed write, or makes rows again.
BITE_SEC = 0.1
#: Jobs whose rows are all made again before honed is ready, if that takes no more seconds.
MAX_AT_START, START_SEC = 1000, 0.5


def rebuild(
    database: Database,
    spool: Spool,
    layout: Layout,
    *,
    outbox: Outbox | None = None,
    followed: Mapping[int, int] | None = None,
    alive: Callable[[], None] = lambda: None,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Make every row again: in one transaction what the entries say and the events of running jobs, then the events of
    all others, which are left to `fill` once `is_late`. `alive` is called on the way.

    `followed`: the offset up to which the events of every running job were read; their rows are made up to there, and
    the loop continues from it. Without it nobody has followed them, and running jobs' events go to the outbox, too.
    """
    with database.made_again():
        jobs = spool.all_jobs()
        _put(database, layout, jobs.values())
        for job in jobs.values():
            alive()
            if isinstance(job, Job) and job.state is State.RUNNING:
                _make(database, layout, job, outbox, followed, alive)
    fill(database, spool, layout, alive=alive, is_late=is_late)


def _put(database: Database, layout: Layout, jobs: Collection[Listed]) -> None:
    """Write what the entries of jobs without rows say; what else there is of them is pending, but for running jobs."""
    kept = frozenset(names_in(layout.jobs_dir))
    database.pending.add(
        job.id
        for job in jobs
        if job.state is not State.RUNNING and (job.has_own_events or (job.has_started and str(job.id) in kept))
    )
    database.put_jobs(jobs)


def _make(
    database: Database,
    layout: Layout,
    job: Job,
    outbox: Outbox | None,
    followed: Mapping[int, int] | None,
    alive: Callable[[], None],
) -> None:
    """Make the rows of a running job's events; see `rebuild`."""
    if job.edited_at:
        database.put_edits(job)
    for index, attempt in enumerate(job.attempts):
        then = replace(job, attempts=job.attempts[: index + 1])
        is_running = attempt == job.attempt
        end = followed.get(job.id) if followed is not None and is_running else None
        try:
            for reading in _with_fallback(then, _readings(then, layout, end)):
                alive()
                if outbox is not None and is_running and followed is None:
                    outbox.lose(outbox.put(then, reading))  # rows that were already sent keep their old keys
                database.apply(then, reading)
                database.thin(then)
        except Exception as error:  # a damaged disk, for one: the other jobs' rows are made all the same
            if isinstance(error, sqlite3.Error):
                raise
            _log_unread(job, error)


def _log_unread(job: Job, error: Exception) -> None:
    trace = None if isinstance(error, OSError) else error
    log.error("job %d (%s): its events were not read whole: %s", job.id, job.name, error, exc_info=trace)


def fill(
    database: Database,
    spool: Spool,
    layout: Layout,
    *,
    failures: Failures | None = None,
    alive: Callable[[], None] = lambda: None,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Make the rows of pending jobs again, the newest job's first, until `is_late`. What an error or a crash leaves out
    is made by the next call: no event is counted twice. `is_catching_up` becomes True if more can be made at once. An
    error of one job holds up no other.
    """
    failures, made = failures or Failures(log), list[int]()
    for number in database.pending.newest_first():
        alive()
        is_made: bool | None = None  # for an error
        with failures.alone(f"the rows of job {number}"):
            job = spool.job(number)
            is_made = job is None or _is_filled(database, layout, job, is_late)
        if is_made:
            made.append(number)
        elif is_made is None and not database.is_writable:
            break  # every try waits for a lock, or for a full disk
        if is_late():
            database.is_catching_up = len(made) < len(database.pending)
            break
    if made:
        with failures.alone("the jobs whose rows are made again"):
            database.pending.drop(made)
            database.moved.update(made)
            if not database.pending:
                log.info("%s: the rows of all jobs are made again", database.path)


def _is_filled(database: Database, layout: Layout, job: Job, is_late: Callable[[], bool]) -> bool:
    """Make a pending job's rows again; False if some are left. A running job's latest attempt is followed elsewhere.
    Raises an exception for a fault of the machine."""
    if job.edited_at:
        database.put_edits(job)
    try:
        return count(database, layout, job, len(job.attempts) - (job.state is State.RUNNING), is_late=is_late)
    except Exception as error:
        if isinstance(error, sqlite3.Error) or not is_of_item(error):
            raise
        _log_unread(job, error)
        return True


def begin(
    database: Database, spool: Spool, *, outbox: Outbox | None, failures: Failures, alive: Callable[[], None]
) -> None:
    """Rebuild or update the database at the start of honed; what an error prevents is done in the loop, and so is what
    takes long."""
    until = time.monotonic() + START_SEC

    def is_late() -> bool:
        return time.monotonic() >= until

    with failures.alone("the database"):
        database.is_behind = True
        if database.is_new:
            rebuild(database, spool, spool.layout, outbox=outbox, alive=alive, is_late=lambda: True)
        known = database.job_ids()
        _put(database, spool.layout, [job for job in spool.all() if job.id not in known])
        catch_up(database, spool, spool.layout, failures=failures, is_late=is_late)
        if len(database.pending) <= MAX_AT_START:
            fill(database, spool, spool.layout, failures=failures, alive=alive, is_late=is_late)
        if database.pending:
            database.is_catching_up = True
            log.info("%s: rows of %d jobs are made again while honed runs", database.path, len(database.pending))


def catch_up(
    database: Database,
    spool: Spool,
    layout: Layout,
    *,
    failures: Failures | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Update the rows of jobs whose state in the database is outdated, after a crash, a full disk or a power cut came
    between their entries and their rows. The events of running jobs are followed elsewhere.

    It ends early once `is_late`. Afterwards `is_behind` is True if something is left to be done, and `is_catching_up`
    if that can be done at once. An error of one job holds up no other.
    """
    failures = failures or Failures(log)
    database.is_behind, database.is_catching_up = True, False
    are_done = True
    states = database.states()
    for item in sorted((job for job in spool.all() if states.get(job.id) != job.state), key=attrgetter("id")):
        is_done = False
        with failures.alone(f"job {item.id} ({item.name})"):
            if (job := spool.job(item.id)) is None:
                continue
            num_ended = len(job.attempts) if job.state is not State.RUNNING else 0
            if not count(database, layout, job, num_ended, is_late=is_late):
                database.uncounted.add(job.id)  # until it is done: nobody writes that its row is up to date
                database.is_catching_up = True
                return
            is_done = database.put_job(job)
        are_done = are_done and is_done
        if not (is_done or database.is_writable):
            return  # every try waits for a lock, or for a full disk
    database.is_behind = not are_done


def tend(
    database: Database,
    spool: Spool,
    followed: Callable[[], Mapping[int, int]],
    *,
    failures: Failures | None = None,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Rebuild the database if somebody has removed it, or a disk has damaged it; update it after a failed write; a bite
    at a time. Its log is kept short. `alive`: as in `rebuild`."""
    until = time.monotonic() + BITE_SEC
    database.is_catching_up = False

    def is_late() -> bool:
        return time.monotonic() >= until

    if database.is_lost:
        if database.wal.is_copying:
            return  # in a later turn
        database.renew()
    database.wal.tend()
    if database.is_new:
        rebuild(database, spool, spool.layout, followed=followed(), alive=alive, is_late=is_late)
    if database.is_behind:
        catch_up(database, spool, spool.layout, failures=failures, is_late=is_late)
    if not is_late():
        fill(database, spool, spool.layout, failures=failures, alive=alive, is_late=is_late)
    elif database.pending:
        database.is_catching_up = True


def count(
    database: Database,
    layout: Layout,
    job: Job,
    num_attempts: int,
    *,
    is_late: Callable[[], bool] = lambda: False,
) -> bool:
    """Apply the events of a job's first `num_attempts` attempts that are not in the database yet. Returns False if some
    are left, once `is_late`."""
    for index in range(num_attempts):
        then = replace(job, attempts=job.attempts[: index + 1])
        offset = database.offset(then.id, then.attempt.number)
        readings = _readings(then, layout, None, start=offset)
        fallback = fallback_event(then)
        if fallback is not None and not database.has_event(then, fallback.kind):
            if offset:
                database.apply(then, Reading([fallback], offset, 0))
            else:
                readings = _with_fallback(then, readings)
        for reading in readings:
            database.apply(then, reading)
            database.thin(then)
            if is_late():
                return False
    database.uncounted.discard(job.id)
    return True


def fallback_event(job: Job) -> Event | None:
    """Return the event of a fallback in the latest attempt: the daemon's own event, so it is kept in the entry."""
    fallback = job.attempt.fallback
    if fallback is None:
        return None
    data = {"from": "unsloth", "to": job.attempt.backend, "reason": fallback.reason}
    return Event("fallback", fallback.time, data)


def _readings(job: Job, layout: Layout, end: int | None, *, start: int = 0) -> Iterator[Reading]:
    """Yield all events of a job's latest attempt from `start` on, or all before `end`."""
    path, offset = layout.files(job.id).attempt(job.attempt.number).events_path, start
    limit = MAX_EVENT_BYTES if end is None else end
    while offset < limit:
        try:
            reading = event.read(path, offset, end=end, num_bytes=event.BITE_BYTES)
        except OSError as error:
            if durable.machine_fault(error) and error.errno not in durable.OWNERS_ERRNOS:
                raise
            # The worker left something that is no file, or that we may not read.
            log.warning(
                "job %d (%s): the events of attempt %d cannot be read: %s", job.id, job.name, job.attempt.number, error
            )
            return
        if reading.offset == offset:
            return
        yield reading
        offset = reading.offset
        if reading.is_last:  # of thousands of short files, every one is opened once
            return


def _with_fallback(job: Job, readings: Iterator[Reading]) -> Iterator[Reading]:
    """Yield the same readings, with the fallback event inserted between the attempt's two workers."""
    fallback, num_started, offset = fallback_event(job), 0, 0
    for reading in readings:
        events: list[Event] = []
        for item in reading.events:
            num_started += item.kind == "started"
            if fallback is not None and num_started > 1:
                events.append(fallback)
                fallback = None
            events.append(item)
        yield replace(reading, events=events)
        offset = reading.offset
    if fallback is not None:
        yield Reading([fallback], offset, 0)
