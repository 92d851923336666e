"""The jobs of a sweep, where a verb is given the sweep's name or number instead of a job's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from honed.system.error import UsageError

if TYPE_CHECKING:
    from honed.cli.instance import Instance
    from honed.job.shape import Row


def of(instance: Instance, reference: str) -> list[Row]:
    """Return the jobs of a sweep; none if the reference names a job, or nothing. Raises UsageError if several sweeps
    have that name."""
    jobs = instance.jobs(names=[reference])
    if any(reference in (job["name"], str(job["id"])) for job in jobs):
        return []
    members = [job for job in jobs if job.get("group")]
    numbers = sorted({group["id"] for job in members if (group := job.get("group"))})
    if len(numbers) > 1:
        raise UsageError(
            f"{len(numbers)} sweeps are named {reference!r}", hint=f"use its number: {', '.join(map(str, numbers))}"
        )
    return members
