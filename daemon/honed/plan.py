"""The plan: what will be done with a job, and why, decided before any model is loaded.

Backend, precision and an estimate of memory, in the shape that `honectl plan --json` prints and plan.json keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from honed import memory, parameter, precision
from honed.activation import Row
from honed.basemodel import AdapterInfo, BaseModelInfo
from honed.config import Config
from honed.device import Device
from honed.error import BackendError
from honed.installed import Installed, known_model_types
from honed.memory import Memory
from honed.precision import Precision
from honed.spec import JobSpec

#: In what a merged checkpoint may be stored.
MERGED_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Backend:
    """What loads the model, and why."""

    name: str
    reasons: tuple[str, ...]


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
                "has_vision": model.has_vision or model.has_audio,
                "is_pickled": model.is_pickled,
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
    num_row_tokens: int | None = None,
    num_rows: int | None = None,
    rows: Sequence[Row] = (),
) -> Plan:
    """The plan for a job on a device. Raises what `precision.decide` raises, and BackendError.

    `num_row_tokens` is the length of the longest row without media that was looked at, `rows` are those with media,
    and `num_rows` is how many there are in all.
    """
    if spec.kind == "merge":
        return _merge(spec, model, device, reserve_bytes=config.device.reserve_bytes, adapter=adapter)
    choices = precision.decide(spec, model, device, has_flash_attn=installed.has("flash_attn"))
    backend = choose_backend(spec, model, choices, device, installed)
    reserve_bytes = config.device.reserve_bytes
    needed = memory.estimate(
        spec, model, device, choices, adapter=adapter, reserve_bytes=reserve_bytes, num_row_tokens=num_row_tokens,
        num_rows=num_rows, rows=rows,
    )  # fmt: skip
    num_trained = parameter.trained(spec, model, adapter).num_parameters
    return Plan(backend, choices, needed, model, device, num_trained, tuple(_warnings(model, choices, needed)))


def _merge(
    spec: JobSpec, model: BaseModelInfo, device: Device, *, reserve_bytes: int, adapter: AdapterInfo | None
) -> Plan:
    """Of a merge: the dtype of every parameter. Nothing is computed but sums of weights, in float32, on the CPU."""
    stored = model.stored_dtype if model.stored_dtype in MERGED_DTYPES else "float32"
    reasons = {
        "load_dtype": "what the base model stores" if spec.dtype == "auto" else "as the job asks",
        "compute_dtype": "a sum in half precision would be rounded twice",
        "quantization": "the merged checkpoint is whole, whatever the adapter was trained on",
    }
    choices = Precision(
        load_dtype=stored if spec.dtype == "auto" else spec.dtype, compute_dtype="float32", bf16=False, fp16=False,
        adapter_dtype=None, quantization="none", attn_implementation="auto", reasons=reasons,
    )  # fmt: skip
    needed = memory.estimate(spec, model, device, choices, adapter=adapter, reserve_bytes=reserve_bytes)
    backend = Backend("transformers", ("a merge goes through transformers and peft",))
    return Plan(backend, choices, needed, model, device, 0, tuple(_warnings(model, choices, needed)))


def choose_backend(
    spec: JobSpec, model: BaseModelInfo, choices: Precision, device: Device, installed: Installed
) -> Backend:
    """Unsloth where it is faster and changes nothing; by name, wherever it does what is planned, else BackendError."""
    obstacle = _unsloth_obstacle(spec, model, choices, device, installed)
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


def _unsloth_obstacle(
    spec: JobSpec, model: BaseModelInfo, choices: Precision, device: Device, installed: Installed
) -> str:
    """Why Unsloth cannot do what is planned, or would silently do something else; empty where it can."""
    if not (installed.has("unsloth") and installed.has("unsloth_zoo")):
        return "Unsloth is not installed here"
    if device.kind == "mps":
        return "Unsloth does not run on Apple GPUs"
    if device.kind == "cuda" and (device.compute_capability or (0, 0)) < (7, 0):
        return f"Unsloth needs compute capability 7.0, and {device.name} has less"
    named, (known, _) = model.config.get("model_type"), known_model_types()
    if named not in known and "auto_map" not in model.config and known:
        return f"Unsloth reads config.json for itself, whose model_type ({named}) is none that transformers knows"
    if device.kind != "cuda" and (model.has_vision or model.has_audio):
        return "Unsloth trains no vision or audio models without an NVIDIA GPU"
    if device.kind != "cuda" and precision.is_full(spec):
        return "Unsloth trains adapters alone without an NVIDIA GPU"
    if device.kind != "cuda" and choices.quantization == "8bit":
        return "Unsloth would load in 16 bits what was asked in 8 bits, on a CPU"
    if device.kind != "cuda" and choices.load_dtype == "float16":
        return "Unsloth would load in bfloat16 what was planned in float16, on a CPU"
    return ""


# --- Warnings ---------------------------------------------------------------------------------------------------------


def _warnings(model: BaseModelInfo, choices: Precision, needed: Memory) -> list[str]:
    found = list(choices.warnings)
    if not needed.fits:
        found.append(
            f"memory: {memory.gib(needed.total_bytes)} are estimated, and there are "
            f"{memory.gib(needed.available_bytes)}: it may run out; "
            f"a smaller per_device_train_batch_size or {'media.max_image_size' if needed.media else 'max_length'} "
            "takes less"
        )
    if model.is_pickled:
        found.append(f"{model.path}: the weights are pickled; their number and dtype are estimated from their size")
    claimed, stored = model.config.get("dtype") or model.config.get("torch_dtype"), model.stored_dtype
    if isinstance(claimed, str) and claimed != stored and not model.is_quantized:
        found.append(
            f"{model.path / 'config.json'}: says {claimed}, but the weights are stored in {stored}; those count"
        )
    return found
