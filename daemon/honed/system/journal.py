"""The journal's native protocol: an entry with custom fields in one datagram.

    KEY=value\\n                           a value without line breaks
    KEY\\n<u64, little endian>value\\n      any value

An entry that is larger than a datagram is sent as the descriptor of a sealed memfd. Field names consist of capital
letters, digits and underscores, and begin with a letter: journald silently ignores others.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

SOCKET_PATH = Path("/run/systemd/journal/socket")
_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
#: From Linux' fcntl.h: the memfd can no longer be changed or unsealed, which journald requires to map it.
F_ADD_SEALS = 1033
ALL_SEALS = 0x0F
#: Errors of a datagram socket for an entry that is too large; ENOBUFS if its buffer is even smaller.
TOO_LARGE = {errno.EMSGSIZE, errno.ENOBUFS}


def is_read_from(fd: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the journal reads this descriptor: JOURNAL_STREAM has the device and inode that systemd opened.

    The variable alone proves nothing: a child whose stderr goes elsewhere inherits it.
    """
    try:
        info = os.fstat(fd)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


def encode(fields: Mapping[str, str | bytes | int | float]) -> bytes:
    """Encode one entry. Raises ValueError for a field name that journald would ignore."""
    parts = []
    for name, value in fields.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"not the name of a journal field: {name!r}")
        data = value if isinstance(value, bytes) else str(value).encode(errors="replace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class Journal:
    """A connectionless socket to journald; each entry is addressed anew, to survive its restarts."""

    def __init__(self, path: Path = SOCKET_PATH) -> None:
        self._address = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        with contextlib.suppress(OSError):  # otherwise more entries need a memfd
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * 1024 * 1024)

    def send(self, fields: Mapping[str, str | bytes | int | float]) -> None:
        """Send one entry. Raises OSError if nobody receives it."""
        entry = encode(fields)
        try:
            self._socket.sendto(entry, self._address)
        except OSError as error:
            if error.errno not in TOO_LARGE:
                raise
            self._send_sealed(entry)

    def _send_sealed(self, entry: bytes) -> None:
        fd = os.memfd_create("honed-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(entry)
            fcntl.fcntl(fd, F_ADD_SEALS, ALL_SEALS)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            self._socket.sendmsg([b""], ancillary, 0, self._address)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._socket.close()
