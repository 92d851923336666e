"""Receipts: which responses with a 2xx status come from a receiver, and which from what stands in between."""

from __future__ import annotations

import http.client
import socket
import threading

import pytest

from honed.send import receipt
from honed.send.delivery import Client

LOGIN = b"\n<!-- portal -->\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"


def answer(head: str, body: bytes, *, max_bytes: int = 4096) -> str | None:
    """Return what is said about a response of a real server."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                heard = b""
                while not heard.endswith(b"{}"):
                    heard += connection.recv(65536)
                connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.getsockname()[1]}/"
            response, data = Client().post(address, b"{}", key="k", token=None, timeout_sec=10, max_bytes=max_bytes)
        finally:
            thread.join()
    return receipt.why_none(response, data, max_bytes=max_bytes)


def typed(kind: str, body: bytes, **more: int) -> str | None:
    return answer(f"Content-Type: {kind}\r\n", body, **more)


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "TEXT/HTML", "application/xhtml+xml", "text/plain", ""])
def test_a_login_page_is_no_receipt_whatever_it_says_that_it_is(kind: str) -> None:
    assert typed(kind, LOGIN) == "the response is an HTML page"
    assert answer("", b'\xef\xbb\xbf<?xml version="1.0"?><html lang="en">') == "the response is an HTML page"
    assert typed("text/html", b"<p>Please</p><form action=/login>") == "the response is an HTML page"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("kind", ["text/html", "text/plain", ""])
def test_a_login_page_in_two_bytes_a_character_is_one_too(kind: str, encoding: str) -> None:
    mark = "" if encoding == "utf-16" else "\ufeff"
    assert typed(kind, (mark + LOGIN.decode()).encode(encoding)) == "the response is an HTML page"


def test_a_login_page_that_begins_behind_what_is_read_is_one_too() -> None:
    page = b"<!-- " + b"licence " * 1000 + b"-->" + LOGIN
    assert typed("text/html", page) == "the response is an HTML page"
    assert typed("text/html", b" " * 5000 + LOGIN) == "the response is an HTML page"
    assert typed("application/octet-stream", page) is None
    assert typed("text/html", b"<p>Got this: " + b"x" * 5000) is None, "a webhook that repeats what it got"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"ok"),  # Slack
        ("text/html", b""),  # PHP's default type
        ("text/html; charset=UTF-8", b"<p>Thanks, a < b</p>"),
        ("", b""),  # Discord
        ("text/plain", b"ok"),
        ("text/plain", b"the title of <html> is noted"),
        ("application/xml", b'<?xml version="1.0"?><answer>ok</answer>'),
        ("application/json", b'{"id": "x", "event": "message"}'),  # ntfy
        ("application/json", b'\xef\xbb\xbf{"id": 1}'),
        ("application/json", b'{"id": 1}\n{"id": 2}\n\n'),
        ("application/x-ndjson", b'{"id": 1}\n{"id": 2}\n'),
        ("application/json", b"ok"),
        ("application/json", b""),
        ("application/problem+json", b"[]"),
        ("application/octet-stream", b"\xff\xfe\x00"),
    ],
)
def test_what_a_receiver_may_say_is_a_receipt(kind: str, body: bytes) -> None:
    assert typed(kind, body) is None


@pytest.mark.parametrize("body", [b'{"id": 1', b'{"id": 1}\n{"id', b"[[[", b"[" * 3000])
def test_json_that_ends_early_is_no_receipt_unless_we_read_no_further(body: bytes) -> None:
    assert typed("application/json", body) == "the response is truncated or invalid"
    assert typed("application/json", body, max_bytes=len(body)) is None


def test_an_answer_shorter_than_it_says_is_no_answer() -> None:
    with pytest.raises(http.client.IncompleteRead):
        answer("Content-Length: 100\r\n", b"ok")
