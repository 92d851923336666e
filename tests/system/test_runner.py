"""Jobs as units: they outlive honed, and systemd ends what honed cannot.

The real daemon under the real units, with the fake worker (tests/process/fakeworker.py) in the real one's place.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import CHECKOUT, ENVIRONMENT, Machine

from honed.system.pauses import MIN_PAUSE_SEC
from waiting import wait_for

pytestmark = pytest.mark.systemd

PYTHON = "/usr/bin/python3"
PYTHONPATH = f"{CHECKOUT}/daemon:{CHECKOUT}/tests:{ENVIRONMENT}/lib/python3.11/site-packages"
#: So that a test need not wait: the units' own figures are minutes. A busy machine keeps to these as well.
HONED_DROPIN = f"""\
[Service]
ExecStart=
ExecStart={PYTHON} -m honed.daemon.loop
Environment=PYTHONPATH={PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
RestartSec=100ms
WatchdogSec=12s
"""
JOB_DROPIN = f"""\
[Service]
ExecStart=
ExecStart={PYTHON} {CHECKOUT}/tests/system/jobstart.py %i
ExecStopPost=
ExecStopPost={PYTHON} -c "from honed.run.jobunit import end_main; raise SystemExit(end_main())" %i
Environment=PYTHONPATH={PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
TimeoutStopSec=4s
"""
VIEW_DROPIN = f"""\
[Service]
ExecStart=
ExecStart={PYTHON} -c "from honed.run.jobview import main; raise SystemExit(main())" %i
ExecStop=
ExecStop={PYTHON} -c "from honed.run.jobview import main; raise SystemExit(main())" %i --remove
Environment=PYTHONPATH={PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
"""
CONFIG = "[jobs]\nstall_timeout_sec = 10.0\nretry_delay_sec = 0.0\npoll_interval_sec = 0.1\nstage_ahead = true\n"
INSTALL = """\
cp {units}/honed.service {units}/honed-job@.service {units}/honed-view@.service {units}/*.slice /etc/systemd/system
cp {units}/50-honed.rules /usr/share/polkit-1/rules.d
systemd-sysusers {units}/honed.sysusers.conf
systemd-tmpfiles --create {units}/honed.tmpfiles.conf
systemctl daemon-reload
systemctl enable --now honed
"""


class Honed:
    """An installed honed in the guest, as its administrator sees it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.write("/etc/systemd/system/honed.service.d/test.conf", HONED_DROPIN)
        machine.write("/etc/systemd/system/honed-job@.service.d/test.conf", JOB_DROPIN)
        machine.write("/etc/systemd/system/honed-view@.service.d/test.conf", VIEW_DROPIN)
        machine.write("/etc/honed/honed.toml", CONFIG)
        self.python(
            "from pathlib import Path; from zoo import plain; p = Path('/srv/test'); p.mkdir(); "
            "plain.write_base_model(p / 'model'); plain.write_dataset(p / 'rows.jsonl')"
        )
        machine.sh(INSTALL.format(units=f"{CHECKOUT}/units"))

    def python(self, code: str) -> str:
        return self.machine.run(PYTHON, "-c", code, environment={"PYTHONPATH": PYTHONPATH})

    def honectl(self, *words: str) -> str:
        return self.machine.run(PYTHON, "-m", "honed.cli.honectl", *words, environment={"PYTHONPATH": PYTHONPATH})

    def drop(self, name: str, **keys: Any) -> int:
        """Drop a job, and wait until it runs. Returns its number."""
        spec = {
            "name": name,
            "base_model": "/srv/test/model",
            "datasets": [{"path": "/srv/test/rows.jsonl"}],
            "training": {"max_steps": 1},
            **keys,
        }
        self.machine.write(f"/var/spool/honed/incoming/.{name}", json.dumps(spec))
        before = self.machine.entries()
        self.machine.run("mv", f"/var/spool/honed/incoming/.{name}", f"/var/spool/honed/incoming/{name}.json")
        new = wait_for(
            lambda: self.machine.entries().keys() - before.keys() or self.refusals(), what=f"{name} accepted"
        )
        assert isinstance(new, set), new
        (job_id,) = new
        return job_id

    def refusals(self) -> str:
        return self.machine.sh("cat /var/spool/honed/rejected/*.reason 2>/dev/null || true")

    def wait(self, job_id: int, *states: str, deadline_sec: float = 400) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            entry = self.machine.entries().get(job_id)
            return entry if entry is not None and entry["state"] in states else None

        entry = wait_for(reached, what=f"job {job_id} in {states}", deadline_sec=deadline_sec)
        assert entry is not None
        return entry

    def clear(self) -> None:
        """End what a test that failed has left: all later jobs would wait for its device."""
        ended = ("succeeded", "failed", "cancelled")
        if left := [str(number) for number, entry in self.machine.entries().items() if entry["state"] not in ended]:
            self.machine.run("systemctl", "start", "honed")
            self.honectl("cancel", *left)
            for number in left:
                self.wait(int(number), *ended)

    def wait_step(self, job_id: int) -> None:
        """Wait until the job's worker has reported a step."""
        wait_for(lambda: "step " in self.machine.property(f"honed-job@{job_id}", "StatusText"), what="a step")

    def worker_pid(self, job_id: int, attempt: int = 1) -> int:
        """Return the worker's pid in the guest."""
        pid: int = self.machine.read_json(f"/var/lib/honed/jobs/{job_id}/attempts/{attempt}/lock")["worker_pid"]
        return pid

    def go(self, job_id: int) -> None:
        """Let a job go on that has `until` as its name."""
        self.machine.run("touch", f"/var/lib/honed/jobs/{job_id}/go")

    def starts(self, job_id: int) -> int:
        return len(self.machine.read(f"/var/lib/honed/jobs/{job_id}/starts.txt").splitlines())

    def steps_counted(self, job_id: int) -> list[int]:
        """Return the steps with a loss in honed.db, each as often as it is stored."""
        code = f"SELECT step FROM metrics WHERE job_id = {job_id} AND name = 'loss' ORDER BY step"
        return json.loads(
            self.python(
                f"import json, sqlite3; db = sqlite3.connect('file:/var/lib/honed/honed.db?mode=ro', uri=True); "
                f"print(json.dumps([row[0] for row in db.execute({code!r})]))"
            )
        )


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Honed:
    made = Honed(machine)
    machine.wait_message("workers are units", "--unit=honed")
    return made


@pytest.fixture
def honed(installed: Honed) -> Iterator[Honed]:
    yield installed
    installed.clear()


def test_the_unit_of_a_job_says_how_far_it_is_and_keeps_its_chatter_to_itself(honed: Honed) -> None:
    job = honed.drop("until-40")
    honed.wait_step(job)
    shown = honed.machine.show(f"honed-job@{job}", "StatusText", "Type", "User", "Slice", "ActiveState")
    assert shown["StatusText"].startswith("step ")
    assert (shown["User"], shown["Slice"], shown["ActiveState"]) == (f"honed-j{job}", "honed-jobs.slice", "active")
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    assert (entry["outcome"], honed.starts(job)) == ("succeeded", 1)
    assert not [line for line in honed.machine.journal() if "the libraries chatter" in str(line.get("MESSAGE"))]
    assert "the libraries chatter" in honed.machine.read(f"/var/lib/honed/jobs/{job}/attempts/1/worker.log")


def test_a_restart_of_honed_leaves_its_job_alone_and_counts_all_that_it_told(honed: Honed) -> None:
    job = honed.drop("until-80")
    honed.wait_step(job)
    pid, daemon_pid = honed.worker_pid(job), honed.machine.main_pid("honed")
    honed.machine.run("systemctl", "restart", "honed")
    assert honed.machine.main_pid("honed") != daemon_pid
    assert honed.worker_pid(job) == pid
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    assert (entry["outcome"], len(entry["attempts"]), honed.starts(job)) == ("succeeded", 1, 1)
    assert honed.steps_counted(job) == list(range(1, 81))


def test_the_next_job_waits_in_its_own_unit_and_a_restart_of_honed_stages_it_again(honed: Honed) -> None:
    first = honed.drop("until.first")
    honed.wait_step(first)
    second = honed.drop("succeed.second")
    unit = f"honed-job@{second}"
    wait_for(lambda: honed.machine.property(unit, "StatusText") == "staged", what="a staged unit")
    pid = honed.worker_pid(second)
    honed.machine.run("systemctl", "restart", "honed")
    third = honed.drop("succeed.third")  # honed is up again
    wait_for(lambda: honed.wait(second, "queued")["num_staged"] == 2, what="it is staged again")
    wait_for(lambda: honed.machine.property(unit, "StatusText") == "staged", what="a staged unit")
    assert honed.wait(second, "queued")["attempts"] == []
    assert honed.worker_pid(second) != pid
    honed.go(first)
    entry = honed.wait(second, "succeeded")
    assert [(each["number"], each["staged_at"] is not None) for each in entry["attempts"]] == [(1, True)]
    assert honed.starts(second) == 1
    honed.wait(third, "succeeded")


def test_a_staged_unit_ends_with_its_job_and_one_that_somebody_stops_costs_no_attempt(honed: Honed) -> None:
    first = honed.drop("until.first")
    honed.wait_step(first)
    second = honed.drop("succeed.second")
    unit = f"honed-job@{second}"
    wait_for(lambda: honed.machine.property(unit, "StatusText") == "staged", what="a staged unit")
    honed.honectl("hold", str(second))
    honed.machine.wait_property(unit, "ActiveState", "inactive", "failed")
    assert honed.wait(second, "held")["attempts"] == []
    honed.honectl("release", str(second))
    wait_for(lambda: honed.machine.property(unit, "StatusText") == "staged", what="a staged unit")
    honed.machine.run("systemctl", "stop", unit)
    honed.go(first)
    entry = honed.wait(second, "succeeded", "failed", "held")
    assert (entry["state"], len(entry["attempts"]), honed.starts(second)) == ("succeeded", 1, 1)


def test_a_job_that_ends_while_honed_is_stopped_is_settled_when_it_comes_back(honed: Honed) -> None:
    job = honed.drop("until-20")
    honed.wait_step(job)
    honed.machine.run("systemctl", "stop", "honed")
    honed.go(job)
    honed.machine.wait_property(f"honed-job@{job}", "ActiveState", "inactive")
    honed.machine.run("systemctl", "start", "honed")
    assert honed.wait(job, "succeeded", "failed")["outcome"] == "succeeded"
    assert honed.steps_counted(job) == list(range(1, 21))


@pytest.mark.parametrize("damaged", [[], ["entry.json"], ["entry.json", "start.json", "plan.json"]], ids=len)
def test_a_unit_whose_entry_is_damaged_is_followed_to_its_end(honed: Honed, damaged: list[str]) -> None:
    job = honed.drop("until-40")
    honed.wait_step(job)
    pid = honed.worker_pid(job)
    honed.machine.run("systemctl", "stop", "honed")
    for path in [f"/var/spool/honed/running/{job}.json", *(f"/var/lib/honed/jobs/{job}/{name}" for name in damaged)]:
        honed.machine.run("truncate", "--size=20", path)
    honed.machine.run("systemctl", "start", "honed")
    entry = honed.machine.entries()[job]
    assert (entry["state"], entry["attempts"][0]["device"]) == (
        "running",
        "unknown" if "start.json" in damaged else "cpu",
    )
    assert entry["name"] == ("until-40" if len(damaged) < 3 else f"job-{job}")
    assert honed.worker_pid(job) == pid
    status = wait_for(lambda: honed.machine.property("honed", "StatusText"), what="a status")
    assert "degraded: 1 damaged entry in /var/spool/honed/corrupt: honectl doctor" in status
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    assert (entry["outcome"], len(entry["attempts"]), honed.starts(job)) == ("succeeded", 1, 1)
    honed.machine.sh("rm /var/spool/honed/corrupt/*")
    wait_for(lambda: "degraded" not in honed.machine.property("honed", "StatusText"), what="no word of it")


def test_a_freeze_of_honed_and_its_jobs_costs_a_job_nothing(honed: Honed) -> None:
    """The watchdogs of both pass meanwhile: systemd's clock goes on."""
    job = honed.drop("until-80", time_limit_sec=600.0)
    honed.wait_step(job)
    honed.machine.run("systemctl", "freeze", "honed.slice")
    try:
        assert honed.machine.property("honed.slice", "FreezerState") == "frozen"
        until = time.monotonic() + 3 * MIN_PAUSE_SEC
        wait_for(lambda: time.monotonic() >= until, what="the end of the freeze")
    finally:
        honed.machine.run("systemctl", "thaw", "honed.slice")
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    outcomes = [each["outcome"] for each in entry["attempts"]]
    assert (entry["outcome"], entry["num_failures"]) == ("succeeded", 0)
    assert {*outcomes[:-1]} <= {"interrupted"}, outcomes
    first = entry["attempts"][0]
    assert first["took_sec"] < first["ended_at"] - first["started_at"] - 2 * MIN_PAUSE_SEC


def test_ten_kills_of_honed_cost_a_job_nothing(honed: Honed) -> None:
    job = honed.drop("until-400")
    honed.wait_step(job)
    for _ in range(10):
        before = honed.machine.main_pid("honed")
        honed.machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "honed")
        wait_for(lambda: honed.machine.main_pid("honed") not in {0, before}, what="another honed")  # noqa: B023
        honed.machine.wait_property("honed", "ActiveState", "active")
    assert honed.machine.entries()[job]["state"] == "running"
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    assert (entry["outcome"], len(entry["attempts"]), honed.starts(job)) == ("succeeded", 1, 1)
    assert honed.steps_counted(job) == list(range(1, 401))


def test_a_loop_that_hangs_is_restarted_and_no_job_is_lost(honed: Honed) -> None:
    job = honed.drop("slow-200")
    honed.wait_step(job)
    before = honed.machine.main_pid("honed")
    honed.machine.run("kill", "-STOP", before)
    honed.machine.wait_message("Watchdog timeout", "--unit=honed")
    honed.machine.wait_message("Fatal Python error: Aborted", "--unit=honed")
    wait_for(lambda: honed.machine.main_pid("honed") not in {0, before}, what="another honed")
    entry = honed.wait(job, "succeeded", "failed")
    assert (entry["outcome"], len(entry["attempts"])) == ("succeeded", 1)
    assert honed.steps_counted(job) == list(range(1, 201))


def test_a_worker_that_hangs_leaves_its_stacks_in_the_journal_and_is_stalled(honed: Honed) -> None:
    job = honed.drop("slow-4000", retry={"max_attempts": 1})
    honed.wait_step(job)
    honed.machine.run("kill", "-STOP", honed.worker_pid(job))
    entry = honed.wait(job, "failed", "succeeded")
    assert (entry["outcome"], entry["error"]["code"]) == ("stalled", "stalled")
    lines = honed.machine.journal(f"--unit=honed-job@{job}", f"HONED_JOB={job}", "--priority=warning")
    stacks = [line["MESSAGE"] for line in lines]
    assert "Fatal Python error: Aborted" in stacks
    assert any("fakeworker.py" in line and "in steps" in line for line in stacks)
    assert "in steps" in honed.machine.read(f"/var/lib/honed/jobs/{job}/attempts/1/worker.log")


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_told_so(honed: Honed) -> None:
    job = honed.drop("eat", retry={"max_attempts": 1, "on_out_of_memory": "fail"})
    honed.wait_step(job)
    cgroup = Path(f"/sys/fs/cgroup/memory/honed-test-{os.getpid()}")
    if not cgroup.parent.is_dir():
        pytest.skip("needs a version 1 memory cgroup")
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(128 * 2**20))
        (cgroup / "cgroup.procs").write_text(str(honed.machine.host_pid(honed.worker_pid(job))))
        honed.machine.run("touch", f"/var/lib/honed/jobs/{job}/eat")
        entry = honed.wait(job, "failed", "succeeded")
    finally:
        cgroup.rmdir()
    assert entry["outcome"] == "out_of_memory"
    assert "the kernel's out-of-memory killer" in entry["error"]["message"]


def test_a_hostile_worker_neither_holds_honed_up_nor_passes_for_ended(honed: Honed) -> None:
    """The worker replaces its files with pipes, and forges an exit.json unknown to systemd; honed's own files stay."""
    job = honed.drop("until-60")
    honed.wait_step(job)
    pid, job_dir = honed.machine.main_pid("honed"), f"/var/lib/honed/jobs/{job}"
    end = json.dumps({"start": 1, "status": 0, "service_result": "success"})
    honed.machine.sh(
        f"cd {job_dir}/attempts/1 && rm events.jsonl && mkfifo events.jsonl result.json "
        f"{job_dir}/.start.json.tmp && echo '{end}' >exit.json",
        user="honed-job",
    )
    for name in ("plan.json", "start.json", "spec.json"):
        assert honed.machine.try_run("rm", "-f", f"{job_dir}/{name}", user="honed-job").returncode != 0, name
    honed.machine.wait_message("its events cannot be read", "--unit=honed")
    honed.machine.wait_message(f"job {job}: its worker reported its end", "--unit=honed")
    assert honed.machine.entries()[job]["state"] == "running"
    honed.machine.run("systemctl", "kill", "--signal=KILL", f"honed-job@{job}")
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["killed", "succeeded"]
    assert honed.machine.main_pid("honed") == pid


def test_a_worker_that_dies_is_followed_by_another_at_once(honed: Honed) -> None:
    job = honed.drop("die-6")
    entry = honed.wait(job, "succeeded", "failed")
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["killed", "succeeded"]


def test_a_unit_that_systemd_does_not_start_leaves_its_job_where_it_was(honed: Honed) -> None:
    unit = f"honed-job@{max(honed.machine.entries()) + 1}"
    honed.machine.run("systemctl", "mask", "--runtime", unit)
    job = honed.drop("succeed")
    honed.machine.wait_message(f"systemd did not start {unit}", "--unit=honed")
    entry = honed.wait(job, "queued", "failed")
    assert (entry["state"], entry["attempts"]) == ("queued", [])
    honed.machine.run("systemctl", "unmask", "--runtime", unit)
    entry = honed.wait(job, "succeeded", "failed")
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["succeeded"]


def test_a_unit_that_cannot_start_its_worker_fails_its_job_and_says_where_to_look(honed: Honed) -> None:
    dropin = "/etc/systemd/system/honed-job@.service.d/wrong.conf"
    honed.machine.write(dropin, "[Service]\nInaccessiblePaths=/nowhere\n")
    honed.machine.run("systemctl", "daemon-reload")
    entry = honed.wait(honed.drop("succeed"), "succeeded", "failed")
    honed.machine.run("rm", dropin)
    honed.machine.run("systemctl", "daemon-reload")
    assert entry["outcome"] == "environment_invalid"
    assert "its unit could not start the worker" in entry["error"]["message"]


def test_a_bus_that_is_restarted_costs_nothing(honed: Honed) -> None:
    job = honed.drop("until-40")
    honed.wait_step(job)
    honed.machine.run("systemctl", "restart", "dbus.service")
    honed.go(job)
    assert honed.wait(job, "succeeded", "failed")["outcome"] == "succeeded"
    assert honed.wait(honed.drop("succeed"), "succeeded", "failed")["outcome"] == "succeeded"


def test_a_worker_that_somebody_kills_is_killed(honed: Honed) -> None:
    job = honed.drop("slow-4000", retry={"max_attempts": 1})
    honed.wait_step(job)
    honed.machine.run("systemctl", "kill", "--signal=KILL", f"honed-job@{job}")
    entry = honed.wait(job, "failed", "succeeded")
    assert (entry["outcome"], entry["error"]["message"]) == ("killed", "the worker was killed by SIGKILL")


def test_a_stop_of_its_unit_has_a_job_write_its_checkpoint_however_long_and_be_held(honed: Honed) -> None:
    job = honed.drop("slow-4000-5")  # the unit's TimeoutStopSec= is 4 s
    honed.wait_step(job)
    honed.machine.run("systemctl", "stop", f"honed-job@{job}")
    entry = honed.wait(job, "held", "queued", "failed")
    assert (entry["state"], entry["outcome"]) == ("held", "interrupted")
    assert entry["attempts"][0]["step"] > 0
    honed.honectl("cancel", str(job))


def test_a_worker_that_does_not_stop_is_killed_after_the_stop_timeout_and_its_job_held(honed: Honed) -> None:
    honed.machine.write("/etc/honed/honed.toml", CONFIG + "stop_timeout_sec = 1.0\n")
    honed.machine.run("systemctl", "reload", "honed")
    honed.machine.wait_message("configuration reloaded", "--unit=honed")
    job = honed.drop("deaf-4000")
    honed.wait_step(job)
    honed.machine.run("systemctl", "stop", f"honed-job@{job}")
    assert honed.wait(job, "held", "queued", "failed")["state"] == "held"
    honed.machine.write("/etc/honed/honed.toml", CONFIG)
    honed.machine.run("systemctl", "reload", "honed")
    honed.honectl("cancel", str(job))


def test_a_job_that_is_cancelled_is_cancelled(honed: Honed) -> None:
    job = honed.drop("slow-4000")
    honed.wait_step(job)
    honed.honectl("cancel", str(job))
    assert honed.wait(job, "cancelled")["outcome"] == "cancelled"
    honed.machine.wait_property(f"honed-job@{job}", "ActiveState", "inactive")


def test_a_job_on_a_device_that_is_drained_at_once_is_queued_and_a_restart_keeps_the_drain(honed: Honed) -> None:
    job_id = honed.drop("slow-4000.drained")
    honed.wait_step(job_id)
    honed.honectl("drain", "all", "--now", "--reason", "a new fan")
    entry = honed.wait(job_id, "queued")
    assert (entry["num_failures"], entry["outcome"], entry["stop"]) == (0, "interrupted", None)
    assert entry["attempts"][0]["preemption"]["reason"].endswith(" was drained: a new fan")
    honed.machine.run("systemctl", "restart", "honed")
    wait_for(lambda: "drained: a new fan" in honed.machine.property("honed", "StatusText"), what="still drained")
    honed.honectl("undrain", "all")
    assert honed.wait(job_id, "running", "succeeded")["attempts"][1]["number"] == 2
    honed.honectl("cancel", str(job_id))
    honed.wait(job_id, "cancelled", "succeeded")


def test_a_stop_of_the_slice_waits_until_checkpoints_are_written(honed: Honed) -> None:
    job = honed.drop("slow-4000-3")
    honed.wait_step(job)
    honed.machine.run("systemctl", "stop", "honed-jobs.slice")
    result = honed.machine.read_json(f"/var/lib/honed/jobs/{job}/attempts/1/result.json")
    assert result["outcome"] == "interrupted"
    assert honed.wait(job, "held", "queued", "failed")["state"] == "held"
    honed.honectl("cancel", str(job))


def test_honed_may_be_told_to_stop_its_jobs_with_it(honed: Honed) -> None:
    honed.machine.write("/etc/honed/honed.toml", CONFIG + 'on_stop = "checkpoint"\n')
    honed.machine.run("systemctl", "reload", "honed")
    job = honed.drop("slow-4000-1")
    honed.wait_step(job)
    honed.machine.run("systemctl", "stop", "honed")
    assert honed.machine.entries()[job]["state"] == "queued"
    assert honed.machine.entries()[job]["num_failures"] == 0
    honed.machine.write("/etc/honed/honed.toml", CONFIG)
    honed.machine.run("systemctl", "start", "honed")
    honed.wait(job, "running")
    honed.honectl("cancel", str(job))
    honed.wait(job, "cancelled")


def test_a_shutdown_checkpoints_and_the_job_goes_on_after_the_boot(honed: Honed) -> None:
    job = honed.drop("until-160-1")
    honed.wait_step(job)
    honed.machine.reboot()
    wait_for(lambda: len(honed.machine.entries()[job]["attempts"]) == 2, what="its second attempt")
    honed.wait_step(job)
    honed.machine.run("systemctl", "stop", "honed")  # only the unit itself can report its end
    honed.machine.reboot()
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed", "held")
    outcomes = [attempt["outcome"] for attempt in entry["attempts"]]
    assert (entry["state"], entry["num_failures"]) == ("succeeded", 0)
    assert outcomes == ["interrupted", "interrupted", "succeeded"]
    assert honed.steps_counted(job) == list(range(1, 161))


def test_without_the_polkit_rule_workers_are_processes_and_units_that_run_are_taken_over(honed: Honed) -> None:
    job = honed.drop("until-60")
    honed.wait_step(job)
    honed.machine.run("mv", "/usr/share/polkit-1/rules.d/50-honed.rules", "/root")
    honed.machine.run("systemctl", "restart", "honed")
    said = honed.machine.wait_message("workers run as child processes of honed", "--unit=honed")
    assert "polkit does not allow this user" in said["MESSAGE"]
    assert said["PRIORITY"] == "4"
    honed.go(job)
    entry = honed.wait(job, "succeeded", "failed")
    assert (entry["outcome"], len(entry["attempts"]), honed.starts(job)) == ("succeeded", 1, 1)
