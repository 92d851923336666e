"""honed-send.service: the one unit with network while jobs run, and with access to nothing else."""

from __future__ import annotations

import json

import pytest
import tinyjob
from machine import Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

TOKEN = "s3cret-t0ken"
#: An endpoint in the machine, which stores its requests in files.
ENDPOINT = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("/srv/received.jsonl", "a") as file:
            print(json.dumps({"authorization": self.headers["Authorization"], **body}), file=file)
        self.send_response(204)
        self.end_headers()
HTTPServer(("127.0.0.1", 8099), Handler).serve_forever()
"""
SPEC = tinyjob.evaluated("facts", num_steps=6)


def received(machine: Machine) -> list[dict[str, object]]:
    done = machine.try_run("cat", "/srv/received.jsonl")
    return [json.loads(line) for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]


def test_what_a_job_learned_arrives_while_the_job_has_no_network(machine: Machine, model: str) -> None:
    """Rows wait while the endpoint is down; the token comes as a credential, and is in no file that honed can read."""
    machine.install()
    machine.run("ip", "link", "set", "lo", "up")
    machine.write("/etc/credstore/honed.metrics-token", f"{TOKEN}\n", mode=0o600)
    machine.write(
        "/etc/honed/honed.toml.d/50-metrics.toml",
        '[reporting]\nmetrics_api_url = "http://127.0.0.1:8099/api"\nmax_retry_delay_sec = 1\n',
    )
    machine.run("systemctl", "enable", "--now", "honed")
    machine.wait_property("honed-send", "ActiveState", "active")
    machine.write("/var/spool/honed/incoming/facts.json", json.dumps(SPEC))

    machine.wait_message("Connection refused", "--unit=honed-send")
    wait_for(
        lambda: "Connection refused" in machine.property("honed-send", "StatusText"), what="the same as its status"
    )
    wait_for(lambda: machine.jobs()["facts"]["state"] == "succeeded", what="the job", deadline_sec=400)
    machine.run("systemctl", "restart", "honed")

    machine.write("/srv/endpoint.py", ENDPOINT)
    machine.run("systemd-run", "--unit=endpoint", "/usr/bin/python3", "/srv/endpoint.py")
    wait_for(lambda: received(machine), what="rows")
    wait_for(lambda: "0 bytes waiting" in machine.property("honed-send", "StatusText"), what="all rows")
    requests = received(machine)
    assert {request["authorization"] for request in requests} == {f"Bearer {TOKEN}"}
    predicted = json.loads(machine.run("honectl", "predictions", "--json", "facts"))
    rows = [row for request in requests for row in request["predictions"]]  # type: ignore[attr-defined]
    keys = ("step", "sample_index", "prediction")
    assert predicted
    assert {tuple(row[key] for key in keys) for row in rows} == {tuple(row[key] for key in keys) for row in predicted}
    assert not any(TOKEN in message for message in machine.messages())
    # It sees neither jobs nor the bus over which jobs are started.
    pid = machine.main_pid("honed-send")
    for path in ("/var/spool/honed/queued", "/var/lib/honed/jobs/1", "/run/dbus/system_bus_socket"):
        seen = machine.try_run("nsenter", f"--target={pid}", "--mount", "runuser", "-u", "honed", "--", "ls", path)
        assert seen.returncode != 0, path


def test_a_reload_of_honed_reaches_it(machine: Machine) -> None:
    machine.run("rm", "/etc/honed/honed.toml.d/50-metrics.toml")
    machine.run("systemctl", "reload", "honed")
    machine.wait_message("no metrics API is configured", "--unit=honed-send")
