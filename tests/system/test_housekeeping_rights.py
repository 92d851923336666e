"""Housekeeping in an installed honed: the daemon removes files made by its workers' user; people can prune their own
jobs and nobody else's."""

from __future__ import annotations

import json

import pytest
from machine import Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

JOBS = "/var/lib/honed/jobs"
SPEC = {
    "base_model": "/srv/models/tiny",
    "backend": "transformers",
    "lora": {"r": 4, "lora_alpha": 8},
    "datasets": [{"path": "/srv/data/facts.jsonl"}],
    "training": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 128, "save_steps": 1},
    "predictions": {"sample_frequency": "off"},
}


#: A chat server in the machine, which keeps its messages.
LISTENER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        with open("/srv/told.jsonl", "ab") as file:
            file.write(self.rfile.read(int(self.headers["Content-Length"])) + b"\\n")
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", 8099), Handler).serve_forever()
"""


def test_what_a_worker_made_is_removed_by_the_daemon_for_its_owner_alone(machine: Machine, model: str) -> None:
    machine.install()
    machine.run("ip", "link", "set", "lo", "up")
    machine.write(
        "/etc/honed/honed.toml.d/50-notify.toml",
        '[notify]\nadmin_webhook = "http://127.0.0.1:8099/x"\nadmin_states = ["succeeded"]\n'
        "retry_delay_sec = 1\nmax_retry_delay_sec = 2\n",
    )
    machine.add_user("anna", "honed-submit")
    machine.add_user("berta", "honed-submit")
    machine.run("systemctl", "enable", "--now", "honed")
    for name in ("facts", "more"):
        machine.write(f"/var/spool/honed/incoming/{name}.json", json.dumps({"name": name, **SPEC}), user="anna")
    wait_for(
        lambda: [job["state"] for job in machine.jobs().values()] == ["succeeded", "succeeded"],
        what="both jobs",
        deadline_sec=400,
    )
    # Their last pages: what is counted below is all there.
    for number, name in ((1, "facts"), (2, "more")):
        page = ("cat", f"{JOBS}/{number}/report.html")
        wait_for(lambda page=page, name=name: f"{name}: succeeded" in machine.try_run(*page).stdout, what=page[1])  # type: ignore[misc]
    owners = set(machine.run("find", f"{JOBS}/1", "-printf", "%u\\n").split())
    assert owners == {"honed", "anna"}
    # Files left by a library's tempfile are private; the end of the unit opens them to honed.
    machine.sh(
        f"mkdir -m 0700 {JOBS}/1/output/tmpx; touch {JOBS}/1/output/tmpx/file; chown -R anna {JOBS}/1/output/tmpx"
    )
    end = machine.sh("readlink -f /opt/honed/current/bin/honed-job-end").strip()
    machine.try_run(end, "1", user="anna")

    refused = machine.try_run("honectl", "prune", "1", user="berta")
    assert refused.returncode == 77, refused.stderr
    assert machine.try_run("honectl", "pin", "1", user="berta").returncode == 77
    checkpoints = json.loads(machine.run("honectl", "prune", "--json", "--checkpoints", "1", user="anna"))
    assert checkpoints["removed"][0]["problem"] is None
    assert checkpoints["removed"][0]["num_bytes"] > 100_000
    assert "checkpoints" not in machine.run("ls", "-A", f"{JOBS}/1")
    before = int(machine.run("du", "-sb", f"{JOBS}/1").split()[0])
    done = json.loads(machine.run("honectl", "prune", "--json", "1", user="anna"))
    assert done["removed"][0]["problem"] is None
    assert 0.5 * before < done["removed"][0]["num_bytes"] <= before
    assert not machine.exists(f"{JOBS}/1")

    # A directory that even the group cannot enter is reported, with a remedy for root; the job still leaves the list.
    closed = f"{JOBS}/2/output/closed"
    machine.sh(f"mkdir -m 0700 {closed}; touch {closed}/file; chown -R anna {closed}")
    short = machine.try_run("honectl", "prune", "2", user="anna")
    assert short.returncode == 1
    assert "Permission denied" in short.stdout
    machine.wait_message("honectl doctor says what is left", "--unit=honed")
    assert json.loads(machine.run("honectl", "list", "--json")) == []
    assert not machine.exists(f"{JOBS}/2")
    left = f"{JOBS}/.2.left"
    assert f"{left}: " in machine.try_run("honectl", "doctor", "--json").stdout
    machine.run("rm", "-r", f"{left}/output/closed")
    machine.run("systemctl", "restart", "honed")
    wait_for(lambda: not machine.exists(left), what="the rest of it")


def test_ends_are_told_from_the_sandbox_of_honed_send_once_somebody_listens(machine: Machine) -> None:
    machine.wait_message("was not delivered; retrying", "--unit=honed-send")
    machine.write("/srv/listener.py", LISTENER)
    machine.run("systemd-run", "--unit=listener", "/usr/bin/python3", "/srv/listener.py")
    wait_for(lambda: machine.try_run("cat", "/srv/told.jsonl").stdout.count("\n") == 2, what="both ends")
    told = [json.loads(line) for line in machine.read("/srv/told.jsonl").splitlines()]
    assert {(each["name"], each["state"]) for each in told} == {("facts", "succeeded"), ("more", "succeeded")}
    wait_for(
        lambda: not machine.sh("ls /var/lib/honed/outbox/notices | grep -c json || true").strip("0\n"), what="none"
    )
