"""A worker lives and its entry is damaged, before honed starts or while it runs: one worker, one device, a word of it,
and a way out."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Instance, is_alive
from notified import Notified

from honed.cli import doctor
from honed.job.job import Job, State
from honed.run.process import ProcessRunner
from honed.system.layout import JobLayout
from waiting import wait_for


@pytest.fixture
def instance(instance: Instance) -> Instance:
    """Its shims are processes of their own, as the machine shows them: none is forked from a warm one, and none is of a
    job that waits."""
    instance.environment["HONED_TEST_COLD_WORKERS"] = "1"
    instance.configure("[spool]\nsettle_sec = 0.3\nrescan_interval_sec = 0.3\n[jobs]\nstage_ahead = false\n")
    return instance


def start_slow(instance: Instance, name: str) -> tuple[Job, int]:
    """Start honed and a job that trains for a while. Returns the job and its worker's pid."""
    instance.drop(name)
    instance.start()
    job = instance.wait_state(name, State.RUNNING)
    wait_for(lambda: instance.show(name)["progress"]["step"], what="a step")
    return job, worker_pid(instance.layout.job(job.id))


def let_end(instance: Instance) -> None:
    """Let the job `until-40` take its last step: until then its worker lives, however slow the machine is."""
    (instance.layout.job(1).dir / "go").touch()


def worker_pid(files: JobLayout) -> int:
    return int(json.loads((files.attempt(1).dir / "lock").read_text())["worker_pid"])


def workers(instance: Instance) -> list[int]:
    """Return the pids of all shims of the instance."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(word.endswith("shim.py") for word in words) and str(instance.layout.jobs_dir) in " ".join(words):
                found.append(int(path.name))
    return found


def status(instance: Instance) -> str:
    return str(instance.client.ask("status")["status"])


def degraded(instance: Instance) -> bool:
    [entries] = [each for each in doctor.examine(instance.layout, imports=False) if each.check == "entries"]
    return entries.status == "error"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def entry_alone(_instance: Instance, _files: JobLayout) -> None:
    pass


def its_copy(_instance: Instance, files: JobLayout) -> None:
    cut(files.entry_path)


def its_plan(_instance: Instance, files: JobLayout) -> None:
    cut(files.entry_path)
    cut(files.plan_path)


@pytest.mark.parametrize(
    ("more", "name"),
    [(entry_alone, "until-40"), (its_copy, "until-40"), (its_plan, "job-1")],
    ids=["entry", "copy", "plan"],
)
def test_a_worker_whose_entry_is_damaged_is_followed_on_its_device_to_its_end(
    instance: Instance, more: Callable[[Instance, JobLayout], None], name: str
) -> None:
    job, pid = start_slow(instance, "until-40")
    files = instance.layout.job(job.id)
    instance.kill(signal.SIGKILL)
    cut(instance.layout.spool_dir / "running/1.json")
    more(instance, files)
    instance.drop("succeed.other")
    instance.start()
    assert worker_pid(files) == pid
    assert is_alive(pid)
    assert len(workers(instance)) == 1
    rebuilt = instance.job(name)
    assert rebuilt is not None
    assert (rebuilt.id, rebuilt.state, rebuilt.uid, rebuilt.attempt.number) == (1, State.RUNNING, os.getuid(), 1)
    assert rebuilt.attempt.device == "cpu"
    assert degraded(instance)
    assert (instance.layout.spool_dir / "corrupt/1.running.json.reason").exists()
    let_end(instance)
    done = instance.wait_state(name, State.SUCCEEDED)
    assert [attempt.outcome for attempt in done.attempts] == ["succeeded"]
    other = instance.wait_state("succeed.other", State.SUCCEEDED)
    assert other.attempt.started_at >= (done.attempt.ended_at or 0), "the device was its worker's until then"


def test_it_can_be_cancelled_and_the_way_out_is_told(instance: Instance) -> None:
    job, pid = start_slow(instance, "slow-4000")
    files = instance.layout.job(job.id)
    instance.kill(signal.SIGKILL)
    (instance.layout.spool_dir / "running/1.json").unlink()
    its_copy(instance, files)
    instance.start()
    assert instance.honectl("cancel", "1").returncode == 0
    instance.wait_state("slow-4000", State.CANCELLED)
    wait_for(lambda: not is_alive(pid), what="its end")
    assert "its worker lives, but its entry did not say so" in instance.log


def test_one_that_waits_and_whose_worker_lives_is_not_started_a_second_time(instance: Instance) -> None:
    """As a backup of the spool that was put back, or a person's hand, leaves it."""
    _job, pid = start_slow(instance, "until-40")
    instance.kill(signal.SIGKILL)
    running = instance.layout.spool_dir / "running/1.json"
    entry = json.loads(running.read_text())
    (instance.layout.spool_dir / "queued/1.json").write_text(json.dumps({**entry, "attempts": [], "revision": 1}))
    cut(running)
    instance.start()
    assert len(workers(instance)) == 1
    assert is_alive(pid)
    let_end(instance)
    done = instance.wait_state("until-40", State.SUCCEEDED)
    assert [attempt.number for attempt in done.attempts] == [1]


def test_a_damaged_entry_of_a_job_that_waits_costs_no_other_and_says_how_to_submit_it_again(
    instance: Instance,
) -> None:
    start_slow(instance, "until-40")
    instance.drop("succeed.waits")
    instance.wait_state("succeed.waits", State.QUEUED)
    instance.kill(signal.SIGKILL)
    cut(instance.layout.spool_dir / "queued/2.json")
    instance.start()
    let_end(instance)
    instance.wait_state("until-40", State.SUCCEEDED)
    corrupt = instance.layout.spool_dir / "corrupt"
    assert degraded(instance)
    reason = (corrupt / "2.queued.json.reason").read_text()
    spec = instance.layout.job(2).spec_path
    assert f"honectl submit {spec.parent}/spec.*" in reason
    again = shutil.copy(spec, instance.root / "succeed.again.json")  # our worker does what its job's name says
    assert instance.honectl("submit", "--wait", str(again)).returncode == 0
    for path in corrupt.iterdir():
        path.unlink()
    assert not degraded(instance)


def test_whoever_waits_for_honed_to_be_ready_reads_that_it_is_degraded(instance: Instance) -> None:
    start_slow(instance, "until-40")
    instance.kill(signal.SIGKILL)
    cut(instance.layout.spool_dir / "running/1.json")
    with contextlib.closing(Notified(instance.root / "notify")) as systemd:
        instance.environment["NOTIFY_SOCKET"] = str(systemd.path)
        instance.start()
    assert "STATUS=degraded: 1 damaged entry" in systemd.messages[systemd.messages.index("READY=1") - 1]


def gone(entry: Path) -> None:
    entry.unlink()


def a_directory(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


def an_older_one(entry: Path) -> None:
    document = json.loads(entry.read_bytes())
    entry.write_text(json.dumps({**document, "revision": 0, "name": "older"}))


@pytest.mark.parametrize("damage", [gone, cut, a_directory, an_older_one])
def test_an_entry_that_is_damaged_while_honed_runs_is_written_again_and_its_worker_followed(
    instance: Instance, damage: Callable[[Path], None]
) -> None:
    entry = instance.layout.spool_dir / "running/1.json"
    with contextlib.closing(Notified(instance.root / "notify")) as systemd:
        instance.environment["NOTIFY_SOCKET"] = str(systemd.path)
        job, pid = start_slow(instance, "slow-4000")
        damage(entry)
        wait_for(lambda: "STATUS=degraded: 1 damaged entry" in systemd.said(), what="a word of it")
    wait_for(lambda: instance.job("slow-4000"), what="its entry")
    assert degraded(instance)
    assert "the entry was written again" in (instance.layout.spool_dir / "corrupt/1.running.json.reason").read_text()
    instance.drop("succeed.other")
    instance.wait_state("succeed.other", State.QUEUED)
    instance.kill(signal.SIGKILL)
    del instance.environment["NOTIFY_SOCKET"]
    instance.start()
    assert (worker_pid(instance.layout.job(job.id)), is_alive(pid), len(workers(instance))) == (pid, True, 1)
    assert instance.wait_state("succeed.other", State.QUEUED).attempts == ()
    assert instance.honectl("cancel", "1").returncode == 0
    assert instance.wait_state("slow-4000", State.CANCELLED).attempt.number == 1
    wait_for(lambda: not is_alive(pid), what="its end")
    instance.wait_state("succeed.other", State.SUCCEEDED)


def test_a_worker_that_honed_has_not_started_keeps_its_device_and_can_be_cancelled(instance: Instance) -> None:
    """As a start leaves one of which honed was told that it failed."""
    instance.start()
    instance.client.ask("pause")
    instance.drop("slow-4000")
    job = instance.wait_state("slow-4000", State.QUEUED)
    worker = [sys.executable, str(Path(__file__).with_name("fakeworker.py"))]
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: object, **keys: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*arguments, **keys))  # type: ignore[call-overload]
        return started[0]

    stranger = ProcessRunner(instance.layout, command=worker, popen=popen)
    stranger.start(job.id, 1, 1, backend="transformers", environment={"CUDA_VISIBLE_DEVICES": ""})
    found = instance.wait_state("slow-4000", State.RUNNING)
    assert (found.attempt.number, found.attempt.device, found.output_dir) == (1, "cpu", job.output_dir)
    wait_for(lambda: "its worker lives, but its entry did not say so" in instance.log, what="a word of it")
    assert degraded(instance)
    instance.client.ask("resume")
    instance.drop("succeed.other")
    instance.wait_state("succeed.other", State.QUEUED)
    wait_for(lambda: instance.show("slow-4000")["progress"]["step"], what="its steps are followed")
    assert len(workers(instance)) == 1
    assert instance.honectl("cancel", "1").returncode == 0
    instance.wait_state("slow-4000", State.CANCELLED)
    instance.wait_state("succeed.other", State.SUCCEEDED)
    started[0].wait(timeout=300)
