"""Live workers compared with entries."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from honed.daemon.fencing import RETRY_SEC, UNKNOWN_DEVICE, Fence
from honed.job.job import Attempt, Job, State
from honed.job.spool import Spool
from honed.run.process import ProcessRunner
from honed.run.runner import Live, Runner
from honed.system import durable
from honed.system.layout import Layout


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    made.recover()
    yield made
    made.close()


class Finding:
    """A runner that finds these workers."""

    def __init__(self, *found: Live, problem: OSError | None = None) -> None:
        self.found, self.problem = list(found), problem

    def live(self) -> list[Live]:
        if self.problem is not None:
            raise self.problem
        return self.found


def run(spool: Spool, *found: Live) -> list[Job]:
    return Fence(spool, cast(Runner, Finding(*found)), clock=lambda: 0.0, interval=lambda: 30.0).look()


def add(spool: Spool, state: State, **keys: Any) -> Job:
    files = spool.layout.job(1)
    durable.make_dir(files.dir)
    job = Job(1, "one", 1.0, "a.json", 4321, str(files.output_dir), **keys)
    durable.finish(spool.adding(job))
    if state is State.QUEUED:
        return job
    job = spool.move(job, State.RUNNING, attempts=(Attempt(1, "transformers", 2.0, device="cpu"),))
    ended = job.with_attempt(ended_at=3.0, outcome="interrupted", took_sec=1.0)
    return job if state is State.RUNNING else spool.move(ended, state)


def test_a_running_job_whose_worker_lives_is_left_as_it_is(spool: Spool) -> None:
    job = add(spool, State.RUNNING)
    run(spool, Live(1, (1, 1), "cpu"))
    assert spool.job(1) == job


@pytest.mark.parametrize("state", [state for state in State if state.is_final])
def test_an_ended_job_whose_last_worker_is_still_there_stays_ended(spool: Spool, state: State) -> None:
    job = add(spool, state)
    run(spool, Live(1, (1, 1), "cpu"))
    assert spool.job(1) == job


def test_a_job_that_waits_and_whose_worker_lives_is_running(spool: Spool) -> None:
    add(spool, State.QUEUED)
    run(spool, Live(1, (1, 1), "GPU-1"))
    job = spool.job(1)
    assert job is not None
    assert (job.state, job.uid, job.attempt.number, job.attempt.device) == (State.RUNNING, 4321, 1, "GPU-1")
    assert [path.parent.name for path in spool.dir.glob("*/1.json")] == ["running"]
    spool.recover()
    assert spool.job(1) == job


def test_an_attempt_that_its_entry_calls_ended_goes_on(spool: Spool) -> None:
    add(spool, State.QUEUED)
    ended = add_attempts(spool, 3)
    run(spool, Live(1, (2, 1), "cpu"))
    job = spool.job(1)
    assert job is not None
    assert [attempt.number for attempt in job.attempts] == [1, 2]
    assert (job.attempt.ended_at, job.attempt.outcome, job.attempt.took_sec) == (None, None, None)
    assert job.attempts[0] == ended.attempts[0]


def add_attempts(spool: Spool, count: int) -> Job:
    job = spool.job(1)
    assert job is not None
    attempts = tuple(Attempt(n, "transformers", 2.0, ended_at=3.0, outcome="killed") for n in range(1, count + 1))
    return spool.update(job, attempts=attempts)


def test_of_a_worker_without_any_file_honed_itself_has_the_job(spool: Spool) -> None:
    durable.make_dir(spool.layout.job(1).dir)
    run(spool, Live(1, (4, 2), None))
    job = spool.job(1)
    assert job is not None
    assert (job.name, job.uid, job.max_attempts) == ("job-1", os.getuid(), 1)
    assert (job.attempt.number, job.attempt.start, job.attempt.device) == (4, 2, UNKNOWN_DEVICE)


def test_a_worker_whose_directory_is_gone_gets_an_entry(spool: Spool) -> None:
    (job,) = run(spool, Live(1, (1, 1), "cpu"))
    assert (job.name, job.uid, job.state) == ("job-1", os.getuid(), State.RUNNING)


@pytest.mark.parametrize(
    "document",
    [
        {"job": []},
        {"job": {"id": 1, "name": "x", "user_id": "4X21"}, "output_dir": "/o"},
        {"job": {"id": 1, "name": "x", "user_id": "4321"}, "output_dir": [1]},
        {"job": {"id": 2, "name": "x", "user_id": "4321"}, "output_dir": "/o"},
    ],
    ids=str,
)
def test_a_plan_that_is_damaged_too_is_not_used(spool: Spool, document: dict[str, Any]) -> None:
    files = spool.layout.job(1)
    durable.make_dir(files.dir)
    files.plan_path.write_text(json.dumps(document))
    (job,) = run(spool, Live(1, (1, 1), "cpu"))
    assert (job.name, job.uid, job.output_dir) == ("job-1", os.getuid(), str(files.output_dir))


def test_of_a_worker_whose_attempt_is_not_known_the_entry_is_believed_before_its_directories(spool: Spool) -> None:
    job = add(spool, State.RUNNING)
    for name in ("2", "99", "9" * 25, "x"):
        durable.make_dir(spool.layout.job(1).attempts_dir / name)
    assert run(spool, Live(1, None, None)) == []
    assert spool.job(1) == job
    spool.entries.path(1, State.RUNNING).unlink()
    spool.recover()
    assert [each.attempts for each in run(spool, Live(1, None, None))] == [job.attempts]
    spool.entries.path(1, State.RUNNING).unlink()
    spool.layout.job(1).entry_path.unlink()
    spool.recover()
    (bare,) = run(spool, Live(1, None, None))
    assert (bare.attempt.number, bare.attempt.device) == (99, UNKNOWN_DEVICE)


def test_a_pruned_job_whose_worker_lives_is_a_job_again(spool: Spool) -> None:
    job = add(spool, State.SUCCEEDED)
    spool.prune(job)
    (again,) = run(spool, Live(1, (2, 1), "cpu"))
    assert not spool.pruned.has(1)
    spool.recover()
    assert spool.job(1) == again


def test_until_the_workers_can_be_listed_there_is_a_fault_and_then_they_are_fenced(spool: Spool) -> None:
    job, now = add(spool, State.QUEUED), [0.0]
    runner = Finding(Live(1, (1, 1), "cpu"), problem=OSError("no bus"))
    fence = Fence(spool, cast(Runner, runner), clock=lambda: now[0], interval=lambda: 30.0)
    assert fence.look() == []
    assert "so no job is started: no bus" in fence.fault
    assert spool.job(1) == job
    runner.problem = None
    assert fence.look() == []
    now[0] = RETRY_SEC
    assert [each.id for each in fence.look()] == [1]
    assert fence.fault == ""
    assert fence.look() == []


def test_workers_are_looked_for_at_intervals_and_at_once_when_a_start_is_in_doubt(spool: Spool) -> None:
    add(spool, State.QUEUED)
    runner, now = Finding(), [0.0]
    fence = Fence(spool, cast(Runner, runner), clock=lambda: now[0], interval=lambda: 30.0)
    assert fence.look() == []
    runner.found = [Live(1, (1, 1), "cpu")]
    assert not fence.is_due
    assert fence.look() == []
    now[0] = 30.0
    assert fence.is_due
    assert fence.look({1}) == [], "its worker is followed"
    fence.doubt()
    assert [each.id for each in fence.look()] == [1]
    assert spool.corrupt.names() == ["1.running.json"], "so that honed is degraded until somebody has read why"


def start_shim(attempt_dir: Path, *before: str, **keys: Any) -> subprocess.Popen[bytes]:
    """Start a process that looks like the shim of an attempt."""
    command = ["/bin/sh", "-c", "echo; read -r line", "/somewhere/shim.py", *before, str(attempt_dir), "1", "worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **keys)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@pytest.mark.parametrize("before", [(), ("--relay",)], ids=str)
def test_a_shim_is_found_by_its_process_and_only_that_of_this_instance(tmp_path: Path, before: tuple[str, ...]) -> None:
    layout = Layout(tmp_path / "root")
    runner = ProcessRunner(layout)
    attempt = layout.job(7).attempt(3)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-1"}
    others = [layout.job(8).dir / "trial/attempts/1", Layout(tmp_path / "other").job(9).attempt(1).dir]
    processes = [start_shim(place, *before, env=environment) for place in (attempt.dir, *others)]
    try:
        assert runner.live() == [Live(7, (3, 1), "GPU-1")]
        durable.make_dir(attempt.dir)
        durable.write_json(attempt.exit_path, {"start": 1, "status": 0, "signal": None})
        assert runner.live() == []
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_of_another_user_is_no_shim_of_ours(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run a process as another user")
    layout = Layout(tmp_path / "root")
    process = start_shim(layout.job(7).attempt(3).dir, user=65534, group=65534, cwd="/")
    try:
        assert ProcessRunner(layout).live() == []
    finally:
        process.kill()
        process.wait()


def test_a_job_keeps_what_else_its_entry_says(spool: Spool) -> None:
    job = add(spool, State.QUEUED, priority=5, depends_on=("a",), is_pinned=True)
    run(spool, Live(1, (1, 1), "cpu"))
    rebuilt = spool.job(1)
    assert rebuilt is not None
    kept = {"id", "name", "priority", "depends_on", "is_pinned", "output_dir", "source", "submitted_at"}
    assert all(
        getattr(rebuilt, field.name) == getattr(job, field.name)
        for field in dataclasses.fields(Job)
        if field.name in kept
    )
