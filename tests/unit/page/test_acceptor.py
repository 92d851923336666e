"""The process that accepts the connections of a unix socket, and honed-web's end of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from honed.page.acceptor import Acceptor
from honed.page.acceptor_process import MAX_PER_HOLDER

DEADLINE_SEC = 60.0
#: Users of any machine.
UID, OTHER_UID = 1, 2


class Held(asyncio.Protocol):
    """A connection that stays as long as its client has it."""

    def __init__(self, when_lost: Callable[[], None]) -> None:
        self._when_lost = when_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"welcome")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._when_lost()


@contextlib.asynccontextmanager
async def acceptor() -> AsyncIterator[Acceptor]:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("")
    listening.listen()
    made = Acceptor(listening, Held)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def user(uid: int) -> Iterator[None]:
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


async def connect(to: Acceptor, uid: int = 0) -> tuple[socket.socket, bytes]:
    """Connect as this user. Returns the connection, and the beginning of what it is sent."""
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    with user(uid) if uid else contextlib.nullcontext():
        made.connect(to.listening.getsockname())
    async with asyncio.timeout(DEADLINE_SEC):
        return made, await asyncio.get_running_loop().sock_recv(made, 7)


def processes() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


needs_users = pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as other users")


@needs_users
def test_a_user_with_all_connections_is_refused_until_one_of_them_ends() -> None:
    async def run() -> None:
        async with acceptor() as made:
            theirs = [await connect(made, UID) for _ in range(MAX_PER_HOLDER)]
            assert {told for _, told in theirs} == {b"welcome"}
            refused = [await connect(made, UID) for _ in range(3)]
            assert {told for _, told in refused} == {b"HTTP/1."}
            others = [await connect(made, uid) for uid in (OTHER_UID, 0)]
            assert {told for _, told in others} == {b"welcome"}
            assert made.num_refused == 3
            theirs.pop()[0].close()
            deadline = time.monotonic() + DEADLINE_SEC
            while (again := await connect(made, UID))[1] != b"welcome":
                assert time.monotonic() < deadline
                again[0].close()
            for each, _ in (*theirs, *refused, *others, again):
                each.close()

    asyncio.run(run())


def test_root_and_our_own_user_have_as_many_as_they_make() -> None:
    async def run() -> None:
        async with acceptor() as made:
            ours = [await connect(made) for _ in range(MAX_PER_HOLDER + 20)]
            assert {told for _, told in ours} == {b"welcome"}
            assert made.num_refused == 0
            for each, _ in ours:
                each.close()

    asyncio.run(run())


@needs_users
def test_a_process_that_has_died_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        before = processes()
        async with acceptor() as made:
            first, _ = await connect(made, UID)
            refused = [await connect(made, UID) for _ in range(MAX_PER_HOLDER)]
            assert made.num_refused == 1
            (pid,) = processes() - before
            os.kill(pid, signal.SIGKILL)
            second, told = await connect(made, UID)
            assert told == b"welcome"
            assert processes() - before != {pid}
            assert made.num_refused == 1
            first.close()  # of the first process, which counts no more
            for each, _ in refused:
                each.close()
            second.close()
        assert processes() == before

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.message for record in caplog.records] == [
        "None: the process that accepts connections has ended; next start in 0.1 s"
    ]
