"""Removal of files by a program beside the daemon's loop, since a hundred gigabytes take their time.

    python -m honed.job.removal --root DIR ITEM…

    measure:7         how much the directory of job 7 takes; weigh:7, its checkpoints alone
    job:7             all of it is removed, and the copies that `submit --stage` made for it: its entry lies in pruned/
    checkpoints:7     what was set aside of its checkpoints is removed: `.checkpoints.<n>.old`

One line of JSON an item: {"item", "num_bytes", "num_files", "problem"}. Whatever it is killed in the middle of can be
asked for again. It follows no link and enters no other file system, since workers write in these directories.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from honed.job import unstage
from honed.job.job import State
from honed.job.spool import Spool
from honed.system import durable
from honed.system import layout as layouts
from honed.system.layout import Layout

#: How checkpoints are named that are on their way out.
OLD_CHECKPOINTS = ".checkpoints.*.old"


@dataclass
class Count:
    """What was found, or removed; `problem` is the first thing that could not be."""

    num_bytes: int = 0
    num_files: int = 0
    problem: str | None = None

    def add(self, info: os.stat_result) -> None:
        self.num_files += 1
        # A file with another name elsewhere frees nothing.
        self.num_bytes += info.st_size if info.st_nlink == 1 else 0

    def complain(self, path: Path, error: OSError | RecursionError | str) -> None:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        self.problem = self.problem or f"{path}: {said}"[:300]


def measure(path: Path) -> Count:
    """What lies below a directory; nothing where there is none."""
    return _walk(path, remove=False)


def remove(path: Path) -> Count:
    """Remove a directory and all below it, as far as that can be. Not synced: what a power cut brings back is removed
    again."""
    total = Count()
    for _ in range(3):  # a report may have been made in it meanwhile
        removed = _walk(path, remove=True)
        total = Count(total.num_bytes + removed.num_bytes, total.num_files + removed.num_files, removed.problem)
        if not removed.problem or not removed.num_files:
            break
    return total


def _walk(path: Path, *, remove: bool) -> Count:
    count = Count()
    try:
        parent_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return count
    try:
        info = os.stat(path.name, dir_fd=parent_fd, follow_symlinks=False)
        _visit(parent_fd, path, info, info.st_dev, count, remove=remove)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError) as error:
        count.complain(path, error)
    finally:
        os.close(parent_fd)
    return count


def _visit(parent_fd: int, path: Path, info: os.stat_result, device: int, count: Count, *, remove: bool) -> None:
    """One name in an open directory. `path` is for people: what is done goes by descriptors, which no link leads
    astray."""
    try:
        if not stat.S_ISDIR(info.st_mode):
            if remove:
                os.unlink(path.name, dir_fd=parent_fd)
            count.add(info)
            return
        if info.st_dev != device:
            count.complain(path, "another file system lies there")
            return
        fd = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            if remove and info.st_uid == os.geteuid() and info.st_mode & 0o300 != 0o300:
                os.fchmod(fd, stat.S_IMODE(info.st_mode) | 0o700)
            with os.scandir(fd) as entries:
                names = [entry.name for entry in entries]
            for name in sorted(names, key=_what_is_needed_last):
                with contextlib.suppress(FileNotFoundError):
                    below = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    _visit(fd, path / name, below, device, count, remove=remove)
        finally:
            os.close(fd)
        if remove and count.problem is None:
            os.rmdir(path.name, dir_fd=parent_fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        count.complain(path, error)


def _what_is_needed_last(name: str) -> bool:
    """plan.json says where a job's staged copies lie: a removal that is cut short must still know."""
    return name == "plan.json"


# -- a job's ----------------------------------------------------------------------------------------------------------


def remove_job(spool: Spool, layout: Layout, job_id: int) -> Count:
    """Everything of a job that was pruned. What `submit --stage` copied for it goes first."""
    pruned = spool.pruned(job_id)
    if pruned is None:
        return Count(problem=f"job {job_id} is not pruned")
    unfinished = (job for state in (State.QUEUED, State.HELD, State.RUNNING) for job in spool.jobs(state))
    for place in unstage.copies_of_its_own(layout, pruned, unfinished):
        removed = remove(place)
        if removed.problem:
            print(f"job {job_id}: its staged copies stay: {removed.problem}", file=sys.stderr)
    return remove(layout.job(job_id).dir)


def set_aside_checkpoints(layout: Layout, job_id: int) -> bool:
    """Take a job's checkpoints away, at once and for good, by one rename; their removal may take its time.

    Returns False where there are none. The directory is the workers', but lies in one of ours.
    """
    directory = layout.job(job_id).checkpoints_dir
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
    """What `set_aside_checkpoints` has left."""
    total = Count()
    for path in sorted(layout.job(job_id).dir.glob(OLD_CHECKPOINTS)):
        removed = remove(path)
        total = Count(
            total.num_bytes + removed.num_bytes, total.num_files + removed.num_files, total.problem or removed.problem
        )
    return total


def settle(spool: Spool, layout: Layout, item: str) -> Count:
    """Do one item."""
    kind, _, number = item.partition(":")
    match kind:
        case "measure":
            return measure(layout.job(int(number)).dir)
        case "weigh":
            return measure(layout.job(int(number)).checkpoints_dir)
        case "checkpoints":
            return remove_checkpoints(layout, int(number))
        case "job":
            return remove_job(spool, layout, int(number))
        case _:
            return Count(problem=f"no item: {item}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="honed.job.removal", description="Remove what honed no longer wants.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("items", nargs="+", metavar="ITEM")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):  # the daemon's unit has no system call for it
        os.nice(10)  # training comes first
    layout = layouts.of(options.root)
    spool = Spool(layout, lock=False)
    for item in options.items:
        count = settle(spool, layout, item)
        print(json.dumps({"item": item, **count.__dict__}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
