"""A mail server, with and without TLS, and a chat's webhook; both keep what they receive, and misbehave on demand."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import socketserver
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from typing import Any

from listener import Listener, Quiet, keep_port


class _Talk(socketserver.StreamRequestHandler):
    """One SMTP conversation with the verbs that honed uses: EHLO, STARTTLS, AUTH PLAIN, MAIL, RCPT, DATA, QUIT."""

    def setup(self) -> None:
        self.office: PostOffice = self.server.office  # type: ignore[attr-defined]
        self.is_private = False
        if self.office.security == "tls":
            self._go_private()
        super().setup()

    def _go_private(self) -> None:
        assert self.office.tls is not None
        self.request = self.office.tls.wrap_socket(self.request, server_side=True)
        self.is_private = True

    def handle(self) -> None:
        office = self.office
        if office.is_silent:
            time.sleep(5)
            return
        self._say("220 post office")
        while line := self.rfile.readline().decode().strip():
            verb = line.split(":")[0].split(" ")[0].upper()
            if not self.is_private:
                office.in_clear.append(verb)
            match verb:
                case "EHLO":
                    self._say(
                        "250-post office" + "".join(f"\r\n250-{each}" for each in self._offers()) + "\r\n250 SMTPUTF8"
                    )
                case "STARTTLS":
                    self._say("220 go on")
                    self._go_private()
                    super().setup()
                case "AUTH":
                    office.logins.append(line.split(" ")[2])
                    self._say("235 welcome")
                case "MAIL":
                    self._say("250 ok")
                case "RCPT":
                    self._say(office.rcpt_answers.pop(0) if office.rcpt_answers else "250 ok")
                case "DATA":
                    self._say("354 go on")
                    data = b""
                    while (text := self.rfile.readline()) not in {b".\r\n", b""}:
                        data += text
                    office.keep(data)
                    if office.num_hang_ups:
                        office.num_hang_ups -= 1
                        return  # the mail is kept, but the sender gets no response
                    self._say("250 kept")
                case "QUIT":
                    while office.drips_farewell:
                        self.wfile.write(b"2")
                        time.sleep(0.05)
                    self._say("221 bye")
                    return
                case _:
                    self._say("250 ok")

    def _offers(self) -> list[str]:
        """Return the extensions offered: like real servers, no AUTH before STARTTLS where STARTTLS is available."""
        if self.office.security == "starttls" and not self.is_private:
            return ["STARTTLS"]
        return ["AUTH PLAIN"]

    def _say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that does not trust the certificate and hangs up in the handshake."""
        if not isinstance(sys.exception(), ssl.SSLError):
            super().handle_error(request, client_address)


class PostOffice:
    """A mail server on a port of its own from the first `up` on. `security` is its TLS mode, as in smtp_security."""

    def __init__(self, *, security: str = "none", tls: ssl.SSLContext | None = None) -> None:
        self.security = security
        self.tls = tls
        self.mails: dict[str, EmailMessage] = {}  #: by Message-ID
        self.num_times: Counter[str] = Counter()
        self.rcpt_answers: list[str] = []
        self.logins: list[str] = []
        self.in_clear: list[str] = []  #: the verbs sent without encryption
        self.num_hang_ups = 0
        self.is_silent = False
        self.drips_farewell = False
        self._kept = keep_port(0)
        self.port: int = self._kept.getsockname()[1]
        self._server: _Server | None = None
        self.up()

    def keep(self, data: bytes) -> None:
        mail = email.message_from_bytes(data, policy=email.policy.default)
        assert isinstance(mail, EmailMessage)
        self.num_times[str(mail["Message-ID"])] += 1
        self.mails[str(mail["Message-ID"])] = mail

    def up(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), _Talk)
        self._server.office = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Post(Quiet):
    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        hook: Webhook = self.server.owner  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = hook.replies.pop(0) if hook.replies else None
        if callable(reply):
            reply(self)
            return
        if reply is None or reply < 300:
            hook.num_times[str(self.headers["Idempotency-Key"])] += 1
            hook.notices[str(self.headers["Idempotency-Key"])] = body
            hook.headers.append(dict(self.headers.items()))
            hook.paths.append(self.path)
        self.send_response(reply or 200)
        if reply in {301, 302}:
            self.send_header("Location", f"http://127.0.0.1:{hook.port}/elsewhere")
        self.end_headers()
        self.wfile.write(b"ok")


class Webhook(Listener):
    """A chat server's webhook; `replies` answer the next requests, each a status or a function."""

    request_class = _Post

    def __init__(self) -> None:
        self.notices: dict[str, dict[str, Any]] = {}  #: by key
        self.num_times: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.replies: list[int | Callable[[Any], None]] = []
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks"


def keep_and_hang_up(request: Any) -> None:
    """Keep the notice, but send the sender no response."""
    request.server.owner.num_times[str(request.headers["Idempotency-Key"])] += 1


def show_a_login_page(request: Any) -> None:
    """Answer as a proxy that wants a password does."""
    request.send_response(200)
    request.send_header("Content-Type", "text/html")
    request.end_headers()
    request.wfile.write(b"<!doctype html><title>Sign in</title><form action=/login>")


@contextlib.contextmanager
def open_both() -> Iterator[tuple[Webhook, PostOffice]]:
    hook, office = Webhook(), PostOffice()
    try:
        yield hook, office
    finally:
        hook.down()
        office.down()
