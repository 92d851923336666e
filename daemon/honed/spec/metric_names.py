"""The names of metrics on predictions, as job files use them."""

from __future__ import annotations

import importlib.metadata
from difflib import get_close_matches

from honed.system.error import SpecError

#: What a figure's name begins with where figures of every kind stand together.
PREFIX = "predictions/"


GROUP = "honed.metrics"


#: The metrics that honed has.
BUILT_IN = ("exact_match", "token_f1", "rouge_l", "valid_json", "field_match", "box_iou", "numeric_match")


def known() -> list[str]:
    """The names that a spec may use here, the administrator's among them."""
    return sorted({*BUILT_IN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def check(name: str, key: str) -> None:
    """Raises SpecError for a metric that there is not."""
    if name in (names := known()):
        return
    near = get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise SpecError(f"{key}: no metric {name!r}", hint=f"{meant}known here: {', '.join(names)}")


def chooser(metric_for_best_model: str | None) -> str | None:
    """The metric on predictions that tells the best checkpoint, where it is one."""
    name = (metric_for_best_model or "").removeprefix("eval_")
    return name.removeprefix(PREFIX).removesuffix("_parsable") if name.startswith(PREFIX) else None
