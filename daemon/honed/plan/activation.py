"""Estimate of the memory that a forward pass keeps for the backward pass, from a config's widths: rough, and low."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from honed.inputs.basemodel import BITS, BaseModelInfo
from honed.inputs.form import base as forms
from honed.inputs.media import NUM_FRAMES, Facts, fitted_size, num_taken
from honed.inputs.modality import NOTHING, Cost
from honed.job.plan_file import Precision
from honed.plan import loss, parameter, precision
from honed.plan.parameter import Parameter, Sizes, TokenRows
from honed.spec import kind
from honed.spec.media import Kind, MediaLimits
from honed.spec.spec import JobSpec
from honed.system.device import Device

#: Tokens assumed for a row where nothing truncates it and no row was inspected.
UNCUT_LENGTH = 1024
#: Values that a layer keeps for its backward pass, measured on llama, qwen3, gpt2 and mixtral: numbers of its dtype for
#: each token, in units of the hidden size outside the MLP, in units of the MLP's width, and those that adapters add.
KEPT_HIDDEN, KEPT_MLP, KEPT_ADAPTER = 10.5, 4.0, 2.5
#: Copies of its scores that eager attention keeps: masked, softmaxed in float32, cast back and multiplied.
KEPT_SCORES = 5

#: Bytes for every element of an 8-bit matrix that a CPU unpacks to half precision, measured: it and its scales' product
#: with it are widened to float32 meanwhile.
HALF_8BIT_BYTES = 10


@dataclass(frozen=True)
class Row:
    """A row that was inspected."""

    num_text_tokens: int
    media: tuple[Facts, ...] = ()


@dataclass(frozen=True)
class Extent:
    """The row length and media load for which memory is estimated."""

    length: int  #: tokens of a batch's longest row
    media: Cost  #: of the row whose media have the most positions; `length` includes its tokens
    kinds: frozenset[Kind]  #: of the media in the inspected rows
    num_frames: int = 0  #: taken of the longest video in them
    num_pixels: int = 0  #: of the largest image or frame, up to where more no longer cost the model more; 0: unknown


def extent(spec: JobSpec, model: BaseModelInfo, num_row_tokens: int | None, rows: Sequence[Row] = ()) -> Extent:
    """Return the row length and media load of a job's batches.

    Rows are packed to max_length, or else as long as the longest inspected row, truncated where the job truncates.
    `num_row_tokens`: tokens of the longest inspected row without media, if there was one.
    """
    training = spec.training
    kinds = frozenset(item.kind for row in rows for item in row.media)
    taken = (_num_frames(item, spec.media.limits) for row in rows for item in row.media if item.kind == "video")
    num_frames = max(taken, default=0)
    seen = (item for row in rows for item in row.media if item.kind != "audio")
    largest = max(seen, key=lambda item: item.width * item.height, default=None)
    num_pixels = _num_pixels(largest, spec, model) if largest is not None else 0
    if training.packing and training.max_length is not None:
        return Extent(training.max_length, NOTHING, kinds, num_frames, num_pixels)
    costs = [(row.num_text_tokens, media_cost(row, spec, model)) for row in rows]
    cut_at = training.cut_at
    whole = [(text, cost) for text, cost in costs if cut_at is None or cost.tokens <= cut_at]  # others are skipped
    lengths = [text + cost.tokens for text, cost in whole]
    longest = max([*lengths, *([num_row_tokens] if num_row_tokens is not None else [])], default=None)
    limits = [limit for limit in (cut_at, longest) if limit is not None]
    media = max((cost for _, cost in whole), key=lambda cost: cost.positions, default=NOTHING)
    return Extent(min(limits, default=UNCUT_LENGTH), media, kinds, num_frames, num_pixels)


def media_cost(row: Row, spec: JobSpec, model: BaseModelInfo) -> Cost:
    """Return the cost of a row's images, videos and sounds to the model, under the job's limits."""
    return sum((_cost(item, spec.media.limits, model) for item in row.media), NOTHING)


def _num_frames(seen: Facts, limits: MediaLimits) -> int:
    return num_taken(seen.num_frames or NUM_FRAMES, limits, is_list=seen.is_list)


def _num_pixels(seen: Facts, spec: JobSpec, model: BaseModelInfo) -> int:
    """Return the pixels of an image or a frame, halved for as long as the model's processor makes the same of it.

    Return 0 where halving never changes the result: for a processor whose images are all of one size, or an unknown
    processor.
    """
    limits = spec.media.limits
    pixels = math.prod(fitted_size(max(seen.width, 1), max(seen.height, 1), limits))
    whole = _cost(seen, limits, model)
    while pixels > 1:
        less = _cost(seen, replace(limits, max_pixels=pixels // 2), model)
        if less.tokens < whole.tokens or less.positions < whole.positions:
            return pixels
        pixels //= 2
    return 0


def _cost(seen: Facts, limits: MediaLimits, model: BaseModelInfo) -> Cost:
    senses = model.senses
    if seen.kind == "audio":
        return senses.sound(seen.duration_sec or 0.0)
    width, height = fitted_size(max(seen.width, 1), max(seen.height, 1), limits)
    if seen.kind == "image":
        return senses.image(width, height)
    return senses.video(_num_frames(seen, limits), width, height)


def num_bytes(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    choices: Precision,
    loaded: Sequence[Parameter],
    size: Extent,
    num_rows: int | None,
    *,
    keeps_copies: bool = True,
    token_rows: TokenRows | None = None,
) -> tuple[int, int]:
    """Return the bytes of a pass, and how many of them the vision and audio encoders take; 0 where no widths are known.

    The bytes are those that a forward pass keeps for the backward pass, or an evaluation's logits if they are more.
    `keeps_copies`: autocast's copies of weights last as long as a pass. `token_rows`: those that an adapter trains.
    """
    widths = parameter.sizes(model.config)
    if widths is None:
        return 0, 0
    training = spec.training
    is_half = choices.load_dtype in precision.HALF or choices.bf16 or choices.fp16
    bytes_each = 2 if is_half else 4
    num_answers = forms.of(kind.of(spec).form).num_answers
    batch = rows_at_once(training.per_device_train_batch_size, num_rows) * num_answers
    tokens = batch * size.length
    unit = tokens * bytes_each
    layer = unit * (KEPT_HIDDEN * widths.hidden + KEPT_MLP * widths.mlp)
    if not precision.is_full(spec):
        layer += unit * KEPT_ADAPTER * widths.hidden + _experts_copied(spec, model, loaded, bytes_each, widths)
    if choices.attn_implementation == "eager":
        layer += unit * KEPT_SCORES * widths.heads * size.length
    if training.activation_offloading:
        kept = layer
    elif training.gradient_checkpointing:
        kept = unit * widths.hidden * widths.layers + layer
    else:
        kept = layer * widths.layers
    kept += _autocast_copies(spec, choices, loaded) if keeps_copies else 0
    kept += _dequantized_bytes(device, choices, loaded, bytes_each)
    kept += _logits_bytes(spec, model, device, tokens, widths.vocabulary, bytes_each)
    towers = _towers_bytes(spec, model, choices, size.media, batch * bytes_each)
    has_eval = bool(spec.eval_datasets or spec.eval_split)
    eval_tokens = rows_at_once(training.per_device_eval_batch_size, num_rows) * size.length if has_eval else 0
    evaluating = _logits_bytes(spec, model, device, eval_tokens, widths.vocabulary, bytes_each)
    lookup, product = _copied_tables(token_rows, tuple(loaded))
    size_each = BITS[choices.load_dtype] // 8
    return int(max(kept + towers + product * size_each, lookup * size_each, evaluating)), int(towers)


def num_evaluation_bytes(
    spec: JobSpec, model: BaseModelInfo, device: Device, choices: Precision, size: Extent, num_rows: int | None
) -> tuple[int, int]:
    """Return the bytes of a pass that keeps nothing for a backward pass, and how many of them the encoders take."""
    widths = parameter.sizes(model.config)
    if widths is None:
        return 0, 0
    bytes_each = 2 if choices.load_dtype in precision.HALF or choices.bf16 or choices.fp16 else 4
    batch = rows_at_once(spec.training.per_device_eval_batch_size, num_rows)
    tokens = batch * size.length
    layer = tokens * bytes_each * (KEPT_HIDDEN * widths.hidden + KEPT_MLP * widths.mlp)
    if choices.attn_implementation == "eager":
        layer += tokens * bytes_each * KEPT_SCORES * widths.heads * size.length
    logits = _logits_bytes(spec, model, device, tokens, widths.vocabulary, bytes_each)
    towers = _towers_bytes(spec, model, choices, size.media, batch * bytes_each)
    layer += _dequantized_bytes(device, choices, parameter.parameters(model), bytes_each)
    return int(max(layer, logits) + towers), int(towers)


def _towers_bytes(spec: JobSpec, model: BaseModelInfo, choices: Precision, media: Cost, unit: int) -> float:
    """Return the bytes that the larger encoder (vision or audio) keeps: all layers if trained, else one at a time."""
    if not media.positions:
        return 0
    is_trained = bool(precision.trained_parts(spec) & {"vision", "audio"})
    most = 0.0
    for tower in filter(None, (model.senses.eyes, model.senses.ears)):
        layer = unit * media.positions * (KEPT_HIDDEN * tower.hidden + KEPT_MLP * tower.mlp)
        if choices.attn_implementation == "eager":
            layer += unit * media.positions * KEPT_SCORES * tower.heads * media.window
        if not is_trained:
            kept = layer
        elif spec.training.gradient_checkpointing:
            kept = unit * media.positions * tower.hidden * tower.layers + layer
        else:
            kept = layer * tower.layers
        most = max(most, kept)
    return most


def rows_at_once(batch_size: int, num_rows: int | None) -> int:
    return batch_size if num_rows is None else min(batch_size, max(num_rows, 1))


def _logits_bytes(spec: JobSpec, model: BaseModelInfo, device: Device, tokens: int, vocabulary: int, size: int) -> int:
    """Return the bytes of the logits: the largest part for a small model with a large vocabulary."""
    training = spec.training
    # On a GPU the worker leaves the loss to TRL; elsewhere, and where the model's logits are its own, it asks for nll.
    asks = training.loss_type == "chunked_nll" or (training.loss_type is None and device.kind == "cuda")
    is_chunked = training.use_liger_kernel or (asks and not loss.why_whole(spec, None, model.config))
    return loss.logits_bytes(tokens, vocabulary, size, is_chunked=is_chunked)


def _dequantized_bytes(device: Device, choices: Precision, loaded: Iterable[Parameter], size: int) -> int:
    """Return the bytes of the largest quantized matrix as bitsandbytes unpacks it in a pass.

    `size`: bytes of the dtype in which it computes.
    """
    if choices.quantization == "none":
        return 0
    largest = max((item.num_elements for item in loaded if parameter.is_quantizable(item)), default=0)
    if choices.quantization == "8bit" and device.kind == "cpu" and size == 2:
        return HALF_8BIT_BYTES * largest
    return size * largest


def _experts_copied(
    spec: JobSpec, model: BaseModelInfo, loaded: Iterable[Parameter], size: int, widths: Sizes
) -> float:
    """Return the bytes of the experts of one layer that peft copies: it adds the adapter to them in every pass.

    The copy is kept for the backward pass.
    """
    names = parameter.EXPERT_NAMES.get(model.model_type, {})
    if spec.lora is None or not names:
        return 0
    targeted = parameter.experts_targeted(spec.lora, tuple(loaded), names)
    copied = [item for item in loaded if item.role == "experts" and item.name.rpartition(".")[2] in targeted]
    return sum(item.num_elements for item in copied) * size / widths.layers


def _copied_tables(token_rows: TokenRows | None, loaded: tuple[Parameter, ...]) -> tuple[int, int]:
    """Return the elements of whole tables that peft copies in every pass to train rows of them: in an embedding's
    lookup, and in a head's product.

    A gradient is as large as its table. The lookup's comes when nothing else is kept any more; the head's copy is kept
    beside it.
    """
    tables = [row for row, _ in parameter.token_rows(token_rows, loaded)]
    heads = [item for item in tables if item.role == "head"]
    if tables and (tied := parameter.tied_head(loaded)) is not None:
        heads.append(tied)
    lookup = max((item.num_elements for item in tables if item.role == "embedding"), default=0)
    return lookup, 2 * sum(head.num_elements for head in heads)


def _autocast_copies(spec: JobSpec, choices: Precision, loaded: Iterable[Parameter]) -> int:
    """Return the bytes of the half-precision copies of trained float32 matrices that autocast keeps through a pass."""
    if not (precision.is_full(spec) and choices.load_dtype == "float32" and (choices.bf16 or choices.fp16)):
        return 0
    return 2 * sum(item.num_elements for item in loaded if item.role in ("linear", "head", "experts", "router"))
