"""Checks that a stored adapter fits its base model: a partial fit would resume from zeros, or be merged in part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from honed.inputs.basemodel import read_header
from honed.system import quote
from honed.system.error import ModelError

#: Advice for an adapter that does not fit.
OTHER_BASE = "set base_model to the model it was trained on: see base_model_name_or_path in its adapter_config.json"


def check_fits(empty: Any, adapter_dir: Path) -> None:
    """Raise ModelError for an adapter that fits a model only in part, as peft itself finds on a model without weights.

    `empty`, on meta, is wrapped in the adapter and cannot be used for anything else afterwards.
    """
    import peft
    import torch

    config = peft.PeftConfig.from_pretrained(adapter_dir)
    config.init_lora_weights = False  # nothing is drawn
    stored, _ = read_header(adapter_dir / "adapter_model.safetensors", hint="the adapter is incomplete: copy it again")
    state = {each.name: torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta") for each in stored}
    wrap(empty, config, state, adapter_dir)


def wrap(model: Any, config: Any, state: dict[str, Any], adapter_dir: Path) -> Any:
    """Wrap the model's modules in place, load an adapter's stored tensors into them, and return the wrapped model.

    Raises ModelError where the tensors do not fit the model, or only in part.
    """
    import peft

    try:
        wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
        found = peft.set_peft_model_state_dict(wrapped, state, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError) as error:
        said = " ".join(str(error).split())[:300]
        raise ModelError(f"{adapter_dir}: does not match {type(model).__name__}: {said}", hint=OTHER_BASE) from error
    check_fitted(adapter_dir, wrapped, found)
    return wrapped


def check_fitted(adapter_dir: Path, wrapped: Any, found: Any) -> None:
    """Raise ModelError if peft left out weights of an adapter, or started some from zeros, according to `found`.

    Weights beside those that the model's class ignores are accepted: they had no gradient, as in layers that share
    keys.
    """
    lacking = sorted(name for name in found.missing_keys if ".lora_" in name or ".modules_to_save." in name)
    model = wrapped.get_base_model()
    homeless = sorted(name for name in found.unexpected_keys if not is_passed_over(model, name))
    for names, what in (
        (homeless, "has weights that do not exist in the base model"),
        (lacking, "lacks weights that its own adapter_config.json requires"),
    ):
        if names:
            raise ModelError(f"{adapter_dir}: {what}: {quote.first(names, 3)}", hint=OTHER_BASE)


def is_passed_over(model: Any, name: str) -> bool:
    """Return True if a model's class declares that it ignores a stored weight of this name."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(each, name) for each in patterns)
