"""Edits on the disk: a job that waits gets another job file, and with it another entry and plan.

    edits/<id>.<suffix>    the new job file, from its arrival until the edit has been made or refused

The change of the entry is the commit: before it the job is as it was. The new entry has the facts of the new file, and
says that spec.* and plan.json are being replaced and that the job has no plan yet; so it cannot start. Those files
follow, each by one rename, and then the entry's last change. `make` goes on from any point.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool, names_in
from honed.system import durable
from honed.system.error import UsageError

#: Keys that may change after a job has run: no checkpoint depends on them.
ALWAYS = ("class", "depends_on", "notify", "pin", "priority", "retry", "time_limit_sec")


def obstacle(number: int, name: str, state: str) -> UsageError | None:
    """Return why a job cannot get another job file, and what to do instead; None if it can."""
    if state in {State.QUEUED, State.HELD}:
        return None
    hint = f"honectl rerun {number} --set KEY=VALUE makes a new job of its file"
    stop = f"; honectl cancel {number} ends this one" if state == State.RUNNING else ""
    return UsageError(
        f"job {number} ({name}) is {state}, but edit needs a job that is queued or held", hint=hint + stop
    )


class Edits:
    """The edits of one spool; used only by the spool's owner."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._dir = spool.dir / "edits"

    def put(self, job: Job, data: bytes, suffix: str) -> Path:
        """Keep a job's new file until `make` or `drop`. Raises OSError if the machine prevents it."""
        durable.make_dir(self._dir, mode=0o700)
        path = self._dir / f"{job.id}{suffix}"
        durable.write(path, data, mode=0o600)
        return path

    def drop(self, path: Path) -> None:
        """Forget an edit: it has been made, or its job stays as it is."""
        path.unlink(missing_ok=True)
        durable.sync_dir(self._dir)

    def make(self, job: Job, path: Path, changes: Mapping[str, Any], plan: PlanFile | None) -> Job:
        """Replace a job's file, entry and plan. Returns the changed job.

        `changes` are those of its entry, without effect if they were made before; without a `plan` the job has to be
        planned before it starts. Raises OSError if the machine prevents it; called again, it goes on from where it was.
        """
        is_deferred = bool(changes.get("is_deferred", job.is_deferred))
        if not job.is_being_edited:
            first = {**changes, "is_deferred": True, "is_being_edited": True, "staged": None}
            job = self._spool.update(job, **first, edited_at=(*job.edited_at, time.time()))
        files = self._spool.job_layout(job.id)
        durable.write(files.spec_path, path.read_bytes())
        if plan is not None:
            plan.write(files.plan_path)
        job = self._spool.update(job, is_being_edited=False, is_deferred=is_deferred or plan is None)
        self.drop(path)
        return job

    def recover(self) -> Iterator[tuple[Job, Path]]:
        """Yield the jobs whose edits a crash has interrupted, with their new files; other files are removed."""
        for name in names_in(self._dir) if self._dir.is_dir() else ():
            path = self._dir / name
            job = self._spool.job(int(path.stem)) if path.stem.isdecimal() else None
            if job is not None and (job.is_being_edited or (job.is_editable and not self._is_made(job, path))):
                yield job, path
            else:
                path.unlink()

    def _is_made(self, job: Job, path: Path) -> bool:
        """Return True if a job has this file by now: only the removal of this copy was left to do."""
        return self._spool.job_layout(job.id).spec_path.read_bytes() == path.read_bytes()
