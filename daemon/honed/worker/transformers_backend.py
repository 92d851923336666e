"""Loading with transformers, bitsandbytes and peft alone."""

from __future__ import annotations

import re
from typing import Any

from honed.basemodel import QUANTIZATION_STATE, is_vision_module, read_names
from honed.error import ModelError
from honed.precision import Precision
from honed.worker.assignment import Assignment
from honed.worker.load import load_config


class TransformersBackend:
    """The backend that works everywhere."""

    name = "transformers"

    def import_libraries(self) -> None:
        import transformers  # noqa: F401

    def load_base(self, assignment: Assignment) -> Any:
        return load_base(assignment, load_config(assignment))

    def attach_adapter(self, model: Any, assignment: Assignment) -> Any:
        return attach_adapter(model, assignment)


def load_base(assignment: Assignment, config: Any) -> Any:
    """The base model, as planned."""
    import torch

    precision = assignment.precision
    options: dict[str, Any] = {}
    own = getattr(config, "quantization_config", None)
    if not own:
        options["quantization_config"] = quantization_config(precision)
    elif isinstance(own, dict) and precision.compute_dtype is not None:
        own["bnb_4bit_compute_dtype"] = precision.compute_dtype  # the stored one is that of another machine
    if torch.cuda.is_available():
        options["device_map"] = {"": 0}
    if not assignment.plan.get("checkpoint", {}).get("is_pickled"):
        options["use_safetensors"] = True  # no pickle that came after the check
    check_complete(assignment, config)
    model, info = model_class(config).from_pretrained(
        assignment.base_model_path,
        config=config,
        dtype=getattr(torch, precision.load_dtype),
        attn_implementation=precision.attn_implementation,
        trust_remote_code=assignment.spec.trust_remote_code,
        output_loading_info=True,
        **options,
    )
    if missing := sorted(info["missing_keys"]):
        raise incomplete(assignment, missing)
    keep_trainable_layout(model)
    return model


def check_complete(assignment: Assignment, config: Any) -> None:
    """Raises ModelError for weights that no file names, before any is read.

    Only where every stored name is one of the model's own: what is stored under other names is known once it is loaded.
    """
    import torch

    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=assignment.spec.trust_remote_code)
    wanted = set(model.state_dict())
    stored = {name for name in read_names(assignment.base_model_path) if not QUANTIZATION_STATE.search(name)}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = sorted(
        name
        for name in wanted - stored - set(getattr(model, "all_tied_weights_keys", None) or ())
        if not any(re.search(pattern, name) for pattern in ignored)
    )
    if missing and stored and stored <= wanted:
        raise incomplete(assignment, missing)


def incomplete(assignment: Assignment, missing: list[str]) -> ModelError:
    """What is missing; transformers would train on random numbers in its place, with a warning in a log."""
    return ModelError(
        f"{assignment.base_model_path}: no weights for {', '.join(missing[:5])}{' …' if missing[5:] else ''}",
        hint="the checkpoint is incomplete, or is of another architecture than its config.json says",
    )


def model_class(config: Any) -> Any:
    """The auto class for a config: a vision model whole, though a text model of its name may be there, too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    own = getattr(config, "auto_map", None) or {}
    sees = "AutoModelForImageTextToText" in own or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees and "AutoModelForCausalLM" not in own else AutoModelForCausalLM


def quantization_config(precision: Precision) -> Any:
    """bitsandbytes' config as planned, or None."""
    import torch
    from transformers import BitsAndBytesConfig

    match precision.quantization:
        case "4bit":
            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=getattr(torch, precision.compute_dtype or precision.load_dtype),
            )
        case "8bit":
            return BitsAndBytesConfig(load_in_8bit=True)
        case _:
            return None


def keep_trainable_layout(model: Any) -> None:
    """Keep 4-bit weights as backward needs them.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks a Linear4bit in place at its first forward in eval mode, and
    never back; backward through the packed weight is wrong. Our predictions at step 0 are such a forward.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def attach_adapter(model: Any, assignment: Assignment) -> Any:
    """Wrap the model in a new LoRA adapter, or in the one to go on from; a full fine-tuning gets its model back.

    An adapter is the language model's alone: rows of text teach eyes and ears nothing.

    peft's prepare_model_for_kbit_training is left out: it would cast every norm, embedding and head of a quantized
    model to float32, against the plan. What it does besides, freezing and input gradients, get_peft_model and
    SFTTrainer do.
    """
    spec = assignment.spec
    if not spec.adapter and spec.lora is None:
        return model
    import peft

    if spec.adapter:
        model = peft.PeftModel.from_pretrained(model, spec.adapter, is_trainable=True)
    elif spec.lora is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora_options(model, assignment)))
    cast_trainable(model, assignment.precision)
    return model


def lora_options(model: Any, assignment: Assignment) -> dict[str, Any]:
    """peft's LoraConfig as the spec has it, with the model's eyes and ears left out."""
    assert assignment.spec.lora is not None
    options = assignment.spec.lora.model_dump(exclude_unset=False, exclude_none=True)
    towers = [
        name for name, _ in model.named_modules() if is_vision_module(name) and not is_vision_module(_parent(name))
    ]
    if towers:
        excluded = options.get("exclude_modules") or []
        if not isinstance(excluded, str):
            excluded = rf"(.*\.)?({'|'.join(map(re.escape, excluded))})" if excluded else ""
        ours = rf"({'|'.join(map(re.escape, towers))})(\..*)?"
        options["exclude_modules"] = f"({excluded})|({ours})" if excluded else ours
    return options


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def cast_trainable(model: Any, precision: Precision) -> list[str]:
    """Bring every trainable parameter into the planned dtype, in place; returns the names of those that were not."""
    import torch

    if precision.adapter_dtype is None:
        return []
    dtype = getattr(torch, precision.adapter_dtype)
    wrong = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype != dtype
    ]
    parameters = dict(model.named_parameters())
    for name in wrong:
        parameters[name].data = parameters[name].data.to(dtype)
    return wrong
