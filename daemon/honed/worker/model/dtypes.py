"""The dtype of every tensor in an output: one rule for merges, for `save_merged`, and for full fine-tuning.

A job asks for one dtype. Every weight is stored in it, but for those that need a wider one:

    family      what the model's class keeps in float32, whatever dtype is asked for: a router's bias, mamba's A_log
    base        what the base stores in a wider dtype than most of its numbers: float32 norms beside bfloat16 weights
    buffer      what the model has beside its weights is never stored in a narrower dtype than in the base

Tensors that the model's class does not load are copied from the base as they are; so are integers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.inputs.basemodel import BITS, FLOAT_DTYPES, QUANTIZATION_STATE, Tensor
from honed.system import quote
from honed.worker.model import names as stored_names
from honed.worker.model.names import Names

#: Tensors that a message names.
MAX_NAMED = 3


@dataclass(frozen=True)
class Rule:
    """The dtype of every parameter and buffer of one model in an output, by its name in the model."""

    wanted: str  #: the dtype that was asked for
    family: frozenset[str]  #: kept in float32 by the model's class
    base: Mapping[str, str]  #: the dtype in the base, of what must not be narrowed

    def of(self, name: str) -> str:
        """Return the dtype in which a parameter or buffer is stored."""
        candidates = [self.wanted, self.base.get(name, self.wanted), "float32" if name in self.family else self.wanted]
        return max(candidates, key=BITS.__getitem__)

    def of_stored(self, tensor: Tensor, names: Names, *, is_quantized: bool = False) -> str:
        """Return the dtype in which a tensor of the base's files is stored again."""
        name = names.parameter(tensor.name)
        is_copied = name is None or (tensor.dtype not in FLOAT_DTYPES and not is_quantized)
        return tensor.dtype if is_copied else self.of(str(name))


def rule(empty: Any, tensors: Iterable[Tensor], names: Names, wanted: str) -> Rule:
    """Return the rule for a model; `empty` is of its class, built for the wanted dtype, and may be on meta.

    `tensors` are those of the base's files.
    """
    stored = {tensor.name: tensor.dtype for tensor in tensors if tensor.dtype in FLOAT_DTYPES}
    return Rule(wanted, _of_family(empty, wanted), _of_base(empty, names, stored, _bulk(tensors)))


def for_saving(model: Any, base_dir: Path, wanted: str, *, loaded: str) -> Rule:
    """Return the rule for a model in memory, as it is loaded from a base's files in the dtype `loaded`."""
    tensors = [
        tensor
        for tensor in basemodel.inspect(base_dir, model_type=model.config.model_type, allow_pickle=True).tensors
        if not QUANTIZATION_STATE.search(tensor.name)
    ]
    # What the class keeps wider shows in a model of the wanted dtype alone; float32 has nothing wider.
    empty = model if wanted in (loaded, "float32") else _empty(model, wanted)
    return rule(empty, tensors, stored_names.read(empty, [tensor.name for tensor in tensors]), wanted)


def _empty(model: Any, dtype: str) -> Any:
    """Build a model's like in another dtype, on meta."""
    import torch

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)._from_config(config, dtype=getattr(torch, dtype))


def summary(dtypes: Mapping[str, str], wanted: str) -> str:
    """Say in which dtypes tensors are stored, given those of floating point by name."""
    others = {name: dtype for name, dtype in dtypes.items() if dtype != wanted}
    if not others:
        return f"all in {wanted}"
    kinds = sorted(set(others.values()))
    named = [quote.first([name for name, other in others.items() if other == kind], MAX_NAMED) for kind in kinds]
    kept = "; ".join(f"in {kind} {text}" for kind, text in zip(kinds, named, strict=True))
    return f"in {wanted}, but {kept}, as the model's class or the base keeps them"


def _of_family(empty: Any, wanted: str) -> frozenset[str]:
    """Return what transformers loads in float32 when the wanted dtype is asked for, by its own two rules."""
    import torch
    from transformers.core_model_loading import build_glob_alternation

    if wanted not in ("float16", "bfloat16"):
        return frozenset()
    state = empty.state_dict()
    patterns = list(empty._get_dtype_plan(getattr(torch, wanted)))
    kept = build_glob_alternation(patterns)[0] if patterns else None
    return frozenset(
        name
        for name, item in state.items()
        if item.is_floating_point() and (item.dtype == torch.float32 or (kept is not None and kept.search(name)))
    )


def _of_base(empty: Any, names: Names, stored: Mapping[str, str], bulk: str | None) -> dict[str, str]:
    weights = {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    dtypes: dict[str, str] = {}
    for stored_name, dtype in stored.items():
        name = names.parameter(stored_name)
        if name is None or (name in weights and (bulk is None or BITS[dtype] <= BITS[bulk])):
            continue
        dtypes[name] = max(dtype, dtypes.get(name, dtype), key=BITS.__getitem__)
    return dtypes


def _bulk(tensors: Iterable[Tensor]) -> str | None:
    """Return the dtype of most numbers of floating point that are not quantized; None if there are none."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOAT_DTYPES:
            counts[tensor.dtype] += tensor.num_elements
    return counts.most_common(1)[0][0] if counts else None
