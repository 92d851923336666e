"""The plan: what will be done with a job, and why, decided before any model is loaded.

Backend, precision and an estimate of memory, in the shape that `honectl plan --json` prints and plan.json keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from honed import precision
from honed.basemodel import BITS, AdapterInfo, BaseModelInfo, Tensor
from honed.config import Config
from honed.device import Device
from honed.error import BackendError, MemoryShortError
from honed.installed import Installed
from honed.precision import Precision
from honed.spec import JobSpec

#: Keys that a spec may have and this version does nothing with: what to look for, and what is said.
NOT_ACTED_ON: tuple[tuple[str, Callable[[JobSpec], bool]], ...] = (
    ("notify", lambda spec: spec.notify is not None),
    ("media_dir", lambda spec: any(each.media_dir is not None for each in (*spec.datasets, *spec.eval_datasets))),
)

#: Bytes of a 4-bit weight with bitsandbytes' double quantization: half a byte, and for each block of 64 one byte of
#: scale, itself with a float32 for each 256.
BYTES_4BIT = 0.5 + (1 + 4 / 256) / 64

#: Modules whose weights are 2-D and yet no linear layers: bitsandbytes leaves them, and so does `all-linear`.
_NOT_LINEAR = re.compile(r"(^|\.)(lm_head|embed_out|[^.]*embed[^.]*|wte|wpe|position_embeddings)$")

#: Optimizers by the beginning of their name: bytes of state for each trained parameter. AdamW keeps two of its dtype.
OPTIMIZER_BYTES: tuple[tuple[str, float], ...] = (
    ("adamw_8bit", 2),
    ("adamw_bnb_8bit", 2),
    ("paged_adamw_8bit", 2),
    ("lion_8bit", 1),
    ("paged_lion_8bit", 1),
    ("lion", 4),
    ("paged_lion", 4),
    ("rmsprop", 4),
    ("adagrad", 4),
    ("sgd", 0),
    ("adafactor", 0.02),
)
#: Tokens that a row is taken to have where nothing cuts it.
UNCUT_LENGTH = 1024
#: Seen in transformer layers without attention scores: bytes kept for the backward pass, in units of batch * length *
#: hidden size * 2 bytes (Korthikanti et al. 2022).
ACTIVATIONS_PER_LAYER = 17


@dataclass(frozen=True)
class Backend:
    """What loads the model, and why."""

    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Estimates, in bytes; what can never fit is refused for its weights alone."""

    weights_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    available_bytes: int  #: the device's whole memory, less the administrator's reserve

    @property
    def total_bytes(self) -> int:
        parts = (self.weights_bytes, self.adapter_bytes, self.gradient_bytes, self.optimizer_bytes)
        return sum(parts) + self.activation_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes, "fits": self.fits}


@dataclass(frozen=True)
class Plan:
    """All that was decided."""

    backend: Backend
    precision: Precision
    memory: Memory
    model: BaseModelInfo
    device: Device
    num_trained: int  #: parameters
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        model = self.model
        return {
            "backend": {"name": self.backend.name, "reasons": list(self.backend.reasons)},
            "precision": self.precision.as_dict(),
            "memory": self.memory.as_dict(),
            "checkpoint": {
                "num_parameters": model.num_parameters,
                "num_trained": self.num_trained,
                "stored_dtypes": model.stored_dtypes,
                "num_weight_bytes": model.num_weight_bytes,
                "model_type": model.model_type,
                "architectures": list(model.architectures),
                "quantization_method": model.quantization_method,
                "has_chat_template": model.has_chat_template,
            },
            "base_model_path": str(model.path),
            "device": self.device.as_dict(),
            "warnings": list(self.warnings),
        }


def make(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    *,
    config: Config,
    installed: Installed,
    adapter: AdapterInfo | None = None,
) -> Plan:
    """The plan for a job on a device. Raises what `precision.decide` raises, BackendError, and MemoryShortError."""
    choices = precision.decide(spec, model, device, has_flash_attn=installed.has("flash_attn"))
    backend = choose_backend(spec, choices, device, installed)
    num_trained = _num_trained(spec, model, adapter)
    memory = _memory(spec, model, device, choices, num_trained, reserve_bytes=config.device.reserve_bytes)
    _check_weights(memory, device, choices)
    return Plan(backend, choices, memory, model, device, num_trained, tuple(_warnings(spec, model, choices, memory)))


def choose_backend(spec: JobSpec, choices: Precision, device: Device, installed: Installed) -> Backend:
    """Unsloth where it is faster and changes nothing; by name, wherever it does what is planned, else BackendError."""
    obstacle = _unsloth_obstacle(spec, choices, device, installed)
    match spec.backend:
        case "transformers":
            return Backend("transformers", ("as the job asks",))
        case "unsloth" if obstacle:
            raise BackendError(f"backend: unsloth: {obstacle}", hint="backend: transformers, or auto")
        case "unsloth":
            return Backend("unsloth", ("as the job asks",))
        case _ if obstacle:
            return Backend("transformers", (obstacle,))
        case _ if device.kind != "cuda":
            return Backend("transformers", ("Unsloth is no faster without an NVIDIA GPU",))
        case _:
            return Backend(
                "unsloth", (f"Unsloth {installed.versions['unsloth']} is installed, and trains this on {device.name}",)
            )


def _unsloth_obstacle(spec: JobSpec, choices: Precision, device: Device, installed: Installed) -> str:
    """Why Unsloth cannot do what is planned, or would silently do something else; empty where it can."""
    if not (installed.has("unsloth") and installed.has("unsloth_zoo")):
        return "Unsloth is not installed here"
    if device.kind == "mps":
        return "Unsloth does not run on Apple GPUs"
    if device.kind == "cuda" and (device.compute_capability or (0, 0)) < (7, 0):
        return f"Unsloth needs compute capability 7.0, and {device.name} has less"
    if device.kind != "cuda" and precision.is_full(spec):
        return "Unsloth trains adapters alone without an NVIDIA GPU"
    if device.kind != "cuda" and choices.quantization == "8bit":
        return "Unsloth would load in 16 bits what was asked in 8 bits, on a CPU"
    if device.kind != "cuda" and choices.load_dtype == "float16":
        return "Unsloth would load in bfloat16 what was planned in float16, on a CPU"
    return ""


# --- Memory -----------------------------------------------------------------------------------------------------------


def is_linear(tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a linear layer, as far as its name and shape tell; the head is not counted."""
    module = tensor.name.removesuffix(".weight")
    return module != tensor.name and len(tensor.shape) == 2 and not _NOT_LINEAR.search(module)


def _weights_bytes(model: BaseModelInfo, choices: Precision) -> int:
    """In the dtype that is loaded; an estimate under quantization."""
    if model.is_quantized:
        return model.num_weight_bytes
    each = BITS[choices.load_dtype] / 8
    if not model.tensors:
        return int(model.num_parameters * each)
    linear = sum(tensor.num_elements for tensor in model.tensors if is_linear(tensor))
    rows = sum(tensor.shape[0] for tensor in model.tensors if is_linear(tensor))
    rest = model.num_parameters - linear
    match choices.quantization:
        case "4bit":
            return int(linear * BYTES_4BIT + rest * each)
        case "8bit":
            return int(linear + rows * 4 + rest * each)
        case _:
            return int(model.num_parameters * each)


def _num_trained(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> int:
    if adapter is not None:
        return adapter.num_parameters
    if spec.lora is None:
        return model.num_parameters
    lora = spec.lora
    targets = [tensor for tensor in model.tensors if _is_target(tensor, lora.target_modules, lora.exclude_modules)]
    kept = [tensor for tensor in model.tensors if _is_named(tensor, lora.modules_to_save or ())]
    magnitudes = sum(tensor.shape[0] for tensor in targets) if lora.use_dora else 0
    return sum(lora.r * sum(tensor.shape) for tensor in targets) + magnitudes + sum(each.num_elements for each in kept)


def _is_target(tensor: Tensor, targets: str | list[str], excluded: str | list[str] | None) -> bool:
    """peft's own matching: `all-linear`, a regular expression for the whole name, or the ends of names."""
    module = tensor.name.removesuffix(".weight")
    if len(tensor.shape) != 2 or module == tensor.name or (excluded and _matches(module, excluded)):
        return False
    return is_linear(tensor) if targets == "all-linear" else _matches(module, targets)


def _matches(module: str, names: str | list[str]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_named(tensor: Tensor, names: Iterable[str]) -> bool:
    module = tensor.name.removesuffix(".weight").removesuffix(".bias")
    return any(module == name or module.endswith(f".{name}") for name in names)


def _memory(
    spec: JobSpec, model: BaseModelInfo, device: Device, choices: Precision, num_trained: int, *, reserve_bytes: int
) -> Memory:
    trained_bytes = BITS[choices.adapter_dtype or choices.load_dtype] // 8
    return Memory(
        weights_bytes=_weights_bytes(model, choices),
        adapter_bytes=0 if precision.is_full(spec) else num_trained * trained_bytes,
        gradient_bytes=num_trained * trained_bytes,
        optimizer_bytes=int(num_trained * _optimizer_bytes(spec.training.optim, trained_bytes)),
        activation_bytes=_activation_bytes(spec, model, choices),
        available_bytes=max(0, device.total_bytes - reserve_bytes),
    )


def _optimizer_bytes(name: str | None, trained_bytes: int) -> float:
    found = next((size for start, size in OPTIMIZER_BYTES if (name or "").startswith(start)), None)
    return 2 * trained_bytes if found is None else found


def _activation_bytes(spec: JobSpec, model: BaseModelInfo, choices: Precision) -> int:
    """Rough: what a forward pass keeps for the backward one, at full length; 0 where the config tells nothing."""
    sizes = _sizes(model.config)
    if sizes is None:
        return 0
    hidden, layers, heads, vocabulary = sizes
    training = spec.training
    length = training.max_length or UNCUT_LENGTH
    positions = training.per_device_train_batch_size * length
    is_half = choices.load_dtype in precision.HALF or choices.bf16 or choices.fp16
    each = 2 if is_half else 4
    scores = positions * length * heads * (each + 4) if choices.attn_implementation == "eager" else 0
    layer = positions * hidden * each * ACTIVATIONS_PER_LAYER + scores
    kept = positions * hidden * each * layers + layer if training.gradient_checkpointing else layer * layers
    logits = positions * vocabulary * (each + 8)  # as computed, in float32 for the loss, and their gradient
    return kept + logits


def _sizes(config: dict[str, Any]) -> tuple[int, int, int, int] | None:
    """Hidden size, layers, attention heads and vocabulary, under the names that families give them."""
    names = (
        ("hidden_size", "n_embd", "d_model"),
        ("num_hidden_layers", "n_layer", "num_layers"),
        ("num_attention_heads", "n_head", "num_heads"),
        ("vocab_size",),
    )
    found = [next((config[name] for name in row if isinstance(config.get(name), int)), None) for row in names]
    hidden, layers, heads, vocabulary = found
    if hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    return hidden, layers, heads, vocabulary


def _check_weights(memory: Memory, device: Device, choices: Precision) -> None:
    if memory.weights_bytes <= memory.available_bytes:
        return
    smaller = "quantization: 4bit, or " if choices.quantization == "none" and device.kind != "mps" else ""
    raise MemoryShortError(
        f"the weights alone take {gib(memory.weights_bytes)} in {choices.load_dtype}, and {device.name} has "
        f"{gib(memory.available_bytes)}",
        hint=f"{smaller}a smaller model",
    )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{math.ceil(num_bytes / 2**20)} MiB"


# --- Warnings ---------------------------------------------------------------------------------------------------------


def _warnings(spec: JobSpec, model: BaseModelInfo, choices: Precision, memory: Memory) -> list[str]:
    found = list(choices.warnings)
    found += [f"{key}: this version does nothing with it" for key, is_set in NOT_ACTED_ON if is_set(spec)]
    if not memory.fits:
        found.append(
            f"memory: {gib(memory.total_bytes)} are estimated, and {gib(memory.available_bytes)} there are: "
            "it may run out; a smaller per_device_train_batch_size or max_length takes less"
        )
    if model.is_pickled:
        found.append(f"{model.path}: the weights are pickled; their number and dtype are estimated from their size")
    claimed, stored = model.config.get("dtype") or model.config.get("torch_dtype"), model.stored_dtype
    if isinstance(claimed, str) and claimed != stored and not model.is_quantized:
        found.append(
            f"{model.path / 'config.json'}: says {claimed}, but the weights are stored in {stored}; those count"
        )
    return found
