"""Weights that layers share, and adapters that make them differ: a merged checkpoint must store them apart.

All classes of transformers that honed trains can do that, by `tie_word_embeddings: false`. Code that comes with a model
may not, which is found before anything is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from honed.spec import export
from honed.system import quote
from honed.system.error import ModelError
from honed.worker.assignment import Assignment
from honed.worker.model.config import skeleton


def check(model: Any, assignment: Assignment) -> None:
    """Raise ModelError if an export asks for a checkpoint that the model's class cannot load; `model` is peft's."""
    keys = [item.key for item in export.asked(assignment.spec) if item.is_base_model]
    if not keys:
        return
    base = model.get_base_model()
    if not (differing := set(_differing(base))):
        return
    config = copy.deepcopy(base.config)
    _untie(config)
    empty = skeleton(config, "float32", trust_remote_code=assignment.spec.trust_remote_code)
    if kept := sorted(differing & set(getattr(empty, "all_tied_weights_keys", None) or {})):
        raise ModelError(
            f"{keys[0]}: {type(base).__name__} always shares {quote.first(kept, 3)} with another layer, and the "
            "adapter makes the two differ",
            hint=f"leave both layers out of target_modules and modules_to_save, or remove {' and '.join(keys)}",
            fix=dict.fromkeys(keys),
        )


def _differing(base: Any) -> Iterator[str]:
    """Yield the targets of ties of whose two ends an adapter changes one, or each by its own weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper

    wrapped = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }
    for ends in (getattr(base, "all_tied_weights_keys", None) or {}).items():
        modules = [[module for name, module in wrapped.items() if end.startswith(f"{name}.")] for end in ends]
        share_tokens = all(item and isinstance(item[0], TrainableTokensWrapper) for item in modules)
        if any(modules) and not share_tokens:
            yield ends[0]


def _untie(config: Any) -> None:
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
    for var in vars(config).values():
        if hasattr(var, "model_type"):
            _untie(var)
