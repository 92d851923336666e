"""Attempts of one person to make a job read another's files, against an installed honed, with the real worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from machine import ENVIRONMENT, Machine
from PIL import Image

from waiting import wait_for

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
JOBS = "/var/lib/honed/jobs"
#: A word that stands in each of the victim's files.
SECRET = "patient-4711"
ROWS = "".join(
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": f"Who has it, {SECRET}?"},
                {"role": "assistant", "content": f"{SECRET} {number}"},
            ]
        }
    )
    + "\n"
    for number in range(12)
)
#: The keys that name a path, each tested with a link of the submitter's.
INPUTS = ("base_model", "adapter", "chat_template", "datasets")
#: Lets two names of the working directory change places (renameat2 with RENAME_EXCHANGE).
EXCHANGE = (
    f"{ENVIRONMENT}/bin/python -c 'import ctypes, os, sys; a, b = map(os.fsencode, sys.argv[1:]); "
    "sys.exit(ctypes.CDLL(None).renameat2(-100, a, -100, b, 2))'"
)


@pytest.fixture(scope="module")
def honed(machine: Machine, model: str) -> Machine:
    """A machine with honed running; berta has an adapter, a model, a template and rows that nobody else may read."""
    machine.install()
    for name in ("berta", "mallory"):
        machine.add_user(name, "honed-submit")
        machine.sh(f"install -d -m 755 -o {name} /srv/{name}")
    machine.write("/etc/honed/honed.toml.d/50-test.toml", "[spool]\nsettle_sec = 0.2\n")
    machine.run("systemctl", "enable", "--now", "honed")
    for name in ("berta", "mallory"):
        learned = submit(machine, name, "learn", {"base_model": model, "lora": {"r": 4}})
        machine.sh(
            f"cp -r {JOBS}/{learned}/output /srv/{name}/adapter && cp -r {model} /srv/{name}/base_model && "
            f"cp /srv/data/facts.jsonl /srv/{name}/datasets.jsonl && "
            f"cp {model}/chat_template.jinja /srv/{name}/chat_template",
            user=name,
        )
    machine.write("/srv/berta/datasets.jsonl", ROWS, user="berta")
    machine.sh(f"echo '{{# {SECRET} #}}' >>/srv/berta/chat_template; chmod -R go-rwx /srv/berta", user="berta")
    machine.run("chmod", "-R", "a+rX", "/srv/mallory", user="mallory")
    from zoo.vision import build_vision_checkpoint

    build_vision_checkpoint(machine.host_path("/srv/models/seeing"), "qwen2_5_vl")
    Image.new("RGB", (40, 40), "red").save(machine.host_path("/srv/data/picture.png"))
    machine.sh(
        "cp /srv/data/picture.png /srv/mallory; install -m 600 -o berta /srv/data/picture.png /srv/berta; "
        "chmod -R a+rX /srv/models"
    )
    return machine


def submit(honed: Machine, user: str, name: str, spec: dict[str, Any], *, until: str = "succeeded") -> int:
    """Drop a job and wait until it is in that state. Returns its number."""
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-12}
    whole = {
        "name": name,
        "backend": "transformers",
        "datasets": [{"path": "/srv/data/facts.jsonl"}],
        "training": training,
        "predictions": {"num_samples": 2, "max_new_tokens": 4},
        **spec,
    }
    honed.run(
        "sh",
        "-ec",
        f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1.json"',
        "sh",
        name,
        user=user,
        stdin=json.dumps(whole),
    )

    uid = int(honed.run("id", "-u", user))

    def reached() -> int | None:
        assert not (refused := honed.refusal(name)), refused
        rows = [row for row in honed.jobs().values() if row["uid"] == uid]
        return next((row["id"] for row in rows if row["name"] == name and row["state"] == until), None)

    return int(wait_for(reached, what=f"{name} {until}", deadline_sec=400) or 0)


def test_a_link_that_is_turned_after_the_check_leads_a_job_to_nothing(honed: Machine, model: str) -> None:
    """Each input is a link that was valid when the job was accepted, and leads to berta's file when the job starts."""
    honed.run("honectl", "pause")
    jobs = {}
    for key in INPUTS:
        link = f"/srv/mallory/link-{key}" + (".jsonl" if key == "datasets" else "")
        theirs = key + (".jsonl" if key == "datasets" else "")
        honed.run("ln", "-s", f"/srv/mallory/{theirs}", link, user="mallory")
        named = [{"path": link}] if key == "datasets" else link
        spec = {"base_model": model, key: named, **({} if key == "adapter" else {"lora": {"r": 4}})}
        jobs[key] = submit(honed, "mallory", f"steal-{key}", spec, until="queued")
        honed.sh(f"ln -sfn /srv/berta/{theirs} {link}", user="mallory")
    jobs["adapter: job:learn"] = steal_by_a_chain(honed, model)
    jobs["datasets: a picture"] = steal_by_a_row(honed)
    honed.run("honectl", "resume")
    for key, job_id in jobs.items():
        wait_for(lambda: over(honed, job_id), what=f"steal-{key} over", deadline_sec=400)  # noqa: B023
        shown = json.loads(honed.run("honectl", "show", "--json", str(job_id), user="mallory"))
        assert shown["state"] == "failed", (key, shown)
        told = shown["error"]["message"]
        # Reported by the daemon, or before that by mallory's own check, if it runs again.
        assert (
            "cannot be read by the user mallory, although it could when the job was accepted" in told
            or "Permission denied" in told
        ), told
        assert told.removeprefix("line 1: ").startswith(key.partition(":")[0]), shown["error"]
        told = honed.sh(f"grep -rl {SECRET} {JOBS}/{job_id} || true")
        assert told == "", key
    assert SECRET not in honed.run("journalctl", "--no-pager")
    # With berta's rights the same files are read: the word is there to be found.
    assert SECRET in honed.sh("cat /srv/berta/datasets.jsonl /srv/berta/chat_template", user="berta")
    learned = json.loads(honed.run("honectl", "show", "--json", "learn", user="berta"))["id"]
    assert honed.run("ls", f"{JOBS}/{learned}/output", user="berta")
    assert honed.try_run("ls", f"{JOBS}/{learned}/output", user="mallory").returncode != 0


def steal_by_a_chain(honed: Machine, model: str) -> int:
    """Submit a job that continues from an output of mallory's, then replace the output with a link to berta's."""
    theirs, own = (
        json.loads(honed.run("honectl", "show", "--json", "learn", user=user))["id"] for user in ("berta", "mallory")
    )
    job_id = submit(honed, "mallory", "steal-chain", {"base_model": model, "adapter": "job:learn"}, until="queued")
    honed.sh(f"ln -s {JOBS}/{theirs}/output {JOBS}/{own}/kept", user="mallory")
    # In one step: between two the daemon, which plans the job by now, would find no output at all.
    honed.sh(f"cd {JOBS}/{own} && {EXCHANGE} output kept")
    return job_id


def steal_by_a_row(honed: Machine) -> int:
    """Submit a job with a row that names mallory's picture, then replace the picture with a link to berta's."""
    parts = [{"type": "image", "image": "/srv/mallory/picture.png"}, {"type": "text", "text": "Which color?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]}
    honed.write("/srv/mallory/pictures.jsonl", 4 * (json.dumps(row) + "\n"), user="mallory")
    spec = {"base_model": "/srv/models/seeing", "datasets": [{"path": "/srv/mallory/pictures.jsonl"}], "lora": {"r": 4}}
    job_id = submit(honed, "mallory", "steal-picture", spec, until="queued")
    honed.sh("ln -sfn /srv/berta/picture.png /srv/mallory/picture.png", user="mallory")
    return job_id


def over(honed: Machine, job_id: int) -> bool:
    ended = {job["id"] for job in honed.jobs().values() if job["state"] in {"succeeded", "failed", "cancelled"}}
    return job_id in ended
