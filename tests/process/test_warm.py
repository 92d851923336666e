"""Servers of the tests' processes: one set for all test processes of a run, and nothing of it is left after the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from harness import wait_for

import warm

TESTS = Path(warm.__file__).parent
#: Prints the pid of the server of its kind, and waits for a line.
ASK = """
import socket, struct, sys, warm
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect(warm.address("plain"))
    print(struct.unpack("iII", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0], flush=True)
sys.stdin.readline()
"""


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**warm.without(os.environ), "PYTHONPATH": str(TESTS), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def test_processes_of_a_run_share_a_server_which_ends_with_the_first_even_if_that_is_killed() -> None:
    with start(f"import warm; print(warm.directory(), flush=True)\n{ASK}") as first:
        assert first.stdin
        assert first.stdout
        place = first.stdout.readline().strip()
        with start(ASK, **{warm.DIRECTORY: place}) as second:
            assert second.stdout
            pids = {each.stdout.readline() for each in (first, second) if each.stdout}
            [server] = map(int, pids)
            second.communicate("\n")
        assert Path(f"/proc/{server}").exists(), "who else shares it goes on with it"
        first.send_signal(signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{server}").exists(), what="the server's end")


def test_who_connects_and_says_nothing_keeps_nobody_from_being_served() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(warm.address("plain"))
        done = warm.run([sys.executable, "-c", "print('served')"], timeout=60)
    assert (done.returncode, done.stdout) == (0, "served\n")
