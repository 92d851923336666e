"""The real daemon with the fake worker, in which file operations fail: `python errnohoned.py ROOT`.

`HONED_TEST_ORDER` names a file of `ORDER`, which another process writes at any time: the error that operations fail
with now (0 is none), the most that fail, the seed of which do, and, where it is not 0, the one that fails in their
order. `HONED_TEST_INJECTED` names a file that gets a line
of JSON for each operation that failed. An operation is a function of Python's os, or an `open`, on a path below the
instance's var/. With one error each kind of operation on each kind of path fails once, then is let through; so nothing
fails for ever.
"""

from __future__ import annotations

import fcntl
import functools
import json
import mmap
import os
import random
import re
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm
from honed.daemon import dispatch, fencing, health, housekeeper, loop
from honed.run import removal_process
from honed.run.process import ProcessRunner
from honed.system import device, log
from honed.system.layout import Layout

#: The error's number, how many fail at most, the seed, and the only one.
ORDER = struct.Struct("iIII")
#: What takes a path, what takes two, and what takes a descriptor.
BY_PATH = (
    "stat",
    "lstat",
    "open",
    "unlink",
    "remove",
    "mkdir",
    "rmdir",
    "listdir",
    "scandir",
    "utime",
    "chmod",
    "chown",
)
BY_PATH += ("truncate", "statvfs", "getxattr", "setxattr", "listxattr", "readlink")
BY_PATHS = ("rename", "replace", "link", "symlink")
BY_FD = (
    "fsync",
    "fdatasync",
    "write",
    "pwrite",
    "read",
    "pread",
    "fstat",
    "ftruncate",
    "fchmod",
    "fchown",
    "copy_file_range",
)
#: The pauses before honed tries again what failed: as long as they are they suit a disk that stays broken.
PAUSES = (
    (health, "MAX_BROKEN_PAUSE_SEC"),
    (dispatch, "NOT_NOW_SEC"),
    (dispatch, "RETRY_SEC"),
    (fencing, "RETRY_SEC"),
    (removal_process, "RETRY_SEC"),
    (housekeeper, "RETRY_SEC"),
)
#: Of the operations that could fail, one in so many does.
SHARE = 4


class Faults:
    """What decides which operation fails."""

    def __init__(self, root: Path, order_path: Path, record_path: Path) -> None:
        self._below = f"{root}/var/"
        with order_path.open("r+b") as file:
            self._order = mmap.mmap(file.fileno(), ORDER.size)
        self._record_fd = os.open(record_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write, self._readlink = os.write, os.readlink
        self._lock = threading.RLock()
        self._is_inside = False
        self._seed = self._num_failed = 0
        self._chance = random.Random(0)
        self._met: set[tuple[str, str, int]] = set()

    def look(self, function: str, path: str | None) -> None:
        """Raise OSError if this operation is to fail."""
        number, most, seed, only = ORDER.unpack(self._order[:])
        if not number or path is None or not path.startswith(self._below):
            return
        with self._lock:
            if self._is_inside:
                return
            if seed != self._seed:
                self._seed, self._num_failed, self._chance = seed, 0, random.Random(seed)
            site = (function, kind_of(path.removeprefix(self._below)), number)
            if self._num_failed == most or site in self._met or (not only and self._chance.randrange(SHARE)):
                return
            self._met.add(site)
            if only and len(self._met) != only:
                return
            self._num_failed += 1
            self._is_inside = True
            try:
                self._record(site, path)
            finally:
                self._is_inside = False
        raise OSError(number, os.strerror(number), path)

    def _record(self, site: tuple[str, str, int], path: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/honed/" in frame.filename]
        callers = [f"{Path(frame.filename).stem}:{frame.lineno}" for frame in frames[-6:]]
        line = {"function": site[0], "kind": site[1], "errno": site[2], "path": path, "callers": callers}
        self._write(self._record_fd, json.dumps(line).encode() + b"\n")

    def path_of(self, what: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path of what is given to a function of os; None for what is no file of a directory."""
        if isinstance(what, int):
            try:
                found = self._readlink(f"/proc/self/fd/{what}")
            except OSError:
                return None
            return found if found.startswith("/") else None
        path = os.fsdecode(os.fspath(what)) if isinstance(what, str | bytes | os.PathLike) else None
        if path is None or path.startswith("/"):
            return path
        directory = self.path_of(dir_fd) if dir_fd is not None else None
        return f"{directory}/{path}" if directory else None

    def plant(self) -> None:
        """Have the functions of os fail, and `open` and the locks by their audit events."""
        for name in (*BY_PATH, *BY_FD):
            self._wrap(name, lambda arguments, keys: self.path_of(arguments[0], keys.get("dir_fd")))
        for name in BY_PATHS:
            self._wrap(name, lambda arguments, keys: self.path_of(arguments[1], keys.get("dst_dir_fd")))

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and arguments[1] is not None:  # os.open has no mode
                self.look("open", self.path_of(arguments[0]) if not isinstance(arguments[0], int) else None)
            elif event == "fcntl.flock":
                self.look("flock", self.path_of(arguments[0]))

        sys.addaudithook(hook)

    def _wrap(self, name: str, path_of: Callable[[Any, Any], str | None]) -> None:
        real = getattr(os, name)

        @functools.wraps(real)
        def failing(*arguments: Any, **keys: Any) -> Any:
            if arguments and ORDER.unpack(self._order[:])[0]:
                self.look(name, path_of(arguments, keys))
            return real(*arguments, **keys)

        setattr(os, name, failing)
        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in functions:
                functions.add(failing)


def kind_of(path: str) -> str:
    """What a path below var/ is, whatever its number: `spool/honed/running/N.json`."""
    path = re.sub(r"(?<=[./-])[0-9a-f]{8}(?=[./]|$)", "X", path)
    return re.sub(r"\d+", "N", re.sub(r"(incoming|rejected)/.*?(\.\w+)?$", r"\1/NAME\2", path))


def main() -> int:
    layout = Layout(Path(sys.argv[1]))
    log.set_up(verbose=False)
    for module, name in PAUSES:
        assert hasattr(module, name)
        setattr(module, name, 0.05)
    command = [sys.executable, str(Path(__file__).parents[1] / "process/fakeworker.py")]
    popen = warm.Popen if warm.warm_children() else warm.COLD_POPEN
    runner = ProcessRunner(layout, command=command, popen=popen)
    names = ("HONED_TEST_ORDER", "HONED_TEST_INJECTED")
    order_path, record_path = (Path(os.environ[name]) for name in names)
    assert fcntl  # its audit events need it imported
    Faults(layout.root, order_path, record_path).plant()
    return loop.start(layout, runner=runner, probe=lambda _gpus: [device.cpu()], drain="--drain" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
