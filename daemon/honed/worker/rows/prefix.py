"""Prefix language models: they see a prompt as a whole, and every token of an answer sees only those before it.

`token_type_ids` distinguish the two parts. The processor knows no answer in the row, and would make all of it the
prefix, in which every token sees the one that it is trained to predict. Without these numbers transformers does the
same under sdpa, unless the batch has padding.
"""

from __future__ import annotations

from typing import Any

from honed.plan.prefix import FAMILIES
from honed.text.maskcheck import IGNORED


def trained(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with labels as the model is to see it: the prefix ends where the first trained token begins."""
    if not _is_prefix(model) or "labels" not in batch:
        return batch
    return batch | {"token_type_ids": (batch["labels"] != IGNORED).long().cummax(dim=-1).values}


def asked(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of prompts as the model is to see it."""
    if not _is_prefix(model):
        return batch
    return batch | {"token_type_ids": batch["input_ids"].new_zeros(batch["input_ids"].shape)}


def _is_prefix(model: Any) -> bool:
    return getattr(model.config, "model_type", None) in FAMILIES
