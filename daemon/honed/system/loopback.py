"""The user at the other end of a TCP connection within this machine, as the kernel lists it in /proc/net."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Set
from pathlib import Path

#: Times that the list is read: the kernel makes it in pieces, and other connections come and go meanwhile.
NUM_READS = 3
_TABLES = Path("/proc/self/net")

Endpoint = tuple[str, int]


def is_of(client: Endpoint, ours: Endpoint, uids: Set[int]) -> bool:
    """Return True if the client's end of a connection, whose other end is `ours`, is one of these users'. On a system
    that lists no connections it is anybody's."""
    return not (_TABLES / "tcp").exists() or user_of(client, ours) in uids


def user_of(client: Endpoint, ours: Endpoint) -> int | None:
    """Return the user of the client's end; None if the kernel lists no such connection that a process holds open."""
    tables = {name: [_in_words(item, name) for item in (client, ours)] for name in ("tcp", "tcp6")}
    for _ in range(NUM_READS):
        for name, ends in tables.items():
            try:
                lines = (_TABLES / name).read_text().splitlines()[1:]
            except OSError:  # no IPv6
                continue
            for line in lines:
                _, local, remote, _, _, _, _, uid, _, inode, *_ = line.split()
                # A connection that was closed has no inode, and root's uid.
                if [local, remote] == ends and inode != "0":
                    return int(uid)
    return None


def in_words(client: Endpoint, ours: Endpoint) -> str:
    """Return a phrase for the client's end of a connection: its user, or that no process here holds it."""
    user = user_of(client, ours)
    return "no process that this machine's kernel lists" if user is None else f"a process of uid {user}"


def _in_words(end: Endpoint, table: str) -> str:
    """Return an end of a connection in a table's form: the address in words of 32 bits as this machine reads them."""
    address = ipaddress.ip_address(end[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    packed = address.packed
    if table == "tcp6" and address.version == 4:
        packed = b"\0" * 10 + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"
