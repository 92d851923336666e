"""Removal of files in a child process of the daemon, since removing a hundred gigabytes takes time.

    python -m honed.job.removal --root DIR ITEM…

    measure:7         the size of job 7's directory
    weigh:7           the size of job 7's checkpoints
    job:7             remove job 7 (its entry must be in pruned/) and the copies that `submit --stage` made for it
    copies:7          remove the copies that `submit --stage` made for job 7
    checkpoints:7     remove job 7's checkpoints that were set aside: `.checkpoints.<random>.old`
    rows:0            remove the encoded rows that were set aside, of all users
    left:0            remove what could not be removed before (leftover.py)

It prints one line of JSON per item, {"item", "num_bytes", "num_files", "problem", "is_left"}, and an empty line now and
then while it works on one. An item that was interrupted can be requested again. No link is followed and no other file
system entered, because workers can write in these directories.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fnmatch
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from honed.job import leftover, row_cache, unstage
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.job.tree import Count, measure, no_tick
from honed.system import durable, untrusted
from honed.system import layout as layouts
from honed.system.layout import Layout

#: Name pattern of checkpoints that are being removed.
OLD_CHECKPOINTS = ".checkpoints.*.old"
#: Names of a job's directory that the daemon looks at; honed and its workers make some tens.
MAX_SEARCHED = 1000


# -- a job's ----------------------------------------------------------------------------------------------------------


def remove_job(spool: Spool, layout: Layout, job_id: int, tick: Callable[[], None] = no_tick) -> Count:
    """Remove all files of a pruned job, starting with the copies that `submit --stage` made for it."""
    pruned = spool.pruned.get(job_id)
    if pruned is None:
        return Count(problem=f"job {job_id} is not pruned")
    return _copies(spool, layout, pruned, tick).plus(leftover.remove(layout, layout.files(job_id).place, tick))


def remove_copies(spool: Spool, layout: Layout, job_id: int, tick: Callable[[], None] = no_tick) -> Count:
    """Remove the copies that `submit --stage` made for a job that has ended."""
    job = spool.job(job_id)
    return _copies(spool, layout, job, tick) if job is not None and job.state.is_final else Count()


def _copies(spool: Spool, layout: Layout, job: Job, tick: Callable[[], None]) -> Count:
    unfinished = (job for state in (State.QUEUED, State.HELD, State.RUNNING) for job in spool.jobs(state))
    total = Count()
    for place in unstage.copies_of_its_own(layout, job, unfinished):
        total = total.plus(leftover.remove(layout, place, tick))
    return total


def set_aside_checkpoints(layout: Layout, job_id: int) -> bool:
    """Take a job's checkpoints away atomically with one rename; `remove_checkpoints` deletes them later.

    Returns False if there are none, or a person has mounted something on them. The checkpoints directory belongs to the
    workers, but its parent belongs to honed.
    """
    directory = layout.files(job_id).place / "checkpoints"
    # Workers write beside it, too: a name that none of them can foresee, since a search among theirs may take long.
    aside = directory.with_name(OLD_CHECKPOINTS.replace("*", os.urandom(8).hex()))
    try:
        directory.rename(aside)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.EBUSY}:
            raise
        return False
    durable.sync_dir(directory.parent)
    return True


def may_have_set_aside(layout: Layout, job_id: int) -> bool:
    """Return True if a job may have checkpoints that were set aside. A directory with many names is not searched for
    them: `remove_checkpoints` does that, in a process of its own."""
    try:
        names = untrusted.names_in(layout.files(job_id).dir, limit=MAX_SEARCHED)
    except OSError:
        return False
    return len(names) == MAX_SEARCHED or any(fnmatch.fnmatchcase(name, OLD_CHECKPOINTS) for name in names)


def remove_checkpoints(layout: Layout, job_id: int, tick: Callable[[], None] = no_tick) -> Count:
    """Remove the checkpoints that `set_aside_checkpoints` renamed."""
    total = Count()
    for path in sorted(layout.files(job_id).place.glob(OLD_CHECKPOINTS)):
        total = total.plus(leftover.remove(layout, path, tick))
    return total


def _tick() -> None:
    print(flush=True)


def settle(spool: Spool, layout: Layout, item: str) -> Count:
    """Process one item."""
    kind, _, number = item.partition(":")
    match kind:
        case "measure":
            return measure(layout.files(int(number)).place, _tick)
        case "weigh":
            # A user who owns it can mount a file system on it that hangs, or lies.
            return measure(layout.files(int(number)).place / "checkpoints", _tick, may_be_mounted=False)
        case "checkpoints":
            return remove_checkpoints(layout, int(number), _tick)
        case "copies":
            return remove_copies(spool, layout, int(number), _tick)
        case "job":
            return remove_job(spool, layout, int(number), _tick)
        case "rows":
            return leftover.remove(layout, row_cache.old_dir(layout), _tick)
        case "left":
            return leftover.remove_again(layout, _tick)
        case _:
            return Count(problem=f"no item: {item}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="honed.job.removal", description="Measure or remove the files of jobs.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("items", nargs="+", metavar="ITEM")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):  # the daemon's unit may forbid this system call
        os.nice(10)  # training comes first
    layout = layouts.of(options.root)
    spool = Spool(layout, lock=False)
    for item in options.items:
        try:
            done = settle(spool, layout, item)
        except Exception as error:  # noqa: BLE001 - one item ends no other
            done = Count(problem=f"{type(error).__name__}: {error}"[:300])
        print(json.dumps({"item": item, **done.as_dict(), "is_left": done.is_left}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
