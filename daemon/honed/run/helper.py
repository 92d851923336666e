"""The preflight helper (preflight.py) as a process at the other end of a socket, and the ways to start one.

    child   a process of the daemon's user, with the daemon's permissions
    unit    honed-check@UID.service, with the permissions of one submitter; see systemd_check.py

Nothing here blocks. With the first byte, a helper receives the descriptor of a file into which it writes its current
step: the daemon reads it only when the helper dies or takes too long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Sequence

from honed.system import python
from honed.system.layout import Layout

#: Each thread reserves address space, and pyarrow starts one per core: keep them few, so that the limit fits any
#: machine.
HELPER_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "2", "ARROW_IO_THREADS": "2"}
#: Bytes of the file into which the helper writes its current step.
STAGE_BYTES = 64
#: The first line of a helper that accepts requests.
READY = b'{"ready": true}'

#: Called with the old and the new descriptor to watch for reading; None means none.
Watch = Callable[[int | None, int | None], None]
#: Starts a helper that writes its current step to the file of this descriptor. Raises OSError if it cannot start.
Start = Callable[[int, Watch], "Helper"]


class Helper:
    """A helper that was started, and may not be connected yet."""

    def __init__(self, stage_fd: int, watch: Watch) -> None:
        self._stage_fd = stage_fd
        self._watch = watch
        self._socket: socket.socket | None = None
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the helper sends something."""
        return self._socket.fileno() if self._socket is not None else -1

    def read(self) -> bytes | None:
        """Return received data: empty if the helper has ended, None if there is nothing to read now.

        Raises OSError if the helper could not be started.
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
        """Send data to the helper; data that it does not accept now is sent at the next `read`."""
        self._unsent += data
        self._flush()

    def end(self) -> None:
        """Kill the helper without waiting for its end."""
        if self._socket is not None:
            self._watch(self._socket.fileno(), None)
            self._socket.close()
            self._socket = None

    def is_gone(self) -> bool:
        """Tell whether nothing is left to reap."""
        return True

    def _meet(self, peer: socket.socket, watched: int | None) -> None:
        """Connect to the helper at the other end of `peer`; `watched` is the descriptor that was watched before."""
        peer.setblocking(False)
        self._socket = peer
        self._watch(watched, peer.fileno())
        with contextlib.suppress(ConnectionError):  # already dead; the next read notices
            socket.send_fds(peer, [b"\n"], [self._stage_fd])

    def _flush(self) -> None:
        # The helper may be stopped, and a blocking write would hang the daemon.
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]


class ChildHelper(Helper):
    """A helper that is a child of the daemon, in its own session."""

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
    """Return a function that starts helpers as child processes."""
    asked = list(command or python.module("honed.check.preflight", "--root", str(layout.root)))
    return lambda stage_fd, watch: ChildHelper(asked, stage_fd, watch)
