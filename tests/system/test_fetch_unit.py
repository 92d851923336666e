"""honed-fetch@.service: a model comes from the hub through a unit of its own, and honed itself needs no network."""

from __future__ import annotations

import json

import pytest
from machine import CHECKOUT, Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

TOKEN = "hub-t0ken"
HUB = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, "{CHECKOUT}/tests/process")
import fakehub
hub = fakehub.Hub()
hub.port = 8098
hub.repositories["lab/tiny"] = fakehub.Repository(
    files=fakehub.read(Path("/srv/models/tiny")), gated=True, token="{TOKEN}", delay_sec=0.01
)
hub.start()
time.sleep(3600)
"""
SPEC = {
    "name": "fetched",
    "base_model": "lab/tiny",
    "backend": "transformers",
    "lora": {"r": 4},
    "datasets": [{"path": "/srv/data/facts.jsonl"}],
    "training": {"max_steps": 2, "max_length": 64},
    "predictions": {"sample_frequency": "off"},
}


def test_a_gated_model_is_fetched_by_its_unit_and_trained_on(machine: Machine, model: str) -> None:
    """The token is a credential of the fetch alone; a restarted honed takes over the running fetch."""
    machine.install()
    machine.run("ip", "link", "set", "lo", "up")
    machine.write("/srv/hub.py", HUB)
    machine.run("systemd-run", "--unit=hub", "/usr/bin/python3", "/srv/hub.py")
    machine.write("/etc/credstore/hf-token", f"{TOKEN}\n", mode=0o600)
    machine.write(
        "/etc/systemd/system/honed-fetch@.service.d/hub.conf",
        "[Service]\nEnvironment=HF_ENDPOINT=http://127.0.0.1:8098\n",
    )
    machine.write("/etc/honed/honed.toml.d/50-hub.toml", "[policy]\nhub = true\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", "honed")
    machine.write("/var/spool/honed/incoming/fetched.json", json.dumps(SPEC))

    unit = "honed-fetch@1.service"
    pid = wait_for(lambda: machine.main_pid(unit), what="the fetch")
    machine.run("systemctl", "restart", "honed")
    assert machine.main_pid(unit) in {pid, 0}
    wait_for(lambda: "fetched" in machine.jobs(), what="its job")
    wait_for(lambda: machine.jobs()["fetched"]["state"] == "succeeded", what="the job's end", deadline_sec=400)
    assert len({entry["_PID"] for entry in machine.journal(f"_SYSTEMD_UNIT={unit}")} - {""}) <= 1
    plan = machine.read_json("/var/lib/honed/jobs/1/plan.json")
    assert plan["base_model_path"].startswith("/var/cache/honed/hub/models--lab--tiny/snapshots/")
    assert not any(TOKEN in message for message in machine.messages())
    found = machine.try_run("grep", "-r", "-l", TOKEN, "/var/lib/honed", "/var/spool/honed", "/var/cache/honed")
    assert found.stdout == ""
