"""Watches incoming/ and tells which arrivals are complete.

inotify (through watchdog) only wakes the loop and gives hints: it loses events in an overflow without reporting it. The
scan is authoritative. A file is complete if it was renamed in, or was closed and then unchanged for a moment, or
unchanged for `settle_sec` with no writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from watchdog.events import (
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import BaseObserver
from watchdog.observers.inotify import InotifyObserver

from honed.system import untrusted
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Seconds that a closed file must stay unchanged: a shell's `>` and `>>` close and open again.
CLOSED_SETTLE_SEC = 0.25


#: Kinds of events that are asked for. Files that are opened, read and closed are not: honed itself opens each arrival.
_KINDS: list[type[FileSystemEvent]] = [
    FileClosedEvent,
    FileMovedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileDeletedEvent,
]


@dataclass(frozen=True)
class _Sighting:
    """A file's identity and extent, and when it was first seen with these (monotonic seconds)."""

    key: tuple[int, int, int]
    since: float


class Watcher:
    """A watched directory. `wake` is called from another thread: it may only write to a pipe."""

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
        self._hinted: dict[str, None] = {}  # closed or moved in since `take_hinted`, in the order of the last events
        self._sightings: dict[str, _Sighting] = {}
        self._observer: BaseObserver | None = None
        self._inode: tuple[int, int] | None = None
        self._fault = ""  # why it cannot be watched; logged once
        self._absent: set[str] = set()  # named by a hint, and absent at the last listing

    @property
    def is_watching(self) -> bool:
        return self._observer is not None and self._observer.is_alive()

    def start(self) -> None:
        """Start watching, or log once why that fails: then the rescan works alone."""
        self._inode = self._identity()
        observer: BaseObserver | None = None
        try:
            # Otherwise a file that is moved in from another directory is one that was created.
            observer = InotifyObserver(generate_full_events=True)  # an inotify instance is already taken here
            observer.schedule(_Hints(self), str(self._directory), event_filter=_KINDS)
            observer.start()
        except OSError as error:
            if observer is not None:
                _give_up(observer)
            # inotify(7): ENOSPC and EMFILE are limits of a user's, fs.inotify.max_user_watches and _instances.
            fault = error.strerror or str(error)
            if fault != self._fault:
                log.warning("%s: cannot be watched (%s); scanning it instead", self._directory, fault)
            self._fault = fault
            return
        if self._fault:
            log.info("%s: watching it again", self._directory)
        self._fault = ""
        self._observer = observer

    def stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer = None

    def rearm(self) -> None:
        """Watch again if the directory was replaced, which inotify does not report."""
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
        """Record one event, in watchdog's thread."""
        is_move = isinstance(event, FileMovedEvent)
        arrived = event.dest_path if is_move else event.src_path if isinstance(event, FileClosedEvent) else ""
        changed = event.src_path if event.event_type in ("moved", "created", "modified", "deleted") else ""
        arrived_name, changed_name = (Path(os.fsdecode(each)).name for each in (arrived, changed))
        with self._lock:
            if _is_shown(changed_name):
                self._closed.discard(changed_name)
                if event.event_type != "modified":
                    self._moved.discard(changed_name)
                    self._hinted.pop(changed_name, None)
            if _is_shown(arrived_name):
                (self._moved if is_move else self._closed).add(arrived_name)
                self._hinted.pop(arrived_name, None)
                self._hinted[arrived_name] = None
        if _is_shown(changed_name) or _is_shown(arrived_name):
            self._wake()

    def take_hinted(self) -> list[str]:
        """Return the files that were closed or moved in since the last call, in the order of their last events."""
        with self._lock:
            hinted, self._hinted = self._hinted, {}
        return list(hinted)

    def forget(self, name: str) -> None:
        """Forget an arrival that has left the directory. An event since `take_hinted` may be of a new one."""
        self._sightings.pop(name, None)
        with self._lock:
            if name not in self._hinted:
                self._closed.discard(name)
                self._moved.discard(name)

    def keep(self, names: Set[str]) -> None:
        """Forget all arrivals but these, so that the records do not grow for ever."""
        with self._lock:
            hinted = (self._closed | self._moved) - self._hinted.keys()
        # The event of a removed file can be lost, too. A file that came a moment ago may be hinted and not listed yet.
        absent = hinted - names
        for name in [*(self._sightings.keys() - names), *(absent & self._absent)]:
            self.forget(name)
        self._absent = absent

    def is_whole(self, path: PersonPath, as_of: float | None = None) -> bool:
        """Return True if nobody is still writing this arrival, as far as can be known.

        It is judged by the events of which `take_hinted` told, and by the time `as_of` (monotonic seconds; None: now).
        So of the files that are judged by the same, none is whole for having been looked at later than another.
        """
        info = next((found for _, found in untrusted.infos(path.parent, [path.name])), None)
        if info is None:
            return False
        if not stat.S_ISREG(info.st_mode):
            return True  # it will be refused: no need to wait
        with self._lock:
            is_told = path.name not in self._hinted
            was_moved, was_closed = is_told and path.name in self._moved, is_told and path.name in self._closed
        if was_moved:
            return True
        key, now = (info.st_ino, info.st_size, info.st_mtime_ns), self._clock()
        seen = self._sightings.get(path.name)
        if seen is None or seen.key != key:
            seen = self._sightings[path.name] = _Sighting(key, now)
        now = now if as_of is None else as_of
        wanted = CLOSED_SETTLE_SEC if was_closed else self.settle_sec
        # A file older than this process need not wait. Setting the clock forward since then makes no file older.
        wall = min(self._now(), self._made_at[1] + now - self._made_at[0])
        lies_still = now - seen.since >= wanted or wall - info.st_mtime >= max(wanted, self.settle_sec)
        return lies_still and not _has_writer(path)


def _is_shown(name: str) -> bool:
    return bool(name) and not name.startswith(".")


def _give_up(observer: BaseObserver) -> None:
    """Stop an observer that cannot watch, or each new try would leak a thread and a descriptor."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError):
        observer.stop()


class _Hints(FileSystemEventHandler):
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def dispatch(self, event: FileSystemEvent) -> None:
        self._watcher.hint(event)


def _has_writer(path: PersonPath) -> bool:
    """Return True if a process holds the file open for writing; False if we may not ask (another user's file)."""
    try:
        fd = untrusted.open_plain(path)
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
