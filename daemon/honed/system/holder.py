"""Who holds a connection: the user whom the kernel names, or the owner of that subordinate user.

With newuidmap(1), a person has tens of thousands of users; together they are one holder. So are all users whom the
machine does not know.
"""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

SUBUID_PATH = Path("/etc/subuid")
#: Users that systemd makes for services (DynamicUser=), honed-web's for one; without its NSS module, no name says so.
DYNAMIC_UIDS = range(61184, 65520)
#: The holder of the connections of all users whom the machine does not know.
UNKNOWN = -1
#: Seconds for which an answer is kept, and answers that are kept: a name service may be slow.
KEEP_SEC, MAX_KEPT = 60.0, 1024


class Holders:
    """The holders of connections, by user."""

    def __init__(self, subuid_path: Path = SUBUID_PATH) -> None:
        self._subuid_path = subuid_path
        self._stamp: tuple[int, int, int] | None = None
        self._ranges: list[tuple[range, str]] = []
        self._kept: dict[int, int] = {}
        self._until = 0.0

    def of(self, uid: int) -> int:
        """Return the user who holds what `uid` holds; UNKNOWN if the machine does not know them."""
        if uid in {0, os.getuid()}:
            return uid
        if (now := time.monotonic()) >= self._until or len(self._kept) >= MAX_KEPT:
            self._kept.clear()
            self._until = now + KEEP_SEC
            self._read()
        if uid not in self._kept:
            self._kept[uid] = self._find(uid)
        return self._kept[uid]

    def _find(self, uid: int) -> int:
        if uid in DYNAMIC_UIDS or _is_user(uid):  # first: a directory's users may lie within somebody's range
            return uid
        owners = (_owner(name) for uids, name in self._ranges if uid in uids)
        return next((owner for owner in owners if owner is not None), UNKNOWN)

    def _read(self) -> None:
        try:
            info = self._subuid_path.stat()
            if (stamp := (info.st_ino, info.st_mtime_ns, info.st_size)) == self._stamp:
                return
            lines = self._subuid_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            self._stamp, self._ranges = None, []
            return
        self._stamp, self._ranges = stamp, [range_of for line in lines if (range_of := _range(line)) is not None]


def _range(line: str) -> tuple[range, str] | None:
    """Parse a line of subuid(5): `alice:100000:65536`, or with a number for the name."""
    name, _, rest = line.partition(":")
    first, _, num = rest.partition(":")
    try:
        return range(int(first), int(first) + int(num)), name
    except ValueError:
        return None


def _owner(name: str) -> int | None:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def _is_user(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
