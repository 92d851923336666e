"""A bus that is missing or does not answer: a short delay and an error. The rest is tested in a booted systemd."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from honed.run.systemd import SystemdRunner, why_not
from honed.system.dbus import BusAwayError, Systemd
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout


def test_a_bus_that_is_not_there_has_heard_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    with pytest.raises(BusAwayError) as caught:
        Systemd().start_unit("honed-job@1.service")
    assert not caught.value.was_heard


def test_a_bus_that_does_not_answer_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "bus"))
        silent.listen()
        systemd = Systemd()
        with pytest.raises(BusAwayError):
            systemd.system_state()
        for _ in range(100):
            with pytest.raises(BusAwayError):
                systemd.system_state()
        silent.setblocking(False)
        num_calls = 0
        with pytest.raises(BlockingIOError):
            while True:
                silent.accept()[0].close()
                num_calls += 1
        assert num_calls == 1


def test_units_belong_to_the_instance_at_the_root(tmp_path: Path) -> None:
    assert "another root directory" in str(why_not(Layout(tmp_path), Systemd()))


def test_a_start_that_was_never_made_is_known_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    layout = Layout(tmp_path)
    runner = SystemdRunner(layout, Systemd(), watchdog_sec=lambda: 60.0, stop_timeout_sec=lambda: 60.0)
    layout.job(3).dir.mkdir(parents=True)
    assert not runner.adopt(3, 1, 1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_start_that_the_machine_does_not_tell_of_may_have_been_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    layout = Layout(tmp_path)
    runner = SystemdRunner(layout, Systemd(), watchdog_sec=lambda: 60.0, stop_timeout_sec=lambda: 60.0)
    layout.job(3).dir.mkdir(parents=True)
    real = os.open

    def fail(path: object, *arguments: object, **keys: object) -> int:
        if path == "start.json":
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match=r"start\.json"):
        runner.adopt(3, 1, 1)


def test_who_asks_for_units_where_there_can_be_none_is_told_why(tmp_path: Path) -> None:
    from honed.daemon.loop import Daemon
    from honed.spec.config import Config, JobsConfig

    with pytest.raises(EnvironmentInvalidError, match="another root directory"):
        Daemon(Layout(tmp_path), Config(jobs=JobsConfig(runner="systemd")))
