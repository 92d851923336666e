"""Changes to a job that ran out of memory before its next attempt: one step down a ladder, in what costs least.

    train      per_device_train_batch_size divided, gradient_accumulation_steps multiplied by the same
               gradient_checkpointing
    evaluate   per_device_eval_batch_size halved
    predict    predictions.batch_size halved; as many are asked, fewer at a time
    anywhere   media.num_frames, then media.max_pixels, halved: only with retry.may_shrink_media

The steps that help in the phase in which memory ran out come first; where the worker itself said which it was, no
others are taken. None but the last changes what is learned: a batch is divided only where the product stays exactly
what it was, and where the rows of a step do not depend on how it is divided.

A step is a change of the spec, kept in the job's entry and applied over plan.json by the worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from honed.job.job import Adjustment

#: Prompts that are answered at a time where the spec does not say; the second with images, videos or sounds, of which
#: one may be thousands of tokens.
PREDICTION_BATCH_SIZE, MEDIA_PREDICTION_BATCH_SIZE = 16, 4
#: Examples that are followed where the spec does not say.
NUM_SAMPLES = 5
#: Pixels that an image is taken to have where nothing says how many, and the fewest that the ladder goes to.
ASSUMED_PIXELS, MIN_PIXELS = 1024 * 1024, 128 * 128
#: Stages without a batch that could be smaller.
WITHOUT_BATCHES = frozenset({"starting", "prepare", "load", "audit", "export", "merge"})
#: The stages and phases whose batches are those of another name.
PHASES = {"train": "train", "mask": "train", "evaluate": "evaluate", "predict": "predict", "baseline": "predict"}
#: What holds where the spec does not say.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "per_device_eval_batch_size": 8,
    "dataloader_drop_last": False,
    "train_sampling_strategy": "random",
}
#: The sampling strategies by which the rows of a step do not depend on how it is divided into batches.
_FIXED_ORDERS = frozenset({"random", "sequential", "group_by_length"})


def adjusted(spec: Mapping[str, Any], adjustments: Sequence[Adjustment]) -> dict[str, Any]:
    """A spec as plain data, with what was taken."""
    changed = dict(spec)
    for adjustment in adjustments:
        for key, value in adjustment.changes.items():
            section, _, name = key.partition(".")
            changed[section] = {**(changed.get(section) or {}), name: value}
    return changed


@dataclass(frozen=True)
class Media:
    """What the rows that were looked at have beside text."""

    kinds: tuple[str, ...] = ()
    num_frames: int = 0  #: that are taken of the longest video
    num_pixels: int = 0  #: of the largest image or frame, as far as more of them are more to the model; 0: unknown

    @classmethod
    def of(cls, memory: Mapping[str, Any]) -> Media:
        """As a plan's estimate has it; those of older plans say less."""
        return cls(
            tuple(memory.get("media") or ()), int(memory.get("num_frames") or 0), int(memory.get("num_pixels") or 0)
        )


def next_step(
    spec: Mapping[str, Any],
    *,
    attempt: int,
    phase: str,
    is_sure: bool = True,
    media: Media = Media(),  # noqa: B008
) -> Adjustment | None:
    """The next step for a job with that spec, as plan.json has it and adjusted; None where no step could help.

    `phase`: train, evaluate or predict, else a stage; `is_sure`: the worker itself said so, and only what is smaller
    there can help.
    """
    if phase in WITHOUT_BATCHES or spec.get("kind") == "merge":
        return None
    training = DEFAULTS | (spec.get("training") or {})
    rungs = {
        "train": [*_divided(training), *_recomputed(training)],
        "evaluate": list(_evaluated(spec, training)),
        "predict": list(_predicted(spec, has_media=bool(media.kinds))),
    }
    place = PHASES.get(phase, phase)
    first = rungs.pop(place, [])
    rest = [] if is_sure and place in {*PHASES.values(), "data"} else [rung for each in rungs.values() for rung in each]
    allowed = (spec.get("retry") or {}).get("may_shrink_media")
    last = _shrunk(spec.get("media") or {}, media) if allowed else ()
    for text, changes in (*first, *rest, *last):
        return Adjustment(attempt, text, changes)
    return None


Rung = tuple[str, dict[str, Any]]


def _recomputed(training: Mapping[str, Any]) -> Iterator[Rung]:
    if not training["gradient_checkpointing"]:
        yield "gradient_checkpointing off → on", {"training.gradient_checkpointing": True}


def _evaluated(spec: Mapping[str, Any], training: Mapping[str, Any]) -> Iterator[Rung]:
    size = training["per_device_eval_batch_size"]
    evaluates = bool(spec.get("eval_datasets") or spec.get("eval_split")) and training.get("eval_strategy") != "no"
    if evaluates and size > 1:
        yield _halved("training", "per_device_eval_batch_size", size)


def _predicted(spec: Mapping[str, Any], *, has_media: bool) -> Iterator[Rung]:
    limit = (spec.get("predictions") or {}).get("batch_size")
    # A limit above what a round asks could be halved without any batch being smaller.
    size = min(limit or (MEDIA_PREDICTION_BATCH_SIZE if has_media else PREDICTION_BATCH_SIZE), _num_asked(spec))
    if size > 1:
        yield _halved("predictions", "batch_size", size)


def _num_asked(spec: Mapping[str, Any]) -> int:
    """Prompts of the largest round of predictions, or of the guard's; 0 where there is none."""
    predictions = spec.get("predictions") or {}
    asked = len(predictions.get("prompts") or ()) or predictions.get("num_samples", NUM_SAMPLES)
    guarded = (spec.get("guard") or {}).get("num_samples", 0)
    return int(max(0 if predictions.get("sample_frequency") == "off" else asked, guarded))


def _divided(training: Mapping[str, Any]) -> Iterator[Rung]:
    """The batch by its smallest divisor, so that the rows of a step are the same."""
    size, accumulated = training["per_device_train_batch_size"], training["gradient_accumulation_steps"]
    # An incomplete last batch is another one of smaller batches, and so are those that are made of lengths.
    if size == 1 or training["dataloader_drop_last"] or training["train_sampling_strategy"] not in _FIXED_ORDERS:
        return
    divisor = next(number for number in range(2, size + 1) if size % number == 0)
    yield (
        f"per_device_train_batch_size {size} → {size // divisor}, "
        f"gradient_accumulation_steps {accumulated} → {accumulated * divisor}",
        {
            "training.per_device_train_batch_size": size // divisor,
            "training.gradient_accumulation_steps": accumulated * divisor,
        },
    )


def _shrunk(limits: Mapping[str, Any], media: Media) -> Iterator[Rung]:
    frames = limits.get("num_frames") or media.num_frames
    if "video" in media.kinds and frames > 1:
        yield _halved("media", "num_frames", frames)
    pixels = limits.get("max_pixels") or media.num_pixels or ASSUMED_PIXELS
    least = max(MIN_PIXELS, limits.get("min_pixels") or 0)
    if {"image", "video"} & set(media.kinds) and pixels // 2 >= least:
        yield _halved("media", "max_pixels", pixels)


def leave(spec: Mapping[str, Any], media: Media) -> str | None:
    """What its owner could allow where no step is left; None where that would bring none."""
    if (spec.get("retry") or {}).get("may_shrink_media") or not any(_shrunk(spec.get("media") or {}, media)):
        return None
    return "retry.may_shrink_media: true, which lets honed go on with fewer frames and pixels"


def _halved(section: str, name: str, value: int) -> Rung:
    return f"{section}.{name} {value} → {value // 2}", {f"{section}.{name}": value // 2}


def end_words(adjustments: Sequence[Adjustment]) -> str:
    """What was tried, after "memory ran out"."""
    if not adjustments:
        return "no step down the ladder helps here"
    tried = "; ".join(adjustment.text for adjustment in adjustments)
    return f"no step down the ladder is left, after {tried}"
