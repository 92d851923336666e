"""The preflight helper (preflight.py) as a process at the other end of a socket, and the ways to start one.

    child   a process of the daemon's user, with the daemon's rights
    unit    honed-check@UID.service, with the rights of one submitter; see systemd_check.py

Nothing here waits. The first byte that a helper gets brings it the descriptor of a file, in which it says what it is
at: that is asked for when it dies or takes too long, and wakes nobody otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from honed.system.layout import Layout

#: Each thread reserves address space, and pyarrow starts one a core: few of them, so that the limit fits any machine.
HELPER_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "2", "ARROW_IO_THREADS": "2"}
#: Bytes of the file in which the helper says what it is at.
STAGE_BYTES = 64
#: The first line of a helper: it takes requests from now on.
READY = b'{"ready": true}'

#: Is told the old and the new descriptor to watch for reading; None: there is none.
Watch = Callable[[int | None, int | None], None]
#: Starts a helper that says what it is at in the file of this descriptor. Raises OSError where it cannot be.
Start = Callable[[int, Watch], "Helper"]


class Helper:
    """A helper that was started, and may be on its way yet."""

    def __init__(self, stage_fd: int, watch: Watch) -> None:
        self._stage_fd = stage_fd
        self._watch = watch
        self._socket: socket.socket | None = None
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor that becomes readable when it says something."""
        return self._socket.fileno() if self._socket is not None else -1

    def read(self) -> bytes | None:
        """What it has said: nothing where it is over, None where there is no more for now.

        Raises OSError where it turns out that it cannot be started.
        """
        if self._socket is None:
            return None
        self._flush()
        try:
            return self._socket.recv(65536)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def write(self, data: bytes) -> None:
        """Say something to it; what it does not take now follows with its next `read`."""
        self._unsent += data
        self._flush()

    def end(self) -> None:
        """Kill it, without waiting for its end."""
        if self._socket is not None:
            self._watch(self._socket.fileno(), None)
            self._socket.close()
            self._socket = None

    def is_gone(self) -> bool:
        """Whether nothing of it is left to be reaped."""
        return True

    def _meet(self, peer: socket.socket, watched: int | None) -> None:
        """Go on with the helper at the other end; `watched` is the descriptor that was watched before."""
        peer.setblocking(False)
        self._socket = peer
        self._watch(watched, peer.fileno())
        with contextlib.suppress(ConnectionError):  # dead already, as the next read finds
            socket.send_fds(peer, [b"\n"], [self._stage_fd])

    def _flush(self) -> None:
        # It may be stopped, and a write that waits for it would hang the daemon.
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]


class ChildHelper(Helper):
    """A helper as a child of the daemon, in a session of its own."""

    def __init__(self, command: Sequence[str], stage_fd: int, watch: Watch) -> None:
        super().__init__(stage_fd, watch)
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                env=os.environ | HELPER_ENVIRONMENT,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._meet(ours, None)

    def end(self) -> None:
        super().end()
        self.process.kill()

    def is_gone(self) -> bool:
        return self.process.poll() is not None


def children(layout: Layout, command: Sequence[str] | None = None) -> Start:
    """Helpers as children."""
    asked = list(command or [sys.executable, "-P", "-m", "honed.check.preflight", "--root", str(layout.root)])
    return lambda stage_fd, watch: ChildHelper(asked, stage_fd, watch)
