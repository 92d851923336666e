"""One daemon through a long bad day: file operations fail at random while jobs come, run, wait for each other, and are
changed by people. What it has in memory is at every quiet moment what lies on the disk."""

# ruff: noqa: ARG002 - a runner's methods take what a runner's methods take
from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.loop import Daemon
from honed.job.arrival import Arrivals
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.run.runner import Exit, Live, NotNowError, Runner
from honed.spec.config import Config
from honed.system import device
from honed.system.control import Request
from honed.system.error import HonedError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath

SEEDS = 2
TURNS = 150
PLAN = {
    "backend": {"name": "transformers", "reasons": []},
    "device": {"kind": "cpu", "name": "cpu"},
    "spec": {
        "kind": "sft",
        "training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        "datasets": [{"path": "/d"}],
        "retry": {"on_out_of_memory": "adjust"},
    },
}
RESULTS: list[dict[str, Any] | None] = [
    {"outcome": "succeeded", "step": 3},
    {"outcome": "error", "error": {"code": "data_invalid", "message": "no", "hint": ""}},
    {"outcome": "error", "error": {"code": "out_of_memory", "message": "no", "hint": ""}, "phase": "train"},
    {"outcome": "error", "error": {"code": "disk_insufficient", "message": "no", "hint": ""}, "needed_bytes": 2**60},
    None,
]


class Workers(Runner):
    """A runner without processes: what was started ends when somebody looks, in one of all the ways that there are."""

    def __init__(self, layout: Layout, chance: random.Random) -> None:
        self._layout = layout
        self._chance = chance
        self._alive: dict[int, int] = {}
        self.is_easy = False

    def start(self, job_id: int, number: int, start: int, *, backend: str, environment: Mapping[str, str]) -> None:
        assert job_id not in self._alive, f"job {job_id} runs already"
        if not self.is_easy and self._chance.random() < 0.1:
            raise NotNowError("not now")
        self._layout.job(job_id).attempt(number).dir.mkdir(parents=True, exist_ok=True)
        self._alive[job_id] = number

    def adopt(self, job_id: int, number: int, start: int, *, is_staged: bool = False) -> bool:
        return self._alive.get(job_id) == number

    def live(self) -> list[Live]:
        return [Live(job_id, (number, 1), "cpu") for job_id, number in self._alive.items()]

    def stop(self, job_id: int) -> None:
        pass

    dump = stop

    def kill(self, job_id: int, *, shim_too: bool = False) -> None:
        pass

    def poll(self, job_id: int) -> Exit | None:
        if not self.is_easy and self._chance.random() < 0.5:
            return None
        result = RESULTS[0] if self.is_easy else self._chance.choice(RESULTS)
        number = self._alive.pop(job_id)
        if result is not None:
            self._layout.job(job_id).attempt(number).result_path.write_text(json.dumps(result))
        return Exit(0 if result and result["outcome"] == "succeeded" else 1, None)


@contextmanager
def faults(chance: random.Random, share: float) -> Iterator[None]:
    """In here that share of what changes the disk fails."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("fsync", "rename", "unlink", "utime"):

            def broken(real: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
                if chance.random() < share:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*arguments, **keys)

            monkeypatch.setattr(os, name, functools.partial(broken, getattr(os, name)))
        yield


def admit(spool: Spool, chance: random.Random, *states: State) -> Job | None:
    path = spool.incoming_dir / "a.json"
    path.write_text("{}")
    arrivals = Arrivals(spool)
    claim = arrivals.claim(PersonPath.of(path, 1))
    assert claim is not None
    arrivals.copy(claim, max_bytes=100)
    others = sorted(job.id for job in spool.all())
    before = (str(chance.choice(others)),) if others and chance.random() < 0.5 else ()
    job = Job(
        id=claim.id,
        name=f"n{claim.id}",
        submitted_at=1.0,
        source=claim.name,
        uid=0,
        output_dir=f"/o/{claim.id}",
        depends_on=before,
        num_gpus=0,
        priority=chance.randrange(3),
        state=chance.choice(states or (State.QUEUED, State.HELD)),
    )
    try:
        return arrivals.admit(job, claim, PlanFile(PLAN))
    except OSError:
        return arrivals.accepted(claim)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_the_daemon_knows_is_what_lies_on_the_disk_whatever_fails(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    layout = Layout(tmp_path)
    workers = Workers(layout, chance)
    now = 0.0
    honed = Daemon(layout, Config(), runner=workers, probe=lambda _gpus: [device.cpu()], clock=lambda: now)
    spool, backlog, attempts = honed._spool, honed._dispatch.backlog, honed._attempts
    spool.recover()
    backlog.recover()
    dispatch = honed._dispatch
    steps = (
        honed._tend_database,
        dispatch.settle,
        attempts.follow,
        dispatch.plan_deferred,
        dispatch.start_next,
    )
    verbs = ["cancel", "hold", "release", "requeue", "pin", "unpin", "prune"]

    def turn() -> None:
        for step in steps:
            try:
                step()
            except OSError:
                continue

    for number in range(TURNS):
        is_quiet = number % 5 == 4
        with faults(chance, 0.0 if is_quiet else chance.choice([0.02, 0.2])):
            if not is_quiet:
                for _ in range(2):
                    try:
                        if chance.random() < 0.3 and (job := admit(spool, chance)) is not None:
                            honed._database.put_job(job)
                    except OSError:
                        pass
                    found = chance.choice([0, *sorted(job.id for job in spool.all())])
                    request = Request(
                        chance.choice(verbs),
                        {"id": str(found), "ids": [str(found)], "dry_run": False},
                        uid=0,
                        gids=frozenset(),
                    )
                    with contextlib.suppress(HonedError, OSError):
                        honed._answers.answer(request)
            now += 5.0
            turn()
            if is_quiet:
                turn()
        known = {job.id: job for job in spool.all()}
        waiting = {job.id: job for job in backlog.jobs()}
        running = {running.job.id: running.job for running in attempts.running.values()}
        assert not waiting.keys() & running.keys()
        assert waiting.keys() | running.keys() == {number for number, job in known.items() if not job.state.is_final}
        if is_quiet:
            assert {**waiting, **running} == {each: known[each] for each in {**waiting, **running}}
            assert backlog.num_queued == sum(job.state is State.QUEUED for job in known.values())
            assert not backlog._unsure
            ready = sorted(job.id for jobs in backlog.first_ones(len(known)).values() for job in jobs)
            assert ready == sorted(
                number
                for number, job in waiting.items()
                if job.state is State.QUEUED
                and all(
                    (other := spool.job(int(each))) is None or other.state is State.SUCCEEDED for each in job.depends_on
                )
            )
            for job in waiting.values():
                if job.state is State.HELD and job.held_for is not None:
                    other = spool.job(job.held_for)
                    assert other is not None
                    assert other.state is not State.SUCCEEDED, f"job {job.id} is held for {other.id}"
    whole = [job for each in spool.all() if (job := spool.job(each.id)) is not None]
    whole = [spool.annotate(job) for job in whole]  # without a fault: then the disk is settled, too
    beside = Spool(layout, lock=False)
    assert {job.id: (job.state, job) for job in beside.all()} == {job.id: (job.state, job) for job in whole}
    brief = {job.id: (job.state, job.revision, job.name) for job in spool.all()}
    assert brief == {job.id: (job.state, job.revision, job.name) for job in whole}
    assert len([path for state in State for path in spool.state_dir(state).glob("*.json")]) == len(spool.all())
    honed._close()


def test_a_job_whose_adjustments_cannot_be_written_waits_in_the_queue_and_is_then_run(tmp_path: Path) -> None:
    layout, chance = Layout(tmp_path), random.Random(0)
    workers = Workers(layout, chance)
    workers.is_easy = True
    now = 0.0
    honed = Daemon(layout, Config(), runner=workers, probe=lambda _gpus: [device.cpu()], clock=lambda: now)
    honed._spool.recover()
    honed._dispatch.backlog.recover()
    job = admit(honed._spool, chance, State.QUEUED)
    assert job is not None
    in_the_way = layout.job(job.id).adjustments_path
    in_the_way.mkdir()
    for _ in range(2):
        honed._dispatch.start_next()
        honed._dispatch.settle()
    assert honed._attempts.running == {}
    assert list(honed._dispatch.backlog.jobs()) == list(honed._spool.all())
    assert [(each.state, each.has_started) for each in honed._spool.all()] == [(State.QUEUED, False)]
    in_the_way.rmdir()
    now += 60.0
    honed._dispatch.look_around()  # a start that failed is a doubt: first it is seen which workers live
    honed._dispatch.start_next()
    honed._dispatch.settle()
    assert [(each.state, each.last_ended) for each in honed._spool.all()] == [(State.SUCCEEDED, 1)]
    honed._close()
