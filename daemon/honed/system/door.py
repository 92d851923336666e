"""A listening unix socket that stays open: its file may be removed, and the process may run out of descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from honed.system import durable
from honed.system.client import address_of

#: Connections that the kernel keeps until they are accepted; net.core.somaxconn may allow fewer.
BACKLOG = 1024
#: Errors of accept(2) about one client.
OF_CLIENT = {errno.EINTR, errno.ECONNABORTED, errno.EPROTO, errno.EPERM}


class Door:
    """Accepts connections at a path. Everybody may connect: the kernel names the user (SO_PEERCRED)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Given up when there is no other descriptor, to accept a client and hang up: else accept(2) would fail for as
        #: long as clients wait, and the loop would not sleep.
        self._spare_fd: int | None = None
        self._listen()

    def _listen(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)
            with address_of(self.path) as address:
                self.socket.bind(address)
            self.path.chmod(0o666)
            self.socket.listen(BACKLOG)
            self._file = self._now()
        except OSError:
            self.socket.close()
            raise
        self._keep_spare()

    def _keep_spare(self) -> None:
        if self._spare_fd is None:
            with contextlib.suppress(OSError):
                self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> socket.socket | None:
        """Return the next client; None if none waits. Raises OSError if there is no descriptor or memory for it."""
        self._keep_spare()
        while True:
            try:
                return self.socket.accept()[0]
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return None
                if error.errno not in OF_CLIENT:
                    raise

    def turn_away(self) -> None:
        """Accept the next client with the spare descriptor, and hang up."""
        if self._spare_fd is not None:
            os.close(self._spare_fd)
            self._spare_fd = None
        with contextlib.suppress(OSError):
            self.socket.accept()[0].close()
        self._keep_spare()

    @property
    def is_there(self) -> bool:
        """True if the path still leads to this socket. Raises OSError if that is not known."""
        return self._now() == self._file

    def _now(self) -> tuple[int, int] | None:
        try:
            info = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (info.st_dev, info.st_ino) if stat.S_ISSOCK(info.st_mode) else None

    def renew(self) -> socket.socket:
        """Listen at the path again, whose file was removed. Returns the old socket; who waits at it must have been
        accepted. Raises OSError if it cannot be done, or another process listens there; then the old socket is still
        the one."""
        durable.make_dir(self.path.parent)
        if self._is_anothers():  # of a second honed, where the spool was removed with the lock: they would take turns
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(self.path))
        before = self.socket
        try:
            self._listen()
        except OSError:
            self.socket = before
            raise
        return before

    def _is_anothers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                with address_of(self.path) as address:
                    probe.connect(address)
            except BlockingIOError:
                return True  # it has no room for us
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close the socket, and remove its file."""
        with contextlib.suppress(OSError):
            if self.is_there:
                self.path.unlink(missing_ok=True)
        self.socket.close()
        if self._spare_fd is not None:
            os.close(self._spare_fd)
            self._spare_fd = None
