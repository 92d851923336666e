"""honed answers on its control socket whatever happens to the socket, to its descriptors, or to its connections."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import HERE, Instance

from honed.system.place import MAX_OWN, MAX_PER_HOLDER
from waiting import DEADLINE_SEC, wait_for

#: Users of any machine: bin and nobody.
ALICE, EVE = 2, 65_534
#: Become a user, connect as often as asked, and say so; then hang until stdin ends.
HOLD = """
import os, socket, sys
os.setgroups([]); os.setresgid(int(sys.argv[2]), int(sys.argv[2]), int(sys.argv[2]))
os.setresuid(int(sys.argv[2]), int(sys.argv[2]), int(sys.argv[2]))
held = []
for _ in range(int(sys.argv[3])):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(sys.argv[1])
held[-1].sendall(b'{"verb": "status"}\\n')
print(held[-1].makefile().readline(), end="", flush=True)
sys.stdin.readline()
"""


def connect(instance: Instance) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(DEADLINE_SEC)
    made.connect(str(instance.layout.control_path))
    return made


def test_a_socket_that_was_removed_is_there_again(instance: Instance) -> None:
    instance.configure("[spool]\nsettle_sec = 0.1\nrescan_interval_sec = 0.2\n")
    instance.start()
    shutil.rmtree(instance.layout.runtime_dir)
    wait_for(instance.layout.control_path.exists, what="the socket", account=instance.account)
    assert "idle" in instance.client.ask("status")["status"]
    instance.layout.control_path.unlink()
    instance.layout.control_path.write_text("not a socket\n")
    wait_for(instance.layout.control_path.is_socket, what="the socket", account=instance.account)
    assert "idle" in instance.client.ask("status")["status"]
    instance.stop()
    assert not instance.layout.control_path.exists()


def test_a_socket_at_which_another_process_listens_is_left_to_it_until_its_end(instance: Instance) -> None:
    """A second honed's, which found no lock: the spool was removed and made again while the first one ran."""
    instance.configure("[spool]\nsettle_sec = 0.1\nrescan_interval_sec = 0.2\n")
    instance.start()
    path = instance.layout.control_path
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path.with_name("other.sock")))
        other.listen()
        path.with_name("other.sock").rename(path)
        number = path.stat().st_ino
        what = "the control socket was removed"
        wait_for(lambda: what in instance.log or path.stat().st_ino != number, what=what, account=instance.account)
        assert path.stat().st_ino == number
        assert f"{path}: Address already in use" in instance.log
    again = "honed listens again at"
    wait_for(lambda: again in instance.log, what=again, account=instance.account)
    assert "idle" in instance.client.ask("status")["status"]


def test_a_honed_without_descriptors_lives_and_answers(instance: Instance) -> None:
    instance.start()
    assert instance.process is not None

    def limit(num: int) -> None:
        assert instance.process is not None
        resource.prlimit(instance.process.pid, resource.RLIMIT_NOFILE, (num, 4096))

    num_open = max(int(each.name) for each in Path(f"/proc/{instance.process.pid}/fd").iterdir()) + 1
    limit(num_open)
    for _ in range(20):
        with connect(instance) as turned_away:
            assert turned_away.recv(1) == b""
    limit(num_open + 2)
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(connect(instance))
        assert "idle" in instance.client.ask("status")["status"]
    assert instance.log.count("connections end early") == 1


def test_silent_clients_of_its_own_user_give_way_to_the_next(instance: Instance) -> None:
    instance.start()
    with contextlib.ExitStack() as held:
        first = held.enter_context(connect(instance))
        for _ in range(MAX_OWN + 20):
            held.enter_context(connect(instance))
        assert "idle" in instance.client.ask("status")["status"]
        assert first.recv(1) == b""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes other users")
def test_one_user_cannot_take_the_places_of_others(instance: Instance) -> None:
    instance.start()
    for each in [instance.root, *instance.root.parents]:
        each.chmod(each.stat().st_mode | 0o111)

    def client(uid: int, num: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", HOLD, str(instance.layout.control_path), str(uid), str(num)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with client(EVE, MAX_PER_HOLDER + 1) as eve, client(ALICE, 1) as alice:
        assert eve.stdout is not None
        assert alice.stdout is not None
        assert "no free place" in json.loads(eve.stdout.readline())["error"]["message"]
        assert json.loads(alice.stdout.readline())["ok"]
        assert "idle" in instance.client.ask("status")["status"]
        for holder in (eve, alice):
            holder.communicate(b"\n")


def test_an_answer_comes_between_the_steps_of_a_turn(instance: Instance) -> None:
    instance.command = (sys.executable, str(HERE / "heldhoned.py"))
    instance.start()
    (instance.root / "hold").touch()
    assert instance.client.is_up  # wakes the loop
    wait_for((instance.root / "at-1").exists, what="the end of a turn")
    with connect(instance) as peer, peer.makefile("rwb") as stream:
        stream.write(b'{"verb": "numbers"}\n')
        stream.flush()
        (instance.root / "go-1").touch()
        assert json.loads(stream.readline())["ok"]
    (instance.root / "hold").unlink()
    (instance.root / "go-2").touch()
