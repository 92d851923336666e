"""Watches incoming/ and finds which arrivals are complete.

inotify only wakes the loop and gives hints: a flood makes it lose events. The scan is authoritative. A file is complete
if it was renamed in, or was closed and then unchanged for a moment, or unchanged for `settle_sec` with no writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from watchdog.observers.inotify_c import InotifyConstants, inotify_add_watch, inotify_init

from honed.system import untrusted
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Seconds that a closed file must stay unchanged: a shell's `>` and `>>` close and open again.
CLOSED_SETTLE_SEC = 0.25


#: Kinds of events that are asked for. Files that are opened, read and closed are not: honed itself opens every arrival.
_ARRIVED = InotifyConstants.IN_CLOSE_WRITE | InotifyConstants.IN_MOVED_TO
_GONE = InotifyConstants.IN_CREATE | InotifyConstants.IN_DELETE | InotifyConstants.IN_MOVED_FROM
_MASK = _ARRIVED | _GONE | InotifyConstants.IN_MODIFY | InotifyConstants.IN_ONLYDIR
#: Bytes of events that are read at once: one or two thousand events, some milliseconds of work.
_READ_BYTES = 64 * 1024
_HEADER = struct.Struct("iIII")  # watch, mask, cookie, length of the name; see inotify(7)


class _Events:
    """The inotify events of one directory, through watchdog's bindings. Its observers read them in a thread, event by
    event: a flood would take the interpreter from the loop. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.fd: int = inotify_init()
        if self.fd == -1:
            raise _last_error()
        os.set_blocking(self.fd, False)
        os.set_inheritable(self.fd, False)
        if inotify_add_watch(self.fd, os.fsencode(directory), _MASK) == -1:
            error = _last_error()
            os.close(self.fd)
            raise error

    def read(self) -> Iterator[tuple[int, str]]:
        """Yield the mask and the name of the next events: none if there are none, and not all of a flood."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return
        position = 0
        while position < len(data):
            _, mask, _, length = _HEADER.unpack_from(data, position)
            position += _HEADER.size
            yield mask, os.fsdecode(data[position : position + length].rstrip(b"\0"))
            position += length

    def close(self) -> None:
        os.close(self.fd)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@dataclass(frozen=True)
class _Sighting:
    """A file's identity and extent, and when it was first seen with these (monotonic seconds)."""

    key: tuple[int, int, int]
    since: float


class Watcher:
    """A watched directory. `follow` gets the descriptor that becomes readable when there are events: the old one,
    and the new one."""

    def __init__(
        self,
        directory: Path,
        *,
        settle_sec: float,
        follow: Callable[[int | None, int | None], None] = lambda _old, _new: None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self.settle_sec = settle_sec
        self._follow = follow
        self._now = now
        self._clock = clock
        self._made_at = (clock(), now())
        self._closed: set[str] = set()
        self._moved: set[str] = set()
        self._hinted: dict[str, None] = {}  # closed or moved in since `take_hinted`, in the order of the last events
        self._sightings: dict[str, _Sighting] = {}
        self._events: _Events | None = None
        self._inode: tuple[int, int] | None = None
        self._fault = ""  # why it cannot be watched; logged once
        self._has_overflowed = False  # since the last listing; logged once
        self._absent: set[str] = set()  # named by a hint, and absent at the last listing

    @property
    def is_watching(self) -> bool:
        return self._events is not None

    def start(self) -> None:
        """Start watching, or log once why that fails: then the rescan works alone."""
        self._inode = self._identity()
        try:
            self._events = _Events(self._directory)
        except OSError as error:
            # inotify(7): ENOSPC and EMFILE are limits of a user's, fs.inotify.max_user_watches and _instances.
            fault = error.strerror or str(error)
            if fault != self._fault:
                log.warning("%s: cannot be watched (%s); scanning it instead", self._directory, fault)
            self._fault = fault
            return
        if self._fault:
            log.info("%s: watching it again", self._directory)
        self._fault = ""
        self._follow(None, self._events.fd)

    def stop(self) -> None:
        if self._events is not None:
            self._follow(self._events.fd, None)
            self._events.close()
            self._events = None

    def rearm(self) -> None:
        """Watch again if the directory was replaced, which inotify does not report."""
        if self._inode != self._identity():
            log.warning("%s was replaced; watching it again", self._directory)
            self.stop()
            self.start()
        elif not self.is_watching:  # a limit that was reached
            self.stop()
            self.start()

    def _identity(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            info = self._directory.stat()
            return info.st_dev, info.st_ino
        return None

    def read(self) -> bool:
        """Record the next events, of a flood some of them. Returns True if one concerned an arrival."""
        is_told = False
        for mask, name in self._events.read() if self._events is not None else ():
            if mask & InotifyConstants.IN_Q_OVERFLOW:
                if not self._has_overflowed:
                    log.warning("%s: inotify's queue overflowed: a listing finds what was lost", self._directory)
                self._has_overflowed = True
                self._closed.clear()  # what was lost may have been the event of a file that is written again
                self._moved.clear()
                is_told = True
            elif _is_shown(name):
                if mask & _ARRIVED:
                    self.arrived(name, is_move=bool(mask & InotifyConstants.IN_MOVED_TO))
                else:
                    self.changed(name, is_other=bool(mask & _GONE))
                is_told = True
        return is_told

    def arrived(self, name: str, *, is_move: bool) -> None:
        """Record that a file was closed after it was written, or moved in (`is_move`)."""
        if is_move:
            self.changed(name, is_other=True)
        (self._moved if is_move else self._closed).add(name)
        self._hinted.pop(name, None)
        self._hinted[name] = None

    def changed(self, name: str, *, is_other: bool) -> None:
        """Record that a file is written, or that its name is gone or another file's (`is_other`)."""
        self._closed.discard(name)
        if is_other:
            self._moved.discard(name)
            self._hinted.pop(name, None)

    def take_hinted(self) -> list[str]:
        """Return the files that were closed or moved in since the last call, in the order of their last events."""
        self.read()
        hinted, self._hinted = self._hinted, {}
        return list(hinted)

    def forget(self, name: str) -> None:
        """Forget an arrival that has left the directory. An event since `take_hinted` may be of a new one."""
        self._sightings.pop(name, None)
        if name not in self._hinted:
            self._closed.discard(name)
            self._moved.discard(name)

    def keep(self, names: Set[str]) -> None:
        """Forget all arrivals but these, so that the records do not grow for ever."""
        self._has_overflowed = False
        hinted = (self._closed | self._moved) - self._hinted.keys()
        # The event of a removed file can be lost, too. A file that came a moment ago may be hinted and not listed yet.
        absent = hinted - names
        for name in [*(self._sightings.keys() - names), *(absent & self._absent)]:
            self.forget(name)
        self._absent = absent

    def is_whole(self, path: PersonPath, as_of: float | None = None) -> bool:
        """Return True if nobody is still writing this arrival, as far as can be known.

        It is judged by the events that `take_hinted` returned, and by the time `as_of` (monotonic seconds; None: now).
        So of the files that are judged by the same, none is whole for having been looked at later than another.
        """
        info = next((info for _, info in untrusted.infos(path.parent, [path.name])), None)
        if info is None:
            return False
        if not stat.S_ISREG(info.st_mode):
            return True  # it will be rejected: no need to wait
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
