"""A limit on the lines about one user's jobs and files, so that nobody fills the journal, or has journald leave out the
lines of others. What is left out is counted, and the count logged. Errors, which are for the administrator, lines about
no user, and those about root and honed's own user have no limit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from honed.system.holder import UNKNOWN, Holders
from honed.system.log import about, fields_of

log = logging.getLogger(__name__)

#: Lines about one user in a period, and its seconds. A sweep of 100 jobs has some hundred.
MAX_LINES, PERIOD_SEC = 500, 10.0


@dataclass
class _Period:
    begin: float
    num: int = 0
    num_left_out: int = 0


class LogQuota(logging.Filter):
    """Lets a line through, or counts it. `owner_of` returns the user of a job, and `holder_of` whose subordinate a user
    is (holder.py): together they have the lines of one."""

    def __init__(
        self,
        owner_of: Callable[[int], int | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        is_timed: bool = True,
        holder_of: Callable[[int], int] = lambda uid: uid,
    ) -> None:
        super().__init__()
        self._holder_of = holder_of
        self._owner_of = owner_of
        self._clock = clock
        self._is_timed = is_timed
        self._periods: dict[int, _Period] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR or record.name == __name__:
            return True
        uid = self._uid(record)
        if uid is None or uid in {0, os.getuid()}:
            return True
        self.report()
        with self._lock:
            period = self._periods.setdefault(self._holder_of(uid), _Period(self._clock()))
            period.num += 1
            if period.num <= MAX_LINES:
                return True
            period.num_left_out += 1
            if period.num_left_out == 1 and self._is_timed:  # nothing else may be logged for long
                timer = threading.Timer(PERIOD_SEC, self.report)
                timer.daemon = True
                timer.start()
            return False

    def report(self) -> None:
        """End the periods that are over, and log what was left out in them."""
        now = self._clock()
        with self._lock:
            over = {uid: period for uid, period in self._periods.items() if now >= period.begin + PERIOD_SEC}
            for uid in over:
                del self._periods[uid]
        for uid, item in over.items():
            if item.num_left_out:
                log.warning(
                    "%s: %d lines about their jobs and files were left out: more than %d in %d s",
                    "users whom this machine does not know" if uid == UNKNOWN else f"user {uid}",
                    item.num_left_out,
                    MAX_LINES,
                    PERIOD_SEC,
                    extra=about(None, uid=None if uid == UNKNOWN else uid),
                )

    def _uid(self, record: logging.LogRecord) -> int | None:
        fields = fields_of(record)
        if (uid := fields.get("HONED_UID", "")).isdecimal():
            return int(uid)
        job = fields.get("HONED_JOB", "")
        return self._owner_of(int(job)) if job.isdecimal() else None


def begin(owner_of: Callable[[int], int | None]) -> None:
    """Limit the lines of this process from now on."""
    quota = LogQuota(owner_of, holder_of=Holders().of)
    for handler in logging.getLogger().handlers:
        handler.addFilter(quota)
