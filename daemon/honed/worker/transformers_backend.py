"""Loading with transformers, bitsandbytes and peft alone."""

from __future__ import annotations

from typing import Any

from honed.error import ModelError
from honed.precision import Precision
from honed.worker.assignment import Assignment
from honed.worker.load import load_config


class TransformersBackend:
    """The backend that works everywhere."""

    name = "transformers"

    def import_libraries(self) -> None:
        import transformers  # noqa: F401

    def load_model(self, assignment: Assignment) -> Any:
        model = load_base(assignment, load_config(assignment))
        return attach_adapter(model, assignment)


def load_base(assignment: Assignment, config: Any, *, dtype: str | None = None) -> Any:
    """The base model. With a `dtype` of its own it is loaded unquantized, for a merge."""
    import torch
    from transformers import AutoModelForCausalLM

    precision = assignment.precision
    options: dict[str, Any] = {"quantization_config": None if dtype else quantization_config(precision)}
    if options["quantization_config"] is None:
        del options["quantization_config"]  # an explicit None would discard a quantized checkpoint's own
    if torch.cuda.is_available() and not dtype:
        options["device_map"] = {"": 0}
    model, info = AutoModelForCausalLM.from_pretrained(
        assignment.base_model_path,
        config=config,
        dtype=getattr(torch, dtype or precision.load_dtype),
        attn_implementation=precision.attn_implementation,
        trust_remote_code=assignment.spec.trust_remote_code,
        output_loading_info=True,
        **options,
    )
    if missing := sorted(info["missing_keys"]):
        # transformers would train on random numbers in their place, with a warning in a log.
        raise ModelError(
            f"{assignment.base_model_path}: no weights for {', '.join(missing[:5])}{' …' if missing[5:] else ''}",
            hint="the checkpoint is incomplete, or is of another architecture than its config.json says",
        )
    keep_trainable_layout(model)
    return model


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
        options = spec.lora.model_dump(exclude_unset=False, exclude_none=True)
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    cast_trainable(model, assignment.precision)
    return model


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
