"""The database made again, where it is new: from the entries and the workers' own event files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from honed import event
from honed.attempts import MAX_REST_BYTES
from honed.database import Database
from honed.job import Job, State
from honed.layout import Layout
from honed.outbox import Outbox
from honed.spool import Spool

log = logging.getLogger(__name__)


def rebuild(
    database: Database,
    spool: Spool,
    layout: Layout,
    outbox: Outbox | None,
    *,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Every job, and all that its workers told; of a running one the outbox gets what nobody has heard."""
    jobs = spool.all_jobs()
    database.put_jobs(jobs.values())
    for job in jobs.values():
        alive()  # thousands of jobs that have trained take minutes
        for index, attempt in enumerate(job.attempts):
            then = replace(job, attempts=job.attempts[: index + 1])
            for reading in _readings(layout, then):
                if outbox is not None and job.state is State.RUNNING and attempt == job.attempt:
                    # It may have told more while there was nobody to hear; what was sent goes under its old keys.
                    outbox.lose(outbox.put(then, reading))
                database.apply(then, reading)


def _readings(layout: Layout, job: Job) -> Iterator[event.Reading]:
    """All that the worker of a job's latest attempt has told."""
    path, offset = layout.job(job.id).attempt(job.attempt.number).events_path, 0
    while offset < MAX_REST_BYTES:
        try:
            reading = event.read(path, offset)
        except OSError as error:  # what its worker left there is no file, or not ours to read
            log.warning("job %d (%s): the events of attempt %d cannot be read: %s",
                        job.id, job.name, job.attempt.number, error)  # fmt: skip
            return
        if reading.offset == offset:
            return
        yield reading
        offset = reading.offset
