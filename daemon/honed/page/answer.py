"""Answers of honed-web: pages, JSON, and errors, which are pages for browsers and JSON for programs."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sqlite3
from collections.abc import AsyncIterator, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from honed.page.page import NONCE, SERVED_STYLE_SOURCE, document
from honed.page.place import Kind, no_place
from honed.page.source import NoSuchJobError
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, UsageError

log = logging.getLogger("honed.page.server")

#: Seconds after which a refused client should ask again.
RETRY_SEC = 5
RETRY = {"Retry-After": str(RETRY_SEC)}
#: Bytes of one piece of a page that is being sent.
PIECE_BYTES = 64 * 1024
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src {style}; img-src data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
#: Addresses for programs: a browser that opens them sees the same as a program.
_FOR_PROGRAMS = re.compile(r"/(api/.*|openapi\.json|healthz|metrics|[a-z]+\.js)")


class Login(Enum):
    """The way in which a client over TCP, which has not logged in, may do so."""

    NONE = ""
    PASSWORD = "password"  #: with the token of web.token_file
    LINK = "link"  #: with the link that `honectl web` prints


_TITLES = {
    400: "The address is not valid",
    401: "honed-web needs its token",
    403: "Not permitted",
    404: "Not found",
    405: "honed-web is read-only",
    421: "Wrong host name",
    503: "Not available now",
}


@cache
def no_place_at_all(kind: Kind) -> bytes:
    """Return the whole response to a connection without a place, of which no request has been read."""
    answer = error_answer(503, no_place(kind), {**RETRY, "Connection": "close"})
    head = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in answer.raw_headers)
    return f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + bytes(answer.body)


def html(page: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a page with a nonce of its own, sent in pieces since many pages may be under way."""
    nonce = secrets.token_urlsafe(16)
    end = page.find(b"</head>") + 1
    head = page[:end].replace(NONCE, nonce.encode())

    async def pieces() -> AsyncIterator[bytes]:
        yield head
        for start in range(end, len(page), PIECE_BYTES):
            yield page[start : start + PIECE_BYTES]

    more = {
        "Content-Security-Policy": _POLICY.format(nonce=nonce, style=SERVED_STYLE_SOURCE),
        "Content-Length": str(len(head) + len(page) - end),
    }
    return StreamingResponse(pieces(), status, {**more, **(headers or {})}, media_type="text/html")


def encode(value: Any) -> bytes:
    """Return JSON for every parser: NaN becomes null, and invalid text (surrogates, as in file names) valid UTF-8."""
    dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        made = dumps(value)
    except ValueError:
        made = dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))
    return made.encode(errors="replace")


def error_answer(
    status: int, error: HonedError, headers: Mapping[str, str] | None = None, *, scope: Scope | None = None
) -> Response:
    """Return an error; a page if a browser asks for one."""
    if scope is None or not _wants_page(scope):
        return Response(encode({"error": error.as_dict()}), status, headers, media_type="application/json")
    title = _TITLES.get(status, "An error")
    page = document("error.html", title=f"honed: {title}", is_served=True, live="", heading=title, error=error)
    return html(page, status, headers)


def _wants_page(scope: Scope) -> bool:
    accepted = (value for name, value in scope["headers"] if name == b"accept")
    return any(b"text/html" in item for item in accepted) and not _FOR_PROGRAMS.fullmatch(scope["path"])


def token_wanted(scope: Scope) -> Response:
    error = NotPermittedError(
        "honed-web needs its token", hint="send Authorization: Bearer TOKEN, or TOKEN as the password"
    )
    return error_answer(401, error, {"WWW-Authenticate": 'Basic realm="honed", charset="UTF-8"'}, scope=scope)


async def refusal(request: Request, error: HonedError) -> Response:
    """Return the answer to a request that failed."""
    answer = partial(error_answer, error=error, scope=request.scope)
    match error:
        case NotPermittedError() if request.state.login is Login.PASSWORD:
            return token_wanted(request.scope)
        case NotPermittedError() if request.state.login is Login.LINK:
            error.hint = "`honectl web` prints a link with which this browser may read it"
            return answer(403)
        case NotPermittedError():
            return answer(403)
        case NoSuchJobError():
            return answer(404)
        case UsageError():
            return answer(400)
        case _:
            return answer(503, headers=RETRY)


async def unreadable(request: Request, error: OSError | sqlite3.Error) -> Response:
    log.error("%s: %s", request.url.path, error)
    match error:
        case OSError(filename=str(path), strerror=str(why)):
            words = f"{path}: {why}"
        case OSError():
            words = str(error)
        case _:
            words = f"honed.db: {error}"
    return await refusal(request, EnvironmentInvalidError(words, hint="see honed's journal and honectl doctor"))


async def no_route(request: Request, error: HTTPException) -> Response:
    wrong = UsageError("there is no page at this address", hint="/ lists all jobs, and /openapi.json all addresses")
    return error_answer(error.status_code, wrong, error.headers, scope=request.scope)
