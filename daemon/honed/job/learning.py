"""Judging a run's learning by its losses: whether they left where they began.

Few steps say nothing, and a loss that jumps from batch to batch says little. So a word is said only where it is sure:

    evaluations   the same rows before and after: a loss that fell says that the run has learned, whatever the steps say
    first steps   far above the last: what there was to learn was learned at once
    epochs        the mean over the first with that over the last whole one: the same rows, in another order
    less than two the first fifth of the steps with the last: their noise is known, and what lies within it is not told
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Steps from which on something is said.
MIN_STEPS = 20
#: Share of the first loss by which it has to fall to have left, and to rise to have ended higher.
LEFT, HIGHER = 0.01, 0.02
#: Nats a token: where it began below, there was nothing to learn.
KNOWN = 0.1
#: Steps at the very beginning, by which what is learned at once is seen.
NUM_FIRST = 5
#: Standard errors of a difference that are taken for noise.
NUM_ERRORS = 3


@dataclass(frozen=True)
class Told:
    """One loss, as it was told."""

    step: int
    loss: float
    epoch: float


def remark(
    told: Sequence[Told],
    eval_before: float | None = None,
    eval_after: float | None = None,
    *,
    is_ordered: bool = False,
) -> str:
    """What is to be said beside `succeeded`; empty where the run has learned, or cannot be judged: of rows in an order
    of their own, the last may well be the hardest.
    """
    points = [each for each in told if math.isfinite(each.loss)]
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
    if statistics.fmean(each.loss for each in points[:NUM_FIRST]) - after > max(LEFT * before, spread):
        return ""  # what there was to learn, it learned at once
    figures = f"{before:.4g} in the first {words}, {after:.4g} in the last"
    if after > max(before, KNOWN) * (1 + HIGHER) + noise:
        return f"its loss ended higher than it began: {figures}"
    if before >= KNOWN and after + noise > before * (1 - LEFT) and noise < before * LEFT:
        return f"its loss never left where it began: {figures}"
    return ""


_EPOCHS = "epoch"


def _ends(points: Sequence[Told]) -> tuple[list[float], list[float], str]:
    """The losses that are compared, and what they are of."""
    whole = math.floor(points[-1].epoch + 1e-6)
    if whole >= 2:
        first = [each.loss for each in points if each.epoch <= 1 + 1e-6]
        last = [each.loss for each in points if whole - 1 + 1e-6 < each.epoch <= whole + 1e-6]
        return first, last, _EPOCHS
    number = max(len(points) // 5, 2)
    losses = [each.loss for each in points]
    return losses[:number], losses[-number:], "steps"
