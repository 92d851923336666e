"""The spares of users: to whom they are given, when they end, and what a job that was given one is."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.daemon import spares as spares_module
from honed.daemon.attempts import Attempts
from honed.daemon.spares import Spares
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.needs import Needs
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.run.process import ProcessRunner
from honed.run.runner import read_lock_record
from honed.spec.config import Config
from honed.system import durable
from honed.system.device import Device, cpu
from honed.system.layout import Layout
from waiting import wait_for

#: A worker that says who it is, in `who.json` of its job's directory, and waits for SIGTERM. HONED_TEST_SPARE is how
#: its spare ends, and HONED_TEST_LOUD what it writes.
WORKER = """if True:
    import json, os, signal, sys, time
    print(os.environ.get("HONED_TEST_LOUD", ""), end="", flush=True)
    words = sys.argv[1:]
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    if words[0] == "--spare":
        how = os.environ.get("HONED_TEST_SPARE")
        if how == "dies":
            sys.exit("it cannot import")
        if how == "slow":
            time.sleep(600)
        os.write(0, b"ready")
        message = os.read(0, 1 << 20)
        if how == "declines" or not message:
            sys.exit(1)
        if how == "deaf":
            time.sleep(600)
        job = json.loads(message)
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["dir"])
        log_fd = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        words = job["command"][-4:]
        os.write(0, b"taken")
    print("worker", flush=True)
    who = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "words": words, "cwd": os.getcwd()}
    who["environment"] = dict(os.environ)
    who["mask"] = os.umask(0)
    with open("who.json.new", "w") as file:
        json.dump(who, file)
    os.rename("who.json.new", "who.json")
    while not asked:
        time.sleep(0.02)
    sys.exit(75)
"""
PLAN: dict[str, Any] = {
    "backend": {"name": "transformers"},
    "spec": {"kind": "sft", "training": {}},
    "checkpoint": {"model_type": "llama"},
    "precision": {
        "load_dtype": "float32",
        "compute_dtype": None,
        "bf16": False,
        "fp16": False,
        "adapter_dtype": None,
        "quantization": "none",
        "attn_implementation": "sdpa",
        "reasons": {},
    },
}
CONFIG = Config.model_validate({"jobs": {"warm_sec": 600.0, "stage_min_available_bytes": 0}})


class Place:
    """An instance whose loop is turned by hand. Its workers take a hundredth of a second to start."""

    def __init__(self, path: Path) -> None:
        self.layout, self.now, self.config = Layout(path), 0.0, CONFIG
        self.spool = Spool(self.layout)
        self.spool.recover()
        durable.make_dir(self.layout.state_dir)
        self.database = Database(self.layout.database_path)
        self.runner = ProcessRunner(self.layout, command=[sys.executable, "-I", "-S", "-c", WORKER])
        self.attempts = Attempts(
            self.layout, self.config, self.spool, self.database, self.runner, clock=lambda: self.now
        )

    @property
    def spares(self) -> Spares:
        return self.attempts.spares

    def add(self, number: int, uid: int = 4321, **plan: Any) -> Job:
        files = self.layout.files(number)
        durable.make_dir(files.place)
        PlanFile({**PLAN, **plan}).write(files.plan_path)
        durable.finish(self.spool.adding(Job(number, f"j{number}", 1.0, "a.json", uid, str(files.output_dir))))
        return self.job(number)

    def job(self, number: int) -> Job:
        job = self.spool.job(number)
        assert job is not None
        return job

    def begin(self, number: int, uid: int = 4321, device: Device | None = None, **plan: Any) -> dict[str, Any]:
        """Run a job's worker. Returns what it says of itself."""
        self.attempts.start(self.add(number, uid, **plan), [device or cpu()], "transformers")
        return self.who(number)

    def who(self, number: int) -> dict[str, Any]:
        path = self.layout.job(number).dir / "who.json"
        wait_for(lambda: self.attempts.reap() == [] and path.exists(), what="who the worker is")
        who: dict[str, Any] = json.loads(path.read_text())
        return who

    def end(self, number: int) -> None:
        """End a job's worker: its user is thought to need another soon."""
        running = self.attempts.running[number]
        self.runner.stop(number)
        wait_for(lambda: self.attempts.reap() != [], what="the worker's end")
        assert number not in self.attempts.running, running
        self.tend()

    def tend(self, *, num_busy: int = 0, may_make: bool = True) -> None:
        self.spares.tend(may_make=may_make, num_busy=num_busy)

    def spare(self, uid: int = 4321) -> int:
        """Return the pid of a user's spare, once it is ready."""
        kept = self.spares._kept[uid]
        wait_for(lambda: kept.spare.is_ready, what="a spare that is ready")
        return int(kept.spare.process.pid)

    def lock(self, number: int) -> dict[str, Any]:
        """Return the pids in the lock file, once they are there: the worker runs before its shim writes them."""
        attempt = self.layout.files(number).attempt(1)
        return wait_for(lambda: read_lock_record(attempt, 1), what="the record in the lock file")

    def log(self, number: int) -> str:
        return self.layout.job(number).attempt(1).log_path.read_text()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.spares.end_all("the test ends")
    for number in list(made.attempts.running):
        made.runner.kill(number, shim_too=True)
    wait_for(lambda: made.attempts.reap() is not None and not made.attempts.running, what="the workers' end")
    made.database.close()
    made.spool.close()


def test_the_next_job_of_the_user_is_what_a_cold_one_is_in_the_process_of_the_spare(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONED_TEST_LOUD", "imported\n")
    cold = place.begin(1)
    place.end(1)
    spare = place.spare()
    assert spare not in {cold["pid"], cold["parent"]}
    warm = place.begin(2)
    assert (warm["parent"], warm["session"]) == (spare, spare)
    assert (cold["parent"], cold["session"]) == (cold["session"], cold["session"])
    assert warm["cwd"] == str(place.layout.job(2).dir)
    assert warm["words"] == [str(place.layout.job(2).dir), "1", "--backend", "transformers"]
    assert warm["environment"].pop("HONED_JOB") == "2"
    cold["environment"].pop("HONED_JOB")
    assert warm["environment"] == cold["environment"]
    assert warm["mask"] == cold["mask"]
    assert place.log(2) == place.log(1) == "imported\nworker\n"
    assert place.lock(2) == {"shim_pid": spare, "worker_pid": warm["pid"], "start": 1}
    assert [(each.job_id, each.attempt, each.device) for each in place.runner.live()] == [(2, (1, 1), "cpu")]
    assert str(Path(f"/proc/{spare}/fd/0").readlink()) == "/dev/null"
    assert str(Path(f"/proc/{spare}/cwd").readlink()) == warm["cwd"]
    place.end(2)
    job = place.job(2)
    assert (job.state, len(job.attempts)) == (State.HELD, 1)  # exit 75 without a result, after a SIGTERM of a person's
    record = json.loads(place.layout.job(2).attempt(1).exit_path.read_text())
    assert (record["start"], record["status"], record["was_asked"]) == (1, 75, True)


def test_a_spare_is_never_another_user_s(place: Place) -> None:
    place.begin(1, uid=4321)
    place.end(1)
    spare = place.spare()
    assert place.begin(2, uid=1234)["parent"] != spare
    assert is_there(spare)
    assert place.begin(3, uid=4321)["parent"] == spare


QUANTIZED = {"precision": {**PLAN["precision"], "quantization": "4bit"}}


@pytest.mark.parametrize(
    "plan",
    [
        {"checkpoint": {"model_type": "qwen3"}},
        {"checkpoint": {"model_type": "llama", "has_vision": True}},
        {"spec": {"kind": "sft", "report_to": ["wandb"]}},
        {"spec": {"kind": "sft", "training": {"torch_compile": True}}},
        QUANTIZED,
    ],
    ids=["model", "vision", "wandb", "compiler", "4bit"],
)
def test_a_job_that_needs_other_libraries_starts_anew(place: Place, plan: dict[str, Any]) -> None:
    place.begin(1)
    place.end(1)
    spare = place.spare()
    assert place.begin(2, **plan)["parent"] != spare
    assert is_there(spare)  # the next one may be as the one before


@pytest.mark.parametrize(
    "plan",
    [
        QUANTIZED,
        {"backend": {"name": "unsloth"}},
        {"spec": {"kind": "sft", "trust_remote_code": True}},
        {"spec": {"kind": "sft", "training": {"optim": "adamw_8bit"}}},
        {"spec": {"kind": "merge"}},
        {"precision": None},
    ],
    ids=["4bit", "unsloth", "remote code", "8-bit optimizer", "merge", "damaged"],
)
def test_what_asks_the_device_or_runs_other_code_gets_no_spare(place: Place, plan: dict[str, Any]) -> None:
    backend = plan.get("backend", PLAN["backend"])["name"]
    place.attempts.start(place.add(1, **plan), [cpu()], backend)
    place.who(1)
    place.end(1)
    assert place.spares._kept == {}


@pytest.mark.parametrize("name", ["HF_HOME", "OMP_NUM_THREADS", "HONED_STAGED"])
def test_a_job_with_another_environment_starts_anew(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place.begin(1)
    place.end(1)
    spare = place.spare()
    with monkeypatch.context() as other:
        other.setenv(name, "7")
        assert place.begin(2)["parent"] != spare
    assert place.begin(3)["parent"] == spare


def test_a_spare_made_beside_one_gpu_is_for_any_gpu_and_not_for_the_processor(place: Place) -> None:
    first, second = (Device("cuda", name, uuid=f"GPU-{name}") for name in "ab")
    place.begin(1, device=first)
    place.end(1)
    spare = place.spare()
    assert place.begin(2, device=cpu())["parent"] != spare
    warm = place.begin(3, device=second)
    assert warm["parent"] == spare
    assert warm["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert [each.device for each in place.runner.live() if each.job_id == 3] == ["GPU-b"]


# -- the end of a spare ------------------------------------------------------------------------------------------------


def test_a_spare_ends_when_its_user_was_not_seen_for_so_long(place: Place) -> None:
    place.begin(1)
    place.end(1)
    spare = place.spare()
    assert place.spares.patience() <= 600.0
    place.now = 500.0
    place.spares.see(4321)
    place.spares.see(1234)
    place.now = 1099.0
    place.tend()
    assert is_there(spare)
    place.now = 1100.0
    place.tend()
    wait_for(lambda: not is_there(spare), what="the spare's end")
    place.tend()
    assert place.spares.patience() == float("inf")  # the idle daemon is what it was


def test_the_user_s_last_job_decides_what_the_spare_has_imported(place: Place) -> None:
    place.begin(1)
    place.end(1)
    spare = place.spare()
    place.begin(2, checkpoint={"model_type": "qwen3"})
    place.end(2)
    other = place.spare()
    assert other != spare
    wait_for(lambda: not is_there(spare), what="the spare's end")
    assert place.begin(3, checkpoint={"model_type": "qwen3"})["parent"] == other


def test_the_user_that_was_seen_last_keeps_a_spare(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "MAX_SPARES", 2)
    for number, uid in enumerate((1001, 1002, 1003), 1):
        place.now += 1.0
        place.begin(number, uid=uid)
        place.end(number)
        place.spare(uid)
        if uid == 1002:
            place.spares.see(1001)
            place.now += 1.0
            place.spares.see(1001)
    assert set(place.spares._kept) == {1001, 1003}


def test_none_is_made_where_it_is_off_or_processors_or_memory_are_short(place: Place) -> None:
    off = Config.model_validate({"jobs": {"warm_sec": 0.0, "stage_min_available_bytes": 0}})
    short = Config.model_validate({"jobs": {"warm_sec": 600.0, "stage_min_available_bytes": 2**60}})
    for number, config in enumerate((off, short), 1):
        place.attempts.config = config
        place.begin(number)
        place.end(number)
        assert place.spares._kept == {}
    place.attempts.config = CONFIG
    for number, how in enumerate(({"num_busy": len(os.sched_getaffinity(0))}, {"may_make": False}), 3):
        place.spares.want(replace(place.job(1), id=1, state=State.SUCCEEDED), {})
        place.tend(**how)
        assert place.spares._kept == {}, number


def test_spares_end_where_memory_becomes_short(place: Place) -> None:
    place.begin(1)
    place.end(1)
    spare = place.spare()
    place.attempts.config = Config.model_validate({"jobs": {"warm_sec": 600.0, "stage_min_available_bytes": 2**60}})
    place.now += spares_module.LOOK_INTERVAL_SEC
    place.tend()
    wait_for(lambda: not is_there(spare), what="the spare's end")


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_spare_that_cannot_import_is_told_of_and_forgotten(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HONED_TEST_SPARE", "dies")
    place.begin(1)
    place.end(1)
    wait_for(lambda: place.tend() is None and place.spares._kept == {}, what="no spare is kept")
    assert "it cannot import" in caplog.text
    place.begin(2)


def test_a_spare_that_never_becomes_ready_is_not_given_and_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONED_TEST_SPARE", "slow")
    place.begin(1)
    place.end(1)
    pid = place.spares._kept[4321].spare.process.pid
    assert place.begin(2)["parent"] != pid
    place.now += spares_module.MAKE_SEC
    place.tend()
    wait_for(lambda: not is_there(pid), what="the process's end")


@pytest.mark.parametrize("how", ["declines", "deaf"])
def test_a_spare_that_does_not_take_the_job_costs_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("HONED_TEST_SPARE", how)
    place.begin(1)
    place.end(1)
    spare = place.spare()
    who = place.begin(2)
    assert who["parent"] == spare  # the same shim; but the worker is another one
    assert "it starts anew" in place.log(2)
    assert place.lock(2)["worker_pid"] == who["pid"]
    assert len(place.job(2).attempts) == 1
    place.end(2)


@pytest.mark.parametrize("whose", ["shim", "worker"])
def test_a_spare_that_is_killed_while_it_is_given_costs_nothing(place: Place, whose: str) -> None:
    place.begin(1)
    place.end(1)
    shim = place.spare()
    [worker] = map(int, Path(f"/proc/{shim}/task/{shim}/children").read_text().split())
    victim = shim if whose == "shim" else worker
    os.kill(victim, signal.SIGSTOP)
    place.attempts.start(place.add(2), [cpu()], "transformers")
    os.kill(victim, signal.SIGKILL)
    who = place.who(2)
    assert who["pid"] != worker
    assert (who["parent"] == shim) is (whose == "worker")
    job = place.job(2)
    assert (job.state, len(job.attempts), job.attempt.num_starts) == (State.RUNNING, 1, 1)
    place.end(2)


def test_a_job_that_is_asked_to_stop_while_it_is_given_a_spare_is_not_started_again(place: Place) -> None:
    place.begin(1)
    place.end(1)
    shim = place.spare()
    os.kill(shim, signal.SIGSTOP)
    place.attempts.start(place.add(2), [cpu()], "transformers")
    place.runner.stop(2)
    os.kill(shim, signal.SIGKILL)
    wait_for(lambda: place.attempts.reap() != [], what="the worker's end")
    assert not (place.layout.job(2).dir / "who.json").exists()


def test_a_stop_that_comes_while_the_spare_is_given_reaches_the_worker(place: Place) -> None:
    place.begin(1)
    place.end(1)
    shim = place.spare()
    os.kill(shim, signal.SIGSTOP)
    place.attempts.start(place.add(2), [cpu()], "transformers")
    place.runner.stop(2)
    os.kill(shim, signal.SIGCONT)
    wait_for(lambda: place.attempts.reap() != [], what="the worker's end")
    record = json.loads(place.layout.job(2).attempt(1).exit_path.read_text())
    assert (record["status"], record["was_asked"]) == (75, True)


def test_a_dead_spare_is_not_given(place: Place) -> None:
    place.begin(1)
    place.end(1)
    spare = place.spare()
    os.killpg(spare, signal.SIGKILL)
    assert place.begin(2)["parent"] != spare


def test_what_a_plan_needs_survives_its_way_to_the_spare() -> None:
    needs = Needs.of(PlanFile(PLAN), "transformers")
    assert needs.can_be_ahead
    assert Needs.from_json(needs.to_json()) == needs


def test_a_spare_that_vanished_is_replaced_as_soon_as_that_is_possible(place: Place) -> None:
    place.begin(1)
    place.end(1)
    shim = place.spare()
    os.kill(shim, signal.SIGSTOP)
    place.attempts.start(place.add(2), [cpu()], "transformers")
    log_path = place.layout.job(2).attempt(1).log_path
    log_path.unlink()
    log_path.mkdir()  # no worker can be started
    os.kill(shim, signal.SIGKILL)
    wait_for(lambda: not is_there(shim), what="the shim's end")
    assert place.attempts.reap() == []
    assert 2 in place.attempts.running
    log_path.rmdir()
    assert place.who(2)["parent"] != shim
    assert place.spares.patience() == float("inf")


def test_a_trial_alone_leaves_the_spare_to_the_job(place: Place) -> None:
    place.begin(1, spec={"kind": "sft", "trial": "only"})
    place.end(1)
    spare = place.spare()
    assert place.begin(2, spec={"kind": "sft", "trial": "only"})["parent"] != spare
    assert place.begin(3)["parent"] == spare
