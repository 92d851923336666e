"""A user's next job starts from a worker that has imported its libraries: it is the job that it would have been, and
nothing that happens to that worker is the job's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import ColdInstance, Instance

from honed.job.job import Job, State
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

WARM = "[jobs]\nwarm_sec = 600\nstage_min_available_bytes = 0\npoll_interval_sec = 0.05\n"


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def spares(instance: Instance) -> list[int]:
    """Return the processes of an instance's spares."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cwd").readlink() == instance.layout.jobs_dir:  # a job's processes are in its own directory
                found.append(int(path.name))
    return sorted(found)


def wait_ready(instance: Instance) -> list[int]:
    """Wait until the spare is ready. Returns the pids of its shim and its worker."""
    wait_for(lambda: "1 spare worker" in str(instance.client.ask("status")["status"]), what="a spare")
    found = spares(instance)
    assert len(found) == 2
    return found


def pids(instance: Instance, job: Job, number: int = 1) -> list[int]:
    """Return the pids of a job's shim and worker, once there is one."""
    path = instance.layout.job(job.id).attempt(number).dir / "lock"

    def found() -> list[int]:
        record = json.loads(path.read_text() or "{}") if path.exists() else {}
        return [record["shim_pid"], record["worker_pid"]] if record.get("worker_pid") else []

    return wait_for(found, what="a worker")


def is_ended(instance: Instance, name: str) -> Job:
    job = instance.wait_state(name, State.SUCCEEDED, State.FAILED)
    assert (job.state, job.num_failures) == (State.SUCCEEDED, 0), job.error
    return job


def begin(instance: Instance, more: str = "") -> list[int]:
    """Run a job, so that there is a spare."""
    instance.configure(WARM + more)
    instance.start()
    instance.drop("first", name="succeed")
    is_ended(instance, "succeed")
    return wait_ready(instance)


@pytest.mark.quick
def test_the_next_job_is_the_spare_s_and_the_one_after_it_another_s(instance: Instance) -> None:
    instance.is_warm = False  # its processes are those of an installation
    before = begin(instance)
    for name in ("succeed.second", "succeed.third"):
        instance.drop(name, name=name)
        job = is_ended(instance, name)
        assert pids(instance, job) == before
        log = instance.layout.job(job.id).attempt(1).log_path.read_text()
        assert log == "from a spare\nthe libraries chatter\n"
        assert wait_ready(instance) != before
        before = spares(instance)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_spares_end_with_their_honed_and_its_configuration(instance: Instance, number: signal.Signals) -> None:
    before = begin(instance)
    assert instance.process is not None
    if number == signal.SIGHUP:
        instance.process.send_signal(number)
    else:
        instance.kill(number)
    wait_for(lambda: not any(map(is_there, before)), what="the end of the spare")
    assert spares(instance) == []
    if number != signal.SIGHUP:
        instance.start()
    instance.drop("second", name="succeed.second")
    assert len(is_ended(instance, "succeed.second").attempts) == 1
    assert not list((instance.layout.spool_dir / "corrupt").glob("*"))


def test_a_spare_that_is_killed_costs_nothing(instance: Instance) -> None:
    shim, worker = begin(instance)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not is_there(shim), what="the end of its shim")
    instance.drop("second", name="succeed.second")
    assert len(is_ended(instance, "succeed.second").attempts) == 1


def test_the_job_of_a_spare_is_adopted_stopped_and_resumed_as_any_other(instance: Instance) -> None:
    before = begin(instance)
    instance.drop("long", name="until")
    job = instance.wait_state("until", State.RUNNING)
    wait_for(lambda: instance.show("until")["progress"].get("step"), what="a step")
    assert pids(instance, job) == before
    instance.kill(signal.SIGKILL)
    assert all(map(is_there, before))
    instance.start()
    assert all(map(is_there, before))
    instance.honectl("hold", "until", check=True)
    held = instance.wait_state("until", State.HELD)
    assert (held.attempt.outcome, held.num_failures) == ("interrupted", 0)
    wait_for(lambda: not any(map(is_there, before)), what="their end")
    wait_ready(instance)
    instance.honectl("release", "until", check=True)
    (instance.layout.job(job.id).dir / "go").touch()
    job = is_ended(instance, "until")
    assert [each.outcome for each in job.attempts] == ["interrupted", "succeeded"]
    assert steps(instance, job, 2)[0]["step"] > 1, "from its checkpoint"


def test_the_job_of_a_spare_that_is_cancelled_or_killed_ends_as_any_other(instance: Instance) -> None:
    before = begin(instance, "stop_timeout_sec = 1\n")
    instance.drop("deaf", name="deaf-4000")
    job = instance.wait_state("deaf-4000", State.RUNNING)
    wait_for(lambda: instance.show("deaf-4000")["progress"].get("step"), what="a step")
    assert pids(instance, job) == before
    os.kill(before[1], signal.SIGKILL)
    wait_for(lambda: len(((found := instance.job("deaf-4000")) and found.attempts) or ()) == 2, what="a retry")
    job = instance.wait_state("deaf-4000", State.RUNNING)
    assert job.attempts[0].outcome == "killed"
    instance.honectl("cancel", "deaf-4000", check=True)
    instance.wait_state("deaf-4000", State.CANCELLED)


def steps(instance: Instance, job: Job, number: int = 1) -> list[dict[str, Any]]:
    lines = instance.layout.job(job.id).attempt(number).events_path.read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == "step"]


# -- real workers ------------------------------------------------------------------------------------------------------


def spec(root: Path, **keys: Any) -> dict[str, Any]:
    return {
        "base_model": str(root / "llama"),
        "datasets": [{"path": str(root / "facts.jsonl")}],
        "eval_split": 0.2,
        "lora": {"r": 4, "lora_dropout": 0.1},
        "training": {"max_steps": 12, "per_device_train_batch_size": 2, "gradient_checkpointing": False},
        **keys,
    }


def build(instance: Instance) -> None:
    build_checkpoint(instance.root / "llama", "llama")
    write_facts(instance.root / "facts.jsonl", 24)
    instance.configure(WARM)


def predictions(instance: Instance, job: Job) -> list[Any]:
    lines = instance.layout.job(job.id).attempt(1).events_path.read_text().splitlines()
    return [each["rows"] for each in map(json.loads, lines) if each["event"] == "predictions"]


@pytest.mark.timeout(1200)
def test_a_job_of_a_spare_trains_as_one_of_none_and_one_whose_packages_changed_since_starts_anew(
    cold: ColdInstance,
) -> None:
    build(cold)
    place = cold.root / "packages"
    place.mkdir()
    cold.environment["PYTHONPATH"] = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    cold.start()
    cold.drop("cold", name="cold", **spec(cold.root))
    jobs = [is_ended(cold, "cold")]
    before = wait_ready(cold)
    cold.drop("warm", name="warm", **spec(cold.root))
    jobs.append(is_ended(cold, "warm"))
    assert pids(cold, jobs[1]) == before
    assert "started from a spare worker" in cold.log
    outputs = [cold.layout.job(job.id).output_dir / "adapter_model.safetensors" for job in jobs]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    figures = [[(each["step"], each["loss"], each["learning_rate"]) for each in steps(cold, job)] for job in jobs]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 12
    assert predictions(cold, jobs[0]) == predictions(cold, jobs[1]) != []
    logs = [cold.layout.job(job.id).attempt(1).log_path.read_text() for job in jobs]
    assert logs[0] == logs[1]

    before = wait_ready(cold)
    (place / "new.py").touch()
    cold.drop("anew", name="anew", **spec(cold.root))
    job = is_ended(cold, "anew")
    assert len(job.attempts) == 1
    assert pids(cold, job)[0] == before[0]
    assert pids(cold, job)[1] != before[1]
    log = cold.layout.job(job.id).attempt(1).log_path.read_text()
    assert f"{place} has changed" in log
    assert "it starts anew" in log
