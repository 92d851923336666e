"""honed-web: pages and a read-only API about honed's jobs. A separate program, off by default.

    honed-web.socket ── the first request ── honed-web.service: sockets from systemd ──► app
    honed-web        ── by hand: web.listen

It listens on loopback addresses and unix sockets, and on others only with a token. Clients that connect and send
nothing, or do not read their answer, are disconnected; the number of connections is limited, see honed.page.place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from honed import __version__
from honed.page import session as sessions
from honed.page.acceptor import Acceptor
from honed.page.answer import no_place_at_all
from honed.page.app import Web
from honed.page.guard import Peer, Rules, kind_of
from honed.page.place import Kind
from honed.page.session import Link, Session
from honed.page.source import Source
from honed.spec import config
from honed.spec.config import Config
from honed.system import argument, loopback, python, secret
from honed.system import layout as layouts
from honed.system import log as logs
from honed.system.control import credentials
from honed.system.error import EnvironmentInvalidError, HonedError, SpecError
from honed.system.layout import Layout
from honed.system.notify import Notifier

log = logging.getLogger("honed.page.server")

#: Seconds for the head of a request, from the start of the connection; over TCP, where everybody can connect, half as
#: many; a reader has twice as many to take something. Seconds that an idle connection is kept.
PATIENCE_SEC, KEEP_ALIVE_SEC = 10.0, 15
#: Seconds that a refused client has to read so: if its connection were closed at once, it might see a reset.
LEAVING_SEC = 1.0
#: Connections that the kernel keeps for us; and that we take of a socket at a time, at most. asyncio reads from one in
#: the second round after its own, so that when fewer than half of the places of new connections come in a round, one
#: whose request came with it is read before it can be the oldest that waits.
BACKLOG, MAX_ACCEPTED = 4096, 16
#: Seconds between two looks at the files of unix sockets.
LOOK_SEC = 2.0
#: Bytes of the head of a request.
MAX_HEAD_BYTES = 16 * 1024
#: Seconds without a connection after which a server that systemd started ends: the next request starts it again.
IDLE_SEC = 600.0
#: Seconds that open answers have when the server ends.
GRACE_SEC = 3
#: Minimum characters of a token: everybody who can connect can also guess.
MIN_TOKEN = 16
#: The unit's own credential.
CREDENTIAL = "honed.web-token"
#: The first descriptor that systemd hands over, sd_listen_fds(3).
FIRST_FD = 3


class Connection(H11Protocol):
    """One connection: uvicorn's, with a place, limits on time, and the peer's user."""

    uid: int | None = None
    kind: Kind | None = None
    is_streaming = False
    _awaits_head = True
    _is_refused = False

    def __init__(
        self, web: Web, patience_sec: float, *, when_lost: Callable[[], None] = lambda: None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._web = web
        self._when_lost = when_lost
        self._patience_sec = patience_sec
        #: Timers that end the connection of a client that does not complete a request (head), and of one that does not
        #: read its answer (reader): two, since answers may wait while the next request is already there.
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @cached_property
    def is_of_owner(self) -> bool:
        """True over TCP if the client runs as our own user or as root, as the one of an ssh tunnel may."""
        return bool(self.transport.get_extra_info("peername")) and loopback.is_of(*self._ends, {0, os.getuid()})

    @property
    def origin(self) -> str:
        """A phrase for the client over TCP, as far as the kernel knows it."""
        return loopback.in_words(*self._ends)

    @property
    def _ends(self) -> tuple[loopback.Endpoint, loopback.Endpoint]:
        client, ours = (self.transport.get_extra_info(name)[:2] for name in ("peername", "sockname"))
        return client, ours

    @property
    def is_waiting(self) -> bool:
        return self._awaits_head and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        kind, peer, head_sec = Kind.ARRIVING, None, self._patience_sec / 2
        if (theirs := transport.get_extra_info("socket")).family == socket.AF_UNIX:
            peer = Peer(*credentials(theirs))
            kind, head_sec = kind_of(self._web.rules.policy, peer), self._patience_sec
            self.uid = self._web.holders.of(peer.uid)
        self.app_state = {**self.app_state, "peer": peer, "holder": self}
        self._await("head", head_sec)
        if not self._web.places.enter(kind, self):
            self._refuse(kind)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._begin()

    def on_response_complete(self) -> None:
        self._await("head", self._patience_sec + KEEP_ALIVE_SEC)
        self._awaits_head = True
        self._web.places.rest(self)
        before = self.cycle
        super().on_response_complete()
        if self.cycle is not before:  # the next request was already there
            self._begin()

    def _begin(self) -> None:
        self._await("head", None)  # the head is complete: from now on the server is the one to act
        self._awaits_head = False

    def give_way(self, kind: Kind) -> None:
        if self._is_refused:
            self.transport.abort()
        elif self.cycle is None:
            self._refuse(kind)
        else:
            self.timeout_keep_alive_handler()

    def _refuse(self, kind: Kind) -> None:
        """Answer 503, and leave the client a moment to read it."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        self._web.places.num_refused += 1
        self._await("head", LEAVING_SEC)
        self.transport.write(no_place_at_all(kind))
        with contextlib.suppress(OSError):  # it has gone already
            self.transport.write_eof()
        if not self._web.places.enter(Kind.LEAVING, self):
            self.transport.abort()

    def pause_writing(self) -> None:
        self._await("reader", 2 * self._patience_sec)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._await("reader", None)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._web.places.leave(self)
        self._await("head", None)
        self._await("reader", None)
        self._when_lost()
        super().connection_lost(exc)

    def _await(self, what: str, seconds: float | None) -> None:
        if timer := self._timers.pop(what, None):
            timer.cancel()
        if seconds is not None:
            self._timers[what] = self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """uvicorn's server, which also reports to systemd, and ends after a time without connections if `idle_sec` is
    set."""

    def __init__(self, settings: uvicorn.Config, web: Web, *, idle_sec: float | None, is_activated: bool) -> None:
        super().__init__(settings)
        self._settings = settings
        self._web = web
        self._notifier = Notifier()
        self._idle_sec = idle_sec
        self._is_activated = is_activated
        self._busy_at = self._looked_at = time.monotonic()
        self._acceptors: list[Acceptor] = []
        self._fault = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        others = [item for item in sockets or () if item.family != socket.AF_UNIX]
        await super().startup(others)
        for other in others:
            other.listen(BACKLOG)  # asyncio has set it to the number that it takes at a time
        for item in sockets or ():
            if item.family == socket.AF_UNIX:
                self._take(item)
        self._notifier.ready()

    def _take(self, listening: socket.socket) -> None:
        listening.listen(BACKLOG)
        self._acceptors.append(Acceptor(listening, self._make_connection))

    def _make_connection(self, when_lost: Callable[[], None]) -> asyncio.Protocol:
        made: asyncio.Protocol = self._settings.http_protocol_class(  # type: ignore[call-arg]
            config=self._settings,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            when_lost=when_lost,
        )
        return made

    @property
    def _num_refused(self) -> int:
        return self._web.places.num_refused + sum(acceptor.num_refused for acceptor in self._acceptors)

    async def on_tick(self, counter: int) -> bool:
        self._notifier.watchdog()
        now = time.monotonic()
        if self.server_state.connections:
            self._busy_at = now
        if now - self._looked_at >= LOOK_SEC:
            self._looked_at = now
            self._look()
        if counter % 50 == 0:
            self._notifier.status(
                f"{len(self.server_state.connections)} connections, {self.server_state.total_requests} responses, "
                f"{self._num_refused} refused{f'; {self._fault}' if self._fault else ''}"
            )
        is_idle = self._idle_sec is not None and now - self._busy_at >= self._idle_sec
        return await super().on_tick(counter) or is_idle

    def _look(self) -> None:
        """Listen again where the file of a unix socket was removed. One of systemd's can only be reported."""
        before, self._fault = self._fault, ""
        for acceptor in [acceptor for acceptor in self._acceptors if not acceptor.is_there]:
            if self._is_activated:
                self._fault = f"{acceptor.path} was removed: systemctl restart honed-web.socket makes it again"
                continue
            try:
                made = listen(str(acceptor.path))
            except HonedError as error:
                self._fault = error.message
                continue
            self._web.places.num_refused += acceptor.num_refused
            acceptor.close()
            self._acceptors.remove(acceptor)
            self._take(made)
            log.warning("%s was removed; honed-web listens again there", acceptor.path)
        if self._fault and self._fault != before:
            log.error("%s", self._fault)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.should_exit = True  # the streams check it
        self._notifier.stopping()
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


# -- where it listens -------------------------------------------------------------------------------------------------


def passed_sockets() -> list[socket.socket]:
    """Return the sockets passed by systemd; none if systemd has not started us."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    number = int(os.environ.get("LISTEN_FDS", "0"))
    sockets = []
    for fd in range(FIRST_FD, FIRST_FD + number):
        os.set_inheritable(fd, False)
        sockets.append(socket.socket(fileno=fd))
    return sockets


def listen(address: str) -> socket.socket:
    """Listen on `HOST:PORT` or `/path`. Raises SpecError for an invalid address, EnvironmentInvalidError if it cannot
    be bound."""
    if address.startswith("/"):
        kind, where = socket.AF_UNIX, address
        _remove_dead(Path(address))
    else:
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            kind = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            where = (host, int(port))  # type: ignore[assignment]
            if not 0 <= int(port) < 65536:
                raise ValueError("not a valid port")
        except ValueError as error:
            raise SpecError(
                f"web.listen: {address!r}: {error}", hint='"127.0.0.1:8470", "[::1]:8470" or the path of a socket'
            ) from None
    made = socket.socket(kind, socket.SOCK_STREAM)
    try:
        if kind != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        if kind == socket.AF_UNIX:
            Path(address).chmod(0o666)  # open to all: the peer's user is read from the socket
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise EnvironmentInvalidError(
            f"{address}: {error.strerror}",
            hint="choose another in web.listen, with --listen, or with `honectl web --port`",
        ) from error
    return made


def _remove_dead(path: Path) -> None:
    """Remove a socket on which nobody listens any more."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe, contextlib.suppress(FileNotFoundError):
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            if path.is_socket():
                path.unlink()
        except OSError:
            pass  # bind reports it


def is_local(listening: socket.socket) -> bool:
    """Return True if only this machine can reach the socket."""
    if listening.family == socket.AF_UNIX:
        return True
    address = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def shown_address(listening: socket.socket) -> str:
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return os.fsdecode(name)
    return f"http://[{name[0]}]:{name[1]}/" if ":" in name[0] else f"http://{name[0]}:{name[1]}/"


# -- who may ask ------------------------------------------------------------------------------------------------------


def read_token(loaded: Config) -> str | None:
    """Return the token, from the unit's credential or from a file; None without one. Raises EnvironmentInvalidError."""
    path = secret.credential(CREDENTIAL) or Path(loaded.web.token_file or "")
    if path == Path():
        return None
    return secret.read(path, "token", min_chars=MIN_TOKEN, hint=f"openssl rand -hex 32 >{path}")


def rules(loaded: Config, sockets: Sequence[socket.socket]) -> Rules:
    """Return the rules of access. Raises EnvironmentInvalidError if other machines can connect and there is no
    token."""
    token = read_token(loaded)
    open_ones = [shown_address(item) for item in sockets if not is_local(item)]
    if open_ones and token is None:
        raise EnvironmentInvalidError(
            f"{', '.join(open_ones)}: other machines can reach it, but there is no token",
            hint=f"listen on 127.0.0.1, or put a token in web.token_file or /etc/credstore/{CREDENTIAL}",
        )
    own = {item.getsockname()[0] for item in sockets if item.family != socket.AF_UNIX}
    addresses = {f"[{item}]" if ":" in item else item for item in own}
    names = {"localhost", "127.0.0.1", "[::1]", *addresses, *(host.lower().rstrip(".") for host in loaded.web.hosts)}
    return Rules(loaded.policy, token, frozenset(names), needs_token=bool(open_ones))


# -- the program ------------------------------------------------------------------------------------------------------


def serve(
    layout: Layout,
    *,
    address: str | None = None,
    patience_sec: float = PATIENCE_SEC,
    idle_sec: float = IDLE_SEC,
    begun: Callable[[Link | None], bool] = lambda _: True,
) -> int:
    """Serve until a signal. Returns the exit status. `begun` is given the link to the owner's session, None without
    one, once connections are taken; if it returns False, that was all."""
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # else every invalid request would be a line
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    loaded = config.load(layout)
    sockets = passed_sockets()
    is_activated = bool(sockets)
    sockets = sockets or [listen(address or loaded.web.listen)]
    web = Web(Source(layout), rules(loaded, sockets))
    web.session = _session(layout, web.rules, sockets)
    settings = uvicorn.Config(
        web.app,
        loop="asyncio",
        http=partial(Connection, web, patience_sec),  # type: ignore[arg-type]  # called as a class
        backlog=MAX_ACCEPTED,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SEC,
        timeout_graceful_shutdown=GRACE_SEC,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    server = Server(settings, web, idle_sec=idle_sec if is_activated else None, is_activated=is_activated)
    web.is_ending = lambda: server.should_exit
    for item in sockets:
        log.info("honed-web %s is listening on %s", __version__, shown_address(item))
    _warn(web.rules)

    def reload() -> None:
        try:
            web.rules = rules(config.load(layout), sockets)
        except HonedError as error:
            log.error("the new configuration is invalid, so the old one stays in force: %s", error.message)  # noqa: TRY400
        else:
            log.info("configuration reloaded")

    async def run() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        await server.serve(sockets)

    # uvicorn raises the signal that ended it once more, after it has ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    own = [Path(item.getsockname()) for item in sockets if item.family == socket.AF_UNIX and not is_activated]
    try:
        if begun(web.session.link if web.session is not None else None):
            asyncio.run(run())
    finally:
        if web.session is not None:
            sessions.opening_path(layout).unlink(missing_ok=True)
            web.session.end()
    for path in own:
        path.unlink(missing_ok=True)
    return 0


def _session(layout: Layout, rules: Rules, sockets: Sequence[socket.socket]) -> Session | None:
    """Begin the session of the instance's owner, if only this machine can connect and one of the sockets is TCP's."""
    local = [] if rules.needs_token else [item for item in sockets if item.family != socket.AF_UNIX]
    return sessions.begin(layout, shown_address(local[0])) if local else None


def _warn(rules: Rules) -> None:
    if rules.needs_token:
        log.warning("the token and all responses are sent unencrypted: use a proxy with TLS")
    elif rules.token is None and not rules.policy.share_results:
        log.info(
            "without a token, and with policy.share_results off: over TCP only the number, state and progress of "
            "jobs are shown"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed-web` command."""
    python.protect()
    options = parser().parse_args(arguments)
    logs.set_up(verbose=options.verbose, identifier="honed-web")
    root = layouts.user_root() if options.user else options.root
    run = partial(
        serve, layouts.of(root), address=options.listen, patience_sec=options.patience_sec, idle_sec=options.idle_sec
    )
    return logs.status_of(run, log)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="honed-web", description="Serve honed's jobs as web pages and a read-only API.")
    argument.add_root(made)
    made.add_argument("--user", action="store_true", help="your per-user instance, in the XDG directories")
    made.add_argument(
        "--listen", metavar="ADDRESS", help="HOST:PORT or path of a unix socket to listen on (default: web.listen)"
    )
    made.add_argument(
        "--patience-sec",
        type=float,
        default=PATIENCE_SEC,
        metavar="SEC",
        help="timeout in seconds for a request's head, half of it over TCP; twice that for reading an answer "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--idle-sec",
        type=float,
        default=IDLE_SEC,
        metavar="SEC",
        help="if started by systemd, exit after SEC seconds without connections (default: %(default)s)",
    )
    argument.add_verbose(made)
    argument.add_version(made)
    return made


if __name__ == "__main__":
    sys.exit(main())
