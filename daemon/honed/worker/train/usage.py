"""The memory that a run really holds, for comparison with the plan's estimate.

Every tensor is counted once, by its storage: tied weights, views and tables that bitsandbytes shares are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from honed.job.event import EventWriter
from honed.worker.model import division

#: Parameters that peft added to a model, by their names.
_ADDED = re.compile(r"\.lora_|\.modules_to_save\.|\.trainable_tokens_")


class Usage(TrainerCallback):
    """Measurement of memory at the moments when it is held: gradients before a step, the optimizer's state after."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self.held: dict[str, int] = {}

    def built(self, model: Any) -> None:
        """Measure the model and its adapter, once they are built."""
        self.held |= _model_bytes(model)
        self._emit("built")

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **kwargs: Any) -> None:
        if "gradient_bytes" not in self.held:
            gradients = (parameter.grad for parameter in kwargs["model"].parameters())
            self.held["gradient_bytes"] = num_bytes(gradient for gradient in gradients if gradient is not None)

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **kwargs: Any) -> None:
        if "optimizer_bytes" not in self.held:
            states = kwargs["optimizer"].state.values()
            self.held["optimizer_bytes"] = num_bytes(tensor for one in states for tensor in _tensors(one))

    def trained(self, model: Any) -> dict[str, int]:
        """Measure at the end of training. Return all measurements, peaks included."""
        self.held |= _model_bytes(model) | peaks()
        self._emit("trained")
        return self.held

    def _emit(self, when: str) -> None:
        self._events.emit("memory", when=when, **self.held)


def _model_bytes(model: Any) -> dict[str, int]:
    division.reshard(model)
    weights: list[Any] = [buffer for _, buffer in model.named_buffers()]
    adapter: list[Any] = []
    for name, parameter in model.named_parameters():
        (adapter if _ADDED.search(name) else weights).append(parameter)
    for parameter in list(weights):
        weights += _tensors(vars(parameter))  # bitsandbytes attaches its scales to the parameter
    for module in model.modules():
        weights += _tensors(vars(getattr(module, "state", None) or object)) if _is_8bit(module) else []
        weights += _tensors(module.__dict__.get("quant_state"))  # the scales of a divided 4-bit weight
    return {"weights_bytes": num_bytes(weights), "adapter_bytes": num_bytes(adapter)}


def _is_8bit(module: Any) -> bool:
    """Return True for Linear8bitLt, which moves its weight's scales into its state at the first forward pass."""
    return type(getattr(module, "state", None)).__name__ == "MatmulLtState"


def _tensors(value: Any) -> Iterator[Any]:
    """Yield all tensors below a value: in dicts and lists, and in bitsandbytes' QuantState."""
    match value:
        case torch.Tensor():
            yield value
        case dict():
            for item in value.values():
                yield from _tensors(item)
        case list() | tuple():
            for item in value:
                yield from _tensors(item)
        case _ if type(value).__name__ == "QuantState":
            yield from _tensors(vars(value))


def num_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages behind tensors, counted once; those on the meta device hold nothing.

    Of a divided tensor, this rank's part counts.
    """
    storages = {}
    for tensor in map(division.part_of, tensors):
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peaks() -> dict[str, int]:
    """Return the peak memory: as torch allocated it on the GPU, and this process's resident memory."""
    peaks_by_name = {"resident_peak_bytes": _resident_peak()}
    if torch.cuda.is_available():
        peaks_by_name["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    return peaks_by_name


def _resident_peak(status_path: Path = Path("/proc/self/status")) -> int:
    """Return the peak resident memory; 0 if unknown. Unlike getrusage's, it does not begin with the parent's."""
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", status_path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
