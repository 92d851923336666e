"""The smallest changes with which a job that cannot fit in a device's memory would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from honed.job.plan_file import Memory
from honed.job.progress import gib
from honed.plan import loss, precision
from honed.plan.activation import UNCUT_LENGTH
from honed.spec import kind, rule
from honed.spec.field import Section
from honed.spec.spec import JobSpec, LoraSpec
from honed.system.device import Device
from honed.system.error import Fix, HonedError, MemoryShortError

#: A change of a job, in the job file's words, and the changed job.
Change = tuple[str, JobSpec]


def check(
    spec: JobSpec,
    memory: Memory,
    device: Device,
    estimate_for: Callable[[JobSpec], Memory],
    *,
    num_devices: int = 1,
) -> None:
    """Raise MemoryShortError for a job that can never fit: the sum, its parts, and changes that would make it fit.

    `estimate_for` estimates a changed job; only changes that fit by its estimate are proposed. `num_devices`: devices
    like this one that the machine has.
    """
    if memory.can_fit:
        return
    parts = ", ".join(f"{_PART_WORDS[name]} {gib(number)}" for name, number in memory.parts if number)
    ways = list(
        remedies(spec, device, estimate_for, media=memory.media, num_frames=memory.num_frames, num_devices=num_devices)
    )
    ways_in_words = [words for words, _ in ways]
    rows = f"{memory.batch_size} row{'s' if memory.batch_size > 1 else ''} of {memory.length} tokens at a time"
    if memory.num_media_tokens:
        rows += f", up to {memory.num_media_tokens} of which are for {', '.join(memory.media)}"
    on_each = f" on each of {memory.num_ranks} GPUs" if memory.num_ranks > 1 else ""
    raise MemoryShortError(
        f"about {gib(memory.total_bytes)} is needed{on_each} ({parts}; {rows}), but {device.name} has only "
        f"{gib(memory.available_bytes)} available for a job",
        hint="; or ".join(ways_in_words)
        if ways_in_words
        else "use a smaller model, or a device with more memory: no smaller change helps",
        fix=_edits(spec, ways[0][1]) if ways else {},
    )


def _edits(spec: Section, changed: Section, home: str = "") -> Fix:
    """Return the edits that turn one spec into the other."""
    edits: Fix = {}
    for key in type(spec).model_fields:
        before, after = getattr(spec, key), getattr(changed, key)
        if before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            edits |= _edits(before, after, f"{home}{key}.")
        else:
            edits[f"{home}{key}"] = after.model_dump(exclude_unset=True) if isinstance(after, Section) else after
    return edits


_PART_WORDS = {
    "weights": "weights",
    "adapter": "adapter",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "exchange": "exchange between GPUs",
}


def remedies(
    spec: JobSpec,
    device: Device,
    estimate_for: Callable[[JobSpec], Memory],
    *,
    media: tuple[str, ...] = (),
    num_frames: int = 0,
    num_devices: int = 1,
) -> Iterator[Change]:
    """Yield the smallest changes that make a job fit: up to three single ones, else up to two of the shortest chains.

    `media`: the kinds of media in the rows; `num_frames`: the number of frames taken of the longest video.
    """
    small = _small(media, num_frames)

    def fits(candidate: JobSpec) -> Memory | None:
        try:
            memory = estimate_for(candidate)
        except HonedError:
            return None
        return memory if memory.fits and not rule.problems(candidate, {}, except_of=[]) else None

    def say(words: str, memory: Memory) -> str:
        return f"{words} ({gib(memory.total_bytes)})"

    single = []
    divided: Way = partial(_divided, num_devices)
    for way in (*small, divided, *_LARGE):
        for words, candidate in way(spec, device):
            if memory := fits(candidate):
                single.append((say(words, memory), candidate))
                break
    yield from single[:3]
    if single:
        return
    chains = [
        small,
        (_eight_bit_optimizer, *small),
        (_adapter, *small),
        (_four_bit, *small),
        (_adapter, _four_bit, *small),
        (_four_bit, _eight_bit_optimizer, *small),
    ]
    said: list[str] = []
    for chain in chains:
        candidate, steps_taken = spec, []
        for way in chain:
            steps = list(way(candidate, device))
            chosen = next((step for step in steps if fits(step[1])), steps[-1] if steps else None)
            if chosen is None:
                continue
            steps_taken.append(chosen[0])
            candidate = chosen[1]
            if memory := fits(candidate):
                text = say(", ".join(steps_taken), memory)
                if text not in said and len(said) < 2:
                    said.append(text)
                    yield text, candidate
                break


def _changed(spec: JobSpec, **training: Any) -> JobSpec:
    return spec.model_copy(update={"training": spec.training.model_copy(update=training)})


def _checkpointing(spec: JobSpec, _device: Device) -> Iterator[Change]:
    if not spec.training.gradient_checkpointing and kind.of(spec).trains:
        yield "gradient_checkpointing: true", _changed(spec, gradient_checkpointing=True)


def _chunked_loss(spec: JobSpec, device: Device) -> Iterator[Change]:
    is_plain = spec.training.loss_type == "nll" and not spec.training.use_liger_kernel
    if device.kind == "cuda" and is_plain and not loss.why_whole(spec, None):
        yield "loss_type: chunked_nll", _changed(spec, loss_type="chunked_nll")


def _smaller_batch(spec: JobSpec, _device: Device) -> Iterator[Change]:
    """Yield smaller batches, the largest first, with more accumulation to keep the product."""
    if not kind.of(spec).trains:
        for smaller in range(spec.training.per_device_eval_batch_size - 1, 0, -1):
            yield f"per_device_eval_batch_size: {smaller}", _changed(spec, per_device_eval_batch_size=smaller)
        return
    size, accumulated = spec.training.per_device_train_batch_size, spec.training.gradient_accumulation_steps
    for smaller in range(size - 1, 0, -1):
        if size * accumulated % smaller == 0:
            steps = size * accumulated // smaller
            words = f"per_device_train_batch_size: {smaller} with gradient_accumulation_steps: {steps}"
            changes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": steps}
            if spec.training.per_device_eval_batch_size > smaller and (spec.eval_datasets or spec.eval_split):
                changes["per_device_eval_batch_size"] = smaller
                words += f" and per_device_eval_batch_size: {smaller}"
            yield words, _changed(spec, **changes)


def _shorter(spec: JobSpec, _device: Device) -> Iterator[Change]:
    length = spec.training.max_length or 2 * UNCUT_LENGTH
    while length > 256:
        length //= 2
        yield f"max_length: {length}", _changed(spec, max_length=length)


def _fewer_frames(number: int, spec: JobSpec, _device: Device) -> Iterator[Change]:
    for fewer in (number * 3 // 4, number // 2, number // 4):
        if 2 <= fewer < number:
            yield f"media: {{num_frames: {fewer}}}", _changed_media(spec, num_frames=fewer)


def _smaller_images(spec: JobSpec, _device: Device) -> Iterator[Change]:
    for edge in (1024, 768, 512, 384, 256):
        if spec.media.max_image_size is None or edge < spec.media.max_image_size:
            yield f"media: {{max_image_size: {edge}}}", _changed_media(spec, max_image_size=edge)


def _changed_media(spec: JobSpec, **media: Any) -> JobSpec:
    return spec.model_copy(update={"media": spec.media.model_copy(update=media)})


def _divided(num_devices: int, spec: JobSpec, device: Device) -> Iterator[Change]:
    if device.kind != "cuda":
        return
    for number in range(max(2, spec.resources.gpus), num_devices + 1):
        resources = spec.resources.model_copy(update={"gpus": number})
        changed = spec.model_copy(update={"resources": resources, "parallel": "fsdp"})
        yield f"resources: {{gpus: {number}}} with parallel: fsdp", rule.with_batch(changed)


def _eight_bit_optimizer(spec: JobSpec, device: Device) -> Iterator[Change]:
    if kind.of(spec).trains and spec.training.optim.startswith("adamw_torch") and device.kind == "cuda":
        yield "optim: adamw_8bit", _changed(spec, optim="adamw_8bit")


def _any_rung(spec: JobSpec, _device: Device) -> Iterator[Change]:
    if precision.is_full(spec) and spec.master_weights != "auto":
        yield "master_weights: auto", spec.model_copy(update={"master_weights": "auto"})


def _four_bit(spec: JobSpec, device: Device) -> Iterator[Change]:
    if spec.quantization != "4bit" and not precision.is_full(spec) and device.kind != "mps":
        yield "quantization: 4bit", spec.model_copy(update={"quantization": "4bit"})


def _adapter(spec: JobSpec, _device: Device) -> Iterator[Change]:
    if precision.is_full(spec):
        yield "lora: {r: 16} instead of full fine-tuning", spec.model_copy(update={"lora": LoraSpec()})


Way = Callable[[JobSpec, Device], Iterator[Change]]


def _small(media: tuple[str, ...], num_frames: int) -> tuple[Way, ...]:
    """Return the ways to need less memory, from the change that alters the result least.

    Rows with media are not to be shortened: those that are too long for their images would be skipped.
    """
    seen: tuple[Way, ...] = (partial(_fewer_frames, num_frames),) if "video" in media else ()
    seen += (_smaller_images,) if {"video", "image"} & set(media) else ()
    return (_checkpointing, _chunked_loss, _smaller_batch, *(seen or (() if media else (_shorter,))))


_LARGE = (_any_rung, _eight_bit_optimizer, _four_bit, _adapter)
