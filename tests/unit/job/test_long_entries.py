"""Entries are in the daemon's memory: what a user can make long is shortened there."""

from __future__ import annotations

import dataclasses

import pytest

from honed.job.job import MAX_CHARS, MAX_PATH_CHARS, Job, State
from zoo.jobs import JOB

LONG = "a" * (MAX_CHARS + 1)


def test_the_texts_of_an_error_are_shortened() -> None:
    error = {"code": "dataset_invalid", "message": LONG, "hint": LONG, "evidence": "short", "fix": {"name": "b"}}
    job = dataclasses.replace(JOB, error=error)  # type: ignore[arg-type]
    assert job.error == {**error, "message": f"{LONG[:-2]}…", "hint": f"{LONG[:-2]}…"}
    assert dataclasses.replace(job, error=error | {"fix": {"name": LONG}}).error == {  # type: ignore[arg-type]
        key: value for key, value in (job.error or {}).items() if key != "fix"
    }
    assert Job.from_json(job.to_json(), State.FAILED) == job


@pytest.mark.parametrize("num_chars", [1, 100, MAX_PATH_CHARS])
def test_of_many_paths_the_first_are_kept_and_the_others_counted(num_chars: int) -> None:
    paths = tuple(f"{number:0{num_chars}}" for number in range(10 * MAX_PATH_CHARS // num_chars))
    job = dataclasses.replace(JOB, data=paths)
    assert sum(map(len, job.data)) <= MAX_PATH_CHARS
    *first, more = job.data
    assert first == list(paths[: len(first)])
    assert more == f"… and {len(paths) - len(first):,} more"
    assert Job.from_json(job.to_json(), State.FAILED).data == job.data


def test_what_is_short_enough_stays() -> None:
    error = {"code": "dataset_invalid", "message": LONG[1:], "hint": ""}
    paths = ("a" * (MAX_PATH_CHARS - 1), "b")
    job = dataclasses.replace(JOB, error=error, data=paths)  # type: ignore[arg-type]
    assert (job.error, job.data) == (error, paths)


@pytest.mark.parametrize("key", [b"error", b"group"])
def test_an_entry_with_an_error_or_a_sweep_that_is_none_is_damaged(key: bytes) -> None:
    damaged = JOB.to_json().replace(b'"%s": null' % key, b'"%s": "x"' % key)
    assert damaged != JOB.to_json()
    with pytest.raises(ValueError, match="not a job entry"):
        Job.from_json(damaged, State.FAILED)
