"""The shared instance on a Slurm cluster: each job runs as its submitter, and as nobody else.

The cluster is real: munge, a controller and two virtual nodes in the booted machine. The worker is the fake one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import CHECKOUT, ENVIRONMENT, Machine

from honed.job.job import Attempt, Job, State
from honed.run.slurm_batch import Handed
from honed.system import access
from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

PYTHON = "/opt/honed/current/bin/python"
SLURM_CONF = "/srv/slurm/etc/slurm.conf"
HELPER_DROPIN = f"""\
[Service]
Environment=SLURM_CONF={SLURM_CONF} PYTHONDONTWRITEBYTECODE=1
ExecStart=
ExecStart={PYTHON} {CHECKOUT}/tests/system/slurmstart.py
"""
CONFIG = """\
[jobs]
runner = "slurm"
retry_delay_sec = 0.0
poll_interval_sec = 0.1
[spool]
settle_sec = 0.2
[slurm.profiles.small]
options = ["--mem=321M"]
"""
MISSING = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
JOBS, RUNNING = "/var/lib/honed/jobs", "/var/spool/honed/running"
ASK = (
    "import sys; from pathlib import Path; from honed.run.slurm_client import Client; "
    "print(Client().ask(sys.argv[1:], {})[1])"
)


@pytest.fixture(scope="module")
def honed(machine: Machine) -> Machine:
    """A machine with a cluster, two people and a shared honed."""
    if MISSING:
        pytest.skip(f"needs the packages slurm-wlm and munge: no {', '.join(MISSING)}")
    # An address beside the loopback's own, or getaddrinfo finds no IPv4 on the machine; slurmd takes no hybrid cgroups.
    machine.sh(
        "ip link set lo up; ip addr add 10.9.9.1/32 dev lo; echo 127.0.0.1 $(hostname) >>/etc/hosts; "
        "mkdir -p /srv/slurm/etc; "
        "grep -q ^[1-9] /proc/self/cgroup && echo CgroupPlugin=cgroup/v1 >/srv/slurm/etc/cgroup.conf || true"
    )
    machine.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
    machine.run("groupadd", "team")
    machine.add_user("anna", "honed-submit", "team")
    machine.add_user("berta", "honed-submit")
    machine.run(
        *("systemd-run", "--unit=cluster", "--property=Type=oneshot", "--property=RemainAfterExit=yes"),
        *("--setenv=SLURM_TEST_DIR=/srv/slurm", f"{CHECKOUT}/tests/cluster/up"),
    )
    machine.sh(
        "umask 077; echo a >/srv/annas; chown anna /srv/annas; echo b >/srv/bertas; chown berta /srv/bertas; "
        "install -d -g team -m 750 /srv/teams; install -g team -m 640 /srv/annas /srv/teams/rows"
    )
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
    machine.write("/etc/systemd/system/honed-slurm@.service.d/50-test.conf", HELPER_DROPIN)
    machine.write("/etc/honed/honed.toml.d/50-test.toml", CONFIG)
    machine.run("systemctl", "daemon-reload")
    return machine


@pytest.fixture
def running(honed: Machine) -> Machine:
    honed.run("systemctl", "enable", "--now", "honed-slurm.socket")
    honed.run("systemctl", "start", "honed")
    return honed


def drop(honed: Machine, user: str | None, name: str, **keys: Any) -> None:
    spec = plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), name=name, **keys)
    script = 'cd /var/spool/honed/incoming; cat >".$1"; mv ".$1" "$1.json"'
    honed.run("sh", "-ec", script, "sh", name, user=user, stdin=json.dumps(spec))


def wait_state(honed: Machine, name: str, state: str) -> int:
    def reached() -> int:
        row = honed.jobs().get(name, {"state": "", "id": 0})
        is_over = row["state"] in {"failed", "succeeded", "cancelled"} - {state}
        assert not is_over, honed.sh(f"tail -n 50 {JOBS}/{row['id']}/attempts/*/worker.log")
        return int(row["id"]) if row["state"] == state else 0

    return wait_for(reached, what=f"{name} {state}")


def begun(honed: Machine, name: str) -> int:
    """Wait until a job's worker has begun. Returns the job's number."""
    job_id = wait_state(honed, name, "running")
    wait_for(lambda: honed.exists(f"{JOBS}/{job_id}/said.json"), what=f"{name} begins")
    return job_id


def queue(honed: Machine, *, states: str = "all") -> set[tuple[str, str]]:
    """Return user and job name of the jobs that Slurm has."""
    lines = honed.run("squeue", "-h", "-t", states, "-o", "%u %j", environment={"SLURM_CONF": SLURM_CONF}).splitlines()
    return {(user, name.split("-", 2)[-1]) for user, name in (line.split() for line in lines)}


def ask(honed: Machine, *words: str, user: str | None = "honed") -> str:
    """Ask the helper. Returns the fault."""
    return honed.run(PYTHON, "-c", ASK, *words, user=user).strip()


def reason(honed: Machine, name: str) -> str:
    """Wait for the reason of a rejection."""
    path = f"/var/spool/honed/rejected/{name}.json.reason"
    wait_for(lambda: honed.exists(path), what=f"{name} rejected")
    return honed.read(path)


def test_without_its_helper_a_shared_instance_does_not_use_a_cluster(honed: Machine) -> None:
    assert honed.try_run("systemctl", "start", "honed").returncode != 0
    told = " ".join(honed.messages("--unit=honed"))
    assert "this instance is shared" in told
    assert "systemctl enable --now honed-slurm.socket" in told


def test_each_job_runs_as_its_submitter(running: Machine) -> None:
    said = {}
    for user, name in (
        ("anna", "until-3"),
        ("berta", "until-4"),
    ):  # one after the other: the cluster takes one job without a GPU at a time
        drop(running, user, name, resources={"gpus": 0, "profile": "small"})
        job_id = begun(running, name)
        assert running.run("squeue", "-h", "-o", "%m", environment={"SLURM_CONF": SLURM_CONF}) == "321M\n"
        assert queue(running, states="running") == {(user, f"{job_id}-1-1")}
        said[job_id] = running.read_json(f"{JOBS}/{job_id}/said.json")
        running.run("touch", f"{JOBS}/{job_id}/go", user=user)
        wait_state(running, name, "succeeded")
    annas, bertas = said
    assert said[annas]["uid"] == int(running.run("id", "-u", "anna"))
    assert said[bertas]["uid"] == int(running.run("id", "-u", "berta"))
    assert said[annas]["readable"] == ["/srv/annas", "/srv/teams/rows"]
    assert said[bertas]["readable"] == ["/srv/bertas"]
    assert int(running.run("sh", "-c", "getent group honed-job | cut -d: -f3")) not in said[annas]["gids"]
    assert "INVOCATION_ID" not in said[annas]["environment"]
    assert running.try_run("ls", f"{JOBS}/{bertas}", user="anna").returncode != 0
    assert "honed" not in {user for user, _ in queue(running)}


def test_a_submitter_holds_their_job_and_another_cannot(running: Machine) -> None:
    drop(running, "anna", "slow-4000")
    job_id = begun(running, "slow-4000")
    assert running.try_run("honectl", "cancel", str(job_id), user="berta").returncode != 0
    running.run("honectl", "hold", str(job_id), user="anna")
    wait_state(running, "slow-4000", "held")
    wait_for(lambda: not queue(running, states="pending,running"), what="Slurm has no job")
    running.run("honectl", "cancel", str(job_id), user="anna")


def test_a_restarted_honed_takes_a_job_over_and_believes_no_other_of_its_name(running: Machine) -> None:
    drop(running, "anna", "until-5")
    job_id = begun(running, "until-5")
    instance = running.read("/var/lib/honed/slurm-instance").strip()
    forged = ["sbatch", "--hold", f"--job-name=honed-{instance}-{job_id}-1-1", "--output=/dev/null", "--wrap=true"]
    running.run(*forged, user="berta", environment={"SLURM_CONF": SLURM_CONF})
    listed = "import sys; from honed.run.slurm_client import Client; print(Client().ask(['list'], {})[0])"
    lines = running.run(PYTHON, "-c", listed, user="honed").splitlines()
    assert [line.split("|")[3] for line in lines if line.endswith(f"-{job_id}-1-1")] == [
        running.run("id", "-u", "anna").strip()
    ]
    running.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "honed")
    running.run("touch", f"{JOBS}/{job_id}/go", user="anna")
    wait_state(running, "until-5", "succeeded")
    # Nor one of its own submitter's: it would count as a worker that lives, and no other job could start.
    running.run("rm", f"{JOBS}/{job_id}/attempts/1/exit.json", user="anna")
    for start in ("1-1", "99-1"):
        forged[2] = f"--job-name=honed-{instance}-{job_id}-{start}"
        running.run(*forged, user="anna", environment={"SLURM_CONF": SLURM_CONF})
    running.run("systemctl", "restart", "honed")
    drop(running, "anna", "succeed.late")
    wait_state(running, "succeed.late", "succeeded")
    assert running.jobs()["until-5"]["state"] == "succeeded"
    for user in ("anna", "berta"):
        running.run("scancel", f"--user={user}", environment={"SLURM_CONF": SLURM_CONF})


def test_a_submitter_who_withdraws_a_waiting_job_holds_it(running: Machine) -> None:
    """honed records the end itself, in the directory that the submitter has made."""
    environment = {"SLURM_CONF": SLURM_CONF}
    running.run("scontrol", "update", "nodename=node1,node2", "state=drain", "reason=test", environment=environment)
    try:
        drop(running, "anna", "succeed")
        job_id = wait_state(running, "succeed", "running")
        wait_for(lambda: queue(running, states="pending") == {("anna", f"{job_id}-1-1")}, what="it waits")
        running.run("scancel", "--state=PENDING", "--user=anna", user="anna", environment=environment)
        wait_state(running, "succeed", "held")
    finally:
        running.run("scontrol", "update", "nodename=node1,node2", "state=resume", environment=environment)
    assert running.read_json(f"{JOBS}/{job_id}/attempts/1/exit.json")["was_asked"]
    running.run("honectl", "release", str(job_id), user="anna")
    wait_state(running, "succeed", "succeeded")


def test_a_link_in_a_jobs_directory_leads_only_where_its_submitter_may_go(running: Machine) -> None:
    drop(running, "berta", "succeed-4")
    bertas = wait_state(running, "succeed-4", "succeeded")
    before = running.sh(f"find {JOBS}/{bertas}/attempts -ls")
    running.run("honectl", "pause")
    drop(running, "anna", "succeed-3")
    job_id = wait_state(running, "succeed-3", "queued")
    running.run("ln", "-s", f"{JOBS}/{bertas}/attempts", f"{JOBS}/{job_id}/attempts", user="anna")
    running.run("honectl", "resume")
    shown = wait_for(
        lambda: "Permission denied" in (found := running.run("honectl", "show", "--json", str(job_id))) and found,
        what="the reason",
    )
    assert "mkdir" in json.loads(str(shown))["slurm"]["reason"]
    assert running.sh(f"find {JOBS}/{bertas}/attempts -ls") == before
    running.run("rm", f"{JOBS}/{job_id}/attempts", user="anna")
    wait_state(running, "succeed-3", "succeeded")


def test_only_honed_is_heard(running: Machine) -> None:
    assert "Permission denied" in ask(running, "list", user="anna")
    assert "is not honed's" in ask(running, "list", user=None)
    running.run("chmod", "666", "/run/honed-slurm.sock")
    assert "is not honed's" in ask(running, "list", user="anna")
    running.run("chmod", "600", "/run/honed-slurm.sock")
    assert ask(running, "list") == ""
    running.wait_message("refused: user 0 is not honed's", "--identifier=honed-slurm")


def test_root_and_those_who_cannot_have_jobs_there_are_told_so(running: Machine) -> None:
    drop(running, None, "succeed-roots")
    assert "those of root may not" in reason(running, "succeed-roots")
    running.run("systemctl", "stop", "honed-slurm.socket")
    drop(running, "anna", "succeed-late")
    assert "enable the helper" in reason(running, "succeed-late")


def test_doctor_tells_whether_the_helper_is_there_and_tries_a_node_as_a_person(running: Machine) -> None:
    code = (
        "from pathlib import Path; from honed.run import choice; from honed.spec import config; "
        "from honed.system.layout import Layout; root = Layout(Path('/')); "
        "print(*choice.findings(root, config.load(root)), sep='\\n')"
    )
    environment = {"SLURM_CONF": SLURM_CONF}
    told = running.run(PYTHON, "-c", code, user="anna", environment=environment)
    assert "the same path, renames, links, appends, locks and time on node1, node2" in told
    assert "nodes are not tried" in running.run(PYTHON, "-c", code, environment=environment)
    running.run("systemctl", "stop", "honed-slurm.socket")
    told = running.run(PYTHON, "-c", code, environment=environment)
    assert told.startswith("('Slurm', 'error', \"this instance is shared")


class Forged:
    """A running job 900 of anna's, by files alone: what somebody who has become honed's user could write, and more."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.uids = {name: int(machine.run("id", "-u", name)) for name in ("anna", "berta", "honed", "honed-job")}
        self.dir, self.entry = machine.host_path(f"{JOBS}/900"), machine.host_path(f"{RUNNING}/900.json")
        self.start = self.dir / "start.json"
        self.instance = machine.read("/var/lib/honed/slurm-instance").strip()
        machine.sh(f"rm -rf {JOBS}/900 {RUNNING}/900.json; mkdir -p {JOBS}/900 {RUNNING}")
        self.write(self.uids["anna"])

    def write(self, uid: int, *, acl_uid: int | None = None, **changes: Any) -> None:
        access.open_job_dir(self.dir, uid if acl_uid is None else acl_uid, is_shared=False)
        access.give_job_dir(self.dir)
        attempt = Attempt(1, "transformers", 1.0, device="cpu")
        job = Job(900, "forged", 1.0, "forged.json", uid, "/tmp", attempts=(attempt,), state=State.RUNNING)
        self.entry.write_bytes(job.to_json())
        handed = Handed(1, 1, f"honed-{self.instance}-900-1-1", "cpu", backend="transformers", environment={})
        self.start.write_bytes(json.dumps({**handed.__dict__, **changes}).encode())
        for path in (self.dir, self.entry, self.start):
            os.chown(path, self.uids["honed"], -1)

    def link(self, path: Path) -> None:
        """Put a link in a file's place."""
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real").name)

    def ask(self, verb: str) -> str:
        return ask(self.machine, verb, "900-1-1")


#: Changes of a job's files, and why its start is refused then.
FORGERIES: list[tuple[str, Callable[[Forged], object], str]] = [
    ("no entry", lambda job: job.entry.unlink(), "No such file"),
    ("a link as entry", lambda job: job.link(job.entry), "Too many levels of symbolic links"),
    ("a link as start", lambda job: job.link(job.start), "Too many levels of symbolic links"),
    ("a link as directory", lambda job: job.link(job.dir), "Not a directory"),
    ("a second name of the entry", lambda job: os.link(job.entry, f"{job.entry}.2"), "not a file of honed's own"),
    ("anna's entry", lambda job: os.chown(job.entry, job.uids["anna"], -1), "not a file of honed's own"),
    ("anna's start", lambda job: os.chown(job.start, job.uids["anna"], -1), "not a file of honed's own"),
    ("anna's directory", lambda job: os.chown(job.dir, job.uids["anna"], -1), "not honed's"),
    ("another submitter", lambda job: job.write(job.uids["berta"], acl_uid=job.uids["anna"]), "the same submitter"),
    ("root", lambda job: job.write(0), "those of root may not"),
    ("a system account", lambda job: job.write(job.uids["honed-job"]), "those of honed-job may not"),
    ("an account for the directory alone", lambda job: job.write(job.uids["anna"], acl_uid=0), "the same submitter"),
    ("another number", lambda job: job.entry.write_bytes(job.entry.read_bytes().replace(b"900", b"7")), "submitter"),
    ("no entry in it", lambda job: job.entry.write_bytes(b"[" * 100_000), "nested too deeply"),
    ("nobody known", lambda job: job.write(4999), "not known to this machine"),
    ("another job's name", lambda job: job.write(job.uids["anna"], name="honed-0123abcd-7-1-1"), "not this start's"),
    ("an option as name", lambda job: job.write(job.uids["anna"], name="x --uid=0"), "not this start's"),
    (
        "a variable",
        lambda job: job.write(job.uids["anna"], environment={"LD_PRELOAD": "/srv/x.so"}),
        "it sets LD_PRELOAD",
    ),
    ("no environment", lambda job: job.write(job.uids["anna"], environment=7), "start.json"),
]


@pytest.fixture
def forged(honed: Machine) -> Iterator[Forged]:
    """A job that the helper would serve, of a honed that does not run."""
    honed.run("systemctl", "start", "honed-slurm.socket")
    honed.run("systemctl", "stop", "honed")
    yield Forged(honed)
    honed.sh(f"rm -rf {JOBS}/900* {RUNNING}/900*")


@pytest.mark.parametrize(("forge", "why"), [each[1:] for each in FORGERIES], ids=[each[0] for each in FORGERIES])
def test_a_forged_job_is_refused(forged: Forged, forge: Callable[[Forged], object], why: str) -> None:
    forge(forged)
    told = forged.ask("submit")
    assert told.startswith("refused: "), told
    assert why in told


def test_a_strange_request_is_refused(forged: Forged) -> None:
    assert forged.ask("cancel") == ""  # as it is, it is served
    for request in (
        *("submit 0-1-1", "submit ../900-1-1", "submit 901-1-1", "submit 900-1-2", "submit 900", "submit"),
        *("submit 900-1-1 none", "submit 900-1-1 a b", "submit 900-1-1 --uid=0", "shell 900-1-1", "list 900-1-1"),
        *("cancel 900-1-1 --full", f"cancel {'9' * 300}"),
    ):
        assert ask(forged.machine, *request.split()).startswith("refused: "), request
    assert not [name for _, name in queue(forged.machine) if name.startswith("900-")]
    forged.start.unlink()
    assert forged.ask("cancel") == ""  # its submitter cannot keep it from ending


def test_options_that_others_than_root_can_change_are_refused(forged: Forged) -> None:
    dropins_dir = "/etc/honed/honed.toml.d"
    forged.machine.run("chown", "honed", f"{dropins_dir}/50-test.toml")
    assert "the user honed can change it" in forged.ask("submit")
    forged.machine.run("chown", "root", f"{dropins_dir}/50-test.toml")
    forged.machine.run("chmod", "777", dropins_dir)
    assert "everybody" in forged.ask("submit")
    forged.machine.run("chmod", "755", dropins_dir)
