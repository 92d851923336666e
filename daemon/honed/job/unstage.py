"""Removal of the copies that `submit --stage` made for a job, once the job is finished."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from honed.job import staging, tree
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)


def remove_copies(layout: Layout, job: Job, unfinished: Iterable[Job]) -> None:
    """Remove the staged copies of a finished job, except those that another job of the same user names."""
    for place in copies_of_its_own(layout, job, unfinished):
        # In a thread: removing a hundred thousand images takes time.
        threading.Thread(target=_remove, args=(job, place)).start()


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


def _remove(job: Job, place: Path) -> None:
    if problem := tree.remove(place).problem:
        log.warning("job %d (%s): its staged copies were not removed: %s", job.id, job.name, problem, extra=about(job))
    else:
        log.info("job %d (%s): removed its staged copies, %s", job.id, job.name, place, extra=about(job))
