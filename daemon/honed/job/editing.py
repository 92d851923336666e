"""Edits on the disk: a job that waits gets another job file, and with it another entry and plan.

    edits/<id>.<suffix>    the new job file, from its arrival until the edit has been made or refused

The change of the entry is the commit (`begin`): before it the job is as it was. The new entry has the facts of the new
file, and `is_being_edited` says that spec.* and plan.json are being replaced: the job is neither planned, prepared nor
started until `complete` has replaced them, each by one rename, and has changed the entry again. `make` does both, and
goes on from any point.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from honed.job.damaged import passed_over
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool, names_in
from honed.system import durable, untrusted
from honed.system.error import EnvironmentInvalidError, UsageError

log = logging.getLogger(__name__)

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
        self._unwanted: set[Path] = set()  # files that could not be removed

    def put(self, job: Job, data: bytes, suffix: str) -> Path:
        """Keep a job's new file until `make` or `drop`. Raises OSError if the machine prevents it."""
        durable.make_dir(self._dir, mode=0o700)
        path = self._dir / f"{job.id}{suffix}"
        try:
            durable.write(path, data, mode=0o600)
        except OSError:
            self._unwanted.add(path)  # it may be there, and nothing reports that it is
            self.tend()
            raise
        self._unwanted.discard(path)
        return path

    def tend(self) -> None:
        """Remove the files of edits that were refused or are made; what an error leaves, the next call removes."""
        for path in list(self._unwanted):
            with contextlib.suppress(OSError):
                self.drop(path)
                self._unwanted.discard(path)

    def drop(self, path: Path) -> None:
        """Forget an edit: its job stays as it is."""
        path.unlink(missing_ok=True)
        durable.sync_dir(self._dir)

    def is_begun(self, job_id: int) -> bool:
        """Return True if a job's entry says that it is being edited, or may say so on the disk: its last change has
        failed."""
        job = self._spool.job(job_id)
        return (job is not None and job.is_being_edited) or self._spool.is_changing(job_id)

    def make(self, job: Job, path: Path, changes: Mapping[str, Any], plan: PlanFile | None) -> Job:
        """Replace a job's file, entry and plan. Returns the changed job.

        `changes` are those of its entry, without effect if they were made before; without a `plan` the job has to be
        planned before it starts. Raises OSError if the machine prevents it; called again, it goes on from where it was.
        """
        data = path.read_bytes()  # what cannot be read is not begun
        is_deferred = bool(changes.get("is_deferred", job.is_deferred))
        job = job if job.is_being_edited else self.begin(job, changes)
        return self.complete(job, path, data, plan, is_deferred=is_deferred)

    def begin(self, job: Job, changes: Mapping[str, Any]) -> Job:
        """Commit an edit: from here on it is completed."""
        first = {**changes, "is_deferred": True, "is_being_edited": True, "staged_at": None}
        return self._spool.update(job, **first, edited_at=(*job.edited_at, time.time()))

    def complete(self, job: Job, path: Path, data: bytes, plan: PlanFile | None, *, is_deferred: bool) -> Job:
        """Replace the files of a job whose edit has begun, and let it start."""
        files = self._spool.files(job.id)
        untrusted.write_plain(files.spec_path, data)
        if plan is not None:
            plan.write(files.plan_path)
        job = self._spool.update(job, is_being_edited=False, is_deferred=is_deferred or plan is None)
        self._unwanted.add(path)
        self.tend()
        return job

    def take_up(self) -> Iterator[tuple[Job, Path]]:
        """Yield the jobs whose edits a crash has interrupted, with their new files; other files are removed."""
        for name in names_in(self._dir) if self._dir.is_dir() else ():
            job = None
            with passed_over(self._dir / name):
                job = self._interrupted(self._dir / name)
            if job is not None:
                yield job, self._dir / name

    def _interrupted(self, path: Path) -> Job | None:
        """Return the job of which this edit was interrupted. Of any other, the file is removed."""
        job = self._spool.job(int(path.stem)) if path.stem.isdecimal() else None
        if job is not None and (job.is_being_edited or (job.is_editable and not self._is_made(job, path))):
            return job
        path.unlink(missing_ok=True)
        return None

    def give_up(self, job: Job) -> None:
        """Let go of an edit whose new file is gone. The job has one file of the two, and a person decides."""
        lost = EnvironmentInvalidError(
            "its edit was interrupted, and the new file is lost",
            hint=f"look at its job file, edit it again if need be, then honectl release {job.id}",
        )
        log.error("job %d (%s): %s; now held", job.id, job.name, lost.message)
        changes: dict[str, Any] = {"is_being_edited": False, "error": lost.as_dict(), "held_for": None}
        if job.state is State.QUEUED:
            self._spool.move(job, State.HELD, **changes)
        else:
            self._spool.update(job, **changes)

    def _is_made(self, job: Job, path: Path) -> bool:
        """Return True if a job has this file by now: only the removal of this copy was left to do."""
        try:
            return untrusted.read_plain(self._spool.files(job.id).spec_path) == path.read_bytes()
        except OSError:
            return False  # its check says what is wrong
