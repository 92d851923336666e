"""Removal of files in a child process of the daemon, since removing a hundred gigabytes takes time.

    python -m honed.job.removal --root DIR ITEM…

    measure:7         the size of job 7's directory
    weigh:7           the size of job 7's checkpoints
    job:7             remove job 7 (its entry must be in pruned/) and the copies that `submit --stage` made for it
    checkpoints:7     remove job 7's checkpoints that were set aside: `.checkpoints.<n>.old`
    rows:0            remove the encoded rows that were set aside, of all users

It prints one line of JSON per item: {"item", "num_bytes", "num_files", "problem"}. An item that was interrupted can be
requested again. No link is followed and no other file system entered, because workers can write in these directories.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from honed.job import row_cache, unstage
from honed.job.job import State
from honed.job.spool import Spool
from honed.job.tree import Count, measure, remove
from honed.system import durable
from honed.system import layout as layouts
from honed.system.layout import Layout

#: Name pattern of checkpoints that are being removed.
OLD_CHECKPOINTS = ".checkpoints.*.old"


# -- a job's ----------------------------------------------------------------------------------------------------------


def remove_job(spool: Spool, layout: Layout, job_id: int) -> Count:
    """Remove all files of a pruned job, starting with the copies that `submit --stage` made for it."""
    pruned = spool.pruned.get(job_id)
    if pruned is None:
        return Count(problem=f"job {job_id} is not pruned")
    unfinished = (job for state in (State.QUEUED, State.HELD, State.RUNNING) for job in spool.jobs(state))
    for place in unstage.copies_of_its_own(layout, pruned, unfinished):
        removed = remove(place)
        if removed.problem:
            print(f"job {job_id}: its staged copies were not removed: {removed.problem}", file=sys.stderr)
    return remove(layout.files(job_id).place)


def set_aside_checkpoints(layout: Layout, job_id: int) -> bool:
    """Take a job's checkpoints away atomically with one rename; `remove_checkpoints` deletes them later.

    Returns False if there are none. The checkpoints directory belongs to the workers, but its parent belongs to honed.
    """
    directory = layout.files(job_id).place / "checkpoints"
    number = 1
    while os.path.lexists(aside := directory.with_name(OLD_CHECKPOINTS.replace("*", str(number)))):
        number += 1
    try:
        directory.rename(aside)
    except FileNotFoundError:
        return False
    durable.sync_dir(directory.parent)
    return True


def remove_checkpoints(layout: Layout, job_id: int) -> Count:
    """Remove the checkpoints that `set_aside_checkpoints` renamed."""
    total = Count()
    for path in sorted(layout.files(job_id).place.glob(OLD_CHECKPOINTS)):
        removed = remove(path)
        total = Count(
            total.num_bytes + removed.num_bytes, total.num_files + removed.num_files, total.problem or removed.problem
        )
    return total


def settle(spool: Spool, layout: Layout, item: str) -> Count:
    """Process one item."""
    kind, _, number = item.partition(":")
    match kind:
        case "measure":
            return measure(layout.files(int(number)).place)
        case "weigh":
            return measure(layout.files(int(number)).place / "checkpoints")
        case "checkpoints":
            return remove_checkpoints(layout, int(number))
        case "job":
            return remove_job(spool, layout, int(number))
        case "rows":
            return remove(row_cache.old_dir(layout))
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
        print(json.dumps({"item": item, **settle(spool, layout, item).as_dict()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
