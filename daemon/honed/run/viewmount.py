"""The directories that a view shows: opened with the submitter's rights, and mounted.

They are people's, and a person can mount a file system over them that never answers. So a child opens every one: where
it hangs, it is left behind, and only this job fails. What is mounted or unmounted is not asked for anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from honed.job import tree
from honed.system.access import Person

#: Seconds for opening all directories of a view.
OPEN_SEC = 20.0
#: mount(2) and umount2(2).
_MS_BIND, _MNT_DETACH, _NOFOLLOW = 0x1000, 2, 8


class ViewError(Exception):
    """A job's view cannot be created; the message is one sentence."""


@contextlib.contextmanager
def opened_as(who: Person, path: Path, *, until: float) -> Iterator[int]:
    """Open a directory with a user's own permissions, so that the view exposes nothing that is closed to them.

    Raises ViewError if it cannot be opened, or is not until then (monotonic seconds).
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            _open(who, path, theirs)
        theirs.close()
        ours.settimeout(max(0.001, until - time.monotonic()))
        try:
            data, fds, _flags, _address = socket.recv_fds(ours, 16, 1)
        except TimeoutError:
            raise ViewError(f"{path}: a file system there does not answer") from None
        finally:
            # It is not waited for: a process that waits for a file system may not even heed SIGKILL.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    if not fds:
        why = os.strerror(int(data)) if data else "not opened"
        raise ViewError(f"{path}: {why}, for the user {who.name}")
    try:
        os.set_inheritable(fds[0], False)
        yield fds[0]
    finally:
        os.close(fds[0])


def _open(who: Person, path: Path, answer: socket.socket) -> None:
    """Open a directory in the child, and hand it to the parent."""
    try:
        os.setgroups(sorted(who.gids))
        os.setegid(min(who.gids))
        os.seteuid(who.uid)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        socket.send_fds(answer, [b"0"], [fd])
    except OSError as error:
        answer.send(str(error.errno or 0).encode())
    finally:
        os._exit(0)


_libc = ctypes.CDLL(None, use_errno=True)


def mount(fd: int, target: Path) -> None:
    """Mount an open directory over another one."""
    if _libc.mount(f"/proc/self/fd/{fd}".encode(), os.fsencode(target), None, ctypes.c_ulong(_MS_BIND), None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def unmount_below(directory: Path) -> None:
    """Unmount all that is mounted below a directory, also in several layers."""
    while mounts := tree.mounts_below(directory):
        for target in reversed(mounts):
            if _libc.umount2(os.fsencode(target), _MNT_DETACH | _NOFOLLOW):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(target))
