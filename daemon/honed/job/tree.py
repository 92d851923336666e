"""Trees of directories in which others can write: measured, and removed."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from honed.job.shape import Removed


@dataclass
class Count:
    """Bytes and files found or removed; `problem` is the first failure."""

    num_bytes: int = 0
    num_files: int = 0
    problem: str | None = None

    def add(self, info: os.stat_result) -> None:
        self.num_files += 1
        # A file with another hard link frees no space.
        self.num_bytes += info.st_size if info.st_nlink == 1 else 0

    def as_dict(self) -> Removed:
        return {"num_bytes": self.num_bytes, "num_files": self.num_files, "problem": self.problem}

    def complain(self, path: Path, error: OSError | str) -> None:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        self.problem = self.problem or f"{path}: {said}"[:300]


def measure(path: Path) -> Count:
    """Measure what lies below a directory; zero if it does not exist."""
    return _walk(path, remove=False)


def remove(path: Path) -> Count:
    """Remove a directory tree as far as possible. Not synced: files that a power cut brings back are removed again."""
    total = Count()
    for _ in range(3):  # a report may have been written into it meanwhile
        removed = _walk(path, remove=True)
        total = Count(total.num_bytes + removed.num_bytes, total.num_files + removed.num_files, removed.problem)
        if not removed.problem or not removed.num_files:
            break
    return total


def _walk(path: Path, *, remove: bool) -> Count:
    """Count or remove what a path names. All actions use descriptors, so that no link can redirect them, and two of
    them at any depth: a worker can nest directories as deep as it likes."""
    count = Count()
    try:
        device = path.lstat().st_dev
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with _Walk(fd, path, device, count, remove=remove) as walk:
            walk.run()
    except FileNotFoundError:
        pass
    except OSError as error:
        count.complain(path, error)
    return count


@dataclass
class _Level:
    """A directory that was entered: what identifies it, its name in the one above, and the names that are left."""

    info: os.stat_result
    name: str
    names: list[str]
    has_problem: bool = False


class _Walk:
    """A walk over a tree, from the directory above it."""

    def __init__(self, fd: int, path: Path, device: int, count: Count, *, remove: bool) -> None:
        self._fd = fd  # of the directory whose names are looked at
        self._path = path
        self._count = count
        self._remove = remove
        self._levels = [_Level(os.fstat(fd), "", [path.name])]
        self._device = device

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    def run(self) -> None:
        while True:
            level = self._levels[-1]
            if level.names:
                self._visit(level, level.names.pop())
            elif len(self._levels) > 1:
                self._leave()
            else:
                return

    def _visit(self, level: _Level, name: str) -> None:
        try:
            info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                self._enter(name, info)
                return
            if self._remove:
                os.unlink(name, dir_fd=self._fd)
            self._count.add(info)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._complain(level, name, error)

    def _enter(self, name: str, info: os.stat_result) -> None:
        if info.st_dev != self._device:
            self._complain(self._levels[-1], name, "another file system is mounted there")
            return
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            if self._remove and info.st_uid == os.geteuid() and info.st_mode & 0o300 != 0o300:
                os.fchmod(fd, stat.S_IMODE(info.st_mode) | 0o700)
            with os.scandir(fd) as entries:
                names = [entry.name for entry in entries]
            # plan.json last: it names the job's staged copies, and an interrupted removal still needs it.
            names.sort(key=lambda each: each != "plan.json")
            self._levels.append(_Level(os.fstat(fd), name, names))
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def _leave(self) -> None:
        """Return to the directory above, and remove the one that was left. Raises OSError if it was moved meanwhile."""
        left = self._levels.pop()
        fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        os.close(self._fd)
        self._fd = fd
        level = self._levels[-1]
        if not os.path.samestat(os.fstat(fd), level.info):
            raise OSError(errno.ESTALE, "a directory in it was moved meanwhile", str(self._path))
        if left.has_problem:
            level.has_problem = True
        elif self._remove:
            try:
                os.rmdir(left.name, dir_fd=fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._complain(level, left.name, error)

    def _complain(self, level: _Level, name: str, error: OSError | str) -> None:
        level.has_problem = True
        names = [each.name for each in self._levels[1:20]]
        self._count.complain(self._path.parent.joinpath(*names, name), error)
