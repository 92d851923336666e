"""Files that survive a power cut: written whole beside, synced, renamed, and the directory synced."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The same, of SQLite.
SQLITE_FAULTS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}

#: What an operation fails with when the machine is at fault: it can be mended while we run, and no restart mends it.
MACHINE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


def machine_fault(error: BaseException) -> str | None:
    """What is wrong with the machine, in a few words, where that is what an exception says; else None."""
    match error:
        case OSError(errno=int(number)) if number in MACHINE_ERRNOS:
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{os.strerror(number)}"
        case sqlite3.OperationalError() if getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_FAULTS:
            return f"the database: {error}"
        case _:
            return None


def is_no_room(error: BaseException) -> bool:
    """Whether an exception says that a disk or somebody's share of it is full."""
    match error:
        case OSError(errno=int(number)):
            return number in {errno.ENOSPC, errno.EDQUOT}
        case sqlite3.OperationalError():
            return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        case _:
            return False


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_beside(path: Path, data: bytes, *, mode: int = 0o644) -> Path:
    """Write `data` to a hidden file beside `path`, synced; the caller renames it. Returns the hidden file's path."""
    temporary = path.with_name(f".{path.name}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, mode)
    except FileExistsError:
        # A crash left it; or, in a job's directory, its worker: a pipe, or a file that it holds open.
        temporary.unlink()
        fd = os.open(temporary, flags, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    return temporary


def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`: after a crash there is the old file or the new one, never a part."""
    write_beside(path, data, mode=mode).rename(path)
    sync_dir(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), mode=mode)


def make_dir(path: Path, *, mode: int = 0o755) -> None:
    """Make a directory and the missing ones above it, each durable in its parent.

    A mode that lets the group write is meant, whatever our umask: workers of another user write there.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        # Not by chmod: without the setgid bit in its mode it clears an inherited one, and with it a sandbox refuses it.
        with _umask(0o777 & ~mode) if mode & 0o020 else contextlib.nullcontext():
            directory.mkdir(mode=mode, exist_ok=True)
        sync_dir(directory.parent)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
