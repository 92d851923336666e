"""honed's entries in the journal, and users' view of them: a real job, one that fails, and a rejected file."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from machine import CHECKOUT, ENVIRONMENT, Machine

from honed.system import message
from waiting import wait_for

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
TRAINING = {
    "max_steps": 6,
    "logging_steps": 1,
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_train_batch_size": 2,
    "max_length": 64,
}


def drop(machine: Machine, name: str, **keys: Any) -> None:
    spec = {
        "name": name,
        "base_model": "/srv/models/tiny",
        "backend": "transformers",
        "lora": {"r": 4},
        "datasets": [{"path": "/srv/data/facts.jsonl"}],
        "eval_split": 0.1,
        "training": TRAINING,
        "predictions": {"num_samples": 1, "max_new_tokens": 4},
        **keys,
    }
    machine.write(f"{INCOMING}/.{name}", json.dumps(spec), user="anna")
    machine.run("mv", f"{INCOMING}/.{name}", f"{INCOMING}/{name}.json", user="anna")


@pytest.fixture(scope="module")
def honed(machine: Machine, model: str) -> Machine:
    """A machine where job 1 (capitals) succeeded, job 2 (short) exceeded its time limit, and a file was rejected."""
    machine.install()
    machine.add_user("anna", "honed-submit")
    machine.add_user("reader", "honed-submit", "systemd-journal")
    machine.run("systemctl", "enable", "--now", "honed")
    drop(machine, "capitals")
    wait_for(lambda: machine.exists("/var/spool/honed/succeeded/1.json"), what="success", deadline_sec=400)
    drop(machine, "short", time_limit_sec=0.01)
    drop(machine, "wrong", colour="red")
    ended = "cd /var/spool/honed; ls failed succeeded held | grep -c json"
    wait_for(lambda: machine.sh(ended) == "2\n", what="the end of job 2", deadline_sec=400)
    assert machine.exists("/var/spool/honed/failed/2.json")
    machine.wait_message("'wrong.json' refused")
    return machine


def test_a_job_is_followed_by_its_number_in_honeds_lines_and_its_own(honed: Machine) -> None:
    entries = honed.journal("HONED_JOB=1")
    units = {entry["_SYSTEMD_UNIT"] for entry in entries}
    assert units == {"honed.service"}, "its own unit has nothing to say"
    told = [entry["MESSAGE"] for entry in entries if entry["_SYSTEMD_UNIT"] == "honed.service"]
    assert told[0] == "job 1 (capitals): accepted from capitals.json, queued"
    assert told[-1] == "job 1 (capitals): attempt 1: succeeded; now succeeded"


def test_an_entry_that_another_user_makes_up_is_not_in_a_jobs_log(honed: Machine) -> None:
    honed.add_user("mallory", "honed-submit")
    forged = "MESSAGE=job 1 (capitals): forged\nHONED_JOB=1\nPRIORITY=6\nUNIT=honed-job@1.service\nMESSAGE_ID=\n"
    honed.run("logger", "--journald", stdin=forged, user="mallory")
    assert "job 1 (capitals): forged" in honed.messages("HONED_JOB=1"), "journalctl alone takes it for honed's"
    told = honed.run("honectl", "logs", "1")
    assert "forged" not in told
    assert "job 1 (capitals): accepted from capitals.json, queued" in told
    assert "Started honed-job@1.service" in told


def test_entries_have_fields_that_one_can_filter_by(honed: Machine) -> None:
    (started,) = honed.journal("HONED_JOB=1", f"MESSAGE_ID={message.STARTED}")
    assert (started["HONED_STATE"], started["HONED_NAME"], started["HONED_ATTEMPT"]) == ("running", "capitals", "1")
    (progress, *_) = honed.journal("HONED_JOB=1", "HONED_STAGE=train")
    assert int(progress["HONED_STEP"]) >= 1
    assert float(progress["HONED_LOSS"]) > 0
    steps = {entry["HONED_STEP"] for entry in honed.journal("HONED_JOB=1", f"MESSAGE_ID={message.CHECKPOINT}")}
    assert steps == {"3", "6"}
    (failed,) = honed.journal("HONED_STATE=failed")
    assert (failed["HONED_JOB"], failed["HONED_CODE"], failed["PRIORITY"]) == ("2", "time_limit", "4")
    assert failed["MESSAGE_ID"] == message.of_error("time_limit")


def test_warnings_are_what_somebody_must_act_on(honed: Machine) -> None:
    """Libraries' messages, progress bars and warnings are not among them."""
    assert honed.messages("-p", "warning", "HONED_JOB=1") == []
    urgent = honed.messages("-p", "warning", "-u", "honed")
    assert [line for line in urgent if "time limit" not in line and "time_limit" not in line] == [
        line for line in urgent if line.startswith("'wrong.json' refused: spec_invalid: ")
    ]
    assert len(urgent) >= 2


def test_what_workers_print_is_in_their_own_logs_and_not_in_the_journal(honed: Machine) -> None:
    assert honed.journal("-u", "honed-job@1", "_TRANSPORT=stdout") == []
    assert honed.sh("cat /var/lib/honed/jobs/1/attempts/1/worker.log") != ""
    assert {entry["_TRANSPORT"] for entry in honed.journal("_SYSTEMD_UNIT=honed.service")} == {"journal"}
    assert all("\r" not in str(entry["MESSAGE"]) for entry in honed.journal("-u", "honed"))


def test_journalctl_x_explains_what_happened_and_what_to_do(honed: Machine) -> None:
    refused = honed.run("journalctl", "-x", "--no-pager", f"MESSAGE_ID={message.of_error('spec_invalid')}")
    assert "Subject: The job file is invalid" in refused
    assert "honectl check FILE" in refused
    accepted = honed.run("journalctl", "-x", "--no-pager", "HONED_JOB=1", f"MESSAGE_ID={message.ACCEPTED}")
    assert "The file capitals.json passed all checks" in " ".join(accepted.replace("░░", "").split())
    started = honed.run("journalctl", "-x", "--no-pager", "HONED_JOB=1", f"MESSAGE_ID={message.STARTED}")
    assert "systemctl status honed-job@1\n" in started
    assert "Documentation: man:honectl(1)" in started


def test_every_explanation_is_in_the_machines_catalog(honed: Machine) -> None:
    listed = honed.run("journalctl", "--list-catalog")
    catalog = honed.sh(f"cat {CHECKOUT}/units/honed.catalog")
    explanations = re.findall("^-- (.*)\nSubject: (.*)$", catalog, re.MULTILINE)
    assert len(explanations) > 20
    for number, subject in explanations:
        assert f"{number} honed: {subject}" in listed


def test_honectl_logs_is_a_call_of_journalctl_for_those_who_may_read_it(honed: Machine) -> None:
    told = honed.run("honectl", "logs", "1")
    assert "job 1 (capitals): accepted from capitals.json" in told
    assert "Started honed-job@1.service" in told
    head, printed = honed.run("honectl", "logs", "--raw", "1").split("\n", 1)
    assert head.startswith("-- attempt 1, transformers, ")
    assert printed == honed.sh("cat /var/lib/honed/jobs/1/attempts/1/worker.log")
    assert "Subject: The job reached its time limit" in honed.run("honectl", "logs", "-x", "2")
    assert "job 1 (capitals)" in honed.run("honectl", "logs", "--follow", "1")


def test_a_dropper_who_may_not_read_the_journal_reads_her_jobs_own_words(honed: Machine) -> None:
    told = honed.run("honectl", "logs", "short", user="anna")
    assert "-- attempt 1" in told
    assert "stage: prepare" in told
    explained = honed.try_run("honectl", "logs", "-x", "short", user="anna")
    assert explained.returncode == 69
    assert "systemd-journal" in explained.stderr


def test_who_dropped_a_job_reads_all_that_it_made_and_nobody_else_does(honed: Machine) -> None:
    closed = ("find", "/var/lib/honed/jobs/1", "!", "-readable")
    assert honed.run(*closed, user="anna") == ""
    assert "adapter_model.safetensors" in honed.run("find", "/var/lib/honed/jobs/1/output", user="anna")
    assert honed.try_run("ls", "/var/lib/honed/jobs/1", user="reader").returncode != 0
    shown = json.loads(honed.run("honectl", "show", "--json", "1", user="anna"))
    assert shown["uid"] == int(honed.run("id", "-u", "anna"))


def test_an_entry_of_a_megabyte_arrives_whole(honed: Machine) -> None:
    code = "from honed.system.journal import Journal; Journal().send({'MESSAGE': 'x' * 1_000_000, 'HONED_JOB': 4711})"
    packages = f"{CHECKOUT}/daemon:" + honed.sh(f"echo {ENVIRONMENT}/lib/python3*/site-packages").strip()
    honed.run("python3", "-c", code, environment={"PYTHONPATH": packages})
    (entry,) = honed.journal("HONED_JOB=4711")
    assert len(entry["MESSAGE"]) == 1_000_000


def test_a_journald_that_was_restarted_is_found_again(honed: Machine) -> None:
    honed.run("systemctl", "restart", "systemd-journald")
    drop(honed, "after-the-restart", colour="blue")
    entry = honed.wait_message("'after-the-restart.json' refused")
    assert entry["_TRANSPORT"] == "journal"
    assert entry["HONED_FILE"] == "after-the-restart.json"


def test_doctor_finds_nothing_wrong_with_what_was_installed(honed: Machine) -> None:
    found = honed.doctor()
    for check in (
        "honed.service",
        "honed-job@.service",
        "polkit",
        "users",
        "journal catalog",
        "journal",
        "ACLs",
        "permissions",
        "honed",
    ):
        assert found[check]["status"] == "ok", found[check]
    honed.run("mv", "/usr/share/polkit-1/rules.d/50-honed.rules", "/tmp/rules")
    honed.sh("echo '# changed' >>/usr/lib/systemd/system/honed.service")
    found = honed.doctor()
    assert found["polkit"]["status"] == "warning"
    assert found["honed.service"]["hint"] == "systemctl daemon-reload"
