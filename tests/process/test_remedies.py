"""Adjustments of a job that ran out of memory or disk space: durable, reported, and without using up an attempt."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Instance

from honed.job import query
from honed.job.job import State
from waiting import wait_for

FIRST = "per_device_train_batch_size 8 → 4, gradient_accumulation_steps 1 → 2"


def test_each_step_down_is_in_the_entry_the_log_and_show_and_counts_for_no_attempt(instance: Instance) -> None:
    instance.drop("shrink-3", retry={"max_attempts": 1}, training={"per_device_train_batch_size": 8})
    assert instance.drain() == 0
    job = instance.job("shrink-3")
    assert job is not None
    assert (job.state, len(job.attempts), job.num_failures) == (State.SUCCEEDED, 4, 0)
    assert [each.attempt for each in job.adjustments] == [1, 2, 3]
    assert f"out of memory; the next attempt continues with {FIRST}" in instance.log
    assert instance.show("shrink-3")["adjustments"][0]["text"] == FIRST
    page = instance.layout.job(job.id).report_path
    assert FIRST in wait_for(lambda: page.exists() and page.read_text(encoding="utf-8"), what="the report")


def test_where_no_step_is_left_the_job_fails_and_says_what_was_tried(instance: Instance) -> None:
    instance.drop("shrink-99", retry={"max_attempts": 5}, training={"per_device_train_batch_size": 2})
    assert instance.drain() == 0
    job = instance.job("shrink-99")
    assert job is not None
    assert (job.state, job.outcome, len(job.attempts)) == (State.FAILED, "out_of_memory", 2)
    assert job.error is not None
    assert "no step of the ladder is left, after per_device_train_batch_size 2 → 1" in job.error["message"]


def test_a_model_that_does_not_load_fails_at_once(instance: Instance) -> None:
    instance.drop("shrink-1-load", retry={"max_attempts": 5})
    assert instance.drain() == 0
    job = instance.job("shrink-1-load")
    assert job is not None
    assert (job.state, len(job.attempts), job.adjustments) == (State.FAILED, 1, ())
    assert job.error is not None
    assert "in load, no step of the ladder helps here" in job.error["message"]


@pytest.mark.parametrize(("wish", "num_attempts"), [("retry", 3), ("fail", 1)])
def test_a_job_that_wants_no_ladder_is_tried_as_it_is_or_not_again(
    instance: Instance, wish: str, num_attempts: int
) -> None:
    instance.configure("[jobs]\nretry_delay_sec = 0.0\n")
    instance.drop("shrink-1", retry={"on_out_of_memory": wish})
    assert instance.drain() == 0
    job = instance.job("shrink-1")
    assert job is not None
    assert (job.state, job.outcome, len(job.attempts), job.adjustments) == (
        State.FAILED,
        "out_of_memory",
        num_attempts,
        (),
    )


def test_a_requeue_after_the_ladders_end_begins_at_its_top(instance: Instance) -> None:
    instance.drop("shrink-9", training={"per_device_train_batch_size": 2})
    assert instance.drain() == 0
    failed = instance.job("shrink-9")
    assert failed is not None
    instance.start()
    instance.client.ask("pause")
    instance.client.ask("requeue", id=str(failed.id))
    assert instance.wait_state(failed.name, State.QUEUED).adjustments == ()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB that can grow."""
    if os.getuid() != 0:
        pytest.skip("a file system of its own takes root")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "honed-test", place]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_job_without_room_for_its_checkpoint_waits_and_goes_on_by_itself(small_disk: Path) -> None:
    instance = Instance(small_disk)
    try:
        instance.drop("full-32", retry={"max_attempts": 1})
        instance.drop("succeed")
        instance.start()
        instance.wait_state("succeed", State.SUCCEEDED)  # the waiting job does not block it
        job = instance.wait_state("full-32", State.QUEUED)
        assert job.needs_bytes == 32 * 2**20
        assert instance.show("full-32")["needs_bytes"] == 32 * 2**20
        assert job.error is not None
        assert job.error["code"] == "disk_insufficient"
        assert "1 waiting for disk space" in instance.client.ask("status")["status"]
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        job = instance.wait_state("full-32", State.SUCCEEDED)
        assert ([each.outcome for each in job.attempts], job.num_failures) == (["disk_insufficient", "succeeded"], 0)
        assert job.needs_bytes == 0
    finally:
        instance.stop()
        instance.end()


def test_a_drain_does_not_wait_for_somebody_to_make_room(small_disk: Path) -> None:
    instance = Instance(small_disk)
    try:
        instance.drop("full-32")
        assert instance.drain() == 0
        job = instance.job("full-32")
        assert job is not None
        assert (job.state, len(job.attempts)) == (State.QUEUED, 1)
    finally:
        instance.end()


def test_a_disk_that_is_full_to_the_last_byte_harms_neither_spool_nor_database(
    small_disk: Path, tmp_path: Path
) -> None:
    instance = Instance(small_disk)
    instance.log_path = tmp_path / "honed.log"
    try:
        instance.drop("until-150")
        instance.start()
        job = instance.wait_state("until-150", State.RUNNING)
        wait_for(lambda: instance.show("until-150")["progress"]["step"], what="a step")
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (65536, 512, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue
        wait_for(lambda: "honed cannot work" in instance.log, what="the word")
        filler.unlink()
        instance.go("until-150")
        job = instance.wait_state("until-150", State.SUCCEEDED)
        assert {name for _, name in instance.entries()} == {f"{job.id}.json"}
        worker_log = instance.layout.job(job.id).attempt(1).log_path.read_text()
        assert (len(job.attempts), job.num_failures) == (1, 0), instance.log + worker_log
        instance.stop()
        steps = [step for step, _ in query.losses(instance.spool, instance.layout, "until-150")]
        assert steps == list(range(1, 151))  # no line that found no space at first is missing
        with sqlite3.connect(instance.layout.database_path) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finally:
        instance.end()
