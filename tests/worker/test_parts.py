"""A rank's part of a checkpoint restores what the rank had, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from honed.system.error import ModelError, PrecisionError
from honed.worker.parallel import ALONE
from honed.worker.train import parts


def build(seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


def written(directory: Path) -> Any:
    model = build(1)
    model[1].running_mean += 3
    parts.write(directory, model, torch.optim.AdamW(model.parameters()), ALONE)
    return model


def test_a_part_restores_weights_and_buffers(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    place.mkdir()
    before, model = written(place), build(2)
    parts.load_weights(place, model, ALONE)
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("altered", "2.weight"),
        ("altered", "1.running_mean"),
        ("missing", "2.weight"),
        ("missing", "1.running_mean"),
        ("added", "3.weight"),
        ("cast", "2.weight"),
        ("cut", "2.weight"),
    ],
)
def test_a_part_that_is_not_what_the_rank_had_is_refused_by_name(how: str, name: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    place.mkdir()
    written(place)
    path = place / "part-0-of-1.pt"
    found = torch.load(path, weights_only=True)
    tensors = found["buffers" if "running" in name else "weights"]
    match how:
        case "altered":
            tensors[name].view(-1)[0] += 1
        case "missing":
            del tensors[name]
        case "added":
            tensors[name] = torch.zeros(3)
        case "cast":
            tensors[name] = tensors[name].bfloat16()
        case "cut":
            tensors[name] = tensors[name][:1].clone()
    torch.save(found, path)
    with pytest.raises((ModelError, PrecisionError), match=name):
        parts.load_weights(place, build(2), ALONE)
