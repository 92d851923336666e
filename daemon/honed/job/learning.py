"""Detection of runs that learned nothing, from their losses.

Few steps prove nothing, and a noisy loss proves little, so a remark is made only if the evidence is clear:

    evaluations      the same rows before and after: if the loss fell, the run has learned, whatever the steps show
    first steps      far above the last: everything was learned at the very beginning
    epochs           mean loss of the first and of the last whole epoch: the same rows in another order
    under two epochs the first fifth of the steps against the last: differences within their noise are not reported
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: The fewest steps of a run that is judged.
MIN_STEPS = 20
#: Share of the first loss by which it must fall to count as improved, or rise to count as worse.
LEFT, HIGHER = 0.01, 0.02
#: Nats per token: below this initial loss there was nothing to learn.
KNOWN = 0.1
#: Steps at the very beginning that show whether the model learned everything at once.
NUM_FIRST = 5
#: A difference within this many standard errors is noise.
NUM_ERRORS = 3


@dataclass(frozen=True)
class Told:
    """One reported loss."""

    step: int
    loss: float
    epoch: float


def remark(
    evaluations: Sequence[Told],
    eval_before: float | None = None,
    eval_after: float | None = None,
    *,
    is_ordered: bool = False,
) -> str:
    """Return a remark to show beside `succeeded`; empty if the run has learned or cannot be judged: if the rows have a
    fixed order (`is_ordered`), the last ones may be the hardest.
    """
    points = [item for item in evaluations if math.isfinite(item.loss)]
    if not points or points[-1].step < MIN_STEPS:
        return ""
    if eval_before is not None and eval_after is not None and eval_after < eval_before * (1 - LEFT):
        return ""
    first, last, words = _ends(points)
    if len(first) < 2 or len(last) < 2 or (is_ordered and words != _EPOCHS):
        return ""
    before, after = statistics.fmean(first), statistics.fmean(last)
    noise = 0.0
    if words != _EPOCHS:
        noise = NUM_ERRORS * math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    spread = NUM_ERRORS * statistics.stdev(last) / math.sqrt(NUM_FIRST)
    if statistics.fmean(point.loss for point in points[:NUM_FIRST]) - after > max(LEFT * before, spread):
        return ""  # it learned everything at the beginning
    figures = f"{before:.4g} in the first {words}, {after:.4g} in the last"
    if after > max(before, KNOWN) * (1 + HIGHER) + noise:
        return f"the loss ended higher than it began: {figures}"
    if before >= KNOWN and after + noise > before * (1 - LEFT) and noise < before * LEFT:
        return f"the loss did not fall: {figures}"
    return ""


_EPOCHS = "epoch"


def _ends(points: Sequence[Told]) -> tuple[list[float], list[float], str]:
    """Return the first and the last losses to compare, and their unit (epoch or steps)."""
    whole = math.floor(points[-1].epoch + 1e-6)
    if whole >= 2:
        first = [point.loss for point in points if point.epoch <= 1 + 1e-6]
        last = [point.loss for point in points if whole - 1 + 1e-6 < point.epoch <= whole + 1e-6]
        return first, last, _EPOCHS
    number = max(len(points) // 5, 2)
    losses = [point.loss for point in points]
    return losses[:number], losses[-number:], "steps"
