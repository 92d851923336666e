"""The number of steps of a run, settings that do not suit that number, and learning rates that few runs survive.

When a job is checked, the number of rows is known for small data sets only. It is an upper bound: rows are skipped,
held out and packed. The worker knows the steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from honed.plan import precision
from honed.spec import kind
from honed.spec.spec import JobSpec

#: Optimizers to whose learning rates the ranges below apply; others have different scales.
_ADAM = re.compile(r"adam|lion|galore|apollo|stable")
#: Learning rates (lowest, highest) outside which hardly any run learns: for an adapter, and for full fine-tuning.
ADAPTER_RATES, FULL_RATES = (1e-6, 1e-2), (1e-8, 1e-3)
#: Share of a run that may be warm-up without a warning.
MAX_WARMUP = 0.5


def num_steps(spec: JobSpec, num_rows: int | None) -> int | None:
    """Return the largest number of steps of a run with so many rows in its data sets; None where it is unknown."""
    training = spec.training
    if training.max_steps > 0:
        return training.max_steps
    if num_rows is None:
        return None
    held_out = 0.0 if spec.eval_datasets else spec.eval_split or 0.0
    kept = max(num_rows - int(num_rows * held_out), 1)
    batches = math.ceil(kept / (training.per_device_train_batch_size * spec.resources.num_ranks))
    return math.ceil(training.num_train_epochs * math.ceil(batches / training.gradient_accumulation_steps))


def unfit(spec: JobSpec, steps: int, *, is_most: bool = False) -> Iterator[str]:
    """Yield warnings about settings that make no sense in a run of so many steps, or with `is_most` at most so many."""
    training, given = spec.training, spec.training.model_fields_set
    length = f"{'at most ' if is_most else ''}{steps:,} step{'s' if steps != 1 else ''}"
    if (warmup := training.warmup_steps) >= 1 and warmup > steps:
        yield (
            f"training.warmup_steps: {warmup:g} of {length}: the learning rate will reach at most "
            f"{steps / warmup:.0%} of {training.learning_rate:g}; use fewer steps, or a share such as 0.03"
        )
    elif (share := warmup if warmup < 1 else warmup / steps) > MAX_WARMUP:
        yield (
            f"training.warmup_steps: {warmup:g} of {length}: {share:.0%} of the run is warm-up; use fewer steps, or "
            "a share such as 0.03"
        )
    if spec.eval_strategy == "steps" and (every := training.eval_steps or 0) > steps:
        yield (
            f"training.eval_steps: {every:g} of {length}: there will be no evaluation between the first and the last "
            "step"
        )
    if "save_steps" in given and training.save_strategy == "steps" and training.save_steps > steps:
        yield (
            f"training.save_steps: {training.save_steps:g} of {length}: there will be no checkpoint before the last "
            "step, so an interrupted run starts over"
        )
    if "logging_steps" in given and training.logging_strategy == "steps" and training.logging_steps > steps:
        yield f"training.logging_steps: {training.logging_steps:g} of {length}: no loss will be reported"
    if isinstance(frequency := spec.predictions.sample_frequency, int) and frequency > steps:
        yield f"predictions.sample_frequency: {frequency} of {length}: there will be no predictions during training"


def rate(spec: JobSpec) -> Iterator[str]:
    """Yield a warning about a learning rate that is far from all usual ones."""
    if not kind.of(spec).trains or not _ADAM.search(spec.training.optim):
        return
    is_full, rate = precision.is_full(spec), spec.training.learning_rate
    low, high = FULL_RATES if is_full else ADAPTER_RATES
    what, usual = ("full fine-tuning", "1e-6 to 1e-4") if is_full else ("an adapter", "1e-5 to 1e-3")
    if rate > high:
        yield (
            f"training.learning_rate: {rate:g} is very high for {what} and likely to destroy what the model has "
            f"learned; {usual} is usual"
        )
    elif rate < low:
        yield f"training.learning_rate: {rate:g} is very low for {what}: the model will hardly learn; {usual} is usual"


def warnings(spec: JobSpec, num_rows: int | None) -> list[str]:
    """Return all warnings known at the check. `num_rows`: rows of the training data sets, if all were inspected."""
    if not kind.of(spec).trains:
        return []
    steps = num_steps(spec, num_rows)
    words = [] if steps is None else list(unfit(spec, steps, is_most=spec.training.max_steps < 0))
    return [*rate(spec), *words]
