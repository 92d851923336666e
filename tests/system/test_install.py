"""From nothing to a trained model with systemctl and journalctl, and back. To be read, and run, in order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from machine import CHECKOUT, ENVIRONMENT, Machine

from honed import __version__
from waiting import wait_for

pytestmark = pytest.mark.systemd

INSTALL = (f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
#: The version that follows.
NEXT = "99.0.0"
INCOMING = "/var/spool/honed/incoming"
#: The number of the job `long`: the rejected file before it took one, too.
LONG = 3


def spec(name: str, num_steps: int, **training: Any) -> str:
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
                "learning_rate": 0.01,
                "logging_steps": 1,
                **training,
            },
        }
    )


def drop(machine: Machine, user: str, name: str, num_steps: int, **training: Any) -> None:
    """Drop a job as a person does: a file in the user's home, and `cp`."""
    machine.write(f"/home/{user}/{name}.json", spec(name, num_steps, **training), user=user)
    machine.run("cp", f"/home/{user}/{name}.json", INCOMING, user=user)


def show(machine: Machine, name: str, *, user: str = "root") -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(machine.run("honectl", "show", "--json", name, user=user))
    return shown


def wait_for_job(machine: Machine, name: str, *states: str) -> dict[str, Any]:
    def reached() -> bool:
        assert not (refused := machine.refusal(name)), refused
        job = machine.jobs().get(name, {"state": None})
        assert job["state"] in states or job["state"] not in {"failed", "cancelled"}, job
        return job["state"] in states

    wait_for(reached, what=f"{name} in {states}", deadline_sec=400)
    return show(machine, name)


def wait_for_step(machine: Machine, name: str, step: int) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        job = wait_for_job(machine, name, "queued", "running", "succeeded")
        return job if (job["progress"]["step"] or 0) >= step else None

    found = wait_for(reached, what=f"step {step} of {name}", deadline_sec=400)
    assert found is not None
    return found


def steps(machine: Machine, number: int) -> list[int]:
    """Return the steps that a job's first attempt reported, in order."""
    text = machine.read(f"/var/lib/honed/jobs/{number}/attempts/1/events.jsonl")
    events = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


def worker_pid(machine: Machine, number: int) -> int:
    pid: int = machine.read_json(f"/var/lib/honed/jobs/{number}/attempts/1/lock")["worker_pid"]
    return pid


# -- install ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_everything_and_does_nothing(machine: Machine) -> None:
    said = machine.run(*INSTALL, "--dry-run")
    assert "/usr/lib/systemd/system/honed-job@.service" in said
    assert "/usr/share/polkit-1/rules.d/50-honed.rules" in said
    assert not machine.exists("/opt/honed")
    assert not machine.exists("/etc/honed")


def test_the_install_can_be_run_again_and_keeps_the_configuration(machine: Machine) -> None:
    machine.run(*INSTALL)
    machine.write("/etc/honed/honed.toml", "[jobs]\nretry_delay_sec = 1\n")
    again = machine.run(*INSTALL)
    assert "/etc/honed/honed.toml: kept as it is" in again
    assert f"/opt/honed/{__version__}: there already" in again
    assert "honed.service\n" not in again.replace("try-restart", "").split("daemon-reload")[0]
    assert machine.read("/etc/honed/honed.toml") == "[jobs]\nretry_delay_sec = 1\n"
    assert "no metrics API is configured" in machine.try_run("honed-send", "--again").stderr


def test_a_package_gets_its_files_below_destdir_and_nothing_else_happens(machine: Machine) -> None:
    before = machine.sh("find /etc /opt /usr -name '*honed*' | sort")
    machine.run("env", "DESTDIR=package", *INSTALL, cwd="/srv")
    first_line = machine.sh(f"head -n 1 /srv/package/opt/honed/{__version__}/bin/honectl")
    assert first_line == f"#!/opt/honed/{__version__}/bin/python\n"
    assert machine.sh("cd /srv/package && grep -rl /srv/package . || true") == ""
    for name in ("honed", "honectl", "honed-send", "honed-web"):  # those that the manual tells to type
        there = machine.run("readlink", f"/srv/package/usr/local/bin/{name}")
        assert there == f"/opt/honed/current/bin/{name}\n"
        assert machine.exists(f"/srv/package/opt/honed/{__version__}/bin/{name}")
    for name in ("honed.metrics-token", "honed.wandb-key", "honed.web-token", "hf-token", "another"):
        machine.write(f"/srv/package/etc/credstore/{name}", "secret\n", mode=0o600)
    said = machine.run(*INSTALL, "--destdir", "/srv/package", "--uninstall")
    assert "/etc/credstore/honed.web-token; --purge removes that, too" in said
    said = machine.run(*INSTALL, "--destdir", "/srv/package", "--uninstall", "--purge")
    assert "kept: /etc/credstore/hf-token, which may be others', too" in said
    left = machine.sh("cd /srv/package && find . ! -type d | sort")
    assert left.split() == ["./etc/credstore/another", "./etc/credstore/hf-token"]
    assert machine.sh("find /etc /opt /usr -name '*honed*' | sort") == before


def test_systemd_finds_no_fault_in_any_unit(machine: Machine) -> None:
    units = machine.sh("cd /usr/lib/systemd/system && ls -d honed*").split()
    instances = [unit.replace("@.", "@1.") for unit in units if not unit.endswith(".d")]
    done = machine.try_run("systemd-analyze", "verify", "--man=no", *instances)
    assert (done.returncode, done.stderr) == (0, "")


# -- run --------------------------------------------------------------------------------------------------------------


def test_systemctl_starts_honed_which_is_ready_and_says_so(machine: Machine, model: str) -> None:
    machine.run("systemctl", "enable", "--now", "honed")
    assert machine.property("honed", "ActiveState") == "active"
    machine.wait_property("honed", "StatusText", "idle; 0 queued")
    assert machine.show("honed", "User", "Slice") == {"User": "honed", "Slice": "honed.slice"}
    assert "workers are units" in "\n".join(machine.messages("--unit=honed"))
    assert machine.run("systemctl", "is-system-running").strip() == "running"


def test_a_member_of_honed_submit_drops_a_file_and_has_a_trained_model(machine: Machine) -> None:
    machine.add_user("anna", "honed-submit")
    drop(machine, "anna", "capitals", 30, dataloader_num_workers=1)
    job = wait_for_job(machine, "capitals", "succeeded")
    assert job["id"] == 1
    assert job["attempts"][0]["outcome"] == "succeeded"
    assert steps(machine, 1) == list(range(1, 31))
    # She can read the job's output without honed, and nobody else can.
    machine.run("test", "-r", f"{job['artifacts']['output_dir']}/adapter_model.safetensors", user="anna")
    machine.add_user("berta", "honed-submit")
    assert machine.try_run("ls", "/var/lib/honed/jobs/1", user="berta").returncode != 0


def test_who_is_not_in_the_group_drops_nothing(machine: Machine) -> None:
    machine.add_user("carl")
    machine.write("/home/carl/mine.json", spec("mine", 1), user="carl")
    done = machine.try_run("cp", "/home/carl/mine.json", INCOMING, user="carl")
    assert "Permission denied" in done.stderr


def test_the_journal_tells_the_job_from_begin_to_end(machine: Machine) -> None:
    """Entries are found by field; the output of the worker and its libraries, which may contain rows, is not in it."""
    of_daemon = machine.journal("HONED_JOB=1", "--unit=honed")
    assert any(entry.get("HONED_STATE") == "succeeded" for entry in of_daemon)
    assert machine.journal("_SYSTEMD_UNIT=honed-job@1.service") == []


def test_journalctl_explains_a_refusal(machine: Machine) -> None:
    machine.write("/home/anna/broken.yaml", "base_model: /srv/models/tiny\nlearning_rate: 1\n", user="anna")
    machine.run("cp", "/home/anna/broken.yaml", INCOMING, user="anna")
    wait_for(
        lambda: "Subject:" in machine.run("journalctl", "-x", "-p", "warning", "--unit=honed", "--no-pager"),
        what="an explanation",
    )


# -- reload, stop, start ----------------------------------------------------------------------------------------------


def test_a_running_job_shows_step_and_loss_in_systemctl_status(machine: Machine) -> None:
    drop(machine, "anna", "long", 150)
    events = machine.host_path(f"/var/lib/honed/jobs/{LONG}/attempts/1/events.jsonl")
    wait_for(lambda: events.exists() and 3 in steps(machine, LONG), what="step 3", deadline_sec=400)
    # However long an installation takes, the job is still running after it.
    machine.run("kill", "-STOP", str(worker_pid(machine, LONG)))
    wait_for_step(machine, "long", 3)
    assert "step" in machine.property(f"honed-job@{LONG}", "StatusText")
    # Without its name, as everybody reads it; at the end of the turn in which honed has heard of the step.
    wait_for(lambda: f"running job {LONG}" in machine.property("honed", "StatusText"), what="the job in honed's status")


def test_reload_takes_a_changed_configuration_and_refuses_a_broken_one(machine: Machine) -> None:
    machine.write("/etc/honed/honed.toml.d/50-local.toml", "[jobs]\nretry_delay_sec = 2\n")
    machine.run("systemctl", "reload", "honed")
    machine.wait_message("configuration reloaded", "--unit=honed")
    machine.write("/etc/honed/honed.toml.d/50-local.toml", "[jobs]\nretry_delay = 2\n")
    machine.run("systemctl", "reload", "honed")
    wait_for(lambda: "retry_delay" in machine.property("honed", "StatusText"), what="the fault in the status")
    machine.write("/etc/honed/honed.toml.d/50-local.toml", "")
    machine.run("systemctl", "reload", "honed")
    wait_for(lambda: "retry_delay" not in machine.property("honed", "StatusText"), what="a status without a fault")
    assert machine.property(f"honed-job@{LONG}", "ActiveState") == "active"


def test_an_upgrade_leaves_a_running_job_to_its_worker(machine: Machine) -> None:
    """New files lie beside the old ones: the same process continues, and no step is lost or reported twice."""
    before = worker_pid(machine, LONG)
    # Not all of the checkout, where there may be gigabytes of environments.
    machine.sh(
        f"mkdir /srv/next && cd {CHECKOUT} && cp -r *.toml *.txt README.md daemon docs etc scripts units /srv/next"
    )
    machine.sh(f"sed -i 's/^version = .*/version = \"{NEXT}\"/' /srv/next/pyproject.toml")
    machine.sh(f"""sed -i 's/"{__version__}"/"{NEXT}"/' /srv/next/daemon/honed/__init__.py""")
    said = machine.run("/srv/next/scripts/install", "--environment", ENVIRONMENT)
    assert f"/opt/honed/{__version__}: kept" in said
    assert machine.run("honed", "--version").strip() == f"honed {NEXT}"
    machine.wait_message(f"honed {NEXT} ready", "--unit=honed")
    assert machine.property(f"honed-job@{LONG}", "ActiveState") == "active"
    assert worker_pid(machine, LONG) == before
    assert machine.run("readlink", f"/proc/{before}/cwd").strip() == f"/var/lib/honed/jobs/{LONG}"


def test_stopping_honed_leaves_the_job_and_starting_it_takes_it_over(machine: Machine) -> None:
    before = worker_pid(machine, LONG)
    machine.run("systemctl", "stop", "honed")
    assert machine.property(f"honed-job@{LONG}", "ActiveState") == "active"
    machine.run("systemctl", "start", "honed")
    assert worker_pid(machine, LONG) == before
    machine.run("kill", "-CONT", str(before))
    job = wait_for_job(machine, "long", "succeeded")
    assert [attempt["number"] for attempt in job["attempts"]] == [1]
    assert steps(machine, LONG) == list(range(1, 151))


def test_the_next_install_removes_what_nothing_runs_from(machine: Machine) -> None:
    said = machine.run("/srv/next/scripts/install", "--environment", ENVIRONMENT)
    assert f"remove /opt/honed/{__version__}" in said
    machine.sh("echo '# changed' >>/srv/next/daemon/honed/__init__.py")
    machine.run("/srv/next/scripts/install", "--environment", ENVIRONMENT)
    assert machine.run("readlink", "/opt/honed/current").startswith(f"{NEXT}+")


# -- for oneself -------------------------------------------------------------------------------------------------------


def test_one_person_runs_it_without_root(machine: Machine) -> None:
    """honed runs below a home, under `systemctl --user`; jobs are its children there, and stop with it."""
    machine.run("loginctl", "enable-linger", "berta")
    own = {"HOME": "/home/berta", "XDG_RUNTIME_DIR": f"/run/user/{machine.run('id', '-u', 'berta').strip()}"}
    own["PATH"] = "/home/berta/.local/bin:/usr/bin:/bin"
    wait_for(lambda: machine.exists(f"{own['XDG_RUNTIME_DIR']}/systemd/private"), what="berta's systemd")

    def run(*words: str) -> str:
        return machine.run(*words, user="berta", environment=own)

    run(*INSTALL, "--user")
    run("systemctl", "--user", "enable", "--now", "honed")
    assert run("systemctl", "--user", "is-active", "honed").strip() == "active"
    assert run("honectl", "--user", "list", "--json").strip() == "[]"
    machine.write("/home/berta/own.json", spec("own", 5), user="berta")
    run("honectl", "--user", "submit", "--wait", "/home/berta/own.json")
    assert machine.exists("/home/berta/.local/state/honed/jobs/1/output/adapter_model.safetensors")
    run(*INSTALL, "--user", "--uninstall", "--purge")
    assert machine.sh("find /home/berta -name '*honed*'") == ""


# -- away -------------------------------------------------------------------------------------------------------------


def test_uninstalling_keeps_jobs_and_configuration(machine: Machine) -> None:
    said = machine.run("/srv/next/scripts/install", "--uninstall")
    assert "kept: /etc/honed, /var/spool/honed, /var/lib/honed" in said
    for path in (
        "/opt/honed",
        "/usr/local/bin/honectl",
        "/usr/local/bin/honed-send",
        "/usr/share/polkit-1/rules.d/50-honed.rules",
        "/usr/lib/systemd/system/honed.service",
        "/usr/share/doc/honed",
    ):
        assert not machine.exists(path), path
    assert machine.try_run("systemctl", "cat", "honed-job@1").returncode != 0
    assert machine.exists("/var/lib/honed/jobs/1/output/adapter_model.safetensors")


def test_installed_again_it_knows_its_jobs_and_purged_it_leaves_nothing(machine: Machine) -> None:
    machine.install()
    machine.run("systemctl", "enable", "--now", "honed")
    assert show(machine, "capitals")["state"] == "succeeded"
    machine.run(*INSTALL, "--uninstall", "--purge")
    left = machine.sh("find /etc /opt /run /usr /var -name '*honed*' -not -path '/run/systemd/*'")
    assert left == ""
    assert "honed" not in machine.read("/etc/passwd")
