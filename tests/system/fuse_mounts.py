"""Mounts file systems of a user, as fusermount3 does for them, in the guest: `fuse_mounts.py UID`, as root.

The first line of its input is JSON: [[path, whether its server answers, whether others may enter], ...]. A server that
answers lies: each file is root's, endless and of another time at each look, each directory has names without end.
Prints `mounted`, and goes on until its input ends; then all of it is unmounted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import stat
import struct
import sys
from pathlib import Path

_MNT_DETACH = 2
_HEADER, _REPLY = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_INIT, _FORGETS = 26, (2, 36, 42)  #: forget, interrupt, batch_forget: nobody waits for an answer
#: Inodes: the root, and those of each name.
_ROOT, _DIRECTORY, _FILE = 1, 2, 3


class Lies:
    """What a server says that answers."""

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.looks = 0

    def attributes(self, node: int) -> bytes:
        self.looks += 1
        is_dir = node == _DIRECTORY or (node == _ROOT and stat.S_ISDIR(self.mode))
        mode = stat.S_IFDIR | 0o777 if is_dir else stat.S_IFREG | 0o4755
        times = struct.pack("<QQQIII", self.looks, self.looks, self.looks, 0, 0, 0)
        sizes, owners = struct.pack("<QQQ", node, 2**62 - self.looks, 1), struct.pack("<IIIII", mode, 1, 0, 0, 0)
        return sizes + times + owners + struct.pack("<II", 4096, 0)

    def reply(self, code: int, node: int, body: bytes) -> bytes | int:
        """Return the answer to an operation of linux/fuse.h, or an errno."""
        match code:
            case 1:  # lookup
                found = _DIRECTORY if body.rstrip(b"\0").isalpha() else _FILE
                return struct.pack("<QQQQII", found, 0, 0, 0, 0, 0) + self.attributes(found)
            case 3:  # getattr
                return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
            case 14 | 27:  # open, opendir
                return struct.pack("<QII", 1, 1, 0)  # direct I/O: the size says nothing
            case 15:  # read
                return b'{"event": "step", "step": 1}\n' * (struct.unpack_from("<QQI", body)[2] // 29)
            case 28:  # readdir
                offset = struct.unpack_from("<QQ", body)[1]
                return b"".join(
                    struct.pack("<QQII", _FILE, number + 1, 8, stat.S_IFREG) + b"%08d" % number
                    for number in range(offset, offset + 20)
                )
            case 18 | 25 | 29 | 34:  # release, flush, releasedir, access
                return 0
            case _:
                return errno.ENOSYS


def answer(fd: int, lies: Lies | None) -> None:
    data = os.read(fd, 1 << 20)
    _length, code, unique, node, *_ = _HEADER.unpack_from(data)
    if code == _INIT:
        said: bytes | int = struct.pack("<IIIIHHIIHHI7I", 7, 31, 65536, 0, 12, 9, 131072, 1, 0, 0, 0, *[0] * 7)
    elif lies is None or code in _FORGETS:
        return
    else:
        said = lies.reply(code, node, data[_HEADER.size :])
    body, problem = (said, 0) if isinstance(said, bytes) else (b"", said)
    with contextlib.suppress(OSError):  # who asked no longer waits
        os.write(fd, _REPLY.pack(_REPLY.size + len(body), -problem, unique) + body)


def main() -> None:
    uid, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
    servers: dict[int, Lies | None] = {}
    roots = []
    for path, answers, allows_others in json.loads(sys.stdin.buffer.readline()):
        fd, mode = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC), Path(path).stat().st_mode
        options = f"fd={fd},rootmode={mode & 0o170000:o},user_id={uid},group_id={uid}"
        options += ",allow_other" if allows_others else ""
        if libc.mount(b"theirs", os.fsencode(path), b"fuse", ctypes.c_ulong(2 | 4), options.encode()):  # nosuid, nodev
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        servers[fd] = Lies(mode) if answers else None
        answer(fd, servers[fd])
        roots.append(os.open(path, os.O_PATH | os.O_CLOEXEC))  # the mount, wherever it is moved with its directory
    print("mounted", flush=True)
    poll = select.poll()
    for fd in (0, *servers):
        poll.register(fd, select.POLLIN)
    while 0 not in dict(ready := poll.poll()):
        for fd, _ in ready:
            try:
                answer(fd, servers[fd])
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted by another
                    poll.unregister(fd)
    for fd in servers:
        os.close(fd)  # who waits for an answer gets an error
    for root in roots:
        libc.umount2(f"/proc/self/fd/{root}".encode(), _MNT_DETACH)


if __name__ == "__main__":
    main()
