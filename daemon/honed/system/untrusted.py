"""The one way to files that a person made or can replace, for programs with more permissions than that person.

Whoever can write `attempts/<n>/events.jsonl` can replace it, or a directory above it, by a link to another user's file,
by a pipe that blocks whoever opens it, by an endless file, or by a file system of their own that never answers.

So nothing here follows a link below the root of a `PersonPath`, opens what is not a regular file, reads more than it
was asked to, waits, or enters a mount. Each name is first looked up without opening it (O_PATH). Whether something is
mounted there is then asked of the kernel alone (AT_STATX_DONT_SYNC): a file system in user space could delay even
fstat(2). What passes is opened through its descriptor in /proc, so that no other file can take its place meanwhile.
openat2(2) could do part of this, but RestrictSUIDSGID= forbids it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat
from collections.abc import Container, Iterable, Iterator

from honed.system import durable
from honed.system import rename as renames
from honed.system.durable import Steps
from honed.system.personpath import PersonPath

#: Bytes of a file that is read at once: a result, an exit. Ours have some kilobytes.
MAX_BYTES = 16 * 1024 * 1024
#: How a log is opened that several processes write.
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
#: Names of a directory that are read at once.
MAX_NAMES = 10_000
#: Of statx(2), since Linux 5.8 and glibc 2.28; where they are missing, mounts are not noticed.
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000
_MOUNT_ROOT = 0x2000
_MOUNTED = "another file system is mounted there"
#: Errors of removing what has a name that a person can keep: a directory, another user's file, a mount.
_KEEPS_NAME = {errno.EISDIR, errno.EPERM, errno.EACCES, errno.EBUSY}


def open_plain(
    path: PersonPath, *, flags: int = os.O_RDONLY, mode: int = 0o644, owners: Container[int] | None = None
) -> int:
    """Open a regular file; return its descriptor. With O_CREAT it is created if it is missing.

    Raises OSError: ELOOP for a link, EXDEV for a mount, EINVAL for what is not a regular file, or belongs to none of
    the `owners`.
    """
    with _named(path), _parent(path) as place:
        if flags & os.O_CREAT:
            try:
                return os.open(path.name, flags | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=place)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
        with _looked_up(place, path.name, path) as fd:
            info = os.fstat(fd)
            if stat.S_ISLNK(info.st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if owners is not None and not path.is_own and info.st_uid not in owners:
                raise OSError(errno.EINVAL, f"a file of the user {info.st_uid}")
            return _opened(fd, flags & ~(os.O_CREAT | os.O_EXCL))


def read_plain(path: PersonPath, *, max_bytes: int = MAX_BYTES, owners: Container[int] | None = None) -> bytes:
    """Return a regular file's content. Raises OSError like `open_plain`, and EFBIG for more than `max_bytes`."""
    with os.fdopen(open_plain(path, owners=owners), "rb") as file, _named(path):
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return data


def write_plain(path: PersonPath, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file durably and atomically, whatever it was. Raises OSError."""
    durable.finish(writing(path, data, mode=mode))


def write_beside(path: PersonPath, data: bytes, *, mode: int = 0o644) -> PersonPath:
    """Write `data` to a hidden file beside `path`, synced; the caller renames it. Returns the hidden file's path."""
    with _named(path), directory(path.parent) as place:
        new, fd = _create_beside(place, path.name, mode)
        try:
            durable.write_all(fd, data)
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=place)
            raise
        finally:
            os.close(fd)
    return path.with_name(new)


def writing(path: PersonPath, data: bytes, *, mode: int = 0o644) -> Steps[None]:
    """Yield the steps of `write_plain`."""
    with directory(path.parent) as place, _named(path):
        new, fd = _create_beside(place, path.name, mode)
        try:
            try:
                durable.write_all(fd, data)
                yield [fd]
            finally:
                os.close(fd)
            os.rename(new, path.name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=place)
            raise
        yield [place]


def _create_beside(place: int, name: str, mode: int) -> tuple[str, int]:
    """Create a hidden file beside `name`; return its name and descriptor."""
    flags, new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, f".{name}.tmp"
    try:
        return new, os.open(new, flags, mode, dir_fd=place)
    except FileExistsError:  # left by a crash, or put there by a person
        try:
            os.unlink(new, dir_fd=place)
        except OSError as error:
            if error.errno not in _KEEPS_NAME:
                raise
            new = f".{name}.{os.urandom(4).hex()}.tmp"
        return new, os.open(new, flags, mode, dir_fd=place)


def sync_plain(path: PersonPath) -> None:
    """Make a regular file durable, whoever wrote it. Raises OSError like `open_plain`."""
    durable.sync_and_close(open_plain(path))


def sync_dir(path: PersonPath) -> None:
    """Make the names in a directory durable."""
    with directory(path) as fd:
        os.fsync(fd)


def info(path: PersonPath) -> os.stat_result:
    """Return what lstat(2) tells of a path. Raises OSError, EXDEV for a mount."""
    if not path.names:
        return path.root.stat()
    with _named(path), _parent(path) as place, _looked_up(place, path.name, path) as fd:
        return os.fstat(fd)


def exists(path: PersonPath) -> bool:
    """Return True if there is something of this name, be it a link that leads nowhere or a mount. Raises OSError."""
    try:
        info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    return True


def is_dir(path: PersonPath) -> bool:
    """Return True for a directory; False for a link to one, a mount, and if that cannot be seen."""
    try:
        return stat.S_ISDIR(info(path).st_mode)
    except OSError:
        return False


def infos(path: PersonPath, names: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what lstat(2) tells of these names in a directory; those that are gone, or mounts, are left out."""
    with _named(path), _looked_up_all(path) as place:
        for name in names:
            try:
                with _looked_up(place, name, path) as fd:
                    info = os.fstat(fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.EXDEV:
                    continue
                raise
            yield name, info


def names_in(path: PersonPath, *, limit: int | None = MAX_NAMES) -> list[str]:
    """Return up to `limit` names in a directory, in no order. Raises OSError."""
    with directory(path) as fd, os.scandir(fd) as entries:
        return [item.name for item in itertools.islice(entries, limit)]


def remove(path: PersonPath) -> None:
    """Remove a file, if it is there; a link is removed itself. Raises OSError, IsADirectoryError for a directory."""
    with contextlib.suppress(FileNotFoundError), _named(path), _parent(path) as place:
        os.unlink(path.name, dir_fd=place)


def make_dir(path: PersonPath, *, mode: int = 0o755) -> None:
    """Create a directory; its parent must exist. Raises OSError, FileExistsError if the name is taken."""
    with _named(path), _parent(path) as place:
        os.mkdir(path.name, mode, dir_fd=place)


def make_dirs(path: PersonPath) -> None:
    """Create a directory and its missing parents, each durable in its own parent. Raises OSError, FileExistsError if
    there is something else."""
    if not path.names:
        durable.make_dir(path.root)
    elif not _is_dir_there(path):
        make_dirs(path.parent)
        try:
            make_dir(path)
        except FileExistsError:
            if not _is_dir_there(path):
                raise
        sync_dir(path.parent)


def _is_dir_there(path: PersonPath) -> bool:
    """Return True for a directory. Raises OSError where the machine, and not the owner, keeps it from being seen: it is
    not taken for something else."""
    try:
        return stat.S_ISDIR(info(path).st_mode)
    except OSError as error:
        if durable.machine_fault(error) and error.errno not in durable.OWNERS_ERRNOS:
            raise
        return False


def rename(old: PersonPath, new: PersonPath) -> None:
    """Rename what is there, replacing what has the new name. Raises OSError."""
    with _named(old), _parent(old) as source, _parent(new) as target:
        os.rename(old.name, new.name, src_dir_fd=source, dst_dir_fd=target)


def rename_to_free(old: PersonPath, new: PersonPath) -> None:
    """Rename what is there to a name that must not exist. Raises FileExistsError if it does, and OSError."""
    with _named(new), _parent(old) as source, _parent(new) as target:
        renames.to_free(old.name, new.name, src_dir_fd=source, dst_dir_fd=target)


@contextlib.contextmanager
def directory(path: PersonPath) -> Iterator[int]:
    """Open a directory, for its names. Raises OSError: NotADirectoryError for a link, EXDEV for a mount."""
    with _named(path), _looked_up_all(path) as looked:
        fd = _opened(looked, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def parent(path: PersonPath) -> Iterator[int]:
    """Look up the directory that a path is in: a descriptor for `dir_fd=`, which can neither be listed nor synced."""
    with _named(path), _parent(path) as fd:
        yield fd


def _parent(path: PersonPath) -> contextlib.AbstractContextManager[int]:
    return _looked_up_all(path.parent)


@contextlib.contextmanager
def _looked_up_all(path: PersonPath) -> Iterator[int]:
    """Look up every name below the root."""
    fd = os.open(path.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.names:
            above, fd = fd, _look_up(fd, name, path)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _looked_up(place: int, name: str, path: PersonPath) -> Iterator[int]:
    fd = _look_up(place, name, path)
    try:
        yield fd
    finally:
        os.close(fd)


def _look_up(place: int, name: str, path: PersonPath) -> int:
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
    if not path.is_own and is_mount(fd):
        os.close(fd)
        raise OSError(errno.EXDEV, _MOUNTED)
    return fd


def _opened(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


@contextlib.contextmanager
def _named(path: PersonPath) -> Iterator[None]:
    """Let errors name the whole path, and what keeps a name from being replaced or removed, if it is a mount."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        if error.errno == errno.EBUSY and _is_mounted(path):
            raise OSError(errno.EXDEV, _MOUNTED, str(path)) from error
        raise


def _is_mounted(path: PersonPath) -> bool:
    """Return True if a person has mounted something over a path."""
    try:
        info(path)
    except OSError as error:
        return error.errno == errno.EXDEV
    return False


# -- mounts -----------------------------------------------------------------------------------------------------------


class _Statx(ctypes.Structure):
    """The beginning of `struct statx`."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("attributes", ctypes.c_uint64),
        ("rest", ctypes.c_uint8 * 240),
    )


_statx = getattr(ctypes.CDLL(None), "statx", None)


def is_mount(fd: int) -> bool:
    """Return True if a descriptor is the root of a mount."""
    statx = _Statx()
    if _statx is None or _statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, 0, ctypes.byref(statx)) != 0:
        return False
    return bool(statx.attributes & _MOUNT_ROOT)
