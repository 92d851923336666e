"""A unit that runs cannot become another job's: systemd changes nothing of it that says whose it is, and shows it
directories only in places that are there already. So no unit begins as a spare worker (docs/operation.md)."""

from __future__ import annotations

import pytest
from machine import Machine
from test_runner import Honed

pytestmark = pytest.mark.systemd


def test_a_unit_that_runs_cannot_become_that_of_another_job(machine: Machine) -> None:
    honed = Honed(machine)
    machine.wait_message("workers are units", "--unit=honed")
    first = honed.drop("slow-4000")
    honed.wait_step(first)
    second = honed.drop("succeed.second")
    unit, place = f"honed-job@{first}.service", f"/var/lib/honed/jobs/{second}"
    pid = str(machine.main_pid(unit))

    def refusal(*words: str) -> str:
        done = machine.try_run(*words)
        assert done.returncode != 0, words
        return done.stdout + done.stderr

    properties = ("User", "SupplementaryGroups", "WorkingDirectory", "BindPaths", "ExecStopPost", "LogExtraFields")
    for name in properties:
        told = refusal("systemctl", "set-property", "--runtime", unit, f"{name}={place}")
        assert "Cannot set property" in told, told
    manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    migration = ("AttachProcessesToUnit", "ssau", "honed.service", "", "1", pid)  # a unit that is loaded
    assert "not available on non-delegated units" in refusal("busctl", "call", *manager, *migration)
    # The view is read-only, so there is no place for the other job's directory in it.
    assert "No such file or directory" in refusal("systemctl", "bind", "--mkdir", unit, place)
    inside = f"/var/lib/honed/jobs/{first}/bound"
    machine.run("systemctl", "bind", "--mkdir", unit, "/srv/test", inside)
    assert machine.run("ls", f"/proc/{pid}/root{inside}").split() == ["model", "rows.jsonl"]
    assert "Access denied" in refusal("runuser", "-u", "honed", "--", "systemctl", "bind", unit, "/srv/test", inside)
    honed.honectl("cancel", str(first))
