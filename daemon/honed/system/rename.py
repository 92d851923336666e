"""Renames that Python has no name for: to a name that must be free, and of two names at once."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

#: Flags of renameat2(2).
_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100


def to_free(old: Path, new: Path) -> None:
    """Rename a file to a name that must not exist. Raises FileExistsError if it does, and OSError.

    A file system that cannot do so in one step (NFS, FUSE) leaves a moment in which another may take the name.
    """
    if _rename(old, new, _NOREPLACE):
        return
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(old), None, str(new))
    old.rename(new)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False if that was not done."""
    return _rename(one, other, _EXCHANGE)


def _rename(old: Path, new: Path, flag: int) -> bool:
    """Rename with a flag of renameat2(2); return False if that was not done.

    NFS and FUSE do not support it. Any other problem occurs again in a plain rename, which reports it.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flag) == 0)
