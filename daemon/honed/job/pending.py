"""The jobs whose rows in honed.db are made again later: so far it has nothing of them but what their entries say.

Each has a row of attempt 0 in `offsets`, so that the next daemon, too, finds what a stop or a crash has left.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable


class Pending:
    """The jobs that are pending in one open database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        found = db.execute("SELECT job_id FROM offsets WHERE attempt = 0 ORDER BY job_id")
        self._numbers = dict.fromkeys(number for (number,) in found)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._numbers

    def last(self) -> int | None:
        """Return the job that is next: the newest one, which people look at first; None if none is left."""
        return next(reversed(self._numbers), None)

    def add(self, job_ids: Iterable[int]) -> None:
        """Add jobs. It is durable with the rows that follow."""
        numbers = sorted(job_ids)
        self._db.executemany("INSERT OR IGNORE INTO offsets VALUES (?, 0, 0, 0)", ((number,) for number in numbers))
        self._numbers |= dict.fromkeys(numbers)

    def drop(self, job_id: int) -> None:
        """Drop a job whose rows are all there, or that is gone."""
        self._db.execute("DELETE FROM offsets WHERE job_id = ? AND attempt = 0", (job_id,))
        self._numbers.pop(job_id, None)
