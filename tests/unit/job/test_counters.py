"""The counters: each event once, wherever the daemon is killed; nothing ever decreases."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.job import counters, recovery, refusals
from honed.job.arrival import Arrivals, Claim
from honed.job.counters import Counters, Values
from honed.job.job import Attempt, Fallback, Job, Preemption, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.system.durable import finish
from honed.system.error import DatasetError, SpecError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath


@contextmanager
def honed(root: Path, *, clock: Callable[[], float] = lambda: 0.0) -> Iterator[tuple[Spool, Counters]]:
    """A daemon's spool and counters, from its start to a kill: nothing is written at the end."""
    spool = Spool(Layout(root))
    recovery.recover(spool)
    made = Counters(Layout(root).counters_path, spool, clock=clock)
    made.recover()
    yield spool, made
    spool.close()


def values(root: Path) -> Values:
    """Return what is published."""
    found = counters.read(Layout(root).counters_path)
    assert found is not None
    return found


def job_of(spool: Spool, number: int) -> Job:
    found = spool.job(number)
    assert found is not None
    return found


def accept(number: int, at: float) -> Callable[[Spool], None]:
    job = Job(number, f"job{number}", at, "a.json", os.getuid(), f"/o/{number}", arrived_at=at - 2)
    return lambda spool: finish(spool.adding(job))


def start(number: int, attempt: int, at: float) -> Callable[[Spool], None]:
    def move(spool: Spool) -> None:
        job = job_of(spool, number)
        spool.move(job, State.RUNNING, outcome=None, attempts=(*job.attempts, Attempt(attempt, "unsloth", at)))

    return move


def end(number: int, to: State, outcome: str, took_sec: float, **attempt: Any) -> Callable[[Spool], None]:
    def move(spool: Spool) -> None:
        job = job_of(spool, number).with_attempt(ended_at=9.0, outcome=outcome, took_sec=took_sec, **attempt)
        spool.move(job, to, outcome=outcome)

    return move


def put_back(spool: Spool) -> None:
    job = job_of(spool, 2)
    spool.move(job, State.QUEUED, attempts=job.attempts[:-1])


def reject(number: int, error: SpecError | DatasetError) -> Callable[[Spool], None]:
    def move(spool: Spool) -> None:
        (spool.incoming_dir / "bad.json").write_text("{")
        place = spool.claimed_dir / str(number)
        place.mkdir()
        (spool.incoming_dir / "bad.json").rename(place / "bad.json")
        claim = Claim(number, PersonPath(place) / "bad.json", arrived_at=1.0)
        Arrivals(spool).reject(claim, error, when="now")

    return move


#: A story with everything that is counted: as it is told to the spool.
STORY: tuple[Callable[[Spool], None], ...] = (
    accept(1, 100.0),
    start(1, 1, 160.0),
    accept(2, 100.5),
    end(
        1,
        State.QUEUED,
        "out_of_memory",
        30.0,
        is_adjusted=True,
        fallback=Fallback(5.0, "no kernel"),
        checkpoint_bytes=300,
    ),
    start(2, 1, 400.0),
    put_back,  # it is started for the first time a second time: it waited once
    start(1, 2, 200.0),
    end(1, State.FAILED, "stalled", 70.0, is_resumed=True, preemption=Preemption("the hours ended", 1.0)),
    reject(3, SpecError("no such key")),
    start(2, 1, 500.0),
    lambda spool: spool.move(job_of(spool, 1), State.QUEUED, outcome=None, adjustments=()) and None,
    end(2, State.SUCCEEDED, "succeeded", 10.0, output_bytes=50),
    lambda spool: spool.prune(job_of(spool, 2)),
    reject(4, DatasetError("no rows")),
    start(1, 3, 700.0),
    end(1, State.SUCCEEDED, "succeeded", 5.5, is_resumed=True, checkpoint_bytes=200, output_bytes=7),
    lambda spool: spool.move(job_of(spool, 1), State.QUEUED, outcome=None) and None,
    lambda spool: spool.move(job_of(spool, 1), State.CANCELLED, outcome="cancelled") and None,
    lambda spool: spool.prune(job_of(spool, 1)),
)
WHOLE = {
    "honed_jobs_finished_total": {"stalled": 1, "succeeded": 2, "cancelled": 1},
    "honed_jobs_rejected_total": {"spec_invalid": 1, "dataset_invalid": 1},
    "honed_attempts_finished_total": {"out_of_memory": 1, "stalled": 1, "succeeded": 2},
    "honed_device_seconds_total": {"out_of_memory": 30, "stalled": 70, "succeeded": 15.5},
    "honed_fallbacks_total": {"": 1},
    "honed_resumes_total": {"": 2},
    "honed_preemptions_total": {"": 1},
    "honed_out_of_memory_adjustments_total": {"": 1},
    "honed_written_bytes_total": {"checkpoint": 500, "output": 57},
    "honed_fetched_bytes_total": {},
    "honed_removed_bytes_total": {},
}


@pytest.mark.parametrize("last", range(len(STORY)))
def test_a_kill_after_any_event_with_the_last_write_before_any_other_counts_each_once(
    tmp_path: Path, last: int
) -> None:
    """The daemon is killed after each event; of two daemons one has written before its last event, one never has."""
    with honed(tmp_path):
        pass
    before = values(tmp_path)["counters"]
    for number, event in enumerate(STORY):
        with honed(tmp_path) as (spool, made):
            if number % 2 == last % 2 or number > last:
                made.tend(is_last=True)
            event(spool)
        if number >= last:
            with honed(tmp_path) as (_, made):
                made.tend(is_last=True)
            after = values(tmp_path)["counters"]
            for name, old in before.items():
                assert all(after[name][label] >= value for label, value in old.items())
            before = after
    assert before == WHOLE
    observed = values(tmp_path)["histograms"]
    assert sum(observed["honed_queue_wait_seconds"][""]["counts"]) == 2
    assert observed["honed_check_duration_seconds"]["accepted"]["counts"][2:4] == [2, 0]  # 2 s: up to 2.5


def test_a_whole_life_without_a_kill_counts_the_same(tmp_path: Path) -> None:
    with honed(tmp_path) as (spool, made):
        for event in STORY:
            event(spool)
        for number, code in ((3, "spec_invalid"), (4, "dataset_invalid"), (4, "dataset_invalid")):
            made.count_rejection(number, code, 1.0)
        made.tend(is_last=True)
    found = values(tmp_path)
    assert found["counters"] == WHOLE
    waits = found["histograms"]["honed_queue_wait_seconds"][""]
    assert waits == {"counts": [0, 0, 0, 1, 1, *[0] * 8], "sum": 60 + 299.5}
    assert sum(found["histograms"]["honed_check_duration_seconds"]["rejected"]["counts"]) == 2


def test_bytes_that_were_fetched_and_removed_add_up_over_restarts(tmp_path: Path) -> None:
    for _ in range(2):
        with honed(tmp_path) as (_, made):
            made.count_fetched("model", 2**40)
            made.count_fetched("dataset", 7)
            made.count_removed("job", 100)
            made.tend(is_last=True)
    found = values(tmp_path)["counters"]
    assert found["honed_fetched_bytes_total"] == {"model": 2**41, "dataset": 14}
    assert found["honed_removed_bytes_total"] == {"job": 200}


def test_a_damaged_entry_takes_nothing_back_and_is_not_counted_again_when_it_is_repaired(tmp_path: Path) -> None:
    with honed(tmp_path) as (spool, made):
        for event in (accept(1, 100.0), start(1, 1, 160.0), end(1, State.FAILED, "stalled", 70.0)):
            event(spool)
        made.tend(is_last=True)
        path = spool.entries.path(1, State.FAILED)
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    with honed(tmp_path) as (spool, made):
        assert spool.job(1) is None
        accept(2, 100.0)(spool)
        made.tend(is_last=True)
    path.write_bytes(whole)
    with honed(tmp_path) as (spool, made):
        assert spool.job(1) is not None
        made.tend(is_last=True)
    found = values(tmp_path)
    assert found["counters"]["honed_jobs_finished_total"] == {"stalled": 1}
    assert sum(found["histograms"]["honed_queue_wait_seconds"][""]["counts"]) == 1


def test_an_entry_rebuilt_from_an_older_copy_takes_nothing_back(tmp_path: Path) -> None:
    with honed(tmp_path) as (spool, made):
        for event in (accept(1, 100.0), start(1, 1, 160.0), end(1, State.FAILED, "stalled", 70.0)):
            event(spool)
        older = dataclasses.replace(job_of(spool, 1), ends=()).with_attempt(ended_at=None, outcome=None)
        recovery.rebuild(spool, older)
        end(1, State.FAILED, "stalled", 70.0)(spool)
        made.tend(is_last=True)
    assert values(tmp_path)["counters"]["honed_jobs_finished_total"] == {"stalled": 1}
    assert values(tmp_path)["counters"]["honed_device_seconds_total"] == {"stalled": 70}


def test_a_rejection_whose_file_has_not_been_moved_yet_is_not_counted(tmp_path: Path) -> None:
    with honed(tmp_path) as (spool, _):
        (spool.claimed_dir / "7").mkdir()
        (spool.claimed_dir / "7/bad.json").write_text("{")
        text = refusals.text_of("bad.json", 7, 0, SpecError("no"), when="now", fate="Kept.", is_submission=False)
        refusals.make(spool.rejected, "bad.json", 7, os.getuid(), text)
        (spool.rejected_dir / "mine.json").write_text("{}")
        (spool.rejected_dir / "mine.json.reason").write_text("a text of somebody's own\n\n\nspec_invalid:\n")
    with honed(tmp_path) as (_, made):
        made.tend(is_last=True)
    assert values(tmp_path)["counters"]["honed_jobs_rejected_total"] == {}


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"counters": 1}', '{"counters": {}, "histograms": {}}'])
def test_without_a_whole_file_all_begin_at_zero_and_nothing_earlier_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = Layout(tmp_path).counters_path
    with honed(tmp_path) as (spool, made):
        for event in STORY[:9]:
            event(spool)
        made.tend(is_last=True)
    path.unlink() if content is None else path.write_text(content)
    with honed(tmp_path) as (spool, _):
        assert ("begun anew" in caplog.text) is (content is not None)
        assert values(tmp_path)["counters"]["honed_jobs_finished_total"] == {}
        for event in STORY[9:]:
            event(spool)
    with honed(tmp_path) as (_, made):  # killed before it had written anything but the zeros
        made.tend(is_last=True)
    assert values(tmp_path)["counters"]["honed_jobs_finished_total"] == {"succeeded": 2, "cancelled": 1}
    assert values(tmp_path)["counters"]["honed_jobs_rejected_total"] == {"dataset_invalid": 1}


def test_the_file_is_written_at_a_bounded_rate_and_a_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    with honed(tmp_path, clock=lambda: now[0]) as (spool, made):
        assert made.patience() == math.inf
        accept(1, 100.0)(spool)
        assert made.patience() == counters.WRITE_INTERVAL_SEC  # it has just been made
        made.tend()
        assert "accepted" not in values(tmp_path)["histograms"]["honed_check_duration_seconds"]
        now[0] += counters.WRITE_INTERVAL_SEC
        with monkeypatch.context() as full:

            def no_room(*_arguments: object, **_keys: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            full.setattr("honed.system.durable.write", no_room)
            with pytest.raises(OSError, match="No space left"):
                made.tend()
        assert made.patience() == 0
        made.tend()
        assert "accepted" in values(tmp_path)["histograms"]["honed_check_duration_seconds"]
        assert made.patience() == math.inf


def test_ten_thousand_jobs_take_a_small_file(tmp_path: Path) -> None:
    with honed(tmp_path) as (spool, made):
        for number in range(1, 10_001):
            job = Job(number, "a", 1.0, "a.json", 0, f"/o/{number}", ends=("succeeded",), state=State.SUCCEEDED)
            spool.note(job)
        made.tend(is_last=True)
    assert Layout(tmp_path).counters_path.stat().st_size < 4000
    assert json.loads(Layout(tmp_path).counters_path.read_text())["counted"] == {"0.0.1": "1-10000"}


@given(st.sets(st.integers(min_value=1, max_value=300)))
def test_numbers_survive_their_text(numbers: set[int]) -> None:
    assert set(counters._numbers(counters._spans(numbers))) == numbers


def test_an_arrivals_time_is_that_of_its_drop_and_reaches_the_entry(tmp_path: Path) -> None:
    spool = Spool(Layout(tmp_path))
    path = spool.incoming_dir / "a.json"
    path.write_text("{}")
    dropped_at = path.stat().st_ctime
    arrivals = Arrivals(spool)
    claim = arrivals.claim(PersonPath.of(path, 1))
    assert claim is not None
    assert claim.arrived_at == dropped_at
    (again,) = Arrivals(spool).claims()
    assert again.arrived_at >= dropped_at
    arrivals.copy(claim, max_bytes=100)
    job = Job(claim.id, "a", 5.0, "a.json", 0, "/o", arrived_at=claim.arrived_at)
    arrivals.admit(job, claim, PlanFile({}))
    assert job_of(spool, claim.id).arrived_at == dropped_at
    spool.close()


def test_a_reason_that_cannot_be_read_once_is_not_counted_twice(tmp_path: Path) -> None:
    def fail(path: Path, **_keys: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with honed(tmp_path) as (spool, _):
        reject(3, SpecError("no"))(spool)
    with honed(tmp_path) as (_, made):
        made.tend(is_last=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(refusals.untrusted, "open_plain", fail)
        with honed(tmp_path) as (spool, made):
            accept(4, 100.0)(spool)
            made.tend(is_last=True)
    with honed(tmp_path) as (_, made):
        made.tend(is_last=True)
    assert values(tmp_path)["counters"]["honed_jobs_rejected_total"] == {"spec_invalid": 1}
