"""Takes the connections of honed-web's unix sockets, faster than somebody can make them, so that the kernel's backlog
has room for the next client, who may be root: asyncio would take a few in a round, and make a transport for all.

Of those that one holder makes while the backlog is never empty, it takes as many as are answered in a moment; the rest
get the answer that there is no place.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from honed.page.answer import no_place_at_all
from honed.page.place import Kind, Places
from honed.system.door import OF_CLIENT
from honed.system.holder import Holders
from honed.system.place import is_own

#: Connections taken in a round, and of one holder until the backlog is empty, but for root and our own user.
MAX_ACCEPTED, MAX_PER_HOLDER = 512, 96
_CREDENTIALS = struct.Struct("3I")
_NO_PLACE = no_place_at_all(Kind.USER)
#: Seconds until the next attempt after one without a free descriptor.
PAUSE_SEC = 1.0


class Acceptor:
    """Takes the connections of one unix socket, in an event loop."""

    def __init__(
        self,
        listening: socket.socket,
        places: Places,
        holders: Holders,
        protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        listening.setblocking(False)
        self.listening = listening
        self._places = places
        self._protocol = protocol
        self._holders = holders
        self._num_of: Counter[int] = Counter()  #: taken since the backlog was empty, by holder
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        name = listening.getsockname()
        self.path = Path(name) if isinstance(name, str) and name else None  # None: it has no file
        self._file = self._now()
        self._begin()

    def _begin(self) -> None:
        if self.listening.fileno() >= 0:
            self._loop.add_reader(self.listening.fileno(), self._accept)

    def close(self) -> None:
        if self.listening.fileno() >= 0:
            self._loop.remove_reader(self.listening.fileno())
            self.listening.close()

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

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                peer, _ = self.listening.accept()
            except BlockingIOError:
                self._num_of.clear()
                return
            except OSError as error:
                if error.errno in OF_CLIENT:
                    continue
                self._loop.remove_reader(self.listening.fileno())
                self._loop.call_later(PAUSE_SEC, self._begin)
                return
            try:
                self._admit(peer)
            except OSError:  # it has gone
                peer.close()

    def _admit(self, peer: socket.socket) -> None:
        """Make a connection, or refuse it. Raises OSError if the client has gone."""
        peer.setblocking(False)
        _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if not is_own(holder := self._holders.of(uid)):
            self._num_of[holder] += 1
            if self._num_of[holder] > MAX_PER_HOLDER:
                self._places.num_refused += 1
                with peer:
                    peer.send(_NO_PLACE)
                return
        task = self._loop.create_task(self._connect(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, peer)
        except OSError:
            peer.close()
