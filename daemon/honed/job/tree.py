"""Trees of directories in which others can write: measured, and removed. Nothing else in honed removes a tree.

No link is followed, and no other file system entered, not even asked: one that hangs, of a user's own server, would
keep us for ever. Two descriptors are enough at any depth. What cannot be opened or removed is left, and the rest goes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from honed.job.shape import Removed
from honed.system import untrusted

#: Entries between two calls of `tick`.
TICK = 1000
MOUNTS_PATH = Path("/proc/self/mountinfo")


def no_tick() -> None:
    pass


class _Action(Enum):
    MEASURE = auto()
    REMOVE = auto()
    OPEN_UP = auto()


@dataclass
class Count:
    """Bytes and files found or removed; `problem` is the first failure. `is_left`: all that could not be removed has
    got another name (leftover.py)."""

    num_bytes: int = 0
    num_files: int = 0
    problem: str | None = None
    is_left: bool = False

    def plus(self, other: Count) -> Count:
        return Count(
            self.num_bytes + other.num_bytes,
            self.num_files + other.num_files,
            self.problem or other.problem,
            any(item.problem for item in (self, other)) and all(item.is_left for item in (self, other) if item.problem),
        )

    def add(self, info: os.stat_result) -> None:
        self.num_files += 1
        # A file with another hard link frees no space, and a hole takes none.
        self.num_bytes += min(info.st_size, info.st_blocks * 512) if info.st_nlink == 1 else 0

    def as_dict(self) -> Removed:
        return {"num_bytes": self.num_bytes, "num_files": self.num_files, "problem": self.problem}

    def complain(self, path: Path, error: OSError | str) -> None:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        self.problem = self.problem or f"{path}: {said}"[:300]


def measure(path: Path, tick: Callable[[], None] = no_tick, *, may_be_mounted: bool = True) -> Count:
    """Measure what lies below a directory; zero if it does not exist. `may_be_mounted`: False for one on which others
    can mount a file system, which is not entered then."""
    if not may_be_mounted and _is_mounted(path):
        return Count(problem=f"{path}: another file system is mounted there")
    return _walk(path, _Action.MEASURE, tick)


def _is_mounted(path: Path) -> bool:
    """Return True where something is mounted on what a path names; what is mounted is not asked."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return untrusted.is_mount(fd)
    finally:
        os.close(fd)


def remove(path: Path, tick: Callable[[], None] = no_tick) -> Count:
    """Remove what a path names, a directory with all below it, as far as possible. Not synced: files that a power cut
    brings back are removed again.

    `tick` is called now and then, and may raise to stop it.
    """
    total = Count()
    for _ in range(3):  # a report may have been written into it meanwhile
        removed = _walk(path, _Action.REMOVE, tick)
        total = Count(total.num_bytes + removed.num_bytes, total.num_files + removed.num_files, removed.problem)
        if not removed.problem or not removed.num_files:
            break
    return total


def clear(path: Path) -> None:
    """Remove what a path names. Raises OSError if something of it is left."""
    if (problem := remove(path).problem) is not None:
        raise OSError(errno.ENOTEMPTY, problem)


def open_up(path: Path) -> None:
    """Give the group of our own directories in a tree, whose files others are to remove, access to them."""
    _walk(path, _Action.OPEN_UP, no_tick)


def _walk(path: Path, action: _Action, tick: Callable[[], None] = no_tick) -> Count:
    """Count or remove what a path names. All actions use descriptors, so that no link can redirect them."""
    count = Count()
    try:
        device = path.lstat().st_dev
        # A name in it is all that is asked: who may only pass through it may remove what it has.
        fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        with _Walk(fd, path, device, count, action) as walk:
            walk.run(tick)
    except FileNotFoundError:
        pass
    except OSError as error:
        count.complain(path, error)
    return count


def mounts_below(path: Path) -> list[Path]:
    """Return the places below a directory where something is mounted, a file or a directory, each as often as that was
    done. Nothing that is mounted is asked."""
    above = os.path.realpath(path.parent).rstrip("/") + f"/{path.name}/"
    try:
        lines = MOUNTS_PATH.read_bytes().splitlines()
    except OSError:  # other file systems are recognized by their device, where they answer
        return []
    mounts = [re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in lines]
    return [Path(place) for place in map(os.fsdecode, mounts) if place.startswith(above)]


@dataclass
class _Level:
    """A directory that was entered: what identifies it, its name in the one above, and the names that are left."""

    info: os.stat_result
    name: str
    names: list[str]
    has_problem: bool = False


class _Walk:
    """A walk over a tree, from the directory above it."""

    def __init__(self, fd: int, path: Path, device: int, count: Count, action: _Action) -> None:
        self._fd = fd  # of the directory whose names are looked at
        self._path = path
        self._count = count
        self._action = action
        self._levels = [_Level(os.fstat(fd), "", [path.name])]
        self._device = device
        self._mounts = frozenset(place.name for place in mounts_below(path))
        self._num_seen = 0

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    def run(self, tick: Callable[[], None]) -> None:
        while True:
            self._num_seen += 1
            if self._num_seen % TICK == 0:
                tick()
            level = self._levels[-1]
            if level.names:
                self._visit(level, level.names.pop())
            elif len(self._levels) > 1:
                self._leave()
            else:
                return

    def _visit(self, level: _Level, name: str) -> None:
        try:
            if name in self._mounts and len(self._levels) > 1 and self._is_mount(name):
                self._complain(level, name, "another file system is mounted there")
                return
            info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                self._enter(name, info)
                return
            if self._action is _Action.REMOVE:
                os.unlink(name, dir_fd=self._fd)
            self._count.add(info)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._complain(level, name, error)

    def _is_mount(self, name: str) -> bool:
        """Return True where something is mounted; what is mounted is not asked."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return untrusted.is_mount(fd)
        finally:
            os.close(fd)

    def _open(self, name: str, info: os.stat_result) -> int:
        """Open a directory; one of our own is opened up first, to remove what is in it."""
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        wanted = {_Action.MEASURE: 0, _Action.REMOVE: 0o700, _Action.OPEN_UP: 0o770}[self._action]
        if info.st_uid != os.geteuid() or info.st_mode & wanted == wanted:
            return os.open(name, os.O_RDONLY | flags, dir_fd=self._fd)
        fd = os.open(name, os.O_PATH | flags, dir_fd=self._fd)
        try:
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(info.st_mode) | wanted)  # noqa: PTH101 - a descriptor
            return os.open(".", os.O_RDONLY | flags, dir_fd=fd)
        finally:
            os.close(fd)

    def _enter(self, name: str, info: os.stat_result) -> None:
        if info.st_dev != self._device:
            self._complain(self._levels[-1], name, "another file system is mounted there")
            return
        fd = self._open(name, info)
        try:
            # What may be listed and not entered has no way back.
            os.close(os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))
            with os.scandir(fd) as entries:
                names = [entry.name for entry in entries]
            # plan.json last: it names the job's copies, and an interrupted removal still needs it.
            names.sort(key=lambda item: item != "plan.json")
            self._levels.append(_Level(os.fstat(fd), name, names))
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def _leave(self) -> None:
        """Return to the directory above, and remove the one that was left. Raises OSError if it was moved meanwhile."""
        left = self._levels.pop()
        fd = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        os.close(self._fd)
        self._fd = fd
        level = self._levels[-1]
        if not os.path.samestat(os.fstat(fd), level.info):
            raise OSError(errno.ESTALE, "a directory in it was moved meanwhile", str(self._path))
        if left.has_problem:
            level.has_problem = True
        elif self._action is _Action.REMOVE:
            try:
                os.rmdir(left.name, dir_fd=fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._complain(level, left.name, error)

    def _complain(self, level: _Level, name: str, error: OSError | str) -> None:
        level.has_problem = True
        names = [item.name for item in self._levels[1:20]]
        self._count.complain(self._path.parent.joinpath(*names, name), error)
