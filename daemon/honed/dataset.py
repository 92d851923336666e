"""Data sets: files of rows in any of five formats (see row.py), read into one kind of thing, the `Example`.

Rows are read one at a time, never a file at once where its form allows it. A row that cannot be used is counted and the
first ones are named; a file that cannot be read is an error that names the place.
"""

from __future__ import annotations

import csv
import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, AnyStr

from honed import attachment
from honed.attachment import RowError
from honed.error import DatasetError
from honed.media import Facts, MediaError, probe, require, spill
from honed.row import FORMATS_HINT, Example, convert, fields, kind_of, recognise, words

if TYPE_CHECKING:
    from honed.spec import DatasetSpec

__all__ = [
    "Attached", "Counts", "Example", "Inspection", "Mixture", "convert", "files", "inspect", "load", "read",
    "recognise", "split", "words",
]  # fmt: skip

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
#: How many of a data set's bad rows are named; the rest is counted.
MAX_NAMED = 5
#: Bytes of one line, embedded images and all. A file without line breaks must not fill the memory.
MAX_LINE_BYTES = 256 * 1024 * 1024
#: Images, videos and sounds of a data set that are opened for a look at it.
NUM_OPENED = 100


@dataclass(frozen=True)
class Inspection:
    """What a data set looks like from its first rows."""

    format: str
    num_files: int
    num_bytes: int
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]  #: those that are text alone, good or bad
    bad: tuple[str, ...]
    num_rows: int  #: that were looked at
    attached: list[Attached]  #: the rows with media, as far as these were opened and are good
    num_attached: int  #: rows with media
    num_broken: int  #: of these, the ones with a file that is missing or cannot be read
    broken: tuple[str, ...]  #: the first few
    overlooked: tuple[str, ...]  #: what seems to be media, and is not read as such
    absent: tuple[str, ...]  #: of the data set's `columns`, those that no row has


@dataclass(frozen=True)
class Attached:
    """A row with images, videos or sounds, of which the headers were read."""

    texts: tuple[str, ...]  #: of its messages
    media: tuple[Facts, ...]


@dataclass(frozen=True)
class Counts:
    """What became of one data set's rows."""

    path: str
    format: str
    num_rows: int  #: in the files, bad ones included
    num_taken: int
    num_bad: int
    bad: tuple[str, ...]  #: the first few bad rows, each with its place and reason


@dataclass(frozen=True)
class Mixture:
    """All examples of a job, in the order of its data sets and their rows."""

    examples: list[Example]
    counts: list[Counts]


# --- files -----------------------------------------------------------------------------------------------------------


def files(path: Path, *, split: str | None = None) -> list[Path]:
    """The data files of a data set: the file itself, or those of a directory by name, hidden ones left out.

    With a split, those of its directory `<split>/`, or those whose names begin with the word. Raises DatasetError where
    there is none.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DatasetError(
                f"{path}: not a kind of data file that is read here", hint=f"one of {' '.join(SUFFIXES)}"
            )
        if split is not None:
            raise DatasetError(
                f"{path}: `split` is for a directory with several, and this is a file",
                hint="leave `split` out, or name the directory",
            )
        return [path]
    if not path.is_dir():
        raise DatasetError(f"{path}: no such file or directory", hint="paths are absolute, on the machine that trains")
    if split is not None and (path / split).is_dir():
        return files(path / split)
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    found = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in SUFFIXES]
    if split is not None:
        found = [entry for entry in found if re.split(r"[^0-9A-Za-z]", entry.name, maxsplit=1)[0] == split]
    if not found:
        names = ", ".join(entry.name for entry in entries[:8]) or "nothing"
        what = "data file" if split is None else f"data file of split {split!r}"
        raise DatasetError(
            f"{path}: no {what} in this directory (there is: {names})", hint=f"data files end in {' '.join(SUFFIXES)}"
        )
    return found


def read(path: Path, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one file. Raises DatasetError, which names the file, the place, and what to do."""
    for n, (row, place) in enumerate(_read_any(path)):
        if limit is not None and n >= limit:
            return
        if not isinstance(row, dict):
            raise DatasetError(
                f"{path}: {place}: a row is an object with columns, this is {kind_of(row)}",
                hint='as in {"prompt": "…", "completion": "…"}',
            )
        yield row


def _read_any(path: Path) -> Iterator[tuple[Any, str]]:
    """Each row, or what stands in its place, with where it lies."""
    try:
        match path.suffix.lower():
            case ".jsonl":
                yield from _read_jsonl(path)
            case ".json":
                yield from _read_json(path)
            case ".csv":
                yield from _read_csv(path)
            case ".parquet":
                yield from _read_parquet(path)
            case suffix:
                raise DatasetError(f"{path}: cannot read {suffix or 'a file without suffix'}", hint=" ".join(SUFFIXES))
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: not UTF-8 at byte {error.start}", hint="convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise DatasetError(
            f"{path}: {error.strerror or error}", hint="can honed's user and the group honed-job read it?"
        ) from error


def _read_jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(_lines(file, path), start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode().rstrip())
            except UnicodeDecodeError as error:
                raise DatasetError(
                    f"{path}: line {number}: not UTF-8 at byte {error.start + 1} of the line",
                    hint="convert the file, for example with iconv",
                ) from error
            except (ValueError, RecursionError) as error:
                raise DatasetError(
                    f"{path}: line {number}{_column(error)}: not JSON: {_json_words(error)}",
                    hint="a .jsonl file has one JSON object on each line",
                ) from error
            yield row, f"line {number}"


def _lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(
                f"{path}: line {number}: longer than {MAX_LINE_BYTES} bytes",
                hint="each row stands on a line of its own; large images are named by path",
            )
        yield line


def _read_json(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}, column {error.colno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise DatasetError(
            f"{path}: {where}not JSON: {_json_words(error)}", hint="one object on each line is a .jsonl file"
        ) from error
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise DatasetError(
            f"{path}: a .json file holds a list of rows, or an object with such a list as `data`",
            hint="rows on lines of their own are a .jsonl file",
        )
    yield from ((row, f"row {number}") for number, row in enumerate(rows, start=1))


def _read_csv(path: Path) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(_lines(file, path), strict=True)
        try:
            if not reader.fieldnames:
                raise DatasetError(f"{path}: empty", hint="the first line of a .csv file names its columns")
            for row in reader:
                if None in row or None in row.values():
                    raise DatasetError(
                        f"{path}: line {reader.line_num}: not the header's number of fields ({len(reader.fieldnames)})",
                        hint="text with commas, quotes or line breaks stands in double quotes",
                    )
                yield row, f"line {reader.line_num}"
        except csv.Error as error:
            raise DatasetError(
                f"{path}: line {reader.line_num}: not CSV: {error}",
                hint="text with commas, quotes or line breaks stands in double quotes",
            ) from error


def _read_parquet(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        import pyarrow  # noqa: PLC0415  (heavy, and only where there is such a file)
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise DatasetError(
            f"{path}: reading .parquet needs pyarrow", hint="pip install pyarrow, or use .jsonl"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield _without_nulls(row), f"row {number}"
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: row {number + 1} or one after it has text that is not UTF-8",
            hint="write the file again with its text in UTF-8",
        ) from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError) as error:
        # The last ones come of values that Python has no word for, such as a date before the year 1.
        raise DatasetError(
            f"{path}: not a readable .parquet file: {' '.join(str(error).split())}",
            hint="copy it again from where it came from, or write it anew",
        ) from error


def _without_nulls(value: Any) -> Any:
    """Parquet gives each object all the keys that any of them has, so null there means absent."""
    match value:
        case dict():
            return {key: _without_nulls(each) for key, each in value.items() if each is not None}
        case list():
            return [_without_nulls(each) for each in value]
        case _:
            return value


def _column(error: Exception) -> str:
    return f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""


def _json_words(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return error.msg
        case RecursionError():
            return "nested too deeply"
        case _:  # Python reads no number of more than 4300 digits
            return "a number with thousands of digits"


# --- data sets -------------------------------------------------------------------------------------------------------


def inspect(
    dataset: DatasetSpec, *, num_rows: int = 20, permit: Callable[[Path], None] = lambda _path: None
) -> Inspection:
    """A look at a data set's first rows. Raises DatasetError where they cannot be read, or half of them not be used.

    `permit` is asked before a file that a row names is opened, and raises where it may not be.
    """
    paths = files(Path(dataset.path), split=dataset.split)
    collected = _Collector(dataset, 0, has_chat_template=True)
    seen = _Looker(permit)
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    overlooked: dict[str, None] = {}
    for path in paths:
        for row, place in _read_any(path):
            if collected.num_rows >= num_rows:
                break
            example = collected.add(row, path, place)
            if isinstance(row, dict):
                columns |= dict.fromkeys(map(str, row))
                overlooked |= dict.fromkeys(_overlooked(row, example, dataset.columns or {}))
            if example is not None and example.media:
                seen.look(example, f"{path.name}, {place}")
                collected.examples[-1] = replace(example, media=())  # embedded files would fill the memory
            elif isinstance(row, dict):
                rows.append(row)
    collected.check()
    return Inspection(
        format=collected.format,
        num_files=len(paths),
        num_bytes=sum(path.stat().st_size for path in paths),
        columns=tuple(columns),
        rows=rows,
        bad=tuple(collected.bad),
        num_rows=collected.num_rows,
        attached=seen.attached,
        num_attached=seen.num_rows,
        num_broken=seen.num_broken,
        broken=tuple(seen.broken),
        overlooked=tuple(overlooked),
        absent=tuple(theirs for theirs in (dataset.columns or {}).values() if theirs not in columns),
    )


def _overlooked(row: dict[str, Any], example: Example | None, columns: Mapping[str, str]) -> Iterator[str]:
    if example is None:
        return attachment.overlooked(row, columns, (), ())
    asked = [{"role": "user", "content": example.prompt}] if example.kind == "prompt_completion" else example.messages
    return attachment.overlooked(row, columns, asked, example.media)


class _Looker:
    """What the headers of rows' media say, of the first NUM_OPENED files; of the rest, whether they are there."""

    def __init__(self, permit: Callable[[Path], None]) -> None:
        self._permit = permit
        self.attached: list[Attached] = []
        self.broken: list[str] = []
        self.num_rows = self.num_broken = self._num_opened = 0

    def look(self, example: Example, place: str) -> None:
        self.num_rows += 1
        for path in (path for each in example.media for path in each.paths):
            self._permit(path)
        try:
            if self._num_opened < NUM_OPENED:
                self._num_opened += len(example.media)
                facts = tuple(probe(each) for each in example.media)
                self.attached.append(Attached(tuple(map(words, example.messages)), facts))
            else:
                for each in example.media:
                    require(each)
        except MediaError as error:
            self.num_broken += 1
            self.broken += [f"{place}: {error.message}"] if len(self.broken) < MAX_NAMED else []


def load(
    datasets: Sequence[DatasetSpec], *, seed: int, has_chat_template: bool, spill_dir: Path | None = None
) -> Mixture:
    """Every row of the data sets, or the shares of them that `fraction` asks for.

    Fractions are shares of the mixture, normalised to one; the mixture is as large as can be with no row drawn twice.
    Which rows of a data set are drawn depends on the seed alone; they stay in their order. Images, videos and sounds
    that are embedded in rows become files in `spill_dir`; without one they stay in memory.
    """
    collected = [
        _collect(dataset, n, has_chat_template=has_chat_template, spill_dir=spill_dir)
        for n, dataset in enumerate(datasets)
    ]
    drawn = _draw([each.examples for each in collected], [dataset.fraction for dataset in datasets], seed)
    counts = [
        Counts(str(dataset.path), each.format, each.num_rows, len(examples), each.num_bad, tuple(each.bad))
        for dataset, each, examples in zip(datasets, collected, drawn, strict=True)
    ]
    return Mixture([example for examples in drawn for example in examples], counts)


def split(examples: Sequence[Example], eval_split: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Those to train on and those held out, in order, each at least one. Raises DatasetError for a single example."""
    if len(examples) < 2:
        raise DatasetError("one example cannot be split in two", hint="leave out eval_split, or add rows")
    num_held = min(max(round(len(examples) * eval_split), 1), len(examples) - 1)
    held = set(random.Random(seed).sample(range(len(examples)), num_held))
    train = [example for n, example in enumerate(examples) if n not in held]
    return train, [example for n, example in enumerate(examples) if n in held]


def _draw(sets: list[list[Example]], fractions: Sequence[float | None], seed: int) -> list[list[Example]]:
    given = [fraction for fraction in fractions if fraction is not None]
    if not given:
        return sets
    if len(given) < len(fractions):
        raise DatasetError("`fraction` is set for some data sets and not for others", hint="set it for all or none")
    weights = [fraction / sum(given) for fraction in given]
    total = min(len(examples) / weight for examples, weight in zip(sets, weights, strict=True) if weight > 0)
    return [
        _sample(examples, round(weight * total), random.Random(f"{seed} {n}"))
        for n, (examples, weight) in enumerate(zip(sets, weights, strict=True))
    ]


def _sample(examples: list[Example], number: int, rng: random.Random) -> list[Example]:
    return [examples[n] for n in sorted(rng.sample(range(len(examples)), min(number, len(examples))))]


def _collect(dataset: DatasetSpec, index: int, *, has_chat_template: bool, spill_dir: Path | None) -> _Collector:
    collected = _Collector(dataset, index, has_chat_template=has_chat_template, spill_dir=spill_dir)
    for path in files(Path(dataset.path), split=dataset.split):
        for row, place in _read_any(path):
            if dataset.max_rows is not None and collected.num_rows >= dataset.max_rows:
                break
            collected.add(row, path, place)
    collected.check()
    return collected


class _Collector:
    """One data set's rows as they are read: the examples, and the bad ones with their places."""

    def __init__(
        self, dataset: DatasetSpec, index: int, *, has_chat_template: bool, spill_dir: Path | None = None
    ) -> None:
        self._dataset, self._index, self._has_chat_template = dataset, index, has_chat_template
        self._spill_dir = spill_dir
        self._media_dirs = functools.cache(lambda path: dataset.media_dirs(path.parent))
        self.format: str = "" if dataset.format == "auto" else dataset.format
        self.examples: list[Example] = []
        self.num_rows = 0
        self.num_bad = 0
        self.bad: list[str] = []

    def add(self, row: Any, path: Path, place: str) -> Example | None:
        self.num_rows += 1
        try:
            self.examples.append(self._example(row, path))
        except RowError as error:
            self.num_bad += 1
            if len(self.bad) < MAX_NAMED:
                self.bad.append(f"{path.name}, {place}: {error}")
            return None
        return self.examples[-1]

    def check(self) -> None:
        """Raises DatasetError where no row is good, or more than half are bad."""
        if not self.num_rows:
            raise DatasetError(
                f"{self._dataset.path}: there is no row in it", hint="was it written to its end? Or name another file"
            )
        if self.num_bad * 2 > self.num_rows or not self.examples:
            raise DatasetError(
                f"{self._dataset.path}: {self.num_bad} of {self.num_rows} rows cannot be used"
                f"{f' as {self.format}' if self.format else ''}: {'; '.join(self.bad)}",
                hint=f"`format` and `columns` of a data set say how its rows are read. {FORMATS_HINT}",
            )

    def _example(self, row: Any, path: Path) -> Example:
        if not isinstance(row, dict):
            raise RowError(f"a row is an object with columns, this is {kind_of(row)}")
        columns = self._dataset.columns
        if not self.format:
            try:
                self.format = recognise(row, columns)
            except DatasetError as error:
                raise RowError(error.message) from error
        made = fields(
            row,
            self.format,
            columns,
            has_chat_template=self._has_chat_template,
            directories=self._media_dirs(path),
        )
        if self._spill_dir is not None and made.get("media"):
            made["media"] = tuple(spill(each, self._spill_dir) for each in made["media"])
        return Example(**made, dataset_index=self._index, row_index=self.num_rows - 1)
