"""Check of a written checkpoint against the model that its own config makes: what a user's program would load."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.system import quote
from honed.system.error import ModelError
from honed.worker.model import adapter, names

HINT = "this is a bug: please report it; the adapter is kept where a training made it"


def check(directory: Path, empty: Any, kept: Iterable[str]) -> None:
    """Raise ModelError unless the files hold exactly what a model loads; `empty`, on meta, is made from their config.

    `kept` are names that the model's class ignores, and that the base has, too.
    """
    tensors = {
        tensor.name: tensor for tensor in basemodel.inspect(directory, model_type=empty.config.model_type).tensors
    }
    read = names.read(empty, tensors)
    shapes = {parameter: tensors[name].shape for name, parameter in read.whole.items()}
    for group in read.built({name: tensor.shape for name, tensor in tensors.items()}, empty).values():
        shapes |= group
    state = empty.state_dict()
    missing = lacking(empty, set(shapes))
    unplaced = {name for name in tensors if read.parameter(name) is None} - set(kept)
    surplus = sorted(name for name in unplaced if not adapter.is_passed_over(empty, name))
    odd = [name for name, shape in shapes.items() if name in state and shape != tuple(state[name].shape)]
    for wrong, what in (
        (missing, "lacks tensors that its own config requires"),
        (surplus, "has tensors that its own config has no place for"),
        (odd, "has tensors of another shape than its own config requires"),
    ):
        if wrong:
            raise ModelError(f"the written model {what}: {quote.first(wrong, 3)}", hint=HINT)


def lacking(empty: Any, loaded: set[str]) -> list[str]:
    """Return the names that a model needs beside those that are loaded: not tied to one of them, nor optional."""
    ties: dict[str, str] = dict(getattr(empty, "all_tied_weights_keys", None) or {})
    groups: dict[str, set[str]] = {}
    for target, source in ties.items():
        groups.setdefault(source, {source}).add(target)
    tied = {name for group in groups.values() if group & loaded for name in group}
    optional = getattr(empty, "_keys_to_ignore_on_load_missing", None) or ()
    return sorted(
        name
        for name in set(empty.state_dict()) - loaded - tied
        if not any(re.search(pattern, name) for pattern in optional)
    )
