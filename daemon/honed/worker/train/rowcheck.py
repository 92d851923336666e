"""A row is the same row, padded or alone: asked of the loaded model, before the first step.

    alone    a short row twice, the second time with another last token     nothing before that token may differ
    right    the short row, padded on the right beside a longer one         as in training and evaluation
    left     the same, padded on the left, the first tokens of an answer    as in predictions

A model that sees later tokens cannot be trained: the job ends. One for which a padded row is another row gets its rows
one at a time: `per_device_train_batch_size` goes over to `gradient_accumulation_steps`, so that a step has the same
rows and the same gradient; evaluations and predictions have batches of one.

Some models compute a row in another way if their batch is wider than a limit in their configuration. For them the
lengths of the job's rows decide.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from honed.system.error import LossError, said
from honed.worker.assignment import Assignment
from honed.worker.cause import is_out_of_memory
from honed.worker.parallel import Ranks
from honed.worker.rows import prefix
from honed.worker.rows.data import Data
from honed.worker.train.losscheck import computing_dtype, trained_autocast
from honed.worker.train.prediction import Predictor, Question, undisturbed

#: Tokens of the two rows.
SHORT, LONG = 8, 20
#: Where their tokens come from.
_TEXTS = (
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, I went out",
)
#: The distance of two rows of logits that rounding explains. It depends on a batch's shape, and on its other rows where
#: outliers are left out of a quantization.
TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
EIGHT_BIT_TOLERANCE = 0.15
#: Distance beyond any rounding; below it a router may have chosen other experts for half-precision values.
MAX_ROUNDING = 0.2

Log = Callable[[str, str], None]


@dataclass(frozen=True)
class Found:
    """What was found: how far a padded row is from the same row alone, or None where that was not asked."""

    right: float | None = None
    left: float | None = None


def check(trainer: Any, predictor: Predictor, data: Data, job: Assignment, *, ranks: Ranks, log: Log) -> None:
    """Have rows that must not be padded taken one at a time. Raise LossError if the model sees later tokens."""
    model = trainer.model
    limit = _limit(model.config.to_dict())
    is_wide = limit is not None and data.longest > limit
    try:
        changed = _ask(trainer, predictor, job)
    except LossError:
        raise
    except Exception as error:
        if trainer.is_divided:
            raise  # the other ranks wait in a collective operation of this one
        traceback.print_exc()
        if is_out_of_memory(error) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        log("warning", f"whether padding changes a row could not be checked: {type(error).__name__}: {said(error)}")
        changed = Found()
    is_right, is_left = ranks.agree(changed.right is not None or is_wide, changed.left is not None or is_wide)
    if is_right and _pads(trainer):
        why = f"a batch of more than {limit} tokens" if changed.right is None else "padding on the right"
        size = trainer.args.per_device_train_batch_size
        trainer.take_singly()
        log(
            "info",
            f"{why} changes a row in this model: rows are trained and evaluated one at a time, with "
            f"gradient_accumulation_steps {trainer.args.gradient_accumulation_steps} for batches of {size}: a step has "
            "the same rows and the same gradient",
        )
    if is_left and predictor.asks_several:
        why = f"a batch of more than {limit} tokens" if changed.left is None else "padding on the left"
        predictor.ask_singly()
        log("info", f"{why} changes a row in this model: predictions are made one at a time")


def _pads(trainer: Any) -> bool:
    """Return whether rows are padded: neither alone, nor packed or flattened into one."""
    args = trainer.args
    is_several = max(args.per_device_train_batch_size, args.per_device_eval_batch_size) > 1
    return is_several and not (args.packing or args.padding_free)


def _limit(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens from which on the width of a batch changes its rows, of those in the config."""
    config = config.get("text_config") or config
    limits = [config.get("keep_window_size")]  # doge chooses so many keys, among them masked ones
    rope = config.get("rope_parameters") or {}
    kinds = rope.values() if all(isinstance(item, Mapping) for item in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in {"dynamic", "longrope"}:  # its frequencies follow the largest position
            limits.append(kind.get("original_max_position_embeddings") or config.get("max_position_embeddings"))
    return min((int(limit) for limit in limits if limit), default=None)


def _ask(trainer: Any, predictor: Predictor, job: Assignment) -> Found:
    model, tokenizer = trainer.model, trainer.processing_class
    short, long = (tokenizer(text, add_special_tokens=False)["input_ids"] * LONG for text in _TEXTS)
    short, long, pad_id = short[:SHORT], long[:LONG], tokenizer.pad_token_id
    dtype = computing_dtype(trainer, job)
    tolerance = EIGHT_BIT_TOLERANCE if job.precision.quantization == "8bit" else TOLERANCES[dtype]
    right = left = None
    with undisturbed(model), torch.no_grad(), trained_autocast(model, job):
        changed = [*short[:-1], next(token for token in long if token != short[-1])]
        alone = _logits(model, [short, changed], pad_id)

        def noise() -> float:
            """Return what differs between two calls with the same rows: the order of some kernels' sums varies."""
            return 3 * _distance(alone, _logits(model, [short, changed], pad_id))

        seen = _distance(alone[0, :-1], alone[1, :-1])
        if seen > tolerance and seen > tolerance + noise():
            raise _sees_ahead(job, seen)
        if _pads(trainer):
            padded = _logits(model, [short, long], pad_id)
            right = _distance(alone[0], padded[0, :SHORT])
            if (
                tolerance < right <= MAX_ROUNDING and dtype != "float32"
            ):  # compare in the same shape: it decides rounding
                filled = _logits(model, [[*short, *long[SHORT:]], long], pad_id)
                right = _distance(filled[0, :SHORT], padded[0, :SHORT])
            right -= noise() if right > tolerance else 0
    if predictor.asks_several and job.spec.predictions.sample_frequency != "off":
        one, beside = Question("", short, ""), Question("", long, "")
        single = predictor.first_logits(model, [one])[0]
        left = _answers_apart(single, predictor.first_logits(model, [one, beside])[0])
        if left > tolerance:
            is_half = left <= MAX_ROUNDING and dtype != "float32"
            again = predictor.first_logits(model, [one, one] if is_half else [one])[0]
            left -= 3 * _answers_apart(single, again)
    return Found(
        right if right is not None and right > tolerance else None,
        left if left is not None and left > tolerance else None,
    )


def _sees_ahead(job: Assignment, seen: float) -> LossError:
    attention = job.precision.attn_implementation
    return LossError(
        f"the model sees the tokens that it is trained to predict: with attn_implementation: {attention}, another last "
        f"token changes the logits before it by {seen:.2f} of their spread",
        hint="attn_implementation: eager" if attention != "eager" else "use a base model that predicts the next token",
        fix={"attn_implementation": "eager"} if attention != "eager" else {},
    )


def _logits(model: Any, rows: Sequence[Sequence[int]], pad_id: int) -> torch.Tensor:
    """Return the logits of rows, padded on the right as TRL does."""
    width = max(map(len, rows))
    ids = [[*row, *[pad_id] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    device = next(model.parameters()).device
    inputs = {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
    inputs = prefix.trained(model, inputs | {"labels": inputs["input_ids"]})
    del inputs["labels"]
    return model(**inputs, use_cache=False).logits.float()


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root mean square of the difference, as a share of that of the logits around their mean."""
    spread = (one - one.mean(dim=-1, keepdim=True)).square().mean()
    return float(((one - other).square().mean() / spread.clamp(min=1e-12)).sqrt())


def _answers_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two answers; without what follows their first tokens, if these are not the same."""
    is_same = bool(one[0].argmax() == other[0].argmax())
    num_tokens = min(len(one), len(other)) if is_same else 1  # one may end at once
    return _distance(one[:num_tokens], other[:num_tokens])
