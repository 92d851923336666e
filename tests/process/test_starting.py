"""honed starts: signals in its first moments, and a spool whose lock somebody else has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import DEADLINE_SEC, HERE, Instance

from honed.job import lock
from honed.job.job import State
from waiting import wait_for


class EarlyHoned(Instance):
    command = (sys.executable, str(HERE / "earlyhoned.py"))
    is_warm = False


class Systemd:
    """A systemd that reads what honed says of its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._said: list[str] = []

    def said(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._said.append(self._socket.recv(65536).decode())
        return "\n".join(self._said)

    def fill(self) -> None:
        """Have its queue full, so that it takes nothing more before it reads."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            while True:
                other.sendto(b"X_OTHER=1", str(self.path))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "notify")
    yield made
    made.close()


@pytest.fixture
def early(tmp_path: Path) -> Iterator[EarlyHoned]:
    made = EarlyHoned(tmp_path)
    yield made
    made.end()


@pytest.fixture
def lock_fd(instance: Instance) -> Iterator[int]:
    """The lock of the instance's spool, which this process has, and no daemon."""
    fd = lock.take(instance.layout.spool_dir / "lock")
    assert fd is not None
    yield fd
    os.close(fd)


def start(instance: Instance, systemd: Systemd) -> subprocess.Popen[bytes]:
    """Start a honed, which waits for the lock."""
    environment = {**instance.environment, "NOTIFY_SOCKET": str(systemd.path)}
    with instance.log_path.open("ab") as file:
        process = subprocess.Popen([*instance.command, str(instance.root)], stdout=file, stderr=file, env=environment)
    instance.process = process
    wait_for(lambda: "STATUS=waiting for the spool's lock" in systemd.said(), what="honed waits for the lock")
    return process


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_while_honed_imports_ends_it_before_it_starts(early: EarlyHoned, number: str) -> None:
    early.environment["HONED_TEST_SIGNAL"] = number
    early.start()
    assert early.wait() == 0
    assert " ready: " not in early.log
    assert "Traceback" not in early.log


def test_a_sighup_while_honed_imports_is_heeded_once_it_runs(early: EarlyHoned) -> None:
    early.environment["HONED_TEST_SIGNAL"] = "SIGHUP"
    early.start()
    wait_for(lambda: "configuration reloaded" in early.log, what="the reload")
    early.stop()


def test_reading_entries_extends_the_start_and_heeds_a_signal(early: EarlyHoned, systemd: Systemd) -> None:
    early.drop("succeed.hold")
    early.start()
    job = early.wait_state("succeed", State.HELD)
    early.stop()
    early.environment |= {"NOTIFY_SOCKET": str(systemd.path)}
    early.start()
    early.stop()
    assert "EXTEND_TIMEOUT_USEC=" in systemd.said().partition("READY=1")[0]
    num_ready = early.log.count(" ready: ")
    opens = str(early.spool.entries.path(job.id, State.HELD))
    early.environment |= {"HONED_TEST_SIGNAL": "SIGTERM", "HONED_TEST_OPENS": opens}
    early.start()
    assert early.wait() == 0
    assert (early.log.count(" ready: "), "asked to stop before" in early.log) == (num_ready, True)


def test_honed_works_while_systemd_reads_nothing_and_is_ready_once_it_does(
    instance: Instance, systemd: Systemd
) -> None:
    instance.environment |= {"NOTIFY_SOCKET": str(systemd.path)}
    systemd.fill()
    instance.start()
    instance.drop("succeed")
    instance.wait_state("succeed", State.SUCCEEDED)
    assert instance.process is not None
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "configuration reloaded" in instance.log, what="the reload")
    wait_for(lambda: "\nREADY=1" in systemd.said(), what="READY=1")
    before = len(systemd.said())
    systemd.fill()
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: instance.log.count("configuration reloaded") == 2, what="the second reload")
    wait_for(lambda: re.search(r"^RELOADING=1\n.*^READY=1", systemd.said()[before:], re.M | re.S), what="both")
    systemd.fill()
    instance.stop()


def test_a_lock_that_no_daemon_has_is_waited_for(instance: Instance, lock_fd: int, systemd: Systemd) -> None:
    process = start(instance, systemd)
    assert f"STATUS=waiting for the spool's lock, which process {os.getpid()} (" in systemd.said()
    wait_for(lambda: "EXTEND_TIMEOUT_USEC=" in systemd.said(), what="more time asked for")
    assert "READY=1" not in systemd.said()
    fcntl.flock(lock_fd, fcntl.LOCK_UN)
    wait_for(lambda: "READY=1" in systemd.said(), what="honed's start")
    assert instance.client.ask("status")["pid"] == process.pid


def test_a_honed_that_waits_for_its_lock_ends_when_it_is_asked(early: EarlyHoned, systemd: Systemd) -> None:
    fd = lock.take(early.layout.spool_dir / "lock")
    assert fd is not None
    process = start(early, systemd)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_SEC) == 0
    os.close(fd)


def test_a_daemons_note_counts_only_for_the_process_that_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = lock.take(path, is_daemon=True)
    assert fd is not None
    assert lock.take(path) is None
    assert (lock.holder(path).pid, lock.holder(path).is_daemon) == (os.getpid(), True)
    os.close(fd)
    program = "import fcntl, sys; fcntl.flock(file := open(sys.argv[1], 'r+'), 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = lock.holder(path)
        assert (found.pid, found.is_daemon) == (other.pid, False)
        assert "fcntl.flock" in found.words
