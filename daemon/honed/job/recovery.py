"""The spool at the start of honed: what a crash interrupted is finished, and damaged entries are set aside; and the
entries of running jobs later, which only honed may change.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from honed.job.corrupt import copy_of
from honed.job.damaged import is_of_item, passed_over
from honed.job.job import Job, State
from honed.job.spool import Spool, read_entry
from honed.system import durable
from honed.system.log import about
from honed.system.message import ENTRY_DAMAGED

log = logging.getLogger(__name__)


def recover(spool: Spool, alive: Callable[[], None] = lambda: None) -> None:
    """Recover the spool. A damaged entry goes into corrupt/; that of a job that was running is rebuilt. `alive` is
    called on the way. Ended ones are looked at when they are asked for."""
    spool.entries.when_damaged = partial(_set_aside, spool)
    for path, problem in spool.recover(alive):
        with passed_over(path):
            _set_aside(spool, path, problem)


def _set_aside(spool: Spool, path: Path, problem: ValueError | OSError) -> None:
    number, files = int(path.stem), spool.files(int(path.stem))
    known = spool.listed(number)
    if known is not None and spool.entries.path(number, known.state) == path:  # it was in the index
        known = None
    job = copy_of(files) if known is None and path.parent == spool.state_dir(State.RUNNING) else None
    if known is not None:
        done = f"Job {number} has another, whole entry, which is in {known.state}."
    elif job is not None:
        done = f"Job {number} ({job.name}) was running: its entry was rebuilt from {files.entry_path}."
    else:
        done = (
            f"Job {number} is in no queue or list any more. Its directory was left as it is, with its job file, which "
            f"its submitter can submit again: honectl submit {files.dir}/spec.*"
        )
    spool.corrupt.add(path, problem, done)
    log.error("%s: damaged entry: %s. %s", path, problem, done, extra=about(number, ENTRY_DAMAGED))
    if job is not None:
        rebuild(spool, job)
    else:
        path.unlink(missing_ok=True)
        durable.sync_dir(path.parent)


def renewed(spool: Spool, job: Job) -> Job:
    """Return a running job of this daemon. If its entry was removed, damaged or replaced by an older one, that is set
    aside, and the entry is written again. Raises OSError if the machine prevents reading it."""
    path, problems = spool.entries.path(job.id, State.RUNNING), list[ValueError | OSError]()
    entry = read_entry(path, State.RUNNING, lambda _path, problem: problems.append(problem))
    if problems and not is_of_item(problems[0]):
        raise problems[0]
    if (entry is not None and entry.revision >= job.revision) or spool.is_changing(job.id):
        return job
    problem = problems[0] if problems else _lost("it is gone") if entry is None else ValueError("it is an older one")
    done = f"Job {job.id} ({job.name}) is running, and honed was, too: the entry was written again."
    spool.corrupt.add(path, problem, done)
    log.error("%s: damaged entry: %s. %s", path, problem, done, extra=about(job.id, ENTRY_DAMAGED))
    return spool.update(job)


def note_lost(spool: Spool, job_id: int) -> None:
    """Record in corrupt/ that a worker lives without a running entry, unless a damaged one lies there."""
    path = spool.entries.path(job_id, State.RUNNING)
    if spool.corrupt.kept(path).name not in spool.corrupt.names():
        done = f"A worker of job {job_id} lives: its entry was rebuilt, and it is followed to its end."
        spool.corrupt.add(path, _lost("it is not there"), done)


def _lost(words: str) -> OSError:
    return FileNotFoundError(words)


def rebuild(spool: Spool, job: Job) -> Job:
    """Make a job whose worker lives a running one, whatever its entry says, and even if it was pruned."""
    spool.pruned.forget({job.id})
    old = spool.listed(job.id)
    revision = max(job.revision, old.revision if old is not None else 0) + 1
    rebuilt = dataclasses.replace(job, state=State.RUNNING, revision=revision)
    durable.write(spool.entries.path(job.id, State.RUNNING), rebuilt.to_json())
    if old is not None and old.state is not State.RUNNING:
        spool.entries.path(job.id, old.state).unlink(missing_ok=True)
        durable.sync_dir(spool.state_dir(old.state))
    spool.note(rebuilt)
    return rebuilt
