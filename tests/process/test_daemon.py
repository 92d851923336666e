"""The daemon itself: it starts, stops, dies, and answers honectl."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest
from harness import DEADLINE_SEC, Instance

from honed.job.job import State
from honed.system.error import EnvironmentInvalidError, HonedError
from waiting import wait_for


def test_fifty_jobs_dropped_at_once_run_in_priority_order(instance: Instance) -> None:
    priorities = [(7 * number) % 50 for number in range(50)]
    for number, priority in enumerate(priorities):
        instance.drop(f"succeed-1.{number}", priority=priority)
    assert instance.drain() == 0
    jobs = list(instance.spool.jobs(State.SUCCEEDED))
    assert len(jobs) == 50
    by_start = sorted(jobs, key=lambda job: job.attempts[0].started_at)
    assert [job.priority for job in by_start] == sorted(priorities, reverse=True)


def test_equal_priorities_run_first_come_first_served(instance: Instance) -> None:
    for number in range(5):
        instance.drop(f"succeed-1.{number}")
    assert instance.drain() == 0
    by_start = sorted(instance.spool.jobs(State.SUCCEEDED), key=lambda job: job.attempts[0].started_at)
    assert [job.name for job in by_start] == [f"succeed-1.{number}" for number in range(5)]


def test_sigterm_checkpoints_and_requeues_and_the_next_start_resumes(instance: Instance) -> None:
    instance.drop("slow-4000")
    instance.start()
    instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: (instance.show("slow-4000")["progress"]["step"] or 0) >= 3, what="three steps")
    instance.kill(signal.SIGTERM)
    assert instance.process is not None
    assert instance.process.returncode == 0
    job = instance.job("slow-4000")
    assert job is not None
    assert (job.state, job.num_failures, job.attempt.outcome) == (State.QUEUED, 0, "interrupted")
    step = job.attempt.step
    instance.start()
    instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: any(item["event"] == "resumed" for item in instance.show("slow-4000")["events"]), what="resumed")
    assert [item["step"] for item in instance.show("slow-4000")["events"] if item["event"] == "resumed"] == [step]


def test_kill_9_of_the_daemon_leaves_the_worker_running_and_the_next_adopts_it(instance: Instance) -> None:
    instance.drop("until-60")
    instance.start()
    job = instance.wait_state("until-60", State.RUNNING)
    for _ in range(3):
        wait_for(lambda: instance.show("until-60")["progress"]["step"], what="a step")
        instance.kill(signal.SIGKILL)
        instance.start()
    instance.go("until-60")
    shown = wait_for(lambda: (found := instance.show("until-60"))["state"] == "succeeded" and found, what="success")
    assert len(shown["attempts"]) == 1
    assert len(instance.starts(job)) == 1
    import sqlite3

    db = sqlite3.connect(instance.layout.database_path)
    steps = [row[0] for row in db.execute("SELECT step FROM metrics WHERE name = 'loss' ORDER BY rowid")]
    assert steps == list(range(1, 61)), "every event once"


def test_a_worker_that_crashes_after_its_result_has_succeeded(instance: Instance) -> None:
    instance.drop("late")
    assert instance.drain() == 0
    job = instance.job("late")
    assert job is not None
    assert (job.state, len(job.attempts), len(instance.starts(job))) == (State.SUCCEEDED, 1, 1)
    assert job.remark == "its worker was killed by SIGSEGV after it had finished"


def test_a_worker_that_ended_while_the_daemon_was_dead_is_settled_by_the_next(instance: Instance) -> None:
    instance.drop("until-60")
    instance.start()
    job = instance.wait_state("until-60", State.RUNNING)
    wait_for(lambda: instance.show("until-60")["progress"]["step"], what="a step")
    instance.kill(signal.SIGKILL)
    instance.go("until-60")
    wait_for(instance.layout.job(job.id).attempt(1).exit_path.exists, what="the worker's end")
    instance.start()
    done = instance.wait_state("until-60", State.SUCCEEDED)
    assert len(done.attempts) == 1
    assert instance.show("until-60")["progress"]["step"] == 60


def test_a_worker_killed_with_its_shim_while_the_daemon_was_dead_is_tried_again(instance: Instance) -> None:
    instance.drop("slow-4000")
    instance.start()
    job = instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: instance.show("slow-4000")["progress"]["step"], what="a step")
    instance.kill(signal.SIGKILL)
    record = json.loads((instance.layout.job(job.id).attempt(1).dir / "lock").read_text())
    os.kill(record["shim_pid"], signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{record['worker_pid']}").exists(), what="the worker dies with its shim")
    instance.start()
    job = wait_for(
        lambda: (found := instance.job("slow-4000")) and len(found.attempts) == 2 and found, what="the retry"
    )
    assert job.attempts[0].outcome == "killed"
    assert job.num_failures == 1


def test_hold_release_cancel_and_requeue(instance: Instance) -> None:
    instance.drop("slow-4000")
    instance.drop("succeed-1", priority=-1)
    instance.start()
    instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: instance.show("slow-4000")["progress"]["step"], what="a step")
    instance.client.ask("hold", id="slow-4000")
    assert instance.wait_state("slow-4000", State.HELD).outcome == "interrupted"
    instance.wait_state("succeed-1", State.SUCCEEDED)
    instance.client.ask("release", id="slow-4000")
    instance.wait_state("slow-4000", State.RUNNING)
    instance.client.ask("cancel", id="slow-4000")
    instance.wait_state("slow-4000", State.CANCELLED)
    instance.client.ask("requeue", id="slow-4000")
    instance.wait_state("slow-4000", State.RUNNING)
    with pytest.raises(HonedError, match="release needs a job that is held"):
        instance.client.ask("release", id="slow-4000")


def test_a_paused_honed_starts_nothing_even_after_a_restart(instance: Instance) -> None:
    instance.start()
    instance.client.ask("pause")
    instance.drop("succeed")
    instance.wait_state("succeed", State.QUEUED)
    instance.kill(signal.SIGTERM)
    instance.start()
    time.sleep(0.5)
    job = instance.job("succeed")
    assert job is not None
    assert job.state is State.QUEUED
    instance.client.ask("resume")
    instance.wait_state("succeed", State.SUCCEEDED)


def test_a_job_waits_for_a_gpu_that_others_hold_and_sees_only_its_own(instance: Instance) -> None:
    gpus = instance.root / "gpus.json"

    def set_gpus(*free_bytes: int) -> None:
        gpus.write_text(json.dumps([{"uuid": f"GPU-{n}", "free_bytes": free} for n, free in enumerate(free_bytes)]))

    set_gpus(1 << 30, 1 << 30)  # somebody holds 79 of 80 GiB on each
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    instance.drop("succeed-1.a")
    instance.start()
    wait_for(lambda: "waiting for a GPU" in instance.log, what="the word")
    job = instance.job("succeed-1.a")
    assert job is not None
    assert job.state is State.QUEUED
    set_gpus(1 << 30, 80 << 30)
    job = instance.wait_state("succeed-1.a", State.SUCCEEDED)
    assert instance.starts(job)[0].split()[2] == "GPU-1"


def test_two_gpus_run_two_jobs_at_a_time(instance: Instance) -> None:
    gpus = instance.root / "gpus.json"
    gpus.write_text(json.dumps([{"uuid": f"GPU-{n}", "free_bytes": 80 << 30} for n in range(2)]))
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    for number in range(3):
        instance.drop(f"slow-4000.{number}")
    instance.start()
    wait_for(lambda: len(list(instance.spool.jobs(State.RUNNING))) == 2, what="two running")
    assert {job.attempt.device for job in instance.spool.jobs(State.RUNNING)} == {"GPU-0", "GPU-1"}
    # A job on its way to running/ is in both places for a moment.
    wait_for(lambda: len(list(instance.spool.jobs(State.QUEUED))) == 1, what="the third still queued")


def test_a_job_starts_after_those_it_depends_on(instance: Instance) -> None:
    instance.drop("succeed-1.first")
    instance.start()
    instance.wait_state("succeed-1.first", State.SUCCEEDED)
    instance.client.ask("pause")
    instance.drop("explain.second")
    instance.wait_state("explain.second", State.QUEUED)
    instance.drop("succeed-1.third", depends_on=["succeed-1.first"], priority=5)
    instance.drop("succeed-1.fourth", depends_on=["explain.second"], priority=9)
    instance.drop("succeed-1.fifth", depends_on=["nobody"])
    wait_for(lambda: "succeed-1.fifth.json" in instance.rejected(), what="the refusal")
    instance.wait_state("succeed-1.fourth", State.QUEUED)
    instance.client.ask("resume")
    instance.wait_state("succeed-1.third", State.SUCCEEDED)
    held = instance.wait_state("succeed-1.fourth", State.HELD)
    assert held.error is not None
    assert "explain.second" in held.error["message"]


def test_a_file_named_hold_is_held_and_drain_does_not_wait_for_it(instance: Instance) -> None:
    instance.drop("succeed.hold")
    assert instance.drain() == 0
    assert instance.wait_state("succeed", State.HELD).attempts == ()


def test_the_database_is_made_again_when_it_was_deleted_or_damaged(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    before = instance.show("succeed")
    instance.layout.database_path.unlink()
    assert instance.drain() == 0
    assert instance.show("succeed")["metrics"] == before["metrics"]
    for path in instance.layout.state_dir.glob("honed.db-*"):
        path.unlink()
    instance.layout.database_path.write_bytes(b"not a database" * 1000)
    assert instance.drain() == 0
    assert instance.show("succeed")["metrics"] == before["metrics"]
    assert instance.layout.database_path.with_name("honed.db.damaged").exists()


def test_a_second_honed_on_one_spool_is_refused(instance: Instance) -> None:
    instance.start()
    first = instance.process
    instance.start()
    assert instance.process is not None
    assert instance.process.wait(timeout=DEADLINE_SEC) == 78
    assert "another honed instance uses this spool" in instance.log
    instance.process = first


def test_reload_takes_a_new_configuration_and_keeps_the_old_one_when_it_is_wrong(instance: Instance) -> None:
    instance.start()
    assert instance.process is not None
    instance.configure("[spool]\nsettle = 1\n")
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the old one stays" in instance.log, what="the refusal")
    instance.configure("[jobs]\nmax_running = 1\n")
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "configuration reloaded" in instance.log, what="the reload")
    instance.drop("succeed")
    instance.wait_state("succeed", State.SUCCEEDED)


def test_a_broken_configuration_stops_the_start_with_file_and_key(instance: Instance) -> None:
    instance.configure("[spool]\nsettle_sec = 'soon'\n")
    instance.start()
    assert instance.wait() == 78
    assert "honed.toml: line " in instance.log
    assert "spool.settle_sec: expected a number" in instance.log


def test_a_client_that_talks_nonsense_or_not_at_all_harms_nobody(instance: Instance) -> None:
    import socket

    instance.start()
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(instance.layout.control_path))
    for noise in (b"\xff\xfe\n", b"[]\n", b'{"verb": 7}\n', b'{"verb": "dance"}\n', b"x" * 200_000):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(instance.layout.control_path))
            peer.sendall(noise)
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(DEADLINE_SEC)
            if noise.endswith(b"\n"):
                assert json.loads(peer.makefile().readline())["ok"] is False
    assert "idle" in instance.client.ask("status")["status"]
    silent.close()


def test_asking_where_no_honed_runs_says_so(instance: Instance) -> None:
    with pytest.raises(EnvironmentInvalidError, match="does not respond"):
        instance.client.ask("list")


def num_wakeups(instance: Instance) -> int:
    """Return how often the daemon's threads have waited; CPU time grows by itself on a busy machine."""
    assert instance.process is not None
    statuses = [path.read_text() for path in Path(f"/proc/{instance.process.pid}/task").glob("*/status")]
    return sum(int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in statuses)


def test_the_idle_daemon_is_small_and_quiet(instance: Instance) -> None:
    instance.is_warm = False
    instance.start()
    assert instance.process is not None
    proc = Path(f"/proc/{instance.process.pid}")
    resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 50 * 2**20, f"{resident / 2**20:.1f} MiB"
    assert "torch" not in (proc / "maps").read_text()

    begin, before = time.monotonic(), num_wakeups(instance)
    time.sleep(4)
    woken = (num_wakeups(instance) - before) / (time.monotonic() - begin)
    assert woken < 10, f"woken {woken:.1f} times a second"


def test_a_retry_that_is_due_and_cannot_start_does_not_spin(instance: Instance) -> None:
    instance.configure("[jobs]\nretry_delay_sec = 3\n")
    instance.drop("crash")
    instance.start()
    wait_for(lambda: "retrying in" in instance.log, what="the delay")
    instance.client.ask("pause")
    instance.drop("succeed-1.other")

    def reason() -> str:
        waiting_for = instance.client.ask("show", id="crash")["waiting_for"]
        return str(waiting_for["reason"]) if waiting_for else ""

    wait_for(lambda: reason() == "paused", what="the end of the delay")
    assert instance.process is not None

    def cpu_sec() -> float:
        fields = Path(f"/proc/{instance.process.pid}/stat").read_text().rpartition(")")[2].split()  # type: ignore[union-attr]
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_sec()
    time.sleep(2)
    assert cpu_sec() - before < 0.5


def test_somebody_who_opens_a_dropped_file_again_and_again_harms_nobody(instance: Instance) -> None:
    import subprocess
    import sys

    instance.start()
    code = "import sys, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: open(sys.argv[1], 'a').close()"
    subprocess.run([sys.executable, "-c", code, str(instance.incoming_dir / "busy.yaml")], check=True)
    assert instance.process is not None
    assert instance.process.poll() is None
    instance.drop("succeed")
    instance.wait_state("succeed", State.SUCCEEDED)


def test_a_job_that_depends_on_an_older_one_of_its_own_name_runs_after_it(instance: Instance) -> None:
    instance.drop("succeed-1.same")
    instance.start()
    first = instance.wait_state("succeed-1.same", State.SUCCEEDED)
    instance.drop("again", name="succeed-1.same", depends_on=["succeed-1.same"])
    second = wait_for(lambda: (job := instance.job("succeed-1.same")) and job.id > first.id and job, what="the second")
    assert second.depends_on == (str(first.id),)
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 2, what="both")


def test_a_plan_made_for_one_gpu_is_made_again_before_the_job_runs_on_another_kind(instance: Instance) -> None:
    gpus = instance.root / "gpus.json"
    gpus.write_text(json.dumps([{"uuid": "GPU-0", "free_bytes": 80 << 30}]))
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    instance.start()
    instance.client.ask("pause")
    instance.drop("succeed-1.a")
    job = instance.wait_state("succeed-1.a", State.QUEUED)
    plan_path = instance.layout.job(job.id).plan_path
    plan = json.loads(plan_path.read_text())
    assert datetime.fromisoformat(plan["date"]).timestamp() == int(job.submitted_at)
    plan["device"] = {
        "kind": "cuda",
        "name": "an older GPU",
        "index": 0,
        "uuid": "GPU-9",
        "compute_capability": [7, 0],
        "total_bytes": 16 << 30,
        "free_bytes": 16 << 30,
    }
    plan_path.write_text(json.dumps(plan))
    instance.client.ask("resume")
    # With the CPU build of torch the helper refuses a plan for a GPU: so the job waits, and is not run by the old plan.
    wait_for(
        lambda: "not on test GPU" in instance.log or "planned again, for test GPU" in instance.log, what="the word"
    )
    if "planned again" in instance.log:
        instance.wait_state("succeed-1.a", State.SUCCEEDED)
        assert json.loads(plan_path.read_text())["device"]["name"] == "test GPU"
    else:
        time.sleep(0.5)
        waiting = instance.job("succeed-1.a")
        assert waiting is not None
        assert (waiting.state, waiting.attempts) == (State.QUEUED, ())


def test_a_job_whose_plan_is_gone_fails_and_holds_up_no_other(instance: Instance) -> None:
    instance.start()
    instance.client.ask("pause")
    for name in ("succeed-1.a", "succeed-1.b", "succeed-1.c"):
        instance.drop(name)
        instance.wait_state(name, State.QUEUED)
    for name, text in (("succeed-1.a", None), ("succeed-1.b", "[]")):
        job = instance.job(name)
        assert job is not None
        plan_path = instance.layout.job(job.id).plan_path
        plan_path.unlink() if text is None else plan_path.write_text(text)
    instance.client.ask("resume")
    for name in ("succeed-1.a", "succeed-1.b"):
        failed = instance.wait_state(name, State.FAILED)
        assert failed.error is not None
        assert "plan cannot be read" in failed.error["message"]
    instance.wait_state("succeed-1.c", State.SUCCEEDED)
