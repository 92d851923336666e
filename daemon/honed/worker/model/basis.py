"""What an adapter stands on. A checkpoint of it has no weights of the base, so a run that resumes compares these.

    checkpoint-N/BASE.json            weights   a digest of samples of every layer, as its files have it
                                      begun     numbers of layers that the initialization has changed (PiSSA, OLoRA)
    checkpoint-N/BUFFERS.safetensors  the buffers that training has changed (statistics of batch norms), put back

The numbers are of the attempt's beginning: an attempt may go on in another dtype, on another device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from honed.system import quote
from honed.system.error import ModelError
from honed.worker.model import published, tensorfile, verify

NAME, BUFFERS_NAME = "BASE.json", "BUFFERS.safetensors"
#: Initializations that leave the base as it is.
_UNCHANGING = ("true", "false", "gaussian")
#: How far a layer's numbers may be apart when an initialization is repeated, relative to their size: float32, half
#: precision, quantized. With another number of threads at most 1.5e-5, 0.0035 and 0 were measured; with one other
#: singular vector of a random matrix of 1024 0.03, with other directions of a quantized one 0.25.
_TOLERANCE, _HALF_TOLERANCE, _QUANTIZED_TOLERANCE = 0.001, 0.01, 0.1
_MAX_NAMED = 3


@dataclass(frozen=True)
class Basis:
    base_dir: Path
    compared: verify.Compared
    begun: Mapping[str, list[float]]
    buffers: Mapping[str, str]  #: their digests before training
    tolerance: float

    def write(self, directory: Path, model: Any) -> None:
        """Write it beside an adapter."""
        document = {"weights": self.compared.digests, "begun": self.begun}
        (directory / NAME).write_text(json.dumps(document) + "\n", encoding="utf-8")
        if changed := self._changed(model):
            save_file(changed, directory / BUFFERS_NAME)

    def uncarried(self, model: Any) -> str:
        """Return a warning about buffers that training has changed and that the adapter's files do not have; empty
        where there are none."""
        lost = sorted(name for name in self._changed(model) if "modules_to_save" not in name.split("."))
        if not lost:
            return ""
        return (
            f"training has changed buffers that an adapter does not carry: {quote.first(lost, _MAX_NAMED)}: opened on "
            "its base, it computes with those of the base; lora.modules_to_save carries a module with its buffers"
        )

    def _changed(self, model: Any) -> dict[str, Any]:
        """Return copies of the buffers that training has changed."""
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in published.buffers(model)}
        return {
            name: item
            for name, item in buffers.items()
            if tensorfile.digests({name: item})[name] != self.buffers.get(name)
        }

    def restore(self, directory: Path, model: Any) -> None:
        """Put back the buffers that training had changed. Raises ModelError, naming the layers, unless the adapter was
        trained on what this run has loaded."""
        stored = json.loads((directory / NAME).read_bytes())
        weights, digests = stored["weights"], self.compared.digests
        if other := sorted(name for name in weights.keys() | digests.keys() if weights.get(name) != digests.get(name)):
            raise ModelError(
                f"{self.base_dir} has other weights than the run began with: {quote.first(other, _MAX_NAMED)}",
                hint=f"put the files back as they were, or submit the job again: {directory.name} does not fit others",
            )
        if other := [name for name, numbers in stored["begun"].items() if not self._is_near(name, numbers)]:
            raise ModelError(
                f"init_lora_weights has changed the base otherwise than for {directory.name}: "
                f"{quote.first(sorted(other), _MAX_NAMED)}",
                hint="continue on the same kind of device, with the same version of torch, or submit the job again",
            )
        if (path := directory / BUFFERS_NAME).is_file():
            held = dict(published.buffers(model))
            for name, buffer in load_file(path).items():
                held[name].copy_(buffer)

    def _is_near(self, name: str, numbers: list[float]) -> bool:
        held = self.begun.get(name, [])
        if len(held) != len(numbers):
            return False
        apart = sum((one - other) ** 2 for one, other in zip(held, numbers, strict=True))
        return bool(apart <= self.tolerance**2 * sum(number**2 for number in numbers))


def of(base_dir: Path, compared: verify.Compared, model: Any) -> Basis:
    """Return what a model wrapped by peft stands on, before it is trained."""
    init = getattr(model.peft_config["default"], "init_lora_weights", True)
    is_changed = str(init).lower() not in _UNCHANGING
    begun = {name: verify.numbers(weight) for name, weight in _wrapped(model)} if is_changed else {}
    tolerance = _TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE
    if getattr(model.get_base_model(), "hf_quantizer", None) is not None:
        tolerance = _QUANTIZED_TOLERANCE
    return Basis(base_dir, compared, begun, tensorfile.digests(dict(published.buffers(model))), tolerance)


def _wrapped(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and hasattr(module.get_base_layer(), "weight"):
            yield name, module.get_base_layer().weight
