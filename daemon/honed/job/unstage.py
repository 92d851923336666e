"""The copies that `submit --stage` made for a job: which go with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from honed.job import staging
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.system.layout import Layout


def copies_of_its_own(layout: Layout, job: Job, unfinished: Iterable[Job]) -> set[Path]:
    """Return the copies made for a job that no unfinished job of the same user names."""
    places = staging.places(_spec_of(layout, job), layout, job.uid)
    others = [other for other in unfinished if other.uid == job.uid] if places else []
    needed = {place for other in others for place in staging.places(_spec_of(layout, other), layout, other.uid)}
    return set(places) - needed


def _spec_of(layout: Layout, job: Job) -> dict[str, Any]:
    try:
        return PlanFile.read(layout.files(job.id).plan_path).spec
    except (OSError, ValueError, KeyError, TypeError):  # reported elsewhere, where it matters
        return {}
