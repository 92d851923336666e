"""honed.db made again from what it is derived from: the entries, and what the workers have told.

The rows come out as they were: events in the order in which they were told, each with its worker's time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from honed.job import event
from honed.job.database import Database
from honed.job.event import Event, Reading
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.send.outbox import Outbox
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Bytes of one attempt's events that are counted at all: a file can be without end.
MAX_EVENT_BYTES = 512 * 2**20


def rebuild(
    database: Database,
    spool: Spool,
    layout: Layout,
    *,
    outbox: Outbox | None = None,
    followed: Mapping[int, int] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Make every row again, in one transaction. `alive` is called on the way: thousands of trained jobs take minutes.

    `followed`: up to where the events of running jobs were read; where the loop goes on, so do their rows. Without it
    nobody has followed them, and what their workers have told meanwhile goes to the outbox, too.
    """
    with database.made_again():
        for job in spool.all_jobs().values():
            alive()
            database.put_job(job)
            for index, attempt in enumerate(job.attempts):
                then = replace(job, attempts=job.attempts[: index + 1])
                is_running = job.state is State.RUNNING and attempt == job.attempt
                end = followed.get(job.id) if followed is not None and is_running else None
                for reading in _with_fallback(then, _readings(then, layout, end)):
                    if outbox is not None and is_running and followed is None:
                        outbox.lose(outbox.put(then, reading))  # what was sent before goes under its old keys
                    database.apply(then, reading)


def catch_up(database: Database, spool: Spool, layout: Layout) -> None:
    """Bring the rows of those jobs up to date whose state is not what the database says: a crash, a full disk or a
    power cut came between their entries and their rows. What running jobs tell is followed elsewhere."""
    for job in spool.not_in(database.states()):
        count(database, layout, job, len(job.attempts) if job.state is not State.RUNNING else 0)
        database.put_job(job)


def count(database: Database, layout: Layout, job: Job, num_attempts: int) -> None:
    """Count what the workers of a job's first so many attempts have told and nobody has counted yet."""
    for index in range(num_attempts):
        then = replace(job, attempts=job.attempts[: index + 1])
        told = fallback_event(then)
        if told is not None and not database.has_event(then, told.kind):
            database.apply(then, Reading([told], database.offset(then.id, then.attempt.number), 0))
        for reading in _readings(then, layout, None, start=database.offset(then.id, then.attempt.number)):
            database.apply(then, reading)


def fallback_event(job: Job) -> Event | None:
    """What is told of a fallback in the latest attempt: the daemon's own word, so it is kept in the entry."""
    fallback = job.attempt.fallback
    if fallback is None:
        return None
    data = {"from": "unsloth", "to": job.attempt.backend, "reason": fallback.reason}
    return Event("fallback", fallback.time, data)


def _readings(job: Job, layout: Layout, end: int | None, *, start: int = 0) -> Iterator[Reading]:
    """All that the worker of a job's latest attempt has told from `start` on, or all before `end`."""
    path, offset = layout.job(job.id).attempt(job.attempt.number).events_path, start
    limit = MAX_EVENT_BYTES if end is None else end
    while offset < limit:
        try:
            reading = event.read(path, offset, end=end)
        except OSError as error:  # what its worker left there is no file, or not ours to read
            log.warning(
                "job %d (%s): the events of attempt %d cannot be read: %s", job.id, job.name, job.attempt.number, error
            )
            return
        if reading.offset == offset:
            return
        yield reading
        offset = reading.offset


def _with_fallback(job: Job, readings: Iterator[Reading]) -> Iterator[Reading]:
    """The same, the fallback told between the two workers of the attempt."""
    told, num_started, offset = fallback_event(job), 0, 0
    for reading in readings:
        events: list[Event] = []
        for item in reading.events:
            num_started += item.kind == "started"
            if told is not None and num_started > 1:
                events.append(told)
                told = None
            events.append(item)
        yield replace(reading, events=events)
        offset = reading.offset
    if told is not None:
        yield Reading([told], offset, 0)
