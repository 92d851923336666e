"""A web server inside a test: on a port of its own, which it keeps while it is down, and misbehaving on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


def keep_port(number: int) -> socket.socket:
    """Keep a port of 127.0.0.1, or a free one for 0, beside the server that listens there. While none does, connections
    are refused, and the kernel gives the port to no other process of a busy machine."""
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", number))
    return kept


class Listener:
    """A server that listens from the start, until `down`. A request finds it as `self.server.owner`."""

    request_class: ClassVar[type[BaseHTTPRequestHandler]]

    def __init__(self) -> None:
        self._kept = keep_port(0)
        self.port: int = self._kept.getsockname()[1]
        self._server: ThreadingHTTPServer | None = None
        self.up()

    def up(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self.request_class)
        self._server.owner = self  # type: ignore[attr-defined]
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class Quiet(BaseHTTPRequestHandler):
    """A request that is not logged on stderr."""

    def log_message(self, *_: object) -> None:
        """Log nothing on stderr."""


def drip(request: Any) -> None:
    """Send a byte now and then, forever."""
    with contextlib.suppress(OSError):
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(600):
            request.wfile.write(b" ")
            time.sleep(0.05)
