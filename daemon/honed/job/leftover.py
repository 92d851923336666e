"""What could not be removed: it gets a name that no listing reads, once, and is tried again until it is gone.

    jobs/7 ──► jobs/.7.left        var/lib/honed/left.json: [{"path", "problem", "since"}], written before the rename

A directory keeps its parent: a rename into another one would need write permission in the directory itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from honed.job import tree
from honed.job.damaged import begun_anew
from honed.job.tree import Count
from honed.system import durable
from honed.system.layout import Layout


@dataclass(frozen=True)
class Leftover:
    """A file or directory that could not be removed."""

    path: str
    problem: str  #: the first one of the last try
    since: float  #: seconds since the epoch


def listed(layout: Layout) -> list[Leftover]:
    """Return what is left, as it was at the last try. Raises OSError if that cannot be read."""
    try:
        return _parsed(durable.read(layout.left_path))
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, RecursionError):
        return []  # it is found by its name, by a person


def _known(layout: Layout) -> list[Leftover]:
    """Return what is left; nothing if the list is damaged, which is begun anew then. Raises OSError."""
    return begun_anew(layout.left_path, _parsed) or []


def _parsed(data: bytes) -> list[Leftover]:
    """Raises an exception for what honed has not written."""
    return [Leftover(str(load["path"]), str(load["problem"]), float(load["since"])) for load in json.loads(data)]


def remove(layout: Layout, path: Path, tick: Callable[[], None]) -> Count:
    """Remove what a path names; what cannot be removed is left under another name."""
    count = tree.remove(path, tick)
    if count.problem is not None:
        with contextlib.suppress(OSError):  # then it stays where it is, and is tried again
            _leave(layout, path, count.problem)
            count.is_left = True
    return count


def remove_again(layout: Layout, tick: Callable[[], None]) -> Count:
    """Try once more to remove all that is left."""
    total, still = Count(), []
    for item in _known(layout):
        count = tree.remove(Path(item.path), tick)
        total = total.plus(count)
        if count.problem is not None:
            still.append(Leftover(item.path, count.problem, item.since))
    _write(layout, still)
    return total


def _leave(layout: Layout, path: Path, problem: str) -> None:
    """Give it another name, that it is remembered by. Raises OSError if that is not possible: e.g. it is a mount."""
    known = _known(layout)
    number, target = 1, path.with_name(f".{path.name}.left")
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f".{path.name}.{number}.left")
    _write(layout, [*known, Leftover(str(target), problem, time.time())])
    try:
        path.rename(target)
    except OSError:
        _write(layout, known)
        raise
    durable.sync_dir(path.parent)


def _write(layout: Layout, leftovers: Sequence[Leftover]) -> None:
    if leftovers:
        # People made up the names: in ASCII, as some are no UTF-8.
        durable.write(layout.left_path, json.dumps([asdict(leftover) for leftover in leftovers]).encode(), mode=0o640)
        if os.geteuid() == 0:  # honed must read what `honectl prune` has left
            owner = layout.state_dir.stat()
            os.chown(layout.left_path, owner.st_uid, owner.st_gid)
    else:
        layout.left_path.unlink(missing_ok=True)
