"""The pages and the API of honed-web: a guarded request ──► an endpoint, a page, a stream."""

from __future__ import annotations

import asyncio
import logging
import os
import re
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
from starlette.types import ASGIApp, Receive, Scope, Send

from honed.job import query
from honed.job.job import Job, State
from honed.job.progress import progress_text
from honed.job.query import Asker
from honed.page import api, metrics
from honed.page.answer import Login, encode, error_answer, html, no_route, refusal, token_wanted, unreadable
from honed.page.api import ENDPOINTS, Endpoint
from honed.page.comparison import MAX_JOBS, MIN_JOBS
from honed.page.guard import Guard, Rules
from honed.page.job_list import Choice, JobList
from honed.page.job_page import Pages
from honed.page.page import document, load, source, vendored
from honed.page.place import Holder, Kind, Places, turns
from honed.page.session import Session, set_cookie
from honed.page.source import Page, Source, StateRow
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, UsageError
from honed.system.holder import Holders

log = logging.getLogger("honed.page.server")
T = TypeVar("T")

#: Seconds of one stream, after which a browser reconnects by itself; between looks at a job; between heartbeats.
STREAM_SEC, POLL_SEC, HEARTBEAT_SEC = 900.0, 1.0, 15.0
#: Threads that read the spool and the database, per kind of client: five kinds have at most 15 requests at the
#: control socket, which takes 16 of one user.
MAX_READERS = 3
#: Characters of the numbers of jobs in an address.
MAX_IDS = 1000
#: The scripts of the pages: our own, in templates/, and uPlot.
SCRIPTS = frozenset({"live", "list", "plots", "uplot"})


@dataclass
class Web:
    """The application. `rules` may be replaced at any time."""

    source: Source
    rules: Rules
    session: Session | None = None  #: of the instance's owner
    is_ending: Callable[[], bool] = lambda: False
    pages: Pages = field(init=False)
    job_list: JobList = field(init=False)
    places: Places = field(default_factory=Places)
    holders: Holders = field(default_factory=Holders)

    def __post_init__(self) -> None:
        load()
        self.pages = Pages(self.source.layout)
        self.job_list = JobList(self.source)
        self._turns = turns(MAX_READERS)
        self._readers = anyio.CapacityLimiter(MAX_READERS * len(Kind))

    @cached_property
    def _openapi(self) -> bytes:
        return encode(api.openapi())

    @property
    def app(self) -> ASGIApp:
        routes = [
            Route("/", self._index),
            Route("/index.html", self._index),
            Route("/login", _at_once(self._log_in)),
            Route("/jobs/{job_id:int}", self._job_page),
            Route("/compare", self._comparison),
            # The address of a page in the index that honed writes.
            Route(
                "/jobs/{job_id:int}/report.html",
                _at_once(lambda request: RedirectResponse(request.url.path.rpartition("/")[0])),
            ),
            Route("/{name}.js", _at_once(_script)),
            Route("/api/events", self._all_events),
            Route("/api/jobs/{job_id:int}/events", self._job_events),
            Route("/openapi.json", _at_once(lambda _: Response(self._openapi, media_type="application/json"))),
            Route("/metrics", self._metrics),
            *(
                Route(endpoint.path.replace("{job_id}", "{job_id:int}"), partial(self._answer, endpoint))
                for endpoint in ENDPOINTS
            ),
        ]
        handlers = {HonedError: refusal, OSError: unreadable, sqlite3.Error: unreadable, HTTPException: no_route}
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
        answer = endpoint.read(self.source, *jobs, _asker(request), **asked)
        headers = {}
        if isinstance(answer, Page):
            assert endpoint.rows is not None
            words = {key: value for key, value in request.query_params.items() if key != "cursor"}
            after = f"{request.url.path}?{urlencode({**words, 'cursor': answer.next})}" if answer.next else None
            headers = {"Link": f'<{after}>; rel="next"'} if after else {}
            answer = {endpoint.rows: answer.rows, "next": after}
        status = 503 if endpoint.path == "/healthz" and answer["status"] != "ok" else 200
        return Response(encode(answer), status, headers, media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        body = await self.read(_kind(request), metrics.scrape, self.source, _asker(request))
        return Response(body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    def _log_in(self, request: Request) -> Response:
        """Take a link's token for a cookie, or have a browser ask for the password: at the root, so that it sends that
        everywhere from then on."""
        token = request.query_params.get("token")
        if token is not None and self.session is not None and self.session.opens(token):
            if not request.state.holder.is_of_owner:
                error = NotPermittedError(
                    "this link is only for programs of the user who started honed-web "
                    f"(uid {os.getuid()}) and of root, and this request comes from {request.state.holder.origin}",
                    hint="for WSL, containers, proxies and a honed-web that runs under sudo: put a token in "
                    "web.token_file of honed.toml, start honed-web again, and enter the token as the password",
                )
                return error_answer(403, error, scope=request.scope)
            # A page that goes on by itself, since with a redirect the request would still be that of another site, and
            # a browser would not send the cookie with it.
            page = document("login.html", title="honed", is_served=True, live="")
            return html(page, headers={"Set-Cookie": set_cookie(self.session, request.scope["server"][1])})
        if request.state.login is Login.PASSWORD:
            return token_wanted(request.scope)
        if request.state.login is Login.LINK or token is not None:
            error = NotPermittedError("this link is not valid, or not any more", hint="`honectl web` prints a new one")
            return error_answer(403, error, scope=request.scope)
        return RedirectResponse("/")

    # -- pages --------------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        choice, login = Choice.of(request.query_params), request.state.login
        return html(await self.read(_kind(request), self.job_list.page, _asker(request), choice, login.value))

    async def _job_page(self, request: Request) -> Response:
        kind = _kind(request)
        job = await self.read(kind, self.source.job, request.path_params["job_id"], _asker(request))
        return html((await self.pages.page([job], kind)).page)

    async def _comparison(self, request: Request) -> Response:
        kind = _kind(request)
        jobs, num_all = await self.read(kind, self._compared, request.query_params, _asker(request))
        return html((await self.pages.page(jobs, kind, num_all=num_all)).page)

    def _compared(self, given: Mapping[str, str], asker: Asker) -> tuple[list[Job], int]:
        """Return the jobs that `ids` or `sweep` names, and their number; of a large sweep the best ones. Each of them
        must be readable."""
        if sweep := given.get("sweep"):
            jobs = query.group(self.source.entries, self.source.layout, sweep[:MAX_IDS], asker)["jobs"]
            best = sorted(jobs, key=lambda one: (one["eval_loss"] is None, one["eval_loss"], one["id"]))[:MAX_JOBS]
            numbers, num_all = sorted(one["id"] for one in best), len(jobs)
        else:
            numbers = list(dict.fromkeys(_ids(given.get("ids", ""))))
            num_all = len(numbers)
        if not MIN_JOBS <= len(numbers) <= MAX_JOBS:
            raise UsageError(
                f"{MIN_JOBS} to {MAX_JOBS} jobs can be compared, and these are {len(numbers)}",
                hint="choose them in the list of jobs",
            )
        return [self.source.job(number, asker) for number in numbers], num_all

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
            row = await self.read(kind, self.source.state, job_id, asker, is_patient=True)
            if row != last:
                last = row
                yield _event("progress", {**row, "line": _line(row)})
                if State(row["state"]).is_final:
                    yield _event("ended", {"state": row["state"], "outcome": row["outcome"]})
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
    return b"event: " + kind.encode() + b"\ndata: " + encode(data) + b"\n\n"


def _line(row: StateRow) -> str:
    if row["state"] != "running":
        return ""
    is_training = row["progress"].get("step") is not None
    return f"running: {progress_text(row['progress']) if is_training else row['stage'] or 'starting'}"


# -- requests ---------------------------------------------------------------------------------------------------------


def _asker(request: Request) -> Asker:
    asker: Asker = request.state.asker
    return asker


def _kind(request: Request) -> Kind:
    kind: Kind = request.state.kind
    return kind


def _parameters(endpoint: Endpoint, request: Request) -> dict[str, Any]:
    try:
        return dict(endpoint.parameters.model_validate(dict(request.query_params)))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(endpoint.parameters.model_fields) or "there are none"
        raise UsageError(f"{name[:80]}: {first['msg']}", hint=f"parameters: {known}; see /openapi.json") from None


def _ids(words: str) -> list[int]:
    if len(words) > MAX_IDS or not re.fullmatch(r"([0-9]{1,18}(,[0-9]{1,18})*)?", words, re.ASCII):
        raise UsageError(f"ids: not numbers of jobs: {words[:40]!r}", hint="/compare?ids=1,2,3")
    return [int(word) for word in words.split(",") if word]


@cache
def _content(name: str) -> str:
    return vendored("uplot/uPlot.iife.min.js") if name == "uplot" else source(f"{name}.js")


def _script(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in SCRIPTS:  # never asked of the cache, which would keep every name
        raise HTTPException(404)
    return Response(_content(name), media_type="text/javascript")


def _at_once(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return answer(request)

    return endpoint
