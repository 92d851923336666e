"""Damaged entries: kept in the spool's corrupt/ with a reason, and what is needed to do without them.

    <spool>/corrupt/<id>.<state>.json          the entry as it was found
    <spool>/corrupt/<id>.<state>.json.reason   what is wrong with it, what honed has done, what a person can do
    jobs/<id>/entry.json                       the entry as it was when the job's worker was started last

A job that was running is rebuilt from that copy (recovery.py), so that its worker is followed, and its device is not
given to another job. While corrupt/ has a file, honed reports itself as degraded.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from honed.job.damaged import is_of_item
from honed.job.job import Job, State
from honed.system import durable, untrusted
from honed.system.layout import JobFiles

log = logging.getLogger(__name__)


def keep_copy(files: JobFiles, job: Job) -> None:
    """Keep a copy of the entry of a job whose worker is about to start; nothing if the job has no directory. Raises
    OSError if the machine is at fault."""
    try:
        if files.place.is_dir():
            untrusted.write_plain(files.entry_path, job.to_json(), mode=0o640)
    except OSError as error:
        if durable.machine_fault(error):
            raise
        log.warning("job %d (%s): no copy of its entry is kept: %s", job.id, job.name, error)


def copy_of(files: JobFiles) -> Job | None:
    """Return the kept copy; None if there is no whole one. Only the directory's owner's counts: workers write there.
    Raises OSError if the machine prevents reading it."""
    try:
        job = Job.from_json(untrusted.read_plain(files.entry_path, owners={files.owner}), State.RUNNING)
    except (OSError, ValueError) as error:
        if not is_of_item(error):
            raise
        return None
    return job if files.dir.name == str(job.id) else None


class Corrupt:
    """The directory of damaged entries."""

    def __init__(self, spool_dir: Path) -> None:
        self.dir = spool_dir / "corrupt"

    def add(self, path: Path, problem: Exception, done: str) -> None:
        """Link or move a damaged entry there, with its reason; an empty file for one that is gone. `done` tells what
        becomes of its job. Its content is not read: that may be what fails."""
        durable.make_dir(self.dir, mode=0o750)
        kept = self.kept(path)
        text = (
            f"{path} could not be read at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}: {problem}\n\n{done}\n\n"
            "Look for the cause: journalctl -k -p err. Then remove this file and the one beside it; until then honed "
            "reports itself as degraded, and keeps the job's rows in honed.db.\n"
        )
        durable.write(kept.with_name(f"{kept.name}.reason"), text.encode(), mode=0o640)
        kept.unlink(missing_ok=True)
        try:
            kept.hardlink_to(path)
        except FileNotFoundError:
            kept.touch(mode=0o640)
        except OSError:  # a directory, another user's file, or a file system without links
            path.rename(kept)
        durable.sync_dir(self.dir)

    def kept(self, path: Path) -> Path:
        """Return the place of a damaged entry there."""
        return self.dir / f"{path.stem}.{path.parent.name}.json"

    def numbers(self) -> set[int]:
        """Return the numbers of the jobs whose entries are there."""
        return {int(name.partition(".")[0]) for name in self.names() if name.partition(".")[0].isdecimal()}

    def names(self) -> list[str]:
        """Return the names of the entries there."""
        try:
            return sorted(name for name in os.listdir(self.dir) if name.endswith(".json"))  # noqa: PTH208
        except FileNotFoundError:
            return []
