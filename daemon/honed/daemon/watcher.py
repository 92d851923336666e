"""Watches incoming/ and says which arrivals are whole.

inotify (through watchdog) only wakes the loop and gives hints: it loses events in an overflow without telling. The
scan is the truth. A file is whole when it was renamed in, or was closed and then lay still for a moment, or lay still
for `settle_sec` with no writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from watchdog.events import FileClosedEvent, FileMovedEvent, FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

log = logging.getLogger(__name__)

#: Seconds that a closed file must lie still: a shell's `>` and `>>` close and open again.
CLOSED_SETTLE_SEC = 0.25


@dataclass(frozen=True)
class _Sighting:
    """A file's identity and extent, and when it was first seen so (monotonic seconds)."""

    key: tuple[int, int, int]
    since: float


class Watcher:
    """One directory, watched. `wake` is called from another thread: it may only write to a pipe."""

    def __init__(
        self,
        directory: Path,
        *,
        settle_sec: float,
        wake: Callable[[], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self.settle_sec = settle_sec
        self._wake = wake
        self._now = now
        self._clock = clock
        self._made_at = (clock(), now())
        self._lock = threading.Lock()
        self._closed: set[str] = set()
        self._moved: set[str] = set()
        self._sightings: dict[str, _Sighting] = {}
        self._observer: BaseObserver | None = None
        self._inode: tuple[int, int] | None = None
        self._fault = ""  # why it cannot be watched; said once
        self._absent: set[str] = set()  # named by a hint, and not there at the last look

    @property
    def is_watching(self) -> bool:
        return self._observer is not None and self._observer.is_alive()

    def start(self) -> None:
        """Watch, or say why not, once: then the rescan carries on alone."""
        self._inode = self._identity()
        observer: BaseObserver | None = None
        try:
            observer = Observer()  # takes an inotify instance already
            observer.schedule(_Hints(self), str(self._directory))
            observer.start()
        except OSError as error:
            if observer is not None:
                _give_up(observer)
            # inotify(7): ENOSPC and EMFILE are limits of a user's, fs.inotify.max_user_watches and _instances.
            fault = error.strerror or str(error)
            if fault != self._fault:
                log.warning("%s: cannot be watched (%s); it is scanned instead", self._directory, fault)
            self._fault = fault
            return
        if self._fault:
            log.info("%s: watched again", self._directory)
        self._fault = ""
        self._observer = observer

    def stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer = None

    def rearm(self) -> None:
        """Watch again where the directory was replaced, which inotify does not tell."""
        if self._inode != self._identity():
            log.warning("%s was replaced; watching it again", self._directory)
            self.stop()
            self.start()
        elif not self.is_watching:  # a limit that was reached, or a thread that died
            self.stop()
            self.start()

    def _identity(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            info = self._directory.stat()
            return info.st_dev, info.st_ino
        return None

    def hint(self, event: FileSystemEvent) -> None:
        """One event, in watchdog's thread."""
        where = event.dest_path if isinstance(event, FileMovedEvent) else event.src_path
        name = Path(os.fsdecode(where)).name
        if name.startswith("."):
            return
        with self._lock:
            match event:
                case FileMovedEvent():
                    self._moved.add(name)
                case FileClosedEvent():
                    self._closed.add(name)
                case FileSystemEvent(event_type="created" | "modified" | "deleted"):
                    self._closed.discard(name)
                    if event.event_type == "deleted":
                        self._moved.discard(name)
                case _:
                    return
        self._wake()

    def forget(self, name: str) -> None:
        """The arrival is gone from the directory."""
        self._sightings.pop(name, None)
        with self._lock:
            self._closed.discard(name)
            self._moved.discard(name)

    def keep(self, names: set[str]) -> None:
        """Forget all arrivals but these, so that nothing is remembered for ever."""
        with self._lock:
            hinted = self._closed | self._moved
        # The word that a file is gone can be lost, too. What came a moment ago may be hinted and not listed yet.
        absent = hinted - names
        for name in [*(self._sightings.keys() - names), *(absent & self._absent)]:
            self.forget(name)
        self._absent = absent

    def is_whole(self, path: Path) -> bool:
        """Whether nobody is still writing this arrival, as far as can be known."""
        try:
            info = path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(info.st_mode):
            return True  # it will be refused; there is nothing to wait for
        with self._lock:
            was_moved, was_closed = path.name in self._moved, path.name in self._closed
        if was_moved:
            return True
        key, now = (info.st_ino, info.st_size, info.st_mtime_ns), self._clock()
        seen = self._sightings.get(path.name)
        if seen is None or seen.key != key:
            seen = self._sightings[path.name] = _Sighting(key, now)
        wanted = CLOSED_SETTLE_SEC if was_closed else self.settle_sec
        # What lay here before us need not wait. A clock that is set forward since makes nothing older.
        wall = min(self._now(), self._made_at[1] + now - self._made_at[0])
        lies_still = now - seen.since >= wanted or wall - info.st_mtime >= max(wanted, self.settle_sec)
        return lies_still and not _has_writer(path)


def _give_up(observer: BaseObserver) -> None:
    """End what was begun of an observer that cannot watch, or each new try would leave a thread and a descriptor."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError):
        observer.stop()


class _Hints(FileSystemEventHandler):
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def dispatch(self, event: FileSystemEvent) -> None:
        self._watcher.hint(event)


def _has_writer(path: Path) -> bool:
    """Whether a process holds the file open for writing; False where we may not ask (another's file)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(fd)
