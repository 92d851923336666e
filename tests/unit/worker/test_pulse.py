"""A worker's messages to its unit, received as systemd does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from honed.job.event import EventWriter
from honed.worker.pulse import Pulse
from honed.worker.stop import Stop


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


def heard(systemd: socket.socket) -> list[list[str]]:
    messages = []
    with contextlib.suppress(BlockingIOError):
        while True:
            messages.append(systemd.recv(4096).decode().splitlines())
    return messages


def pulse(systemd: socket.socket, clock: list[float]) -> tuple[Pulse, dict[str, str]]:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_PID": "1", "HONED_WATCHDOG_SEC": "60", "HOME": "/"}
    return Pulse(environment, clock=lambda: clock[0]), environment


def test_a_worker_is_ready_at_its_first_stage_and_says_where_it_is(systemd: socket.socket, tmp_path: Path) -> None:
    told, _ = pulse(systemd, [0.0])
    events = EventWriter(tmp_path / "events.jsonl", on_event=told.report)
    events.emit("started")
    events.emit("stage", stage="load")
    events.emit("stage", stage="train")
    events.emit("step", step=3, num_steps=10, loss=1.25, eta_sec=40.0)
    assert heard(systemd) == [
        ["READY=1", "WATCHDOG_USEC=240000000", "WATCHDOG=1", "STATUS=load"],
        ["WATCHDOG_USEC=60000000", "WATCHDOG=1", "STATUS=train"],
        ["WATCHDOG=1", "STATUS=step 3/10, loss 1.25, ETA 40 s"],
    ]


def test_of_many_steps_a_second_one_is_sent(systemd: socket.socket) -> None:
    clock = [0.0]
    told, _ = pulse(systemd, clock)
    for step in range(1, 41):
        clock[0] = step / 16
        told.report("step", {"step": step, "num_steps": 40})
    assert heard(systemd) == [["WATCHDOG=1", f"STATUS=step {step}/40"] for step in (1, 17, 33)]


def test_each_look_at_the_stop_flag_is_a_sign_of_life_but_not_too_many(systemd: socket.socket) -> None:
    clock = [0.0]
    told, _ = pulse(systemd, clock)
    stop = Stop(told.beat)
    for now in (0.2, 1.5, 1.6, 3.0):
        clock[0] = now
        stop.check()
    assert heard(systemd) == [["WATCHDOG=1"]] * 2


def test_no_child_of_a_worker_speaks_for_it(systemd: socket.socket) -> None:
    assert pulse(systemd, [0.0])[1] == {"HOME": "/"}


def test_where_nobody_listens_nothing_is_said(systemd: socket.socket) -> None:
    clock = [5.0]
    for environment in ({}, {"NOTIFY_SOCKET": systemd.getsockname()}, {"HONED_WATCHDOG_SEC": "60"}):
        silent = Pulse(environment, clock=lambda: clock[0])
        silent.report("stage", {"stage": "load"})
    gone = Pulse({"NOTIFY_SOCKET": "/nowhere", "HONED_WATCHDOG_SEC": "60"})
    gone.report("stage", {"stage": "load"})
    assert heard(systemd) == []


def test_a_pulse_file_is_never_read_half_written(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    made = Pulse({}, path=path)
    made.report("stage", {"stage": "load"})
    seen: list[bytes] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.append(path.read_bytes())

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for number in range(3000):
            made.report("stage", {"stage": ("train", "export", "load")[number % 3]})
        is_over.set()
        reader.result()
    assert len(seen) > 100
    assert {json.loads(data)["phase"] for data in seen} <= {"load", "train", "export"}
