"""honed's report of a fault that a restart would not fix: a clear state, and never a restart loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import Machine

from honed.system import message
from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Machine:
    machine.install()
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    return machine


@pytest.fixture
def honed(installed: Machine) -> Iterator[Machine]:
    """A machine on which honed is up and idle before and after the test."""
    yield installed
    installed.run("systemctl", "stop", "honed")
    for directory in ("/var/lib/honed", "/var/spool/honed"):
        installed.try_run("umount", "--lazy", directory)
    installed.run("systemctl", "start", "honed")
    wait_status(installed, "idle")


def status(honed: Machine) -> str:
    return honed.property("honed.service", "StatusText")


def wait_status(honed: Machine, words: str, *, deadline_sec: float = 180) -> str:
    def reached() -> str | None:
        text = status(honed)
        return text if words in text else None

    return str(wait_for(reached, what=f"{words!r} in STATUS", deadline_sec=deadline_sec))


def wait_listed(honed: Machine, name: str) -> None:
    wait_for(lambda: name in honed.jobs(), what=f"{name} accepted")
    assert name in honed.run("honectl", "list")


def drop(honed: Machine, name: str) -> None:
    spec = plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), name=name)
    honed.write(f"{INCOMING}/.{name}", json.dumps(spec))
    honed.run("mv", f"{INCOMING}/.{name}", f"{INCOMING}/{name}.json")


def end(honed: Machine, name: str) -> None:
    """Cancel a job; one that has started is over by itself soon, as its model has no weights."""
    honed.try_run("honectl", "cancel", name)
    over = {"cancelled", "failed"}
    wait_for(lambda: honed.jobs()[name]["state"] in over, what=f"{name} over")


def fill(honed: Machine, directory: str, *, with_job: str) -> None:
    """Mount a full disk at a directory; honed has to be down, since it sees only mounts made before its start."""
    honed.run("mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", directory)
    honed.run("systemd-tmpfiles", "--create", "/usr/lib/tmpfiles.d/honed.conf")
    drop(honed, with_job)
    honed.try_run("dd", "if=/dev/zero", f"of={directory}/filler", "bs=4k", "count=1000")


def identity(honed: Machine) -> dict[str, str]:
    """Return the properties that change when systemd restarts the service."""
    return honed.show("honed.service", "InvocationID", "NRestarts", "MainPID")


def test_a_broken_configuration_is_refused_and_the_old_one_stays(honed: Machine) -> None:
    drop(honed, "untouched")
    wait_listed(honed, "untouched")
    before = identity(honed)
    honed.write("/etc/honed/honed.toml.d/50-test.toml", "[jobs]\nretry_delay = 5\n")
    honed.run("systemctl", "reload", "honed")
    text = wait_status(honed, "NOT reloaded, the old configuration stays in force")
    assert "50-test.toml: line 2: jobs.retry_delay" in text
    assert "1 queued" in text
    assert honed.property("honed.service", "ActiveState") == "active"
    (entry,) = honed.journal(f"MESSAGE_ID={message.CONFIG_REFUSED}")
    assert entry["PRIORITY"] == "3"
    assert "Subject: The new configuration is invalid" in honed.run("journalctl", "-x", "-u", "honed", "--no-pager")
    assert honed.doctor()["honed.service"]["status"] == "error"

    honed.write("/etc/honed/honed.toml.d/50-test.toml", "[jobs]\nretry_delay_sec = 5\n")
    honed.run("systemctl", "reload", "honed")
    honed.wait_message("configuration reloaded")
    wait_for(lambda: "NOT reloaded" not in status(honed), what="the fault gone from STATUS")
    assert identity(honed) == before
    end(honed, "untouched")


def test_a_configuration_that_is_broken_at_start_is_one_failure_and_no_loop(honed: Machine) -> None:
    honed.write("/etc/honed/honed.toml.d/50-test.toml", "[jobs]\nretry_delay = 5\n")
    honed.run("systemctl", "stop", "honed")
    assert honed.try_run("systemctl", "start", "honed").returncode != 0
    assert honed.show("honed.service", "ActiveState", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed",
        "ExecMainStatus": "78",
        "NRestarts": "0",
    }
    honed.run("rm", "/etc/honed/honed.toml.d/50-test.toml")
    honed.run("systemctl", "reset-failed", "honed")


@pytest.mark.parametrize("directory", ["/var/lib/honed", "/var/spool/honed"])
def test_with_a_full_disk_it_starts_says_so_and_goes_on_when_there_is_room(honed: Machine, directory: str) -> None:
    honed.run("systemctl", "stop", "honed")
    fill(honed, directory, with_job="on-a-full-disk")
    honed.run("systemctl", "start", "honed")
    text = wait_status(honed, "degraded: ")
    assert "No space left on device" in text or "full" in text
    before = identity(honed)
    honed.run("rm", f"{directory}/filler")
    wait_status(honed, "idle")
    wait_for(lambda: "degraded" not in status(honed), what="recovery", deadline_sec=400)
    wait_listed(honed, "on-a-full-disk")
    assert identity(honed) == before
    end(honed, "on-a-full-disk")
    assert honed.journal(f"MESSAGE_ID={message.DEGRADED}")
    assert honed.journal(f"MESSAGE_ID={message.RECOVERED}")


def test_with_a_read_only_spool_it_waits_and_says_so(honed: Machine) -> None:
    honed.run("systemctl", "stop", "honed")
    honed.sh("mount --bind /var/spool/honed /var/spool/honed && mount -o remount,ro,bind /var/spool/honed")
    honed.run("systemctl", "start", "honed")
    assert "Read-only file system" in wait_status(honed, "degraded: ")
    before = identity(honed)
    honed.run("systemctl", "stop", "honed")  # it can be stopped while it waits
    assert honed.property("honed.service", "Result") == "success"
    assert identity(honed)["NRestarts"] == before["NRestarts"] == "0"


def test_a_damaged_database_is_set_aside_and_made_again(honed: Machine) -> None:
    drop(honed, "remembered")
    wait_listed(honed, "remembered")
    honed.run("systemctl", "stop", "honed")
    honed.sh(
        "rm -f /var/lib/honed/honed.db-*; dd if=/dev/urandom of=/var/lib/honed/honed.db bs=4k count=8 conv=notrunc"
    )
    honed.run("systemctl", "start", "honed")
    assert "remembered" in honed.run("honectl", "list")
    assert honed.exists("/var/lib/honed/honed.db.damaged")
    (entry,) = honed.journal(f"MESSAGE_ID={message.DATABASE_DAMAGED}")
    assert entry["PRIORITY"] == "3"
    end(honed, "remembered")


def test_without_a_gpu_it_says_on_what_jobs_train(honed: Machine) -> None:
    assert any("jobs train on " in line for line in honed.messages("-u", "honed"))


def test_all_of_this_took_not_one_restart(honed: Machine) -> None:
    assert identity(honed)["NRestarts"] == "0"
    assert "Traceback" not in "\n".join(honed.messages("-u", "honed"))
