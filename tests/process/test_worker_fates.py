"""Whichever way a worker ends, its job ends in the right state, once."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import HERE, Instance

from honed.job.job import State
from waiting import wait_for


def test_a_job_that_succeeds_has_its_figures_in_the_database(instance: Instance) -> None:
    instance.drop("succeed")
    assert instance.drain() == 0
    shown = instance.show("succeed")
    assert (shown["state"], shown["outcome"], shown["error"]) == ("succeeded", "succeeded", None)
    assert shown["progress"] == {"step": 5, "num_steps": 5, "epoch": 1.0, "loss": 0.2, "eta_sec": None}
    assert shown["metrics"]["loss"] == 0.2
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["succeeded"]


@pytest.mark.parametrize(
    ("name", "code", "num_attempts"),
    [
        ("explain", "mask_invalid", 1),
        ("crash", "killed", 3),
        ("abort", "killed", 3),
        ("killer", "killed", 3),
        ("exit0", "killed", 3),
        ("liar", "killed", 3),
        ("torn", "killed", 3),
        ("manystep", "killed", 3),
        ("badresult", "error", 1),
    ],
)
def test_a_failing_worker_fails_its_job_after_its_attempts(
    instance: Instance, name: str, code: str, num_attempts: int
) -> None:
    instance.configure("[jobs]\nretry_delay_sec = 0.0\n")
    instance.drop(name)
    assert instance.drain() == 0
    job = instance.job(name)
    assert job is not None
    assert (job.state, job.outcome, len(job.attempts)) == (State.FAILED, code, num_attempts)
    assert job.error is not None
    assert job.error["code"] == code
    assert len(instance.starts(job)) == num_attempts


def test_a_result_that_breaks_every_look_at_it_is_left_unread_and_the_job_ends_by_its_exit(instance: Instance) -> None:
    instance.command = (sys.executable, str(HERE / "oddhoned.py"))
    instance.drop("explain", retry={"max_attempts": 1})
    assert instance.drain() == 0
    job = instance.job("explain")
    assert job is not None
    assert (job.state, job.outcome, len(job.attempts)) == (State.FAILED, "killed", 1)
    assert instance.log.count("an error in the daemon's loop") == 2  # the first one, and the third in a row


def test_one_attempt_is_all_that_a_job_gets_which_asks_for_one(instance: Instance) -> None:
    instance.drop("crash", retry={"max_attempts": 1})
    assert instance.drain() == 0
    job = instance.job("crash")
    assert job is not None
    assert (job.state, len(job.attempts)) == (State.FAILED, 1)


def test_a_killed_worker_goes_on_from_its_checkpoint(instance: Instance) -> None:
    instance.drop("die-6")
    assert instance.drain() == 0
    shown = instance.show("die-6")
    assert shown["state"] == "succeeded"
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["killed", "succeeded"]
    assert [item["step"] for item in shown["events"] if item["event"] == "resumed"] == [5]


def test_an_attempt_that_ends_while_honed_is_down_keeps_the_step_that_honed_had_read(instance: Instance) -> None:
    instance.start()
    instance.arrive("slow", name="slow-9999", retry={"max_attempts": 1})
    wait_for(lambda: instance.show("slow-9999")["progress"]["step"], what="a step")
    attempt = instance.layout.job(1).attempt(1)
    record = json.loads((attempt.dir / "lock").read_text())
    os.kill(record["worker_pid"], signal.SIGSTOP)
    told = [json.loads(line) for line in attempt.events_path.read_text().splitlines()]
    last = max(each["step"] for each in told if each["event"] == "step")
    wait_for(lambda: instance.show("slow-9999")["progress"]["step"] == last, what="all its events read")
    instance.kill(signal.SIGKILL)
    os.kill(record["worker_pid"], signal.SIGKILL)
    wait_for(attempt.exit_path.exists, what="its end")
    instance.start()
    job = instance.wait_state("slow-9999", State.FAILED)
    assert (job.attempt.outcome, job.attempt.step) == ("killed", last)


def test_noise_among_the_events_is_counted_and_harms_nothing(instance: Instance) -> None:
    instance.drop("garbage")
    assert instance.drain() == 0
    job = instance.job("garbage")
    assert job is not None
    assert job.state is State.SUCCEEDED
    assert "lines that are not events" in instance.log
    assert "Traceback" not in instance.log


def test_a_worker_that_says_nothing_for_too_long_is_stalled_and_ended(instance: Instance) -> None:
    instance.configure("[jobs]\nstall_timeout_sec = 0.5\nretry_delay_sec = 0.0\n")
    instance.drop("hang", retry={"max_attempts": 1})
    assert instance.drain() == 0
    job = instance.job("hang")
    assert job is not None
    assert (job.state, job.outcome) == (State.FAILED, "stalled")


def test_a_worker_that_ignores_sigterm_is_killed_after_the_stop_timeout(instance: Instance) -> None:
    instance.configure("[jobs]\nstop_timeout_sec = 0.5\n")
    instance.drop("deaf-4000")
    instance.start()
    job = instance.wait_state("deaf-4000", State.RUNNING)
    wait_for(lambda: instance.show("deaf-4000")["progress"]["step"], what="a step")
    instance.client.ask("cancel", id=str(job.id))
    assert instance.wait_state("deaf-4000", State.CANCELLED).outcome == "cancelled"


def test_unsloth_that_cannot_falls_back_in_a_fresh_process_and_uses_no_attempt_up(instance: Instance) -> None:
    instance.start()
    instance.client.ask("pause")
    instance.drop("fallback")
    job = instance.wait_state("fallback", State.QUEUED)
    instance.stop()
    plan = json.loads(instance.layout.job(job.id).plan_path.read_text())
    if plan["backend"]["name"] == "transformers":
        # This machine plans no Unsloth: change the plan to the one that a GPU would get.
        plan["backend"]["name"] = "unsloth"
        instance.layout.job(job.id).plan_path.write_text(json.dumps(plan))
    instance.start()
    instance.client.ask("resume")
    job = instance.wait_state("fallback", State.SUCCEEDED)
    assert [line.split()[1] for line in instance.starts(job)[-2:]] == ["unsloth", "transformers"]
    assert (job.attempt.num_starts, job.num_failures, job.attempt.backend) == (2, 0, "transformers")
    wait_for(lambda: any(item["event"] == "fallback" for item in instance.show("fallback")["events"]), what="the event")


@pytest.mark.parametrize(
    ("name", "asked", "state", "backends"),
    [
        ("mismatch", "auto", State.SUCCEEDED, ["unsloth", "transformers"]),
        ("mismatch", "unsloth", State.FAILED, ["unsloth"]),
        ("mismatch-3", "auto", State.FAILED, ["unsloth"]),
    ],
    ids=["before-the-first-step", "asked-for-by-name", "after-steps"],
)
def test_a_precision_mismatch_of_unsloth_falls_back_before_the_first_step(
    instance: Instance, name: str, asked: str, state: State, backends: list[str]
) -> None:
    instance.start()
    instance.client.ask("pause")
    instance.drop(name)
    job = instance.wait_state(name, State.QUEUED)
    plan_path = instance.layout.job(job.id).plan_path
    plan = json.loads(plan_path.read_text())
    plan["backend"]["name"], plan["spec"]["backend"] = "unsloth", asked
    plan_path.write_text(json.dumps(plan))
    instance.client.ask("resume")
    job = instance.wait_state(name, state)
    assert [line.split()[1] for line in instance.starts(job)] == backends
    assert len(job.attempts) == 1
    told = [item for item in instance.show(name)["events"] if item["event"] == "fallback"]
    assert [(item["from"], item["to"]) for item in told] == ([("unsloth", "transformers")] if backends[1:] else [])
    if state is State.FAILED:
        assert (job.outcome, job.num_failures) == ("precision_mismatch", 1)
    else:
        assert job.num_failures == 0
        assert "planned bf16=True" in told[0]["reason"]
        assert "falls back to transformers: planned bf16=True" in instance.log
        path = instance.layout.job(job.id).report_path
        wait_for(lambda: path.exists() and "planned bf16=True" in path.read_text(), what="the reason on its page")


def test_a_worker_stopped_behind_honeds_back_is_held(instance: Instance) -> None:
    instance.drop("slow-4000")
    instance.start()
    job = instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: instance.show("slow-4000")["progress"]["step"], what="a step")
    import os

    record = json.loads((instance.layout.job(job.id).attempt(1).dir / "lock").read_text())
    os.kill(record["worker_pid"], signal.SIGTERM)
    assert instance.wait_state("slow-4000", State.HELD).outcome == "interrupted"


def test_a_worker_whose_shim_is_stopped_can_still_be_cancelled(instance: Instance) -> None:
    import os

    instance.configure("[jobs]\nstop_timeout_sec = 0.5\n")
    instance.drop("slow-4000")
    instance.start()
    job = instance.wait_state("slow-4000", State.RUNNING)
    wait_for(lambda: instance.show("slow-4000")["progress"]["step"], what="a step")
    record = json.loads((instance.layout.job(job.id).attempt(1).dir / "lock").read_text())
    os.kill(record["shim_pid"], signal.SIGSTOP)
    os.kill(record["worker_pid"], signal.SIGKILL)
    instance.client.ask("cancel", id="slow-4000")
    instance.wait_state("slow-4000", State.CANCELLED)


def test_a_stop_while_unsloth_gives_up_costs_nothing_and_the_next_start_goes_on_without_it(instance: Instance) -> None:
    instance.start()
    instance.client.ask("pause")
    instance.drop("fallback-slowly")
    job = instance.wait_state("fallback-slowly", State.QUEUED)
    plan_path = instance.layout.job(job.id).plan_path
    plan = json.loads(plan_path.read_text())
    plan["backend"]["name"] = "unsloth"
    plan_path.write_text(json.dumps(plan))
    instance.client.ask("resume")
    wait_for(lambda: instance.starts(job), what="the start")
    instance.kill(signal.SIGTERM)
    stopped = instance.job("fallback-slowly")
    assert stopped is not None
    assert (stopped.state, stopped.num_failures, stopped.outcome) == (State.QUEUED, 0, "interrupted")
    instance.start()
    done = instance.wait_state("fallback-slowly", State.SUCCEEDED)
    assert [line.split()[1] for line in instance.starts(done)] == ["unsloth", "transformers"]


def test_a_honed_that_waits_for_its_worker_to_end_does_not_spin(instance: Instance) -> None:
    instance.is_warm = False
    instance.start()
    instance.drop("deaf", name="deaf-2000")
    instance.wait_state("deaf-2000", State.RUNNING)
    assert instance.process is not None

    def cpu_sec() -> float:
        fields = Path(f"/proc/{instance.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    instance.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "asked to stop" in instance.log, what="a word of the stop")
    before = cpu_sec()
    time.sleep(4)
    assert cpu_sec() - before < 0.5


def test_a_job_that_the_machine_keeps_from_starting_waits_and_those_behind_it_run(instance: Instance) -> None:
    instance.command = (sys.executable, str(HERE / "oddhoned.py"), f"odd:/running/1.json:{errno.ESTALE}")
    instance.start()
    instance.drop("succeed.first")
    instance.wait_state("succeed.first", State.QUEUED)
    instance.drop("succeed.second")
    instance.wait_state("succeed.second", State.SUCCEEDED)
    first = instance.job("succeed.first")
    assert first is not None
    assert (first.state, first.attempts) == (State.QUEUED, ())
