"""The jobs whose rows in honed.db are made again later: so far it has nothing of them but what their entries say.

Each has a row of attempt 0 in `offsets`, so that the next daemon, too, finds what a stop or a crash has left.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence


class Pending:
    """The jobs that are pending in one open database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        rows = db.execute("SELECT job_id FROM offsets WHERE attempt = 0 ORDER BY job_id")
        self._numbers = dict.fromkeys(number for (number,) in rows)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._numbers

    def newest_first(self) -> list[int]:
        """Return the jobs, in the order in which people look at them."""
        return [*reversed(self._numbers)]

    def add(self, job_ids: Iterable[int]) -> None:
        """Add jobs, in one write. It is durable with the rows that follow, or before them."""
        numbers = sorted(job_ids)
        sql = "INSERT OR IGNORE INTO offsets SELECT value, 0, 0, 0 FROM json_each(?)"
        self._db.execute(sql, (json.dumps(numbers),))
        self._numbers |= dict.fromkeys(numbers)

    def drop(self, job_ids: Sequence[int]) -> None:
        """Drop jobs whose rows are all there, or that are gone."""
        sql = "DELETE FROM offsets WHERE attempt = 0 AND job_id IN (SELECT value FROM json_each(?))"
        self._db.execute(sql, (json.dumps(job_ids),))
        for number in job_ids:
            self._numbers.pop(number, None)
