"""A job for tests that need any: it has been started once."""

from __future__ import annotations

from honed.job.job import Attempt, Job

JOB = Job(
    id=1,
    name="j",
    submitted_at=0,
    source="j",
    uid=1000,
    output_dir="/o",
    attempts=(Attempt(number=1, backend="transformers", started_at=0),),
)
