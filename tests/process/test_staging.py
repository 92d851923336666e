"""The next job is prepared while the device is busy: no job is lost, begun twice, or trained in another way."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Instance, RealInstance

from honed.job import query
from honed.job.job import Job, State
from honed.page.job_list import Choice, JobList
from honed.page.source import Source
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

STAGING = "[jobs]\nstage_ahead = true\nstage_min_available_bytes = 0\n"


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def worker_of(instance: Instance, job: Job, number: int = 1) -> int:
    """Return the pid of a job's worker, once it has one."""

    def found() -> int | None:
        path = instance.layout.job(job.id).attempt(number).dir / "lock"
        return json.loads(path.read_text() or "{}").get("worker_pid") if path.exists() else None

    return wait_for(found, what="a worker") or 0


def stage_of(instance: Instance, job: Job, number: int = 1) -> str:
    path = instance.layout.job(job.id).attempt(number).events_path
    lines = path.read_text().splitlines() if path.exists() else []
    return next((each["stage"] for each in map(json.loads, reversed(lines)) if each["event"] == "stage"), "")


def wait_staged(instance: Instance, name: str, number: int = 1) -> Job:
    """Wait until a job's worker waits at its gate."""

    def staged() -> Job | None:
        job = instance.job(name)
        waits = job is not None and job.staged_at is not None and stage_of(instance, job, number) == "staged"
        return job if waits else None

    return wait_for(staged, what=f"{name} staged")


def wait_staged_again(instance: Instance, name: str, num_staged: int) -> Job:
    return wait_for(
        lambda: job if (job := wait_staged(instance, name)).num_staged == num_staged else None,
        what=f"{name} staged for the {num_staged}th time",
    )


@pytest.fixture
def busy(instance: Instance) -> Instance:
    """An instance whose device is busy until `go` is called, and whose next job is staged."""
    return make_busy(instance)


def make_busy(instance: Instance) -> Instance:
    instance.configure(STAGING)
    instance.start()
    instance.drop("first", name="until")
    instance.wait_state("until", State.RUNNING)
    instance.drop("second", name="succeed")
    wait_staged(instance, "succeed")
    return instance


def go(instance: Instance) -> None:
    """Let the running job end."""
    job = instance.job("until")
    assert job is not None
    (instance.layout.job(job.id).dir / "go").touch()


def ended(instance: Instance, name: str = "succeed") -> Job:
    job = instance.wait_state(name, State.SUCCEEDED, State.FAILED)
    assert (job.state, job.num_failures) == (State.SUCCEEDED, 0), job.error
    return job


@pytest.mark.quick
def test_the_next_job_waits_at_its_gate_until_the_device_is_free(busy: Instance) -> None:
    job = busy.job("succeed")
    assert job is not None
    assert (job.state, job.attempts, busy.starts(job)) == (State.QUEUED, (), [])
    [row] = json.loads(busy.honectl("list", "--json", str(job.id), check=True).stdout)
    assert row["state"] == "queued"
    assert row["staged_at"]
    assert "staged" in busy.honectl("list", check=True).stdout
    assert "staged" in busy.honectl("show", str(job.id), check=True).stdout
    wait_for(lambda: ">staged</span>" in busy.index, what="the index")
    assert b">staged</span>" in JobList(Source(busy.layout)).page(query.ANYBODY, Choice(), "")
    pid = worker_of(busy, job)
    go(busy)
    job = ended(busy)
    assert [(each.number, each.start, each.staged_at is not None) for each in job.attempts] == [(1, 1, True)]
    assert len(busy.starts(job)) == 1
    events = busy.layout.job(job.id).attempt(1).events_path.read_text().splitlines()
    assert json.loads(events[0])["pid"] == pid  # the same process
    assert "staged before" in busy.log


def test_a_staged_job_that_is_held_cancelled_or_requeued_loses_nothing(busy: Instance) -> None:
    job = busy.job("succeed")
    assert job is not None
    for verb, state in (("hold", State.HELD), ("cancel", State.CANCELLED)):
        pid = worker_of(busy, job)
        busy.honectl(verb, str(job.id), check=True)
        job = busy.wait_state("succeed", state)
        assert job.staged_at is None
        wait_for(lambda pid=pid: not is_there(pid), what="the end of the worker")
        busy.honectl("release" if state is State.HELD else "requeue", str(job.id), check=True)
        job = wait_staged(busy, "succeed")
        assert job.num_staged > 1
    go(busy)
    job = ended(busy)
    assert len(job.attempts) == len(busy.starts(job)) == 1
    kinds = [json.loads(line) for line in busy.layout.job(job.id).attempt(1).events_path.read_text().splitlines()]
    assert sum(each["event"] == "started" for each in kinds) == 1  # nothing of the workers before


def test_a_staged_worker_that_is_killed_costs_no_attempt(busy: Instance) -> None:
    job = busy.job("succeed")
    assert job is not None
    os.kill(worker_of(busy, job), signal.SIGKILL)
    wait_for(lambda: (found := busy.job("succeed")) is not None and found.staged_at is None, what="no worker")
    go(busy)
    job = ended(busy)
    assert [(each.number, each.staged_at) for each in job.attempts] == [(1, None)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_honed_ends_and_starts_again_while_a_job_is_staged(busy: Instance, number: signal.Signals) -> None:
    job = busy.job("succeed")
    assert job is not None
    pid = worker_of(busy, job)
    busy.kill(number)
    assert is_there(pid) is (number == signal.SIGKILL)
    busy.start()
    wait_staged_again(busy, "succeed", 2)
    assert not is_there(pid)
    go(busy)
    job = ended(busy)
    assert len(job.attempts) == len(busy.starts(job)) == 1


def test_a_worker_that_was_not_let_through_before_a_crash_is_let_through_after_it(busy: Instance) -> None:
    job = busy.job("succeed")
    assert job is not None
    gate = busy.layout.job(job.id).gate_path
    gate.mkdir()  # it cannot be written: the entry says that the job runs, and its worker waits
    go(busy)
    busy.wait_state("succeed", State.RUNNING)
    assert busy.starts(job) == []
    busy.kill(signal.SIGKILL)
    gate.rmdir()
    busy.start()
    job = ended(busy)
    assert len(job.attempts) == len(busy.starts(job)) == 1


def test_the_job_that_comes_first_starts_first_staged_or_not(busy: Instance) -> None:
    busy.drop("urgent", name="succeed-3.urgent", priority=9)
    busy.wait_state("succeed-3.urgent", State.QUEUED)
    go(busy)
    urgent, staged = ended(busy, "succeed-3.urgent"), ended(busy)
    assert urgent.attempt.staged_at is None
    assert staged.attempt.staged_at is not None
    assert urgent.attempt.started_at < staged.attempt.started_at


def test_a_job_whose_inputs_change_is_not_staged_any_more_and_starts_at_its_turn(busy: Instance) -> None:
    job = busy.job("succeed")
    assert job is not None
    pid, plan = worker_of(busy, job), busy.layout.job(job.id).plan_path
    text = plan.read_text()
    plan.unlink()
    plan.write_text(text)
    wait_for(lambda: not is_there(pid), what="the end of the worker")
    wait_for(lambda: (found := busy.job("succeed")) is not None and found.staged_at is None, what="no worker")
    go(busy)
    job = ended(busy)
    assert [(item.number, item.staged_at) for item in job.attempts] == [(1, None)]
    assert len(busy.starts(job)) == 1


def test_nothing_is_staged_where_that_is_off_or_memory_is_short(instance: Instance) -> None:
    off, short = "stage_ahead = false", "stage_ahead = true\nstage_min_available_bytes = 1_000_000_000_000_000"
    for number, keys in enumerate((off, short)):
        name = f"succeed.{number}"
        instance.configure(f"[jobs]\n{keys}\n")
        instance.start()
        instance.drop("first", name=f"slow-60.{number}")
        instance.wait_state(f"slow-60.{number}", State.RUNNING, State.SUCCEEDED)
        instance.drop("second", name=name)
        assert ended(instance, name).num_staged == 0
        instance.stop()


def test_each_busy_gpu_has_its_next_job_and_the_first_one_takes_the_gpu_that_is_free_first(instance: Instance) -> None:
    gpus = [{"uuid": f"GPU-{name}", "free_bytes": 79 << 30} for name in "ab"]
    (instance.root / "gpus.json").write_text(json.dumps(gpus))
    instance.environment["HONED_TEST_GPUS"] = str(instance.root / "gpus.json")
    instance.configure(STAGING)
    instance.start()
    instance.drop("a", name="until.a")
    instance.wait_state("until.a", State.RUNNING)
    instance.drop("b", name="until.b")
    on_a, on_b = (instance.wait_state(f"until.{name}", State.RUNNING) for name in "ab")
    instance.drop("first", name="succeed.first")
    first = wait_staged(instance, "succeed.first")
    instance.drop("second", name="succeed.second")
    second = wait_staged(instance, "succeed.second")
    instance.drop("third", name="succeed.third")
    third = instance.wait_state("succeed.third", State.QUEUED)
    (instance.layout.job(on_b.id).dir / "go").touch()  # the first one was staged for the other
    for job in (first, second, third):
        ended(instance, job.name)
    assert [line.split()[-1] for line in instance.starts(first)] == [on_b.attempt.device]
    (instance.layout.job(on_a.id).dir / "go").touch()
    for name in "ab":
        ended(instance, f"until.{name}")


# -- real workers ------------------------------------------------------------------------------------------------------


def spec(real: RealInstance, **keys: Any) -> dict[str, Any]:
    training = {"max_steps": 30, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    return {
        "base_model": str(real.root / "llama"),
        "datasets": [{"path": str(real.root / "facts.jsonl")}],
        "lora": {"r": 4, "lora_dropout": 0.1},
        "training": training,
        **keys,
    }


@pytest.mark.timeout(1200)
def test_a_staged_job_trains_as_one_that_was_not(real: RealInstance) -> None:
    build_checkpoint(real.root / "llama", "llama")
    write_facts(real.root / "facts.jsonl", 24)
    real.configure(f"{STAGING}poll_interval_sec = 0.05\n")
    real.start()
    real.drop("alone", name="alone", **spec(real))
    ended(real, "alone")
    busy = {"max_steps": 2000, "per_device_train_batch_size": 1, "gradient_checkpointing": False}
    real.drop("busy", name="busy", **spec(real, training=busy))
    real.wait_state("busy", State.RUNNING)
    real.drop("staged", name="staged", **spec(real))
    wait_staged(real, "staged")
    real.honectl("cancel", "busy", check=True)
    job = ended(real, "staged")
    assert job.attempt.staged_at is not None
    outputs = {
        name: real.layout.job(found.id).output_dir / "adapter_model.safetensors"
        for name in ("alone", "staged")
        if (found := real.job(name)) is not None
    }
    assert outputs["alone"].read_bytes() == outputs["staged"].read_bytes()
    stages = [
        each["stage"]
        for each in map(json.loads, real.layout.job(job.id).attempt(1).events_path.read_text().splitlines())
        if each["event"] == "stage"
    ]
    assert stages[:4] == ["prepare", "data", "staged", "load"]


@pytest.mark.timeout(1200)
def test_a_job_with_wrong_data_ends_before_its_turn_and_one_whose_data_changes_trains_on_what_is_there_then(
    real: RealInstance,
) -> None:
    build_checkpoint(real.root / "llama", "llama")
    write_facts(real.root / "facts.jsonl", 24)
    rows = write_facts(real.root / "other.jsonl", 24)
    busy = {"max_steps": 100_000, "per_device_train_batch_size": 1, "gradient_checkpointing": False}
    real.configure("[jobs]\nstage_ahead = false\n")
    real.start()
    real.drop("busy", name="busy", **spec(real, training=busy))
    real.wait_state("busy", State.RUNNING)
    real.drop("wrong", name="wrong", **spec(real, datasets=[{"path": str(rows)}]))
    real.wait_state("wrong", State.QUEUED)
    rows.write_text("".join(line.replace('"content"', '"contents"') for line in rows.read_text().splitlines(True)))
    real.configure(f"{STAGING}poll_interval_sec = 0.05\n")
    assert real.process is not None
    real.process.send_signal(signal.SIGHUP)
    job = real.wait_state("wrong", State.FAILED)
    assert job.error is not None
    assert job.error["code"] == "dataset_invalid"
    assert [each.device for each in job.attempts] == ["none"]
    still = real.job("busy")
    assert still is not None
    assert (still.state, len(still.attempts)) == (State.RUNNING, 1)

    rows = write_facts(real.root / "changed.jsonl", 24)
    real.drop("staged", name="staged", **spec(real, datasets=[{"path": str(rows)}]))
    wait_staged(real, "staged")
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:12]))
    real.honectl("cancel", "busy", check=True)
    real.wait_state("busy", State.CANCELLED)
    job = ended(real, "staged")
    assert [(item.outcome, item.staged_at is not None) for item in job.attempts][-1] == ("succeeded", False)
    path = real.layout.job(job.id).attempt(job.attempt.number).events_path
    events = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert [item["num_train"] for item in events if item["event"] == "data"] == [12]
    facts = json.loads((real.layout.job(job.id).output_dir / "honed.json").read_text())
    assert hashlib.sha256(rows.read_bytes()).hexdigest() in json.dumps(facts)
