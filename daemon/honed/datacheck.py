"""The data sets that a job names: their first rows, what is attached to them, and what is wrong with some."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed import activation, dataset
from honed.activation import Row
from honed.basemodel import BaseModelInfo
from honed.error import DatasetError
from honed.media import PLURAL, Kind
from honed.policy import Named, Policy
from honed.spec import DatasetSpec, JobSpec

#: Rows of a data set that are looked at.
NUM_ROWS = 200
#: Bytes of text that a token stands for, and tokens of the chat template around a turn; both on the small side of what
#: tokenizers give, since a job is not to be refused for tokens that it has not.
BYTES_PER_TOKEN = 4
TOKENS_PER_TURN = 4
#: Data sets that are remembered, and nanoseconds for which a file must have been left alone for that: a change within
#: one tick of its file system's clock leaves no trace, nor for some seconds does one through a mapping. What is missed
#: here the worker finds, which reads every row.
MAX_REMEMBERED = 256
SETTLED_NS = 2_000_000_000
#: What a model must have for each kind of media, in words.
_SENSES: Mapping[Kind, str] = {"image": "does not see", "video": "does not see", "audio": "does not hear"}


@dataclass(frozen=True)
class Looked:
    """What the first rows of a job's data sets say."""

    warnings: list[str]  #: what is wrong with some of them
    num_row_tokens: int | None  #: about how many tokens the longest without media has
    num_rows: int | None  #: in all, where all were looked at
    attached: list[Row]  #: those with images, videos or sounds


@dataclass(frozen=True)
class _Seen:
    """One data set's first rows."""

    found: dataset.Inspection
    num_row_tokens: int | None  #: as Looked has it
    has_conversations: bool  #: so that a chat template must render them


class Cache:
    """What was found in data sets whose files have not changed since: each job of a sweep names the same one.

    Only where there is nothing to tell of, and no media, whose files lie elsewhere: what is kept is a digest and a few
    numbers, however many the files.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, _Seen] = {}

    def look(self, each: DatasetSpec, paths: Sequence[Path], rights: Policy) -> _Seen:
        """Raises DatasetError. Whether the files may be read was asked before."""
        key, is_settled = _identity(each, paths)
        if (seen := self._seen.pop(key, None)) is None:
            seen = _look(each, rights)
            found = seen.found
            is_clean = not (found.num_attached or found.bad or found.overlooked or found.absent)
            if not is_settled or not is_clean or _identity(each, paths)[0] != key:
                return seen
            seen = replace(seen, found=replace(found, rows=[], columns=()))
        self._seen[key] = seen
        while len(self._seen) > MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return seen


def _identity(each: DatasetSpec, paths: Sequence[Path]) -> tuple[bytes, bool]:
    """A digest of the data set as a job names it and of its files as they are, and whether these were left alone."""
    digest, changed_ns = hashlib.sha256(each.model_dump_json().encode()), 0
    for path in paths:
        info = path.stat()
        changed_ns = max(changed_ns, info.st_ctime_ns)
        facts = (path, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        digest.update(repr(facts).encode(errors="surrogateescape"))
    return digest.digest(), time.time_ns() - changed_ns > SETTLED_NS


def check(
    job_spec: JobSpec,
    model: BaseModelInfo | None,
    rights: Policy,
    *,
    has_chat_template: bool,
    cache: Cache | None = None,
) -> Looked:
    """Raises DatasetError, which names the key of the data set."""
    cache = cache or Cache()
    warnings: list[str] = []
    lengths: list[int] = []
    attached: list[Row] = []
    num_rows: int | None = 0
    for key, datasets in (("datasets", job_spec.datasets), ("eval_datasets", job_spec.eval_datasets)):
        for number, each in enumerate(datasets):
            name = f"{key}.{number}"
            try:
                seen = _check_dataset(each, rights, cache, has_chat_template=has_chat_template)
                found = seen.found
                warnings += [f"{name}: {told}" for told in _overlooked(model, found)]
                warnings += _check_attached(job_spec, model, each, found)
            except DatasetError as error:
                raise DatasetError(f"{name}: {error.message}", hint=error.hint) from error
            warnings += [f"{name}: {bad}" for bad in found.bad]
            lengths += [] if seen.num_row_tokens is None else [seen.num_row_tokens]
            attached += [Row(_num_tokens(list(row.texts)), row.media) for row in found.attached]
            num_rows = num_rows + found.num_rows if num_rows is not None and found.num_rows < NUM_ROWS else None
    return Looked(warnings, max(lengths, default=None), num_rows, attached)


def _num_tokens(row: Any) -> int:
    """Of a row, without its tokenizer: few have fewer bytes a token."""
    match row:
        case str():
            return math.ceil(len(row.encode(errors="replace")) / BYTES_PER_TOKEN)
        case dict():
            return sum(_num_tokens(value) for value in row.values())
        case list():
            return sum(_num_tokens(value) + TOKENS_PER_TURN for value in row)
        case _:
            return 0


def _check_dataset(each: DatasetSpec, rights: Policy, cache: Cache, *, has_chat_template: bool) -> _Seen:
    paths = dataset.files(Path(each.path), split=each.split)
    for path in paths:  # one of them may be a link to elsewhere
        rights.check_read(Named("path", path, DatasetError))
    seen = cache.look(each, paths, rights)
    if not has_chat_template and seen.has_conversations:
        raise DatasetError(
            f"{each.path}: rows of {seen.found.format} are rendered by a chat template, and the base model has none",
            hint="name a file with one as chat_template:, or use rows of prompt and completion, or of text",
        )
    return seen


def _look(each: DatasetSpec, rights: Policy) -> _Seen:
    found = dataset.inspect(
        each, num_rows=NUM_ROWS, permit=lambda path: rights.check_read(Named("a row", path, DatasetError))
    )
    longest = max(map(_num_tokens, found.rows), default=None)
    return _Seen(found, longest, _needs_template(found, each))


def _overlooked(model: BaseModelInfo | None, found: dataset.Inspection) -> list[str]:
    """What is in the rows, or should be, and is not read. A model for text passes over images with good reason."""
    told = list(found.overlooked) if model is None or model.has_vision or model.has_audio else []
    return told + [f"`columns` names `{each}`, and none of the {found.num_rows} rows has it" for each in found.absent]


def _check_attached(
    job_spec: JobSpec, model: BaseModelInfo | None, each: DatasetSpec, found: dataset.Inspection
) -> list[str]:
    """Of the images, videos and sounds in a data set's first rows: what is wrong with some, as warnings."""
    if not found.num_attached:
        return []
    kinds = {facts.kind for seen in found.attached for facts in seen.media}
    for kind in sorted(kinds):
        if model is not None and not (model.has_audio if kind == "audio" else model.has_vision):
            raise DatasetError(
                f"{each.path}: rows with {PLURAL[kind]}, and {model.path} is a model that {_SENSES[kind]}",
                hint="take a vision or audio model as base_model, or rows of text",
            )
    if job_spec.training.packing or job_spec.training.padding_free:
        key = "packing" if job_spec.training.packing else "padding_free"
        raise DatasetError(
            f"{each.path}: rows with {' and '.join(PLURAL[kind] for kind in sorted(kinds)) or 'media'} and "
            f"training.{key}: they are not put into one row with others",
            hint=f"leave {key} out",
        )
    warnings = _too_long(job_spec, model, each, found)
    if not found.num_broken:
        return warnings
    told = f"{found.num_broken} of the first {found.num_attached} rows with media have a file that cannot be used"
    named = "; ".join(found.broken)
    if job_spec.media.broken == "refuse" or found.num_broken == found.num_attached:
        hint = "paths start from the data file's directory, or from the data set's `media_dir`"
        raise DatasetError(f"{each.path}: {told}: {named}", hint=hint)
    return [*warnings, f"{each.path}: {told}, and will be left out: {named}"]


def _too_long(
    job_spec: JobSpec, model: BaseModelInfo | None, each: DatasetSpec, found: dataset.Inspection
) -> list[str]:
    """That rows seem to be too long for their media. They are counted for good once the model is loaded."""
    cut_at = job_spec.training.cut_at
    if model is None or cut_at is None or not found.attached:
        return []
    tokens = [activation.media_cost(Row(0, seen.media), job_spec, model).tokens for seen in found.attached]
    too_long = [number for number in tokens if number > cut_at]
    if not too_long:
        return []
    what = "will be left out" if job_spec.media.too_long == "drop" else "end the job"
    return [
        f"{each.path}: {len(too_long)} of {len(tokens)} rows with media seem to be longer than max_length ({cut_at}) "
        f"by their media alone (up to {max(too_long)} tokens), and {what}: a longer training.max_length, or fewer "
        "pixels and frames (`media:`), keeps them"
    ]


def _needs_template(found: dataset.Inspection, each: DatasetSpec) -> bool:
    if found.num_attached:
        return True
    for row in found.rows:
        with contextlib.suppress(DatasetError):
            example = dataset.convert(row, found.format, columns=each.columns, has_chat_template=False)
            return example.kind == "messages"
    return found.format in ("messages", "sharegpt")
