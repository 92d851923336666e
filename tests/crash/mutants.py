"""Bugs that are planted in a honed, one at a time.

The tests of this directory must see each of them; else they would not see that bug in honed either.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import Any

_fsync = os.fsync


def _write_in_place(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_files_only(fd: int) -> None:
    if not Path(f"/proc/self/fd/{fd}").is_dir():
        _fsync(fd)


def _fsync_but(pattern: re.Pattern[str], fd: int) -> None:
    if not pattern.search(str(Path(f"/proc/self/fd/{fd}").readlink())):
        _fsync(fd)


def _move_after_removal(self: Any, job: Any, to: Any, **changes: Any) -> Any:
    from honed.system import durable

    if to.is_final:
        changes["ends"] = (*job.ends, changes.get("outcome", job.outcome) or to.value)
    with self._changed(job, to, changes) as moved:
        old, new = self.entries.path(job.id, job.state), self.entries.path(job.id, to)
        made = durable.write_beside(old, moved.to_json())
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
        durable.sync_dir(old.parent)
        made.rename(new)
        durable.sync_dir(new.parent)
    return moved


def plant(name: str) -> None:
    """One bug."""
    from honed.job import spool
    from honed.system import durable

    kind, _, pattern = name.partition(":")
    match kind:
        case "no_fsync":
            os.fsync = lambda _fd: None
        case "no_fsync_of":
            os.fsync = functools.partial(_fsync_but, re.compile(pattern))
        case "no_directory_fsync":
            os.fsync = _fsync_files_only
        case "write_in_place":
            durable.write = _write_in_place
        case "unlink_before_publish":
            spool.Spool.move = _move_after_removal  # type: ignore[method-assign]
        case _:
            raise ValueError(name)
