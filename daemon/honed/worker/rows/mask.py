"""The check before the first step: real batches, as the trainer will see them, compared with the rows in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from honed.job.event import EventWriter
from honed.system import quote
from honed.system.error import MaskError
from honed.text.chat import IGNORED, ChatFormat, trained_share
from honed.text.maskcheck import placeholder_ids
from honed.worker.rows.data import Data, Rows
from honed.worker.train.prediction import random_state_kept

#: The rows were encoded correctly; what a collator then does to them depends on its version and on packing.
_HINT = (
    "the rows were changed before training: remove `training.packing` and `training.padding_free`, check the "
    "versions with `honectl doctor`, and report it"
)
#: Batches that are checked: enough to meet every kind of row of a mixture, and quick beside a step.
NUM_BATCHES = 8


def check(trainer: Any, data: Data, chat: ChatFormat, events: EventWriter) -> None:
    """Raise MaskError, with decoded evidence, unless the trained text is what the rows' assistants say.

    In rows with images, videos and sounds, no token of theirs may be trained on, nor those that begin and end them: the
    model's config, its processor and its tokenizer name these.
    """
    forbidden: frozenset[int] = frozenset()
    if data.media is not None:
        config = trainer.model.config.to_dict()
        forbidden = placeholder_ids(config, data.media.processor.processor, chat.tokenizer)
    with random_state_kept():
        batches = list(itertools.islice(iter(trainer.get_train_dataloader()), NUM_BATCHES))
    for batch in batches:
        is_packed = trainer.args.packing or "attention_mask" not in batch
        sequences = examples(batch)
        while answers := list(itertools.islice(sequences, data.num_answers)):
            _check_row(answers, data.train, chat, forbidden, is_packed=is_packed)
    _hint(batches, data.train, events)


def examples(batch: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the examples of a batch, answer by answer, without padding, and packed rows one by one."""
    if "attention_mask" in batch:
        for ids, labels, seen in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            yield ids[seen.bool()].tolist(), labels[seen.bool()].tolist()
            if bool((labels[~seen.bool()] != IGNORED).any()):
                raise MaskError("padding is trained on", hint=_HINT)
        return
    ids, labels, positions = (batch[name][0].tolist() for name in ("input_ids", "labels", "position_ids"))
    starts = [n for n, position in enumerate(positions) if position == 0]
    for start, end in itertools.pairwise([*starts, len(ids)]):
        yield ids[start:end], labels[start:end]


def _check_row(
    answers: Sequence[tuple[list[int], list[int]]],
    rows: Rows,
    chat: ChatFormat,
    forbidden: frozenset[int],
    *,
    is_packed: bool,
) -> None:
    input_ids = [token for ids, _ in answers for token in ids]
    index = rows.find(input_ids)
    if index is None and is_packed:  # packing that splits rows: a piece is no whole turn
        return
    if index is None:
        raise MaskError(
            f"a batch contains tokens that belong to no row: {quote.mark(repr(chat.tokens.decode(input_ids)[:200]))}",
            hint=_HINT,
        )
    row, is_truncated, start = rows.dataset[index], rows.is_truncated(index), 0
    for (ids, labels), example in zip(answers, rows.examples[index].answers, strict=True):
        # The first token is never predicted; packing masks it for its own reasons.
        trained = [row["labels"][start], *labels[1:]]
        chat.check_trained(ids, trained, example, is_truncated=is_truncated, placeholder_ids=forbidden)
        start += len(ids)


def _hint(batches: list[dict[str, Any]], rows: Rows, events: EventWriter) -> None:
    if rows.kinds == {"text"}:
        return
    share = max(trained_share(batch["labels"].tolist()) for batch in batches)
    if share > 0.5:
        events.log(
            "warning",
            f"{share:.0%} of a batch's tokens are trained on: usual for short questions with long answers, but "
            "otherwise suspicious; see honectl preview",
        )
