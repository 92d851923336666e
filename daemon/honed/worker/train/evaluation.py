"""Evaluations in batches of rows of similar length, whose metrics do not depend on the batches.

transformers and TRL average the means of the batches, in which a token counts more the fewer there are in its batch.
Batches by length would change that average; so honed's is the mean over all tokens that the model is asked for. Where
rows have groups (data sets, tags), those of one kind share a batch, and the same pass gives the loss of every group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from honed.text.maskcheck import IGNORED
from honed.worker.parallel import ALONE, Ranks, real_rows
from honed.worker.rows.data import Data, Rows
from honed.worker.rows.group import Groups


@contextlib.contextmanager
def untrained(model: Any) -> Iterator[None]:
    """Let a trainer be built around a quantized model without an adapter, which transformers refuses to train."""
    is_refused = bool(getattr(model, "is_quantized", False)) and not hasattr(model, "peft_config")
    had = getattr(model, "_hf_peft_config_loaded", False)
    if is_refused:
        model._hf_peft_config_loaded = True
    try:
        yield
    finally:
        if is_refused:
            model._hf_peft_config_loaded = had


def by_length(rows: Rows, args: Any) -> Any:
    """Return the data set of these rows with the longest first: padding is least, and memory runs out at once if ever.

    Rows that are packed or flattened have no padding: they stay as they are.
    """
    order = _longest_first(rows, args)
    return rows.dataset if order is None else rows.dataset.select(order)


def _longest_first(rows: Rows, args: Any) -> npt.NDArray[np.int64] | None:
    is_packed = args.packing if args.eval_packing is None else args.eval_packing
    return None if is_packed or args.padding_free else np.argsort(-rows.lengths, kind="stable")


def kinds_by_length(data: Data, args: Any) -> Kinds | None:
    """Return the kinds of the rows in the order of `by_length`; None where they have no groups, or no such order."""
    held_out, groups = data.held_out, data.groups
    # TRL shuffles held-out rows, too.
    if held_out is None or groups is None or not groups.names or args.shuffle_dataset:
        return None
    order = _longest_first(held_out, args)
    return None if order is None else Kinds(groups, groups.codes[order])


@dataclass(frozen=True)
class Kinds:
    """Rows of an evaluation by their kind: a batch has rows of one, so that its loss counts for the kind's groups."""

    groups: Groups
    codes: npt.NDArray[np.int64]  #: the kind of every row, in the order of the evaluation

    def batches(self, size: int) -> list[list[int]]:
        """Return the rows of every batch, the longest first."""
        made = []
        for code in dict.fromkeys(self.codes.tolist()):
            indices = np.flatnonzero(self.codes == code).tolist()
            made += [indices[start : start + size] for start in range(0, len(indices), size)]
        return made


class Timely:
    """The batches of an evaluation, up to a moment: those that come after it are left out."""

    def __init__(self, loader: Any, is_late: Callable[[], bool]) -> None:
        self._loader, self._is_late = loader, is_late
        self.num_batches = 0  #: that were measured

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._is_late():
                return
            self.num_batches += 1
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def is_cut(self) -> bool:
        """True if batches were left out."""
        return self.num_batches < len(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class TokenMeans:
    """The losses of an evaluation's batches, and the number of tokens in each."""

    def __init__(self, kinds: Kinds | None = None, ranks: Ranks = ALONE) -> None:
        self._kinds = kinds
        self._ranks = ranks
        self._losses: list[Any] = []
        self._counts: list[Any] = []
        self._batches: list[list[int]] = []  #: of all ranks
        self._every: list[tuple[int, float]] = []  #: tokens and loss of each of them, after `weigh`

    def batches(self, size: int) -> list[list[int]] | None:
        """Return the rows of every batch of this rank; None where any batches of that size will do.

        The batches are those of one process, dealt to the ranks in turn; the first fills what is missing.
        """
        if self._kinds is None:
            return None
        self._batches = self._kinds.batches(size)
        missing = -len(self._batches) % self._ranks.world
        return [*self._batches, *self._batches[:1] * missing][self._ranks.rank :: self._ranks.world]

    def num_real(self, num_rows: int, size: int) -> int:
        """Return how many rows of this rank's next batch are not repeated ones, which come last in it."""
        if self._kinds is None:
            return real_rows(num_rows, size, self.num_batches, self._ranks)
        index = self.num_batches * self._ranks.world + self._ranks.rank
        return len(self._batches[index]) if index < len(self._batches) else 0

    def num_measured(self, size: int) -> int:
        """Return the number of rows that all ranks have measured, of an evaluation that ended before its last batch."""
        num = self.num_batches * self._ranks.world
        return sum(map(len, self._batches[:num])) if self._kinds is not None else num * size

    def of_groups(self, name: str) -> dict[str, float]:
        """Return the loss of every group of rows, under `name/group`, that was measured wholly; after `weigh`."""
        if self._kinds is None:
            return {}
        counted = [
            (self._kinds.groups.kinds[int(self._kinds.codes[batch[0]])], loss, count)
            for batch, (count, loss) in zip(self._batches, self._every, strict=False)  # as many as were measured
        ]
        left = {
            group
            for batch in self._batches[len(self._every) :]
            for group in self._kinds.groups.kinds[int(self._kinds.codes[batch[0]])]
        }
        losses = {}
        for group in self._kinds.groups.names:
            if group in left:
                continue
            ours = [(loss, count) for groups, loss, count in counted if group in groups and count]
            if total := sum(count for _, count in ours):
                losses[f"{name}/{group}"] = sum(loss * (count / total) for loss, count in ours)
        return losses

    def begin(self) -> None:
        self._losses, self._counts, self._every = [], [], []

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
        """Replace the loss, under its name in `metrics`, and the lists of the batches' `means` by means over tokens."""
        has_losses = None not in self._losses
        own = [int(count) for count in self._counts], [float(loss) if has_losses else None for loss in self._losses]
        gathered = self._ranks.gather(own)
        # By place, rank 0's batch first: TRL's means are of the batches of all ranks at one place.
        every = [
            (count, loss)
            for batches in zip(*(zip(*both, strict=True) for both in gathered), strict=True)
            for count, loss in batches
        ]
        counts = [sum(batch) for batch in zip(*(counts for counts, _ in gathered), strict=True)]
        total = sum(counts)
        if not total or not has_losses:
            return
        self._every = every
        shares = [count / total for count in counts]
        if name in metrics:
            metrics[name] = sum(loss * (count / total) for count, loss in every if count)
        for key, values in means.items():
            if len(values) == len(shares):
                # A batch without a token has no mean: 0 / 0.
                means[key] = [sum(float(value) * share for value, share in zip(values, shares, strict=True) if share)]
