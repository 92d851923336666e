"""What a user plants where honed looks, as a program of the guest: `planted.py <ORDER`. Each kind is a function that
makes a thing at a path; those that hold one go on until /srv/over exists. Prints what could not be made, by kind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

OVER = "/srv/over"
#: What nobody but alice, and nobody but root and honed, may read.
ALICES, ROOTS = "/srv/alices", "/etc/honed/secret"
MIB = 2**20


def write(data: bytes | str) -> Callable[[str], None]:
    def make(path: str) -> None:
        with open(path, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)

    return make


def link(target: str) -> Callable[[str], None]:
    return lambda path: os.symlink(target, path)


def bound(path: str) -> None:
    os.chdir(os.path.dirname(path))
    socket.socket(socket.AF_UNIX).bind(os.path.basename(path))


def open_dir(path: str) -> None:
    """A directory that is its maker's own: what it inherits from incoming/ lets nobody enter it."""
    os.mkdir(path)
    for name in ("system.posix_acl_access", "system.posix_acl_default"):
        try:
            os.removexattr(path, name)
        except OSError:
            pass
    os.chmod(path, 0o777)


def deep(path: str) -> None:
    open_dir(path)
    os.chdir(path)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir("/")


def wide(path: str) -> None:
    open_dir(path)
    for number in range(3000):
        os.mkdir(f"{path}/{number}")


def nested(mode: int) -> Callable[[str], None]:
    def make(path: str) -> None:
        open_dir(path)
        os.mkdir(f"{path}/closed")
        write("x")(f"{path}/closed/x")
        os.chmod(f"{path}/closed", mode)

    return make


def hard(path: str) -> None:
    write("{}")("/srv/mallorys/one")
    os.link("/srv/mallorys/one", path)
    os.unlink("/srv/mallorys/one")
    os.link(path, f"/srv/mallorys/{time.monotonic_ns()}")


def sparse(path: str) -> None:
    write("{")(path)
    os.truncate(path, 2**40)


def held(prepare: Callable[[int], object], *, again_sec: float = 0.05, is_first: bool = True) -> Callable[[str], None]:
    """A file with which a process does something for as long as the attack lasts."""

    def make(path: str) -> None:
        write("{}")(path)
        ready, told = os.pipe()
        if os.fork():
            os.close(told)
            os.read(ready, 1)
            os.close(ready)
            return
        os.setsid()
        nothing = os.open("/dev/null", os.O_RDWR)
        for each in (0, 1, 2):
            os.dup2(nothing, each)
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
        while not os.path.exists(OVER):
            try:
                prepare(fd)
            except OSError:
                pass
            os.write(told, b".")
            time.sleep(again_sec)
        os._exit(0)

    return make


def lease(fd: int) -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def moded(mode: int) -> Callable[[str], None]:
    def make(path: str) -> None:
        write("{}")(path)
        os.chmod(path, mode)

    return make


def with_acl(*words: str) -> Callable[[str], None]:
    def make(path: str) -> None:
        write("{}")(path)

        entries = [(1, 6, 0xFFFFFFFF), (2, int(words[1]), pwd.getpwnam(words[0]).pw_uid), (4, 4, 0xFFFFFFFF)]
        entries += [(16, 7, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)]
        data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(path, "system.posix_acl_access", data)

    return make


def immutable(path: str) -> None:
    write("{}")(path)
    fd = os.open(path, os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, (0x10).to_bytes(8, "little"))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)
#: The kinds, each with the name that it is dropped under: the number of the kind takes the place of `#`.
KINDS: dict[str, tuple[str, Callable[[str], None]]] = {
    "link to another user's file": ("#.json", link(ALICES)),
    "link to a file of root's that honed may read": ("#.json", link(ROOTS)),
    "link to honed.db": ("#.json", link("/var/lib/honed/honed.db")),
    "link to /dev/zero": ("#.json", link("/dev/zero")),
    "link to /proc/self/environ": ("#.json", link("/proc/self/environ")),
    "link to a directory": ("#.json", link("/")),
    "link to itself": ("#.json", lambda path: os.symlink(os.path.basename(path), path)),
    "link to nothing": ("#.json", link("/srv/nothing")),
    "hard link to another user's file": ("#.json", lambda path: os.link(ALICES, path)),
    "hard link to one's own file": ("#.json", hard),
    "pipe": ("#.json", os.mkfifo),
    "socket": ("#.json", bound),
    "device": ("#.json", lambda path: os.mknod(path, 0o20666, os.makedev(1, 5))),
    "directory": ("#.json", open_dir),
    "directory of 1,500 levels": ("#.json", deep),
    "directory of 3,000 names": ("#.json", wide),
    "directory with one that is closed to all": ("#.json", nested(0)),
    "file of 1 TiB, sparse": ("#.json", sparse),
    "file that grows": ("#.json", held(lambda fd: os.write(fd, b"x" * 100))),
    "file with a lease": ("#.json", held(lease)),
    "file with a lock": ("#.json", held(lambda fd: fcntl.flock(fd, fcntl.LOCK_EX))),
    "file closed to all": ("#.json", moded(0)),
    "file with setuid": ("#.json", moded(0o4755)),
    "file that everybody can write": ("#.json", moded(0o666)),
    "file closed to honed by its ACL": ("#.json", with_acl("honed", "0")),
    "file that its ACL lets alice write": ("#.json", with_acl("alice", "6")),
    "immutable file": ("#.json", immutable),
    "name with a line end": ("#\nx.json", write("{}")),
    "name with an escape sequence": ("#\x1b[31m.json", write("{}")),
    "name with a dash first": ("-#.json", write("{}")),
    "name that is not UTF-8": (os.fsdecode(b"#\xff.json"), write("{}")),
    "name of 255 bytes": ("#" + "x" * 240 + ".json", write("{}")),
    "name of one of honed's reasons": ("#.json.reason", write("x was refused at 1.\n")),
    "name with two suffixes": ("#.yaml.yaml", write("{}")),
    "name with a percent sign": ("#%n%s{0}.json", write("{}")),
    "empty file": ("#.json", write("")),
    "file of NULs": ("#.json", write(bytes(4096))),
    "file with a byte order mark": ("#.json", write(b"\xef\xbb\xbf{}")),
    "file in UTF-16": ("#.json", write("{}".encode("utf-16"))),
    "file of 1 MiB and a byte": ("#.json", write(b" " * (MIB + 1))),
    "JSON of 100,000 levels": ("#.json", write("[" * 100_000)),
    "number of 100,000 digits": ("#.json", write('{"a": ' + "9" * 100_000 + "}")),
    "YAML whose aliases make 10^9 values": ("#.yaml", write(BOMB)),
    "YAML that names Python objects": ("#.yaml", write("!!python/object/apply:os.system ['touch /srv/mallorys/ran']")),
    "YAML that holds itself": ("#.yaml", write("a: &a [*a]\n")),
    "directory with a file system that never answers": ("#.json", open_dir),
    "directory with a file system that lies": ("#.json", open_dir),
    "directory with a file system for its owner alone": ("#.json", open_dir),
    "file with a file system that never answers": ("#.json", write("{}")),
    "file with a file system that lies": ("#.json", write("{}")),
    "file with a file system for its owner alone": ("#.json", write("{}")),
}
#: Over these, fuse_mounts.py mounts one: whether its server answers, and whether others may enter.
MOUNTED = {kind: (not kind.endswith("answers"), not kind.endswith("alone")) for kind in KINDS if "file system" in kind}


def main() -> None:
    order = json.load(sys.stdin)  #: [[kind, [paths]], …]
    failed: dict[str, list[str]] = {}
    os.umask(0o022)
    for kind, paths in order:
        for path in paths:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    os.unlink(path)
                KINDS[kind][1](path)
            except OSError as error:
                failed.setdefault(kind, []).append(f"{errno.errorcode[error.errno or 0]} {path}")
    print(json.dumps(failed))


if __name__ == "__main__":
    main()
