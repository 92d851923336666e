"""Sweeps as the jobs that they stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from honed.spec import document, jobfile, sweep
from honed.system.error import SpecError

BASE: dict[str, Any] = {"base_model": "/srv/m", "datasets": [{"path": "/srv/d.jsonl"}], "lora": {"r": 4}}


def members(asked: Any, *, max_jobs: int = 64, **keys: Any) -> list[sweep.Member]:
    parsed = document.parse(json.dumps({**BASE, **keys, "sweep": asked}).encode(), ".json")
    return sweep.members(parsed.data, parsed.lines, max_jobs=max_jobs)


def test_a_grid_is_one_job_for_each_combination_and_the_last_key_changes_fastest() -> None:
    found = members({"training.learning_rate": [1e-4, 2e-4], "lora": {"r": [8, 16]}}, output_dir="/srv/out")
    assert [each.values for each in found] == [
        {"training.learning_rate": rate, "lora.r": rank} for rate in (1e-4, 2e-4) for rank in (8, 16)
    ]
    assert [each.document["output_dir"] for each in found] == [f"/srv/out/{n}" for n in (1, 2, 3, 4)]
    for each in found:
        loaded = jobfile.validate(each.document)
        assert loaded.training.learning_rate == each.values["training.learning_rate"]
        assert loaded.lora is not None
        assert loaded.lora.r == each.values["lora.r"]
        assert loaded.sweep is None


def test_null_is_a_value_and_items_of_lists_can_be_varied() -> None:
    found = members({"training.max_length": [None, 64], "datasets.0.max_rows": [5]})
    loaded = [jobfile.validate(each.document) for each in found]
    assert [each.training.max_length for each in loaded] == [None, 64]
    assert loaded[0].datasets[0].max_rows == 5


def test_some_combinations_are_drawn_by_a_seed() -> None:
    asked = {"lora.r": list(range(1, 11)), "training.seed": list(range(10))}
    drawn = members({**asked, "random": 7, "seed": 3})
    assert drawn == members({**asked, "random": 7, "seed": 3})
    assert drawn != members({**asked, "random": 7})
    assert len({json.dumps(each.values) for each in drawn}) == 7
    with pytest.raises(SpecError, match="100 jobs, but a sweep may have at most 64"):
        members(asked)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([1], "sweep: expected a mapping"),
        ({}, "sweep: has no values"),
        ({"random": 2}, "sweep: has no values"),
        ({"lora.r": 8}, "expected a list of values, got 8"),
        ({"lora.r": []}, "expected a list of values"),
        ({"lora.r": [8, 8]}, "the same value twice"),
        ({"lora.r": [8], "lora": {"r": [4]}}, "the same key twice"),
        ({"lora": [None], "lora.r": [4]}, "a key within another"),
        ({"name": ["a"]}, "a sweep sets it itself"),
        ({"lora.r": [8], "random": 2}, "there are only 1 combinations"),
        ({"lora.r": [8], "seed": 2}, "is only for random"),
        ({"lora.r": [8], "early_stopping": True}, "expected a list of values, got true"),
        ({"lora.r": [8], "early_terminate": {"min_iter": 3}}, "halving: {min_steps"),
        ({"lora.r": [8], "halving": 50}, "sweep.halving: expected a mapping"),
        ({"lora.r": [8], "halving": {}}, "sweep.halving.min_steps: is missing"),
        ({"lora.r": [8], "halving": {"min_steps": 0}}, "expected a number of steps, got 0"),
        ({"lora.r": [8], "halving": {"min_steps": 5, "eta": 1}}, "expected a number from 2 to 16, got 1"),
        ({"lora.r": [8], "halving": {"min_iter": 5}}, "sweep.halving.min_iter: unknown key"),
        ({"halving": {"min_steps": 5}}, "sweep: has no values"),
        ({"datasets.3.max_rows": [1]}, "the list has no item 3"),
        ({f"training.key{n}": [*range(10)] for n in range(20)} | {"random": 3}, "too many combinations"),
    ],
)
def test_a_sweep_that_is_none_is_refused(asked: Any, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        members(asked)
    assert told in caught.value.shown


def test_a_date_and_a_value_without_keys_in_a_job_file_are_refused_in_words() -> None:
    text = "name: 2024-01-01\nbase_model: /m\ndatasets: [{path: /d.jsonl}]\nsweep: {training.learning_rate: [1.0e-4]}\n"
    with pytest.raises(SpecError, match="name: "):
        jobfile.loads(text.encode(), ".yaml")
    text = "base_model: /m\ndatasets: [/d.jsonl]\nsweep: {datasets.0.max_rows: [1]}\n"
    with pytest.raises(SpecError, match="without keys"):
        jobfile.loads(text.encode(), ".yaml")


def test_a_job_file_with_a_sweep_is_read_as_the_first_of_its_jobs() -> None:
    text = "base_model: /m\ndatasets: [{path: /d.jsonl}]\nsweep:\n  training.learning_rate: [1.0e-4, 2.0e-4]\n"
    assert jobfile.loads(text.encode(), ".yaml").training.learning_rate == 1e-4
    with pytest.raises(SpecError, match=r"line 3: training.learning_rat: "):
        jobfile.loads(text.replace("learning_rate", "learning_rat").encode(), ".yaml")
