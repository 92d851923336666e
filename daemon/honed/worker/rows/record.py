"""One encoded row as plain numbers and bytes, and batches of them, as processes pass them on and Arrow files hold them.

A row's example, and remarks on the few rows that need one, are pickled. They are read back with an allowlist of
classes, so that a file can hold nothing that runs.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from honed.inputs import census
from honed.inputs.media import MediaError
from honed.inputs.row import Example
from honed.system.error import DatasetError
from honed.text.asking import Mismatch
from honed.text.chat import IGNORED, Encoded, MediaCutError
from honed.text.omission import Omission, SilencedError
from honed.text.template import where

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The kinds of rows and the odd orders of their roles, by the number that stands for each; 0 is no odd order.
KINDS = ("messages", "prompt_completion", "text")
ORDERS: tuple[census.Order | None, ...] = (None, *census.ORDERS)

#: Classes that a pickled row may contain; tables have values of the latter ones.
_ALLOWED = {
    *(("honed.inputs.message", "Arguments"), ("honed.inputs.media", "Media"), ("pathlib", "PosixPath")),
    *(("honed.text.omission", "Omission"), ("honed.text.asking", "Mismatch"), ("honed.worker.rows.record", "Remark")),
    *(("datetime", name) for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *(("decimal", "Decimal"), ("uuid", "UUID"), ("zoneinfo", "ZoneInfo")),
    ("pandas._libs.tslibs.timestamps", "_unpickle_timestamp"),
    ("pandas._libs.tslibs.timedeltas", "_timedelta_unpickle"),
}


class Fate(IntEnum):
    """The use that is made of a row."""

    KEPT = 0
    CUT_OFF = 1  #: nothing is left to train on after truncation
    BROKEN = 2  #: a file of its media is missing or cannot be read
    TOO_LONG = 3  #: truncation would cut its media
    SILENCED = 4  #: the template leaves out all that a turn says
    REFUSED = 5  #: the template refuses it, or nothing of it would be trained on


class Remark(NamedTuple):
    """The part of a row's fate that is reported."""

    omitted: tuple[Omission, ...] = ()
    mismatch: Mismatch | None = None
    reason: str = ""  #: why it is skipped
    hint: str = ""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a time zone to its name: its own way asks for `getattr` when it is read."""
        return (ZoneInfo, (value.key,)) if isinstance(value, ZoneInfo) and value.key else NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a row")
        return super().find_class(module, name)


def packed(example: Example) -> bytes:
    """Return an example as bytes. Raises DatasetError for one that is nested too deeply."""
    into = io.BytesIO()
    try:
        _Pickler(into, 5).dump(tuple(getattr(example, name) for name in _FIELDS))
    except RecursionError as error:
        raise DatasetError(f"{where(example)}: nested too deeply", hint="fix or delete the row") from error
    return into.getvalue()


def unpacked(blob: bytes) -> Example:
    """Return the example that `packed` took. Raises UnpicklingError if there is anything else in it."""
    return Example(*_Unpickler(io.BytesIO(blob)).load())


def remark_of(blob: bytes) -> Remark:
    """Return the remark on a row. Raises UnpicklingError if it is anything else."""
    return _Unpickler(io.BytesIO(blob)).load()


_FIELDS = tuple(Example.__dataclass_fields__)

#: The numbers of a row, by their columns.
NUMBERS: dict[str, str] = {
    "length": "int32",  # tokens, after truncation; 0 for rows that are not kept
    "longest": "int32",  # of these, those of its longest answer
    "whole": "int32",  # tokens before truncation; 0 if the row could not be encoded
    "trained": "int32",  # tokens that are predicted and trained on
    "max_id": "int32",
    "hash": "int64",  # of the token ids
    "digest": "uint64",  # of the content
    "fate": "uint8",
    "kind": "uint8",
    "order": "uint8",
    "source": "int32",  # the number of its Source; -1 for rows of text
    "dataset": "int32",  # the number of its data set
    "tags": "uint64",  # a hash of its tags; 0 without any
}


@dataclass
class Batch:
    """Consecutive rows: the tokens and the mask of all, one after the other, and the numbers of each."""

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    numbers: dict[str, npt.NDArray[Any]]
    remarks: list[bytes | None]
    answers: list[list[int] | None]  #: of rows with several: the tokens of each

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        return np.where(self.trained, self.ids, np.int32(IGNORED))


@dataclass
class Builder:
    """Conversion of encoded rows to a Batch."""

    max_length: int | None
    _ids: array[int] = field(default_factory=lambda: array("i"))
    _trained: bytearray = field(default_factory=bytearray)
    _numbers: list[tuple[int, ...]] = field(default_factory=list)
    _remarks: list[bytes | None] = field(default_factory=list)
    _answers: list[list[int] | None] = field(default_factory=list)

    def add(self, example: Example, whole: Encoded | DatasetError, *, source: int = -1) -> Fate:
        """Add a row, or the error that makes it unusable, and return its fate."""
        cut = cut_to(whole, self.max_length)
        num_whole = 0 if isinstance(whole, DatasetError) or isinstance(cut, DatasetError) else len(whole.input_ids)
        content = (
            int.from_bytes(census.digest(example), "little"),
            KINDS.index(example.kind),
            ORDERS.index(census.order(example)),
        )
        group = example.dataset_index, _hash(example.tags)
        if isinstance(cut, DatasetError):
            return self._drop(_fate(cut), content, group, num_whole, Remark((), None, reason(example, cut), cut.hint))
        if not (num_trained := cut.num_predicted):
            why = f"{where(example)}: nothing to train on in its first {self.max_length} tokens"
            return self._drop(Fate.CUT_OFF, content, group, num_whole, Remark((), None, why))
        ids = cut.input_ids
        self._ids.extend(ids)
        self._trained += bytes(cut.trained)
        tokens = len(ids), cut.longest, num_whole, num_trained, max(ids), hash(tuple(ids))
        digest, kind, order = content
        self._numbers.append((*tokens, digest, 0, kind, order, source, *group))
        self._answers.append([len(answer.input_ids) for answer in cut.answers] or None)
        is_remarkable = cut.omitted or cut.mismatch
        self._remarks.append(pickle.dumps(Remark(cut.omitted, cut.mismatch), 5) if is_remarkable else None)
        return Fate.KEPT

    def _drop(
        self, fate: Fate, content: tuple[int, int, int], group: tuple[int, int], num_whole: int, remark: Remark
    ) -> Fate:
        digest, kind, order = content
        self._numbers.append((0, 0, num_whole, 0, 0, 0, digest, int(fate), kind, order, -1, *group))
        self._answers.append(None)
        self._remarks.append(pickle.dumps(remark, 5))
        return fate

    def batch(self) -> Batch:
        """Return the rows that were added since the last call."""
        columns: Iterable[Sequence[int]] = zip(*self._numbers, strict=True) if self._numbers else ([] for _ in NUMBERS)
        numbers = {
            name: np.array(column, dtype) for (name, dtype), column in zip(NUMBERS.items(), columns, strict=True)
        }
        ids, trained = np.array(self._ids, "int32"), np.array(self._trained, "bool")
        made = Batch(ids, trained, numbers, self._remarks, self._answers)
        self._ids, self._trained, self._numbers, self._remarks, self._answers = array("i"), bytearray(), [], [], []
        return made


def _hash(tags: tuple[str, ...]) -> int:
    """Return a hash of tags that is the same in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(tags).encode()).digest()[:8], "little") if tags else 0


def reason(example: Example, error: DatasetError) -> str:
    origin = where(example)
    return error.said if error.said.startswith(origin) else f"{origin}: {error.said}"


def cut_to(whole: Encoded | DatasetError, max_length: int | None) -> Encoded | DatasetError:
    """Return the row truncated, or the error that makes it unusable."""
    try:
        return whole if isinstance(whole, DatasetError) else whole.truncate(max_length)
    except MediaCutError as error:
        return error


def _fate(error: DatasetError) -> Fate:
    match error:
        case MediaError():
            return Fate.BROKEN
        case MediaCutError():
            return Fate.TOO_LONG
        case SilencedError():
            return Fate.SILENCED
        case _:
            return Fate.REFUSED
