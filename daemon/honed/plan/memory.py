"""Memory that a job will take, estimated before anything is loaded, without torch.

    headers ──► the parameters as they will be loaded ──► weights (quantization state included)
    lora, or all of them ──► the trained parameters ──► adapter, gradients, optimizer
    config, batch, length ──► activations ◄── images, videos and sounds of the inspected rows

Weights, adapter, gradients and optimizer are sums over tensors of known shapes, within 5 % of the measured memory
(tests/worker/test_memory_used.py). Activations are a rough model of what a forward pass keeps. So a job is refused only
if it cannot fit even when gradients and activations are never held at the same time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from honed.inputs.basemodel import BITS, AdapterInfo, BaseModelInfo
from honed.inputs.dataset import NUM_OPENED
from honed.job.out_of_memory import ASSUMED_PIXELS
from honed.job.plan_file import Memory, Precision
from honed.plan import activation, parameter
from honed.plan.activation import Extent, Row
from honed.plan.parameter import Parameter, Shape
from honed.spec import kind
from honed.spec.optimizer import SLICE_ELEMENTS
from honed.spec.spec import JobSpec
from honed.system.device import Device

#: Parameters per float32 scale in an 8-bit optimizer's state, and elements below which a tensor keeps float32 states.
BLOCK_OPTIMIZER, MIN_8BIT_SIZE = 256, 4096
Mode = Literal["none", "ddp", "fsdp"]
#: Elements from which a paged optimizer lets a state move to main memory.
MIN_PAGED_SIZE = 100_000
#: Rank to which GaLore and APOLLO project a matrix unless optim_args gives one.
PROJECTED_RANK = 128


def estimate(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    choices: Precision,
    *,
    adapter: AdapterInfo | None = None,
    reserve_bytes: int = 0,
    num_row_tokens: int | None = None,
    num_rows: int | None = None,
    rows: Sequence[Row] = (),
    mode: Mode = "none",
) -> Memory:
    """Estimate the memory that the job takes on a device.

    `num_row_tokens`: tokens of the longest inspected row without media, if there was one. `rows`: the inspected rows
    with media. `num_rows`: the number of all rows, where known; a batch has no more. `mode`: the
    division between the job's devices; the estimate is for each of them.
    """
    loaded = parameter.parameters(model)
    available_bytes = max(0, device.total_bytes - reserve_bytes)
    if not kind.of(spec).has_rows:
        return _merge(model, adapter, available_bytes)
    if kind.of(spec).freezes_base:
        return _evaluation(spec, model, device, choices, adapter, available_bytes, num_row_tokens, num_rows, rows)
    learns = parameter.trained(spec, model, adapter)
    size = BITS[choices.adapter_dtype or choices.load_dtype] // 8
    optim = choices.optim or spec.training.optim
    states = [
        (
            shape,
            _state_bytes(
                optim, shape, size, is_embedding=place in learns.embeddings, is_compensated=_is_compensated(choices)
            ),
        )
        for place, shape in enumerate(learns.shapes)
    ]
    is_paged = optim.startswith("paged_") and device.kind == "cuda"
    has_gradients = not re.search("lomo|layerwise", optim)
    extent = activation.extent(spec, model, num_row_tokens, rows)
    # The layers of a divided model are cast one by one, and with checkpointing no copy outlives its layer.
    is_cast_once = mode == "fsdp" and spec.training.gradient_checkpointing
    activation_bytes, tower_bytes = activation.num_bytes(
        spec,
        model,
        device,
        choices,
        loaded,
        extent,
        num_rows,
        keeps_copies=not is_cast_once,
        token_rows=parameter.asked_token_rows(spec, adapter),
    )
    if model.tensors:
        largest = max(map(math.prod, learns.shapes), default=0)
        activation_bytes = max(activation_bytes, _step_bytes(optim, device, choices, largest, size))
        if _is_compensated(choices) and choices.save_dtype != choices.load_dtype:
            # Predictions are made with float32 weights, without gradients.
            activation_bytes = max(activation_bytes, (4 - size) * learns.num_parameters)
    memory = Memory(
        weights_bytes=parameter.weights_bytes(model, loaded, choices),
        adapter_bytes=learns.num_added * size,
        gradient_bytes=learns.num_parameters * size if has_gradients else max(map(math.prod, learns.shapes)) * size,
        optimizer_bytes=sum(num_bytes for _, num_bytes in states),
        activation_bytes=activation_bytes,
        available_bytes=available_bytes,
        batch_size=activation.rows_at_once(spec.training.per_device_train_batch_size, num_rows),
        length=extent.length,
        num_media_tokens=extent.media.tokens,
        media=tuple(sorted(extent.kinds)),
        num_frames=extent.num_frames,
        num_pixels=_num_pixels(extent, rows, num_rows),
        tower_bytes=tower_bytes,
        paged_bytes=sum(state for shape, state in states if is_paged and math.prod(shape) >= MIN_PAGED_SIZE),
    )
    return _of_rank(memory, spec, model, choices, loaded, mode)


def _of_rank(
    whole: Memory,
    spec: JobSpec,
    model: BaseModelInfo,
    choices: Precision,
    loaded: Sequence[Parameter],
    mode: Mode,
) -> Memory:
    """Return the estimate for one of several devices from that for a device that is alone."""
    num_ranks = spec.resources.num_ranks
    match mode:
        case "none":
            return whole
        case "ddp":  # gradients are copied into buckets on their way
            return replace(whole, exchange_bytes=whole.gradient_bytes, num_ranks=num_ranks)
        case "fsdp":
            names = ("weights_bytes", "adapter_bytes", "gradient_bytes", "optimizer_bytes", "paged_bytes")
            shares = {name: math.ceil(getattr(whole, name) / num_ranks) for name in names}
            scale_bytes = parameter.scale_bytes(model, loaded, choices)
            shares["weights_bytes"] = math.ceil((whole.weights_bytes - scale_bytes) / num_ranks) + scale_bytes
            part = replace(whole, **shares, num_ranks=num_ranks)
            exchange_bytes = _gathered_bytes(whole, model, choices, loaded)
            if choices.quantization == "4bit":  # it is quantized on every device before it is divided
                exchange_bytes = max(exchange_bytes, whole.weights_bytes + whole.adapter_bytes - part.total_bytes)
            return replace(part, exchange_bytes=exchange_bytes)


#: Rows and tokens of each, on which the logits of a merged model are compared.
COMPARED_ROWS, COMPARED_TOKENS = 2, 64
#: Bytes that a merge takes at most to load base and merged model for that.
MAX_COMPARED_BYTES = 2**31


def comparison_bytes(models_bytes: int, config: Mapping[str, Any], num_tokens: int) -> int:
    """Return the memory in which models of so many bytes are loaded and compute the logits of some tokens."""
    widths = parameter.sizes(config)
    width = 2**19 if widths is None else widths.vocabulary + 8 * widths.hidden
    return models_bytes + 16 * num_tokens * width


def _merge(model: BaseModelInfo, adapter: AdapterInfo | None, available_bytes: int) -> Memory:
    """Estimate a merge, which works from file to file, one module at a time; a small model's is compared as a whole."""
    loaded = parameter.parameters(model)
    largest_bytes = 3 * 4 * max(item.num_elements for item in loaded) if model.tensors else 0
    both_bytes = 2 * 4 * sum(item.num_elements for item in loaded) + 2**23  # the headers of their files
    compared_bytes = comparison_bytes(both_bytes, model.config, COMPARED_ROWS * COMPARED_TOKENS)
    more_bytes = max(0, compared_bytes - largest_bytes) if compared_bytes <= MAX_COMPARED_BYTES else 0
    return Memory(largest_bytes, adapter.num_bytes if adapter else 0, 0, 0, more_bytes, available_bytes, 0, 0)


_LAYER = re.compile(r"\.(?:layers|h|blocks|block|layer)\.(\d+)\.")


def _gathered_bytes(whole: Memory, model: BaseModelInfo, choices: Precision, loaded: Sequence[Parameter]) -> int:
    """Return the bytes of what is whole at once on every device of a divided model.

    A layer and the next one, what is in no layer, and the gradients of one layer and of the rest.
    """
    layers: dict[str, list[Parameter]] = {}
    for item in loaded:
        place = _LAYER.search(item.name)
        layers.setdefault(item.name[: place.end()] if place else "", []).append(item)
    rest = layers.pop("", [])
    sizes = {name: parameter.weights_bytes(model, within, choices) for name, within in layers.items()}
    largest = layers[max(sizes, key=lambda name: sizes[name])] if sizes else []
    num_elements = sum(item.num_elements for item in loaded) or 1
    share = sum(item.num_elements for item in (*largest, *rest)) / num_elements
    weights = sum(sorted(sizes.values())[-2:]) + parameter.weights_bytes(model, rest, choices)
    is_cast = choices.load_dtype == "float32" and (choices.bf16 or choices.fp16)
    casts = 2 * sum(item.num_elements for item in (*largest, *rest)) if is_cast else 0
    return int(weights + casts + share * whole.gradient_bytes)


def _evaluation(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    choices: Precision,
    adapter: AdapterInfo | None,
    available_bytes: int,
    num_row_tokens: int | None,
    num_rows: int | None,
    rows: Sequence[Row],
) -> Memory:
    """Estimate the memory of an evaluation, which has neither gradients nor an optimizer."""
    loaded = parameter.parameters(model)
    extent = activation.extent(spec, model, num_row_tokens, rows)
    activation_bytes, tower_bytes = activation.num_evaluation_bytes(spec, model, device, choices, extent, num_rows)
    added = parameter.trained(spec, model, adapter).num_added if adapter is not None else 0
    return Memory(
        weights_bytes=parameter.weights_bytes(model, loaded, choices),
        adapter_bytes=added * BITS[choices.adapter_dtype or choices.load_dtype] // 8,
        gradient_bytes=0,
        optimizer_bytes=0,
        activation_bytes=activation_bytes,
        available_bytes=available_bytes,
        batch_size=activation.rows_at_once(spec.training.per_device_eval_batch_size, num_rows),
        length=extent.length,
        num_media_tokens=extent.media.tokens,
        media=tuple(sorted(extent.kinds)),
        num_frames=extent.num_frames,
        num_pixels=_num_pixels(extent, rows, num_rows),
        tower_bytes=tower_bytes,
    )


def _num_pixels(extent: Extent, rows: Sequence[Row], num_rows: int | None) -> int:
    """Return the pixels of the largest image, or 0 if unknown; at least ASSUMED_PIXELS if not all were inspected."""
    is_whole = num_rows is not None and sum(len(row.media) for row in rows) < NUM_OPENED
    return extent.num_pixels if is_whole or not extent.num_pixels else max(extent.num_pixels, ASSUMED_PIXELS)


# --- Optimizer --------------------------------------------------------------------------------------------------------

#: Optimizers by a pattern of their name, and the states of every parameter. `8bit` and `32bit` are bitsandbytes', which
#: keep float32 whatever the parameter's dtype; `own` states have the parameter's dtype.
OPTIMIZERS: tuple[tuple[str, Literal["own", "8bit", "32bit", "factored", "projected"], float], ...] = (
    (r"(paged_)?(adamw_8bit)|adamw_bnb_8bit", "8bit", 2),
    (r"(paged_)?ademamix_8bit", "8bit", 3),
    (r"(paged_)?lion_8bit|rmsprop_bnb_8bit", "8bit", 1),
    (r"paged_adamw_32bit", "32bit", 2),
    (r"ademamix|paged_ademamix_32bit", "32bit", 3),
    (r"(paged_)?lion_32bit|rmsprop_bnb(_32bit)?", "32bit", 1),
    (r"adamw_anyprecision", "32bit", 1.5),  # the mean in float32, the variance in bfloat16
    (r"adamw_torch_8bit", "32bit", 0.5),
    (r"adamw_torch_4bit", "32bit", 0.25),
    (r"adafactor", "factored", 0),
    (r"sgd|lomo|adalomo", "own", 0),
    (r"adagrad|rmsprop|schedule_free_sgd", "own", 1),
    (r"grokadamw", "own", 3),
    (r"(galore|apollo)_.*", "projected", 2),
    (r".*", "own", 2),
)


#: Bytes for every element of a tensor that a step takes for a while, measured and rounded up: bitsandbytes steps on
#: a CPU by torch's own operations, in float32; its GPU kernels take nothing. A weight and gradient in half
#: precision are widened: 4 more.
STEP_BYTES = (
    (r"(paged_)?(adamw_8bit|lion_8bit)|adamw_bnb_8bit", 22),
    (r"(paged_)?ademamix_8bit", 37),
    (r"rmsprop_bnb(_8bit|_32bit)?|paged_adamw_32bit|(paged_)?lion_32bit", 12),
    (r"adamw_torch", 8),  # the fused one takes nothing
)
WIDENED_BYTES = 4
#: The same for compensated weights, on every device: both halves, the gradient and bitsandbytes' step.
COMPENSATED_STEP_BYTES = 30


def _step_bytes(optim: str, device: Device, choices: Precision, largest: int, size: int) -> int:
    """Return the bytes that a step takes beside what lasts: of the largest tensor, or of a slice of it."""
    if _is_compensated(choices):
        return COMPENSATED_STEP_BYTES * min(largest, SLICE_ELEMENTS)
    if device.kind != "cpu":
        return 0
    step_bytes = next((number for pattern, number in STEP_BYTES if re.fullmatch(pattern, optim)), 0)
    return (step_bytes + (WIDENED_BYTES if size == 2 and optim != "adamw_torch" else 0)) * largest if step_bytes else 0


def bytes_per_parameter(choices: Precision, optim: str) -> float:
    """Return the bytes per parameter of a large matrix in full fine-tuning: weight, gradient and optimizer state."""
    size, shape = BITS[choices.load_dtype] // 8, (4096, 4096)
    state = _state_bytes(optim, shape, size, is_embedding=False, is_compensated=_is_compensated(choices))
    return 2 * size + state / math.prod(shape)


def _is_compensated(choices: Precision) -> bool:
    return choices.master_weights == "compensated"


@functools.lru_cache(maxsize=4096)
def _state_bytes(name: str, shape: Shape, size: int, *, is_embedding: bool, is_compensated: bool) -> int:
    """Return the bytes of the optimizer's state for one trained tensor, whose elements have `size` bytes.

    Results are cached, as many tensors share a shape.
    """
    number = math.prod(shape)
    if is_compensated and size == 2:  # moments as for float32, plus the remainders
        return _state_bytes(name, shape, 4, is_embedding=is_embedding, is_compensated=False) + 2 * number
    kind, num_states = next((kind, optimizer) for pattern, kind, optimizer in OPTIMIZERS if re.fullmatch(pattern, name))
    match kind:
        case "8bit" if number >= MIN_8BIT_SIZE and not is_embedding:
            return int(num_states * (number + 4 * math.ceil(number / BLOCK_OPTIMIZER)))
        case "8bit" | "32bit":
            return int(4 * num_states * number)
        case "factored":
            return 4 * (number // shape[-1] + number // shape[-2] if len(shape) > 1 else number)
        case "projected" if len(shape) > 1:
            return int(size * (num_states * PROJECTED_RANK * max(shape) + PROJECTED_RANK * min(shape)))
        case _:
            return int(size * num_states * number) + (4 if num_states else 0)  # plus the step, a float32
