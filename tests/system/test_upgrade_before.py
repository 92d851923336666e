"""An upgrade from an earlier version: the jobs that run are adopted, as a unit and as a child, and what waits is run.

The earlier version is the one whose instance is recorded in tests/data/instance. To be read, and run, in order.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from machine import CHECKOUT, ENVIRONMENT, Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

REPOSITORY = Path(__file__).parents[2]
#: What scripts/install reads.
INSTALLED = ("pyproject.toml", "constraints.txt", "README.md", "daemon", "docs", "etc", "scripts", "units")
NUM_STEPS = 150
#: The directories of the machine's instance and of anna's own, whose jobs are children of its honed.
SYSTEM, OWN = "", "/srv/own"


@pytest.fixture(scope="module")
def before() -> bytes:
    """The files of the earlier version, as a tar archive."""
    if shutil.which("git") is None:
        pytest.skip("needs git, for the earlier version")
    commit = json.loads((REPOSITORY / "tests/data/instance/recorded.json").read_text())["commit"]
    command = ["git", "archive", "--format=tar", commit, "--", *INSTALLED]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the history of the repository with commit {commit}: {done.stderr.decode().strip()}")
    return done.stdout


def spec(name: str, num_steps: int, **keys: Any) -> str:
    return json.dumps(
        {
            "name": name,
            "base_model": "/srv/models/tiny",
            "backend": "transformers",
            "lora": {"r": 4, "lora_alpha": 8},
            "datasets": [{"path": "/srv/data/facts.jsonl"}],
            "training": {
                "max_steps": num_steps,
                "per_device_train_batch_size": 2,
                "max_length": 128,
                "logging_steps": 1,
            },
            **keys,
        }
    )


def drop(machine: Machine, root: str, name: str, num_steps: int, **keys: Any) -> None:
    machine.write(f"/home/anna/{name}.json", spec(name, num_steps, **keys), user="anna")
    machine.run("cp", f"/home/anna/{name}.json", f"{root}/var/spool/honed/incoming/", user="anna")


def wait_for_job(machine: Machine, root: str, name: str, *states: str) -> dict[str, Any]:
    def reached() -> bool:
        assert not (refused := machine.refusal(name, root)), refused
        job = machine.jobs(root).get(name, {"state": None})
        assert job["state"] in states or job["state"] not in {"failed", "cancelled"}, job
        return job["state"] in states

    wait_for(reached, what=f"{name} in {states}", deadline_sec=600)
    shown: dict[str, Any] = json.loads(machine.run("honectl", "--root", root or "/", "show", "--json", name))
    return shown


def steps(machine: Machine, root: str) -> list[int]:
    """The steps that the first attempt of the first job reported, in order."""
    path = f"{root}/var/lib/honed/jobs/1/attempts/1/events.jsonl"
    events = [json.loads(line) for line in machine.host_path(path).read_text().rpartition("\n")[0].splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


def worker_pid(machine: Machine, root: str) -> int:
    pid: int = machine.read_json(f"{root}/var/lib/honed/jobs/1/attempts/1/lock")["worker_pid"]
    return pid


def add_metric(machine: Machine) -> None:
    """Install the metric `vowels` in the environment in use, as pip would."""
    packages = machine.sh("echo /opt/honed/current/lib/python3.*/site-packages").strip()
    info = "house_metrics-1.0.dist-info"
    files = {
        "house_metrics.py": "def vowels(text, truth):\n    return (1 + text.count('a')) / (1 + len(text))\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: house-metrics\nVersion: 1.0\n",
        f"{info}/entry_points.txt": "[honed.metrics]\nvowels = house_metrics:vowels\n",
        f"{info}/RECORD": f"house_metrics.py,,\n{info}/METADATA,,\n{info}/entry_points.txt,,\n{info}/RECORD,,\n",
    }
    for name, text in files.items():
        machine.write(f"{packages}/{name}", text)


def start_own(machine: Machine, unit: str) -> None:
    """Start anna's own honed. What is beside its main process outlives it, as under a shell."""
    words = (f"--unit={unit}", "--uid=anna", "--property=KillMode=process", "--setenv=OMP_NUM_THREADS=1")
    machine.run("systemd-run", *words, "/usr/local/bin/honed", "--root", OWN)
    wait_for(lambda: machine.exists(f"{OWN}/run/honed/control.sock"), what="anna's honed")


def test_jobs_of_the_earlier_version_run_and_wait(before: bytes, machine: Machine, model: str) -> None:
    machine.run("mkdir", "/srv/before")
    machine.run("tar", "--extract", "--no-same-owner", "--directory", "/srv/before", stdin=before)
    machine.run("/srv/before/scripts/install", "--environment", ENVIRONMENT)
    machine.add_user("anna", "honed-submit")
    machine.run("install", "--directory", "--owner=anna", OWN)
    machine.write("/etc/honed/honed.toml.d/50-local.toml", "[jobs]\nretry_delay_sec = 7\n")
    machine.write("/etc/systemd/system/honed-job@.service.d/50-local.conf", "[Service]\nEnvironment=HOUSE=ours\n")
    add_metric(machine)
    machine.run("systemctl", "enable", "--now", "honed")
    start_own(machine, "own-before")
    for root in (SYSTEM, OWN):
        drop(machine, root, "long", NUM_STEPS)
    left = {SYSTEM, OWN}

    def stop() -> bool:
        """Stop those at step 3: however long the installation takes, the job is still running after it."""
        for root in [*left]:
            if machine.exists(f"{root}/var/lib/honed/jobs/1/attempts/1/events.jsonl") and 3 in steps(machine, root):
                machine.run("kill", "-STOP", str(worker_pid(machine, root)))
                left.remove(root)
        return not left

    wait_for(stop, what="step 3 of both", deadline_sec=600)
    scored = {"num_samples": 2, "max_new_tokens": 4, "metrics": ["vowels"]}
    drop(machine, SYSTEM, "next", 2, eval_split=0.1, predictions=scored)
    wait_for_job(machine, SYSTEM, "next", "queued")


def test_they_are_adopted_across_the_installation(before: bytes, machine: Machine) -> None:
    pids = {root: worker_pid(machine, root) for root in (SYSTEM, OWN)}
    started = {root: machine.run("stat", "--format=%Y", f"/proc/{pid}") for root, pid in pids.items()}
    # A child is left by a honed that is killed; one that is stopped has it write a checkpoint.
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "own-before")
    machine.wait_property("own-before", "ActiveState", "failed")
    machine.run("rm", f"{OWN}/run/honed/control.sock")  # it tells when the next one is up
    said = machine.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
    theirs, ours = (
        machine.sh(f"grep -m1 ^version {tree}/pyproject.toml").split('"')[1] for tree in ("/srv/before", CHECKOUT)
    )
    assert f"/opt/honed/{theirs}: kept" in said
    current = machine.run("readlink", "/opt/honed/current").strip()
    assert current.startswith(ours)
    assert current != theirs
    start_own(machine, "own-after")
    assert machine.property("honed", "ActiveState") == "active"
    assert machine.property("honed-job@1", "ActiveState") == "active"
    for root, pid in pids.items():
        assert worker_pid(machine, root) == pid
        assert machine.run("stat", "--format=%Y", f"/proc/{pid}") == started[root]
        num_before = len(steps(machine, root))
        machine.run("kill", "-CONT", str(pid))
        job = wait_for_job(machine, root, "long", "succeeded")
        assert num_before < NUM_STEPS
        assert [attempt["number"] for attempt in job["attempts"]] == [1]
        assert steps(machine, root) == list(range(1, NUM_STEPS + 1))
        assert job["progress"]["step"] == NUM_STEPS


def test_what_waited_is_run_by_the_new_version(before: bytes, machine: Machine) -> None:
    job = wait_for_job(machine, SYSTEM, "next", "succeeded")
    assert [attempt["number"] for attempt in job["attempts"]] == [1]
    assert machine.exists(f"{job['artifacts']['output_dir']}/adapter_model.safetensors")
    assert job["metrics"]["predictions/vowels"] > 0, "the administrator's metric came along"


def test_what_the_administrator_wrote_holds(before: bytes, machine: Machine) -> None:
    assert "retry_delay_sec = 7" in machine.sh("cat /etc/honed/honed.toml.d/50-local.toml")
    assert "HOUSE=ours" in machine.property("honed-job@1", "Environment")
