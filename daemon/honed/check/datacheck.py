"""Checks of a job's data sets: their first rows, the attached media, and the faults in them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed.check.policy import Named, Policy
from honed.inputs import basemodel, datadir, dataset
from honed.inputs.basemodel import BaseModelInfo
from honed.inputs.datadir import files_of
from honed.inputs.media import PLURAL
from honed.inputs.row import unread_message
from honed.job.plan_file import RowNeeds
from honed.plan import activation, prefix, row_needs
from honed.plan.activation import Row
from honed.spec.data_form import form_of
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system import quote
from honed.system.error import DatasetError

#: Rows of a data set that are checked.
NUM_ROWS = 200
#: Bytes of text per token, and tokens of the chat template per turn. Both lead to low estimates of a row's tokens,
#: since a job must not be refused for tokens that it does not have.
BYTES_PER_TOKEN = 4
TOKENS_PER_TURN = 4
#: Data sets that are remembered, and nanoseconds for which a file must have been unchanged for that: a change within
#: one tick of its file system's clock leaves no trace, and a change through a memory mapping leaves none for some
#: seconds. The worker, which reads every row, finds any change missed here.
MAX_REMEMBERED = 256
#: Characters of unread columns' names, in a data set that is remembered.
MAX_TOLD = 1000
SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class Looked:
    """The findings in the first rows of a job's data sets."""

    warnings: list[str]  #: about faults in some of them
    num_row_tokens: int | None  #: estimated tokens of the longest row, without media
    num_rows: int | None  #: in all data sets; None if not every row was read
    attached: list[Row]  #: the rows with images, videos or sounds
    num_train_rows: int | None = None  #: rows to train on; None if not every row was read
    is_sampled: bool = False  #: True if a data set has more rows than the first ones, which were checked
    needs: RowNeeds | None = None  #: of all rows; None if a data set is missing, or has no rows of text


@dataclass(frozen=True)
class _Seen:
    """The findings in one data set's first rows."""

    inspection: dataset.Inspection
    num_row_tokens: int | None  #: as in Looked
    has_conversations: bool  #: a chat template has to render them
    row_bytes: float = 0.0  #: of the text of a row, on average; 0 if there is none
    row_tokens: float = 0.0  #: estimated tokens of a row, on average


class Cache:
    """The findings in data sets whose files have not changed since: each job of a sweep names the same data set.

    Only data sets without findings to report and without media are remembered, since media files lie elsewhere. An
    entry is a digest and a few numbers, however many the files are.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, _Seen] = {}
        self._rendered: dict[bytes, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def rendered(self, key: bytes) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return what rowcheck found in the same rows, rendered by the same template; None if it is not remembered."""
        return self._rendered.get(key)

    def remember(self, key: bytes, warnings: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        if sum(map(len, [*warnings[0], *warnings[1]])) <= MAX_TOLD:
            self._rendered[key] = warnings
        while len(self._rendered) > MAX_REMEMBERED:
            del self._rendered[next(iter(self._rendered))]

    def look(self, data_spec: DatasetSpec, paths: Sequence[Path], rights: Policy) -> _Seen:
        """Return the findings, remembered or new. Raises DatasetError. The caller has checked the rights to the
        files."""
        key, is_settled = identity(data_spec, paths, rights)
        if (seen := self._seen.pop(key, None)) is None:
            seen = _look(data_spec, rights)
            inspection = seen.inspection
            is_clean = not (
                inspection.num_attached
                or inspection.bad
                or inspection.overlooked
                or inspection.absent
                or inspection.num_untrained
                or sum(map(len, inspection.unread)) > MAX_TOLD
                or inspection.census.orders
                or inspection.num_unpaired
                or inspection.num_nulled
            )
            if not is_settled or not is_clean or identity(data_spec, paths, rights)[0] != key:
                return seen
            seen = replace(seen, inspection=replace(inspection, rows=[], columns=(), examples=()))
        self._seen[key] = seen
        while len(self._seen) > MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        return seen


def identity(data_spec: DatasetSpec, paths: Sequence[Path], rights: Policy) -> tuple[bytes, bool]:
    """Return a digest of the submitter, the data set's spec and the state of its files, and True if the files were left
    alone long enough. One submitter's findings are never reported to another."""
    digest, changed_ns = hashlib.sha256(data_spec.model_dump_json().encode()), 0
    digest.update(repr((data_spec.row_form, rights.dropper)).encode())
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
    """Check the first rows of all data sets. Raises DatasetError, which names the data set's key."""
    cache = cache or Cache()
    warnings: list[str] = []
    lengths: list[int] = []
    attached: list[Row] = []
    num_rows: int | None = 0
    num_train_rows: int | None = None
    inspected: dict[str, tuple[DatasetSpec, dataset.Inspection]] = {}
    looked: dict[str, list[tuple[DatasetSpec, _Seen]]] = {"datasets": [], "eval_datasets": []}
    num_missing = 0
    for key, datasets in (("datasets", job_spec.datasets), ("eval_datasets", job_spec.eval_datasets)):
        for number, item in enumerate(datasets):
            if item.is_missing:
                num_rows, num_missing = None, num_missing + 1
                continue
            name = f"{key}.{number}"
            try:
                warnings += [f"{name}: {warning}" for warning in _check_names(key, item)]
                seen = _check_dataset(item, rights, cache, has_chat_template=has_chat_template)
                inspection = seen.inspection
                if model is not None:
                    prefix.check_row(model.model_type, inspection.most_turns[1], inspection.most_turns[0])
                noted = [*_overlooked(model, inspection), *_untrained(item, inspection), *_told_together(inspection)]
                warnings += [f"{name}: {warning}" for warning in noted]
                warnings += _check_attached(job_spec, model, item, inspection)
            except DatasetError as error:
                fix = {_within(name, key): value for key, value in error.fix.items()}
                raise DatasetError(f"{name}: {error.said}", hint=error.hint, fix=fix) from error
            warnings += [f"{name}: {bad}" for bad in inspection.bad]
            lengths += [] if seen.num_row_tokens is None else [seen.num_row_tokens]
            attached += [Row(_num_tokens(list(row.texts)), row.media) for row in inspection.attached]
            num_rows = num_rows + inspection.num_rows if num_rows is not None and inspection.is_whole else None
            inspected[name] = (item, inspection)
            looked[key].append((item, seen))
        num_train_rows = num_rows if key == "datasets" else num_train_rows
    warnings += _check_held_out(job_spec, inspected)
    is_sampled = any(not inspection.is_whole for _, inspection in inspected.values())
    needs = _needs(job_spec, looked) if num_missing == 0 else None
    return Looked(warnings, max(lengths, default=None), num_rows, attached, num_train_rows, is_sampled, needs)


def _needs(job_spec: JobSpec, looked: Mapping[str, Sequence[tuple[DatasetSpec, _Seen]]]) -> RowNeeds | None:
    """Return what the encoded rows will take; None where rows have media, which depend on the processor."""
    total: RowNeeds | None = None
    for pairs in looked.values():
        if any(seen.inspection.num_attached or not seen.row_bytes for _, seen in pairs):
            return None
        extents = [_extent(pair, seen) for pair, seen in pairs]
        training = job_spec.training
        needs = row_needs.estimate(extents, max_length=training.cut_at, is_packed=training.packing)
        if extents:
            total = needs if total is None else total + needs
    return total


def _extent(data_spec: DatasetSpec, seen: _Seen) -> row_needs.Extent:
    inspection = seen.inspection
    number = (
        inspection.num_rows
        if inspection.is_whole
        else max(inspection.num_rows, round(inspection.num_bytes / seen.row_bytes))
    )
    if data_spec.max_rows is not None:
        number = min(number, data_spec.max_rows)
    whole = [path.stat().st_size for path in files_of(data_spec) if form_of(path) == ".json"]
    return row_needs.Extent(number, seen.row_bytes, seen.row_tokens, data_spec.fraction, max(whole, default=0))


def _within(name: str, key: str) -> str:
    """Return the full key that a data set's fix sets: a key of the data set, or one of another section."""
    return f"{name}.{key}" if key.partition(".")[0] in DatasetSpec.model_fields else key


def _num_tokens(row: Any) -> int:
    """Return the estimated tokens of a row, without its tokenizer: few tokenizers have fewer bytes per token."""
    match row:
        case str():
            return math.ceil(len(row.encode(errors="replace")) / BYTES_PER_TOKEN)
        case dict():
            return sum(_num_tokens(value) for value in row.values())
        case list():
            return sum(_num_tokens(value) + TOKENS_PER_TURN for value in row)
        case _:
            return 0


def _check_names(key: str, data_spec: DatasetSpec) -> list[str]:
    """Return warnings about the splits that the names of a data set's files suggest. Raises DatasetError if the names
    clearly mean more than one split and the job does not name one."""
    path, paths = data_spec.place, files_of(data_spec)
    warnings = [
        f"{data_spec.path}: {name}/ also contains data files, which are not read: to read them, add the directory as "
        "its own data set"
        for name in datadir.unread(path, paths)
        if data_spec.split is None
    ]
    if key == "datasets" and data_spec.split is None and (word := datadir.held_out_word(path, paths)) is not None:
        warnings.append(f"{data_spec.path}: is used for training, but its name contains `{word}`: is it held-out data?")
    if data_spec.split is not None or (fault := datadir.mixed(path, paths)) is None:
        return warnings
    if not fault.is_certain:
        what = "trained on" if key == "datasets" else "evaluated on"
        warnings.append(f"{data_spec.path}: {fault.example} is {what}, too, but its name suggests held-out data")
        return warnings
    meant, others = (fault.train, fault.held_out) if key == "datasets" else (fault.held_out, fault.train)
    lines = " or ".join(f"`split: {split}`" for split in meant)
    beside = f"; `eval_datasets: [{{path: {data_spec.path}, split: {others[0]}}}]` evaluates on the other one"
    raise DatasetError(
        f"{data_spec.path}: some file names suggest held-out data ({fault.example}), and `split` is not set",
        hint=f"write {lines} below its path{beside if key == 'datasets' else ''}; to read all files, add each one as "
        "its own data set",
        fix={"split": meant[0]} if len(meant) == 1 else None,
    )


def _check_dataset(data_spec: DatasetSpec, rights: Policy, cache: Cache, *, has_chat_template: bool) -> _Seen:
    paths = files_of(data_spec)
    for path in paths:  # the path may be a symbolic link
        rights.check_read(Named("path", path, DatasetError))
    seen = cache.look(data_spec, paths, rights)
    if not has_chat_template and seen.has_conversations:
        raise DatasetError(
            f"{data_spec.path}: rows of {seen.inspection.format} need a chat template, but the base model has none",
            hint="set chat_template: to a template file, with the model's placeholder where a row has an image "
            "(docs/guides/vision.md has PaliGemma's)"
            if seen.inspection.num_attached
            else "set chat_template: to a template file, or use prompt/completion or text rows",
        )
    return seen


def _look(data_spec: DatasetSpec, rights: Policy) -> _Seen:
    inspection = dataset.inspect(
        data_spec, num_rows=NUM_ROWS, permit=lambda path: rights.check_read(Named("a row", path, DatasetError))
    )
    tokens = [_num_tokens(row) for row in inspection.rows]
    texts = [len(json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace")) for row in inspection.rows]
    return _Seen(
        inspection, max(tokens, default=None), _needs_template(inspection, data_spec), _mean(texts), _mean(tokens)
    )


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _overlooked(model: BaseModelInfo | None, inspection: dataset.Inspection) -> list[str]:
    """Return warnings about media in the rows that are not read (not for a text model), and about absent columns."""
    warnings = list(inspection.overlooked) if model is None or model.has_vision or model.has_audio else []
    return warnings + [
        f"`columns` names `{quote.name(item)}`, and none of the {inspection.num_rows} rows has that column"
        for item in inspection.absent
    ]


def _untrained(data_spec: DatasetSpec, inspection: dataset.Inspection) -> list[str]:
    """Return warnings about row content that does not affect training, and rows that are not trained on.

    Raises DatasetError if no row is left.
    """
    warnings = [unread_message(inspection.unread, inspection.format)] if inspection.unread else []
    if not inspection.num_untrained:
        return warnings
    said = f"{inspection.num_untrained} of the first {inspection.num_rows} rows have weight 0 on every assistant turn"
    if inspection.num_untrained == inspection.num_rows and inspection.is_whole:
        raise DatasetError(
            f"{data_spec.path}: {said}: nothing is left to train on", hint="remove `weight` from the turns to train on"
        )
    return [*warnings, f"{said}, and are skipped"]


def _told_together(inspection: dataset.Inspection) -> list[str]:
    """Return warnings about rows compared with one another: their order, repetitions, preference pairs."""
    orders, seen = inspection.census.order_messages(), "" if inspection.is_whole else "the first "
    if inspection.census.has_many_twice:
        orders.append(f"{inspection.census.num_twice} of {seen}{inspection.num_rows} rows repeat an earlier row")
    if inspection.num_unpaired:
        orders.append(
            f"{inspection.num_unpaired} rows have a boolean `label`, as in preference data (KTO), which is not "
            "supported yet: the label is ignored, so completions labelled false are trained on as well"
        )
    if inspection.num_nulled:
        orders.append(f"of {seen}{inspection.num_rows} rows, {dataset.nulled_message(inspection.num_nulled)}")
    return orders


def _check_held_out(job_spec: JobSpec, inspected: Mapping[str, tuple[DatasetSpec, dataset.Inspection]]) -> list[str]:
    """Return warnings about held-out rows that are also trained on. Raises DatasetError if `eval_split` has no rows to
    hold out."""
    trained = {name: inspection for name, (_, inspection) in inspected.items() if name.startswith("datasets.")}
    is_all = not any(item.is_missing for item in job_spec.datasets)
    if job_spec.eval_split is not None and is_all and all(inspection.is_whole for inspection in trained.values()):
        num_rows = sum(inspection.census.num_rows for inspection in trained.values())
        said = {digest for inspection in trained.values() for digest in inspection.census.digests}
        if len(said) < 2:
            what = "there is one row" if num_rows == 1 else f"all {num_rows} rows are identical"
            raise DatasetError(
                f"eval_split: {what}, so none can be held out",
                hint="remove eval_split, or add rows",
                fix={"eval_split": None},
            )
    warnings = []
    for name, (item, inspection) in inspected.items():
        for other, theirs in trained.items() if name.startswith("eval_datasets.") else ():
            if shared := _shared(item, inspected[other][0]):
                warnings.append(f"{name}: {shared} is also trained on ({other}): the metrics measure memorization")
            elif num_shared := inspection.census.num_in(theirs.census):
                seen = "" if inspection.is_whole and theirs.is_whole else "the first "
                warnings.append(
                    f"{name}: {num_shared} of {seen}{inspection.census.num_rows} rows are also trained on ({other}): "
                    "the metrics measure memorization"
                )
    return warnings


def _shared(held_out: DatasetSpec, trained: DatasetSpec) -> str:
    places = {_place(file) for file in files_of(trained)}
    return str(next((file for file in files_of(held_out) if _place(file) in places), ""))


def _place(file: Path) -> tuple[int, int]:
    info = file.stat()
    return info.st_dev, info.st_ino


def _check_attached(
    job_spec: JobSpec, model: BaseModelInfo | None, data_spec: DatasetSpec, inspection: dataset.Inspection
) -> list[str]:
    """Return warnings about the images, videos and sounds in a data set's first rows. Raises DatasetError."""
    if not inspection.num_attached:
        return []
    kinds = {facts.kind for seen in inspection.attached for facts in seen.media}
    for kind in sorted(kinds):
        if model is not None and not (model.has_audio if kind == "audio" else model.has_vision):
            raise DatasetError(
                f"{data_spec.path}: rows with {PLURAL[kind]}, which {model.path} does not support",
                hint="use a vision or audio model as base_model, or use text rows",
            )
    if model is not None and model.lacks_processor:
        raise DatasetError(
            f"{data_spec.path}: rows with {' and '.join(PLURAL[kind] for kind in sorted(kinds)) or 'media'}, but "
            f"{model.path} has {basemodel.NO_PROCESSOR}",
            hint="copy the processor's files from the model's source, or use rows of text",
        )
    if job_spec.training.packing or job_spec.training.padding_free:
        key = "packing" if job_spec.training.packing else "padding_free"
        raise DatasetError(
            f"{data_spec.path}: rows with {' and '.join(PLURAL[kind] for kind in sorted(kinds)) or 'media'} and "
            f"training.{key}: such rows cannot be packed",
            hint=f"remove training.{key}",
            fix={f"training.{key}": None},
        )
    warnings = _too_long(job_spec, model, data_spec, inspection)
    if not inspection.num_broken:
        return warnings
    broken = f"{inspection.num_broken} of the first {inspection.num_attached} rows with media have an unusable file"
    named = "; ".join(inspection.broken)
    if job_spec.media.broken == "refuse" or inspection.num_broken == inspection.num_attached:
        hint = "relative paths are resolved against the data file's directory, or the data set's `media_dir`"
        raise DatasetError(f"{data_spec.path}: {broken}: {named}", hint=hint) from inspection.media_fault
    return [*warnings, f"{data_spec.path}: {broken}, and will be skipped: {named}"]


def _too_long(
    job_spec: JobSpec, model: BaseModelInfo | None, data_spec: DatasetSpec, inspection: dataset.Inspection
) -> list[str]:
    """Return a warning if rows seem too long for their media. The worker counts them exactly after loading the
    model."""
    cut_at = job_spec.training.cut_at
    if model is None or cut_at is None or not inspection.attached:
        return []
    tokens = [activation.media_cost(Row(0, seen.media), job_spec, model).tokens for seen in inspection.attached]
    too_long = [number for number in tokens if number > cut_at]
    if not too_long:
        return []
    what = "will be skipped" if job_spec.media.too_long == "drop" else "end the job"
    return [
        f"{data_spec.path}: {len(too_long)} of {len(tokens)} rows with media are probably longer than max_length "
        f"({cut_at}) from their media alone (up to {max(too_long)} tokens), and {what}: increase "
        "training.max_length, or reduce pixels and frames (`media:`)"
    ]


def _needs_template(inspection: dataset.Inspection, data_spec: DatasetSpec) -> bool:
    if inspection.num_attached:
        return True
    for row in inspection.rows:
        with contextlib.suppress(DatasetError):
            example = dataset.convert(row, inspection.format, columns=data_spec.columns, has_chat_template=False)
            return example.kind == "messages"
    return inspection.format in ("messages", "sharegpt")
