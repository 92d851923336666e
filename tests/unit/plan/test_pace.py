"""Warnings, with the number, about settings that do not fit so short a run and about unusual learning rates."""

from __future__ import annotations

from typing import Any

import pytest

from honed.plan import pace
from honed.spec.jobfile import validate
from honed.spec.spec import JobSpec

#: 100 rows in batches of 5: 20 steps.
SHORT: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 5, "learning_rate": 1e-4}


def job(training: dict[str, Any], **keys: Any) -> JobSpec:
    document = {"base_model": "/m", "lora": {"r": 4}, "datasets": [{"path": "/d.jsonl"}], **keys}
    return validate({**document, "training": SHORT | training})


@pytest.mark.parametrize(
    ("training", "keys", "num_rows", "steps"),
    [
        ({}, {}, 100, 20),
        ({}, {}, 101, 21),
        ({"num_train_epochs": 2.5}, {}, 100, 50),
        ({}, {}, None, None),
        ({"gradient_accumulation_steps": 8}, {}, 100, 3),
        ({"max_steps": 7}, {}, None, 7),
        ({}, {"eval_split": 0.5}, 100, 10),
        ({}, {}, 1, 1),
        ({"num_train_epochs": 0.1}, {}, 100, 2),
    ],
)
def test_the_steps_of_a_run(training: dict[str, Any], keys: dict[str, Any], num_rows: int | None, steps: int) -> None:
    assert pace.num_steps(job(training, **keys), num_rows) == steps


EVALUATED: dict[str, Any] = {"eval_split": 0.1}
#: The training settings, the job's other keys, and the beginning of the warning.
UNFIT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"warmup_steps": 500},
        {},
        "training.warmup_steps: 500 of at most 20 steps: the learning rate will reach at most 4%",
    ),
    ({"warmup_steps": 15}, {}, "training.warmup_steps: 15 of at most 20 steps: 75% of the run is"),
    ({"warmup_steps": 0.7}, {}, "training.warmup_steps: 0.7 of at most 20 steps: 70% of the run is"),
    (
        {"eval_steps": 500},
        EVALUATED,
        "training.eval_steps: 500 of at most 18 steps: there will be no evaluation between",
    ),
    (
        {"save_steps": 1000},
        {},
        "training.save_steps: 1000 of at most 20 steps: there will be no checkpoint before the last",
    ),
    ({"logging_steps": 50}, {}, "training.logging_steps: 50 of at most 20 steps: no loss will be reported"),
    (
        {"max_steps": 20, "warmup_steps": 21},
        {},
        "training.warmup_steps: 21 of 20 steps: the learning rate will reach at most 95%",
    ),
    (
        {},
        {"predictions": {"sample_frequency": 21}},
        "predictions.sample_frequency: 21 of at most 20 steps: there will be",
    ),
    ({"learning_rate": 0.2}, {}, "training.learning_rate: 0.2 is very high for an adapter and likely to destroy"),
    (
        {"learning_rate": 1e-7},
        {},
        "training.learning_rate: 1e-07 is very low for an adapter: the model will hardly learn",
    ),
    ({"learning_rate": 2e-3}, {"lora": None}, "training.learning_rate: 0.002 is very high for full fine-tuning and"),
    (
        {"learning_rate": 1e-9},
        {"lora": None},
        "training.learning_rate: 1e-09 is very low for full fine-tuning: the model will hardly",
    ),
]


@pytest.mark.parametrize(("training", "keys", "words"), UNFIT)
def test_what_does_not_fit_is_said_with_the_number(training: dict[str, Any], keys: dict[str, Any], words: str) -> None:
    [told] = pace.warnings(job(training, **keys), 100)
    assert told.startswith(words)


@pytest.mark.parametrize(
    ("training", "keys", "num_rows"),
    [
        ({}, EVALUATED, 100),
        ({"warmup_steps": 500, "eval_steps": 500}, EVALUATED, None),
        ({"warmup_steps": 10, "save_steps": 20, "logging_steps": 20}, {}, 100),
        ({"warmup_steps": 0.1}, {}, 3),
        ({"learning_rate": 5e-3}, {}, 100),
        ({"learning_rate": 2e-5}, {"lora": None}, 100),
        ({"learning_rate": 0.2, "optim": "sgd"}, {}, 100),
        ({"save_steps": 1000, "save_strategy": "no"}, {}, 100),
        ({"eval_steps": 0.2, "save_steps": 0.5, "logging_steps": 0.1}, EVALUATED, 100),
        ({"save_strategy": "epoch"}, {}, 1),
        ({"num_train_epochs": 30, "warmup_steps": 100}, {}, 100),
    ],
)
def test_what_fits_or_is_not_known_is_left_alone(training: dict[str, Any], keys: dict[str, Any], num_rows: int) -> None:
    assert pace.warnings(job(training, **keys), num_rows) == []
