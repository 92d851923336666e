"""The reason why a job waits is shown; a dependent job continues when the other has succeeded; a job that hangs is
ended at its time limit."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from harness import Instance

from honed.job.job import State
from waiting import wait_for


def waits(instance: Instance, name: str) -> dict[str, Any]:
    def look() -> dict[str, Any]:
        return {row["name"]: row for row in instance.client.ask("list")}[name]["waiting_for"] or {}

    listed = wait_for(look, what=f"why {name} waits")  # honed has looked at it
    shown = instance.client.ask("show", id=name)
    assert shown["waiting_for"]["reason"] == listed["reason"]
    for verb in ("glance", "pin", "unpin"):  # no verb answers that honed is not running
        assert instance.client.ask(verb, id=name)["waiting_for"]["reason"] == shown["waiting_for"]["reason"]
    taken = instance.client.ask("accepted", id=shown["source"], since="")
    assert taken["waiting_for"]["reason"] == shown["waiting_for"]["reason"]
    found: dict[str, Any] = shown["waiting_for"]
    return found


def test_a_job_that_waits_says_for_what(instance: Instance) -> None:
    instance.configure("[jobs]\nretry_delay_sec = 600\n")
    instance.start()
    instance.drop("a", name="slow-4000")
    instance.wait_state("slow-4000", State.RUNNING)
    instance.arrive("b", name="succeed.b")
    instance.arrive("c", name="succeed.c", depends_on=["slow-4000"])
    instance.arrive("d.hold", name="succeed.d")
    found = waits(instance, "succeed.b")
    assert (found["reason"], found["detail"][:14]) == ("device", "job 1 runs on ")
    assert waits(instance, "succeed.c") == {
        "reason": "dependency",
        "detail": "job 1 (slow-4000), which it depends on, is running",
    }
    assert waits(instance, "succeed.d") == {"reason": "person", "detail": "it is held: honectl release 4"}
    assert instance.client.ask("show", id="1")["waiting_for"] is None
    assert instance.client.ask("release", id="4")["waiting_for"]["reason"] == "device"
    instance.client.ask("hold", id="4")
    listed = instance.honectl("list", check=True).stdout
    assert "waiting because" in listed
    assert "job 1 (slow-4000), which it depends on, is running" in listed
    instance.client.ask("pause")
    assert waits(instance, "succeed.b")["reason"] == "paused"
    instance.client.ask("resume")
    instance.client.ask("cancel", id="1")
    wait_for(lambda: instance.job("succeed.c").state is State.HELD, what="held")  # type: ignore[union-attr]
    assert waits(instance, "succeed.c")["reason"] == "dependency"
    instance.drop("e", name="killer.e", retry={"max_attempts": 9})
    wait_for(lambda: (job := instance.job("killer.e")) and job.num_failures == 2, what="two failures")
    found = wait_for(lambda: waits(instance, "killer.e"), what="a wait")
    assert (found["reason"], found["detail"][:13]) == ("retry", "it is retried")


def test_a_job_that_fits_on_no_device_says_so_to_its_owner(instance: Instance) -> None:
    gpus = instance.root / "gpus.json"
    gpus.write_text(json.dumps([{"uuid": "GPU-1", "free_bytes": 1 << 30}]))
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    instance.start()
    instance.drop("a", name="succeed.a")
    wait_for(lambda: instance.job("succeed.a"), what="accepted")
    assert waits(instance, "succeed.a") == {"reason": "device", "detail": "other processes use the memory of test GPU"}


@pytest.mark.parametrize("is_killed", [False, True], ids=["up", "killed"])
def test_a_job_held_for_a_failed_one_goes_on_when_that_is_requeued_and_succeeds(
    instance: Instance, is_killed: bool
) -> None:
    instance.drop("a", name="fallback", backend="unsloth")
    instance.drop("b", name="succeed.b", depends_on=["fallback"])
    instance.drop("c", name="die-3", retry={"max_attempts": 1})
    instance.drop("d", name="succeed.d", depends_on=["die-3"])
    instance.start()
    held = instance.wait_state("succeed.d", State.HELD)
    assert held.error is not None
    assert held.error["message"] == "it depends on job 3 (die-3), which failed"
    assert (
        held.error["hint"] == "honectl requeue 3: this job continues when that job has succeeded; or honectl cancel 4"
    )
    instance.wait_state("succeed.b", State.HELD)
    if is_killed:
        instance.kill(signal.SIGKILL)
        instance.start()
    instance.client.ask("requeue", id="3")
    instance.wait_state("die-3", State.SUCCEEDED)
    assert instance.wait_state("succeed.d", State.SUCCEEDED).held_for is None
    assert instance.wait_state("succeed.b", State.HELD).error is not None  # its own dependency has not succeeded


def test_a_held_job_says_what_holds_it_now(instance: Instance) -> None:
    for number in (1, 2):
        instance.drop(str(number), name=f"die-{number}", retry={"max_attempts": 1})
    instance.drop("3", name="until-60")
    instance.drop("4", name="succeed.d", depends_on=["die-1", "die-2", "until-60"])

    def waits_until(words: str, hint: str) -> None:
        def is_told() -> bool:
            job = instance.job("succeed.d")
            return job is not None and job.error is not None and job.error["message"] == words

        wait_for(is_told, what=words)
        shown = instance.show("succeed.d")
        assert (shown["waiting_for"], shown["error"]["hint"]) == ({"reason": "dependency", "detail": words}, hint)

    instance.start()
    instance.wait_state("succeed.d", State.HELD)
    failed = "it depends on job 1 (die-1), which failed, and on job 2 (die-2), which failed"
    again = "honectl requeue 1 2: this job continues when these jobs have succeeded; or honectl cancel 4"
    waits_until(failed, again)
    instance.client.ask("cancel", id="3")
    waits_until(f"{failed}, and on job 3 (until-60), which was cancelled", again.replace("1 2", "1 2 3"))
    instance.client.ask("requeue", id="2")
    instance.client.ask("requeue", id="1")
    wait_for(lambda: (job := instance.job("succeed.d")) and job.held_for == 3, what="held for the last of them")
    waits_until(
        "it depends on job 3 (until-60), which was cancelled",
        "honectl requeue 3: this job continues when that job has succeeded; or honectl cancel 4",
    )
    instance.client.ask("requeue", id="3")
    waits_until(
        "it depends on job 3 (until-60), which was requeued and has not succeeded yet",
        "it continues when that job has succeeded; or honectl cancel 4",
    )
    instance.go("until-60")
    instance.wait_state("succeed.d", State.SUCCEEDED)


def test_a_worker_that_hangs_beyond_its_time_limit_is_ended(instance: Instance) -> None:
    instance.configure("[jobs]\ntime_limit_grace_sec = 0.2\nstop_timeout_sec = 5\n")
    instance.drop("a", name="hang", time_limit_sec=1)
    instance.drop("b", name="slow-1000", time_limit_sec=10)
    instance.drop("c", name="succeed.c", time_limit_sec=600)
    assert instance.drain() == 0
    for name in ("hang", "slow-1000"):
        job = instance.wait_state(name, State.FAILED)
        assert job.error is not None
        assert (job.outcome, job.error["code"], len(job.attempts)) == ("time_limit", "time_limit", 1)
    assert instance.wait_state("succeed.c", State.SUCCEEDED)
    assert (instance.layout.job(2).checkpoints_dir / "step").exists()


def test_a_time_limit_counts_the_time_before_a_kill_of_honed(instance: Instance) -> None:
    instance.configure("[jobs]\ntime_limit_grace_sec = 0\nstop_timeout_sec = 1\n")
    instance.drop("a", name="hang", time_limit_sec=10)
    instance.start()
    began = instance.wait_state("hang", State.RUNNING).attempt.started_at
    wait_for(lambda: instance.starts(instance.wait_state("hang", State.RUNNING)), what="its worker")
    instance.kill(signal.SIGKILL)
    instance.start()
    job = instance.wait_state("hang", State.FAILED)
    assert job.outcome == "time_limit"
    assert job.attempt.started_at == began


def test_a_time_limit_that_was_enforced_is_the_outcome_though_honed_was_killed_since(instance: Instance) -> None:
    instance.configure("[jobs]\ntime_limit_grace_sec = 0.2\n")
    instance.drop("a", name="slow-1000-2", time_limit_sec=4)
    instance.start()
    wait_for(lambda: "exceeded its time limit" in instance.log, what="the limit")
    instance.kill(signal.SIGKILL)
    wait_for(instance.layout.job(1).attempt(1).exit_path.exists, what="its end")
    instance.start()
    job = instance.wait_state("slow-1000-2", State.FAILED, State.HELD)
    assert (job.state, job.outcome, len(job.attempts)) == (State.FAILED, "time_limit", 1)


def test_a_job_that_a_person_stops_before_its_time_limit_while_honed_is_down_is_held(instance: Instance) -> None:
    instance.drop("a", name="slow-1000", time_limit_sec=600)
    instance.start()
    wait_for(lambda: "step 1" in instance.log, what="a step")
    instance.kill(signal.SIGKILL)
    attempt = instance.layout.job(1).attempt(1)
    os.kill(json.loads((attempt.dir / "lock").read_text())["shim_pid"], signal.SIGTERM)
    wait_for(attempt.exit_path.exists, what="its end")
    instance.start()
    assert instance.wait_state("slow-1000", State.FAILED, State.HELD).outcome == "interrupted"
