"""Devices over time: hours, drains and reservations close a device; a job that runs there writes a checkpoint, returns
to the queue and resumes."""

from __future__ import annotations

import datetime
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Instance, said_on_terminal

from honed.cli import doctor
from honed.job import query
from honed.job.job import Job, State
from honed.system.error import HonedError
from waiting import wait_for

NIGHT = '[device]\nhours = "Mon..Fri 20:00-08:00"\n'
#: In the hours of NIGHT, and outside of them.
MORNING, DAY, EVENING = "2026-11-24 07:00", "2026-11-24 08:00", "2026-11-24 20:00"


@pytest.fixture
def clocked(instance: Instance) -> Instance:
    """An instance whose wall clock is a file."""
    instance.environment |= {"HONED_TEST_NOW": str(instance.root / "now"), "TZ": "UTC"}
    set_clock(instance, MORNING)
    return instance


def set_clock(instance: Instance, text: str) -> None:
    moment = datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()
    (instance.root / "now.new").write_text(str(moment))
    (instance.root / "now.new").rename(instance.root / "now")


def write_gpus(instance: Instance, *uuids: str) -> None:
    path = instance.root / "gpus.json"
    path.with_suffix(".new").write_text(json.dumps([{"uuid": uuid, "free_bytes": 80 << 30} for uuid in uuids]))
    path.with_suffix(".new").rename(path)
    instance.environment["HONED_TEST_GPUS"] = str(path)


def wait_steps(instance: Instance, name: str, num: int = 1) -> None:
    def has_steps() -> bool:
        return bool(instance.job(name)) and len(query.losses(instance.spool, instance.layout, name)) >= num

    wait_for(has_steps, what=f"{num} steps of {name}")


def waits_for(instance: Instance, name: str, reason: str) -> str:
    """Wait until a queued job waits for this reason, and return the text."""

    def detail() -> str | None:
        found = instance.client.ask("show", id=name)["waiting_for"] if instance.job(name) else None
        return found["detail"] if found is not None and found["reason"] == reason else None

    return wait_for(detail, what=f"{name} waits: {reason}") or ""


def preempted(instance: Instance, name: str) -> Job:
    """Wait until a job is back in the queue, and check that this cost no attempt and no step."""
    job = instance.wait_state(name, State.QUEUED)
    assert (job.num_failures, job.stop, job.error, job.outcome) == (0, None, None, "interrupted")
    [shown] = [instance.client.ask("show", id=name)["preemption"]]
    assert shown["lost_steps"] == 0
    assert 0 <= shown["stop_sec"] <= job.attempt.spent_sec
    return job


def test_a_job_writes_a_checkpoint_when_the_hours_end_and_resumes_when_they_begin(clocked: Instance) -> None:
    clocked.configure(NIGHT)
    clocked.start()
    clocked.drop("a", name="until-30")
    wait_steps(clocked, "until-30", 3)
    set_clock(clocked, DAY)
    job = preempted(clocked, "until-30")
    reason, opens = "the hours of the CPU ended", "the CPU is closed until Tue 20:00 (in 12 h): device.hours"
    assert job.preemption is not None
    assert job.preemption.reason == reason
    assert waits_for(clocked, "until-30", "hours") == opens
    assert f"job {job.id} (until-30): preempted: {reason}\n" in clocked.log
    assert f"interrupted: preempted because {reason}; stopped after " in clocked.log
    assert f"; it continues from step {job.attempt.step}; now queued\n" in clocked.log
    listed = clocked.honectl("list", check=True).stdout
    assert f"preempted: {reason}" in listed
    assert f"\n{opens}\n" in listed
    shown = clocked.honectl("show", "until-30", check=True).stdout
    assert f"{reason} (1 time so far)" in shown
    assert f"attempt 1 was preempted: {reason}; stopped after " in shown
    assert opens in clocked.client.ask("status")["status"]
    assert clocked.show("until-30")["preemption"]["reason"] == reason  # also from the files
    page = clocked.layout.job(job.id).report_path
    wait_for(lambda: page.exists() and reason in page.read_text(), what="the page says why")
    set_clock(clocked, EVENING)
    clocked.wait_state("until-30", State.RUNNING)
    clocked.go("until-30")
    ended = clocked.wait_state("until-30", State.SUCCEEDED)
    assert [attempt.outcome for attempt in ended.attempts] == ["interrupted", "succeeded"]
    assert clocked.show("until-30")["preemption"] is None
    assert clocked.show("until-30")["num_preemptions"] == 1
    # The losses of an undisturbed run of the fake worker: each step once.
    told = query.losses(clocked.spool, clocked.layout, "until-30")
    assert told == [(step, 1 / step) for step in range(1, 31)]
    lines = (clocked.layout.job(job.id).attempt(2).events_path).read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert steps[0] == job.attempt.step + 1, "no step was repeated"


def test_a_job_without_a_checkpoint_begins_again_and_the_log_says_so(clocked: Instance) -> None:
    clocked.configure(NIGHT)
    set_clock(clocked, DAY)
    clocked.start()
    clocked.drop("a", name="begin")
    waits_for(clocked, "begin", "hours")
    assert clocked.starts(clocked.job("begin")) == []  # type: ignore[arg-type]
    set_clock(clocked, EVENING)
    clocked.wait_state("begin", State.RUNNING)
    wait_for(lambda: "stage" in _events(clocked, "begin"), what="its stage")
    set_clock(clocked, "2026-11-25 08:00")
    preempted(clocked, "begin")
    assert "; it begins again, because it has no checkpoint; now queued" in clocked.log


def _events(instance: Instance, name: str) -> str:
    job = instance.job(name)
    assert job is not None
    path = instance.layout.job(job.id).attempt(job.attempt.number).events_path
    return path.read_text() if path.exists() else ""


def test_a_worker_that_does_not_stop_is_killed_and_that_uses_no_attempt(clocked: Instance) -> None:
    clocked.configure(f"[jobs]\nstop_timeout_sec = 1\n{NIGHT}")
    clocked.start()
    clocked.drop("a", name="deaf-4000")
    wait_steps(clocked, "deaf-4000")
    set_clock(clocked, DAY)
    job = clocked.wait_state("deaf-4000", State.QUEUED)
    assert (job.num_failures, job.outcome) == (0, "interrupted")
    assert clocked.show("deaf-4000")["preemption"]["lost_steps"] is None
    told = "steps since its last checkpoint are repeated; now queued"
    wait_for(lambda: told in clocked.log, what="told")


def test_a_reload_changes_the_hours_of_one_device_and_the_other_stays_open(clocked: Instance) -> None:
    write_gpus(clocked, "GPU-a1", "GPU-b2")
    clocked.start()
    for name in ("until-40.a", "until-40.b"):
        clocked.drop(name, name=name)
        wait_steps(clocked, name)
    clocked.configure('[device]\nhours = "20:00-07:00"\nhours_of = {0 = "00:00-24:00", GPU-c3 = "00:00-01:00"}\n')
    assert clocked.process is not None
    clocked.process.send_signal(signal.SIGHUP)
    second = preempted(clocked, "until-40.b")
    assert second.preemption is not None
    assert second.preemption.reason == "the hours of GPU 1 ended"
    detail = waits_for(clocked, "until-40.b", "device")
    assert detail == "job 1 runs on test GPU; GPU 1 is closed until Tue 20:00 (in 13 h): device.hours"
    assert "device.hours_of: no device 'GPU-c3'; there are: 0 (GPU-a1), 1 (GPU-b2), cpu" in clocked.log
    clocked.go("until-40.a")
    clocked.wait_state("until-40.a", State.SUCCEEDED)
    clocked.go("until-40.b")
    second = clocked.wait_state("until-40.b", State.SUCCEEDED)
    assert [attempt.device for attempt in second.attempts] == ["GPU-b2", "GPU-a1"]


def test_a_drain_ends_no_job_and_lets_none_start_also_after_a_restart(clocked: Instance) -> None:
    write_gpus(clocked, "GPU-a1")
    clocked.start()
    clocked.drop("a", name="until-9")
    wait_steps(clocked, "until-9")
    [row] = clocked.client.ask("drain", id="GPU-a", reason="a new fan\x1b[2J")
    said = "GPU 0 is drained: a new fan"
    assert row["closures"][0]["detail"].startswith("drained: a new fan")
    assert "\x1b" not in row["closures"][0]["detail"]
    clocked.drop("b", name="succeed.b")
    assert waits_for(clocked, "succeed.b", "drained").startswith(said)
    clocked.go("until-9")
    assert clocked.wait_state("until-9", State.SUCCEEDED).num_preemptions == 0
    clocked.kill(signal.SIGKILL)
    clocked.start()
    assert waits_for(clocked, "succeed.b", "drained").startswith(said)
    assert said in clocked.honectl("list", check=True).stdout
    assert said in said_on_terminal(clocked, 80, "list")
    found = {(each.check, each.status): each for each in doctor.examine(clocked.layout, imports=False)}
    assert found["device", "warning"].detail.startswith(said)
    assert found["device", "warning"].hint == f"honectl --root {clocked.root} undrain GPU-a1"
    write_gpus(clocked)  # the card is taken out
    wait_for(lambda: clocked.client.ask("status")["devices"][-1]["name"] is None, what="the GPU has vanished")
    assert "GPU GPU-a1 is drained: a new fan" in clocked.honectl("list", check=True).stdout
    write_gpus(clocked, "GPU-a1")
    assert clocked.honectl("undrain", "0", check=True).stdout == "GPU 0 is open\n"
    clocked.wait_state("succeed.b", State.SUCCEEDED)


def test_a_drain_that_does_not_wait_queues_the_job_that_runs_and_a_restart_knows_why(clocked: Instance) -> None:
    clocked.start()
    clocked.drop("a", name="until-200-5")
    wait_steps(clocked, "until-200-5")
    done = clocked.honectl("drain", "cpu", "--now", "--reason", "a new fan", check=True)
    assert done.stdout == "the CPU is drained: a new fan\n"
    wait_for(lambda: (job := clocked.job("until-200-5")) and job.stop, what="the request")
    clocked.kill(signal.SIGKILL)
    clocked.start()
    job = preempted(clocked, "until-200-5")
    assert job.preemption is not None
    assert job.preemption.reason == "the CPU was drained: a new fan"
    clocked.client.ask("undrain", id="all")
    clocked.go("until-200-5")
    assert clocked.wait_state("until-200-5", State.SUCCEEDED).num_preemptions == 1


@pytest.mark.parametrize("verb", ["cancel", "hold"])
def test_a_person_outranks_a_preemption(clocked: Instance, verb: str) -> None:
    clocked.start()
    clocked.drop("a", name="slow-4000-5")
    wait_steps(clocked, "slow-4000-5")
    clocked.client.ask("drain", id="cpu", now=True)
    wait_for(lambda: (job := clocked.job("slow-4000-5")) and job.stop == "preempt", what="the request")
    clocked.client.ask(verb, id="slow-4000-5")
    clocked.wait_state("slow-4000-5", State.CANCELLED if verb == "cancel" else State.HELD)


def test_a_reserved_device_is_for_one_users_jobs_until_the_time_is_over(clocked: Instance) -> None:
    clocked.start()
    said = "the CPU is reserved for user daemon until Tue 09:00 (in 2 h)"
    done = clocked.client.ask("reserve", id="cpu", owner="daemon", until=_moment("2026-11-24 09:00"))
    assert done[0]["closures"] == [{"reason": "reserved", "detail": said.removeprefix("the CPU is ")}]
    clocked.drop("a", name="succeed.a")
    assert waits_for(clocked, "succeed.a", "reserved") == said
    clocked.kill(signal.SIGKILL)
    clocked.start()
    assert waits_for(clocked, "succeed.a", "reserved") == said
    set_clock(clocked, "2026-11-24 09:00")
    clocked.wait_state("succeed.a", State.SUCCEEDED)
    wait_for(lambda: "the reservation of cpu is over" in clocked.log, what="told")
    # A reservation for the user whose job it is.
    owner = clocked.job("succeed.a")
    assert owner is not None
    clocked.client.ask("reserve", id="cpu", owner=str(owner.uid))
    clocked.drop("b", name="succeed.b")
    clocked.wait_state("succeed.b", State.SUCCEEDED)
    clocked.client.ask("unreserve", id="cpu")
    assert clocked.client.ask("status")["devices"][0]["closures"] == []


def _moment(text: str) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


def test_a_device_reserved_for_a_job_is_free_again_when_that_has_ended(clocked: Instance) -> None:
    clocked.start()
    clocked.client.ask("pause")
    for name in ("succeed.a", "until-9"):
        clocked.drop(name, name=name)
        wait_for(lambda name=name: clocked.job(name), what=name)  # type: ignore[misc]
    done = clocked.honectl("reserve", "cpu", "--job", "until-9", "--for", "2h", check=True).stdout
    assert done == "the CPU is reserved for job 2 until Tue 09:00 (in 2 h)\n"
    clocked.client.ask("resume")
    clocked.wait_state("until-9", State.RUNNING)
    waits_for(clocked, "succeed.a", "reserved")
    clocked.go("until-9")
    clocked.wait_state("succeed.a", State.SUCCEEDED)
    assert clocked.client.ask("status")["devices"][0]["closures"] == []


def test_a_wrong_device_user_job_or_time_is_named(clocked: Instance) -> None:
    write_gpus(clocked, "GPU-a1", "GPU-a2")
    clocked.start()
    clocked.drop("a", name="succeed.a")
    clocked.wait_state("succeed.a", State.SUCCEEDED)
    reserve: dict[str, Any] = {"verb": "reserve", "id": "0"}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"verb": "drain", "id": "7"}, "no device '7'", "there are: 0 (GPU-a1), 1 (GPU-a2), cpu, all"),
        ({"verb": "drain", "id": ""}, "no device ''", "there are"),
        ({"verb": "drain", "id": "GPU-a"}, "2 devices begin with 'GPU-a'", "give more of it: GPU-a1, GPU-a2"),
        ({"verb": "undrain", "id": "0"}, "GPU-a1 is not drained", "honectl list"),
        ({"verb": "unreserve", "id": "cpu"}, "cpu is not reserved", "honectl list"),
        (reserve, "a reservation is for a user or for a job", "give --owner NAME or --job ID"),
        (reserve | {"owner": "nobody-here"}, "no user 'nobody-here'", "a user's name or number"),
        (reserve | {"job": "99"}, "no job '99'", "honectl list"),
        (reserve | {"job": "1"}, "job 1 (succeed.a) is succeeded", "unfinished job"),
        (reserve | {"owner": "0", "until": _moment(MORNING)}, "a reservation cannot end in the past", "--until"),
        (reserve | {"owner": "0", "until": "soon"}, "until must be a number of seconds", ""),
        (reserve | {"owner": "0", "for_sec": 0}, "a reservation cannot end in the past", "--for"),
    ]
    for request, message, hint in cases:
        with pytest.raises(HonedError) as caught:
            clocked.client.ask(**request)
        assert (caught.value.message, hint in caught.value.hint) == (message, True)
    assert all(row["closures"] == [] for row in clocked.client.ask("status")["devices"])
    assert "Traceback" not in clocked.log


@pytest.mark.parametrize("spoil", [lambda path: path.write_text('{"drains": {"'), lambda path: path.mkdir()])
def test_a_damaged_record_of_drains_closes_every_device(clocked: Instance, spoil: Callable[[Path], Any]) -> None:
    path = clocked.layout.spool_dir / "devices.json"
    spoil(path)
    clocked.start()
    clocked.drop("a", name="succeed.a")
    detail = waits_for(clocked, "succeed.a", "drained")
    assert detail == f"the CPU is drained: {path} is damaged: honectl undrain all"
    if path.is_dir():
        path.rmdir()
    with pytest.raises(HonedError) as caught:
        clocked.client.ask("undrain", id="cpu")
    assert caught.value.hint == "honectl undrain all"
    clocked.client.ask("undrain", id="all")
    clocked.wait_state("succeed.a", State.SUCCEEDED)
