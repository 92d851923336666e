"""Encoded rows in Arrow files, memory-mapped: of a million rows, a few numbers per row are held in memory.

    rows/<key>/tokens.arrow     input_ids and labels, as the trainer reads them; beside media `source`; of rows with
                                several answers, which lie end to end, the tokens of each
               rows.arrow       every row as it was read, its numbers, and remarks (see record.py)
               MANIFEST.json    the sizes and hashes of the two, and what was read to make them

The key is a hash of all that decides what the rows become (see cache.py). An entry is written in `.new`, and renamed
when it is whole. It is not synced: an entry that a crash has damaged differs from its hashes, and is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from honed.inputs.dataset import Counts
from honed.inputs.row import Example
from honed.job import tree
from honed.worker.rows import record
from honed.worker.rows.record import NUMBERS, Batch, Remark

if TYPE_CHECKING:
    from collections.abc import Callable

MANIFEST, TOKENS, ROWS = "MANIFEST.json", "tokens.arrow", "rows.arrow"
_IDS = pa.list_(pa.int32())
_TOKENS_SCHEMA = pa.schema({"input_ids": _IDS, "labels": _IDS, "source": pa.int32(), "answers": _IDS})
_ROWS_SCHEMA = pa.schema(
    {"example": pa.binary(), "remark": pa.binary()} | {name: pa.type_for_alias(kind) for name, kind in NUMBERS.items()}
)
_READ_BYTES = 2**22


class DamagedError(Exception):
    """An entry whose files are not those that were written."""


class Table:
    """Rows in an entry's directory."""

    def __init__(self, directory: Path, counts: Sequence[Counts]) -> None:
        self.directory = directory
        self.counts = tuple(counts)  #: of the data sets that were read
        self._rows = pa.ipc.open_stream(pa.memory_map(str(directory / ROWS))).read_all()

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a number of every row."""
        return np.concatenate([np.zeros(0, NUMBERS[name]), *(c.to_numpy() for c in self._rows[name].chunks)])

    def example(self, index: int) -> Example:
        return record.unpacked(self._rows["example"][index].as_py())

    def remark(self, index: int) -> Remark:
        blob = self._rows["remark"][index].as_py()
        return Remark() if blob is None else record.remark_of(blob)

    @cached_property
    def remarked(self) -> npt.NDArray[np.bool_]:
        """True per row that has a remark."""
        chunks = (chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in self._rows["remark"].chunks)
        return np.concatenate([np.zeros(0, bool), *chunks])

    def dataset(self, *further: str) -> Any:
        """Return the rows' tokens as a datasets.Dataset, with further columns: `source`, `answers`."""
        from datasets import Dataset

        return Dataset.from_file(str(self.directory / TOKENS)).select_columns(["input_ids", "labels", *further])


class Examples(Sequence[Example]):
    """The examples of some rows of a table, each read when it is asked for."""

    def __init__(self, table: Table, indices: npt.NDArray[np.int64]) -> None:
        self._table, self._indices = table, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Examples: ...
    def __getitem__(self, index: int | slice) -> Example | Examples:
        if isinstance(index, slice):
            return Examples(self._table, self._indices[index])
        return self._table.example(int(self._indices[index]))

    def __iter__(self) -> Iterator[Example]:
        return (self._table.example(int(index)) for index in self._indices)


@dataclass
class _File:
    """A file that is hashed as it is written."""

    path: Path

    def __post_init__(self) -> None:
        self._file, self._hash, self._size = self.path.open("wb"), hashlib.sha256(), 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self.closed = True

    @property
    def seal(self) -> dict[str, int | str]:
        return {"size": self._size, "sha256": self._hash.hexdigest()}


class Writer:
    """An entry while it is made. Raises OSError where there is no room; after a crash `.new` is left."""

    def __init__(self, rows_dir: Path) -> None:
        self._new = rows_dir / ".new"
        tree.remove(self._new)
        self._new.mkdir(parents=True)
        self._files = {name: _File(self._new / name) for name in (TOKENS, ROWS)}
        self._tokens = pa.ipc.new_stream(self._files[TOKENS], _TOKENS_SCHEMA)
        self._rows = pa.ipc.new_stream(self._files[ROWS], _ROWS_SCHEMA)

    def write(self, blobs: Sequence[bytes], batch: Batch) -> None:
        """Write rows, in order; `blobs` are their examples, packed."""
        offsets = np.concatenate([np.zeros(1, "int32"), np.cumsum(batch.numbers["length"], dtype="int32")])
        columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (batch.ids, batch.labels)]
        columns += [pa.array(batch.numbers["source"]), pa.array(batch.answers, _IDS)]
        self._tokens.write_batch(pa.record_batch(columns, schema=_TOKENS_SCHEMA))
        numbers = [pa.array(batch.numbers[name]) for name in NUMBERS]
        examples, remarks = pa.array(blobs, pa.binary()), pa.array(batch.remarks, pa.binary())
        self._rows.write_batch(pa.record_batch([examples, remarks, *numbers], schema=_ROWS_SCHEMA))

    def discard(self) -> None:
        """Remove what was written."""
        tree.remove(self._new)

    def finish(self, counts: Sequence[Counts], name: str) -> Table:
        """Close the entry, move it to this name, and open it."""
        for stream in (self._tokens, self._rows):
            stream.close()
        for file in self._files.values():
            file.close()
        manifest = {
            "files": {name: file.seal for name, file in self._files.items()},
            "counts": [asdict(count) for count in counts],
        }
        (self._new / MANIFEST).write_text(json.dumps(manifest))
        directory = self._new.with_name(name)
        tree.remove(directory)
        self._new.rename(directory)
        return Table(directory, counts)


def load(directory: Path, beat: Callable[[], None]) -> Table | None:
    """Return the rows of an entry; None if there is none. Raises DamagedError unless its files are as written."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        for name in (TOKENS, ROWS):
            if _seal(directory / name, beat) != manifest["files"][name]:
                raise DamagedError(f"{directory.name}/{name} has changed since it was written")
        return Table(directory, [Counts(**{**item, "bad": tuple(item["bad"])}) for item in manifest["counts"]])
    except FileNotFoundError as error:
        if directory.exists():
            raise DamagedError(f"{directory.name} lacks {Path(error.filename).name}") from error
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{directory.name} cannot be read: {error}") from error


def _seal(path: Path, beat: Callable[[], None]) -> dict[str, int | str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size += len(piece)
            beat()
    return {"size": size, "sha256": digest.hexdigest()}
