"""Stored weights without a place in the model: transformers leaves them out, with only a line in a log.

If the model has the layer, but no such weight in it, the architecture is the wrong one: training would not start from
the stored model. Other unused weights are only reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from honed.inputs import modality
from honed.system import quote
from honed.system.error import ModelError

#: Buffers that older versions stored, which every load makes anew, and heads that predict several tokens at once (MTP),
#: which no model of transformers has.
_HARMLESS = re.compile(
    r"rotary|inv_freq|position_ids$|masked_bias$|attn\.bias$|attention\.bias$|(^|\.)(mtp|nextn)\w*\."
)
_LAYER = re.compile(r".*?\.\d+\.")
#: Weights that a message names, at most.
_MAX_NAMED = 5


def check(path: Path, unplaced: Iterable[str], wanted: Iterable[str]) -> str:
    """Return a warning about stored weights that are left out; empty if there are none, or only harmless ones.

    `wanted` are the model's own names. Raises ModelError for weights of a layer that the model has.
    """
    names = sorted(name for name in unplaced if not _HARMLESS.search(name))
    layers = {match[0] for name in wanted if (match := _LAYER.match(name))}
    foreign = [name for name in names if _is_of_another_architecture(name, layers)]
    if foreign:
        raise ModelError(
            f"{path}: stored weights that do not exist in its layers: {quote.first(foreign, _MAX_NAMED)}",
            hint="model_type, in config.json or the job file, may belong to another architecture; or the key of "
            "config.json that creates these weights is wrong or missing",
        )
    named = quote.first(names, _MAX_NAMED)
    return f"{path}: {len(names)} stored weights do not exist in the model and are ignored: {named}" if names else ""


def _is_of_another_architecture(name: str, layers: set[str]) -> bool:
    layer = _LAYER.match(name)
    return (
        layer is not None
        and layer[0] in layers
        and name.endswith((".weight", ".bias"))
        and modality.part(name) == "language"
    )
