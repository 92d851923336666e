"""Conversion of the job's data sets to token ids and labels, with every row accounted for."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from honed.check.policy import Named
from honed.inputs import dataset
from honed.inputs.census import Census
from honed.inputs.datadir import files_of
from honed.inputs.form import base as forms
from honed.job.shape import Segment
from honed.job.trial import NUM_ROWS
from honed.spec import kind
from honed.spec.spec import JobSpec
from honed.system import quote
from honed.system.error import DatasetError, ModelError
from honed.text.asking import Mismatches
from honed.text.chat import ChatFormat
from honed.text.omission import MAX_SILENCED_SHARE, SILENCED_HINT, Tally
from honed.text.template import where
from honed.worker.assignment import Assignment
from honed.worker.rows import cache, group, record
from honed.worker.rows.group import Groups
from honed.worker.rows.maker import Maker, MediaRows
from honed.worker.rows.record import Fate, Remark
from honed.worker.rows.table import Examples, Table
from honed.worker.stop import Stop

if TYPE_CHECKING:
    from honed.worker.rows.processor import Processor

#: Maximum number of bins in the histogram of the rows' lengths.
NUM_BINS = 40
#: Unusable files that are named; the rest is counted.
MAX_NAMED = 5


@dataclass(frozen=True)
class Rows:
    """Rows ready for training or evaluation."""

    table: Table
    indices: npt.NDArray[np.int64]  #: of these rows in the table
    dataset: Any  #: datasets.Dataset with input_ids and labels; beside media, `source`: the number of a Source, or -1
    lengths: npt.NDArray[np.int32]  #: tokens of every row, as it is trained on
    kinds: frozenset[str]  #: of their examples
    first_segments: list[Segment] = field(default_factory=list)  #: the first row
    num_trained_tokens: int = 0
    num_truncated: int = 0
    longest_uncut: int = 0  #: tokens of the longest row that could be encoded, before truncation
    num_dropped: int = 0  #: skipped rows: nothing was left to train on after truncation, or the template refuses them
    num_cut_off: int = 0  #: skipped because all that would be trained on was cut off
    first_dropped: str = ""
    num_broken: int = 0  #: skipped because a file is missing or cannot be read
    broken: tuple[str, ...] = ()  #: the first few, each with its file and its fault
    num_too_long: int = 0  #: skipped because a part of their media would have been cut off
    too_long: tuple[str, ...] = ()  #: the first few
    num_silenced: int = 0  #: skipped because the template leaves out all that a turn says
    first_silenced: str = ""
    lost: Tally = field(default_factory=Tally)  #: parts of the other rows that the template leaves out
    mismatches: Mismatches = field(default_factory=Mismatches)  #: rows whose prompt differs from training

    @property
    def examples(self) -> Examples:
        return Examples(self.table, self.indices)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest answer, as trained on."""
        return int(self.table.column("longest")[self.indices].max(initial=0))

    @cached_property
    def _hashes(self) -> npt.NDArray[np.int64]:
        return self.table.column("hash")[self.indices]

    def find(self, input_ids: Sequence[int]) -> int | None:
        """Return the last row with these tokens; None if there is none."""
        matches = np.flatnonzero(self._hashes == hash(tuple(input_ids)))
        return int(matches[-1]) if len(matches) else None

    def lacking(self, ids: Sequence[int]) -> list[int]:
        """Return those of some tokens that occur in no row."""
        import pyarrow.compute as pc

        left = np.array(ids, np.int64)
        for batch in self.dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
            if not len(left):
                break
            left = np.setdiff1d(left, pc.list_flatten(batch["input_ids"]).to_numpy())
        return [int(item) for item in left]

    def is_truncated(self, index: int) -> bool:
        return bool(self.table.column("whole")[self.indices[index]] > self.lengths[index])


@dataclass(frozen=True)
class Data:
    """All data that the run trains on, and is measured with."""

    train: Rows  #: in an evaluation those held out: nothing is trained
    held_out: Rows | None
    counts: dict[str, object]  #: as in the event `data`
    hashes: dict[str, str]  #: sha256 of every file, as it was when it was read
    media: MediaRows | None  #: None where all rows are text
    num_answers: int  #: of every row
    read: tuple[dataset.Counts, ...]  #: of every data set, including those held out
    num_dropped: int  #: skipped, of the rows to train on and of those held out
    first_dropped: str
    advice: str = ""  #: for rows of which the template leaves out parts
    advice_on_asking: str = ""  #: for rows whose prompt differs from training
    trained: Census = field(default_factory=Census)  #: of the rows to train on, as they were read
    measured: Census = field(default_factory=Census)  #: of those held out
    num_in_both: int = 0  #: held-out rows that are also trained on
    groups: Groups | None = None  #: of the rows held out

    @property
    def entries(self) -> list[str]:
        """Names of the entries in the cache that hold these rows, except those that no later attempt uses."""
        names = dict.fromkeys(rows.table.directory.name for rows in self._all)
        return [name for name in names if not name.startswith(cache.UNKEYED)]

    @property
    def shared_entries(self) -> list[str]:
        """Those that an earlier job of the user encoded."""
        return [name for name in self.entries if cache.is_shared(self.train.table.directory.with_name(name))]

    @property
    def _all(self) -> list[Rows]:
        return _each_once(self.train, self.held_out)

    @property
    def padded(self) -> str:
        """What the rows have for which honed's own collator batches them, which only pads; empty if it is nothing."""
        if self.num_answers > 1:
            return "several answers"
        return "images, videos or sounds" if self.media is not None else ""

    @property
    def longest(self) -> int:
        """Tokens of the longest row, as it is trained on or evaluated."""
        return max(rows.longest for rows in self._all)

    def messages(self) -> list[str]:
        """Return messages for the owner about rows that cannot be used, are skipped, or lose parts."""
        both = self._all
        broken, num_broken = [text for rows in both for text in rows.broken], sum(rows.num_broken for rows in both)
        too_long, num_too_long = [text for rows in both for text in rows.too_long], sum(r.num_too_long for r in both)
        messages = [
            f"{item.path}: {item.num_bad} of {item.num_rows} rows cannot be used: {_listed(item.bad, item.num_bad)}"
            for item in self.read
            if item.num_bad
        ]
        messages += [f"{item.path}: {dataset.nulled_message(item.num_nulled)}" for item in self.read if item.num_nulled]
        messages += [
            *self.trained.order_messages(),
            *(f"held out: {order}" for order in self.measured.order_messages()),
        ]
        if self.trained.has_many_twice:
            messages.append(f"{self.trained.num_twice} of {self.trained.num_rows} training rows repeat an earlier row")
        if self.groups is not None and self.groups.remark:
            messages.append(self.groups.remark)
        if self.num_in_both:
            messages.append(
                f"{self.num_in_both} of {self.measured.num_rows} held-out rows are also trained on: the metrics "
                "measure memorization"
            )
        num_shown = sum(len(rows.examples) for rows in both)
        if lost := sum((rows.lost for rows in both), Tally()).message(num_shown):
            messages.append(f"{lost}; {self.advice}")
        if asked := sum((rows.mismatches for rows in both), Mismatches()).message(num_shown, self.advice_on_asking):
            messages.append(asked)
        if self.num_dropped > num_broken + num_too_long:  # those are named below
            num_cut_off = sum(rows.num_cut_off for rows in both)
            longer = (
                f"; {num_cut_off} of them because they are too long: increase training.max_length"
                if num_cut_off
                else ""
            )
            messages.append(f"{_rows(self.num_dropped)} skipped; the first: {self.first_dropped}{longer}")
        num_cut, num_rows = sum(r.num_truncated for r in both), sum(len(r.examples) + r.num_dropped for r in both)
        if 2 * num_cut > num_rows:
            messages.append(
                f"{num_cut} of {num_rows} rows are truncated after training.max_length tokens, and the rest is not "
                f"learned; the longest has {max(rows.longest_uncut for rows in both)}"
            )
        if num_broken:
            messages.append(f"{_rows(num_broken)} skipped because of an unusable file: {_listed(broken, num_broken)}")
        if num_too_long:
            messages.append(
                f"{_rows(num_too_long)} skipped because truncation would cut their images, videos or sounds: "
                + _listed(too_long, num_too_long)
            )
        return messages


def build(
    assignment: Assignment,
    chat: ChatFormat,
    stop: Stop,
    load_processor: Callable[[], Processor] | None = None,
    warn: Callable[[str], None] = lambda _text: None,
    *,
    is_ahead: bool = False,
) -> Data:
    """Read, mix, split and encode the data. Raises DatasetError if nothing is left to train on. `is_ahead`: another job
    trains meanwhile.

    The processor is loaded if a row has media, and takes part in `chat` from then on.
    """
    spec = assignment.spec
    maker, tables = _tables(assignment, chat, stop, load_processor, warn, is_ahead=is_ahead)
    is_evaluation = kind.of(spec).freezes_base
    indices, held_out = _divided(assignment, tables)
    max_length, media, num_answers = spec.training.cut_at, maker.media, forms.of(kind.of(spec).form).num_answers
    further = [*(["source"] if media is not None else []), *(["answers"] if num_answers > 1 else [])]
    train = select(tables[0], indices, max_length, further)
    evaluated = train if is_evaluation else None
    if len(held_out) and not is_evaluation:
        evaluated = select(tables[-1], held_out, max_length, further)
    both = _each_once(train, evaluated)
    _check_silenced(both)
    _check_left(train, evaluated, len(indices), len(held_out), spec)
    train = replace(train, first_segments=chat.encode(train.examples[0]).truncate(max_length).segments())
    evaluated = train if is_evaluation else evaluated
    trained = Census() if is_evaluation else census_of(tables[0], indices)
    measured = census_of(tables[-1], held_out)
    digests = [item.column("digest")[some] for item, some in ((tables[0], indices), (tables[-1], held_out))]
    num_in_both = 0 if is_evaluation else int(np.isin(digests[1], digests[0]).sum())
    train_counts = () if is_evaluation else tables[0].counts
    eval_counts = tables[-1].counts if spec.eval_datasets else ()
    read = (*train_counts, *eval_counts)
    num_dropped = sum(rows.num_dropped for rows in both)
    first_dropped = next((rows.first_dropped for rows in both if rows.num_dropped), "")
    mismatches = sum((rows.mismatches for rows in both), Mismatches())
    counts: dict[str, object] = {
        "num_train": 0 if is_evaluation else len(train.examples),
        "num_eval": len(evaluated.examples) if evaluated else 0,
        "num_truncated": sum(rows.num_truncated for rows in both),
        "num_dropped": num_dropped,
        "num_silenced": sum(rows.num_silenced for rows in both),
        "omitted": sum((rows.lost for rows in both), Tally()).as_dict(),
        "num_asked_otherwise": mismatches.num_rows,
        "num_unusable": sum(count.num_bad for count in read),
        "num_twice": trained.num_twice,
        "num_in_both": num_in_both,
        "num_tokens": train.num_tokens,
        "num_trained_tokens": train.num_trained_tokens,
        "lengths": lengths(train.lengths),
        "datasets": [_counts(count) for count in train_counts],
        "eval_datasets": [_counts(count) for count in eval_counts],
    }
    if media is not None:
        counts["num_media"] = sum(len(source.media) for source in media.sources)
        counts["num_broken"] = sum(rows.num_broken for rows in both)
        counts["num_too_long"] = sum(rows.num_too_long for rows in both)
    if assignment.is_trial:
        size, packed = spec.training.per_device_train_batch_size, spec.training.packing and spec.training.max_length
        train = few(train, size=size, seed=assignment.seed, num_tokens=size * packed if packed else None)
        evaluated = None
        counts["trial"] = {"num_rows": len(train.examples), "num_tokens": train.num_tokens}
    return Data(
        train,
        evaluated,
        counts,
        dict(maker.hashes),
        media,
        num_answers,
        read,
        num_dropped,
        first_dropped,
        chat.advice.on_omissions(sum((rows.lost for rows in both), Tally())),
        chat.advice.on_asking(mismatches),
        trained,
        measured,
        num_in_both,
        None if evaluated is None else group.of(tables[-1], evaluated.indices, spec.eval_datasets or spec.datasets),
    )


def _tables(
    assignment: Assignment,
    chat: ChatFormat,
    stop: Stop,
    load_processor: Callable[[], Processor] | None,
    warn: Callable[[str], None],
    *,
    is_ahead: bool,
) -> tuple[Maker, list[Table]]:
    """Encode the data sets, or take what was kept of an earlier job's: those to train on, and those to evaluate on."""
    spec = assignment.spec
    files = [file for source in [*spec.datasets, *spec.eval_datasets] for file in files_of(source)]
    for file in files:
        assignment.check_read(Named("datasets", file, DatasetError))
    before = _stamps(files)
    hashes = {str(file): sha256(file, stop) for file in files}
    maker = Maker(
        assignment, chat, stop, load_processor, warn, hashes, lambda: _stamps(files) == before, is_ahead=is_ahead
    )
    wanted = [datasets for datasets in (spec.datasets, spec.eval_datasets) if datasets]
    cache.keep(assignment.rows_dir, map(maker.name, wanted))
    return maker, [maker.table(datasets) for datasets in wanted]


def _divided(assignment: Assignment, tables: Sequence[Table]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the indices of the rows to train on in the first table, and of those held out in the last."""
    spec = assignment.spec
    indices = np.arange(len(tables[0]))
    if spec.eval_datasets:
        return indices, np.arange(len(tables[-1]))
    if not spec.eval_split:
        return indices, indices[:0]
    first_of = _firsts(tables[0].column("digest"))
    held = dataset.hold_out(len(indices), spec.eval_split, assignment.seed, first_of=first_of)
    is_held: npt.NDArray[np.bool_] = np.zeros(len(indices), bool)
    is_held[list(held)] = True
    return indices[~is_held], indices[is_held]


def _check_left(train: Rows, evaluated: Rows | None, num_read: int, num_held_out: int, spec: JobSpec) -> None:
    """Raise DatasetError if no row is left to train on, or none of those held out to evaluate on."""
    if not train.examples:
        raise DatasetError(
            f"no row is left to {'evaluate' if evaluated is train else 'train'} on, of {num_read}"
            + (f"; the first: {train.first_dropped}" if train.first_dropped else ""),
            hint=_hint(train),
        )
    if evaluated is not None and not evaluated.examples:
        split = "" if spec.eval_datasets else " that eval_split holds out"
        raise DatasetError(
            f"no row is left to evaluate on, of {num_held_out}{split}; the first: {evaluated.first_dropped}",
            hint=_hint(evaluated) + (", or a larger eval_split" if split else ""),
        )


def _each_once(train: Rows, held_out: Rows | None) -> list[Rows]:
    """Return the rows to train on and those held out; the rows of an evaluation, which are both, once."""
    return [train] if held_out is None or held_out is train else [train, held_out]


def select(table: Table, indices: npt.NDArray[np.int64], max_length: int | None, further: Sequence[str]) -> Rows:
    """Return the rows of a table at these indices that can be trained on, with reports on those that cannot."""
    fates, whole, lengths = (table.column(name)[indices] for name in ("fate", "whole", "length"))
    kept = indices[fates == Fate.KEPT]
    is_cut: npt.NDArray[np.bool_] = np.zeros(len(indices), bool)
    if max_length is not None:
        is_cut = (whole > lengths) & (fates == Fate.KEPT) | (whole > max_length) & (fates == Fate.CUT_OFF)

    def remarks(fate: Fate, number: int) -> list[Remark]:
        return [table.remark(int(index)) for index in indices[fates == fate][:number]]

    dropped = indices[fates != Fate.KEPT][:1]
    silenced = remarks(Fate.SILENCED, 1)
    lost, mismatches = Tally(), Mismatches()
    for index in map(int, kept[table.remarked[kept]]):
        remark, example = table.remark(index), table.example(index)
        lost.add(where(example), remark.omitted, example)
        mismatches.add(where(example), remark.mismatch, example)
    kinds = np.unique(table.column("kind")[kept])
    return Rows(
        table,
        kept,
        _selected(table.dataset(*further), kept),
        lengths[fates == Fate.KEPT],
        frozenset(record.KINDS[kind] for kind in kinds),
        num_trained_tokens=int(table.column("trained")[kept].sum()),
        num_truncated=int(is_cut.sum()),
        longest_uncut=int(whole.max(initial=0)),
        num_dropped=len(indices) - len(kept),
        num_cut_off=int((is_cut & (fates == Fate.CUT_OFF)).sum()),
        first_dropped=table.remark(int(dropped[0])).reason if len(dropped) else "",
        num_broken=int((fates == Fate.BROKEN).sum()),
        broken=tuple(remark.reason for remark in remarks(Fate.BROKEN, MAX_NAMED)),
        num_too_long=int((fates == Fate.TOO_LONG).sum()),
        too_long=tuple(f"{item.reason} ({item.hint})" for item in remarks(Fate.TOO_LONG, MAX_NAMED)),
        num_silenced=int((fates == Fate.SILENCED).sum()),
        first_silenced=silenced[0].reason if silenced else "",
        lost=lost,
        mismatches=mismatches,
    )


def _selected(dataset: Any, indices: npt.NDArray[np.int64]) -> Any:
    """Return the rows at these indices; of a whole dataset itself, which is read faster."""
    is_whole = len(indices) == len(dataset) and bool((indices == np.arange(len(indices))).all())
    return dataset if is_whole else dataset.select(indices)


def census_of(table: Table, indices: npt.NDArray[np.int64]) -> Census:
    """Return the counts of the rows at these indices, whether they can be trained on or not."""
    digests, orders = table.column("digest")[indices], table.column("order")[indices]
    codes, firsts, numbers = np.unique(orders, return_index=True, return_counts=True)
    made = Census(num_rows=len(indices), num_twice=len(indices) - len(np.unique(digests)))
    for first, number, order in sorted(zip(firsts.tolist(), numbers.tolist(), codes.tolist(), strict=True)):
        if (odd := record.ORDERS[order]) is not None:
            made.orders[odd] = number
            made.firsts[odd] = where(table.example(int(indices[first])))
    return made


def _firsts(digests: npt.NDArray[np.uint64]) -> list[int]:
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse].tolist()


def _hint(rows: Rows) -> str:
    """Return advice for the case that every row was skipped."""
    if rows.num_broken * 2 > rows.num_dropped:
        return "put the files at the paths in the rows, or set their directory with `media_dir`"
    if rows.num_silenced * 2 > rows.num_dropped:
        return SILENCED_HINT
    if rows.num_too_long * 2 > rows.num_dropped:
        return "increase training.max_length, reduce pixels and frames (`media:`), or shorten the sounds"
    return "increase training.max_length, or use rows with text of the assistant"


def _check_silenced(both: Sequence[Rows]) -> None:
    """Raise DatasetError if the template hides what too many rows are to teach.

    Training and held-out rows count together: few may be held out, and one of them is a small share of all.
    """
    num_rows = sum(len(rows.examples) + rows.num_dropped for rows in both)
    num_silenced = sum(rows.num_silenced for rows in both)
    if num_silenced > MAX_SILENCED_SHARE * num_rows:
        first = next(rows.first_silenced for rows in both if rows.num_silenced)
        raise DatasetError(
            f"{num_silenced} of {num_rows} rows would train an empty answer; the first: {first}",
            hint=SILENCED_HINT,
        )


def few(rows: Rows, *, size: int, seed: int, num_tokens: int | None = None) -> Rows:
    """Return the rows of a trial: the longest and some others, repeated until they fill a batch.

    The batch has `size` rows, or `num_tokens` tokens where rows are packed. Each row comes once before any comes again.
    """
    longest = int(rows.lengths.argmax())
    others = [index for index in range(len(rows.lengths)) if index != longest]
    chosen = sorted([longest, *random.Random(seed).sample(others, min(NUM_ROWS - 1, len(others)))])
    if num_tokens is not None:
        size = num_tokens * len(chosen) // int(rows.lengths[chosen].sum())
    indices = (chosen * -(-size // len(chosen)))[: max(size, len(chosen))]
    return replace(
        rows, indices=rows.indices[indices], dataset=rows.dataset.select(indices), lengths=rows.lengths[indices]
    )


def lengths(tokens: npt.NDArray[np.int32]) -> dict[str, int | list[int]]:
    """Return a histogram of row lengths: `counts` of bins that are `width` wide, the first of which begins at 0."""
    width = max(1, -(-(int(tokens.max()) + 1) // NUM_BINS))
    return {"width": width, "counts": np.bincount(tokens // width).tolist()}


def check_ids(data: Data, tokenizer: Any, num_embeddings: int, base_model_path: Path) -> None:
    """Raise ModelError if a token that occurs has no row in the embeddings.

    A tokenizer may know more tokens than its model, as long as nobody uses them: Gemma 3's and CodeLlama's do.
    """
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id} - {None}
    for rows in (data.train, data.held_out):
        used |= {int(rows.table.column("max_id")[rows.indices].max())} if rows is not None else set()
    if max(used) >= num_embeddings:
        token = quote.mark(repr(tokenizer.convert_ids_to_tokens(max(used))))
        raise ModelError(
            f"{base_model_path}: token {token} has the id {max(used)}, but the embeddings have only {num_embeddings} "
            "rows",
            hint="the tokenizer belongs to another model, or tokens were added without resizing the embeddings",
        )


def _listed(named: Sequence[str], number: int) -> str:
    return "; ".join(named) + (f"; and {number - len(named)} more" if number > len(named) else "")


def _rows(number: int) -> str:
    return "1 row is" if number == 1 else f"{number} rows are"


def _counts(count: dataset.Counts) -> dict[str, int]:
    return {"num_rows": count.num_rows, "num_taken": count.num_taken, "num_bad": count.num_bad} | (
        {"num_nulled": count.num_nulled} if count.num_nulled else {}
    )


def _stamps(files: Sequence[Path]) -> list[tuple[int, ...]]:
    infos = [file.stat() for file in files]
    return [(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for info in infos]


def sha256(file: Path, stop: Stop) -> str:
    """Return the hash of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(2**22):
            stop.check()
            digest.update(piece)
    return digest.hexdigest()
