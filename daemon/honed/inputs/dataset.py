"""Data sets: files of rows in any format (see form/), read into one type, the `Example`.

datadir.py chooses the files, datafile.py reads each. Unusable rows are counted, and the first ones are named; an
unreadable file is an error that names the place.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.inputs import attachment, census, misfit
from honed.inputs.attachment import RowError
from honed.inputs.census import Census
from honed.inputs.datadir import files, files_of
from honed.inputs.datafile import Broken, Nulled, check_beginning, read, read_any
from honed.inputs.form import base as forms
from honed.inputs.media import Facts, MediaError, probe, require, spill
from honed.inputs.message import NoAnswerError, RefusedRowError, kind_of, words
from honed.inputs.misfit import Misfit
from honed.inputs.row import Example, convert, fields, recognise, unread
from honed.spec.data_form import form_of
from honed.system import durable
from honed.system.error import DatasetError

if TYPE_CHECKING:
    from honed.spec.spec import DatasetSpec

__all__ = [
    "Attached",
    "Counts",
    "Example",
    "Inspection",
    "Mixture",
    "Reading",
    "convert",
    "files",
    "hold_out",
    "inspect",
    "load",
    "read",
    "read_any",
    "recognise",
    "split",
    "words",
]

#: Bad rows of a data set that are named; the others are only counted.
MAX_NAMED = 5
#: Of a directory's later files the beginning is checked, too: rows of every file, number of files, and the largest size
#: of a .json file, which is read whole.
NUM_LATER_ROWS = 2
NUM_LATER_FILES = 20
MAX_LATER_JSON_BYTES = 2**24
#: Files of a data set whose first bytes are checked.
NUM_BEGINNINGS = 1000
#: Images, videos and sounds of a data set that are opened for a check.
NUM_OPENED = 100


@dataclass(frozen=True)
class Inspection:
    """The findings in a data set's first rows."""

    format: str
    num_files: int
    num_bytes: int
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]  #: those of text only, good or bad
    bad: tuple[str, ...]
    num_rows: int  #: rows that were looked at
    is_whole: bool  #: True if these are all rows that the job reads
    attached: list[Attached]  #: the good rows with media, as far as these were opened
    num_attached: int  #: rows with media
    num_broken: int  #: rows with media of which a file is missing or unreadable
    broken: tuple[str, ...]  #: the first few
    media_fault: OSError | None  #: a fault of the machine for which one of them is
    overlooked: tuple[str, ...]  #: apparent media that are not read as such
    absent: tuple[str, ...]  #: entries of the data set's `columns` that no row has
    unread: tuple[str, ...]  #: columns that this format does not read
    num_untrained: int  #: rows with weight 0 on every turn of the assistant
    most_turns: tuple[int, str]  #: trained turns of the row with the most of them, and its place
    census: Census  #: of the good rows
    num_unpaired: int  #: rows of prompt and completion with a boolean `label`
    num_nulled: int  #: rows of a table whose tool calls had arguments of null, which are left out
    examples: tuple[Example, ...] = ()  #: the good rows of text only


@dataclass(frozen=True)
class Attached:
    """A row with images, videos or sounds whose headers were read."""

    texts: tuple[str, ...]  #: of its messages
    media: tuple[Facts, ...]


@dataclass(frozen=True)
class Counts:
    """The counts of one data set's rows."""

    path: str
    format: str
    num_rows: int  #: in the files, bad ones included
    num_taken: int
    num_bad: int
    bad: tuple[str, ...]  #: the first few bad rows, each with its place and reason
    num_nulled: int = 0  #: rows of a table whose tool calls had arguments of null, which are left out


def nulled_message(number: int) -> str:
    """Return the warning about rows of a table that lose arguments of null."""
    rows = "1 row has" if number == 1 else f"{number} rows have"
    return (
        f"{rows} tool calls with arguments of null, which are left out: a table gives each call the arguments of all, "
        "so null may only mean that a call lacks one; where null is meant, store `arguments` as JSON text or use .jsonl"
    )


@dataclass(frozen=True)
class Mixture:
    """All examples of a job, in the order of its data sets and their rows."""

    examples: list[Example]
    counts: list[Counts]


# --- data sets -------------------------------------------------------------------------------------------------------


def inspect(
    dataset: DatasetSpec, *, num_rows: int = 20, permit: Callable[[Path], None] = lambda _path: None
) -> Inspection:
    """Inspect a data set's first rows. Raises DatasetError if they are unreadable, or more than half of them unusable.

    `permit` is called before a file that a row names is opened, and raises if it may not be opened.
    """
    paths = files_of(dataset)
    collected = _Collector(dataset, 0, has_chat_template=True)
    seen = _Looker(permit)
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    overlooked: dict[str, None] = {}
    not_read: dict[str, None] = {}
    num_untrained = num_unpaired = 0
    most_turns = (0, "")
    counted = Census()
    for path in paths[:NUM_BEGINNINGS]:
        check_beginning(path)
    beginning = _Beginning(num_rows, dataset.max_rows)
    examples: list[Example] = []
    for path in paths:
        for row, place in beginning.rows(path):
            example = collected.add(row, path, place)
            if isinstance(row, dict):
                columns |= dict.fromkeys(map(str, row))
                overlooked |= dict.fromkeys(_overlooked(row, example, dataset.columns or {}))
            if example is not None:
                not_read |= dict.fromkeys(map(str, unread(row, collected.format, dataset.columns or {})))
                num_untrained += bool(example.untrained) and not example.trained_turns
                num_unpaired += example.kind == "prompt_completion" and misfit.unpaired(row)
                counted.add(example, f"{path.name}, {place}")
                if (num_turns := len(example.trained_turns)) > most_turns[0]:
                    most_turns = (num_turns, f"{path}: {place}")
            if example is not None and example.media:
                seen.look(example, f"{path.name}, {place}")
            elif isinstance(row, dict):
                rows.append(row)
                examples += [] if example is None else [example]
    collected.check()
    return Inspection(
        format=collected.format,
        num_files=len(paths),
        num_bytes=sum(path.stat().st_size for path in paths),
        columns=tuple(columns),
        rows=rows,
        bad=tuple(collected.bad),
        num_rows=collected.num_rows,
        is_whole=beginning.is_whole,
        attached=seen.attached,
        num_attached=seen.num_rows,
        num_broken=seen.num_broken,
        broken=tuple(seen.broken),
        media_fault=seen.fault,
        overlooked=tuple(overlooked),
        absent=tuple(theirs for theirs in (dataset.columns or {}).values() if theirs not in columns),
        unread=tuple(key for key in not_read if not any(f"`{key}`" in text for text in overlooked)),
        num_untrained=num_untrained,
        most_turns=most_turns,
        census=counted,
        num_unpaired=num_unpaired,
        num_nulled=collected.num_nulled,
        examples=tuple(examples),
    )


class _Beginning:
    """The first rows of a data set, and the first few of its later files."""

    def __init__(self, num_rows: int, max_rows: int | None) -> None:
        self._num_left, self._max_left = num_rows, max_rows
        self._num_later = 0
        self.is_whole = True

    def rows(self, path: Path) -> Iterator[tuple[Any, str]]:
        if self._max_left == 0:
            return
        if self._num_left <= 0:
            self._num_later += 1
            is_large = form_of(path) == ".json" and path.stat().st_size > MAX_LATER_JSON_BYTES
            if self._num_later > NUM_LATER_FILES or is_large:
                self.is_whole = False
                return
            self._num_left = NUM_LATER_ROWS
        for row, place in read_any(path):
            if self._max_left == 0:
                break
            if self._num_left <= 0:
                self.is_whole = False
                break
            self._num_left -= 1
            self._max_left = None if self._max_left is None else self._max_left - 1
            yield row, place


def _overlooked(row: dict[str, Any], example: Example | None, columns: Mapping[str, str]) -> Iterator[str]:
    if example is None:
        return attachment.overlooked(row, columns, (), ())
    asked = [{"role": "user", "content": example.prompt}] if example.kind == "prompt_completion" else example.messages
    return attachment.overlooked(row, columns, asked, example.media)


class _Looker:
    """Reads the media headers of the first NUM_OPENED files; of the other files it checks only that they exist."""

    def __init__(self, permit: Callable[[Path], None]) -> None:
        self._permit = permit
        self.attached: list[Attached] = []
        self.broken: list[str] = []
        self.fault: OSError | None = None
        self.num_rows = self.num_broken = self._num_opened = 0

    def look(self, example: Example, place: str) -> None:
        self.num_rows += 1
        for path in (path for item in example.media for path in item.paths):
            self._permit(path)
        try:
            if self._num_opened < NUM_OPENED:
                self._num_opened += len(example.media)
                facts = tuple(probe(item) for item in example.media)
                self.attached.append(Attached(tuple(map(words, example.messages)), facts))
            else:
                for item in example.media:
                    require(item)
        except MediaError as error:
            self.num_broken += 1
            self.fault = self.fault or durable.cause_at_persons(error)
            self.broken += [f"{place}: {error.said}"] if len(self.broken) < MAX_NAMED else []


def load(
    datasets: Sequence[DatasetSpec], *, seed: int, has_chat_template: bool, spill_dir: Path | None = None
) -> Mixture:
    """Load every row that a Reading yields."""
    reading = Reading(datasets, seed=seed, has_chat_template=has_chat_template, spill_dir=spill_dir)
    return Mixture(list(reading), reading.counts)


class Reading:
    """Every row of the data sets, or the shares of them that `fraction` asks for, read one at a time.

    Fractions are shares of the mixture, normalised to one; the mixture is as large as possible with no row drawn twice.
    The draw depends on the seed alone; drawn rows keep their order. To count the rows, the files are read once more.
    Images, videos and sounds that are embedded in rows become files in `spill_dir`; without one they stay in memory.
    """

    def __init__(
        self, datasets: Sequence[DatasetSpec], *, seed: int, has_chat_template: bool, spill_dir: Path | None = None
    ) -> None:
        self._datasets, self._seed = datasets, seed
        self._has_chat_template, self._spill_dir = has_chat_template, spill_dir
        self.counts: list[Counts] = []  #: complete once all rows were read

    def __iter__(self) -> Iterator[Example]:
        self.counts = []
        for n, drawn in enumerate(self._draw()):
            collected, num_taken = self._collector(n), 0
            places = itertools.count() if drawn is None else iter(drawn)
            wanted = next(places, None)
            for number, example in enumerate(collected.read()):
                if number == wanted:
                    wanted = next(places, None)
                    num_taken += 1
                    yield example
            path, bad = str(self._datasets[n].path), tuple(collected.bad)
            numbers = collected.num_rows, num_taken, collected.num_bad
            self.counts.append(Counts(path, collected.format, *numbers, bad, collected.num_nulled))

    def _collector(self, n: int) -> _Collector:
        return _Collector(self._datasets[n], n, has_chat_template=self._has_chat_template, spill_dir=self._spill_dir)

    def _draw(self) -> list[list[int] | None]:
        """Return per data set the drawn ones of its good rows, by number; None for all."""
        fractions = [dataset.fraction for dataset in self._datasets]
        given = [fraction for fraction in fractions if fraction is not None]
        if not given:
            return [None] * len(fractions)
        if len(given) < len(fractions):
            raise DatasetError("`fraction` is set for some data sets and not for others", hint="set it for all or none")
        sizes = [sum(1 for _ in self._collector(n).read()) for n in range(len(fractions))]
        weights = [fraction / sum(given) for fraction in given]
        total = min(size / weight for size, weight in zip(sizes, weights, strict=True) if weight > 0)
        return [
            sorted(random.Random(f"{self._seed} {n}").sample(range(size), min(round(weight * total), size)))
            for n, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        ]


def split(examples: Sequence[Example], eval_split: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split examples into those to train on and those held out, in order; see `hold_out`."""
    held = hold_out(len(examples), eval_split, seed, first_of=census.firsts(examples))
    train = [example for n, example in enumerate(examples) if n not in held]
    return train, [example for n, example in enumerate(examples) if n in held]


def hold_out(num_rows: int, eval_split: float, seed: int, *, first_of: Sequence[int]) -> set[int]:
    """Return the places of the rows that are held out, at least one. Raises DatasetError if all have the same content.

    `first_of` has per row the place of the first with the same content: such rows stay on one side.
    """
    if num_rows < 2:
        raise DatasetError(
            "one example cannot be split into training and evaluation",
            hint="remove eval_split, or add rows",
            fix={"eval_split": None},
        )
    num_held = min(max(round(num_rows * eval_split), 1), num_rows - 1)
    held = census.together(first_of, set(random.Random(seed).sample(range(num_rows), num_held)))
    if not held or len(held) == num_rows:
        raise DatasetError(
            f"all {num_rows} examples are identical and cannot be split",
            hint="remove eval_split, or add other rows",
            fix={"eval_split": None},
        )
    return held


class _Collector:
    """One data set's rows as they are read: the examples, and the bad rows with their places."""

    def __init__(
        self, dataset: DatasetSpec, index: int, *, has_chat_template: bool, spill_dir: Path | None = None
    ) -> None:
        self._dataset, self._index, self._has_chat_template = dataset, index, has_chat_template
        self._form = forms.of(dataset.row_form)
        self._spill_dir = spill_dir
        self._media_dirs = functools.cache(lambda path: dataset.media_dirs(path.parent))
        self.format: str = "" if dataset.format == "auto" else dataset.format
        self.num_rows = self.num_good = 0
        self.num_bad = self.num_nulled = 0
        self.bad: list[str] = []
        self._num_unanswered = 0
        self._misfit: Misfit | None = None  #: the apparent kind of the first row that fits no format

    def read(self) -> Iterator[Example]:
        """Yield the good rows of the data set's files. Raises DatasetError, as `check` does."""
        for path in files_of(self._dataset):
            for row, place in read_any(path):
                if self._dataset.max_rows is not None and self.num_rows >= self._dataset.max_rows:
                    break
                if (example := self.add(row, path, place)) is not None:
                    yield example
        self.check()

    def add(self, row: Any, path: Path, place: str) -> Example | None:
        self.num_rows += 1
        self.num_nulled += isinstance(row, Nulled)
        try:
            example = self._example(row, path)
        except RefusedRowError as error:
            raise DatasetError(f"{path}: {place}: {error}", hint=error.hint) from error
        except RowError as error:
            self.num_bad += 1
            self._num_unanswered += isinstance(error, NoAnswerError)
            if self._misfit is None and isinstance(row, dict):
                self._misfit = self._form.misfit({**row, **self._renamed(row)})
            if len(self.bad) < MAX_NAMED:
                self.bad.append(f"{path.name}, {place}: {error}")
            return None
        self.num_good += 1
        return example

    def check(self) -> None:
        """Raise DatasetError if no row is good, or more than half are bad."""
        if not self.num_rows:
            raise DatasetError(
                f"{self._dataset.path}: it contains no rows", hint="check that it is complete, or use another file"
            )
        if self.num_bad * 2 > self.num_rows or not self.num_good:
            if self._misfit is not None and not self.num_good:
                fix = self._misfit.fix
                if fix and self._dataset.format != "auto":
                    fix["format"] = None
                raise DatasetError(f"{self._dataset.path}: {self._misfit.message}", hint=self._misfit.hint, fix=fix)
            if self._num_unanswered * 2 > self.num_bad:
                raise DatasetError(
                    f"{self._dataset.path}: rows without answers: {self.num_bad} of {self.num_rows} rows cannot be "
                    f"used{f' as {self.format}' if self.format else ''}: {self.bad[0]}; only answers are trained on",
                    hint="add the answers; or rename the role that answers to `assistant` (`gpt` in rows of from and "
                    "value)",
                )
            raise DatasetError(
                f"{self._dataset.path}: {self.num_bad} of {self.num_rows} rows cannot be used"
                f"{f' as {self.format}' if self.format else ''}: {'; '.join(self.bad)}",
                hint=f"`format` and `columns` of a data set specify how its rows are read. {self._form.hint}",
            )

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        return {ours: row[theirs] for ours, theirs in (self._dataset.columns or {}).items() if theirs in row}

    def _example(self, row: Any, path: Path) -> Example:
        if isinstance(row, Broken):
            raise RowError(row.reason)
        if not isinstance(row, dict):
            raise RowError(f"a row must be an object with columns, this is {kind_of(row)}")
        columns = self._dataset.columns
        if not self.format:
            try:
                self.format = recognise(row, columns, form=self._dataset.row_form)
            except DatasetError as error:
                raise RowError(error.said) from error
        made = fields(
            row,
            self.format,
            columns,
            has_chat_template=self._has_chat_template,
            directories=self._media_dirs(path),
        )
        if self._spill_dir is not None and made.get("media"):
            made["media"] = tuple(spill(item, self._spill_dir) for item in made["media"])
        return Example(**made, dataset_index=self._index, row_index=self.num_rows - 1)
