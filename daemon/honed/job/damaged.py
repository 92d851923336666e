"""Damaged items of the spool: one that cannot be read, or is not what honed makes there, holds up no other. And damaged
files of honed's own state: all are begun anew, and kept beside for a person.

    counters.json ──► counters.json.damaged (.damaged-2, …)
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from honed.system import durable

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Errors that say of a file that it will not be read the next time either.
UNREADABLE = {errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG}


def is_of_item(error: Exception) -> bool:
    """Return True if an error is about the one item, and not a fault of the machine such as a full disk."""
    return durable.machine_fault(error) is None or getattr(error, "errno", None) in UNREADABLE


def twice(read: Callable[[], T]) -> T:
    """Return what a file of honed's own holds. After an error that would set it aside as damaged it is read once more:
    a disk may fail a single read."""
    try:
        return read()
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
    return read()


@contextlib.contextmanager
def passed_over(path: Path) -> Iterator[None]:
    """Run the recovery of one item. If that is damaged, it is logged and left as it is. Raises an exception for a fault
    of the machine: everything is recovered when it is over."""
    try:
        yield
    except Exception as error:
        if not is_of_item(error):
            raise
        log.exception("%s: not recovered, and left as it is", path)


def begun_anew(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """Return what a file of honed's own state says; None if there is none, or a damaged one, which is set aside. Raises
    an exception for a fault of the machine."""
    try:
        return parse(twice(lambda: durable.read(path)))
    except FileNotFoundError:
        return None
    except Exception as error:
        if not is_of_item(error):
            raise
        log.error("%s: damaged: %s; it is kept as %s, and begun anew", path, error, set_aside(path))  # noqa: TRY400
    return None


def set_aside(path: Path) -> Path:
    """Give a damaged file of honed's own a free name beside; return that. Raises OSError."""
    names = (f"{path.name}.damaged{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    place = next(place for name in names if not os.path.lexists(place := path.with_name(name)))
    path.rename(place)
    durable.sync_dir(path.parent)
    return place
