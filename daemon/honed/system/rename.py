"""Renames that Python has no name for: to a name that must be free, and of two names at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

#: Flags of renameat2(2).
_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100


def to_free(old: Path | str, new: Path | str, *, src_dir_fd: int = _AT_FDCWD, dst_dir_fd: int = _AT_FDCWD) -> None:
    """Rename a file to a name that must not exist. Raises FileExistsError if it does, and OSError.

    A file system that cannot do so in one step (NFS, FUSE) leaves a moment in which another may take the name.
    """
    if _rename(old, new, _NOREPLACE, src_dir_fd, dst_dir_fd):
        return
    with contextlib.suppress(FileNotFoundError):
        os.stat(new, dir_fd=_or_none(dst_dir_fd), follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(old), None, str(new))
    os.rename(old, new, src_dir_fd=_or_none(src_dir_fd), dst_dir_fd=_or_none(dst_dir_fd))


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False if that was not done."""
    return _rename(one, other, _EXCHANGE)


def _or_none(fd: int) -> int | None:
    return None if fd == _AT_FDCWD else fd


def _rename(
    old: Path | str, new: Path | str, flag: int, src_dir_fd: int = _AT_FDCWD, dst_dir_fd: int = _AT_FDCWD
) -> bool:
    """Rename with a flag of renameat2(2); return False if that was not done.

    NFS and FUSE do not support it. Any other problem occurs again in a plain rename, which reports it.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(src_dir_fd, os.fsencode(old), dst_dir_fd, os.fsencode(new), flag) == 0)
