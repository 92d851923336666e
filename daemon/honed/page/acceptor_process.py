"""The process that accepts the connections of one of honed-web's unix sockets, and hands them to its event loop.

    clients ──► listening socket ──► this process ──┬── a connection and its holder ──► Acceptor
                                          ▲         └── 503: its holder has MAX_PER_HOLDER of them
                                          └───────────── the holder of one that has ended ───┘

The kernel keeps a limited number of connections that are not accepted yet. One client that connects in a loop makes so
many in a fifth of a second, and whoever connects then gets EAGAIN: root, for one. An event loop that also answers
requests is not fast enough, and neither is a thread, which waits for the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import time
from collections import Counter

from honed.system.door import OF_CLIENT
from honed.system.holder import Holders
from honed.system.place import is_own

#: Connections of one holder at a time, but for root and our own user: twice the places of a user, so that those without
#: one have a moment to read why.
MAX_PER_HOLDER = 96
#: Connections accepted before the next look at those that have ended.
MAX_ACCEPTED = 512
#: Seconds until the next attempt after one without a free descriptor.
PAUSE_SEC = 1.0
#: A holder, and the number of refused connections.
HOLDER, COUNT = struct.Struct("q"), struct.Struct("Q")
#: Bytes of a message: the holders of connections that have ended, or the answer to a refused one.
MAX_MESSAGE_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3I")


class Accepting:
    """Accepts connections and counts them by holder. The first message on `link` is the answer to refused ones; their
    number is kept in the file `count_fd`."""

    def __init__(self, listening: socket.socket, link: socket.socket, count_fd: int) -> None:
        self._listening = listening
        self._link = link
        self._count_fd = count_fd
        self._answer = link.recv(MAX_MESSAGE_BYTES)
        self._holders = Holders()
        self._num_of: Counter[int] = Counter()
        [self._num_refused] = COUNT.unpack(os.pread(count_fd, COUNT.size, 0))  # by the process before this one

    def run(self) -> None:
        """Accept connections until honed-web closes the link. Raises ConnectionError if it has died."""
        poll = select.poll()
        for waited in (self._listening, self._link):
            poll.register(waited, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._link.fileno() in ready:
                if not (ended := self._link.recv(MAX_MESSAGE_BYTES)):
                    return
                self._num_of.subtract(holder for (holder,) in HOLDER.iter_unpack(ended))
            if self._listening.fileno() in ready:
                self._accept()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                peer, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OF_CLIENT:
                    continue
                time.sleep(PAUSE_SEC)
                return
            with peer:
                self._admit(peer)

    def _admit(self, peer: socket.socket) -> None:
        """Hand a connection over, or refuse it."""
        _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        holder = self._holders.of(uid)
        if (is_ours := is_own(holder)) or self._num_of[holder] < MAX_PER_HOLDER:
            # While honed-web is too busy to take more, ours wait, and others are refused.
            with contextlib.suppress(OSError):
                flags = 0 if is_ours else socket.MSG_DONTWAIT
                socket.send_fds(self._link, [HOLDER.pack(holder)], [peer.fileno()], flags)
                self._num_of[holder] += 1
                return
        self._num_refused += 1
        os.pwrite(self._count_fd, COUNT.pack(self._num_refused), 0)  # before the answer: whoever has it is counted
        with contextlib.suppress(OSError):  # the client has gone
            peer.send(self._answer, socket.MSG_DONTWAIT)


def main() -> None:
    """Run the program: its arguments are the descriptors of the listening socket, of the link and of the count."""
    listening_fd, link_fd, count_fd = map(int, sys.argv[1:])
    with socket.socket(fileno=listening_fd) as listening, socket.socket(fileno=link_fd) as link:
        listening.setblocking(False)
        with contextlib.suppress(ConnectionError):
            Accepting(listening, link, count_fd).run()


if __name__ == "__main__":
    main()
