"""What one user holds in their hands, on a booted machine: many users at once (subuid(5)), and file systems that never
answer (FUSE). Other users' lists, jobs and views do not wait for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from machine import CHECKOUT, Machine
from test_fair_users import drop, number_of, spec

from waiting import DEADLINE_SEC, wait_for

pytestmark = pytest.mark.systemd

#: eve's first subordinate user, and how many of them hold connections: each its own 16, so that all places are taken.
FIRST_SUBUID, NUM_SUBUIDS = 100_000, 5
#: Holds idle connections as each of the users FIRST, FIRST + 1, …, as newuidmap(1) makes them; until its input ends.
HOLD = """
import os, socket, sys
for number in range(int(sys.argv[2])):
    ready, told = os.pipe()
    if os.fork() == 0:
        os.close(ready); uid = int(sys.argv[1]) + number; os.setgroups([]); os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid); held = []
        for _ in range(20):
            peer = socket.socket(socket.AF_UNIX); peer.settimeout(5); peer.connect("/run/honed/control.sock")
            held.append(peer)
        os.write(told, b"."); os.close(told); sys.stdin.buffer.read(); os._exit(0)
    os.close(told); assert os.read(ready, 1) == b"."
print("held", flush=True); sys.stdin.buffer.read()
"""


@pytest.fixture(scope="module")
def honed(machine: Machine, model: str) -> Machine:
    assert model
    machine.install()
    for user in ("alice", "bob"):
        machine.add_user(user, "honed-submit")
    machine.add_user("eve")
    machine.write("/etc/subuid", f"eve:{FIRST_SUBUID}:65536\n")
    machine.write("/etc/honed/honed.toml", "[spool]\nsettle_sec = 0.2\n[jobs]\npoll_interval_sec = 0.1\n")
    machine.run("systemctl", "enable", "--now", "honed")
    return machine


@contextmanager
def going_on(honed: Machine, said: bytes, *words: str, stdin: bytes = b"") -> Iterator[None]:
    """Run a program, which has said that it is ready, until the block is over."""
    process = honed.popen(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(stdin)
        process.stdin.flush()
        assert process.stdout.readline() == said
        yield
    process.wait(DEADLINE_SEC)


def job_of(honed: Machine, user: str, name: str, dataset: str = "/srv/data/facts.jsonl") -> int:
    drop(honed, user, [spec(name, dataset)])
    return number_of(honed, name)


def test_subordinate_users_share_the_places_of_their_owner(honed: Machine) -> None:
    words = ("/usr/bin/python3", "-c", HOLD, str(FIRST_SUBUID), str(NUM_SUBUIDS))
    with going_on(honed, b"held\n", *words):
        for user in ("alice", "bob", None):
            for _ in range(3):
                assert "name" in honed.run("honectl", "list", user=user)


def test_a_view_that_hangs_keeps_no_other_users_view_and_job(honed: Machine) -> None:
    """alice's file system, over the directory of her data set, answers nothing: the view of her job opens it."""
    honed.run("honectl", "pause")
    staged = "/var/lib/honed/staged/alices"
    honed.sh(f"mkdir {staged}; cp /srv/data/facts.jsonl {staged}; chmod -R a+rX {staged}", user="alice")
    hangs, other = job_of(honed, "alice", "hangs", f"{staged}/facts.jsonl"), job_of(honed, "bob", "other")
    view, others = f"honed-view@{hangs}.service", f"honed-view@{other}.service"

    def is_made_meanwhile() -> bool:
        honed.run("systemctl", "start", "--no-block", view)
        honed.wait_property(view, "ActiveState", "activating")
        honed.run("systemctl", "start", others)
        honed.run("systemctl", "stop", others)
        return honed.property(view, "ActiveState") == "activating"

    mounts = (CHECKOUT + "/tests/system/fuse_mounts.py", honed.run("id", "-u", "alice").strip())
    order = json.dumps([[staged, False, True]]).encode() + b"\n"
    with going_on(honed, b"mounted\n", "/usr/bin/python3", *mounts, stdin=order):
        wait_for(is_made_meanwhile, what="bob's view, while alice's hangs")
        honed.run("honectl", "resume")
        wait_for(lambda: honed.jobs()["other"]["state"] == "succeeded", what="bob's job", account=honed.jobs)
        honed.wait_message("a file system there does not answer", f"--unit={view}")
        # honed settles the job after its units have ended.
        wait_for(lambda: honed.jobs()["hangs"]["outcome"] == "environment_invalid", what="its end", account=honed.jobs)
        assert "environment_invalid" in honed.run("honectl", "show", "hangs", user="alice")


def test_a_module_beside_a_job_is_none_of_its_workers(honed: Machine) -> None:
    honed.run("honectl", "pause")
    number = job_of(honed, "alice", "modules")
    place = f"/var/lib/honed/jobs/{number}"
    for name in ("argparse", "json", "torch", "honed"):
        honed.write(f"{place}/{name}.py", f"open('{place}/ran', 'w'); raise SystemExit(1)\n", user="alice")
    honed.run("honectl", "resume")
    wait_for(lambda: honed.jobs()["modules"]["state"] == "succeeded", what="her job", account=honed.jobs)
    assert not honed.exists(f"{place}/ran")
