"""All jobs in memory, and the queries about all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from honed.job.catalog import Catalog, key
from honed.job.job import Job, State


def job_of(number: int, name: str = "a", output_dir: str | None = None, **changes: object) -> Job:
    made = Job(id=number, name=name, submitted_at=1.0, source="a.json", uid=0, output_dir=output_dir or f"/o/{number}")
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_list_has_running_jobs_the_queue_in_its_order_what_is_held_and_the_rest_newest_first() -> None:
    states = [State.SUCCEEDED, State.HELD, State.QUEUED, State.QUEUED, State.RUNNING, State.FAILED]
    jobs = Catalog(job_of(number, state=state, priority=number == 4) for number, state in enumerate(states, start=1))
    assert [job.id for job in jobs.ordered()] == [5, 4, 3, 2, 6, 1]
    assert [job.id for job in jobs.ordered(after=3)] == [2, 6, 1]
    assert [job.id for job in jobs.of_state(State.QUEUED)] == [4, 3]
    assert [job.id for job in jobs.of_state(State.FAILED)] == [6]
    assert [job.id for job in jobs.ended()] == [6, 1]


@pytest.mark.parametrize(
    ("theirs", "ours", "is_taken"),
    [
        ("/o/a", "/o/a", True),
        ("/o/a", "/o/a/b", True),
        ("/o/a/b", "/o/a", True),
        ("/o/a", "/o", True),
        ("/o/a", "/o/ab", False),
        ("/o/ab", "/o/a", False),
        ("/o/a-b", "/o/a", False),
        ("/o/a", "/p", False),
    ],
)
def test_an_output_directory_is_one_jobs_alone_until_it_is_over(theirs: str, ours: str, is_taken: bool) -> None:
    jobs = Catalog([job_of(1, output_dir=theirs), job_of(2, output_dir="/o/a-z"), job_of(3, output_dir="/o/az")])
    found = jobs.owner_of(ours)
    assert (found is not None and found.output_dir == theirs) or (not is_taken and found is None) or ours == "/o"
    assert (found is not None) == is_taken
    jobs.put(job_of(1, output_dir=theirs, state=State.FAILED))
    assert jobs.owner_of(theirs) is None


def test_a_directory_is_taken_as_soon_as_its_job_is_about_to_be_accepted() -> None:
    jobs = Catalog()
    jobs.reserve(job_of(1, output_dir="/o"))
    assert jobs.owner_of("/o/a") == job_of(1, output_dir="/o")
    jobs.give_back(job_of(1, output_dir="/o"))
    assert jobs.owner_of("/o/a") is None


def test_of_two_jobs_with_one_directory_the_second_keeps_it_when_the_first_is_over() -> None:
    jobs = Catalog([job_of(1, output_dir="/o"), job_of(2, output_dir="/o")])
    jobs.put(job_of(1, output_dir="/o", state=State.FAILED))
    found = jobs.owner_of("/o")
    assert found is not None
    assert found.id == 2


def test_after_any_changes_it_is_what_one_made_of_the_same_jobs_would_be() -> None:
    chance = random.Random(0)
    jobs, truth = Catalog(), {}
    for _ in range(2000):
        number = chance.randrange(60)
        if chance.random() < 0.1:
            jobs.drop(number)
            truth.pop(number, None)
            continue
        name, place = f"n{chance.randrange(5)}", f"/o/{chance.randrange(8)}/{chance.randrange(3)}"
        made = job_of(number, name, place, state=chance.choice(list(State)), priority=chance.randrange(3))
        jobs.put(made)
        truth[number] = made
        path = f"/o/{chance.randrange(8)}"
        near = [job for job in truth.values() if not job.state.is_final and Path(job.output_dir).is_relative_to(path)]
        found = jobs.owner_of(path)
        assert (found in near) if near else found is None
    assert [job.id for job in jobs.ordered()] == [job.id for job in sorted(truth.values(), key=key)]
    for name in {job.name for job in truth.values()}:
        assert [job.id for job in jobs.named(name)] == sorted(job.id for job in truth.values() if job.name == name)
    assert all(jobs.num(state) == sum(job.state is state for job in truth.values()) for state in State)
