"""The checkpoints that a job's disk must hold: those that it will write, no more and no fewer."""

from __future__ import annotations

from typing import Any

import pytest

from honed.check.placecheck import num_at_once
from honed.spec import jobfile


@pytest.mark.parametrize(
    ("training", "keys", "number"),
    [
        ({"max_steps": 5000}, {}, 3),  # two, and the one being written
        ({"max_steps": 5000, "save_total_limit": 1}, {}, 2),
        ({"max_steps": 1}, {}, 1),
        ({"max_steps": 2, "save_strategy": "no"}, {}, 2),  # save_interval_sec writes them too
        ({"max_steps": 5000, "save_strategy": "no"}, {}, 3),
        ({"max_steps": 5000, "save_strategy": "no"}, {"save_interval_sec": None}, 0),
        ({"max_steps": 5000, "save_strategy": "no"}, {"time_limit_sec": 1000}, 1),
        ({"max_steps": 100}, {"save_interval_sec": None}, 1),  # after the last step
        ({"max_steps": 501}, {"save_interval_sec": None}, 2),
        ({"max_steps": 100, "save_steps": 0.5}, {"save_interval_sec": None}, 2),
        ({"num_train_epochs": 1, "save_strategy": "epoch"}, {"save_interval_sec": None}, 1),
        ({"num_train_epochs": 9, "save_strategy": "epoch"}, {"save_interval_sec": None}, 3),
        ({"max_steps": 5000, "load_best_model_at_end": True, "eval_strategy": "steps"}, {"eval_split": 0.1}, 4),
        ({"max_steps": 5000, "eval_strategy": "epoch"}, {"eval_split": 0.1, "early_stopping_patience": 2}, 4),
        ({}, {}, 3),
    ],
)
def test_as_many_checkpoints_need_room_as_the_job_has_at_once(
    training: dict[str, Any], keys: dict[str, Any], number: int
) -> None:
    document = {"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], "training": training, **keys}
    assert num_at_once(jobfile.validate(document), None) == number
