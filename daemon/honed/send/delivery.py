"""One HTTP delivery, of rows or of a notice: a POST within a deadline, and the verdict of the status."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from urllib.parse import urlsplit

from honed import __version__

#: Statuses that concern us or the moment, not the content: the same content may be accepted later. A wrong address and
#: an expired token are the administrator's to fix, and must not lose a row.
NOT_ABOUT_THE_CONTENT = {401, 402, 403, 404, 405, 407, 408, 410, 421, 423, 425, 426, 429, 451}


class Verdict(Enum):
    """The meaning of a response for the content that was sent."""

    TAKEN = auto()
    REFUSED = auto()  #: it will never be accepted as it is
    LATER = auto()


def verdict(status: int) -> Verdict:
    """Return the verdict of a status."""
    if 200 <= status < 300:
        return Verdict.TAKEN
    return Verdict.REFUSED if 400 <= status < 500 and status not in NOT_ABOUT_THE_CONTENT else Verdict.LATER


class Client:
    """Sends one request at a time, each on its own connection. Redirects are not followed: they could lead to an
    address that nobody has allowed."""

    def __init__(self) -> None:
        self._hang_up: Callable[[], None] | None = None

    def post(
        self,
        address: str,
        body: bytes,
        *,
        key: str,
        token: str | None,
        timeout_sec: float,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send JSON under an idempotency key. Returns the response, and up to `max_bytes` of its content.

        Raises OSError (TimeoutError after `timeout_sec`), HTTPException or ValueError without a valid response.
        """
        parts = urlsplit(address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_sec)
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        sent = {
            "Content-Type": "application/json; charset=utf-8",
            **(headers or {}),
            "User-Agent": f"honed/{__version__}",
            "Idempotency-Key": key,
            "Connection": "close",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        try:
            connection.connect()
            with deadline(connection.sock, timeout_sec) as hang_up, self._interruptible(hang_up):
                connection.request("POST", path, body, sent)
                response = connection.getresponse()
                data = response.read(max_bytes)
                if response.length and len(data) < max_bytes:
                    raise http.client.IncompleteRead(data, response.length)
                return response, data
        finally:
            connection.close()

    def hang_up(self) -> None:
        """Interrupt a request that waits for its response; a signal handler may call this."""
        if self._hang_up is not None:
            self._hang_up()

    @contextlib.contextmanager
    def _interruptible(self, hang_up: Callable[[], None]) -> Iterator[None]:
        self._hang_up = hang_up
        try:
            yield
        finally:
            self._hang_up = None


def words(data: bytes) -> str:
    """Return the text of a response on one line."""
    return " ".join(data.decode(errors="replace").split())


@contextlib.contextmanager
def deadline(connection: socket.socket, seconds: float) -> Iterator[Callable[[], None]]:
    """Limit the duration of a whole exchange: a socket's own timeout restarts with every received byte.

    Yields a function that interrupts the exchange. Raises TimeoutError if it took longer.
    """
    is_over = threading.Event()
    descriptor = os.dup(connection.fileno())  # a duplicate: TLS takes the other one away

    def hang_up() -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
            own.shutdown(socket.SHUT_RDWR)

    def end() -> None:
        is_over.set()
        hang_up()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield hang_up
    except Exception as error:
        if is_over.is_set():
            raise TimeoutError("no complete response in time") from error
        raise
    finally:
        timer.cancel()
        timer.join()
        os.close(descriptor)
    if is_over.is_set():
        raise TimeoutError("no complete response in time")
