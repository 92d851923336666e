"""The names of metrics on predictions, as job files use them."""

from __future__ import annotations

import importlib.metadata
from difflib import get_close_matches

from honed.system.error import SpecError

#: Prefix of these metrics where metrics of all kinds are listed together.
PREFIX = "predictions/"


#: Prefix of the names of groups of rows with a tag.
TAG = "tag:"

GROUP = "honed.metrics"


#: honed's built-in metrics.
BUILT_IN = ("exact_match", "token_f1", "rouge_l", "valid_json", "field_match", "box_iou", "numeric_match")


def known() -> list[str]:
    """Return the metric names that a spec may use here, including the administrator's."""
    return sorted({*BUILT_IN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def parts(name: str) -> tuple[str, str]:
    """Return a metric's name without the group of rows that it is for, and the group; empty for all rows."""
    # An administrator's metric may have a slash in its name.
    metric = max((item for item in known() if name == item or name.startswith(f"{item}/")), key=len, default=None)
    metric = name.partition("/")[0] if metric is None else metric
    return metric, name[len(metric) + 1 :]


def check(name: str, key: str) -> None:
    """Raise SpecError if there is no such metric."""
    if name in (names := known()):
        return
    near = get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise SpecError(f"{key}: no metric {name!r}", hint=f"{meant}known metrics: {', '.join(names)}")


def chooser(metric_for_best_model: str | None) -> str | None:
    """Return the metric on predictions that selects the best checkpoint; None if another metric does."""
    name = (metric_for_best_model or "").removeprefix("eval_")
    return name.removeprefix(PREFIX).removesuffix("_parsable") if name.startswith(PREFIX) else None
