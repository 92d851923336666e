"""Filters of the list: each job that its column shows so is found, and a filter that no job can meet is refused."""

from __future__ import annotations

import os
import pwd

import pytest

from honed.cli import column
from honed.job import query
from honed.job.job import Job
from honed.job.shape import Row
from honed.system.error import UsageError

JOB = Job(id=7, name="a", submitted_at=0, source="j", uid=os.getuid(), output_dir="/o")
STAGED = query.summary(JOB) | {"staged_at": "2026-11-24T10:00:00Z"}
ENDED = query.summary(JOB) | {"state": "failed", "outcome": "time_limit", "is_pinned": True, "elapsed_sec": 4.3}
LONG = ENDED | {"elapsed_sec": 5400.0, "outcome": "out_of_memory"}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("state=queued", [STAGED]),
        ("state=staged", [STAGED]),
        ("state!=queued", [ENDED, LONG]),
        ("outcome=time_limit", [ENDED]),
        ("outcome=time_limit, pinned", [ENDED]),
        ("outcome~pinned", [ENDED, LONG]),
        ("outcome=", [STAGED]),
        ("elapsed=4 s", [ENDED]),
        ("elapsed>1h", [LONG]),
        ("elapsed<=90min", [ENDED, LONG]),
        ("elapsed=1.5h", [LONG]),
        ("elapsed!=1.5 h", [STAGED, ENDED]),
        (f"user~{pwd.getpwuid(os.getuid()).pw_name}", [STAGED, ENDED, LONG]),
    ],
)
def test_a_filter_finds_what_its_column_shows(text: str, rows: list[Row]) -> None:
    assert [row for row in (STAGED, ENDED, LONG) if column.test([text], {})(row)] == rows


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("outcome=sucess", "did you mean outcome=succeeded?"),
        ("name==a", "write one =: --filter 'name=a'"),
        ("elapsed>soon", "90 min"),
        ("state=quued", "did you mean state=queued?"),
    ],
)
def test_a_filter_that_no_job_can_meet_is_refused(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        column.test([text], {})
    assert hint in (refused.value.hint or "")
