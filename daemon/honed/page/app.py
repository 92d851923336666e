"""The pages and the API of honed-web, and the rights to read them.

    a request ── a place for it? ── GET or HEAD? ── a Host of ours? ── who asks? ──► an endpoint, a page, a stream

A client with the token reads every job. Over a unix socket the client is a user of this machine, who reads what the
control socket would let them read. Over loopback without a token it may be any user of this machine: they read what
everybody may read (policy.share_results), and of other jobs the number, state and progress.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, TypeVar
from urllib.parse import urlencode

import anyio
import prometheus_client
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from honed.job.job import State
from honed.job.progress import progress_text
from honed.job.query import Asker
from honed.page import api, metrics, report
from honed.page.api import ENDPOINTS, Endpoint
from honed.page.job_page import Pages
from honed.page.page import NONCE, STYLE_SOURCE, source
from honed.page.place import Holder, Kind, Places, no_place, turns
from honed.page.source import NoSuchJobError, Page, Source, StateRow
from honed.spec.config import PolicyConfig
from honed.system import access
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, UsageError

log = logging.getLogger("honed.page.server")
T = TypeVar("T")

#: Seconds of one stream, after which a browser reconnects by itself; between looks at a job; between heartbeats.
STREAM_SEC, POLL_SEC, HEARTBEAT_SEC = 900.0, 1.0, 15.0
#: Threads that read the spool and the database, for each kind of client: five kinds have at most 15 requests at the
#: control socket, which takes 16 of one user.
MAX_READERS = 3
#: Seconds after which a refused client should ask again.
RETRY_SEC = 5
#: Finished jobs on the page of all jobs; and unfinished ones, at most.
INDEX_ROWS, MAX_INDEX_ROWS = 200, 2000
#: Bytes of one piece of a page that is being sent.
PIECE_BYTES = 64 * 1024
#: A number that no job has: it is too long for a file name, and Python refuses thousands of digits.
_ENDLESS = re.compile(r"[0-9]{19}")
#: The uid of a client over loopback without a token: no user of this machine has it.
NOBODY = -1
_RETRY = {"Retry-After": str(RETRY_SEC)}
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src {style}; img-src data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
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


@dataclass
class Web:
    """The application. `rules` may be replaced at any time."""

    source: Source
    rules: Rules
    is_ending: Callable[[], bool] = lambda: False
    pages: Pages = field(init=False)
    places: Places = field(default_factory=Places)

    def __post_init__(self) -> None:
        self.pages = Pages(self.source.layout)
        self._turns = turns(MAX_READERS)
        self._readers = anyio.CapacityLimiter(MAX_READERS * len(Kind))
        self._script = source("live.js")

    @cached_property
    def _openapi(self) -> bytes:
        return _encode(api.openapi())

    @property
    def app(self) -> ASGIApp:
        routes = [
            Route("/", self._index),
            Route("/index.html", self._index),
            Route("/login", _at_once(_log_in)),
            Route("/jobs/{job_id:int}", self._job_page),
            # The address of a page in the index that honed writes.
            Route(
                "/jobs/{job_id:int}/report.html",
                _at_once(lambda request: RedirectResponse(request.url.path.rpartition("/")[0])),
            ),
            Route("/live.js", _at_once(lambda _: Response(self._script, media_type="text/javascript"))),
            Route("/api/events", self._all_events),
            Route("/api/jobs/{job_id:int}/events", self._job_events),
            Route("/openapi.json", _at_once(lambda _: Response(self._openapi, media_type="application/json"))),
            Route("/metrics", self._metrics),
            *(Route(each.path.replace("{job_id}", "{job_id:int}"), partial(self._answer, each)) for each in ENDPOINTS),
        ]
        handlers = {HonedError: _refusal, OSError: _unreadable, sqlite3.Error: _unreadable, HTTPException: _no_route}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self)  # type: ignore[arg-type]

    async def read(self, kind: Kind, function: Callable[..., T], *arguments: Any, is_patient: bool = False) -> T:
        """Run a function that reads files in a thread, once it is the turn of a client of this kind."""
        async with self._turns[kind].one(is_patient=is_patient):
            return await anyio.to_thread.run_sync(partial(function, *arguments), limiter=self._readers)

    # -- the API ------------------------------------------------------------------------------------------------------

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        return await self.read(_kind(request), self._made, endpoint, request)

    def _made(self, endpoint: Endpoint, request: Request) -> Response:
        jobs, asked = request.path_params.values(), _parameters(endpoint, request)
        found = endpoint.read(self.source, *jobs, _asker(request), **asked)
        headers = {}
        if isinstance(found, Page):
            assert endpoint.rows is not None
            words = {key: value for key, value in request.query_params.items() if key != "cursor"}
            after = f"{request.url.path}?{urlencode({**words, 'cursor': found.next})}" if found.next else None
            headers = {"Link": f'<{after}>; rel="next"'} if after else {}
            found = {endpoint.rows: found.rows, "next": after}
        status = 503 if endpoint.path == "/healthz" and found["status"] != "ok" else 200
        return Response(_encode(found), status, headers, media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        body = await self.read(_kind(request), metrics.scrape, self.source, _asker(request))
        return Response(body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    # -- pages --------------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        before = request.query_params.get("before", "")
        if before and not re.fullmatch(r"[0-9]{1,18}", before):
            raise UsageError(f"before: not a job number: {before[:40]!r}", hint="follow the link to older jobs")
        page = await self.read(
            _kind(request), self._index_page, _asker(request), int(before or 0), request.state.may_log_in
        )
        return _html(page)

    def _index_page(self, asker: Asker, before: int, may_log_in: bool) -> bytes:
        rows = self.source.rows(asker)
        over = {state.value for state in State if state.is_final}
        waiting = [row for row in rows if row["state"] not in over][:MAX_INDEX_ROWS] if not before else []
        done = [row for row in rows if row["state"] in over and (not before or row["id"] < before)]
        return report.index(
            [*waiting, *done[:INDEX_ROWS]],
            lambda job_id: f"/jobs/{job_id}",
            now=time.time(),
            is_served=True,
            may_log_in=may_log_in,
            older_than=done[INDEX_ROWS - 1]["id"] if len(done) > INDEX_ROWS else None,
        )

    async def _job_page(self, request: Request) -> Response:
        kind = _kind(request)
        job = await self.read(kind, self.source.job, request.path_params["job_id"], _asker(request))
        return _html((await self.pages.page(job, kind)).page)

    # -- events -------------------------------------------------------------------------------------------------------

    async def _job_events(self, request: Request) -> Response:
        asker, job_id = _asker(request), request.path_params["job_id"]
        await self.read(_kind(request), self.source.job, job_id, asker)  # a refusal comes now, not within the stream
        return self._stream(request, self._tell_job(job_id, asker, _kind(request)))

    async def _all_events(self, request: Request) -> Response:
        return self._stream(request, self._tell_all(_asker(request), _kind(request)))

    def _stream(self, request: Request, events: AsyncIterator[bytes]) -> Response:
        holder: Holder = request.state.holder
        if (others := self.places.streams(holder)) is not None:
            raise EnvironmentInvalidError(
                f"{others} pages are already receiving live updates",
                hint="close one, or reload this one from time to time",
            )
        return _Stream(holder, events)

    async def _tell_job(self, job_id: int, asker: Asker, kind: Kind) -> AsyncIterator[bytes]:
        last: StateRow | None = None
        async for _ in self._ticks():
            found = await self.read(kind, self.source.state, job_id, asker, is_patient=True)
            if found != last:
                last = found
                yield _event("progress", {**found, "line": _line(found)})
                if State(found["state"]).is_final:
                    yield _event("ended", {"state": found["state"], "outcome": found["outcome"]})
                    return
            else:
                yield b""

    async def _tell_all(self, asker: Asker, kind: Kind) -> AsyncIterator[bytes]:
        last: list[Any] | None = None
        async for _ in self._ticks():
            rows = await self.read(kind, self.source.rows, asker, is_patient=True)
            if rows is not last and rows != last:
                if last is not None:
                    yield _event("changed", {"num_jobs": len(rows)})
                last = rows
            yield b""

    async def _ticks(self) -> AsyncIterator[None]:
        ends_at = time.monotonic() + STREAM_SEC
        while time.monotonic() < ends_at and not self.is_ending():
            yield
            await asyncio.sleep(POLL_SEC)


class _Stream(StreamingResponse):
    """Server-sent events, counted while somebody listens."""

    def __init__(self, holder: Holder, events: AsyncIterator[bytes]) -> None:
        super().__init__(self._framed(events), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._holder = holder

    @staticmethod
    async def _framed(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield b"retry: 3000\n\n"
        told_at = time.monotonic()
        try:
            async for event in events:
                if event or time.monotonic() - told_at >= HEARTBEAT_SEC:
                    told_at = time.monotonic()
                    yield event or b": still here\n\n"
        except (HonedError, OSError, sqlite3.Error) as error:  # a browser reconnects, and gets the error then
            log.info("a stream of events ended: %s", error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._holder.is_streaming = True
        try:
            if scope["method"] == "HEAD":
                await Response(media_type=self.media_type)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            self._holder.is_streaming = False


def _event(kind: str, data: Mapping[str, Any]) -> bytes:
    # JSON has no line breaks of its own, so a text in it cannot end the event and begin another.
    return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def _line(found: StateRow) -> str:
    """Return the top line of an unfinished job's page; empty unless the job runs."""
    if found["state"] != "running":
        return ""
    is_training = found["progress"].get("step") is not None
    return f"running: {progress_text(found['progress']) if is_training else found['stage'] or 'starting'}"


# -- who asks ---------------------------------------------------------------------------------------------------------


class Guard:
    """Checks every request before the application sees it, and adds the security headers to every answer. It also finds
    a place for a request over TCP: until its head has been read, it is not known whether the client has the token."""

    def __init__(self, app: ASGIApp, web: Web) -> None:
        self._app = app
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                more = [each for each in _HEADERS if each[0] not in names]
                if b"content-security-policy" not in names:
                    more.append((b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> Response | None:
        rules, peer = self._web.rules, scope["state"]["peer"]
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        shown = shown_token(headers.get(b"authorization"))
        has_token = shown is not None and rules.token is not None and _equal(shown, rules.token)
        holder: Holder = scope["state"]["holder"]
        kind = kind_of(rules.policy, peer) if peer is not None else Kind.TOKEN if has_token else Kind.UNKNOWN
        # Without a place of its own by now, the connection has been lost, and would keep another for ever.
        if holder.kind is not None and not self._web.places.enter(kind, holder):
            self._web.places.num_refused += 1
            return _said(503, no_place(kind), {**_RETRY, "Connection": "close"})
        if scope["method"] not in {"GET", "HEAD"}:
            return _said(
                405,
                UsageError("honed-web is read-only: use GET or HEAD", hint="use honectl for changes"),
                {"Allow": "GET, HEAD"},
            )
        if peer is None and not rules.needs_token and not _is_ours(headers.get(b"host", ""), rules.hosts):
            error = NotPermittedError(
                "the Host of this request is not a name of this machine", hint="see web.hosts in honed.toml"
            )
            return _said(421, error)
        if (shown is not None and rules.token is not None and not has_token) or (
            peer is None and rules.needs_token and not has_token
        ):
            return _token_wanted()
        if _ENDLESS.search(scope["path"]):
            return _said(404, NoSuchJobError("no job has this number", hint="GET /api/jobs lists all jobs"))
        scope["state"] = {
            **scope["state"],
            "kind": kind,
            "asker": asker_of(rules.policy, peer, has_token=has_token),
            "may_log_in": peer is None and rules.token is not None and not has_token,
        }
        return None


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


def _equal(shown: str, token: str) -> bool:
    """Compare in a time that reveals nothing of either, not even its length."""
    digests = (hashlib.sha256(each.encode(errors="replace")).digest() for each in (shown, token))
    return hmac.compare_digest(*digests)


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """Return True if a Host header names us. A foreign page whose name resolves to 127.0.0.1 (DNS rebinding) sends its
    own."""
    name = re.sub(r":[0-9]*$", "", host.strip().lower()).rstrip(".")
    return name in names


def _asker(request: Request) -> Asker:
    asker: Asker = request.state.asker
    return asker


def _kind(request: Request) -> Kind:
    kind: Kind = request.state.kind
    return kind


def _log_in(request: Request) -> Response:
    """Ask a browser for the token: at the root, so that it sends the token everywhere from then on."""
    return _token_wanted() if request.state.may_log_in else RedirectResponse("/")


def _token_wanted() -> Response:
    error = NotPermittedError(
        "honed-web needs its token", hint="send Authorization: Bearer TOKEN, or TOKEN as the password"
    )
    return _said(401, error, {"WWW-Authenticate": 'Basic realm="honed", charset="UTF-8"'})


# -- answers ----------------------------------------------------------------------------------------------------------


def _parameters(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    try:
        return dict(endpoint.parameters.model_validate(dict(request.query_params)))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(endpoint.parameters.model_fields) or "there are none"
        raise UsageError(f"{name[:80]}: {first['msg']}", hint=f"parameters: {known}; see /openapi.json") from None


def _at_once(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Make an endpoint of an answer that needs no thread."""

    async def endpoint(request: Request) -> Response:
        return answer(request)

    return endpoint


@cache
def refusal(kind: Kind) -> bytes:
    """Return the whole response to a connection without a place, of which no request has been read."""
    told = _said(503, no_place(kind), {**_RETRY, "Connection": "close"})
    head = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in told.raw_headers)
    return f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + bytes(told.body)


def _html(page: bytes) -> Response:
    """Return a page with a nonce of its own, sent in pieces since many pages may be under way."""
    nonce = secrets.token_urlsafe(16)
    at = page.find(NONCE)

    async def pieces() -> AsyncIterator[bytes]:
        if at >= 0:
            yield page[:at] + nonce.encode()
        for start in range(at + len(NONCE) if at >= 0 else 0, len(page), PIECE_BYTES):
            yield page[start : start + PIECE_BYTES]

    headers = {
        "Content-Security-Policy": _POLICY.format(nonce=nonce, style=STYLE_SOURCE),
        "Content-Length": str(len(page) + (len(nonce) - len(NONCE) if at >= 0 else 0)),
    }
    return StreamingResponse(pieces(), headers=headers, media_type="text/html")


def _encode(value: Any) -> bytes:
    """Return JSON for every parser: NaN becomes null, and invalid text (surrogates, as in file names) valid UTF-8."""
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        made = dumps(value)
    except ValueError:
        made = dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))
    return made.encode(errors="replace")


def _said(status: int, error: HonedError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode({"error": error.as_dict()}), status, headers, media_type="application/json")


async def _refusal(request: Request, error: HonedError) -> Response:
    match error:
        case NotPermittedError() if request.state.may_log_in:
            return _token_wanted()
        case NotPermittedError():
            return _said(403, error)
        case NoSuchJobError():
            return _said(404, error)
        case UsageError():
            return _said(400, error)
        case _:
            return _said(503, error, _RETRY)


async def _unreadable(request: Request, error: OSError | sqlite3.Error) -> Response:
    log.error("%s: %s", request.url.path, error)
    match error:
        case OSError(filename=str(path), strerror=str(why)):
            words = f"{path}: {why}"
        case OSError():
            words = str(error)
        case _:
            words = f"honed.db: {error}"
    return await _refusal(request, EnvironmentInvalidError(words, hint="see honed's journal and honectl doctor"))


async def _no_route(_request: Request, error: HTTPException) -> Response:
    return _said(
        error.status_code,
        UsageError("there is no page at this address", hint="/openapi.json lists all addresses"),
        error.headers,
    )
