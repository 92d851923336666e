"""Job files are checked with the rights of the user who drops them: honed-check@UID.service, under the real units."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import Machine

from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
JOBS = "/var/lib/honed/jobs"
#: A directory whose files can be leased, like those in /tmp of the guest, and that units see.
SHARED = "/dev/shm"
UNIT = "/usr/lib/systemd/system/honed-check@.service"
DROPIN = "/etc/systemd/system/honed-check@.service.d/test.conf"
CONFIG = "[spool]\nsettle_sec = 0.2\npreflight_timeout_sec = {timeout_sec}\n[jobs]\npoll_interval_sec = 0.1\n"


@pytest.fixture(scope="module")
def honed(machine: Machine) -> Machine:
    """A machine with honed running and the starting of jobs paused: these tests are about the steps before."""
    machine.install()
    machine.run("groupadd", "project")
    machine.add_user("anna", "honed-submit", "project")
    machine.add_user("berta", "honed-submit")
    machine.run("useradd", "--system", "--groups", "honed-submit", "--shell", "/bin/sh", "service")
    machine.write("/etc/honed/honed.toml", CONFIG.format(timeout_sec=60))
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    return machine


@pytest.fixture(autouse=True)
def settled(honed: Machine) -> Iterator[None]:
    """Start each test without a running check, and without an idle one."""
    yield
    honed.sh("systemctl stop 'honed-check@*'")


def spec(**keys: Any) -> str:
    return json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), **keys))


def drop(honed: Machine, user: str, name: str, **keys: Any) -> None:
    honed.run(
        "sh",
        "-ec",
        f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1.json"',
        "sh",
        name,
        user=user,
        stdin=spec(name=name, **keys),
    )


def drop_many(honed: Machine, user: str, name: str, count: int) -> None:
    script = (
        f"cat >/tmp/{name}; cd {INCOMING}; for i in $(seq {count}); do cp /tmp/{name} .{name}-$i; done; "
        f"for i in $(seq {count}); do mv .{name}-$i {name}-$i.json; done"
    )
    honed.run("sh", "-ec", script, user=user, stdin=spec())


def jobs(honed: Machine) -> dict[str, dict[str, Any]]:
    """Accepted jobs, by name."""
    entries = [json.loads(path.read_bytes()) for path in honed.host_path("/var/spool/honed/queued").glob("*.json")]
    return {entry["name"]: entry for entry in entries}


def wait_job(honed: Machine, name: str) -> dict[str, Any]:
    found = wait_for(lambda: jobs(honed).get(name) or honed.refusal(name), what=f"{name} accepted")
    assert isinstance(found, dict), found
    return found


def wait_refusal(honed: Machine, name: str) -> str:
    found = wait_for(lambda: honed.refusal(name) or jobs(honed).get(name), what=f"{name} refused")
    assert isinstance(found, str), found
    return found


def uid_of(honed: Machine, user: str) -> int:
    return int(honed.run("id", "-u", user))


def unit_of(honed: Machine, user: str) -> str:
    return f"honed-check@{uid_of(honed, user)}.service"


def status(honed: Machine) -> str:
    return honed.property("honed.service", "StatusText")


def status_of(honed: Machine, pid: int) -> dict[str, str]:
    """Return the kernel's status of a process."""
    lines = honed.run("cat", f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


#: Holds a lease on its first argument, so opening that file blocks, as on a file system that does not answer. At the
#: first opening it runs the shell line of the second argument, then releases the file; without a second, never.
HOLD = """
import fcntl, os, signal, subprocess, sys, time
asked = []
signal.signal(signal.SIGIO, lambda *_: asked.append(1))
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
while not asked: time.sleep(0.01)
print("asked", flush=True)
if len(sys.argv) > 2:
    subprocess.run(["sh", "-ec", sys.argv[2]], check=True)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
time.sleep(600)
"""


class Holder:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._expect(b"held\n")

    def _expect(self, line: bytes) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == line

    def wait_opened(self) -> None:
        """Wait until the check has opened the file."""
        self._expect(b"asked\n")


@contextlib.contextmanager
def held(honed: Machine, user: str, path: str, then: str = "") -> Iterator[Holder]:
    with honed.popen("python3", "-c", HOLD, path, *([then] if then else []), user=user, stdout=-1) as process:
        try:
            yield Holder(process)
        finally:
            process.kill()
            honed.try_run("pkill", "--full", "F_SETLEASE")


# --- Whose rights -----------------------------------------------------------------------------------------------------


def test_the_unit_has_its_submitters_rights_and_no_others(honed: Machine) -> None:
    drop(honed, "anna", "whose")
    wait_job(honed, "whose")
    unit, anna = unit_of(honed, "anna"), uid_of(honed, "anna")
    said = status_of(honed, honed.main_pid(unit))
    assert set(said["Uid"].split()) == {str(anna)}
    assert set(said["Gid"].split()) == {honed.run("id", "-g", "anna").strip()}
    assert set(said["Groups"].split()) == set(honed.run("id", "-G", "anna").split())
    assert said["NoNewPrivs"] == "1"
    assert said["Seccomp"] == "2"
    limits = honed.run("cat", f"/proc/{honed.main_pid(unit)}/limits")
    assert re.search(r"Max address space +4294967296 +unlimited", limits)
    assert honed.property(unit, "Slice") == "honed.slice"


def test_a_file_that_only_its_owner_may_read_is_checked(honed: Machine) -> None:
    honed.sh("umask 077; mkdir /srv/annas-own")
    honed.sh("cp /srv/rows.jsonl /srv/annas-own/ && chown -R anna:anna /srv/annas-own && chmod -R go= /srv/annas-own")
    drop(honed, "anna", "own", datasets=[{"path": "/srv/annas-own/rows.jsonl"}])
    wait_job(honed, "own")
    drop(honed, "berta", "anothers", datasets=[{"path": "/srv/annas-own/rows.jsonl"}])
    assert "cannot be entered by the user berta" in wait_refusal(honed, "anothers")


@pytest.fixture(scope="module")
def bertas(honed: Machine) -> dict[str, str]:
    """Files that honed's user may read and anna may not: a private one of berta's, and one made by a job of hers."""
    drop(honed, "berta", "maker")
    made = f"{JOBS}/{wait_job(honed, 'maker')['id']}/output"
    honed.sh(f"mkdir {made} && cp /srv/rows.jsonl {made}/ && chown honed:honed-job {made}/* && chmod 640 {made}/*")
    honed.sh("umask 077; cp /srv/rows.jsonl /srv/bertas.jsonl; chown berta /srv/bertas.jsonl")
    assert honed.try_run("head", "-c1", f"{made}/rows.jsonl", user="honed").returncode == 0
    return {"her own": "/srv/bertas.jsonl", "her result": f"{made}/rows.jsonl"}


@pytest.mark.parametrize("what", ["her own", "her result"])
def test_a_link_that_is_turned_after_the_look_at_it_leads_nowhere(
    honed: Machine, bertas: dict[str, str], what: str
) -> None:
    """anna's data are two files that the policy has checked. While the first is opened, the second becomes a link to
    berta's."""
    place, name = f"{SHARED}/annas", f"turned-{what.replace(' ', '-')}"
    honed.sh(
        f"rm -rf {place} && mkdir -p {place} && cp /srv/rows.jsonl {place}/a.jsonl && cp /srv/rows.jsonl "
        f"{place}/b.jsonl && chown -R anna:anna {place}"
    )
    turn = f"ln -s {bertas[what]} {place}/.b && mv -f {place}/.b {place}/b.jsonl"
    with held(honed, "anna", f"{place}/a.jsonl", turn) as holder:
        drop(honed, "anna", name, datasets=[{"path": place}])
        holder.wait_opened()
        text = wait_refusal(honed, name)
    assert "b.jsonl" in text
    assert "Permission denied" in text


def test_root_and_accounts_of_services_are_checked_by_honed_itself(honed: Machine) -> None:
    honed.run("cp", "/srv/rows.jsonl", "/srv/service.jsonl")
    for user in ("root", "service"):
        drop(honed, user, f"of-{user}", datasets=[{"path": "/srv/service.jsonl"}])
        wait_job(honed, f"of-{user}")
        assert honed.property(unit_of(honed, user), "ActiveState") == "inactive"
    owners = honed.sh("ps -eo user:20,args | grep '[h]oned.check.preflight' | cut -d' ' -f1").split()
    assert owners == ["honed"]


# --- Several people, and time -----------------------------------------------------------------------------------------


def leased(honed: Machine, user: str) -> str:
    path = f"{SHARED}/{user}-slow.jsonl"
    honed.sh(f"cp /srv/rows.jsonl {path} && chown {user} {path}")
    return path


def test_one_whose_file_does_not_answer_holds_nobody_else_up(honed: Machine) -> None:
    path = leased(honed, "anna")
    with held(honed, "anna", path) as holder:
        drop(honed, "anna", "stands", datasets=[{"path": path}])
        holder.wait_opened()
        drop(honed, "berta", "passes")
        wait_job(honed, "passes")
        assert "stands" not in jobs(honed)
        assert not honed.refusal("stands")
        assert honed.property(unit_of(honed, "anna"), "ActiveState") == "active"
    wait_job(honed, "stands")


def test_a_check_that_takes_too_long_is_ended_and_told_with_its_stage(honed: Machine) -> None:
    def limit(timeout_sec: int) -> None:
        honed.write("/etc/honed/honed.toml", CONFIG.format(timeout_sec=timeout_sec))
        since = honed.run("date", "+%s.%N").strip()
        honed.run("systemctl", "reload", "honed")
        honed.wait_message("configuration reloaded", "--unit=honed", f"--since=@{since}")

    path, unit = leased(honed, "anna"), unit_of(honed, "anna")
    limit(20)  # time for the check to begin and to open the file, and for nothing else to be checked
    try:
        with held(honed, "anna", path) as holder:
            drop(honed, "anna", "hangs", datasets=[{"path": path}])
            holder.wait_opened()
            pid = honed.main_pid(unit)
            assert "the check did not finish within 20 s; it was at: datasets" in wait_refusal(honed, "hangs")
            honed.wait_property(unit, "ActiveState", "inactive")
    finally:
        limit(60)
    drop(honed, "anna", "after-that")
    wait_job(honed, "after-that")
    assert honed.main_pid(unit) not in {0, pid}


@pytest.mark.parametrize("end", [["restart"], ["kill", "--signal=KILL", "--kill-who=main"]], ids=lambda end: end[0])
def test_an_end_of_honed_in_the_middle_of_a_check_ends_that_and_begins_it_again(honed: Machine, end: list[str]) -> None:
    path, unit, name = leased(honed, "anna"), unit_of(honed, "anna"), f"over-{end[0]}"
    with held(honed, "anna", path) as holder:
        drop(honed, "anna", name, datasets=[{"path": path}])
        holder.wait_opened()
        before, daemon = honed.main_pid(unit), honed.main_pid("honed")
        honed.run("systemctl", *end, "honed")
        wait_for(lambda: honed.main_pid("honed") not in {0, daemon}, what="another honed")
        wait_for(lambda: honed.main_pid(unit) not in {0, before}, what="another check")
        assert honed.try_run("test", "-e", f"/proc/{before}").returncode != 0
    wait_job(honed, name)
    assert len([line for line in honed.messages("--unit=honed") if "accepted from" in line and name in line]) == 1


def test_a_stop_of_honed_ends_its_checks(honed: Machine) -> None:
    path, unit = leased(honed, "anna"), unit_of(honed, "anna")
    with held(honed, "anna", path) as holder:
        drop(honed, "anna", "stopped", datasets=[{"path": path}])
        holder.wait_opened()
        honed.run("systemctl", "stop", "honed")
        honed.wait_property(unit, "ActiveState", "inactive")
    honed.run("systemctl", "start", "honed")
    wait_job(honed, "stopped")


def test_a_flood_of_one_persons_leaves_room_for_another(honed: Machine) -> None:
    # On the file system of incoming/: a copy would be there before its owner and mode are.
    stage = "/var/spool/flood"
    honed.run(
        "sh",
        "-ec",
        f"mkdir {stage} && test $(stat -c %d {stage}) = $(stat -c %d {INCOMING}) && "
        f"cat >{stage}/beside-the-flood.json && chown berta {stage}/* && "
        f"for i in $(seq 200); do cp {stage}/beside-the-flood.json {stage}/flood-$i.json; done && "
        f"chown anna {stage}/flood-*",
        stdin=spec(),
    )
    drop(honed, "berta", "before-the-flood")
    wait_job(honed, "before-the-flood")  # her check is running, as anna's is soon
    # Not mv: it looks at each file that it has moved, which may be taken by then.
    move = f"import os; [os.rename(f'{stage}/{{name}}', f'{INCOMING}/{{name}}') for name in os.listdir('{stage}')]"
    honed.run("python3", "-c", move)
    beside = wait_job(honed, "beside-the-flood")
    wait_for(lambda: sum(name.startswith("flood-") for name in jobs(honed)) == 200, what="all of them")
    flood = [job for name, job in jobs(honed).items() if name.startswith("flood-")]
    assert sum(job["submitted_at"] < beside["submitted_at"] for job in flood) < 130


def test_a_unit_without_work_ends_after_a_while_and_leaves_what_its_user_shares(honed: Machine) -> None:
    """Shared memory of anna's programs lies in /dev/shm: RemoveIPC= would remove it together with the unit."""
    honed.run("touch", f"{SHARED}/annas-memory", user="anna")
    drop(honed, "anna", "then-idle")
    wait_job(honed, "then-idle")
    unit = unit_of(honed, "anna")
    assert honed.property(unit, "ActiveState") == "active"
    honed.wait_property(unit, "ActiveState", "inactive")
    assert honed.exists(f"{SHARED}/annas-memory")
    assert honed.run("systemctl", "is-system-running").strip() == "running"


# --- Nobody in its place ----------------------------------------------------------------------------------------------

#: Runs as a process of the user's own: tries to access every new process from its first moment on, and reports how
#: many were checks and which of those it could access.
ATTACK = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
before, seen, into = set(os.listdir("/proc")), set(), set()
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    for pid in set(os.listdir("/proc")) - before:
        if not pid.isdigit(): continue
        words = ""
        try:
            words = open(f"/proc/{pid}/cmdline").read()
            if "bin/honed-check" in words:
                seen.add(pid)
            for name in ("mem", "fd/0", "environ"):
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDWR if name == "mem" else os.O_RDONLY))
                into.add((pid, name))
        except OSError: pass
        if "bin/honed-check" in words and libc.ptrace(0x4206, int(pid), 0, 0) == 0: into.add((pid, "ptrace"))
print(len(seen), sorted(each for each in into if each[0] in seen), flush=True)
"""


def test_the_users_own_processes_cannot_reach_into_the_check(honed: Machine) -> None:
    """The check is protected even before its program runs: its answer decides whether a job is accepted."""
    over = f"{SHARED}/the-attack-is-over"
    with honed.popen("python3", "-c", ATTACK, over, user="anna", stdout=-1) as attack:
        assert attack.stdout is not None
        assert attack.stdout.readline() == b"ready\n"
        for number in range(3):
            drop(honed, "anna", f"attacked-{number}")
            wait_job(honed, f"attacked-{number}")
            honed.sh("systemctl stop 'honed-check@*'")
        honed.run("touch", over)
        num_seen, into = attack.stdout.readline().decode().split(" ", 1)
    assert int(num_seen) == 3
    assert into == "[]\n"


def test_nobody_but_systemd_can_connect_in_its_place(honed: Machine) -> None:
    honed.run("systemctl", "mask", "--runtime", unit_of(honed, "anna"))
    try:
        for user in ("anna", "berta"):
            assert honed.try_run("ls", "/run/honed/check", user=user).returncode != 0
        assert honed.run("stat", "-c", "%U %a", "/run/honed/check").split() == ["honed", "700"]
        assert honed.try_run("systemctl", "start", "--no-ask-password", unit_of(honed, "anna"), user="anna").returncode
    finally:
        honed.run("systemctl", "unmask", "--runtime", unit_of(honed, "anna"))


# --- Where it cannot be started ---------------------------------------------------------------------------------------


def without_the_template(honed: Machine) -> str:
    honed.sh(f"mv {UNIT} /root && systemctl daemon-reload")
    return "not found"


def without_the_rule(honed: Machine) -> str:
    honed.sh("mv /usr/share/polkit-1/rules.d/50-honed.rules /root")
    return "enied|authentication"


def with_a_program_that_does_not_start(honed: Machine) -> str:
    honed.write(DROPIN, "[Service]\nExecStart=\nExecStart=/bin/false\n")
    honed.run("systemctl", "daemon-reload")
    return "ended before it was ready"


def with_a_user_that_is_not_known(honed: Machine) -> str:
    honed.write(DROPIN, "[Service]\nUser=nobody-known\n")
    honed.run("systemctl", "daemon-reload")
    return "exits immediately"


MEND = f"""
[ ! -e /root/honed-check@.service ] || mv /root/honed-check@.service {UNIT}
[ ! -e /root/50-honed.rules ] || mv /root/50-honed.rules /usr/share/polkit-1/rules.d
rm -f {DROPIN}
systemctl daemon-reload
"""


@pytest.mark.parametrize(
    "trouble",
    [without_the_template, without_the_rule, with_a_program_that_does_not_start, with_a_user_that_is_not_known],
)
def test_where_no_unit_starts_people_wait_and_are_checked_once_it_does(honed: Machine, trouble: Any) -> None:
    """Under the first trouble more wait than are taken at once: root's file is not behind them."""
    name, num_waiting = trouble.__name__, 70 if trouble is without_the_template else 2
    since = honed.run("date", "+%s.%N").strip()
    words = trouble(honed)
    try:
        drop(honed, "anna", name)
        drop_many(honed, "anna", f"{name}-flood", num_waiting)
        text = wait_for(lambda: status(honed) if "not checked:" in status(honed) else "", what="a word of it")
        assert re.search(words, text)
        drop(honed, "root", f"{name}-root")
        wait_job(honed, f"{name}-root")
        assert name not in jobs(honed)
        assert not honed.refusal(name)
        assert honed.sh("ps -eo user:20,args | grep '[h]oned.check.preflight' | cut -d' ' -f1").split() == ["honed"]
        if trouble is without_the_template:
            found = honed.doctor()
            assert "not checked:" in found["honed.service"]["detail"]
            assert found["honed-check@.service"]["status"] == "error"
            assert found["polkit"]["status"] == "error"
    finally:
        honed.sh(MEND)
    wait_job(honed, name)
    wait_for(lambda: sum(each.startswith(f"{name}-flood") for each in jobs(honed)) == num_waiting, what="all of them")
    wait_for(lambda: "not checked:" not in status(honed), what="nothing more of it")
    said = [line for line in honed.messages("--unit=honed", f"--since=@{since}") if "so job files wait" in line]
    assert len(said) == 1, said


def test_a_unit_of_one_person_that_does_not_start_is_in_nobody_elses_way(honed: Machine) -> None:
    honed.write(f"/etc/systemd/system/{unit_of(honed, 'anna')}.d/wrong.conf", "[Service]\nUser=nobody-known\n")
    honed.run("systemctl", "daemon-reload")
    drop_many(honed, "anna", "waiting", 100)
    wait_for(lambda: "not checked:" in status(honed), what="a word of it")
    drop(honed, "berta", "goes-on")
    wait_job(honed, "goes-on")
    honed.run("systemctl", "restart", "honed")  # what was claimed lies there with others' files
    drop(honed, "berta", "goes-on-still")
    wait_job(honed, "goes-on-still")
    honed.sh(f"rm -r /etc/systemd/system/{unit_of(honed, 'anna')}.d && systemctl daemon-reload")
    wait_for(lambda: sum(each.startswith("waiting-") for each in jobs(honed)) == 100, what="all of them")


def test_the_tests_were_right_that_the_daemon_never_died_by_itself(honed: Machine) -> None:
    assert not [entry for entry in honed.journal("-u", "honed") if "Traceback" in str(entry.get("MESSAGE"))]
    assert honed.journal("-p", "crit", "-u", "honed") == []
