"""Files that one user plants in directories writable for them block no other user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machine import Machine

from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
REJECTED = "/var/spool/honed/rejected"
JOBS = "/var/lib/honed/jobs"
#: Plants a link to itself and a directory at paths that honed will write, in every job's directory it can write to,
#: until it is told that the attack is over.
OVER = "/srv/the-attack-is-over"
PLANT = f"""
import os
def nest():
    os.mkdir("deep")
    os.chdir("deep")
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
while not os.path.exists("{OVER}"):
    for name in os.listdir("{JOBS}"):
        for make in (lambda: os.symlink("output", "output"), lambda: os.mkdir("plan.json"), nest):
            try:
                os.chdir(f"{JOBS}/{{name}}")
                make()
            except OSError: pass
"""


@pytest.fixture(scope="module")
def honed(machine: Machine) -> Machine:
    """A machine with honed running and the starting of jobs paused."""
    machine.install()
    for name in ("berta", "mallory"):
        machine.add_user(name, "honed-submit")
    machine.run("useradd", "--system", "--groups", "honed-submit", "--shell", "/bin/sh", "service")
    machine.write(
        "/etc/honed/honed.toml.d/50-test.toml",
        # A check that something holds up is not ended: a job that waits for it would not be accepted in time.
        "[spool]\nsettle_sec = 0.2\nrescan_interval_sec = 2\npreflight_timeout_sec = 3600\n"
        "[retention]\nmax_checkpoint_bytes = 1_000_000_000\n",
    )
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    return machine


def drop(honed: Machine, user: str | None, *names: str, **keys: Any) -> None:
    for name in names:
        spec = json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), name=name, **keys))
        honed.run(
            "sh",
            "-ec",
            f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1.json"',
            "sh",
            name,
            user=user,
            stdin=spec,
        )


def accepted(honed: Machine, *names: str) -> list[int]:
    found = wait_for(lambda: rows if set(names) <= set(rows := honed.jobs()) else None, what="accepted")
    assert found is not None
    return [int(found[name]["id"]) for name in names]


def refusal(honed: Machine, file: str) -> str:
    return wait_for(lambda: honed.try_run("cat", f"{REJECTED}/{file}.reason").stdout, what=f"{file} refused")


def status(honed: Machine) -> str:
    return honed.property("honed.service", "StatusText")


def test_a_lock_that_somebody_holds_keeps_nobodys_view_waiting(honed: Machine) -> None:
    drop(honed, "berta", "first")
    [job_id] = accepted(honed, "first")
    honed.sh(f"systemctl start honed-view@{job_id}; systemctl stop honed-view@{job_id}")  # all its files are there
    held = [
        honed.popen("flock", path, "sleep", "600", user="mallory")
        for path in ("/run/userdb", "/run/honed-view.lock", "/var/spool/honed/lock")
    ]
    try:
        wait_for(lambda: held[1].poll() is not None and held[2].poll() is not None, what="those that may not")
        assert held[0].poll() is None
        # The locks are held for longer than a start may take; the view ends at once, since nobody needs it.
        honed.run("systemctl", "start", f"honed-view@{job_id}")
        honed.run("systemctl", "restart", "honed")
    finally:
        for each in held:
            each.kill()
        honed.sh(f"pkill -u mallory sleep; systemctl stop honed-view@{job_id}")


def test_nothing_is_planted_in_a_jobs_directory_while_it_is_checked_and_later_it_stops_nobody(honed: Machine) -> None:
    """What she tries to plant is a link to itself, a directory in place of the plan, and a tree that is deeper than
    Python's recursion goes."""
    honed.sh(f"chmod a+r {JOBS}")  # so that she need not guess their numbers
    since = honed.run("date", "+%s.%N").strip()
    planting = honed.popen("python3", "-c", PLANT, user="mallory")
    names = [f"planted-{number}" for number in range(8)]
    drop(honed, "mallory", *names[:4])
    for number in range(4):  # refused; honed removes what it has copied
        honed.sh(f"echo '{{' >{INCOMING}/broken-{number}.json", user="mallory")
        refusal(honed, f"broken-{number}.json")
    drop(honed, "berta", "beside-1", "beside-2", "beside-3")
    drop(honed, "mallory", *names[4:])
    drop(honed, "mallory", "swept", sweep={"training.seed": [1, 2]})
    numbers = accepted(honed, "beside-1", "beside-2", "beside-3", *names, "swept-1", "swept-2")[3:]
    sweep = honed.jobs()["swept-1"]["group"]["id"]
    assert not honed.exists(f"{JOBS}/{sweep}"), "the copy of the sweep's own file, which honed removes"
    wait_for(lambda: all(honed.exists(f"{JOBS}/{number}/deep") for number in numbers), what="planted, in what is hers")
    honed.run("touch", OVER)
    wait_for(lambda: planting.poll() == 0, what="the end of the planting")
    for number in map(str, numbers):
        honed.run("honectl", "cancel", number, user="mallory")
    honed.run("honectl", "prune", *map(str, numbers), user="mallory")
    honed.run("systemctl", "restart", "honed")
    wait_for(lambda: not any(honed.exists(f"{JOBS}/{number}") for number in numbers), what="removed")
    messages = "\n".join(honed.messages("--unit=honed", f"--since=@{since}"))
    assert "an error in the daemon's loop" not in messages
    assert "Recursion" not in messages
    assert "degraded" not in status(honed)


def test_what_lies_in_the_place_of_a_report_or_of_checkpoints_is_in_nobody_elses_way(honed: Machine) -> None:
    drop(honed, "mallory", "her-own")
    [job_id] = accepted(honed, "her-own")
    honed.sh(
        f"cd {JOBS}/{job_id}; mkdir -p .report.html.tmp/x; ln -s /root/x checkpoints; "
        "ln -s /root/x report.html || [ -e report.html ]",
        user="mallory",
    )
    honed.run("honectl", "cancel", "her-own", user="mallory")
    honed.run("systemctl", "reload", "honed")  # now it looks at all jobs' checkpoints
    drop(honed, "berta", "reported")
    [other] = accepted(honed, "reported")
    honed.run("honectl", "cancel", "reported", user="berta")
    wait_for(lambda: "reported" in honed.try_run("cat", f"{JOBS}/{other}/report.html").stdout, what="its report")
    wait_for(lambda: "reported" in honed.try_run("cat", "/var/lib/honed/index.html").stdout, what="the index")
    assert honed.run("honectl", "show", "her-own", user="mallory")
    assert "degraded" not in status(honed)


def test_a_directory_stays_where_it_is_dropped_and_a_file_of_its_name_is_taken(honed: Machine) -> None:
    """One that honed could move would hold somebody's work, or take the name of a reason."""
    # What is made in incoming/ inherits an ACL that lets nobody enter it; its owner may change that.
    make = (
        f"import os, sys; os.chdir('{INCOMING}'); os.mkdir('.d'); "
        "[os.removexattr('.d', name) for name in os.listxattr('.d')]; os.chmod('.d', 0o777); "
        "open(f'.d/in-it', 'w').close(); os.rename('.d', sys.argv[1])"
    )
    for name in ("wrong.json.reason", "wrong-too.json"):
        honed.run("python3", "-c", make, name, user="mallory")
        honed.wait_message(f"'{name}' in")
    honed.sh(f"echo '{{' >{INCOMING}/wrong.json", user="berta")
    assert "spec_invalid" in refusal(honed, "wrong.json")
    for name in ("wrong.json.reason", "wrong-too.json"):
        assert honed.exists(f"{INCOMING}/{name}/in-it")
        honed.sh(f"rm -r {INCOMING}/{name}", user="mallory")


def test_what_is_dropped_is_never_read_as_a_reason(honed: Machine) -> None:
    """A link or a pipe under the name of a reason would be read, or waited for, with honed's rights."""
    honed.write("/var/lib/honed/secret", "a secret of honed's")
    honed.run("chmod", "600", "/var/lib/honed/secret")
    honed.run("chown", "honed:honed", "/var/lib/honed/secret")
    last = int(honed.read("/var/spool/honed/seq"))
    honed.sh(
        f"cd {INCOMING}; for n in $(seq {last} {last + 40}); do echo x >.t; mv .t a.$n; done; "
        "for n in $(seq 12); do ln -s /var/lib/honed/secret .l; mv .l a.reason; sleep 0.1; done; "
        "mkfifo .p; touch -d 2100-01-01 .p; mv .p zzz.reason",
        user="mallory",
    )
    assert "not a job file's name" in refusal(honed, "zzz.reason")
    for user in ("mallory", "root"):
        assert "a secret" not in honed.run("honectl", "list", "--rejected", "--json", user=user)
    reasons = honed.run("find", REJECTED, "-name", "*.reason", "-type", "f", "-user", "honed").splitlines()
    assert len(reasons) == len(honed.run("find", REJECTED, "-name", "*.reason").splitlines())
    kinds = honed.run("find", REJECTED, "-mindepth", "1", "!", "-type", "f")
    assert kinds == ""


def test_files_of_nobody_are_refused_and_take_nobodys_turn(honed: Machine) -> None:
    spec = json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl")))
    honed.write("/srv/spec", spec)
    honed.sh(
        f"for uid in $(seq 100001 100100); do cp /srv/spec {INCOMING}/.$uid; chown $uid {INCOMING}/.$uid; "
        f"mv {INCOMING}/.$uid {INCOMING}/n$uid.json; done"
    )
    drop(honed, "berta", "in-time")
    accepted(honed, "in-time")
    assert "uid 100001, is not a user of this machine" in refusal(honed, "n100001.json")


def test_a_system_accounts_job_is_shown_nothing_that_the_account_cannot_open(honed: Machine) -> None:
    """Its worker runs as honed-job, which has more rights in jobs' directories than the account."""
    drop(honed, "berta", "hers")
    drop(honed, "service", "services")
    hers, services = accepted(honed, "hers", "services")
    plan = honed.read_json(f"{JOBS}/{services}/plan.json")
    plan["may_read"]["inputs"].append(f"{JOBS}/{hers}")
    honed.write(f"{JOBS}/{services}/plan.json", json.dumps(plan))
    assert honed.try_run("systemctl", "start", f"honed-view@{services}").returncode != 0
    told = "\n".join(honed.messages("-u", f"honed-view@{services}"))
    assert f"{JOBS}/{hers}: Permission denied, for the user service" in told
