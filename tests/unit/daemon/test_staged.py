"""Staged workers where something fails: none is lost, followed twice, or left to keep its job from starting."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.attempts import Attempts
from honed.daemon.fencing import Fence
from honed.daemon.running import MAX_UNREAD, clear
from honed.daemon.staging import MAX_END_SEC, StagedWorkers
from honed.job.ahead import Pass
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.run import outcome as outcomes
from honed.run.process import ProcessRunner
from honed.run.runner import Live
from honed.spec.config import Config
from honed.system import durable
from honed.system.device import cpu
from honed.system.error import EnvironmentInvalidError, HonedError, InterruptedRunError
from honed.system.layout import Layout
from waiting import wait_for

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class Place:
    """An instance whose job 1 has a staged worker; its loop is turned by hand."""

    def __init__(self, path: Path) -> None:
        self.layout, self.now = Layout(path), 0.0
        self.spool = Spool(self.layout)
        self.spool.recover()
        durable.make_dir(self.layout.state_dir)
        self.database = Database(self.layout.database_path)
        self.runner = ProcessRunner(self.layout, command=SLEEP)
        self.attempts = Attempts(self.layout, Config(), self.spool, self.database, self.runner)
        self.staged = StagedWorkers(self.layout, self.spool, Config, self.runner, self.attempts, clock=lambda: self.now)
        self.may_fail = True
        self.fence = Fence(self.spool, self.runner, clock=lambda: self.now, interval=lambda: 30.0)
        self.stage(self.add(1))

    def add(self, number: int) -> Job:
        files = self.layout.job(number)
        durable.make_dir(files.dir)
        files.plan_path.write_text("{}")
        durable.finish(self.spool.adding(Job(number, f"j{number}", 1.0, "a.json", 4321, str(files.output_dir))))
        return self.job(number)

    def job(self, number: int = 1) -> Job:
        job = self.spool.job(number)
        assert job is not None
        return job

    def stage(self, job: Job) -> None:
        self.staged.start(job, [cpu()], "transformers")
        wait_for(lambda: "worker_pid" in self.lock(), what="the start of the staged worker")

    def lock(self) -> str:
        with contextlib.suppress(OSError):
            return (self.layout.job(1).attempt(1).dir / "lock").read_text()
        return ""

    def turn(self) -> None:
        self.attempts.reap()
        self.staged.settle(lambda _job: self.may_fail)

    def look(self) -> None:
        for job in self.fence.look({*self.attempts.running, *self.staged.numbers}):
            self.attempts.adopt(job)
        self.staged.take_over(self.fence.ahead)

    def begin(self) -> None:
        """Start job 1, as the queue does."""
        self.attempts.start(self.job(), [cpu()], "transformers", self.staged.of(self.job()))
        self.staged.forget(self.job())

    def end_at_its_gate(self, error: HonedError, outcome: str, number: signal.Signals) -> None:
        """Let the worker of job 1 end once its turn has come, with this result and by this signal."""
        attempt = self.layout.job(1).attempt(1)
        attempt.events_path.write_text(json.dumps({"event": "stage", "time": time.time(), "stage": "staged"}) + "\n")
        result = {"outcome": outcome, "phase": "staged", "error": error.as_dict()}
        attempt.result_path.write_text(json.dumps(result))
        os.kill(json.loads(self.lock())["worker_pid"], number)

    def kill(self) -> None:
        for live in self.runner.live():
            for path in Path("/proc").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    words = (path / "cmdline").read_bytes().decode().split("\0")
                    if str(self.layout.job(live.job_id).dir) in " ".join(words):
                        os.kill(int(path.name), signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.kill()
    made.database.close()
    made.spool.close()


def no_room(*_arguments: Any, **_keys: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_an_end_that_cannot_be_written_is_settled_when_there_is_room(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.kill()
    with monkeypatch.context() as full:
        full.setattr(place.spool, "update", no_room)
        wait_for(lambda: place.turn() or place.staged._workers[1].ended is not None, what="the staged worker's end")
        place.turn()
    assert 1 in place.staged.numbers
    place.turn()
    assert 1 not in place.staged.numbers
    assert (place.job().state, place.job().staged_at, place.job().attempts) == (State.QUEUED, None, ())


def test_a_start_that_cannot_be_written_keeps_the_worker(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(place.spool, "move", no_room)
        with pytest.raises(OSError, match="No space"):
            place.begin()
    assert 1 in place.staged.numbers
    place.begin()
    assert (place.job().state, place.job().attempt.staged_at is not None) == (State.RUNNING, True)
    assert len(place.staged) == 0
    assert len(place.runner.live()) == 1


def test_a_look_that_fails_ends_no_worker_that_trains(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.fence.look()  # sees the staged worker
    assert [live.job_id for live in place.fence.ahead] == [1]
    place.begin()
    place.now += 31
    with monkeypatch.context() as away:
        away.setattr(place.runner, "live", no_room)
        place.look()
    place.turn()
    assert (len(place.staged), place.job().state) == (0, State.RUNNING)
    assert len(place.runner.live()) == 1


def test_a_pass_that_is_not_honeds_neither_starts_the_job_nor_stops_the_loop(place: Place) -> None:
    gate = place.layout.job(1).gate_path
    os.mkfifo(gate)
    place.look()
    gate.unlink()
    place.now += 31
    Pass(1, 1).write(place.layout.files(1))
    os.chown(gate, 4321, 4321) if os.geteuid() == 0 else gate.unlink()
    place.look()
    place.turn()
    assert (place.job().state, set(place.staged.numbers), place.attempts.running) == (State.QUEUED, {1}, {})


def test_a_unit_without_any_file_is_not_followed_twice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.runner, "live", lambda: [Live(1, None, None)])
    place.look()
    assert (place.job().state, place.attempts.running) == (State.QUEUED, {})


def test_a_worker_of_the_last_honed_ends_and_its_job_may_be_staged_again(place: Place) -> None:
    place.staged.forget(place.job())
    place.staged.recover()  # as another honed would
    assert place.staged.of(place.job()) is None
    assert place.staged.is_ending(1)
    wait_for(lambda: place.turn() or not len(place.staged), what="no staged worker")
    assert not place.runner.live()
    assert (place.job().state, place.job().staged_at, place.job().attempts) == (State.QUEUED, None, ())
    assert not place.staged.has_given_up(place.job())


def test_a_worker_that_no_entry_knows_is_ended(place: Place) -> None:
    place.spool.update(place.job(), staged_at=None)  # as a crash in a move leaves it
    place.staged.forget(place.job())
    place.staged.recover()
    assert not len(place.staged)
    place.look()
    assert place.staged.is_ending(1)
    wait_for(lambda: place.turn() or not len(place.staged), what="no staged worker")
    assert not place.runner.live()
    assert (place.job().state, place.job().attempts) == (State.QUEUED, ())
    assert not list((place.layout.spool_dir / "corrupt").glob("*"))


def test_an_entry_whose_staged_worker_has_vanished_is_not_staged_any_more(place: Place) -> None:
    place.staged.forget(place.job())
    place.kill()
    wait_for(lambda: place.runner.poll(1) is not None, what="the worker's end")
    (place.layout.job(1).attempt(1).dir / "lock").unlink()
    place.staged.recover()
    assert (place.job().staged_at, len(place.staged)) == (None, 0)


def test_a_full_disk_keeps_honed_from_no_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.staged.forget(place.job())
    with monkeypatch.context() as full:
        full.setattr(place.runner, "adopt", no_room)
        place.staged.recover()
        assert "No space" in place.attempts.failures.fault
        place.look()
    assert (place.job().state, len(place.staged)) == (State.QUEUED, 0)
    place.now += 31
    place.look()
    wait_for(lambda: place.turn() or not len(place.staged), what="no staged worker")
    assert not place.runner.live()
    assert (place.job().state, place.job().staged_at, place.job().attempts) == (State.QUEUED, None, ())


def failed(place: Place) -> None:
    """Let the worker have found its data wrong, and end."""
    path = place.layout.job(1).attempt(1).result_path
    error = {"code": "dataset_invalid", "message": "no rows", "hint": ""}
    path.write_text(json.dumps({"outcome": "failed", "error": error, "phase": "data", "step": 0}))
    place.kill()
    wait_for(lambda: not place.runner.live(), what="no worker lives")


def test_what_a_worker_found_wrong_in_a_job_that_could_start_is_the_jobs_end(place: Place) -> None:
    failed(place)
    wait_for(lambda: place.turn() or place.job().state is State.FAILED, what="the failure")
    assert (place.job().state, place.job().outcome) == (State.FAILED, "dataset_invalid")


def test_what_a_worker_found_wrong_in_a_job_that_may_not_start_is_left_to_its_turn(place: Place) -> None:
    """The queue is paused, or the job's maker is made again: its data may be there when its turn comes."""
    place.may_fail = False
    failed(place)
    wait_for(lambda: place.turn() or place.job().staged_at is None, what="the job has no staged worker")
    assert (place.job().state, place.job().attempts, place.job().staged_at) == (State.QUEUED, (), None)


def test_an_attempt_knows_of_the_pauses_before_it(place: Place) -> None:
    """Its staged worker was frozen: the shim counts on, and none of that is the attempt's."""
    place.layout.job(1).attempt(1).paused_path.write_text("450.000\n")
    place.begin()
    assert place.job().attempt.staged_paused_sec == 450.0
    assert place.attempts.running[1].deadlines.paused_sec() == 0.0


def test_a_worker_that_has_just_ended_is_no_attempt(place: Place) -> None:
    place.kill()
    wait_for(lambda: place.staged.of(place.job()) is None, what="the job has no staged worker")
    assert place.staged.is_ending(1)
    wait_for(lambda: place.turn() or not len(place.staged), what="no staged worker")
    assert (place.job().attempts, place.job().staged_at, len(place.staged)) == ((), None, 0)


@pytest.mark.parametrize("is_observed", [True, False])
def test_a_worker_that_ended_at_its_gate_as_its_turn_came_costs_no_failure(place: Place, is_observed: bool) -> None:
    if is_observed:
        os.kill(json.loads(place.lock())["worker_pid"], signal.SIGKILL)
    else:
        place.kill()
    wait_for(lambda: not place.runner.live(), what="no worker lives")
    [staged] = (worker.staged for worker in place.staged)
    place.attempts.start(place.job(), [cpu()], "transformers", staged)
    place.staged.forget(place.job())
    settled: list[Job] = []
    put_back: list[Job] = []

    def look() -> bool:
        settled.extend(place.attempts.reap())
        put_back.extend(place.attempts.put_back())
        return bool(settled or put_back)

    wait_for(look, what="the attempt is settled or put back")
    assert settled == []
    [job] = put_back
    assert (job.state, job.num_failures, [each.outcome for each in job.attempts]) == (
        State.QUEUED,
        0,
        ["interrupted"],
    )


def test_inputs_that_changed_as_its_turn_came_cost_no_failure_and_its_job_starts_again(place: Place) -> None:
    place.begin()
    place.end_at_its_gate(InterruptedRunError("rows.jsonl has changed"), "interrupted", signal.SIGTERM)
    put_back: list[Job] = []
    wait_for(lambda: place.attempts.reap() or put_back.extend(place.attempts.put_back()) or put_back, what="its end")
    job = place.job()
    assert (job.state, job.stop, job.num_failures) == (State.QUEUED, None, 0)
    assert [item.outcome for item in job.attempts] == ["interrupted"]


def test_an_error_after_the_gate_is_a_failure_as_any(place: Place) -> None:
    place.begin()
    place.end_at_its_gate(EnvironmentInvalidError("a metric cannot be loaded"), "failed", signal.SIGKILL)
    settled: list[Job] = []
    wait_for(lambda: settled.extend(place.attempts.reap()) or settled, what="the attempt is settled")
    assert (settled[0].state, settled[0].outcome) == (State.FAILED, "environment_invalid")


def test_a_result_that_cannot_be_read_keeps_nobody_waiting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.kill()
    real = outcomes.untrusted.read_plain

    def read(path: Path, **keys: Any) -> bytes:
        if path.name == "result.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, **keys)

    monkeypatch.setattr(outcomes.untrusted, "read_plain", read)
    wait_for(lambda: place.turn() or place.staged.is_ending(1), what="the staged worker is asked to end")
    assert not place.staged.is_stuck(1)
    place.now += MAX_END_SEC
    assert place.staged.is_stuck(1)
    for _ in range(MAX_UNREAD + 1):
        place.turn()
    assert (len(place.staged), place.job().state, place.job().attempts) == (0, State.QUEUED, ())


def test_a_worker_of_a_job_without_an_entry_is_ended(place: Place) -> None:
    """Its entry was damaged: nothing would ever open its gate."""
    place.staged.forget(place.job())
    (place.layout.spool_dir / "queued/1.json").unlink()
    place.spool.recover()
    assert place.spool.job(1) is None
    place.staged.take_over(place.runner.live())
    assert place.staged.numbers == {1}
    wait_for(lambda: place.turn() or not place.staged.numbers, what="no staged worker")
    assert not place.runner.live()


def test_a_unit_of_a_staged_job_without_any_file_keeps_no_device_when_honed_starts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.runner, "live", lambda: [Live(1, None, None)])
    fence = Fence(place.spool, place.runner, clock=lambda: 0.0, interval=lambda: 30.0)
    assert fence.look() == []
    assert (place.job().state, fence.ahead) == (State.QUEUED, [Live(1, None, None)])


def test_others_wait_only_so_long_for_a_worker_that_does_not_end(place: Place) -> None:
    place.spool.update(place.job(), staged_at=None)
    place.turn()
    assert (place.staged.is_ending(1), place.staged.is_stuck(1)) == (True, False)
    place.now += MAX_END_SEC
    assert place.staged.is_stuck(1)


def test_files_of_another_job_behind_a_link_are_not_removed(place: Place) -> None:
    theirs = place.layout.job(2).attempt(1)
    theirs.dir.mkdir(parents=True)
    theirs.result_path.write_text("{}")
    place.add(3)
    place.layout.job(3).attempts_dir.mkdir()
    (place.layout.job(3).attempts_dir / "1").symlink_to(theirs.dir)
    clear(place.layout, place.job(3))
    assert theirs.result_path.exists()
