"""Batches of rows with images, videos and sounds, which are decoded when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from honed.inputs.media import Media
from honed.system.error import DatasetError, HonedError
from honed.text.maskcheck import IGNORED
from honed.worker.rows.processor import Processor

Side = Literal["left", "right"]

#: Padding of the tensors that have a number per token; 0 for any other.
_FILLERS = {"labels": IGNORED}


@dataclass(frozen=True)
class Source:
    """The inputs from which a row is processed anew whenever it is needed."""

    name: str  #: for people
    text: str  #: as rendered; some templates write today's date
    media: tuple[Media, ...]
    num_tokens: int  #: of the whole row


class MediaChangedError(DatasetError):
    """A file that has changed since the rows were counted.

    Torch wraps an exception of a loader's process in a text with its traceback; the message is the last line of it.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        if message.startswith("Caught "):
            message = message.rpartition("MediaChangedError: ")[2].strip()
        super().__init__(message, hint=hint or "restore the file; honectl requeue resumes from the last checkpoint")


class Collator:
    """Collation of rows to a batch: media processed, floating inputs in the model's dtype, padding on the right."""

    def __init__(
        self,
        processor: Processor,
        sources: Sequence[Source],
        *,
        dtype: str,
        pad_token_id: int,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        self._processor = processor
        self._sources = sources
        self._dtype = dtype
        self._pad_token_id = pad_token_id
        self._multiple = pad_to_multiple_of

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return merge(
            [self._tensors(row) for row in rows],
            self._processor.names_by_token,
            side="right",
            dtype=self._dtype,
            pad_token_id=self._pad_token_id,
            pad_to_multiple_of=self._multiple,
        )

    def _tensors(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return one row's tensors, truncated as in the data stage. Raises MediaChangedError if the row has changed."""
        import torch

        ids, number = list(row["input_ids"]), row["source"]
        tensors = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([list(row["labels"])])}
        if number < 0:
            return tensors
        source = self._sources[number]
        try:
            processed = self._processor.process(source.text, source.media)
        except HonedError as error:
            raise MediaChangedError(
                f"{source.name}: {error.said}, although it was readable when the job started"
            ) from error
        whole = processed.expanded.input_ids
        if len(whole) != source.num_tokens or whole[: len(ids)] != ids:
            raise MediaChangedError(
                f"{source.name}: the tokens differ from those at the start of the job: "
                f"{', '.join(item.named for item in source.media)} has changed"
            )
        by_token = set(self._processor.names_by_token)
        more = {
            name: value[:, : len(ids)] if name in by_token else value
            for name, value in processed.tensors.items()
            if name not in tensors
        }
        return tensors | more


class AnswerCollator:
    """Collation of rows with several answers: each is a row of the batch, those of one row one after the other."""

    def __init__(self, *, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self._pad_token_id, self._multiple = pad_token_id, pad_to_multiple_of

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import torch

        answers = [
            {name: torch.tensor([row[name][start:end]]) for name in ("input_ids", "labels")}
            for row in rows
            for start, end in pairwise(accumulate(row["answers"], initial=0))
        ]
        return merge(
            answers,
            (),
            side="right",
            dtype="float32",  # of numbers other than tokens: there are none
            pad_token_id=self._pad_token_id,
            pad_to_multiple_of=self._multiple,
        )


def merge(
    rows: Sequence[Mapping[str, Any]],
    names_by_token: Sequence[str],
    *,
    side: Side,
    dtype: str,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Merge batches of one row into one batch.

    Tensors with a number per token are padded on the given side. Any other, whose length depends on the media, is
    put end to end, with zeros where another row's is larger. Floating tensors are returned in `dtype`.
    """
    import torch

    lengths = [row["input_ids"].shape[1] for row in rows]
    width = max(lengths)
    if pad_to_multiple_of:
        width = -(-width // pad_to_multiple_of) * pad_to_multiple_of
    fillers = {"input_ids": pad_token_id} | _FILLERS
    by_token = {"input_ids", "attention_mask", *names_by_token, *(["labels"] if "labels" in rows[0] else [])}
    merged: dict[str, Any] = {}
    for name in sorted(by_token):
        batch = torch.full((len(rows), width), fillers.get(name, 0), dtype=torch.int64)
        for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            cells = slice(width - length, width) if side == "left" else slice(0, length)
            if name in row:
                batch[n, cells] = row[name][0]
            elif name == "attention_mask":
                batch[n, cells] = 1
        merged[name] = batch
    for name in dict.fromkeys(name for row in rows for name in row if name not in by_token):
        merged[name] = _joined([row[name] for row in rows if name in row])
    floating = getattr(torch, dtype)
    return {
        name: value.to(floating) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in merged.items()
    }


def _joined(values: Sequence[Any]) -> Any:
    import torch

    if not all(torch.is_tensor(value) for value in values):
        return [item for value in values for item in value]
    tensors = [value if value.dim() else value.unsqueeze(0) for value in values]
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_filled(tensor, sizes) for tensor in tensors])


def _filled(tensor: Any, sizes: Sequence[int]) -> Any:
    from torch.nn.functional import pad

    missing = [size - has for has, size in zip(tensor.shape[1:], sizes, strict=True)]
    return pad(tensor, [n for item in reversed(missing) for n in (0, item)]) if any(missing) else tensor
