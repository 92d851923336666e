"""Experiment trackers: they write to the job's directory, and honed-send alone sends wandb's runs over the network."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import wandbserver
import yaml
from harness import RealInstance
from wandbserver import WandbServer

from honed.job.job import Job, State
from honed.job.spool import Pruned
from honed.send import wandb_runs
from honed.system.layout import Layout
from honed.worker.assignment import Assignment
from honed.worker.train import tracker
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
KEY = "0123456789abcdef" * 2 + "01234567"
RUN = "offline-run-20260101_000000-abc123de"


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandbserver.running() as made:
        yield made


def configure(real: RealInstance, server: WandbServer, *more: str) -> None:
    key_path = real.root / "wandb-key"
    key_path.write_text(f"{KEY}\n")
    lines = ["[reporting]", "sync_wandb = true", f'wandb_key_file = "{key_path}"', f'wandb_base_url = "{server.url}"']
    real.configure("\n".join([*lines, *more, ""]))


def drop(real: RealInstance, name: str, **keys: Any) -> None:
    model = real.root / "qwen3"
    if not model.exists():
        build_checkpoint(model, "qwen3")
        write_facts(real.root / "facts.jsonl", 8)
    spec = {
        "base_model": str(model),
        "datasets": [{"path": str(real.root / "facts.jsonl")}],
        "lora": {"r": 4},
        "backend": "transformers",
        "eval_split": 0.25,
        "predictions": {"num_samples": 2, "max_new_tokens": 4},
        "training": {"max_steps": 4, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2},
        **keys,
    }
    path = real.root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec))
    shutil.copy(path, real.incoming_dir)


def sender(real: RealInstance, log_path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "honed.send.sender", "--until-eof", "--root", str(real.root)]
    with log_path.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file)


@needs_wandb
@needs_tensorboard
def test_a_jobs_trackers_write_beside_it_and_its_wandb_run_arrives_once(
    real: RealInstance, server: WandbServer
) -> None:
    configure(real, server)
    drop(real, "facts", report_to=["wandb", "tensorboard"])
    real.start("--drain")
    assert real.wait(deadline_sec=600) == 0
    shown = real.show("facts")
    assert shown["state"] == "succeeded", real.log
    job_dir = Path(shown["job_dir"])
    assert list((job_dir / "tensorboard/1").glob("events.out.tfevents.*"))
    [run] = (job_dir / "wandb").glob("offline-run-*")
    [run_id] = server.runs
    assert run.name.endswith(run_id)
    assert server.runs[run_id] == "facts"
    history = server.streams["wandb-history.jsonl"]
    losses = {row["train/global_step"]: row["train/loss"] for row in history if "train/loss" in row}
    assert list(losses) == [1, 2, 3, 4]
    assert losses[4] == pytest.approx(shown["metrics"]["loss"])
    assert server.keys == {"Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()}

    outbox = real.layout.outbox_dir
    name = f"1.{run.name}"
    assert wandb_runs.is_synced(outbox, name)
    assert list(wandb_runs.waiting(outbox)) == []
    num_requests = server.num_requests
    real.start()
    wait_for(lambda: not list(wandb_runs.runs_dir(outbox).iterdir()), what="what is synchronised is removed")
    real.stop()
    assert server.num_requests == num_requests, "it is not sent again"
    kept = [path for path in real.root.rglob("*") if path.is_file() and not path.name.endswith(".key")]
    secret = [path for path in kept if path.name != "wandb-key" and KEY.encode() in path.read_bytes()]
    assert secret == [], "the key is in no other file"


@needs_wandb
def test_a_job_with_wandb_opens_no_socket_of_the_network(real: RealInstance) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    drop(real, "facts.hold", report_to="wandb", predictions={"sample_frequency": "off"}, training={"max_steps": 2})
    real.start()
    real.wait_state("facts", State.HELD)
    real.stop()
    plan_dir = real.layout.job(1).dir
    trace_path = real.root / "trace"
    command = [
        "strace",
        "-f",
        "-qq",
        "-e",
        "trace=socket,connect,bind",
        "-o",
        str(trace_path),
        sys.executable,
        "-m",
        "honed.worker",
        str(plan_dir),
        "7",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((plan_dir / "wandb").glob("offline-run-*"))) == 1
    trace = trace_path.read_text()
    opened = re.findall(r"socket\((AF_\w+)", trace)
    # urllib3 asks once whether there is IPv6, by binding a socket to ::1; netlink tells which interfaces there are.
    assert set(opened) <= {"AF_UNIX", "AF_NETLINK", "AF_INET6"}, set(opened)
    assert opened.count("AF_INET6") <= 1
    assert set(re.findall(r"connect\(\d+, {sa_family=(AF_\w+)", trace)) == {"AF_UNIX"}, "wandb's own server is one"


def log_of(*records: bytes) -> bytes:
    """Return a log as wandb writes it, in LevelDB's format: 32 KiB blocks, each record in as many parts as it needs."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for whole in records:
        rest, is_first = whole, True
        while is_first or rest:
            left = 32768 - len(data) % 32768
            if left < 7:
                data += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if not rest else 2) if is_first else (3 if rest else 4)
            data += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    return bytes(data)


def record(field: int, value: bytes) -> bytes:
    """Return a protobuf message of one length-delimited field; its tag and its length are below 2**14."""
    return _number(field << 3 | 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _number(value >> 7)


FIGURES = [record(17, b"run"), record(2, b"x" * 40_000), record(6, record(1, b"requirements.txt")), b"\x08\x05"]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (log_of(*FIGURES), None),
        (log_of(*FIGURES)[:-3], None),  # as a killed worker leaves it
        (b"", "not a wandb log"),
        (log_of(*FIGURES, record(8, b"artifact")), "a record of kind 8"),
        (log_of(record(9, b"/srv/tensorboard")), "a record of kind 9"),
        (log_of(record(100, b"request")), "a record of kind 100"),
        (log_of(record(2, b"x") + record(8, b"both at once")), "a record of kind 8"),
        (log_of(record(2, b"x" * 32_730), record(6, b"../../../../etc/shadow")), "outside the run"),
        (log_of(record(2, b"x")).replace(b"\x01\x12", b"\x03\x12"), "damaged"),
        (log_of(b"\x12\x7f"), "damaged"),
        (log_of(b"\xff" * 20), "damaged"),
    ],
)
def test_a_log_that_names_other_files_than_its_runs_is_not_sent(data: bytes, why: str | None) -> None:
    """wandb sync uploads what a log names, and a worker could have written anything into it."""
    if why is None:
        assert list(wandb_runs.checking(data)) == []
    else:
        with pytest.raises(ValueError, match=why):
            list(wandb_runs.checking(data))


def offline(layout: Layout, job_id: int, data: bytes = log_of(*FIGURES)) -> Path:
    """An offline run as a worker leaves it."""
    run = layout.job(job_id).dir / "wandb" / RUN
    run.mkdir(parents=True)
    (run / "run-abc123de.wandb").write_bytes(data)
    return run


def job(job_id: int, state: State = State.SUCCEEDED) -> Job:
    return Job(id=job_id, name="j", submitted_at=0, source="j", uid=1000, output_dir="/o", state=state)


def collector_of(layout: Layout, **keys: Any) -> wandb_runs.Collector:
    return wandb_runs.Collector(layout, Pruned(layout.spool_dir).get, **keys)


def tend(collector: wandb_runs.Collector, moved: set[int], jobs: dict[int, Job]) -> int:
    """Let a collector copy all that is due. Returns in how many turns."""
    num_turns, is_first = 0, True
    while is_first or collector.patience() < math.inf:
        collector.tend(moved=moved if is_first else set(), job_of=jobs.get, is_wanted=True)
        num_turns, is_first = num_turns + 1, False
    return num_turns


def test_runs_of_ended_jobs_are_copied_and_nothing_that_a_link_leads_to(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    offline(layout, 1)
    (log,) = offline(layout, 2).iterdir()
    log.unlink()
    log.symlink_to(secret)
    offline(layout, 3, b"x" * (wandb_runs.MAX_BYTES + 1))
    offline(layout, 4)
    jobs = {number: job(number) for number in (1, 2, 3)} | {4: job(4, State.RUNNING)}
    collector = collector_of(layout)
    collector.tend(moved=set(), job_of=jobs.get, is_wanted=False)
    assert not layout.outbox_dir.exists()
    tend(collector, set(), jobs)
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"1.{RUN}"]
    tend(collector, {4}, jobs | {4: job(4)})
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"1.{RUN}", f"4.{RUN}"]
    wandb_runs.mark_synced(layout.outbox_dir, f"1.{RUN}", when=0)
    tend(collector, {1}, jobs)
    assert [path.name for path in wandb_runs.runs_dir(layout.outbox_dir).iterdir()] == [f"4.{RUN}"]


def test_a_run_that_the_disk_did_not_take_is_taken_once_there_is_room(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for number in (1, 2):
        offline(layout, number)
    jobs = {number: job(number) for number in (1, 2)}
    collector = collector_of(layout)
    tend(collector, set(), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # below the 40,000 bytes of a run
    try:
        with pytest.raises(OSError, match="too large"):
            tend(collector, {1, 2}, jobs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(wandb_runs.waiting(layout.outbox_dir)) == []
    tend(collector, set(), jobs)
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"1.{RUN}", f"2.{RUN}"]


@pytest.mark.parametrize("kind", [1, 3])
def test_a_log_of_endless_small_parts_is_checked_for_a_moment_at_a_time(tmp_path: Path, kind: int) -> None:
    """64 MiB of them take Python two minutes."""
    layout = Layout(tmp_path)
    parts = struct.pack("<IHB", 0, 0, kind) * 4000
    offline(layout, 1, b":W&B\xe1\xbe\x00" + (struct.pack("<IHB", 0, 0, 2) if kind == 3 else b"") + parts)
    offline(layout, 2)
    jobs = {number: job(number) for number in (1, 2)}
    times = iter(range(1000))
    collector = collector_of(layout, clock=lambda: next(times))  # a second passes between two looks
    num_turns = tend(collector, {1, 2}, jobs)
    assert num_turns > 4
    assert len(list(wandb_runs.waiting(layout.outbox_dir))) == 2


def test_copies_of_one_users_runs_have_limited_room_until_some_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hard links, ten thousand of 64 MiB cost their author 64 MiB."""
    monkeypatch.setattr(wandb_runs, "MAX_USER_BYTES", 2 * wandb_runs.MIN_BYTES)
    layout = Layout(tmp_path)
    for number in (1, 2, 3, 4):
        offline(layout, number)
    jobs = {number: job(number) for number in (1, 2, 3)} | {4: replace(job(4), uid=1001)}
    now = 0.0
    collector = collector_of(layout, clock=lambda: now)
    tend(collector, {1, 2, 3, 4}, jobs)
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"{n}.{RUN}" for n in (1, 2, 4)]
    wandb_runs.mark_synced(layout.outbox_dir, f"1.{RUN}", when=0)
    now += wandb_runs.ROOM_SEC
    for _ in range(2):  # no other job's state changes: the one without room is not forgotten
        tend(collector, set(), jobs)
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"{n}.{RUN}" for n in (2, 3, 4)]


def test_copies_of_a_pruned_jobs_runs_take_room_over_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever prunes a job whose run waits has room for another one."""
    monkeypatch.setattr(wandb_runs, "MAX_USER_BYTES", 2 * wandb_runs.MIN_BYTES)
    layout = Layout(tmp_path)
    for number in (1, 2, 3):
        offline(layout, number)
    jobs = {number: job(number) for number in (1, 2)}
    tend(collector_of(layout), {1, 2}, jobs)
    pruned = Pruned(layout.spool_dir)
    pruned.dir.mkdir(parents=True)
    for number in (1, 2):
        pruned.path(number, State.SUCCEEDED).write_bytes(job(number).to_json())
    tend(collector_of(layout), {3}, {3: job(3)})
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"{n}.{RUN}" for n in (1, 2)]
    tend(collector_of(layout), {3}, {3: replace(job(3), uid=1001)})
    assert [path.name for path in wandb_runs.waiting(layout.outbox_dir)] == [f"{n}.{RUN}" for n in (1, 2, 3)]


def test_a_check_rests_as_long_as_it_took(tmp_path: Path) -> None:
    """Meanwhile the loop sleeps, and answers at once."""
    layout = Layout(tmp_path)
    offline(layout, 1, b":W&B\xe1\xbe\x00" + struct.pack("<IHB", 0, 0, 1) * 4000)
    now, look_sec = 0.0, 1.0

    def clock() -> float:
        nonlocal now
        now += look_sec
        return now

    collector = collector_of(layout, clock=clock)
    for _ in range(2):
        look_sec = 1.0
        collector.tend(moved=set(), job_of={1: job(1)}.get, is_wanted=True)
        look_sec = 0.0
        assert collector.patience() == 1.0
        collector.tend(moved=set(), job_of={1: job(1)}.get, is_wanted=True)
        assert collector.patience() == 1.0, "it has read on, to the end"
        now += 1.0
        assert collector.patience() == 0.0


@needs_wandb
def test_a_key_that_is_refused_marks_nothing_and_a_new_one_sends_it(real: RealInstance, server: WandbServer) -> None:
    """wandb sync ends with status 0 for a wrong key."""
    import wandb

    configure(real, server, "flush_sec = 60")
    made = real.root / "made"
    made.mkdir()
    script = (
        "import wandb\nrun = wandb.init(project='p', name='n')\n"
        "for step in range(3): run.log({'loss': step})\nrun.finish()\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(made), "WANDB_ERROR_REPORTING": "false"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    assert wandb.__version__
    [run] = (made / "wandb").glob("offline-run-*")
    outbox = real.layout.outbox_dir
    shutil.copytree(run, wandb_runs.runs_dir(outbox) / f"1.{run.name}")
    server.status = 401
    log_path = real.root / "send.log"
    sending = sender(real, log_path)
    try:
        wait_for(lambda: "not sent to wandb, retrying" in log_path.read_text(), what="word of it")
        [own] = re.findall(r"; see (/\S+)", log_path.read_text())
        assert "no such key" in Path(own).read_text()
        assert KEY not in log_path.read_text()
        assert len(list(wandb_runs.waiting(outbox))) == 1
        server.status = 200
        assert sending.stdin is not None
        sending.stdin.close()  # the end of the daemon: once more
        assert sending.wait(600) == 0
    finally:
        sending.kill()
    assert list(wandb_runs.waiting(outbox)) == [], log_path.read_text()
    assert [row["loss"] for row in server.streams["wandb-history.jsonl"]] == [0, 1, 2]
    assert json.loads((wandb_runs.synced_dir(outbox) / f"1.{run.name}.json").read_text())["run"] == f"1.{run.name}"


def test_mlflow_and_trackio_are_told_to_write_beside_the_job_and_to_call_nobody() -> None:
    """honed's own environment is overridden; mlflow's telemetry contacts its makers' server at the first logging."""
    job = SimpleNamespace(
        spec=SimpleNamespace(report_to=["mlflow", "trackio"]), layout=SimpleNamespace(dir=Path("/jobs/7"))
    )
    environment = {
        "HOME": "/root",
        "MLFLOW_TRACKING_URI": "https://mlflow.example",
        "MLFLOW_TRACKING_TOKEN": "s3cret",
        "MLFLOW_RUN_ID": "4711",
        "MLFLOW_EXPERIMENT_NAME": "ours",
        "TRACKIO_SERVER_URL": "https://trackio.example",
        "TRACKIO_SPACE_ID": "we/space",
        "TRACKIO_BUCKET_ID": "we/bucket",
        "TRACKIO_WEBHOOK_URL": "https://hook.example",
    }
    tracker.prepare(cast("Assignment", job), environment)
    assert environment == {
        "HOME": "/root",
        "MLFLOW_TRACKING_URI": "sqlite:////jobs/7/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_EXPERIMENT_NAME": "ours",
        "HF_MLFLOW_LOG_ARTIFACTS": "false",
        "TRACKIO_DIR": "/jobs/7/trackio",
    }


def test_a_job_that_reports_to_one_tracker_has_the_environment_of_no_other() -> None:
    job = SimpleNamespace(spec=SimpleNamespace(report_to=["trackio"]), layout=SimpleNamespace(dir=Path("/jobs/7")))
    environment = {"MLFLOW_TRACKING_URI": "x"}
    tracker.prepare(cast("Assignment", job), environment)
    assert environment == {"MLFLOW_TRACKING_URI": "x", "TRACKIO_DIR": "/jobs/7/trackio"}
