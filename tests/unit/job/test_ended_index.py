"""Ended jobs: what is in memory of them, the file that a start reads instead of their entries, and the entries that are
read when somebody asks."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.job import ended_index, query, recovery, retention
from honed.job.brief import Brief, brief
from honed.job.catalog import MAX_RECENT
from honed.job.counters import Counters
from honed.job.counters import read as read_counters
from honed.job.ended_index import EndedIndex
from honed.job.job import MOVES, Attempt, Fallback, Job, State, SweepName
from honed.job.spool import Spool
from honed.job.usage import Usage
from honed.system import durable
from honed.system.layout import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture(autouse=True)
def _at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe what the file says of entries that were written just before it."""
    if "real_times" not in request.fixturenames:
        monkeypatch.setattr("honed.job.ended_index.TICK_SEC", -60.0)


@pytest.fixture
def real_times() -> None:
    """Believe it of those alone that had been there for a while."""


def started(layout: Layout) -> Spool:
    """Return the spool as at the start of a honed."""
    spool = Spool(layout)
    recovery.recover(spool)
    return spool


def ended(spool: Spool) -> None:
    """End a honed, after it has written the file if that is due."""
    list(spool.catalog.shorten())
    list(spool.entries.ended_index.tend(spool.catalog.ended()))
    spool.close()


def add(spool: Spool, number: int, name: str = "old", **keys: object) -> Job:
    job = Job(number, name, float(number), f"{name}.yaml", 1000, f"/o/{number}", **keys)  # type: ignore[arg-type]
    for _ in spool.adding(job):
        pass
    return spool.move(job, State.CANCELLED)


def told_otherwise(layout: Layout) -> dict[int, Brief]:
    """Give each job in the file another name: a start that reads an entry does not believe it. Returns what it has."""
    index = EndedIndex(layout.ended_path)
    lies = {number: found._replace(name="of the file") for number, found in index.read().items()}
    index.num_behind = len(lies)
    list(index.tend(lies.values()))
    return lies


def test_an_ended_job_is_read_once_and_again_when_its_entry_was_written_anew(layout: Layout) -> None:
    first = started(layout)
    jobs = {number: add(first, number) for number in range(1, 8)}
    ended(first)
    assert layout.ended_path.stat().st_mode & 0o007 == 0  # it has the names of everybody's jobs
    assert told_otherwise(layout).keys() == jobs.keys()
    first = Spool(layout)
    first.recover()
    first.annotate(jobs[2], is_pinned=True)  # which keeps the time of its change
    first.move(jobs[3], State.QUEUED)
    first.prune(jobs[4])
    first.close()
    again = started(layout)
    assert {job.id: job.name for job in again.catalog} == {
        2: "old",
        3: "old",
        **dict.fromkeys((1, 5, 6, 7), "of the file"),
    }
    assert again.catalog.uid_of(2) == 1000
    found = again.listed(2)
    assert found is not None
    assert found.is_pinned
    assert again.job(1) == jobs[1]  # which is read
    again.close()


def test_the_sweep_of_an_ended_job_is_known_from_the_file(layout: Layout) -> None:
    first = started(layout)
    group = {"id": 9, "name": "lr", "file": "lr.yaml", "values": {"training.learning_rate": 1e-4}}
    add(first, 10, group=group)
    add(first, 11, group={**group, "file": "other.yaml"})  # anybody may write that
    ended(first)
    again = started(layout)
    assert [job.sweep for job in again.catalog.newest()] == [
        SweepName(9, "lr", "other.yaml"),
        SweepName(9, "lr", "lr.yaml"),
    ]
    assert [row["id"] for row in query.group(again, layout, "9")["jobs"]] == [10, 11]
    assert [row["id"] for row in query.list_jobs(again, layout)] == [11, 10]
    again.close()


def test_the_newer_of_two_copies_counts_whichever_of_them_is_in_the_file(layout: Layout) -> None:
    first = started(layout)
    older, newer = add(first, 1), add(first, 2)
    ended(first)
    for job, copy in ((older, dataclasses.replace(older, revision=9)), (newer, dataclasses.replace(newer, revision=1))):
        first.entries.path(job.id, State.QUEUED).write_bytes(copy.to_json())  # the other one, of a move
    again = started(layout)
    assert {job.id: (job.state, job.revision) for job in again.catalog} == {1: ("queued", 9), 2: ("cancelled", 2)}
    assert sorted(path.name for path in layout.spool_dir.glob("*/[0-9]*.json")) == ["1.json", "2.json"]
    again.close()


def damage_its_middle(content: bytes) -> bytes:
    return content.replace(b'"old"', b'"new"', 1)


@pytest.mark.parametrize(
    ("spoil", "is_kept"),
    [
        (damage_its_middle, True),
        (lambda content: content[:-30], True),
        (lambda content: content[: len(content) // 2], True),
        (lambda _: b"", False),
        (lambda _: b"\n0\n", True),
        (lambda _: b"\xff" * 1000, True),
        (lambda content: content + b"more\n", True),
        (None, False),
    ],
)
def test_without_a_whole_file_a_start_reads_the_entries(
    layout: Layout, spoil: Callable[[bytes], bytes] | None, is_kept: bool
) -> None:
    first = started(layout)
    jobs = {number: add(first, number) for number in range(1, 8)}
    ended(first)
    content = layout.ended_path.read_bytes()
    if spoil is not None:
        layout.ended_path.write_bytes(spoil(content))
    else:
        layout.ended_path.unlink()
    again = started(layout)
    assert {job.id: job.name for job in again.catalog} == dict.fromkeys(jobs, "old")
    assert {number: again.job(number) for number in again.all_jobs()} == jobs
    assert layout.ended_path.with_name("ended.index.damaged").exists() == is_kept
    ended(again)
    assert EndedIndex(layout.ended_path).read().keys() == jobs.keys()


@pytest.mark.parametrize(("key", "value"), [("version", 0), ("fields", [*Brief._fields, "other"])])
def test_the_file_of_a_honed_that_keeps_other_facts_is_replaced(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    first = started(layout)
    add(first, 1)
    with monkeypatch.context() as patch:
        patch.setitem(ended_index._FORMAT, key, value)
        ended(first)
        assert EndedIndex(layout.ended_path).read()
    assert EndedIndex(layout.ended_path).read() == {}
    ended(started(layout))
    assert EndedIndex(layout.ended_path).read().keys() == {1}
    assert not layout.ended_path.with_name("ended.index.damaged").exists()


@pytest.mark.usefixtures("real_times")
def test_an_entry_that_was_written_just_before_the_file_is_read(layout: Layout) -> None:
    """Of a file system with times of seconds, a later change of it may look the same."""
    first = started(layout)
    add(first, 1)
    ended(first)
    assert told_otherwise(layout).keys() == {1}
    again = started(layout)
    assert [job.name for job in again.catalog] == ["old"]
    again.close()


def test_the_file_is_written_when_it_differs_in_many_jobs_and_not_for_a_few_of_thousands(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("honed.job.ended_index.MAX_BEHIND", 0.1)
    spool = started(layout)
    for number in range(1, 21):
        add(spool, number)
    ended(spool)
    spool = started(layout)
    before = layout.ended_path.stat()
    for number in (21, 22):
        add(spool, number)
    ended(spool)
    assert os.path.samestat(layout.ended_path.stat(), before)
    spool = started(layout)
    spool.prune(*(job for job in map(spool.listed, (1, 2)) if job is not None))
    ended(spool)  # it learns of pruned ones at a start
    ended(started(layout))
    assert EndedIndex(layout.ended_path).read().keys() == set(range(3, 23))


def test_a_disk_that_does_not_take_the_file_costs_nothing_else(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    spool = started(layout)
    jobs = [add(spool, 1)]
    layout.ended_path.mkdir(parents=True)
    ended(spool)
    assert "not written, so the next start reads the ended jobs' entries" in caplog.text
    layout.ended_path.rmdir()
    again = started(layout)
    assert [again.job(1)] == jobs
    ended(again)
    assert EndedIndex(layout.ended_path).read().keys() == {1}
    assert not list(layout.state_dir.glob(".*"))


# -- when it is asked for ---------------------------------------------------------------------------------------------


def after_a_start(layout: Layout) -> Spool:
    """Return the spool of a honed that has seen nothing of its two ended jobs but the file."""
    first = started(layout)
    for number in (1, 2):
        add(first, number)
    ended(first)
    return started(layout)


def test_an_entry_that_is_damaged_when_it_is_asked_for_is_set_aside(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    spool = after_a_start(layout)
    path = spool.entries.path(1, State.CANCELLED)
    path.write_text("rotten")
    assert spool.job(1) is None
    assert spool.listed(1) is None
    assert [job.id for job in spool.catalog.ordered()] == [2]
    assert spool.named("old") == [spool.listed(2)]
    assert spool.corrupt.names() == ["1.cancelled.json"]
    assert "in no queue or list any more" in (spool.corrupt.dir / "1.cancelled.json.reason").read_text()
    assert not path.exists()
    assert "damaged entry" in caplog.text
    spool.close()


def test_an_entry_that_somebody_has_removed_is_a_job_no_more(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    spool = after_a_start(layout)
    spool.entries.path(1, State.CANCELLED).unlink()
    assert spool.job(1) is None
    assert [job.id for job in spool.catalog] == [2]
    assert "its entry" in caplog.text
    assert spool.corrupt.names() == []
    spool.close()


@pytest.fixture(params=[errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of files that cannot be opened now."""
    names, real = set[str](), os.open

    def fail(path: Any, *arguments: Any, **keys: Any) -> int:
        if os.fspath(path).rpartition("/")[2] in names:
            raise OSError(request.param, os.strerror(request.param), path)
        return real(path, *arguments, **keys)

    monkeypatch.setattr(os, "open", fail)
    return names


def test_a_machine_that_cannot_read_an_entry_now_loses_no_job(layout: Layout, failing: set[str]) -> None:
    spool = after_a_start(layout)
    failing.add("1.json")
    with pytest.raises(OSError, match=r"1\.json"):
        spool.job(1)
    rows = query.list_jobs(spool, layout)
    assert [(row["id"], row["name"], row["state"]) for row in rows] == [
        (2, "old", "cancelled"),
        (1, "old", "cancelled"),
    ]
    assert rows[0]["remark"] == ""
    assert rows[1]["remark"].startswith("its entry cannot be read: ")
    assert spool.corrupt.names() == []
    failing.clear()
    assert spool.job(1) is not None
    assert [row["remark"] for row in query.list_jobs(spool, layout)] == ["", ""]
    spool.close()


def test_an_entry_that_stays_unreadable_holds_up_neither_a_start_nor_others(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started(layout)
    Counters(layout.counters_path, first).recover()  # and then honed is killed before it counts
    attempts = (Attempt(1, "unsloth", 1.0, ended_at=time.time(), took_sec=5.0),)
    jobs = [add(first, number, attempts=attempts, is_pinned=True) for number in (1, 2)]
    ended(first)
    again = started(layout)
    real = os.open

    def fail(path: Any, *arguments: Any, **keys: Any) -> int:
        if os.fspath(path).endswith("cancelled/1.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        counters, usage = Counters(layout.counters_path, again), Usage(layout.usage_path)
        counters.recover()
        counters.tend(is_last=True)
        usage.catch_up(again.catalog, lambda _uid: 1.0)
        needs = retention.Needs(again, layout)
        assert [needs.of(job) for job in again.catalog] == [frozenset(), frozenset()]
        assert {job.id for job in again.catalog} == {1, 2}
    values = read_counters(layout.counters_path)
    assert values is not None
    assert values["counters"]["honed_jobs_finished_total"] == {"cancelled": 1}
    assert usage.used_sec(jobs[0].uid, 3600.0) == pytest.approx(5.0, abs=0.1)
    again.close()
    last = started(layout)  # the disk reads it again
    counters = Counters(layout.counters_path, last)
    counters.recover()
    counters.tend(is_last=True)
    usage = Usage(layout.usage_path)
    usage.catch_up(last.catalog, lambda _uid: 1.0)
    assert usage.used_sec(jobs[0].uid, 3600.0) == pytest.approx(10.0, abs=0.1)
    values = read_counters(layout.counters_path)
    assert values is not None
    assert values["counters"]["honed_jobs_finished_total"] == {"cancelled": 2}
    last.close()


@pytest.mark.parametrize("is_requeue", [True, False])
def test_a_job_whose_change_failed_half_way_is_what_it_was_until_it_is_made(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, is_requeue: bool
) -> None:
    spool = after_a_start(layout)
    jobs = [add(spool, number) for number in range(3, MAX_RECENT + 5)]
    job = spool.job(1)
    assert job is not None
    synced = list[Path]()

    def fail(path: Path) -> None:
        synced.append(path)
        if len(synced) == 1 + is_requeue:  # after the old entry was removed, or the new one was renamed
            raise OSError(errno.EIO, "the disk")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_dir", fail)
        with pytest.raises(OSError, match="the disk"):
            spool.move(job, State.QUEUED) if is_requeue else spool.annotate(job, is_pinned=True)
    for each in jobs:
        assert spool.job(each.id) is not None
    assert spool.job(1) == job
    done = spool.move(job, State.QUEUED) if is_requeue else spool.annotate(job, is_pinned=True)
    assert spool.job(1) == done
    spool.close()
    again = started(layout)
    assert again.job(1) == done
    again.close()


def test_those_that_are_asked_for_often_are_not_read_again(layout: Layout) -> None:
    spool = started(layout)
    numbers = range(1, MAX_RECENT + 3)
    jobs = {number: add(spool, number) for number in numbers}
    assert all(spool.job(number) == jobs[number] for number in numbers)
    first = spool.job(1)
    assert first is spool.job(1)
    for number in numbers:
        spool.job(number)
    assert first is not spool.job(1)  # they are not kept for ever
    assert spool.job(3) == jobs[3]
    changed = spool.annotate(jobs[3], is_pinned=True)
    assert spool.job(3) == changed
    spool.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_in_memory_is_what_the_entries_say_whatever_happens(layout: Layout, seed: int) -> None:
    rng, spool = random.Random(seed), started(layout)
    number = 0
    for _ in range(200):
        jobs = [job for listed in spool.catalog if (job := spool.job(listed.id)) is not None]
        match rng.randrange(8):
            case 0 | 1:
                number += 1
                job = Job(
                    number, rng.choice(("a", "b")), float(number), "a.yaml", rng.choice((0, 1000)), f"/o/{number}"
                )
                for _step in spool.adding(job):
                    pass
            case 2 | 3 | 4 if jobs:
                job = rng.choice(jobs)
                to = rng.choice(sorted(MOVES[job.state]))
                attempt = Attempt(
                    len(job.attempts) + 1, "unsloth", 1.0, fallback=rng.choice((None, Fallback(1.0, "why")))
                )
                attempts = (*job.attempts, attempt) if to is State.RUNNING else job.attempts
                if to.is_final and attempts:
                    attempts = (*attempts[:-1], dataclasses.replace(attempts[-1], ended_at=float(number)))
                spool.move(job, to, attempts=attempts)
            case 5 if jobs:
                spool.annotate(rng.choice(jobs), is_pinned=rng.random() < 0.5)
            case 6 if any(job.state.is_final for job in jobs):
                spool.prune(rng.choice([job for job in jobs if job.state.is_final]))
            case _:
                ended(spool) if rng.random() < 0.7 else spool.close()
                spool = started(layout)
        truth = Spool(layout, lock=False).entries.all()
        assert [job.id for job in spool.catalog.newest()] == sorted(truth, reverse=True)
        for each in spool.catalog:
            whole = truth[each.id]
            assert (each == whole) if isinstance(each, Job) else each == brief(whole, each.identity)
    spool.close()


def test_a_name_of_a_pruned_job_is_looked_up_without_reading_the_others_once_these_are_known(layout: Layout) -> None:
    spool = started(layout)
    jobs = [add(spool, number, f"n{number}") for number in (1, 2, 3)]
    spool.prune(*jobs)
    list(spool.pruned.read_names())
    other = dataclasses.replace(jobs[0], name="other")  # no file there is ever rewritten: what is known counts
    spool.pruned.path(1, State.CANCELLED).write_bytes(other.to_json())
    assert spool.pruned.get("other") is None
    assert spool.pruned.get("n2") == jobs[1]
    spool.prune(add(spool, 4, "n4"))
    found = spool.pruned.get("n4")
    assert found is not None
    assert found.id == 4
    spool.close()
