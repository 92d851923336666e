"""Settings changed before the next attempt of a job that ran out of memory: one step down a ladder, cheapest first.

    train      per_device_train_batch_size divided, gradient_accumulation_steps multiplied by the same
               gradient_checkpointing
    evaluate   per_device_eval_batch_size halved
    predict    predictions.batch_size halved; as many predictions, fewer at a time
    anywhere   media.num_frames, then media.max_pixels, halved: only with retry.may_shrink_media

Steps that help in the phase that ran out of memory come first; if the worker itself reported the phase, only those are
taken. Only the last row changes what is learned: a batch is divided only if the product stays exactly the same, and if
the rows of an optimizer step do not depend on the division.

A step changes the spec; it is kept in the job's entry, and the worker applies it over plan.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from honed.job.job import Adjustment
from honed.job.plan_file import Memory
from honed.spec import kind

#: Default number of prompts per batch; the second for images, videos or sounds, any of which may have thousands of
#: tokens.
PREDICTION_BATCH_SIZE, MEDIA_PREDICTION_BATCH_SIZE = 16, 4
#: Default number of examples to predict.
NUM_SAMPLES = 5
#: Pixels assumed for an image of unknown size, and the smallest limit on the ladder.
ASSUMED_PIXELS, MIN_PIXELS = 1024 * 1024, 128 * 128
#: Stages without a batch that could be made smaller.
WITHOUT_BATCHES = frozenset({"starting", "prepare", "load", "audit", "export", "merge"})
#: The phase whose batch size applies in every stage or phase.
PHASES = {"train": "train", "mask": "train", "evaluate": "evaluate", "predict": "predict", "baseline": "predict"}
#: Defaults of keys missing in the spec.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "per_device_eval_batch_size": 8,
    "dataloader_drop_last": False,
    "train_sampling_strategy": "random",
}
#: Sampling strategies for which the rows of a step do not depend on the batch size.
_FIXED_ORDERS = frozenset({"random", "sequential", "group_by_length"})


def adjusted(spec: Mapping[str, Any], adjustments: Sequence[Adjustment]) -> dict[str, Any]:
    """Return the spec, as plain data, with the adjustments applied."""
    changed = dict(spec)
    for adjustment in adjustments:
        for key, value in adjustment.changes.items():
            section, _, name = key.partition(".")
            changed[section] = {**(changed.get(section) or {}), name: value}
    return changed


@dataclass(frozen=True)
class Media:
    """The media found in the inspected rows."""

    kinds: tuple[str, ...] = ()
    num_frames: int = 0  #: frames taken from the longest video
    num_pixels: int = 0  #: pixels of the largest image or frame, as far as the model uses them; 0: unknown

    @classmethod
    def of(cls, memory: Memory | None) -> Media:
        """Return the media in a plan's memory estimate."""
        return cls(memory.media, int(memory.num_frames), int(memory.num_pixels)) if memory else cls()


def next_step(
    spec: Mapping[str, Any],
    *,
    attempt: int,
    phase: str,
    is_sure: bool = True,
    media: Media = Media(),  # noqa: B008
) -> Adjustment | None:
    """Return the next adjustment for a spec with all earlier ones applied; None if no step could help.

    `phase` is train, evaluate or predict, or else a stage. `is_sure` means that the worker itself reported the phase,
    so that only steps for that phase can help.
    """
    if phase in WITHOUT_BATCHES or not kind.of(spec).has_batches:
        return None
    training = DEFAULTS | (spec.get("training") or {})
    rungs = {
        "train": [*_divided(training), *_recomputed(training)] if kind.of(spec).trains else [],
        "evaluate": list(_evaluated(spec, training)),
        "predict": list(_predicted(spec, has_media=bool(media.kinds))),
    }
    place = PHASES.get(phase, phase)
    first = rungs.pop(place, [])
    rest = [] if is_sure and place in {*PHASES.values(), "data"} else [rung for item in rungs.values() for rung in item]
    last = _shrunk(spec.get("media") or {}, media) if (spec.get("retry") or {}).get("may_shrink_media") else ()
    return next((Adjustment(attempt, text, changes) for text, changes in (*first, *rest, *last)), None)


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
    # Halving a limit above the number of prompts would not make any batch smaller.
    size = min(limit or (MEDIA_PREDICTION_BATCH_SIZE if has_media else PREDICTION_BATCH_SIZE), _num_asked(spec))
    if size > 1:
        yield _halved("predictions", "batch_size", size)


def _num_asked(spec: Mapping[str, Any]) -> int:
    predictions = spec.get("predictions") or {}
    asked = len(predictions.get("prompts") or ()) or predictions.get("num_samples", NUM_SAMPLES)
    guarded = (spec.get("guard") or {}).get("num_samples", 0)
    return int(max(0 if predictions.get("sample_frequency") == "off" else asked, guarded))


def _divided(training: Mapping[str, Any]) -> Iterator[Rung]:
    """Divide the batch by its smallest divisor, so that every step has the same rows."""
    size, accumulated = training["per_device_train_batch_size"], training["gradient_accumulation_steps"]
    # An incomplete last batch, or batches grouped by length, would contain other rows after a division.
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
    """Return a setting that the owner could allow once no step is left; None if it would not help."""
    if (spec.get("retry") or {}).get("may_shrink_media") or not any(_shrunk(spec.get("media") or {}, media)):
        return None
    return "retry.may_shrink_media: true, which lets honed retry with fewer frames and pixels"


def _halved(section: str, name: str, value: int) -> Rung:
    return f"{section}.{name} {value} → {value // 2}", {f"{section}.{name}": value // 2}


def end_words(adjustments: Sequence[Adjustment]) -> str:
    """Return the tried steps as text, to follow "memory ran out"."""
    if not adjustments:
        return "no step of the ladder helps here"
    tried = "; ".join(adjustment.text for adjustment in adjustments)
    return f"no step of the ladder is left, after {tried}"
