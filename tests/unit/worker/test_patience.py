"""The longest allowed silence of a run, learned from the run."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from honed.worker.patience import FACTOR, Patience
from honed.worker.pulse import Pulse
from honed.worker.stop import Stop


def test_nothing_is_known_before_ten_steps_and_a_slow_first_one_counts() -> None:
    patience = Patience(0.0)
    patience.enter("train", 0.0)
    assert patience.limit_sec is None
    now = 60.0  # it compiles
    for _ in range(9):
        patience.beat(now)
        now += 1.0
        assert patience.limit_sec is None
    patience.beat(now)
    assert patience.limit_sec == FACTOR * 60.0


def test_waits_for_a_disk_say_nothing_of_the_next_one() -> None:
    patience = Patience(0.0)
    for number in range(20):
        patience.enter("save", float(number))
        patience.enter("seal", number + 0.5)
        patience.enter("train", number + 0.6)
    patience.enter("seal", 30.0)
    assert patience.limit_sec is None
    patience.enter("save", 30.0)
    assert patience.limit_sec == FACTOR * 0.5


def test_what_is_long_ago_is_forgotten() -> None:
    patience = Patience(0.0)
    patience.enter("train", 0.0)
    patience.beat(60.0)
    for number in range(100):
        patience.beat(61.0 + number)
    assert patience.limit_sec == FACTOR * 1.0


def test_each_phase_has_its_own_rhythm_known_after_two_rounds() -> None:
    patience = Patience(0.0)
    patience.enter("train", 0.0)
    now = 0.0
    for _ in range(2):
        for _ in range(10):
            now += 1.0
            patience.beat(now)
        patience.enter("save", now)
        assert patience.limit_sec is None
        now += 50.0
        patience.enter("train", now)
        assert patience.limit_sec == FACTOR * 1.0
    patience.enter("save", now)
    assert patience.limit_sec == FACTOR * 50.0


def test_the_unit_and_honed_are_told_of_it_within_the_administrators_limits(tmp_path: Path) -> None:
    clock = [0.0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        environment = {"NOTIFY_SOCKET": systemd.getsockname(), "HONED_WATCHDOG_SEC": "100", "HONED_MIN_STALL_SEC": "30"}
        pulse = Pulse(environment, path=tmp_path / "pulse", clock=lambda: clock[0])
        assert environment == {}
        stop = Stop(pulse.beat, pulse.enter)
        pulse.report("stage", {"stage": "train"})
        told: list[str] = []
        for pause, usec in ((1.25, 30), (2.0, 40), (50.0, 100)):
            for _ in range(12):
                clock[0] += pause
                stop.check()
                with contextlib.suppress(BlockingIOError):
                    while True:
                        told += systemd.recv(4096).decode().splitlines()
            assert [line for line in told if line.startswith("WATCHDOG_USEC")][-1] == f"WATCHDOG_USEC={usec}000000"
            assert json.loads((tmp_path / "pulse").read_text()) == {"phase": "train", "limit_sec": FACTOR * pause}
        before = (tmp_path / "pulse").stat().st_mtime_ns
        clock[0] += 1.5
        stop.check()
        assert (tmp_path / "pulse").stat().st_mtime_ns > before
        stop.now_in = "train"
        with stop.phase("save"):
            assert json.loads((tmp_path / "pulse").read_text())["phase"] == "save"
        assert json.loads((tmp_path / "pulse").read_text())["phase"] == "train"
