"""A checkpoint of a divided model: every rank writes and reads its own part, and nothing is gathered.

    checkpoint-N/part-<rank>-of-<world>.pt    parts of the trained weights, with digests of them as they were in memory,
                                              and of the optimizer's states

The parts of one tensor, in the order of the ranks, are the tensor. So a run with another number of ranks reads all
files and takes its own part of every tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from honed.system import durable
from honed.system.error import ModelError, PrecisionError
from honed.worker.model import division, published, tensorfile
from honed.worker.parallel import Ranks
from honed.worker.train import weights

_NAME = re.compile(r"part-(\d+)-of-(\d+)\.pt")


def write(directory: Path, model: Any, optimizer: Any, ranks: Ranks) -> None:
    """Write this rank's part of a checkpoint, and sync it."""
    division.reshard(model)
    state = optimizer.state_dict()
    part = {
        "weights": {name: division.part_of(weight.detach()).cpu() for name, weight in _kept(model)},
        "buffers": {name: buffer.cpu() for name, buffer in published.buffers(model)},
        "groups": state["param_groups"],
        "states": {
            number: {
                name: division.part_of(item.detach()).cpu() if torch.is_tensor(item) else item
                for name, item in one.items()
            }
            for number, one in state["state"].items()
        },
    }
    part["digests"] = {kind: tensorfile.digests(part[kind]) for kind in ("weights", "buffers")}
    path = directory / f"part-{ranks.rank}-of-{ranks.world}.pt"
    torch.save(part, path)
    durable.sync_file(path)


def load_weights(directory: Path, model: Any, ranks: Ranks) -> None:
    """Load the trained weights of a checkpoint. Raises PrecisionError for one of another dtype, and ModelError, naming
    the tensors, for one that is not what was written, or that is of another model."""
    division.reshard(model)
    pieces = _read(directory, ranks)
    kept, buffers = dict(_kept(model)), dict(published.buffers(model))
    _check(directory, pieces, {"weights": set(kept), "buffers": set(buffers)})
    for name, weight in kept.items():
        _put(directory, name, weight, _taken([piece["weights"][name] for piece in pieces], weight, ranks))
    for name, buffer in buffers.items():
        _put(directory, name, buffer, pieces[0]["buffers"][name])


def _check(directory: Path, pieces: list[dict[str, Any]], held: dict[str, set[str]]) -> None:
    """Compare the parts in files with what the ranks had when they were written, and with the names of the model."""
    hint = weights.hint(directory)
    for piece in pieces:
        for kind, names in held.items():
            tensorfile.compare_names(directory.name, set(piece[kind]), names, hint=hint)
            tensorfile.compare(directory.name, piece["digests"][kind], piece[kind], hint=hint)


def _put(directory: Path, name: str, tensor: Any, saved: Any) -> None:
    part = division.part_of(tensor.detach())
    if saved.dtype != part.dtype:
        raise PrecisionError(
            f"{directory.name} has {name} in {saved.dtype}, but it is trained in {part.dtype}",
            hint="submit the job again: it begins from its base model",
        )
    if saved.shape == part.shape:
        part.copy_(saved)
    if saved.shape != part.shape or not tensorfile.is_same(division.part_of(tensor.detach()), saved):
        raise ModelError(f"{directory.name}: after loading, {name} differs", hint=weights.hint(directory))


def load_optimizer(directory: Path, optimizer: Any, ranks: Ranks) -> None:
    """Load the optimizer's states of a checkpoint, once the weights are loaded."""
    pieces = _read(directory, ranks)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbers = [number for group in pieces[0]["groups"] for number in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for number, weight in zip(numbers, weights, strict=True):
        if number not in pieces[0]["states"]:
            continue
        states[number] = {
            name: _state([piece["states"][number][name] for piece in pieces], weight, ranks)
            for name in pieces[0]["states"][number]
        }
    optimizer.load_state_dict({"state": states, "param_groups": pieces[0]["groups"]})


def _state(parts: list[Any], weight: Any, ranks: Ranks) -> Any:
    """Return one state of one weight: as divided as the weight if it has its shape."""
    first = parts[0]
    if not torch.is_tensor(first) or first.dim() != weight.dim():
        return first
    return division.as_whole(weight, _taken(parts, weight, ranks))


def _taken(parts: list[Any], weight: Any, ranks: Ranks) -> Any:
    """Return this rank's part of a tensor from its parts in a checkpoint: one, if there are as many as ranks."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat(parts)
    size = math.ceil(weight.shape[0] / ranks.world)
    return whole[ranks.rank * size : (ranks.rank + 1) * size]


def _read(directory: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """Return this rank's own part, or all parts in order where there is another number of them."""
    names = sorted((int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))
    paths = [path for _, path in names]
    if len(paths) == ranks.world:
        paths = [paths[ranks.rank]]
    return [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths]


def _kept(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is trained: the rest is the base model's."""
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
