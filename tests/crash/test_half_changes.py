"""A change of the spool that failed half-way, and then another one, without a restart in between."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.job.arrival import Arrivals, Claim
from honed.job.job import Attempt, Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.system.error import SpecError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    yield made
    made.close()


def claim(spool: Spool) -> Claim:
    path = spool.incoming_dir / "a.json"
    path.write_text("{}")
    taken = Arrivals(spool).claim(PersonPath.of(path, 1))
    assert taken is not None
    Arrivals(spool).copy(taken, max_bytes=100)
    return taken


def job_of(taken: Claim) -> Job:
    return Job(id=taken.id, name="a", submitted_at=1.0, source=taken.name, uid=0, output_dir="/o")


class Broken:
    """The n-th call of one of os's functions fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
        real = getattr(os, name)
        self.num_seen = 0

        def broken(*arguments: object, **keys: object) -> object:
            self.num_seen += 1
            if self.num_seen == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **keys)

        monkeypatch.setattr(os, name, broken)


FIRST = (Attempt(number=1, backend="transformers", started_at=2.0),)
#: Of a move: sync of the new entry, rename, sync of the new place, unlink of the old one, sync of the old place.
HALVES = [("fsync", 1), ("rename", 1), ("fsync", 2), ("unlink", 1), ("fsync", 3)]


@pytest.mark.parametrize(("name", "at"), HALVES)
def test_a_job_whose_start_failed_half_way_and_that_is_cancelled_then_is_cancelled(
    spool: Spool, name: str, at: int
) -> None:
    taken = claim(spool)
    job = Arrivals(spool).admit(job_of(taken), taken, PlanFile({}))
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(OSError, match="Input/output"):
        Broken(monkeypatch, name, at)
        spool.move(job, State.RUNNING)
    spool.move(job, State.CANCELLED, outcome="cancelled")
    for _ in range(2):
        assert [found.state for found in spool.all_jobs().values()] == [State.CANCELLED]
        entries = [path for state in State for path in spool.state_dir(state).iterdir()]
        assert entries == [spool.state_dir(State.CANCELLED) / f"{job.id}.json"]
        spool.recover()  # as the next start does
        Arrivals(spool).recover()


@pytest.mark.parametrize(("name", "at"), HALVES)
def test_a_start_that_failed_half_way_is_simply_made_again(spool: Spool, name: str, at: int) -> None:
    taken = claim(spool)
    job = Arrivals(spool).admit(job_of(taken), taken, PlanFile({}))
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(OSError, match="Input/output"):
        Broken(monkeypatch, name, at)
        spool.move(job, State.RUNNING, attempts=FIRST)
    moved = spool.move(job, State.RUNNING, attempts=FIRST)
    assert list(spool.all_jobs().values()) == [moved]
    assert [path for state in State for path in spool.state_dir(state).iterdir()] == [
        spool.state_dir(State.RUNNING) / f"{job.id}.json"
    ]


@pytest.mark.parametrize(("name", "at"), [("fsync", 5), ("unlink", 1)])  # of the entry's place; of the claimed file
def test_an_arrival_whose_acceptance_failed_after_its_entry_is_accepted_and_not_checked_again(
    spool: Spool, name: str, at: int
) -> None:
    taken = claim(spool)
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(OSError, match="Input/output"):
        Broken(monkeypatch, name, at)
        Arrivals(spool).admit(job_of(taken), taken, PlanFile({}))
    job = Arrivals(spool).accepted(taken)
    assert job is not None
    assert job.state is State.QUEUED
    assert list(spool.claimed_dir.iterdir()) == []


def test_what_a_crash_leaves_of_a_refusal_is_removed_and_a_jobs_directory_never(spool: Spool, tmp_path: Path) -> None:
    refused, accepted = claim(spool), claim(spool)
    job = Arrivals(spool).admit(job_of(accepted), accepted, PlanFile({}))
    with pytest.MonkeyPatch.context() as monkeypatch:
        Broken(monkeypatch, "rmdir", 1)
        Arrivals(spool).reject(refused, SpecError("no"), when="now")
    spool.layout.job(refused.id).dir.mkdir(exist_ok=True)
    (spool.layout.job(refused.id).dir / "spec.json").write_text("{}")
    entry = spool.state_dir(State.QUEUED) / f"{job.id}.json"
    entry.write_text("\0\0")  # damaged: nobody knows whose directory that is, and so it stays
    spool.close()
    again = Spool(Layout(tmp_path))
    again.recover()
    Arrivals(again).recover()
    assert not again.layout.job(refused.id).dir.exists()
    assert again.layout.job(job.id).dir.exists()
    assert list(again.claimed_dir.iterdir()) == []
    again.close()


def test_what_a_refusal_could_not_remove_goes_at_the_end(spool: Spool) -> None:
    arrivals, refused = Arrivals(spool), claim(spool)
    with pytest.MonkeyPatch.context() as monkeypatch:
        Broken(monkeypatch, "rmdir", 1)
        arrivals.reject(refused, SpecError("no"), when="now")
    places = [refused.place, spool.layout.job(refused.id).dir]
    assert [path.exists() for path in places].count(True) == 1
    arrivals.close()
    assert not any(path.exists() for path in places)


def test_a_claim_that_failed_half_way_leaves_the_arrival_where_it_was_and_nothing_else(spool: Spool) -> None:
    path = spool.incoming_dir / "a.json"
    path.write_text("{}")
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(OSError, match="Input/output"):
        Broken(monkeypatch, "fsync", 3)  # the number, its place, the new place
        Arrivals(spool).claim(PersonPath.of(path, 1))
    assert path.exists()
    assert list(spool.claimed_dir.iterdir()) == []
