"""The events of a running job: read from its worker's file into the outbox, honed.db and the log."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable

from honed.daemon import rebuild
from honed.job import event
from honed.job.database import Database
from honed.job.event import Written
from honed.job.job import Job
from honed.job.narration import Narrator
from honed.send.outbox import Outbox
from honed.system import untrusted
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Bytes of events that are still read after a worker has ended: a file can be endless.
MAX_REST_BYTES = 512 * 2**20


class Following:
    """Follows the events of one attempt from `offset` on; all it knows may be lost. `clock` is monotonic seconds;
    `heard` is called with each event once it is in the database."""

    def __init__(
        self,
        job: Job,
        offset: int,
        layout: Layout,
        database: Database,
        outbox: Callable[[], Outbox | None],
        *,
        clock: Callable[[], float],
        heard: Callable[[Job, event.Event], None] = lambda _job, _event: None,
    ) -> None:
        self._layout = layout
        self._path = layout.files(job.id).attempt(job.attempt.number).events_path
        self._database = database
        self._outbox = outbox
        self._clock = clock
        self._heard = heard
        self.offset = offset  #: bytes of its events that are in the database
        self.narrator = Narrator(log, clock)
        self.heard_at = clock()  #: monotonic seconds of its last event
        self._are_earlier_counted = len(job.attempts) == 1  # else an earlier attempt's may be missing in the database
        self._put_out: event.Reading | None = None  # in the outbox, and not in the database yet
        self._fault = ""  # why its events could not be read; logged once

    def read(self, job: Job) -> int:
        """Read the events reported since the last time. Returns the number of their bytes."""
        if not self._are_earlier_counted:
            # The database may lack the end of an earlier attempt; if it were counted after this one's events, it would
            # overwrite them.
            rebuild.count(self._database, self._layout, job, len(job.attempts) - 1)
            self._are_earlier_counted = True
        # A reading that the database did not take is offered again unchanged: the outbox has it already.
        try:
            reading = self._put_out or event.read(self._path, self.offset)
        except OSError as problem:
            # A link, a pipe, or a file that we may not read: caused by the worker itself, or by the disk.
            if str(problem) != self._fault:
                log.warning("job %d (%s): its events cannot be read: %s", job.id, job.name, problem)
            self._fault = str(problem)
            return 0
        self._fault = ""
        if reading.offset == self.offset:
            return 0
        if reading.num_bad:
            log.warning("job %d (%s): %d lines that are not events", job.id, job.name, reading.num_bad)
        # The outbox first: a crash in between sends a row twice, under one key; the other way round it would be lost.
        num_lost, outbox = 0, self._outbox()
        if outbox is not None and self._put_out is None:
            num_lost = outbox.put(job, reading)
            self._put_out = None if num_lost else reading
        self._database.apply(job, reading)
        self._put_out = None
        if outbox is not None:
            outbox.lose(num_lost)
        num_bytes, self.offset = reading.offset - self.offset, reading.offset
        self.heard_at = self._clock()
        for item in reading.events:
            self.narrator.tell(job, item)
            self._heard(job, item)
        return num_bytes

    @property
    def silent_sec(self) -> float:
        """Seconds since its last event."""
        return self._clock() - self.heard_at

    def read_rest(self, job: Job) -> bool:
        """Read the last events of a worker that has ended. Returns False if some remain to be counted later.

        Events that cannot be counted now are logged and block nothing.
        """
        left = MAX_REST_BYTES
        try:
            while left > 0 and (num_bytes := self.read(job)):
                left -= num_bytes
            if left <= 0:
                log.warning(
                    "job %d (%s): some of its last events were not counted: there are more than %d MiB of them",
                    job.id,
                    job.name,
                    MAX_REST_BYTES // 2**20,
                )
        except Exception:
            log.exception("job %d (%s): its last events were not counted", job.id, job.name)
            return False
        return not self._fault  # a disk may return them in a moment

    def written_bytes(self, job: Job) -> Written:
        """Return the bytes that the attempt has reported as written; none if honed.db fails."""
        try:
            return self._database.written_bytes(job)
        except sqlite3.Error:
            return Written()

    def sync(self, job: Job) -> None:
        """Make the events of a worker that has ended durable: a killed one has not, and honed.db may have them."""
        try:
            untrusted.sync_plain(self._path)
        except FileNotFoundError:
            pass
        except OSError as problem:
            log.warning("job %d (%s): its events may be lost in a power cut: %s", job.id, job.name, problem)

    def is_resumed(self, job: Job) -> bool:
        """Return True if the attempt has resumed from a checkpoint. If honed.db fails, only events since honed's start
        are known."""
        try:
            return self.narrator.is_resumed or self._database.has_event(job, "resumed")
        except sqlite3.Error:
            return False

    def tell_fallback(self, job: Job) -> None:
        """Record the fallback of the latest attempt in the database, once."""
        if (told := rebuild.fallback_event(job)) is not None and not self._database.has_event(job, told.kind):
            offset = self._database.offset(job.id, job.attempt.number)
            self._database.apply(job, event.Reading([told], offset, 0))
