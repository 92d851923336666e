"""honectl's side of the control socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.system.client import Client
from honed.system.error import EnvironmentInvalidError


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A socket whose backlog is full, as where many ask at once, and honed is just doing something else."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(str(path))
        listening.listen(0)
        first.connect(str(path))
        yield path, listening


def test_a_full_backlog_is_waited_for(full: tuple[Path, socket.socket]) -> None:
    path, listening = full

    def answer() -> None:
        time.sleep(0.2)
        listening.accept()[0].close()
        with listening.accept()[0] as peer:
            peer.makefile().readline()
            peer.sendall(b'{"ok": true, "result": 7}\n')

    thread = threading.Thread(target=answer)
    thread.start()
    assert Client(path, timeout_sec=30.0).ask("status") == 7
    thread.join()


def test_a_backlog_that_stays_full_is_an_error_after_the_timeout(full: tuple[Path, socket.socket]) -> None:
    path, _ = full
    began = time.monotonic()
    with pytest.raises(EnvironmentInvalidError, match=r"did not respond at .* within 0.3 s"):
        Client(path, timeout_sec=0.3).ask("status")
    assert time.monotonic() - began >= 0.3
