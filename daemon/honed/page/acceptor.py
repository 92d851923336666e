"""honed-web's end of the process that accepts the connections of one unix socket (acceptor_process.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from honed.page.acceptor_process import COUNT, HOLDER, MAX_MESSAGE_BYTES
from honed.page.answer import no_place_at_all
from honed.page.place import Kind
from honed.system import python
from honed.system.backoff import Backoff

log = logging.getLogger("honed.page.server")

#: Connections taken in a round of the event loop.
MAX_TAKEN = 64
#: Seconds until the process is started again after its end, doubled each time; and the longest.
FIRST_PAUSE_SEC, MAX_PAUSE_SEC = 0.1, 10.0
#: Seconds until the next try to send it something, if it is too busy to read.
FLUSH_SEC = 0.1


class _Process:
    """The process, and the link to it. Raises OSError if it cannot be started."""

    def __init__(self, listening: socket.socket, count_fd: int) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loop = asyncio.get_running_loop()
        self._ended = bytearray()  # the holders of connections that have ended, not sent yet
        try:
            self.link.send(no_place_at_all(Kind.USER))
            self.link.setblocking(False)
            fds = (listening.fileno(), theirs.fileno(), count_fd)
            command = python.module("honed.page.acceptor_process", *map(str, fds))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        except BaseException:
            self.link.close()
            raise
        finally:
            theirs.close()

    def give_back(self, holder: int) -> None:
        """Tell the process that a connection of this holder has ended."""
        if not self._ended:
            self._loop.call_soon(self._flush)
        self._ended += HOLDER.pack(holder)

    def _flush(self) -> None:
        try:
            while self._ended:
                del self._ended[: self.link.send(self._ended[:MAX_MESSAGE_BYTES])]
        except BlockingIOError:
            self._loop.call_later(FLUSH_SEC, self._flush)
        except OSError:  # it has ended, and its counts with it
            self._ended.clear()

    def end(self) -> None:
        self.link.close()
        self._process.kill()
        self._process.wait()


class Acceptor:
    """Makes connections of those of one unix socket, in an event loop. `make` returns the protocol of a new one, which
    calls its argument when the connection is lost."""

    def __init__(self, listening: socket.socket, make: Callable[[Callable[[], None]], asyncio.Protocol]) -> None:
        listening.setblocking(False)
        self.listening = listening
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._count_file = os.fdopen(os.memfd_create("honed-refused"), "w+b", buffering=0)
        self._count_file.write(COUNT.pack(0))
        self._backoff = Backoff(FIRST_PAUSE_SEC, MAX_PAUSE_SEC)
        self._process: _Process | None = None
        name = listening.getsockname()
        self.path = Path(name) if isinstance(name, str) and name else None  # None: it has no file
        self._file = self._now()
        self._start()

    def _start(self) -> None:
        if self.listening.fileno() < 0:
            return
        try:
            self._process = _Process(self.listening, self._count_file.fileno())
        except OSError as error:
            self._start_later(f"cannot be started: {error}")
        else:
            self._loop.add_reader(self._process.link, self._take, self._process)

    def _start_later(self, why: str) -> None:
        pause_sec = self._backoff.next_sec()
        log.error("%s: the process that accepts connections %s; next start in %g s", self.path, why, pause_sec)
        self._loop.call_later(pause_sec, self._start)

    def close(self) -> None:
        self._end_process()
        self.listening.close()
        self._count_file.close()

    def _end_process(self) -> None:
        if self._process is not None:
            self._loop.remove_reader(self._process.link)
            self._process.end()
            self._process = None

    @property
    def num_refused(self) -> int:
        """Connections that were refused because their holders have too many."""
        number: int = COUNT.unpack(os.pread(self._count_file.fileno(), COUNT.size, 0))[0]
        return number

    @property
    def is_there(self) -> bool:
        """True if the socket's file is still its own."""
        return self.path is None or self._now() == self._file

    def _now(self) -> tuple[int, int] | None:
        if self.path is not None:
            with contextlib.suppress(OSError):
                info = self.path.lstat()
                return (info.st_dev, info.st_ino) if stat.S_ISSOCK(info.st_mode) else None
        return None

    def _take(self, process: _Process) -> None:
        for _ in range(MAX_TAKEN):
            try:
                message, fds, _, _ = socket.recv_fds(process.link, HOLDER.size, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if not message:
                self._end_process()
                self._start_later("has ended")
                return
            self._backoff.reset()
            [holder] = HOLDER.unpack(message)
            if not fds:  # no descriptor is free here, and the kernel has closed the connection
                process.give_back(holder)
                continue
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0])
            made = partial(self._make, partial(process.give_back, holder))
            task = self._loop.create_task(self._loop.connect_accepted_socket(made, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
