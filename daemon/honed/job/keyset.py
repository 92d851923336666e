"""Pages of one metric's rows, in the order of the index `metrics_by_job`: a page costs as much as its rows.

`(step, rowid) > (?, ?)` alone would read all rows of that step for every page: SQLite's index search ends at the step.
"""

from __future__ import annotations

#: Before the first row, whatever its step.
FIRST = (-(2**63), -(2**63))
#: After the last row.
LAST = (2**63 - 1, 2**63 - 1)


def after(columns: str) -> str:
    """Return a query for ?5 rows of job ?1 and metric ?2 after the place (?3, ?4) by step and rowid. `columns` has
    both."""
    return _page(columns, ">", "")


def before(columns: str) -> str:
    """Return the same query backwards: for the rows before the place, the last one first."""
    return _page(columns, "<", " DESC")


def _page(columns: str, than: str, way: str) -> str:
    rows = f"SELECT {columns} FROM metrics WHERE job_id = ?1 AND name = ?2"
    order = f"ORDER BY step{way}, rowid{way} LIMIT ?5"
    return (
        f"SELECT * FROM ({rows} AND step = ?3 AND rowid {than} ?4 {order})"
        f" UNION ALL SELECT * FROM ({rows} AND step {than} ?3 {order}) {order}"
    )
