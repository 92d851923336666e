"""What honed tells systemd, also where systemd does not read for a while."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.system.notify import RESEND_SEC, Notifier


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield made


def fill(systemd: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
        other.setblocking(False)
        while True:
            other.sendto(b"X_OTHER=1", systemd.getsockname())


def received(systemd: socket.socket) -> list[str]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(systemd.recv(1 << 16).decode())
    return [each for each in found if each != "X_OTHER=1"]


def test_what_a_full_queue_did_not_take_is_sent_in_its_order_and_the_last_of_each_kind(systemd: socket.socket) -> None:
    notifier = Notifier()
    assert notifier.patience() == math.inf
    fill(systemd)
    notifier.status("starts")
    notifier.ready()
    notifier.reloading()
    notifier.ready()
    notifier.status("runs – läuft")
    notifier.stopping()
    assert notifier.patience() == RESEND_SEC
    assert received(systemd) == []
    notifier.watchdog()
    assert notifier.patience() == math.inf
    words = [each.partition("\n")[0] for each in received(systemd)]
    assert words == ["RELOADING=1", "READY=1", "STATUS=runs – läuft", "STOPPING=1"]
    notifier.status("runs – läuft")
    assert received(systemd) == [], "it has been said"


def test_a_ping_that_was_not_taken_is_left_to_the_next_pass(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    notifier = Notifier()
    fill(systemd)
    notifier.watchdog()
    assert received(systemd) == []
    notifier.status("a pass that failed")
    assert received(systemd) == ["STATUS=a pass that failed"]
    notifier.watchdog()
    assert received(systemd) == ["WATCHDOG=1"]


def test_nobody_to_tell_is_no_error(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    notifier = Notifier()
    systemd.close()
    notifier.ready()
    assert notifier.patience() == math.inf
    monkeypatch.delenv("NOTIFY_SOCKET")
    Notifier().ready()
