"""The deadlines of honed-web's connections, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvicorn
from uvicorn.server import ServerState

from honed.page.app import Web
from honed.page.guard import Rules
from honed.page.place import SHARES, Kind
from honed.page.server import KEEP_ALIVE_SEC, LEAVING_SEC, PATIENCE_SEC, Connection
from honed.page.source import Source
from honed.spec.config import PolicyConfig
from honed.system.layout import Layout

#: Seconds of real time after which a wait for a condition fails.
DEADLINE_SEC = 60.0


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time the test sets; it never sleeps, since only the test lets time pass."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    async def pass_sec(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(10):
            await asyncio.sleep(0)


class Served:
    """A server on one socket, and the connections that it has."""

    def __init__(self, root: Path) -> None:
        self._web = Web(Source(Layout(root)), Rules(PolicyConfig(), None, frozenset({"localhost"}), needs_token=False))
        self._config = uvicorn.Config(self._web.app, lifespan="off", log_config=None, timeout_keep_alive=KEEP_ALIVE_SEC)
        self._state = ServerState()
        self.num_accepted = 0

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    def protocol(self) -> Connection:
        self.num_accepted += 1
        return Connection(self._web, PATIENCE_SEC, config=self._config, server_state=self._state, app_state={})

    @contextlib.asynccontextmanager
    async def on(self, listening: socket.socket) -> AsyncIterator[None]:
        server = await asyncio.get_running_loop().create_server(self.protocol, sock=listening)
        yield
        server.close()

    async def connect(self, listening: socket.socket, data: bytes = b"") -> socket.socket:
        number = self.num_accepted
        made = socket.socket(listening.family)
        made.connect(listening.getsockname())
        made.sendall(data)
        await until(lambda: self.num_accepted > number)
        for _ in range(10):  # rounds in which asyncio hands it over
            await asyncio.sleep(0)
        return made


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SEC
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


def listening(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family)
    made.bind("" if family is socket.AF_UNIX else ("127.0.0.1", 0))
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("family", "seconds"), [(socket.AF_INET, PATIENCE_SEC / 2), (socket.AF_UNIX, PATIENCE_SEC)], ids=("tcp", "unix")
)
def test_a_head_has_a_deadline_from_the_start_however_it_dribbles(
    tmp_path: Path, clock: Clock, family: socket.AddressFamily, seconds: float
) -> None:
    served, where = Served(tmp_path), listening(family)

    async def run() -> None:
        async with served.on(where):
            clients = [await served.connect(where), await served.connect(where, b"GET / HTTP/1.1\r\n")]
            for _ in range(9):
                clients[1].sendall(b"X: y\r\n")
                await clock.pass_sec(seconds / 10)
            assert served.num_connections == 2
            await clock.pass_sec(seconds / 10 + 0.01)
            await until(lambda: served.num_connections == 0)
            for each in clients:
                each.close()

    clock.run_until_complete(run())


def test_a_refused_client_has_a_moment_to_read_why(tmp_path: Path, clock: Clock) -> None:
    served, where = Served(tmp_path), listening(socket.AF_INET)

    async def run() -> None:
        async with served.on(where):
            clients = [await served.connect(where) for _ in range(SHARES[Kind.ARRIVING].num_places + 1)]
            assert clients[0].recv(4096).startswith(b"HTTP/1.1 503 ")
            clients[0].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # no error, though it comes late
            await clock.pass_sec(LEAVING_SEC - 0.01)
            assert served.num_connections == len(clients)
            await clock.pass_sec(0.02)
            await until(lambda: served.num_connections == len(clients) - 1)
            for each in clients:
                each.close()

    clock.run_until_complete(run())


def test_many_refused_clients_do_not_pile_up(tmp_path: Path, clock: Clock) -> None:
    served, where = Served(tmp_path), listening(socket.AF_INET)
    num_at_once = SHARES[Kind.ARRIVING].num_places + SHARES[Kind.LEAVING].num_places

    async def run() -> None:
        async with served.on(where):
            clients = [await served.connect(where) for _ in range(num_at_once + 20)]
            await until(lambda: served.num_connections == num_at_once)
            for each in clients[:20]:  # closed, and they have been told why
                assert each.recv(12) == b"HTTP/1.1 503"
            for each in clients:
                each.close()

    clock.run_until_complete(run())
