"""Safe access to files in a job's directory, which its worker can change, by programs with more permissions.

Whoever can write `attempts/<n>/events.jsonl` can replace it, or a directory above it, by a link to another user's file,
by a pipe that blocks whoever opens it, or by an endless file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from honed.system import durable

#: Bytes of a file that is read at once: a result, an exit. Ours have some kilobytes.
MAX_BYTES = 16 * 1024 * 1024
#: Number of names at the end of a path that the worker can change: `attempts/<n>/<file>`.
NUM_NAMES = 3


def open_plain(path: Path, *, flags: int = os.O_RDONLY, mode: int = 0o644, num_names: int = NUM_NAMES) -> int:
    """Open a regular file without blocking and without following links in the last `num_names` names of its path;
    return its descriptor.

    Raises OSError if it is not a regular file.
    """
    with directory(path, num_names=num_names) as directory_fd:
        fd = os.open(
            path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode, dir_fd=directory_fd
        )
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


@contextlib.contextmanager
def directory(path: Path, *, num_names: int) -> Iterator[int]:
    """Open the directory of a file without following links in the last `num_names` names of the file's path."""
    root, *names = path.absolute().parts
    directory_fd = os.open(Path(root, *names[:-num_names]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in names[-num_names:-1]:
            fd = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
            os.close(directory_fd)
            directory_fd = fd
        yield directory_fd
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(directory_fd)


def remove(path: Path, *, num_names: int = NUM_NAMES) -> None:
    """Remove a file, if it is there; a link in the last `num_names` names of its path is not followed. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError), directory(path, num_names=num_names) as directory_fd:
        os.unlink(path.name, dir_fd=directory_fd)


def read_plain(path: Path, *, max_bytes: int = MAX_BYTES, num_names: int = NUM_NAMES) -> bytes:
    """Return a regular file's content. Raises OSError if it is not one, or larger than `max_bytes`."""
    with open(open_plain(path, num_names=num_names), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def write_plain(path: Path, data: bytes, *, mode: int = 0o644, num_names: int = NUM_NAMES) -> None:
    """Replace a file durably and atomically; a link in the last `num_names` names of its path is not followed. Raises
    OSError."""
    new = f".{path.name}.new"
    with directory(path, num_names=num_names) as directory_fd:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=directory_fd)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=directory_fd)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(new, path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        os.fsync(directory_fd)


def sync_plain(path: Path, *, num_names: int = NUM_NAMES) -> None:
    """Make a regular file durable, whoever wrote it. Raises OSError if it is not one."""
    durable.sync_and_close(open_plain(path, num_names=num_names))
