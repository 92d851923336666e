"""Prefix language models: they see a prompt as a whole, and each token of an answer sees only those before it.

The tokens of the two parts are told apart by `token_type_ids`. The processor knows no answer in the row, and would make
all of it the prefix, in which each token sees the one that it is trained to predict.
"""

from __future__ import annotations

from typing import Any

from honed.text.maskcheck import IGNORED

#: Families whose `token_type_ids` are 0 for the prefix and 1 for what follows.
FAMILIES = frozenset({"paligemma"})


def is_prefix(model: Any) -> bool:
    return getattr(model.config, "model_type", None) in FAMILIES


def token_types(labels: Any) -> Any:
    """Return the `token_type_ids` of one row: the prefix ends where the first trained token begins."""
    return (labels != IGNORED).cummax(dim=-1).values.long()
