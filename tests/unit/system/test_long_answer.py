"""Answers of any length over the control socket, and many concurrent tasks on files."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.system import durable
from honed.system.client import Client
from honed.system.control import Request, Rows, Server
from honed.system.durable import Steps
from honed.system.error import EnvironmentInvalidError

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

    def answer(request: Request) -> Any:
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


def test_an_answer_that_breaks_off_is_an_error_that_says_so(path: Path) -> None:
    with pytest.raises(EnvironmentInvalidError, match="response to 'broken' ended"):
        Client(path).ask("broken")
    assert Client(path).ask("quick") == "quick"


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
