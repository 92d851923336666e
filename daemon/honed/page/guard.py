"""The rights of a request to honed-web.

    a request ── a place for it? ── GET or HEAD? ── a Host of ours? ── who asks? ──► the application

A client with the token, or with the session of the instance's owner, reads every job. The session is one of the
owner's processes: browsers send its cookie to every port of 127.0.0.1, so another user of this machine may get it. Over
a unix socket the client is a user of this machine, who reads what the control socket would let them read. Over loopback
without a token it may be any user of this machine: they read what everybody may read (policy.share_results), and of
other jobs the number, state and progress.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from honed.job.query import Asker
from honed.page.answer import RETRY, Login, error_answer, token_wanted
from honed.page.place import Holder, Kind, Places, no_place
from honed.page.session import Session, equal
from honed.page.source import NoSuchJobError
from honed.spec.config import PolicyConfig
from honed.system import access
from honed.system.error import NotPermittedError, UsageError

#: A number that no job has: it is too long for a file name, and Python refuses thousands of digits.
_ENDLESS = re.compile(r"[0-9]{19}")
#: The uid of a client over loopback without a token: no user of this machine has it.
NOBODY = -1
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True)
class Peer:
    """The user at the other end of a unix socket."""

    uid: int
    gids: frozenset[int]


@dataclass(frozen=True)
class Rules:
    """The rules of access; read from the configuration, and again at a reload."""

    policy: PolicyConfig
    token: str | None
    hosts: frozenset[str]
    needs_token: bool  #: other machines can reach us


class Guarded(Protocol):
    """The application, as far as it is guarded. Its rules may be replaced at any time."""

    rules: Rules
    session: Session | None
    places: Places


class Guard:
    """Checks every request before the application sees it, and adds the security headers to every answer. It also finds
    a place for a request over TCP: until its head has been read, it is not known whether the client has the token."""

    def __init__(self, app: ASGIApp, web: Guarded) -> None:
        self._app = app
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                more = [header for header in _HEADERS if header[0] not in names]
                if b"content-security-policy" not in names:
                    more.append((b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await (self._refused(scope) or self._app)(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> Response | None:
        rules, peer, session = self._web.rules, scope["state"]["peer"], self._web.session
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        shown = shown_token(headers.get(b"authorization"))
        has_token = shown is not None and rules.token is not None and equal(shown, rules.token)
        holder: Holder = scope["state"]["holder"]
        has_cookie = (
            session is not None and peer is None and session.has(headers.get(b"cookie", ""), scope["server"][1])
        )
        is_owner = has_cookie and not _is_of_another_page(headers) and holder.is_of_owner
        kind = (
            kind_of(rules.policy, peer) if peer is not None else Kind.TOKEN if has_token or is_owner else Kind.UNKNOWN
        )
        # Without a place of its own by now, the connection has been lost, and would keep another for ever.
        if holder.kind is not None and not self._web.places.enter(kind, holder):
            self._web.places.num_refused += 1
            return error_answer(503, no_place(kind), {**RETRY, "Connection": "close"}, scope=scope)
        if scope["method"] not in {"GET", "HEAD"}:
            error: UsageError | NotPermittedError
            error = UsageError("honed-web is read-only: use GET or HEAD", hint="use honectl for changes")
            return error_answer(405, error, {"Allow": "GET, HEAD"}, scope=scope)
        if peer is None and not rules.needs_token and not _is_ours(headers.get(b"host", ""), rules.hosts):
            error = NotPermittedError(
                "the Host of this request is not a name of this machine", hint="see web.hosts in honed.toml"
            )
            return error_answer(421, error, scope=scope)
        if (shown is not None and rules.token is not None and not has_token) or (
            peer is None and rules.needs_token and not has_token
        ):
            return token_wanted(scope)
        if _ENDLESS.search(scope["path"]):
            error = NoSuchJobError("no job has this number", hint="GET /api/jobs lists all jobs")
            return error_answer(404, error, scope=scope)
        scope["state"] = {
            **scope["state"],
            "kind": kind,
            "asker": asker_of(rules.policy, peer, has_token=has_token or is_owner),
            "login": _login(rules, session) if kind is Kind.UNKNOWN else Login.NONE,
        }
        return None


def _is_of_another_page(headers: Mapping[bytes, str]) -> bool:
    """Return True if a browser says that a page of another origin has made the request. A cookie is sent for those at
    other ports, too. A link that is followed is none: what it shows is not that page's."""
    is_link = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == ("navigate", "document")
    return headers.get(b"sec-fetch-site") in {"same-site", "cross-site"} and not is_link


def _login(rules: Rules, session: Session | None) -> Login:
    if rules.token is not None:
        return Login.PASSWORD
    return Login.LINK if session is not None else Login.NONE


def asker_of(policy: PolicyConfig, peer: Peer | None, *, has_token: bool) -> Asker:
    """Return the asker, as the daemon does for its control socket; over TCP the token alone identifies a client."""
    if peer is None or has_token:
        return Asker(NOBODY, is_administrator=False, reads_all=has_token or policy.share_results)
    is_administrator = kind_of(policy, peer) is not Kind.USER
    return Asker(peer.uid, is_administrator, is_administrator or policy.share_results)


def kind_of(policy: PolicyConfig, peer: Peer) -> Kind:
    """Return the kind of a client of the unix socket."""
    if peer.uid in {0, os.getuid()}:
        return Kind.ROOT
    return Kind.ADMINISTRATOR if access.group_id(policy.admin_group) in peer.gids else Kind.USER


def shown_token(header: str | None) -> str | None:
    """Return the token of an Authorization header: a bearer's, or a browser's password with any user name."""
    kind, _, word = (header or "").strip().partition(" ")
    match kind.lower():
        case "bearer":
            return word.strip()
        case "basic":
            with contextlib.suppress(ValueError):
                return base64.b64decode(word, validate=True).decode().partition(":")[2]
            return ""
        case "":
            return None
        case _:
            return ""


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """Return True if a Host header names us. A foreign page whose name resolves to 127.0.0.1 (DNS rebinding) sends its
    own."""
    return re.sub(r":[0-9]*$", "", host.strip().lower()).rstrip(".") in names
