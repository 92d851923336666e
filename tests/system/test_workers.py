"""The user of a job's unit, and its view: two people's jobs on one machine, with a shell in place of the worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machine import CHECKOUT, ENVIRONMENT, FIND_WRITABLE, Machine

from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
JOBS = "/var/lib/honed/jobs"
#: Replaces the worker with the job's own script, with the sandbox and the user of the unit.
PROBE_DROPIN = """\
[Service]
Type=oneshot
NotifyAccess=none
WatchdogSec=0
ExecStart=
ExecStart=sh /srv/probe.sh
ExecStopPost=
StandardOutput=truncate:/srv/said
StandardError=inherit
"""
#: Places where a program leaves files, or finds those of others.
PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/home/anna", "/home/berta", "/run/user/4711", "/etc/credstore", "/etc/honed")


@pytest.fixture(scope="module")
def honed(machine: Machine) -> Machine:
    """A machine with honed running and the starting of jobs paused: these tests start the units themselves."""
    machine.install()
    machine.run("groupadd", "team")
    machine.add_user("anna", "honed-submit", "team")
    machine.add_user("berta", "honed-submit")
    machine.write("/etc/honed/honed.toml.d/50-test.toml", "[spool]\nsettle_sec = 0.2\n")
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    machine.write("/etc/systemd/system/honed-job@.service.d/50-probe.conf", PROBE_DROPIN)
    machine.run("systemctl", "daemon-reload")
    return machine


def job_of(honed: Machine, user: str | None, name: str, **keys: Any) -> int:
    """Drop a small job and wait until it is accepted. Returns its number."""
    return drop(honed, user, plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), name=name, **keys))


def drop(honed: Machine, user: str | None, spec: dict[str, Any]) -> int:
    name, text = spec["name"], json.dumps(spec)
    honed.run(
        "sh",
        "-ec",
        f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1.json"',
        "sh",
        name,
        user=user,
        stdin=text,
    )

    def accepted() -> int | None:
        assert not (refused := honed.refusal(name)), refused
        return honed.jobs().get(name, {}).get("id")

    return int(wait_for(accepted, what=f"{name} accepted") or 0)


def probe(honed: Machine, job_id: int, script: str) -> str:
    """Run a shell script in a job's unit, and return its output."""
    honed.write("/srv/probe.sh", script)
    honed.run("rm", "-f", "/srv/said")
    honed.try_run("systemctl", "start", f"honed-job@{job_id}")
    honed.wait_property(f"honed-job@{job_id}", "ActiveState", "inactive", "failed")
    return honed.read("/srv/said") if honed.exists("/srv/said") else ""


def made_by(honed: Machine, user: str, job_id: int) -> str:
    """Create in a job's directory the output that its worker would, and return a data set there."""
    honed.run(
        "sh", "-ec", f"umask 007; mkdir -p {JOBS}/{job_id}/output; cp /srv/rows.jsonl {JOBS}/{job_id}/output", user=user
    )
    return f"{JOBS}/{job_id}/output/rows.jsonl"


def test_a_worker_has_the_rights_of_its_submitter_and_no_others(honed: Machine) -> None:
    honed.sh("mkdir -m 750 /srv/teams && cp /srv/rows.jsonl /srv/teams && chgrp -R team /srv/teams")
    honed.sh("install -m 600 -o anna /srv/rows.jsonl /srv/annas.jsonl; install -m 600 -o berta /srv/rows.jsonl /srv/b")
    said = probe(
        honed,
        job_of(honed, "anna", "whose"),
        "id -u; grep -E 'Groups|CapEff|CapBnd|NoNewPrivs' /proc/self/status; for path in /srv/annas.jsonl "
        "/srv/teams/rows.jsonl /srv/b; do head -c1 $path >/dev/null 2>&1 && echo read $path; done",
    )
    lines = said.splitlines()
    assert lines[0] == honed.run("id", "-u", "anna").strip()
    assert "honed" not in honed.run("id", "-Gn", "anna").replace("honed-submit", "")
    assert [line.split() for line in lines if line.startswith(("Cap", "NoNew"))] == [
        ["CapEff:", "0000000000000000"],
        ["CapBnd:", "0000000000000000"],
        ["NoNewPrivs:", "1"],
    ]
    assert [line for line in lines if line.startswith("read")] == [
        "read /srv/annas.jsonl",
        "read /srv/teams/rows.jsonl",
    ]


def test_roots_jobs_and_those_whose_submitter_may_not_write_run_as_honed_job(honed: Machine) -> None:
    wanted = honed.run("id", "-u", "honed-job").strip()
    assert probe(honed, job_of(honed, None, "roots"), "id -u") == f"{wanted}\n"
    before = job_of(honed, "anna", "before")
    # As where nobody could write the ACL anew: its submitter can read, the workers' group can write.
    uid = honed.run("id", "-u", "anna").strip()
    code = (
        "from pathlib import Path; from honed.system.access import Acl, set_acl; "
        f"set_acl(Path('{JOBS}/{before}'), Acl(7, 7, 0, {{{uid}: 5}}, {{}}), inherited=True)"
    )
    honed.run("/opt/honed/current/bin/python", "-c", code)
    honed.sh(f"install -d -o honed-job -g honed-job -m 2770 {JOBS}/{before}/attempts")
    said = probe(honed, before, f"id -u; touch {JOBS}/{before}/attempts/mine && echo written")
    assert said == f"{wanted}\nwritten\n"


def test_a_job_sees_its_own_and_the_outputs_that_it_names_and_nothing_else_of_honed(honed: Machine) -> None:
    first, other = job_of(honed, "anna", "first"), job_of(honed, "berta", "other")
    rows = made_by(honed, "anna", first)
    made_by(honed, "berta", other)
    second = job_of(honed, "anna", "second", datasets=[{"path": rows}])
    said = probe(
        honed,
        second,
        f"ls /var/lib/honed; ls {JOBS}; head -c1 {rows} && echo; touch {JOBS}/{first}/output/x 2>&1; "
        f"touch {JOBS}/{second}/mine && echo written; rm -f {JOBS}/{second}/plan.json 2>&1; "
        f"ls /var/spool/honed /run/honed /run/honed-view 2>&1",
    )
    lines = said.splitlines()
    assert lines[:2] == ["jobs", "staged"] or lines[:1] == ["jobs"]
    assert {line for line in lines if line.isdecimal()} == {str(first), str(second)}
    assert "{" in lines
    assert f"touch: cannot touch '{JOBS}/{first}/output/x': Read-only file system" in said
    assert "written" in lines
    assert f"rm: cannot remove '{JOBS}/{second}/plan.json': Operation not permitted" in said
    for place in ("/var/spool/honed", "/run/honed", "/run/honed-view"):
        assert f"ls: cannot open directory '{place}': Permission denied" in said
    # When it has ended nothing of its view is left.
    wait_for(lambda: not honed.exists("/run/honed-view"), what="no view")
    wait_for(lambda: honed.sh("ls /run/userdb") == "", what="no user")
    wait_for(lambda: "honed-view" not in honed.sh("cat /proc/mounts"), what="no mount")


@pytest.mark.parametrize("swap", ["named in the plan", "directory renamed", "replace it with a link"])
def test_nothing_is_shown_that_the_submitter_cannot_open(honed: Machine, swap: str) -> None:
    """The view is opened with the submitter's rights, so deceiving honed itself does not help."""
    theirs = job_of(honed, "berta", f"theirs {swap}")
    made_by(honed, "berta", theirs)
    own = job_of(honed, "anna", f"own {swap}")
    rows = made_by(honed, "anna", own)
    thief = job_of(honed, "anna", f"thief {swap}", datasets=[{"path": rows}])
    match swap:
        case "named in the plan":
            plan = honed.read_json(f"{JOBS}/{thief}/plan.json")
            plan["may_read"]["inputs"].append(f"{JOBS}/{theirs}")
            honed.write(f"{JOBS}/{thief}/plan.json", json.dumps(plan))
        case "directory renamed":
            honed.sh(f"mv {JOBS}/{own} {JOBS}/{own}.away; mv {JOBS}/{theirs} {JOBS}/{own}")
        case _:
            honed.sh(f"mv {JOBS}/{own} {JOBS}/{own}.away; ln -s {theirs} {JOBS}/{own}")
    assert probe(honed, thief, f"cat {JOBS}/*/output/rows.jsonl") == ""
    told = "\n".join(honed.messages("-u", f"honed-view@{thief}"))
    assert f"job {thief} could not be set up: {JOBS}/" in told
    assert "for the user anna" in told or "Not a directory" in told
    wait_for(lambda: not honed.exists("/run/honed-view"), what="no view")
    honed.sh(
        f"[ ! -e {JOBS}/{own}.away ] || {{ rm {JOBS}/{own} 2>/dev/null || mv {JOBS}/{own} {JOBS}/{theirs}; "
        f"mv {JOBS}/{own}.away {JOBS}/{own}; }}"
    )


def test_what_one_job_leaves_no_other_finds(honed: Machine) -> None:
    """No writable place but its own directory keeps a job's files; and a job finds nothing that people left there."""
    honed.sh("install -d -m 700 -o anna /run/user/4711; echo planted >/dev/shm/planted; chmod 666 /dev/shm/planted")
    honed.sh(
        "for place in /tmp /var/tmp /home/anna /run/user/4711 /etc/credstore; do mkdir -p $place; "
        "echo planted >$place/planted; chown anna $place/planted; done"
    )
    plant = "for place in {} $HOME; do touch $place/from-$1 2>/dev/null && echo wrote $place; done; ls -A {} 2>&1"
    script = plant.format(" ".join(PLACES), " ".join(PLACES))
    first = probe(honed, job_of(honed, "anna", "plants"), script.replace("$1", "anna"))
    again = probe(honed, job_of(honed, "anna", "looks"), script.replace("$1", "anna2"))
    berta = probe(honed, job_of(honed, "berta", "looks-too"), script.replace("$1", "berta"))
    for said in (first, again, berta):
        assert {line for line in said.splitlines() if line.startswith("wrote")} == {
            "wrote /tmp",
            "wrote /var/tmp",
            "wrote /dev/shm",
        }
        assert "planted" not in said
    assert "from-anna\n" not in again
    assert "from-anna" not in berta
    assert honed.sh("cat /dev/shm/planted") == "planted\n"  # and its end removes nothing of its user's


#: Adds rows to the users' caches, as honed does when a worker reports them: `KEY JOB…`.
TAKE_ROWS = """
import sys
from pathlib import Path
from honed.job.row_cache import RowCache
from honed.job.spool import Spool
from honed.system.layout import Layout
layout = Layout(Path("/"))
spool, cache = Spool(layout, lock=False), RowCache(layout, lambda: 2**30)
for number in sys.argv[2:]:
    job = spool.job(int(number))
    print(cache.environment(job))
    cache.take(job, [sys.argv[1]])
"""
KEY = "0123456789abcdef" * 2
ROWS = "/var/lib/honed/rows"


def test_a_users_encoded_rows_are_in_the_view_of_their_jobs_alone(honed: Machine) -> None:
    makers = {user: job_of(honed, user, f"encodes-{user}") for user in ("anna", "berta", None)}
    for user, number in makers.items():
        honed.run(
            "sh",
            "-ec",
            f"umask 007; mkdir -p {JOBS}/{number}/rows/{KEY}; cd {JOBS}/{number}/rows/{KEY}; "
            f"for each in tokens.arrow rows.arrow MANIFEST.json; do echo of-{user} >$each; done",
            user=user or "honed-job",
        )
    numbers = [str(number) for number in makers.values()]
    honed.run("/opt/honed/current/bin/python", "-c", TAKE_ROWS, KEY, *numbers, user="honed")
    uids = {user: honed.run("id", "-u", user or "root").strip() for user in makers}
    assert sorted(honed.sh(f"cd {ROWS}; ls -d */{KEY}").split()) == sorted(f"{uid}/{KEY}" for uid in uids.values())
    script = (
        f"ls {ROWS}; cat {ROWS}/*/{KEY}/tokens.arrow; ls /var/lib/honed; "
        f"for each in {ROWS}/*; do touch $each/mine $each/{KEY}/tokens.arrow && echo wrote; done 2>&1"
    )
    for user, uid in uids.items():
        said = probe(honed, job_of(honed, user, f"reads-{user}"), script)
        assert said.splitlines()[:4] == [uid, f"of-{user}", "jobs", "rows"], said
        assert said.count("Read-only file system") == 2
        assert "wrote" not in said
    # Outside of a unit, too, other people cannot enter it, and its owner cannot change it.
    place = f"{ROWS}/{uids['anna']}"
    assert honed.run("cat", f"{place}/{KEY}/tokens.arrow", user="anna") == "of-anna\n"
    for command in (f"cat {place}/{KEY}/tokens.arrow", f"ls {place}", f"ls {ROWS}"):
        assert honed.try_run("sh", "-c", command, user="berta").returncode != 0, command
    for command in (f"touch {place}/mine", f"rm -r {place}/{KEY}", f"mv {place}/{KEY} {place}/other"):
        assert honed.try_run("sh", "-c", command, user="anna").returncode != 0, command
    # Neither does a job with code of its own, nor one whose plan is not honed's.
    for change in ("code", "owner"):
        number = job_of(honed, "anna", f"with-{change}")
        plan = honed.read_json(f"{JOBS}/{number}/plan.json")
        plan["spec"]["trust_remote_code"] = change == "code"
        honed.write(f"{JOBS}/{number}/plan.json", json.dumps(plan))
        honed.sh(f"chown {'honed' if change == 'code' else 'anna'} {JOBS}/{number}/plan.json")
        said = probe(honed, number, f"ls /var/lib/honed; ls {ROWS} 2>&1")
        assert said.splitlines()[0] == "jobs"
        assert "No such file" in said
    # A cache that has lost its ACL keeps nobody's job from starting.
    honed.sh(f"setfacl -b {place} || chmod 700 {place}")
    assert "No such file" in probe(honed, job_of(honed, "anna", "without"), f"ls /var/lib/honed; ls {ROWS} 2>&1")
    wait_for(lambda: "honed-view" not in honed.sh("cat /proc/mounts"), what="no view")  # it ends after its job's unit
    honed.sh(f"rm -r {ROWS}/*")


#: The readable ones of what find walks through, but for what no other machine has: the checkout and its environment.
READABLE = f"\\( -path {CHECKOUT} -o -path {ENVIRONMENT} \\) -prune -o -readable -print"
#: Everything that a job can write and read, as its own code would find it; and whose processes it sees.
INVENTORY = f"""
echo "= writable"
{FIND_WRITABLE}
echo "= readable"
find /var /run /srv /home /tmp /dev/shm /etc/honed /etc/credstore {READABLE} 2>/dev/null
echo "= processes"
for each in /proc/[0-9]*; do
    echo $(stat -c %u $each) $(tr '\\0' ' ' <$each/cmdline) $(tr '\\0' ' ' <$each/environ)
done 2>/dev/null
"""
#: Those of these paths that are private or a job's own; the submitter can read the rest on this machine anyway.
CLOSED = (
    "/var/lib/honed",
    "/var/spool/honed",
    "/run/honed",
    "/run/honed-view",
    "/run/user",
    "/etc/honed",
    "/etc/credstore",
    "/home",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/root",
)


def test_all_that_a_worker_can_write_and_read(honed: Machine) -> None:
    """Each place contains world-writable files of another job, of another user and of a tracker."""
    other = job_of(honed, "berta", "of-another")
    job_id = job_of(honed, "anna", "inventory")
    honed.sh(
        "for place in /var/lib/honed /var/lib/honed/staged /var/spool/honed /run/honed /etc/honed /etc/credstore "
        f"/home/anna /home/berta /tmp /var/tmp /dev/shm /root /run/user/4711 {JOBS} {JOBS}/{other}; do "
        "mkdir -p $place; for name in job user tracker; do echo secret >$place/planted-$name; "
        "chmod 666 $place/planted-$name; done; done; install -m 600 -o berta /srv/rows.jsonl /srv/planted-closed"
    )
    others = [
        honed.popen("env", "PLANTED=planted-environment", "sleep", "600", user=user) for user in ("anna", "berta")
    ]
    try:
        said = probe(honed, job_id, INVENTORY)
        outside = set(
            honed.try_run("sh", "-c", f"find /var /run /srv {READABLE} 2>/dev/null", user="anna").stdout.split("\n")
        )
    finally:
        for each in others:
            each.kill()
        honed.sh("find / -xdev -name 'planted-*' -delete; rm -f /dev/shm/planted-* /tmp/planted-* /run/honed/planted-*")
    _, writable, readable, processes = said.split("= ")
    own = f"{JOBS}/{job_id}"
    places = {path for path in writable.splitlines()[1:] if not path.startswith(f"{own}/")}
    assert places == {own, "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue"}
    seen = readable.splitlines()[1:]
    of_closed = {path for path in seen if f"{path}/".startswith(tuple(f"{place}/" for place in CLOSED))}
    assert {path for path in of_closed if not path.startswith(own)} == {
        "/var/lib/honed",
        JOBS,
        "/tmp",
        "/var/tmp",
        "/dev/shm",
    }
    assert {Path(path).name for path in of_closed if path.startswith(f"{own}/")} >= {"plan.json"}
    of_users = {path for path in seen if path.startswith("/run/userdb/honed-")}  # who runs jobs, as `ps` has it
    assert set(seen) - of_closed - of_users <= outside
    assert "planted" not in said
    assert {line.split(" ")[0] for line in processes.splitlines()[1:] if line[:1].isdigit()} == {
        honed.run("id", "-u", "anna").strip()
    }
    assert "sleep 600" not in processes  # another program of hers: it is in no namespace that the job may look into


def test_a_machine_without_the_user_database_says_what_is_missing(honed: Machine) -> None:
    job_id = job_of(honed, "anna", "no-database")
    honed.sh("cp /etc/nsswitch.conf /srv/nsswitch.conf; sed -i 's/ systemd//' /etc/nsswitch.conf")
    try:
        assert probe(honed, job_id, "id -u") == ""
        told = "\n".join(honed.messages("-u", f"honed-view@{job_id}"))
        assert "install libnss-systemd" in told
        found = honed.doctor()
        assert (found["user database"]["status"], found["user database"]["hint"][:11]) == ("error", "apt install")
        done = honed.try_run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
        assert done.returncode == 1
        assert "/etc/nsswitch.conf has no `systemd` in: passwd, group" in done.stderr
    finally:
        honed.sh("cp /srv/nsswitch.conf /etc/nsswitch.conf")
    assert honed.doctor()["user database"]["status"] == "ok"


def test_a_persons_chain_trains_and_merges_and_what_it_makes_is_theirs(honed: Machine, model: str) -> None:
    """The real worker makes an adapter, one that continues from it in a directory elsewhere, and the merged model."""
    honed.sh("rm -r /etc/systemd/system/honed-job@.service.d; systemctl daemon-reload")
    honed.sh("install -d -m 755 -o anna /srv/annas")
    honed.write("/etc/honed/honed.toml.d/60-paths.toml", '[policy]\nallowed_paths = ["/srv"]\n')
    honed.run("honectl", "sandbox")
    for row in json.loads(honed.run("honectl", "list", "--json", "--all")):
        if row["state"] == "queued":  # honed has followed to its end what it saw running
            honed.run("honectl", "cancel", row["id"])
    honed.run("honectl", "resume")
    spec = {
        "base_model": model,
        "backend": "transformers",
        "datasets": [{"path": "/srv/data/facts.jsonl"}],
        "training": {"max_steps": 2, "per_device_train_batch_size": 2},
        "predictions": {"sample_frequency": "off"},
    }
    drop(honed, "anna", {**spec, "name": "learn", "lora": {"r": 4}})
    drop(honed, "anna", {**spec, "name": "go-on", "adapter": "job:learn", "output_dir": "/srv/annas/more"})
    drop(honed, "anna", {"name": "merged", "kind": "merge", "base_model": model, "adapter": "job:learn"})

    def over() -> dict[str, dict[str, Any]] | None:
        chain = {name: honed.jobs().get(name, {}) for name in ("learn", "go-on", "merged")}
        ended = {"succeeded", "failed", "cancelled"}
        return chain if all(row.get("state") in ended for row in chain.values()) else None

    chain = wait_for(over, what="the chain's end", deadline_sec=400)
    assert chain is not None
    # The second found the rows that the first had encoded.
    uid = honed.run("id", "-u", "anna").strip()
    assert len(honed.sh(f"ls {ROWS}/{uid}").split()) == 1
    events = honed.read(f"{JOBS}/{chain['go-on']['id']}/attempts/1/events.jsonl").splitlines()
    assert [len(each["shared"]) for each in map(json.loads, events) if each["event"] == "rows"] == [1]
    told = {name: json.loads(honed.run("honectl", "show", "--json", name, user="anna")) for name in chain}
    assert {name: row["state"] for name, row in chain.items()} == dict.fromkeys(chain, "succeeded"), told
    made = honed.sh(
        f"find /srv/annas/more {JOBS}/{chain['merged']['id']}/output -type f -printf '%u %f\\n'", user="anna"
    )
    assert {line.split()[0] for line in made.splitlines()} == {"anna"}
    assert {"adapter_model.safetensors", "model.safetensors"} <= {line.split()[1] for line in made.splitlines()}
    # honed can read what its page shows, and can remove the job's files.
    honed.run("honectl", "prune", "merged", user="anna")
    wait_for(lambda: not honed.exists(f"{JOBS}/{chain['merged']['id']}"), what="pruned")
