"""The number of positions of a model, which limits its rows if it looks positions up in a table.

Models with rotary positions (RoPE) have no such table: they accept longer rows, with worse results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from honed.inputs.basemodel import BaseModelInfo
from honed.spec.spec import JobSpec
from honed.system.error import DatasetError, SpecError

#: Families with a table of positions.
TABLED = frozenset(
    {"biogpt", "codegen", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt", "opt"}
)
_KEYS = ("n_positions", "max_position_embeddings", "max_seq_len")


def check(spec: JobSpec, model: BaseModelInfo, num_row_tokens: int | None) -> list[str]:
    """Return warnings about rows that may be longer than the model has positions.

    `num_row_tokens`: about the length of the longest inspected row, estimated from its bytes; the worker counts. Raises
    SpecError where packing certainly makes rows longer than the model's table of positions.
    """
    limit, cut_at = positions(model.config), spec.training.max_length
    if limit is None or (cut_at is not None and cut_at <= limit):
        return []
    # Wrapped packing fills max_length, however short the rows are.
    fills = spec.training.packing and spec.training.packing_strategy == "wrapped"
    longest = cut_at if fills else num_row_tokens
    if longest is None or longest <= limit:
        return []
    asked = f"training.max_length: {'null' if cut_at is None else cut_at}"
    is_tabled = model.model_type in TABLED
    if fills and is_tabled:
        raise SpecError(
            f"{asked}: {model.path} has {limit} positions, but packing_strategy: wrapped fills all {longest}",
            hint=f"write training.max_length: {limit}",
            fix={"training.max_length": limit},
        )
    longest = longest if cut_at is None else min(longest, cut_at)
    end = f"; a longer row ends the job: max_length: {limit} truncates it" if is_tabled else ""
    return [
        f"{asked}: rows have up to about {longest} tokens, but according to config.json the model has only {limit} "
        "positions" + end
    ]


def check_rows(spec: JobSpec, model_type: str, config: Mapping[str, Any], longest: int) -> None:
    """Raise DatasetError if the longest row, in counted tokens, exceeds the model's table of positions."""
    limit = positions(config)
    longest = min(longest, spec.training.max_length or longest)  # a packing that splits rows does so later
    if model_type in TABLED and limit is not None and longest > limit:
        raise DatasetError(
            f"the longest row has {longest} tokens, but the model has only {limit} positions",
            hint=f"write training.max_length: {limit} to truncate it",
            fix={"training.max_length": limit},
        )


def positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of the language model's positions, as config.json gives it."""
    inner = config.get("thinker_config") or config
    inner = inner.get("text_config") or inner if isinstance(inner, dict) else config
    limits = [inner.get(key) for key in _KEYS] if isinstance(inner, dict) else []
    return next((item for item in limits if type(item) is int and item > 0), None)
