"""Which loss a job's other keys leave to choose from.

What TRL takes by itself on a GPU goes in chunks and never has all logits: it passes an adapter on the head by, and has
nothing to smooth labels with. The worker takes the plain loss then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from honed import installed
from honed.basemodel import AdapterInfo, BaseModelInfo
from honed.error import SpecError
from honed.spec import JobSpec

#: What families call the layer that writes.
_HEADS = ("lm_head", "embed_out", "output_layer")


def why_whole(spec: JobSpec, adapter_config: Mapping[str, Any] | None) -> str | None:
    """Why the loss must see all logits at once; None where it need not. `adapter_config` is peft's, of `adapter:`."""
    if spec.training.label_smoothing_factor:
        return "label_smoothing_factor"
    lora = spec.lora.target_modules if spec.lora is not None else None
    if any(_is_head(each) for each in _targets(lora)):
        return "lora.target_modules with the head"
    if adapter_config is not None and any(_is_head(each) for each in _targets(adapter_config.get("target_modules"))):
        return "an adapter on the head"
    return None


def default_type(spec: JobSpec, *, has_gpu: bool) -> str | None:
    """What is taken where the spec names none; None leaves it to TRL, whose own saves a GPU's memory.

    From TRL 1.15 on that one is a Triton kernel, which a CPU cannot run.
    """
    return None if has_gpu and why_whole(spec, _adapter_config(spec)) is None else "nll"


def check(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> None:
    """Raises SpecError for a loss that the model or the adapter does not go with."""
    why = why_whole(spec, adapter.config if adapter else None)
    if spec.training.loss_type == "chunked_nll" and why:
        raise SpecError(
            f"training.loss_type: chunked_nll does not go with {why}: it never has all logits",
            hint="write nll, or leave loss_type out",
        )
    known, _ = installed.known_model_types()
    is_own = "auto_map" in model.config and model.model_type not in known
    if spec.training.label_smoothing_factor and (is_own or model.model_type in installed.unshifted_model_types()):
        raise SpecError(
            f"training.label_smoothing_factor: transformers would smooth the labels of {model.model_type} without "
            "moving them to the token before, which trains it to repeat each token",
            hint="leave it out",
        )


def _adapter_config(spec: JobSpec) -> dict[str, Any] | None:
    """adapter_config.json of the adapter that the job goes on from."""
    if spec.adapter is None:
        return None
    found = json.loads((Path(spec.adapter) / "adapter_config.json").read_bytes())
    return found if isinstance(found, dict) else None


def _targets(wanted: Any) -> Iterator[str]:
    """The names in peft's `target_modules`; of a regular expression, the heads' that fit."""
    match wanted:
        case "all-linear" | None:  # peft leaves the head out
            return
        case str():
            yield from (head for head in _HEADS if re.fullmatch(wanted, head))
        case list() | tuple():
            yield from (str(each) for each in wanted)


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] in _HEADS
