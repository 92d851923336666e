"""A metrics API that keeps the rows it receives, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from listener import Listener, Quiet

Reply = Callable[["Request"], None]


class Request(Quiet):
    """One POST. `reply` is what the test wants done with it."""

    body: bytes
    rows: list[dict[str, Any]]

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        endpoint: Endpoint = self.server.owner  # type: ignore[attr-defined]
        self.body = self.rfile.read(int(self.headers["Content-Length"]))
        data = json.loads(self.body)
        self.rows = [*data["metrics"], *data["predictions"]]
        with endpoint.lock:
            endpoint.requests.append(self)
            reply = endpoint.replies.pop(0) if endpoint.replies else endpoint.default
        with contextlib.suppress(OSError):
            reply(self)

    def accept(self, status: int = 200, body: bytes = b'{"ok": true}', kind: str = "application/json") -> None:
        """Keep the rows, and confirm it."""
        endpoint: Endpoint = self.server.owner  # type: ignore[attr-defined]
        with endpoint.lock:
            endpoint.num_times.update(row["idempotency_key"] for row in self.rows)
            endpoint.rows |= {row["idempotency_key"]: row for row in self.rows}
        self.answer(status, body, kind)

    def answer(self, status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class Endpoint(Listener):
    """The metrics API. `replies` answer the next requests in turn; then `default` does."""

    request_class = Request

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: list[Request] = []
        self.rows: dict[str, dict[str, Any]] = {}  #: by key
        self.num_times: Counter[str] = Counter()  #: how often each arrived
        self.replies: list[Reply] = []
        self.default: Reply = Request.accept
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api/training/predictions"

    def named(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows that have this column."""
        return [row for row in self.rows.values() if kind in row]


def refuse(status: int, body: bytes = b"", **headers: str) -> Reply:
    return lambda request: request.answer(status, body, **headers)


def speak_no_http(request: Request) -> None:
    request.wfile.write(b"\x00\xff SSH-2.0-OpenSSH_9.2\r\n\r\n")


def hang_up(request: Request) -> None:
    request.connection.close()


def show_a_login_page(request: Request) -> None:
    request.answer(200, b"<html>Please log in</html>", "text/html; charset=utf-8")


def cut_the_answer_short(request: Request) -> None:
    request.answer(200, b'{"accepted": 1')


def keep_and_hang_up(request: Request) -> None:
    """Keep the rows, but close the connection before the sender gets a response."""
    request.connection.shutdown(socket.SHUT_RDWR)
    request.accept()


@contextlib.contextmanager
def running() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    try:
        yield endpoint
    finally:
        endpoint.down()
