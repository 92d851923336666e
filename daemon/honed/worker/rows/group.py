"""Groups of held-out rows whose metrics are also computed apart: those of every data set, and those with every tag.

The metrics of a group have its name behind a slash: `eval_loss/general`, `exact_match/tag:arithmetic`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from honed.inputs.row import Example
from honed.spec.metric_names import TAG
from honed.spec.spec import DatasetSpec
from honed.worker.rows.table import Table

#: Tags with metrics of their own: the most frequent ones.
MAX_TAGS = 32
#: Kinds of rows, each with its data set and its tags: a batch of an evaluation has rows of one kind.
MAX_KINDS = 100


@dataclass(frozen=True)
class Groups:
    """The groups of some rows, and the kind of every row; rows of one kind are in the same groups."""

    datasets: tuple[str, ...]  #: names, by the number of the data set; empty where there is one
    tags: frozenset[str]  #: those with metrics of their own
    kinds: tuple[frozenset[str], ...]  #: the groups of every kind
    codes: npt.NDArray[np.int64]  #: the kind of every row
    numbers: npt.NDArray[np.int32]  #: the data set of every row
    remark: str = ""  #: a message about tags that have no metrics

    @property
    def names(self) -> list[str]:
        """Names of all groups: data sets in their order, then tags."""
        groups = frozenset[str]().union(*self.kinds)
        ours = dict.fromkeys(self.datasets)
        return [*(name for name in ours if name in groups), *sorted(groups - ours.keys())]

    def of(self, example: Example) -> frozenset[str]:
        """Return the groups of an example."""
        return frozenset(_groups(example.dataset_index, self.tags.intersection(example.tags), self.datasets))

    def indices(self, name: str) -> list[int]:
        """Return the rows of a group."""
        kinds = [code for code, groups in enumerate(self.kinds) if name in groups]
        return [int(index) for index in np.flatnonzero(np.isin(self.codes, kinds))]


def of(table: Table, indices: npt.NDArray[np.int64], datasets: Sequence[DatasetSpec]) -> Groups:
    """Return the groups of the rows of a table at these indices; `datasets` are those that the table was read from."""
    numbers, hashes = table.column("dataset")[indices], table.column("tags")[indices]
    pairs = np.empty(len(indices), [("dataset", numbers.dtype), ("tags", hashes.dtype)])
    pairs["dataset"], pairs["tags"] = numbers, hashes
    distinct, firsts, codes, counts = np.unique(pairs, return_index=True, return_inverse=True, return_counts=True)
    tagged = [
        table.example(int(indices[first])).tags if pair["tags"] else ()
        for pair, first in zip(distinct, firsts, strict=True)
    ]
    names = _names(datasets) if len(set(numbers.tolist())) > 1 else ()
    frequent = Counter[str]()
    for tags, count in zip(tagged, counts, strict=True):
        frequent.update(dict.fromkeys(tags, int(count)))
    ranked = [tag for tag, _ in sorted(frequent.items(), key=lambda one: (-one[1], one[0]))]
    kept = frozenset(ranked[:MAX_TAGS])
    while True:
        groups_of = [
            frozenset(_groups(int(pair["dataset"]), kept.intersection(tags), names))
            for pair, tags in zip(distinct, tagged, strict=True)
        ]
        kinds = tuple(dict.fromkeys(groups_of))
        if len(kinds) <= MAX_KINDS or not kept:
            break
        kept = frozenset(ranked[: len(kept) - 1])
    remark = ""
    if len(kept) < len(ranked):
        remark = f"{len(ranked)} tags: only the {len(kept)} most frequent have metrics of their own"
    numbered = np.array([kinds.index(groups) for groups in groups_of], np.int64)
    return Groups(names, kept, kinds, numbered[codes.reshape(-1)], numbers, remark)


def _groups(dataset: int, tags: Iterable[str], names: Sequence[str]) -> Iterator[str]:
    if names:
        yield names[dataset]
    yield from (f"{TAG}{tag}" for tag in tags)


def _names(datasets: Sequence[DatasetSpec]) -> tuple[str, ...]:
    """Return the data sets' names in metrics: their labels, which several may share, else the names of their files."""
    names: list[str] = []
    labels = {dataset.label for dataset in datasets}
    for number, dataset in enumerate(datasets):
        name = dataset.label or re.sub(r"[^\w.-]", "_", Path(dataset.path).name.partition(".")[0] or dataset.path)
        while dataset.label is None and (name in names or name in labels):
            name += f"-{number + 1}"
        names.append(name)
    return tuple(names)
