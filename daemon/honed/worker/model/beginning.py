"""The base's weights as a training of an adapter began with them.

PiSSA and OLoRA take the adapter's first weights out of the base, in the dtype in which it was loaded; OLoRA also out of
a quantized one, which is quantized again. What was trained stands on these weights, so a merge does, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job.plan_file import Precision

#: The initializations that are repeated here: they depend on the weights alone.
REPEATED = ("pissa", "olora")


@dataclass(frozen=True)
class Loaded:
    """How the base was loaded for the training."""

    dtype: str = "float32"
    quantization: str = "none"
    #: Modules that were not quantized, as transformers matches them.
    left_out: tuple[str, ...] = ()


def planned(precision: Precision, model: Any) -> Loaded:
    """Return how a base is loaded for a training; `model` may be on meta, and is not wrapped by peft."""
    from transformers.quantizers.base import get_keys_to_not_convert

    from honed.worker.model.transformers_backend import quantization_config

    settings = quantization_config(precision, model)
    named = None if settings is None else settings.llm_int8_skip_modules
    left_out = () if settings is None else tuple(named or get_keys_to_not_convert(model))
    return Loaded(precision.load_dtype, precision.quantization, left_out)


def of_adapter(adapter_dir: Path) -> Precision | None:
    """Return the precision in which honed trained an adapter, from its manifest; None for one that has none."""
    try:
        precision = json.loads((adapter_dir / "honed.json").read_bytes())["plan"]["precision"]
        return Precision(**precision)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def repeat(layer: Any, init: str, name: str, loaded: Loaded) -> None:
    """Take the first weights out of a LoRA layer's base, whose weight is in float32, as the training did.

    The layer's trained weights stay.
    """
    import torch

    base = layer.get_base_layer()
    trained = {key: parameter.data for key, parameter in layer.named_parameters() if ".base_layer" not in f".{key}"}
    weight = base.weight.data.to(getattr(torch, loaded.dtype))
    if loaded.quantization != "none" and _is_quantized(base, name, loaded):
        weight = _out_of_quantized(layer, weight, loaded.quantization)
    else:
        base.weight.data = weight
        layer.pissa_init("default", "pissa") if init == "pissa" else layer.olora_init("default")
        weight = base.weight.data
    base.weight.data = weight.to(torch.float32)
    for key, parameter in layer.named_parameters():
        if key in trained:
            parameter.data = trained[key]


def _is_quantized(base: Any, name: str, loaded: Loaded) -> bool:
    import torch
    from transformers.quantizers.quantizers_utils import should_convert_module

    return isinstance(base, torch.nn.Linear) and should_convert_module(name, list(loaded.left_out))


def _out_of_quantized(layer: Any, weight: Any, quantization: str) -> Any:
    """Return the weight from which peft's OLoRA took the adapter's first weights while it was quantized."""
    import torch
    from bitsandbytes import functional, nn

    outputs, inputs = weight.shape
    packed: Any
    if quantization == "4bit":
        packed = nn.Linear4bit(inputs, outputs, bias=False, compress_statistics=True, quant_type="nf4", device="meta")
        packed.weight = nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=packed).to(weight.device)
    else:
        packed = nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False, device="meta")
        packed.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(weight.device)
    base, layer.base_layer = layer.base_layer, packed
    try:
        layer.olora_init("default")
    finally:
        layer.base_layer = base
    stored = packed.weight
    if quantization == "4bit":
        return functional.dequantize_4bit(stored.data, stored.quant_state)
    return stored.data.to(torch.float32) * stored.SCB.to(torch.float32)[:, None] / 127.0
