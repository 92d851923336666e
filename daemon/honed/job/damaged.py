"""Damaged items of the spool: one that cannot be read, or is not what honed makes there, holds up no other."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from honed.system import durable

log = logging.getLogger(__name__)

#: Errors that say of a file that it will not be read the next time either.
UNREADABLE = {errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG}


def is_of_item(error: Exception) -> bool:
    """Return True if an error is about the one item, and not a fault of the machine such as a full disk."""
    return durable.machine_fault(error) is None or getattr(error, "errno", None) in UNREADABLE


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
