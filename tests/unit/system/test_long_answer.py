"""Answers of any length over the control socket, and many concurrent tasks on files."""

from __future__ import annotations

import contextlib
import itertools
import json
import selectors
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.system import durable
from honed.system.client import Client
from honed.system.control import HOLDER_SEC, PAGE_BYTES, PAGE_SEC, Parts, Request, Rows, Server
from honed.system.durable import Steps
from honed.system.error import EnvironmentInvalidError, HonedError
from honed.system.part import Part
from honed.system.ration import Rations

NUM_ROWS = 5000


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A server whose lists are long; one of them breaks off."""
    selector, is_over = selectors.DefaultSelector(), threading.Event()

    def rows(*, is_broken: bool) -> Iterator[dict[str, Any]]:
        for number in range(NUM_ROWS):
            if is_broken and number == NUM_ROWS - 1:
                raise OSError("the disk is gone")
            yield {"id": number, "name": "x" * 100}

    def parts() -> Iterator[Part]:
        yield {"id": 7, "none": None, "metrics": {}}
        for number in range(NUM_ROWS):
            yield {"metrics": {f"é{number}": number}} if number % 3 else None
        yield {"events": []}
        for number in range(NUM_ROWS):
            yield {"events": [{"step": number, "words": "x" * 50}] * (number % 2)}
        yield {"empty": [], "last": {"estimated": {}, "used": [1, 2]}}

    def locked() -> Iterator[int]:
        yield from range(PAGE_BYTES)
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db", timeout=0)) as ours:
            ours.execute("INSERT INTO a VALUES (1)")

    def answer(request: Request) -> Any:
        if request.verb == "nothing":
            return Rows(iter(lambda: None, 0))
        if request.verb == "object":
            return Parts(parts())
        if request.verb == "locked":
            return Rows(locked())
        return "quick" if request.verb == "quick" else Rows(rows(is_broken=request.verb == "broken"))

    server = Server(tmp_path / "control.sock", selector, answer)

    def serve() -> None:
        while not is_over.is_set():
            for key, events in selector.select(0.05):
                key.data(events)

    thread = threading.Thread(target=serve)
    thread.start()
    yield tmp_path / "control.sock"
    is_over.set()
    thread.join()
    server.close()


def test_a_long_list_comes_whole_and_in_order(path: Path) -> None:
    assert [row["id"] for row in Client(path).ask("list")] == list(range(NUM_ROWS))
    assert Client(path).ask("quick") == "quick"


def test_who_does_not_read_a_long_list_holds_up_nobody(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as lazy:
        lazy.connect(str(path))
        lazy.sendall(b'{"verb": "list"}\n')
        assert Client(path).ask("quick") == "quick"


def lines(path: Path, request: bytes) -> Iterator[bytes]:
    with socket.socket(socket.AF_UNIX) as peer, peer.makefile("rb") as stream:
        peer.connect(str(path))
        peer.sendall(request + b"\n")
        yield from stream


def test_a_long_list_comes_in_pages_to_who_asks_for_them_and_else_in_one_line(path: Path) -> None:
    pages = []
    for line in lines(path, b'{"verb": "list", "paged": 1}'):
        assert len(line) < 2 * PAGE_BYTES
        pages.append(json.loads(line))
        if pages[-1]["is_last"]:
            break
    assert len(pages) > 5
    assert [row["id"] for page in pages for row in page["page"]] == list(range(NUM_ROWS))
    whole = json.loads(next(lines(path, b'{"verb": "list"}')))
    assert [row["id"] for row in whole["result"]] == list(range(NUM_ROWS))


def test_a_long_object_comes_in_parts_and_else_in_one_line(path: Path) -> None:
    found = Client(path).ask("object")
    assert list(found) == ["id", "none", "metrics", "events", "empty", "last"]
    assert found["metrics"] == {f"é{number}": number for number in range(NUM_ROWS) if number % 3}
    assert [row["step"] for row in found["events"]] == [number for number in range(NUM_ROWS) if number % 2]
    assert (found["id"], found["none"], found["empty"]) == (7, None, [])
    assert found["last"] == {"estimated": {}, "used": [1, 2]}
    assert json.loads(next(lines(path, b'{"verb": "object"}'))) == {"ok": True, "result": found}
    older = json.loads(next(lines(path, b'{"verb": "object", "paged": 1}')))  # honectl that knows pages of lists alone
    assert older == {"ok": True, "result": found}
    pages = list(itertools.islice(lines(path, b'{"verb": "object", "paged": 1, "parts": 1}'), 3))
    assert all(len(page) < 2 * PAGE_BYTES and "part" in json.loads(page) for page in pages)


def test_a_fault_of_the_machine_between_two_pages_is_one_of_the_machine(path: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as theirs:
        theirs.executescript("CREATE TABLE a (b); BEGIN IMMEDIATE;")
        with pytest.raises(HonedError, match="database is locked") as caught:
            Client(path).ask("locked")
    assert caught.value.code == "degraded"


@pytest.mark.parametrize("paged", [b"2", b"[]"])
def test_a_protocol_that_honed_does_not_know_is_refused_with_what_to_do(path: Path, paged: bytes) -> None:
    error = json.loads(next(lines(path, b'{"verb": "list", "paged": ' + paged + b"}")))["error"]
    assert (error["code"], "another version" in error["message"]) == ("usage", True)


def test_an_answer_of_another_protocol_is_said_to_be_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "other.sock"))
        listening.listen()

        def answer() -> None:
            with listening.accept()[0] as peer:
                peer.makefile().readline()
                peer.sendall(b'{"ok": true, "pieces": 3}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EnvironmentInvalidError, match="of another version"):
            Client(tmp_path / "other.sock").ask("list")
        thread.join()


def test_an_answer_that_breaks_off_is_an_error_that_says_so(path: Path) -> None:
    with pytest.raises(HonedError, match="OSError") as caught:
        Client(path).ask("broken")
    assert caught.value.code == "error"
    assert not list(lines(path, b'{"verb": "broken"}'))[-1].endswith(b"\n")
    assert Client(path).ask("quick") == "quick"


def test_a_search_that_finds_nothing_for_long_holds_up_nobody(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as searching:
        searching.connect(str(path))
        searching.sendall(b'{"verb": "nothing", "paged": 1}\n')
        assert json.loads(searching.makefile("rb").readline()) == {"ok": True, "page": [], "is_last": False}
        assert Client(path).ask("quick") == "quick"


def test_the_connections_of_one_holder_have_a_limited_time_in_a_pass() -> None:
    times = iter([0.0, 0.06, 0.06, 0.12])
    rations = Rations(0.1, clock=lambda: next(times))
    for _ in range(2):
        assert rations.is_left(holder=1)
        with rations.spend(1):
            pass
    assert not rations.is_left(holder=1)
    assert rations.is_left(holder=2)
    rations.begin()
    assert rations.is_left(holder=1)


def test_between_two_turns_of_the_loop_a_holder_has_no_more_than_in_one(tmp_path: Path) -> None:
    with selectors.DefaultSelector() as selector:
        server = Server(tmp_path / "control.sock", selector, lambda _: Rows(map(_slow, range(1000))))
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(tmp_path / "control.sock"))
            peer.sendall(b'{"verb": "list", "paged": 1}\n')
            peer.setblocking(False)
            num_pages = []
            for _ in range(2):
                turn = selector.select(0)
                for key, events in turn:
                    key.data(events)
                for _ in range(50):  # steps
                    server.serve()
                assert len(turn) == 1
                num_pages.append(peer.recv(1 << 20).count(b'"page"'))
        server.close()
    assert all(1 <= num <= 1 + HOLDER_SEC / PAGE_SEC for num in num_pages)


def _slow(number: int) -> int:
    time.sleep(PAGE_SEC / 10)
    return number


def test_work_side_by_side_is_synced_once_a_step_and_one_fault_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def sync(directory: Path) -> None:
        synced.append(directory)
        if directory.name == "bad":
            raise OSError(5, "the disk is gone")

    monkeypatch.setattr(durable, "sync_dir", sync)

    def work(name: str) -> Steps[str]:
        yield [tmp_path]
        yield [tmp_path / name]
        return name

    first, bad, last = durable.finish_all([work("a"), work("bad"), work("c")])
    assert (first, last) == ("a", "c")
    assert isinstance(bad, OSError)
    assert sorted(synced) == sorted([tmp_path, tmp_path / "a", tmp_path / "bad", tmp_path / "c"])
