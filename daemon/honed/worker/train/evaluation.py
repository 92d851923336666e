"""Evaluations in batches of rows of similar length, whose metrics do not depend on the batches.

transformers and TRL average the means of the batches, in which a token counts more the fewer there are in its batch.
Batches by length would change that average; so honed's is the mean over all tokens that the model is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from honed.text.maskcheck import IGNORED
from honed.worker.parallel import ALONE, Ranks
from honed.worker.rows.data import Rows


def by_length(rows: Rows, args: Any) -> Any:
    """Return the data set of these rows with the longest first: padding is least, and memory runs out at once if ever.

    Rows that are packed or flattened have no padding: they stay as they are.
    """
    is_packed = args.packing if args.eval_packing is None else args.eval_packing
    if is_packed or args.padding_free:
        return rows.dataset
    return rows.dataset.select(np.argsort(-rows.lengths, kind="stable"))


class TokenMeans:
    """The losses of an evaluation's batches, and the number of tokens in each."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._losses: list[Any] = []
        self._counts: list[Any] = []

    def begin(self) -> None:
        self._losses, self._counts = [], []

    @property
    def num_batches(self) -> int:
        return len(self._counts)

    def count(self, labels: Any) -> None:
        """Note a batch before its loss is computed."""
        self._counts.append((labels[..., 1:] != IGNORED).sum())

    def add(self, loss: Any) -> None:
        """Note the loss of the batch that was counted last."""
        self._losses.append(loss)

    def weigh(self, metrics: dict[str, float], name: str, means: dict[str, list[float]]) -> None:
        """Replace the loss, under its name in `metrics`, and each list of the batches' `means` by means over tokens."""
        has_losses = None not in self._losses
        own = [int(count) for count in self._counts], [float(loss) if has_losses else None for loss in self._losses]
        each = self._ranks.gather(own)
        # By place, rank 0's batch first: TRL's means are of the batches of all ranks at one place.
        every = [
            (count, loss)
            for place in zip(*(zip(*both, strict=True) for both in each), strict=True)
            for count, loss in place
        ]
        counts = [sum(batch) for batch in zip(*(counts for counts, _ in each), strict=True)]
        total = sum(counts)
        if not total or not has_losses:
            return
        shares = [count / total for count in counts]

        def mean(values: list[Any]) -> float:
            # A batch without a token has no mean: 0 / 0.
            return sum(float(value) * share for value, share in zip(values, shares, strict=True) if share)

        if name in metrics:
            metrics[name] = sum(loss * (count / total) for count, loss in every if count)
        for key, values in means.items():
            if len(values) == len(shares):
                means[key] = [mean(values)]
