"""Files that survive a power cut: written to a temporary file beside, synced, renamed, and the directory synced."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
#: File operations as a generator that yields what must be durable before it continues: descriptors, directories.
Steps = Generator[list[int | Path], None, T]
#: Threads that sync: a journaling file system makes concurrent syncs durable in one commit.
NUM_SYNCS_AT_ONCE = 16

#: The same for SQLite.
SQLITE_FAULTS = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,  # another program holds a lock: only that program's end helps
}

#: Errors that a submitter can cause: by what lies at a path or is missing there, by what kind of file it is, or at the
#: other end of a pipe or socket. Every other one at honed's own paths means that the machine is at fault: it can be
#: fixed while honed runs, a restart does not help, and no job fails for it.
PERSONS_ERRNOS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EMLINK, errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.ESPIPE, errno.EFBIG, errno.EOVERFLOW),
    *(errno.ETXTBSY, errno.EILSEQ, errno.EAGAIN, errno.EXDEV),
    *(errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN),
}
#: Errors that an owner can cause on the own files by their permissions. On honed's own they are the machine's fault.
OWNERS_ERRNOS = {errno.EACCES, errno.EPERM}


def machine_fault(error: BaseException) -> str | None:
    """Return a short description if an exception means that the machine is at fault, else None."""
    match error:
        case OSError(errno=int(number)) if number not in PERSONS_ERRNOS:
            where = f"{error.filename}: " if error.filename else ""
            return f"{where}{os.strerror(number)}"
        case MemoryError():
            return os.strerror(errno.ENOMEM)
        case sqlite3.OperationalError() if getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_FAULTS:
            return f"the database: {error}"
        case _:
            return None


def fault_at_persons(error: BaseException) -> str | None:
    """Do as `machine_fault`, of a file that its owner can close to honed: that is not the machine's fault."""
    return None if getattr(error, "errno", None) in OWNERS_ERRNOS else machine_fault(error)


def cause_at_persons(error: BaseException) -> OSError | None:
    """Return the error of the system for which, in the end, an exception was raised, if `fault_at_persons` says that
    the machine is at fault. Subclasses of libraries are left out: those of PyAV say that a file is broken."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and type(cause).__module__ == "builtins" and fault_at_persons(cause):
            return cause
        cause = cause.__cause__
    return None


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    sync_and_close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    sync_and_close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def sync_and_close(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def below(directory: Path) -> Iterator[Path]:
    """Yield everything below a directory. Raises OSError for unreadable directories, which Path.rglob skips silently:
    files that must be made durable would be missed.
    """
    for place, directories, files in os.walk(directory, onerror=_raise):
        yield from (Path(place, name) for name in (*directories, *files))


def num_bytes_below(directory: Path) -> int:
    """Return the bytes of the regular files below a directory; 0 if they cannot be read."""
    try:
        infos = [path.lstat() for path in below(directory)]
    except OSError:
        return 0
    return sum(info.st_size for info in infos if stat.S_ISREG(info.st_mode))


def remove_flat(directory: Path) -> None:
    """Remove a directory of files, which only honed has written in. Raises OSError if it has a directory, after its
    files were removed."""
    with contextlib.suppress(FileNotFoundError):
        for path in list(directory.iterdir()):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                path.unlink()
        directory.rmdir()


def _raise(error: OSError) -> None:
    raise error


def read(path: Path) -> bytes:
    """Return the content of a file of honed's own. Raises OSError, also for what is no file, such as a pipe, and for a
    link that leads nowhere."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a link that leads nowhere", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of the data to a descriptor: one call may take a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _create_beside(path: Path, data: bytes, *, mode: int) -> tuple[Path, int]:
    """Create a hidden file beside `path` that holds `data`, not synced yet; return its path and descriptor."""
    temporary = path.with_name(f".{path.name}.tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        fd = os.open(temporary, flags, mode)
    except FileExistsError:
        # Left by a crash, or, in a job's directory, put there by its worker: a pipe, a file that it holds open, a
        # directory.
        try:
            temporary.unlink()
        except (IsADirectoryError, PermissionError):
            temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        fd = os.open(temporary, flags, mode)
    try:
        write_all(fd, data)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return temporary, fd


def write_beside(path: Path, data: bytes, *, mode: int = 0o644) -> Path:
    """Write `data` to a hidden file beside `path`, synced; the caller renames it. Returns the hidden file's path."""
    return finish(writing_beside(path, data, mode=mode))


def writing_beside(path: Path, data: bytes, *, mode: int = 0o644) -> Steps[Path]:
    temporary, fd = _create_beside(path, data, mode=mode)
    try:
        yield [fd]
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    return temporary


def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace a file's content atomically and durably: after a crash, `path` has the old content or the new."""
    finish(writing(path, data, mode=mode))


def writing(path: Path, data: bytes, *, mode: int = 0o644) -> Steps[None]:
    """Yield the steps of `write`."""
    temporary = yield from writing_beside(path, data, mode=mode)
    try:
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    yield [path.parent]


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write(path, as_json(value), mode=mode)


def json_object(read: Callable[[], bytes], parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """Return the object that a file has as JSON; empty if the file cannot be read, or has no object."""
    try:
        document = parse(read())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def make_dir(path: Path, *, mode: int = 0o755) -> None:
    """Create a directory and its missing parents, each durable in its own parent.

    A group-writable mode applies regardless of our umask: workers of another user write there.
    """
    finish(making_dir(path, mode=mode))


def making_dir(path: Path, *, mode: int = 0o755) -> Steps[None]:
    """Yield the steps of `make_dir`."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        # Not with chmod: without the setgid bit in its mode it clears an inherited one, and with it a sandbox refuses
        # it.
        with _umask(0o777 & ~mode) if mode & 0o020 else contextlib.nullcontext():
            directory.mkdir(mode=mode, exist_ok=True)
        yield [directory.parent]


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# -- one after another, or side by side --------------------------------------------------------------------------------


def finish(work: Steps[T]) -> T:
    """Run one operation to its end."""
    try:
        wanted = next(work)
        while True:
            try:
                for item in wanted:
                    _sync(item)
            except OSError as error:
                wanted = work.throw(error)
            else:
                wanted = next(work)
    except StopIteration as end:
        result: T = end.value
        return result


def finish_all(works: Sequence[Steps[T]]) -> list[T | Exception]:
    """Run many operations in parallel, step by step: what they all wait for is synced together, each path once.

    An error ends only the operation that met it, and is returned in place of its result.
    """
    if len(works) == 1:
        try:
            return [finish(works[0])]
        except Exception as error:  # noqa: BLE001 - the caller handles it
            return [error]
    results: dict[int, T | Exception] = {}
    faults: dict[int, OSError] = {}
    while len(results) < len(works):
        wanted: dict[int, list[int | Path]] = {}
        for number, work in enumerate(works):
            if number in results:
                continue
            try:
                wanted[number] = work.throw(faults[number]) if number in faults else next(work)
            except StopIteration as end:
                results[number] = end.value
            except Exception as error:  # noqa: BLE001 - the caller handles it
                results[number] = error
        places = list(dict.fromkeys(item for many in wanted.values() for item in many))
        if not places:
            continue
        broken = dict(zip(places, _pool().map(_fault_of_sync, places), strict=True))
        errors = {
            number: next((broken[item] for item in many if broken[item]), None) for number, many in wanted.items()
        }
        faults = {number: error for number, error in errors.items() if error is not None}
    return [results[number] for number in range(len(works))]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_SYNCS_AT_ONCE, thread_name_prefix="sync")


def _fault_of_sync(what: int | Path) -> OSError | None:
    try:
        _sync(what)
    except OSError as error:
        return error
    return None


def _sync(what: int | Path) -> None:
    if isinstance(what, int):
        os.fsync(what)
    else:
        sync_dir(what)
