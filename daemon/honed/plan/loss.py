"""Losses that a job's other keys and its model allow.

On a GPU TRL's default loss works in chunks and never holds all logits. It bypasses an adapter on the head, cannot
smooth labels, and multiplies by the head's weights alone, whatever else the model does on the way to its logits
(Granite divides them). The worker uses the plain loss in these cases. `worker/train/losscheck.py` compares the loss
with the model's logits, to find cases that are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from honed.inputs.basemodel import AdapterInfo, BaseModelInfo
from honed.spec.spec import JobSpec
from honed.system import installed
from honed.system.error import SpecError

#: Names of the output layer in the different families.
_HEADS = ("lm_head", "embed_out", "output_layer")
#: Tokens per chunk of logits in TRL's chunked loss.
CHUNKED_TOKENS = 256
#: Operations of a model on its logits, or on its head's input, that the chunked loss leaves out: keys of config.json,
#: each with the value at which the operation does nothing.
_SCALES: Mapping[str, float] = {"logits_scaling": 1, "lm_head_multiplier": 1, "logits_mup_width_multiplier": 1}
#: Families that do so whatever their config.json says; whose head is more than one layer; that have a key which the
#: chunked loss applies and they do not; or whose parts it cannot distinguish.
_OWN_HEADS = frozenset(
    {
        "recurrent_gemma",
        "minicpm3",
        "modernbert-decoder",
        "mpt",
        "llama4",
        "llama4_text",
        "mllama",
        "mllama_text_model",
        "inkling_text",
        "inkling_mm_model",
    }
)


def own_head(config: Mapping[str, Any]) -> str | None:
    """Name a model's operation on its logits that the chunked loss leaves out, or None; `config` is its config.json."""
    for section in (config, config.get("text_config")):
        if not isinstance(section, Mapping):
            continue
        for key, nothing in _SCALES.items():
            if isinstance(value := section.get(key), int | float) and value != nothing:
                return f"{key} = {value:g} in its config.json"
        if (name := section.get("model_type")) in _OWN_HEADS:
            return f"the head of {name}"
    return None


def why_whole(
    spec: JobSpec, adapter_config: Mapping[str, Any] | None, config: Mapping[str, Any] | None = None
) -> str | None:
    """Return the reason why the loss must see all logits at once, or None if it need not.

    `adapter_config` is peft's config of `adapter:`; `config` is the model's config.json.
    """
    if spec.training.label_smoothing_factor:
        return "label_smoothing_factor"
    lora = spec.lora.target_modules if spec.lora is not None else None
    if any(_is_head(target) for target in _targets(lora)):
        return "the head in lora.target_modules"
    if adapter_config is not None and any(
        _is_head(target) for target in _targets(adapter_config.get("target_modules"))
    ):
        return "an adapter on the head"
    return f"the model ({why})" if config is not None and (why := own_head(config)) else None


def logits_bytes(num_tokens: int, vocabulary: int, size: int, *, is_chunked: bool) -> int:
    """Return the bytes of logits: as computed, with `size` bytes each, in float32 for the loss, and their gradient."""
    return (min(num_tokens, CHUNKED_TOKENS) if is_chunked else num_tokens) * vocabulary * (size + 8)


def check(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> None:
    """Raise SpecError for a loss that the model or the adapter does not support."""
    why = why_whole(spec, adapter.config if adapter else None, model.config)
    if spec.training.loss_type == "chunked_nll" and why:
        raise SpecError(
            f"training.loss_type: chunked_nll is not compatible with {why}: it never computes the model's logits",
            hint="write nll, or remove loss_type",
            fix={"training.loss_type": "nll"},
        )
    known, _ = installed.known_model_types()
    is_own = "auto_map" in model.config and model.model_type not in known
    if spec.training.label_smoothing_factor and (is_own or model.model_type in installed.unshifted_model_types()):
        raise SpecError(
            f"training.label_smoothing_factor: for {model.model_type}, transformers would smooth the labels without "
            "shifting them, which trains the model to repeat each token",
            hint="remove it",
            fix={"training.label_smoothing_factor": None},
        )


def _targets(wanted: Any) -> Iterator[str]:
    """Yield the names in peft's `target_modules`; for a regular expression, the names of heads that match it."""
    match wanted:
        case "all-linear" | None:  # peft leaves the head out
            return
        case str():
            yield from (head for head in _HEADS if re.fullmatch(wanted, head))
        case list() | tuple():
            yield from (str(item) for item in wanted)


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] in _HEADS
