"""The events of a running job: read from its worker's file into the outbox, honed.db and the log."""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from honed.daemon import rebuild
from honed.job import event
from honed.job.database import Database, is_locked
from honed.job.event import Written
from honed.job.job import Job
from honed.job.narration import Narrator
from honed.send.outbox import Outbox
from honed.system import untrusted
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Bytes of events that are still read after a worker has ended: a file can be endless.
MAX_REST_BYTES = 512 * 2**20
#: Seconds for which the end of a job waits for a lock of another program's on the database.
MAX_LOCKED_SEC = 30.0


@dataclass
class _Rest:
    """What was read after the worker had ended, and since when."""

    since: float
    num_bytes: int = 0
    is_over: bool = False  #: there is more than is read


class Following:
    """Follows the events of one attempt from `offset` on; all it knows may be lost. `clock` is monotonic seconds;
    `heard` is called with every event once it is in the database."""

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
        self.has_more = False  #: the last `read` ended for its time, and more can be read at once
        self._rest: _Rest | None = None  # once the worker has ended

    def read(self, job: Job, *, sec: float = math.inf) -> int:
        """Read the events reported since the last time, for about `sec` seconds. Returns the number of their bytes."""
        until, num_bytes = time.monotonic() + sec, 0
        self.has_more = False
        if not self._count_earlier(job, until):
            return 0
        while (is_thin := self._database.thin(job, until=until)) and (read := self._read_bite(job)):
            num_bytes += read
            if time.monotonic() >= until:
                self.has_more = True
                break
        self.has_more = self.has_more or not is_thin
        return num_bytes

    def _count_earlier(self, job: Job, until: float) -> bool:
        """Count the events of earlier attempts that the database may lack; if that came after this one's events, they
        would overwrite these. Returns False if some are left."""
        if not self._are_earlier_counted:
            num_earlier, was_uncounted = len(job.attempts) - 1, job.id in self._database.uncounted
            self._are_earlier_counted = rebuild.count(
                self._database, self._layout, job, num_earlier, is_late=lambda: time.monotonic() >= until
            )
            self.has_more = not self._are_earlier_counted
            if was_uncounted and self._are_earlier_counted:
                self._database.put_job(job)
        return self._are_earlier_counted

    def _read_bite(self, job: Job) -> int:
        # A reading that the database did not take is offered again unchanged: the outbox has it already.
        try:
            reading = self._put_out or event.read(self._path, self.offset, num_bytes=event.BITE_BYTES)
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
        last = next((one for one in reversed(reading.events) if one.kind == "evaluation"), None)
        for item in reading.events:
            if item.kind != "evaluation" or item is last:  # a flood of them says no more than its last one
                self.narrator.log_event(job, item)
            self._heard(job, item)
        return num_bytes

    @property
    def silent_sec(self) -> float:
        """Seconds since its last event."""
        return self._clock() - self.heard_at

    def read_rest(self, job: Job, *, sec: float, max_sec: float = math.inf) -> bool | None:
        """Read the last events of a worker that has ended, for about `sec` seconds of every turn, for `max_sec` in all.
        Returns None while it goes on, then True, or False if some are left to be counted later.

        Events that cannot be counted now are logged and block nothing; a reader's lock on the database is waited for.
        """
        rest = self._rest = self._rest or _Rest(self._clock())
        if rest.is_over:
            return not self._fault
        try:
            rest.num_bytes += self.read(job, sec=sec)
        except Exception as problem:
            self.has_more = False
            if is_locked(problem) and self._clock() - rest.since < MAX_LOCKED_SEC:
                return None
            log.exception("job %d (%s): its last events were not counted", job.id, job.name)
            return False
        if self.has_more and rest.num_bytes < MAX_REST_BYTES:
            is_late = self._clock() - rest.since >= max_sec
            self.has_more = not is_late
            return False if is_late else None
        if self.has_more:
            rest.is_over, self.has_more = True, False
            log.warning(
                "job %d (%s): some of its last events were not counted: there are more than %d MiB of them",
                job.id,
                job.name,
                MAX_REST_BYTES // 2**20,
            )
        return not self._fault  # a disk may return them in a moment

    def last_step(self, job: Job) -> int:
        """Return the last step that the attempt has reported, 0 if there is none. If honed.db fails, only steps since
        honed's start are known."""
        if type(step := self.narrator.progress.get("step")) is int:
            return step
        try:
            return self._database.last_step(job)
        except sqlite3.Error:
            return 0

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

    def record_fallback(self, job: Job) -> None:
        """Record the fallback of the latest attempt in the database, once."""
        self._rest = None  # another worker goes on with the attempt
        if (fallback := rebuild.fallback_event(job)) is not None and not self._database.has_event(job, fallback.kind):
            offset = self._database.offset(job.id, job.attempt.number)
            self._database.apply(job, event.Reading([fallback], offset, 0))
