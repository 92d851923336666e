"""Families, adapters, dtypes and quantizations: every cell trains, evaluates, predicts, resumes nothing and exports.

Pairwise by default: each two settings meet in some cell. Whole with --all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from honed.error import HonedError
from worker.conftest import MakeJob
from zoo.model import FAMILIES

Cell = tuple[str, str, str, str]

CELLS: list[Cell] = [
    (family, adapter, dtype, quantization)
    for family, adapter, dtype, quantization in itertools.product(
        FAMILIES, ["lora", "full"], ["float32", "bfloat16", "float16"], ["none", "4bit", "8bit"]
    )
    if adapter == "lora" or quantization == "none"  # a quantized base cannot be trained whole
]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Cells, few and always the same, in which each pair of settings meets that meets in any."""

    def pairs(cell: Cell) -> set[tuple[tuple[int, str], tuple[int, str]]]:
        return set(itertools.combinations(enumerate(cell), 2))

    missing = set().union(*map(pairs, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def train(make_job: MakeJob, cell: Cell) -> None:
    family, adapter, dtype, quantization = cell
    keys: dict[str, Any] = {"lora": {"r": 4, "lora_dropout": 0.1}} if adapter == "lora" else {}
    try:
        job = make_job(
            family, dtype=dtype, quantization=quantization, eval_split=0.2,
            training={"max_steps": 3, "learning_rate": 1e-2},
            predictions={"num_samples": 2, "max_new_tokens": 4}, **keys,
        )  # fmt: skip
    except HonedError as error:
        assert error.hint, "what is refused is refused before the model is loaded, with what to do"
        return
    ended = job.run()
    assert ended.status == 0, (ended.result, job.plan["precision"])
    assert len(ended.losses) == 3
    assert all(loss is not None for loss in ended.losses.values())
    assert ended.of("evaluation")
    assert [item["num_failed"] for item in ended.of("predictions")] == [0] * len(ended.of("predictions"))
    weights = "adapter_model.safetensors" if adapter == "lora" else "model.safetensors"
    assert (job.output_dir / weights).exists()


@pytest.mark.parametrize("cell", pairwise(CELLS), ids="-".join)
def test_each_two_settings_train_together(make_job: MakeJob, cell: Cell) -> None:
    train(make_job, cell)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in pairwise(CELLS)], ids="-".join)
def test_every_other_cell_trains_too(make_job: MakeJob, cell: Cell) -> None:
    train(make_job, cell)
