"""The progress of a run as text: for the log, and for STATUS= of honed and of a job's unit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any


def progress_text(progress: Mapping[str, Any]) -> str:
    """Return `step 120/500, loss 1.234, ETA 5 min`."""
    parts = [f"step {progress.get('step')}/{progress.get('num_steps')}"]
    if isinstance(loss := progress.get("loss"), int | float):
        parts.append(f"loss {figure(loss)}")
    if isinstance(eta_sec := progress.get("eta_sec"), int | float):
        parts.append(f"ETA {duration(eta_sec)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Format seconds for people: 40 s, 5 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def gib(num_bytes: float) -> str:
    """Format bytes for people: 24.0 GiB, 12 MiB; rounded up to whole MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{math.ceil(num_bytes / 2**20)} MiB"


def size(num_bytes: float) -> str:
    """Format bytes for people: 1.2 GiB, 900 MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def together(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Return sentences about devices, one for all that have the same fact: `GPU 0, GPU 1 are drained: a new fan`."""
    labels: dict[str, list[str]] = {}
    for label, fact in facts:
        labels.setdefault(fact, []).append(label)
    return [f"{', '.join(those)} {'is' if len(those) == 1 else 'are'} {fact}" for fact, those in labels.items()]


def figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def short(place: str | None) -> str:
    """Return the last part of a path; a hub id stays whole."""
    return PurePath(place).name if place and place.startswith("/") else place or ""
