"""The reports of an installed honed: who may read which page; and how wandb's runs are sent."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
INDEX = "/var/lib/honed/index.html"
POLICY = '[policy]\nadmin_group = "adm"\n[spool]\nsettle_sec = 0.2\n'
SPEC = {
    "base_model": "/srv/models/tiny",
    "backend": "transformers",
    "lora": {"r": 4},
    "datasets": [{"path": "/srv/data/facts.jsonl"}],
    "eval_split": 0.1,
    "training": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 128},
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
}
#: Where packages lie that are not in the environment.
SITE = "/srv/site"
KEY = "0123456789abcdef" * 2 + "01234567"


def _site() -> Path | None:
    found = importlib.util.find_spec("wandb")
    return Path(found.origin).parents[1] if found is not None and found.origin else None


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    site = _site()
    with Machine(mounts={site: SITE} if site is not None else {}) as made:
        yield made


@pytest.fixture(scope="module")
def honed(machine: Machine, model: str) -> Machine:
    machine.install()
    for name in ("anna", "berta"):
        machine.add_user(name, "honed-submit")
    machine.add_user("chief", "honed-submit", "adm")
    machine.write("/etc/honed/honed.toml.d/50-test.toml", POLICY)
    assert machine.exists(model)
    machine.run("systemctl", "enable", "--now", "honed")
    return machine


def run_job(honed: Machine, user: str, name: str, **keys: Any) -> dict[str, Any]:
    """Drop a job, and wait until it has succeeded and its page says so."""
    text = json.dumps({**SPEC, "name": name, **keys})
    honed.run(
        "sh",
        "-ec",
        f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1.json"',
        "sh",
        name,
        user=user,
        stdin=text,
    )

    wait_for(lambda: honed.jobs().get(name, {}).get("state") in {"succeeded", "failed"}, what=name, deadline_sec=400)
    shown: dict[str, Any] = json.loads(honed.run("honectl", "show", "--json", name))
    assert shown["state"] == "succeeded", shown["error"]
    wait_for(lambda: "succeeded: loss" in page(honed, shown["id"]), what="its page")
    wait_for(
        lambda: f"jobs/{shown['id']}/report.html" in honed.try_run("cat", INDEX).stdout, what="its line in the index"
    )
    return shown


def page(honed: Machine, number: int) -> str:
    return honed.try_run("cat", f"/var/lib/honed/jobs/{number}/report.html").stdout


def may_read(honed: Machine, user: str, path: str) -> bool:
    return honed.try_run("cat", path, user=user).returncode == 0


def test_a_page_is_its_droppers_and_the_index_the_administrators(honed: Machine) -> None:
    shown = run_job(honed, "anna", "annas")
    number, path = shown["id"], f"/var/lib/honed/jobs/{shown['id']}/report.html"
    assert honed.run("honectl", "report", "annas", user="anna") == f"{path}\n"
    assert "succeeded: loss" in honed.run("cat", path, user="anna")
    assert [may_read(honed, user, path) for user in ("berta", "chief", "root")] == [False, True, True]
    assert [may_read(honed, user, INDEX) for user in ("anna", "berta", "chief")] == [False, False, True]
    told = json.loads(honed.run("honectl", "predictions", "--json", "annas", user="anna"))
    assert {row["step"] for row in told} == {0, 2}
    assert "France" in honed.run("honectl", "predictions", "annas", user="anna") or told[0]["ground_truth"]
    for verb in ("predictions", "report", "show"):
        refused = honed.try_run("honectl", verb, str(number), user="berta")
        assert (refused.returncode != 0, "another user" in refused.stderr) == (True, True), (verb, refused)
    assert "annas" not in honed.run("honectl", "list", user="berta")


def test_what_is_shared_can_be_read_by_everybody(honed: Machine) -> None:
    honed.write("/etc/honed/honed.toml.d/50-test.toml", POLICY.replace("[spool]", "share_results = true\n[spool]"))
    honed.run("systemctl", "reload", "honed")
    shown = run_job(honed, "anna", "shared")
    path = f"/var/lib/honed/jobs/{shown['id']}/report.html"
    assert "succeeded: loss" in honed.run("cat", path, user="berta")
    assert "shared" in honed.run("cat", INDEX, user="berta")
    assert json.loads(honed.run("honectl", "predictions", "--json", "shared", user="berta"))


@pytest.mark.skipif(_site() is None, reason="needs wandb")
def test_a_wandb_run_leaves_by_honed_send_alone(honed: Machine) -> None:
    """The job's unit has no network; honed-send's has it, and the key as a credential, but sees no job."""
    honed.run("ip", "link", "set", "lo", "up")
    honed.put(Path(__file__).parents[1] / "process/wandbserver.py", "/srv/wandbserver.py")
    code = (
        "import json, sys, time; sys.path.insert(0, '/srv'); import wandbserver\n"
        "server = wandbserver.WandbServer(); open('/srv/url', 'w').write(server.url)\n"
        "while True:\n    time.sleep(0.2)\n"
        "    json.dump([server.runs, server.streams, sorted(server.keys)], open('/srv/got.json', 'w'))\n"
    )
    honed.run("systemd-run", "--unit=wandbserver", "/usr/bin/python3", "-c", code)
    url = wait_for(lambda: honed.try_run("cat", "/srv/url").stdout, what="the server")
    honed.write("/etc/credstore/honed.wandb-key", f"{KEY}\n", mode=0o600)
    honed.write("/etc/honed/honed.toml.d/60-wandb.toml", f'[reporting]\nsync_wandb = true\nwandb_base_url = "{url}"\n')
    for unit in ("honed.service", "honed-send.service", "honed-job@.service"):
        honed.write(f"/etc/systemd/system/{unit}.d/site.conf", f"[Service]\nEnvironment=PYTHONPATH={SITE}\n")
    honed.run("systemctl", "daemon-reload")
    honed.run("systemctl", "restart", "honed", "honed-send")
    shown = run_job(honed, "anna", "tracked", report_to=["wandb"])

    def got() -> list[Any] | None:
        try:
            runs, streams, keys = json.loads(honed.try_run("cat", "/srv/got.json").stdout)
        except ValueError:  # half written
            return None
        rows = streams.get("wandb-history.jsonl", [])
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        return [runs, losses, keys] if "tracked" in runs.values() and len(losses) >= 2 else None

    runs, losses, keys = wait_for(got, what="the run and its two steps", deadline_sec=400)  # sent one after the other
    assert len(runs) == len(keys) == 1
    assert len(losses) == 2
    marks = f"/var/lib/honed/outbox/sender/wandb/{shown['id']}.offline-run-*.json"
    wait_for(lambda: honed.try_run("sh", "-c", f"ls {marks}").returncode == 0, what="the mark")
    assert not any(KEY in message for message in honed.messages())
