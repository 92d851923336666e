"""The config that a model is loaded with, the class for it, and the model without weights."""

from __future__ import annotations

import copy
import json
from typing import Any

from honed.system.installed import MODEL_TYPE_ALIASES
from honed.worker.assignment import Assignment


def load_config(assignment: Assignment) -> Any:
    """Return the model's config, under the spec's model_type where config.json has none or another name for it.

    The result is always a config object: code that loads a quantized model reads the attribute `model_type`, which a
    dict lacks.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = assignment.base_model_path
    raw = json.loads((path / "config.json").read_bytes())
    stored = raw.get("model_type")
    model_type = assignment.spec.model_type or stored
    if model_type not in CONFIG_MAPPING:
        model_type = MODEL_TYPE_ALIASES.get(str(model_type), model_type)
    if model_type == stored or model_type not in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(path, trust_remote_code=assignment.spec.trust_remote_code)
    raw.pop("model_type", None)
    return CONFIG_MAPPING[model_type].from_dict(raw)


def model_class(config: Any) -> Any:
    """Return the auto class for a config: for vision and audio models the one for the whole, not for text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    own = getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in own:
        return AutoModelForCausalLM
    if "AutoModelForImageTextToText" in own or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    hears = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if hears else AutoModelForCausalLM


def skeleton(config: Any, dtype: str, *, trust_remote_code: bool) -> Any:
    """Build a model as it is loaded in a dtype, on meta."""
    import torch

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return model_class(config).from_config(config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
