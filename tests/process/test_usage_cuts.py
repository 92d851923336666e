"""The use of the devices counts once, wherever honed is cut off between a job's end and the line in usage.jsonl."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from harness import HERE, Instance

from honed.job.job import State
from waiting import wait_for


def lines(instance: Instance) -> list[dict[str, Any]]:
    path = instance.layout.usage_path
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in found if "job" in line]


def start_cut(instance: Instance, place: str) -> None:
    """Have one job run by a honed that is cut off there."""
    instance.drop("one", name="succeed.one")
    instance.environment["HONED_TEST_CUT"] = place
    usual, instance.command = instance.command, (sys.executable, str(HERE / "cuthoned.py"))
    instance.start()
    instance.command = usual


@pytest.mark.parametrize("place", ["before it is charged", "between charge and flush", "after the flush"])
def test_a_kill_between_the_charge_and_its_line_loses_and_doubles_nothing(instance: Instance, place: str) -> None:
    start_cut(instance, place)
    assert instance.wait() == 137
    assert instance.wait_state("succeed.one", State.SUCCEEDED)  # its entry is written first
    assert len(lines(instance)) == (place == "after the flush")
    for _ in range(2):
        assert instance.drain() == 0
    (line,) = lines(instance)
    (attempt,) = instance.wait_state("succeed.one", State.SUCCEEDED).attempts
    assert (line["job"], line["attempt"], line["ended_at"]) == (1, 1, attempt.ended_at)
    assert line["level"] == line["sec"] == attempt.spent_sec


def test_a_step_that_fails_after_the_end_of_a_job_does_not_keep_its_use_from_being_counted(instance: Instance) -> None:
    start_cut(instance, "full")
    wait_for(lambda: lines(instance), what="its line, without another start")
    wait_for(lambda: "No space left on device" in instance.log, what="why the step failed")
    (line,) = lines(instance)
    assert (line["job"], line["attempt"]) == (1, 1)
