"""Which names `lora.exclude_modules` and `lora.layers_to_transform` leave out, for the plan and the worker alike.

peft applies both to modules alone. A mixture's experts and router are parameters, and have more than one name:

    model.layers.0.mlp.experts.gate_up_proj      as transformers 5 keeps them, all experts in one
    model.layers.0.mlp.experts.3.gate_proj       as checkpoints store them, and as older tools name them
    model.layers.0.block_sparse_moe.experts.3.w1 Mixtral's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from honed.spec.spec import LoraSpec

#: The layer's number in a name, the first one, as peft reads it.
LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
#: Where checkpoints of Mixtral and others store what transformers keeps under `mlp`.
STORED_BLOCK = ".block_sparse_moe."


def matches(module: str, names: str | list[str]) -> bool:
    """Match as peft does: a regular expression for the whole name, or the ends of names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_in_layers(lora: LoraSpec, name: str) -> bool:
    if not lora.layers_to_transform:
        return True
    match = LAYER.match(f".{name}")  # a checkpoint of the bare model begins with the layers
    return match is not None and int(match[1]) in lora.layers_to_transform


def is_excluded(module: str, exclude: str | list[str] | None) -> bool:
    return exclude is not None and any(matches(spelling, exclude) for spelling in spellings(module))


Share = Literal["all", "some", "none"]


def wanted(name: str, lora: LoraSpec, expert_names: Mapping[str, str], num_experts: int) -> Share:
    """Tell how much of a parameter that peft adapts is in `target_modules`: peft forgets where a regular expression
    matched."""
    if not isinstance(lora.target_modules, str) or lora.target_modules == "all-linear":
        return "all"
    return covered(name, lora.target_modules, expert_names, num_experts)


def covered(name: str, exclude: str | list[str] | None, expert_names: Mapping[str, str], num_experts: int) -> Share:
    """Tell how much of a parameter `exclude` covers: experts that are kept in one may be named one by one.

    `name`: a parameter's, such as `….mlp.experts.gate_up_proj` or `….mlp.gate.weight`. `expert_names`: of parameter.py.
    """
    if not exclude:
        return "none"
    if "w1" in expert_names:
        name = name.replace(".mlp.", STORED_BLOCK)
    container, _, leaf = name.rpartition(".")
    if is_excluded(name, exclude) or is_excluded(container, exclude):
        return "all"
    if leaf == "weight":
        return "none"
    olds = [old for old, new in expert_names.items() if new == leaf] or [leaf]
    singles = [
        any(is_excluded(f"{container}.{item}", exclude) for item in (old, f"{number}.{old}", str(number)))
        for old in olds
        for number in range(num_experts)
    ]
    return "all" if all(singles) else "some" if any(singles) else "none"


def spellings(name: str) -> tuple[str, ...]:
    """Return a name as stored, and as transformers loads it."""
    return (name, name.replace(STORED_BLOCK, ".mlp.")) if STORED_BLOCK in name else (name,)
