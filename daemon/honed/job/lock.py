"""The spool's lock: a daemon holds it for its life, and whoever changes the spool while honed is down for a moment.

    lock    flock; {"pid", "is_daemon"} of who took it last

Who holds it is the kernel's word, where it has one (/proc/locks); the note says what the holder is. Notes of the dead
stay, so a note counts only for a process that lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from honed.system.error import plain

#: Bytes of a note.
NOTE_BYTES = 256
#: Characters of a command.
MAX_COMMAND = 120


@dataclass(frozen=True)
class Holder:
    """Who holds a lock; `pid` is None if that is not known."""

    pid: int | None
    command: str = ""
    is_daemon: bool = False

    @property
    def words(self) -> str:
        if self.pid is None:
            return "an unknown process"
        return f"process {self.pid}" + (f" ({self.command})" if self.command else "")


def take(path: Path, *, is_daemon: bool = False) -> int | None:
    """Take the lock; returns its descriptor, or None if another process has it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o600)  # anyone who may open the file could hold the lock
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    note = {"pid": os.getpid(), "is_daemon": is_daemon}
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        os.pwrite(fd, json.dumps(note).encode().ljust(NOTE_BYTES), 0)
    return fd


def holder(path: Path) -> Holder:
    """Return who holds a lock that could not be taken."""
    noted, is_daemon = _note(path)
    pid = _by_kernel(path) or noted
    if pid is None or not Path(f"/proc/{pid}").exists():
        return Holder(pid)
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    command = plain(" ".join(filter(None, words)))[:MAX_COMMAND]
    return Holder(pid, command, is_daemon=is_daemon and pid == noted)


def _note(path: Path) -> tuple[int | None, bool]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with path.open("rb") as file:
            note = json.loads(file.read(NOTE_BYTES))
        if type(note["pid"]) is int:
            return note["pid"], note["is_daemon"] is True
    return None, False


def _by_kernel(path: Path) -> int | None:
    """Return the holder that /proc/locks names: `1: FLOCK ADVISORY WRITE 123 00:2b:4711 0 EOF`. Its device is not
    always that of stat, as on btrfs, so the inode decides if it is the only one."""
    holders: dict[int, bool] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        info = path.stat()
        device = (os.major(info.st_dev), os.minor(info.st_dev))
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] != "FLOCK":  # or `->`, which waits for one
                continue
            major, minor, inode = words[5].split(":")
            if int(inode) == info.st_ino and (pid := int(words[4])) > 0:
                holders[pid] = (int(major, 16), int(minor, 16)) == device
    same = [pid for pid, is_same in holders.items() if is_same] or list(holders)
    return same[0] if len(same) == 1 else None
