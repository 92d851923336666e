"""Three people share a booted machine: one floods it, one has slow data, and the third waits for neither. Turns are
counted, in the journal's order; nothing here depends on seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from machine import Machine
from slowdata import LEASE_SEC, slow_data

from waiting import wait_for

pytestmark = pytest.mark.systemd

SPOOL = "/var/spool/honed"
INCOMING = f"{SPOOL}/incoming"
NUM_FLOOD = 300
NUM_SLOW = 50
#: Seconds after which a check is ended: twice the time that is waited for in the second test. Far more than one takes.
TIMEOUT_SEC = LEASE_SEC / 2
CONFIG = f"""
[spool]
settle_sec = 0.2
preflight_timeout_sec = {TIMEOUT_SEC}
preflight_helpers = 1
[jobs]
poll_interval_sec = 0.1
[classes.urgent]
rank = 5
users = ["berta"]
[classes.normal]
default = true
"""
VERBOSE = "[Service]\nExecStart=\nExecStart=/opt/honed/current/bin/honed --verbose\n"


@pytest.fixture(scope="module")
def honed(machine: Machine, model: str) -> Machine:
    """A machine with honed running; its journal has the beginning of each check."""
    assert model
    machine.install()
    for user in ("anna", "berta", "carl"):
        machine.add_user(user, "honed-submit")
    for user in ("service", "slowservice"):
        machine.run("useradd", "--system", "--groups", "honed-submit", "--shell", "/bin/sh", user)
    machine.write("/etc/honed/honed.toml", CONFIG)
    machine.write("/etc/systemd/system/honed.service.d/verbose.conf", VERBOSE)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", "honed")
    return machine


def spec(name: str, dataset: str = "/srv/data/facts.jsonl", **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "base_model": "/srv/models/tiny",
        "backend": "transformers",
        "lora": {"r": 4},
        "datasets": [{"path": dataset}],
        "predictions": {"sample_frequency": "off"},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 128},
        **keys,
    }


#: Drops the job files of standard input's lines, each by one rename, after all are written.
DROP = """
import json, os, sys
specs = [json.loads(line) for line in sys.stdin]
for spec in specs:
    with open(f"INCOMING/.{spec['name']}", "w") as file: json.dump(spec, file)
for spec in specs: os.rename(f"INCOMING/.{spec['name']}", f"INCOMING/{spec['name']}.json")
""".replace("INCOMING", INCOMING)


def drop(honed: Machine, user: str, specs: list[dict[str, Any]]) -> None:
    honed.run("python3", "-c", DROP, user=user, stdin="".join(json.dumps(spec) + "\n" for spec in specs))


def entries(honed: Machine) -> list[tuple[str, int, int | None]]:
    """Return what happened to jobs, in the journal's order: (claimed, begins, accepted or started; number; user)."""
    kinds = {
        ": claimed": "claimed",
        ": its check begins": "begins",
        "): accepted from": "accepted",
        "): attempt 1": "started",
    }
    found = []
    for entry in honed.journal("--unit=honed", "--output-fields=MESSAGE,HONED_JOB,HONED_UID"):
        message = str(entry.get("MESSAGE"))
        if kind := next((kind for text, kind in kinds.items() if text in message), None):
            uid = entry.get("HONED_UID")
            found.append((kind, int(entry["HONED_JOB"]), int(uid) if uid is not None else None))
    return found


def number_of(honed: Machine, name: str) -> int:
    """Return the number of an accepted job."""
    return int(wait_for(lambda: honed.jobs().get(name), what=f"{name} accepted")["id"])  # type: ignore[index]


def uid_of(honed: Machine, user: str) -> int:
    return int(honed.run("id", "-u", user))


def num_begun(honed: Machine, number: int, others: int) -> int:
    """Return how many checks of another user began between a job's claim and the beginning of its own check."""
    steps = entries(honed)
    claimed, begun = (
        next(at for at, (kind, job, _) in enumerate(steps) if (kind, job) == (wanted, number))
        for wanted in ("claimed", "begins")
    )
    return sum(kind == "begins" and uid == others for kind, _, uid in steps[claimed:begun])


def test_one_job_beside_a_flood_and_slow_data_is_checked_and_started_next(honed: Machine) -> None:
    anna, carl = uid_of(honed, "anna"), uid_of(honed, "carl")
    with slow_data(honed, "carl", "/srv/data/facts.jsonl", NUM_SLOW) as paths:
        drop(honed, "carl", [spec(f"c{at}", path) for at, path in enumerate(paths)])
        wait_for(lambda: any(kind == "begins" and uid == carl for kind, _, uid in entries(honed)), what="a slow check")
        drop(honed, "anna", [spec(f"a{at}", priority=1000) for at in range(NUM_FLOOD)])
        wait_for(lambda: any(kind == "accepted" for kind, _, _ in entries(honed)), what="the flood")
        drop(honed, "berta", [spec("b", **{"class": "urgent"})])
        number = number_of(honed, "b")
        assert num_begun(honed, number, anna) <= 1
        assert num_begun(honed, number, carl) <= 1
        wait_for(lambda: ("started", number) in [step[:2] for step in entries(honed)], what="its start")
        steps = entries(honed)
        accepted = next(at for at, step in enumerate(steps) if step[:2] == ("accepted", number))
        started = next(at for at, step in enumerate(steps) if step[:2] == ("started", number))
        assert [job for kind, job, _ in steps[accepted:started] if kind == "started"] == []
        assert sum(kind == "accepted" for kind, _, _ in steps[:accepted]) < NUM_FLOOD / 2, "the flood was over"
    honed.run("honectl", "pause")


def test_slow_data_of_one_account_delay_another_by_one_check_and_come_last_after_a_deadline(honed: Machine) -> None:
    """Accounts of the system share one helper."""
    fast, slow = uid_of(honed, "service"), uid_of(honed, "slowservice")

    def begun() -> list[int]:
        return [uid for kind, _, uid in entries(honed) if kind == "begins" and uid in {fast, slow}]

    def overtaken() -> list[tuple[int, list[int]]]:
        """Return the later slow checks that began while fast jobs, which were claimed, waited for theirs."""
        steps, waiting, found = entries(honed), list[int](), list[tuple[int, list[int]]]()
        numbers = {job for kind, job, uid in steps if kind == "begins" and uid == fast}
        for kind, job, uid in steps:
            if job in numbers and kind == "claimed":
                waiting.append(job)
            elif job in waiting and kind == "begins":
                waiting.remove(job)
            elif kind == "begins" and uid == slow and waiting:
                found.append((job, [*waiting]))
        return found

    with slow_data(honed, "slowservice", "/srv/data/facts.jsonl", 4) as paths:
        drop(honed, "slowservice", [spec(f"slow{at}", path) for at, path in enumerate(paths)])
        wait_for(lambda: begun() == [slow], what="a slow check")
        drop(honed, "service", [spec(f"fast{at}") for at in range(5)])
        number_of(honed, "fast4")
        assert overtaken() == [], entries(honed)
        wait_for(lambda: begun().count(slow) == 2, what="the next slow check")
        assert begun()[0] == slow and begun().count(fast) == 5
        drop(honed, "service", [spec("fast5")])
        number_of(honed, "fast5")
        assert overtaken() == [], entries(honed)
