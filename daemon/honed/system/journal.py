"""The journal's native protocol: an entry with fields of its own, in one datagram.

    KEY=value\\n                           a value without line breaks
    KEY\\n<u64, little endian>value\\n      any value

An entry that is larger than a datagram goes as a sealed memfd, whose descriptor is sent. Field names are of capital
letters, digits and underscores, and begin with a letter: journald drops others in silence.
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
#: Linux' fcntl.h: the memfd can be neither changed nor unsealed any more, which journald asks of what it maps.
F_ADD_SEALS = 1033
ALL_SEALS = 0x0F
#: What a datagram socket says of an entry that is too large for it; ENOBUFS where its buffer is smaller still.
TOO_LARGE = {errno.EMSGSIZE, errno.ENOBUFS}


def is_read_from(fd: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the journal reads this descriptor: systemd says in JOURNAL_STREAM which device and inode it opened.

    The variable alone proves nothing: it is inherited by a child whose stderr goes elsewhere.
    """
    try:
        info = os.fstat(fd)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"


def encode(fields: Mapping[str, str | bytes | int | float]) -> bytes:
    """One entry as it goes over the wire. Raises ValueError for a name that journald would drop."""
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
    """The way to journald; addressed anew for each entry, so that one that was restarted is found."""

    def __init__(self, path: Path = SOCKET_PATH) -> None:
        self._address = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        with contextlib.suppress(OSError):  # fewer entries then need a memfd
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * 1024 * 1024)

    def send(self, fields: Mapping[str, str | bytes | int | float]) -> None:
        """Hand one entry over. Raises OSError where nobody takes it."""
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
