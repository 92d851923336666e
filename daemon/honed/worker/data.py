"""From the job's data sets to token ids and labels, every row accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed import dataset
from honed.chat import ChatFormat
from honed.dataset import Example
from honed.error import DatasetError, ModelError
from honed.worker.assignment import Assignment
from honed.worker.stop import Stop


@dataclass
class Rows:
    """Rows ready to train on, or to evaluate."""

    dataset: Any  #: datasets.Dataset with input_ids and labels
    examples: list[Example]  #: as long as the dataset
    truncated: list[bool]
    by_ids: dict[int, int] = field(repr=False)  #: hash of a row's token ids -> its place
    first_segments: list[dict[str, Any]]  #: the first row, taken apart
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_truncated: int = 0
    num_dropped: int = 0  #: nothing was left to train on once they were cut, or the template refuses them
    first_dropped: str = ""

    def place(self, input_ids: Sequence[int]) -> int | None:
        return self.by_ids.get(hash(tuple(input_ids)))


@dataclass(frozen=True)
class Data:
    """All that the run trains on, and is measured with."""

    train: Rows
    held_out: Rows | None
    counts: dict[str, Any]
    hashes: dict[str, str]  #: sha256 of each file, as it was when it was read


def build(assignment: Assignment, chat: ChatFormat, stop: Stop) -> Data:
    """Read, mix, split and encode. Raises DatasetError where nothing is left to train on."""
    spec = assignment.spec
    has_template = bool(chat.tokenizer.chat_template)
    hashes = {str(file): sha256(file) for each in [*spec.datasets, *spec.eval_datasets] for file in _files(each)}
    mixture = dataset.load(spec.datasets, seed=assignment.seed, has_chat_template=has_template)
    examples, held_out = list(mixture.examples), []
    if spec.eval_datasets:
        held_out = list(dataset.load(spec.eval_datasets, seed=assignment.seed, has_chat_template=has_template).examples)
    elif spec.eval_split:
        examples, held_out = dataset.split(examples, spec.eval_split, assignment.seed)
    max_length = spec.training.cut_at
    train = encode(examples, chat, max_length, stop)
    if not train.examples:
        raise DatasetError(
            f"no row is left to train on, of {len(examples)}"
            + (f"; the first: {train.first_dropped}" if train.first_dropped else ""),
            hint="a longer training.max_length, or rows with something for the assistant to say",
        )
    evaluated = encode(held_out, chat, max_length, stop) if held_out else None
    counts = {
        "num_train": len(train.examples),
        "num_eval": len(evaluated.examples) if evaluated else 0,
        "num_truncated": train.num_truncated + (evaluated.num_truncated if evaluated else 0),
        "num_dropped": train.num_dropped + (evaluated.num_dropped if evaluated else 0),
        "num_tokens": train.num_tokens,
        "num_trained_tokens": train.num_trained_tokens,
        "datasets": [_counts(count) for count in mixture.counts],
    }
    return Data(train, evaluated if evaluated and evaluated.examples else None, counts, hashes)


def check_ids(data: Data, tokenizer: Any, num_embeddings: int, base_model_path: Path) -> None:
    """Raises ModelError where a token that occurs has no row in the embeddings.

    A tokenizer may know more tokens than its model, as long as nobody uses them: Gemma 3's and CodeLlama's do.
    """
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id} - {None}
    for rows in (data.train, data.held_out):
        used |= {max(ids) for ids in rows.dataset["input_ids"]} if rows is not None else set()
    if max(used) >= num_embeddings:
        token = tokenizer.convert_ids_to_tokens(max(used))
        raise ModelError(
            f"{base_model_path}: token {token!r} has the number {max(used)}, the embeddings only {num_embeddings} rows",
            hint="the tokenizer is another model's, or tokens were added to it without resizing the model",
        )


def encode(examples: Sequence[Example], chat: ChatFormat, max_length: int | None, stop: Stop) -> Rows:
    """Token ids and labels, the first `max_length` of them. A row with nothing left that can be learned is dropped."""
    from datasets import Dataset

    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    rows = Rows(None, [], [], {}, [])
    for example in examples:
        stop.check()
        try:
            whole = chat.encode(example)
        except DatasetError as error:
            if example.kind == "messages":
                chat.require_template()  # where no conversation can be rendered at all, that is the error
            rows.num_dropped += 1
            rows.first_dropped = rows.first_dropped or error.message
            continue
        cut = whole.truncate(max_length)
        is_cut = len(cut.input_ids) < len(whole.input_ids)
        rows.num_truncated += is_cut
        if not any(cut.trained[1:]):  # the first token is never predicted
            rows.num_dropped += 1
            rows.first_dropped = rows.first_dropped or (
                f"data set {example.dataset_index + 1}, row {example.row_index + 1}: nothing to train on "
                f"in its first {max_length} tokens"
            )
            continue
        rows.by_ids[hash(tuple(cut.input_ids))] = len(rows.examples)
        rows.first_segments = rows.first_segments or cut.segments()
        rows.examples.append(example)
        rows.truncated.append(is_cut)
        rows.num_tokens += len(cut.input_ids)
        rows.num_trained_tokens += sum(cut.trained[1:])
        columns["input_ids"].append(cut.input_ids)
        columns["labels"].append(cut.labels)
    rows.dataset = Dataset.from_dict(columns)
    return rows


def _counts(count: Any) -> dict[str, Any]:
    return {name: getattr(count, name) for name in ("num_rows", "num_taken", "num_bad") if hasattr(count, name)}


def _files(each: Any) -> list[Path]:
    return dataset.files(Path(each.path), split=each.split)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
