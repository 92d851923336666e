"""Precision, decided once, before anything is loaded: a pure function of the spec, the checkpoint and the device.

    load dtype ──► the trainer's bf16/fp16 ──► the adapter's dtype
        └──► bitsandbytes' compute dtype (the same) and the attention implementation

Every choice carries its reason. What was asked for by name and cannot be is refused, never replaced in silence; what
`auto` stands for is chosen here. tests/unit/test_precision.py tells the failure that each rule prevents.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from honed.basemodel import BaseModelInfo
from honed.device import Device
from honed.error import ModelError, SpecError
from honed.modality import Part
from honed.spec import JobSpec

#: bfloat16 in hardware begins with Ampere, and so does FlashAttention 2.
BFLOAT16_CAPABILITY = (8, 0)
#: LLM.int8() multiplies on the int8 tensor cores that Turing brought. On a V100 the loss is silently 0.0
#: (bitsandbytes#343), and its authors' word is that 8-bit is not supported there and 4-bit is (bitsandbytes#529).
INT8_CAPABILITY = (7, 5)
#: Families, by the beginning of their model_type, that leave float16's range (65504): some in their activations, so
#: that the loss is not a number, some in the backward pass alone, so that the gradient is not and steps are skipped.
OVERFLOWS_FLOAT16 = (
    *("gemma", "embedding_gemma", "recurrent_gemma", "shieldgemma", "vaultgemma"),
    *("t5", "mt5", "umt5", "longt5"),
    *("gpt_oss", "glm4_moe", "qwen3_5", "qwen3_moe"),
)
#: Architectures that scaled_dot_product_attention computes wrongly or not at all, each with the reason.
EAGER_ONLY = {
    "gemma2": "gemma2 caps its attention scores, which sdpa leaves out",
    "gpt_oss": "gpt_oss has attention sinks, which sdpa does not know",
    "mimo_v2_flash": "mimo_v2_flash has attention sinks, which sdpa does not know",
}
#: Architectures that transformers has no scaled_dot_product_attention for; a test holds the list.
NO_SDPA = frozenset({
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "cpmant", "deepseek_v4", "falcon_mamba", "git", "got_ocr2",
    "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "mamba", "mamba2",
    "megatron-bert", "mimo_v2_flash", "mpt", "mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer",
    "rwkv", "trocr", "xglm", "xlm", "xlnet", "xlstm",
})  # fmt: skip
#: For each quantization, why bitsandbytes computes as it does.
COMPUTE_REASONS = {
    "none": "nothing is quantized",
    "4bit": "bitsandbytes computes in the dtype that the rest is loaded in: two dtypes would meet in one product",
    "8bit": "LLM.int8() takes its inputs through float16 and answers in the dtype that the rest is loaded in",
}
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Precision:
    """Every choice; dtypes in torch's words. The invariants are those of `_check`."""

    load_dtype: str  #: handed to from_pretrained
    compute_dtype: str | None  #: bitsandbytes'; None without quantization
    bf16: bool  #: the trainer's flag: autocast to bfloat16
    fp16: bool  #: the trainer's flag: autocast to float16, with a GradScaler
    adapter_dtype: str | None  #: of every trainable parameter beside a frozen base; None for full fine-tuning
    quantization: str  #: none, 4bit, 8bit
    attn_implementation: str
    reasons: dict[str, str]  #: why, for each field above
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        choices = asdict(self)
        del choices["warnings"]  # they stand with the plan's others
        return choices


@dataclass(frozen=True)
class _Choice:
    value: str
    reason: str
    warning: str = ""


def decide(spec: JobSpec, model: BaseModelInfo, device: Device, *, has_flash_attn: bool = False) -> Precision:
    """All of a job's precision. Raises SpecError or ModelError where what was asked for cannot be had here."""
    quantization = _quantization(spec, model, device)
    load = _load_dtype(spec, model, device, is_quantized=quantization.value != "none")
    flag = _flag(spec, model, device, load.value)
    adapter = _adapter_dtype(spec, load.value, is_quantized=quantization.value != "none")
    attention = _attention(spec, model, device, load.value, quantization.value, has_flash_attn=has_flash_attn)
    is_quantized = quantization.value != "none"
    precision = Precision(
        load_dtype=load.value,
        compute_dtype=load.value if is_quantized else None,
        bf16=flag.value == "bf16",
        fp16=flag.value == "fp16",
        adapter_dtype=adapter.value or None,
        quantization=quantization.value,
        attn_implementation=attention.value,
        reasons={
            "load_dtype": load.reason,
            "compute_dtype": COMPUTE_REASONS[quantization.value],
            "bf16": "never beside fp16" if flag.value == "fp16" else flag.reason,
            "fp16": "never beside bf16" if flag.value == "bf16" else flag.reason,
            "adapter_dtype": adapter.reason,
            "quantization": quantization.reason,
            "attn_implementation": attention.reason,
        },
        warnings=tuple(choice.warning for choice in (quantization, load, flag, attention) if choice.warning),
    )
    _check(precision, device)
    return precision


def _check(precision: Precision, device: Device) -> None:
    """What must hold whatever was asked; a failure here is a bug of ours."""
    assert not (precision.bf16 and precision.fp16)
    assert not (precision.load_dtype == "bfloat16" and precision.fp16)
    assert not (precision.load_dtype == "float16" and precision.bf16)
    assert not precision.fp16 or device.kind == "cuda"
    assert not precision.fp16 or precision.adapter_dtype == "float32" or precision.load_dtype == "float32"
    assert precision.compute_dtype in (None, precision.load_dtype)


def is_full(spec: JobSpec) -> bool:
    """Whether every parameter is trained: no new adapter, and none to go on from."""
    return spec.lora is None and not spec.adapter


#: For each part of a model, the key under `lora:` that says whether it gets an adapter.
PART_KEYS: dict[Part, str] = {
    "language": "finetune_language_layers",
    "vision": "finetune_vision_layers",
    "audio": "finetune_audio_layers",
    "projector": "finetune_projector",
}


def trained_parts(spec: JobSpec) -> frozenset[Part]:
    """The parts of a model that are trained: without `lora` the language model, whole."""
    if spec.lora is None:
        return frozenset({"language"})
    return frozenset(part for part, key in PART_KEYS.items() if getattr(spec.lora, key))


def can_bfloat16(device: Device) -> bool:
    """A CPU and an Apple GPU compute in bfloat16, if slowly; an NVIDIA GPU from Ampere on.

    torch.cuda.is_bf16_supported() is no help: it says yes on a T4, which emulates.
    """
    return device.kind != "cuda" or (device.compute_capability or (0, 0)) >= BFLOAT16_CAPABILITY


def can_int8(device: Device) -> bool:
    return device.kind != "cuda" or (device.compute_capability or (0, 0)) >= INT8_CAPABILITY


def overflows_float16(model: BaseModelInfo) -> bool:
    return any(family.startswith(OVERFLOWS_FLOAT16) for family in _families(model))


def _families(model: BaseModelInfo) -> tuple[str, ...]:
    """The model's own type, and that of the language model in it: PaliGemma has Gemma's numbers."""
    text = model.config.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    return (model.model_type, inner) if isinstance(inner, str) else (model.model_type,)


def _device_words(device: Device) -> str:
    if device.kind != "cuda" or device.compute_capability is None:
        return device.name
    return "{} (compute capability {}.{})".format(device.name, *device.compute_capability)


def _quantization(spec: JobSpec, model: BaseModelInfo, device: Device) -> _Choice:
    asked, stored = spec.quantization, model.quantization
    if model.is_quantized and stored is None:
        raise ModelError(
            f"{model.path / 'config.json'}: {model.quantization_method} checkpoints are not trained by this version",
            hint="take the unquantized checkpoint, with quantization: 4bit if memory is short",
        )
    if stored is not None:
        return _stored_quantization(spec, model, device, stored)
    if asked == "none":
        return _Choice("none", "not asked for, and the checkpoint is not quantized")
    if device.kind == "mps":
        why = f"bitsandbytes has no {asked} kernels for Apple GPUs: full precision instead"
        return _Choice("none", why, f"quantization: {why}")
    if asked == "8bit" and not can_int8(device):
        raise SpecError(
            f"quantization: 8bit needs compute capability 7.5; {_device_words(device)} has less",
            hint="quantization: 4bit runs on it",
        )
    return _Choice(asked, "as the job asks", _int8_warning(asked, model))


def _int8_warning(quantization: str, model: BaseModelInfo) -> str:
    if quantization != "8bit" or not overflows_float16(model):
        return ""
    return (
        f"quantization: 8bit takes every input through float16, in which {model.model_type} is known to overflow; "
        "4bit does not"
    )


def _stored_quantization(spec: JobSpec, model: BaseModelInfo, device: Device, stored: str) -> _Choice:
    where = f"{model.path / 'config.json'}: the checkpoint is quantized to {stored}"
    if is_full(spec):
        raise ModelError(
            f"{where}, so only an adapter can be trained on it", hint="add `lora:`, or take the unquantized one"
        )
    if spec.quantization not in ("none", stored):
        raise ModelError(f"{where}, not {spec.quantization}", hint=f"quantization: {stored}, or leave it out")
    if device.kind == "mps":
        raise ModelError(
            f"{where}, and bitsandbytes does not run on Apple GPUs", hint="take the unquantized checkpoint"
        )
    if stored == "8bit" and not can_int8(device):
        raise ModelError(
            f"{where}, which needs compute capability 7.5; {_device_words(device)} has less",
            hint="take the unquantized checkpoint, with quantization: 4bit if memory is short",
        )
    return _Choice(stored, "the checkpoint is stored so", _int8_warning(stored, model))


def _load_dtype(spec: JobSpec, model: BaseModelInfo, device: Device, *, is_quantized: bool) -> _Choice:
    if spec.dtype != "auto":
        return _asked_dtype(spec, model, device)
    stored = "float32" if model.stored_dtype == "float64" else model.stored_dtype
    if is_full(spec):
        return _full_dtype(model, device, stored)
    fragile = overflows_float16(model)
    if stored == "bfloat16" or (stored == "float16" and not fragile):
        if stored == "float16" or can_bfloat16(device):
            return _Choice(stored, f"the checkpoint stores {stored}")
        return _without_bfloat16(model, device, stored)
    if can_bfloat16(device):
        if stored == "float16":
            return _Choice("bfloat16", f"stored in float16, in which {model.model_type} is known to overflow")
        what = "what is not quantized" if is_quantized else "a frozen base"
        return _Choice("bfloat16", f"stored in {stored}; {what} loads in half of that without loss of training")
    return _without_bfloat16(model, device, stored)


def _without_bfloat16(model: BaseModelInfo, device: Device, stored: str) -> _Choice:
    """A frozen base on a device that has no bfloat16."""
    why = f"stored in {stored}; {_device_words(device)} has no bfloat16"
    if overflows_float16(model):
        return _Choice("float32", f"{why}, and {model.model_type} is known to overflow in float16")
    return _Choice("float16", f"{why}, so float16")


def _full_dtype(model: BaseModelInfo, device: Device, stored: str) -> _Choice:
    if stored == "bfloat16" and can_bfloat16(device):
        return _Choice("bfloat16", "the checkpoint stores bfloat16")
    if stored == "float16" and overflows_float16(model) and can_bfloat16(device):
        return _Choice("bfloat16", f"stored in float16, in which {model.model_type} is known to overflow")
    if stored == "float32":
        return _Choice("float32", "the checkpoint stores float32, and all of it is trained")
    why = (
        "gradients of float16 weights cannot be unscaled"
        if stored == "float16"
        else f"{_device_words(device)} has no bfloat16"
    )
    return _Choice("float32", f"stored in {stored}, but {why}: full fine-tuning keeps float32 weights")


def _asked_dtype(spec: JobSpec, model: BaseModelInfo, device: Device) -> _Choice:
    asked = spec.dtype
    if asked == "bfloat16" and not can_bfloat16(device):
        raise SpecError(
            f"dtype: bfloat16 needs compute capability 8.0; {_device_words(device)} has less",
            hint="dtype: auto chooses what this device can",
        )
    if asked == "float16" and is_full(spec):
        why = "as the job asks for float16, whose gradients cannot be unscaled: full fine-tuning keeps float32 weights"
        return _Choice("float32", why, f"dtype: float16 with full fine-tuning: {why}")
    if asked == "float16" and overflows_float16(model):
        return _Choice(asked, "as the job asks", f"dtype: {model.model_type} is known to overflow in float16")
    return _Choice(asked, "as the job asks")


def _flag(spec: JobSpec, model: BaseModelInfo, device: Device, load_dtype: str) -> _Choice:
    match load_dtype:
        case "bfloat16":
            return _Choice("bf16", "the model is in bfloat16, and a half-precision model gets its own flag")
        case "float16" if device.kind == "cuda":
            return _Choice("fp16", "the model is in float16, and a half-precision model gets its own flag")
        case "float16":
            return _Choice("", "float16 autocast exists on CUDA alone")
        case _ if is_full(spec) and device.kind == "cuda" and spec.dtype != "float32":
            return _full_autocast(spec, model, device)
        case _ if is_full(spec) and device.kind != "cuda":
            return _Choice("", "float32 weights, and autocast would gain nothing here")
        case _:
            return _Choice("", "a float32 model gets no flag")


def _full_autocast(spec: JobSpec, model: BaseModelInfo, device: Device) -> _Choice:
    """Float32 weights under autocast: bfloat16 where the checkpoint's numbers are of its range, or float32's."""
    wants_float16 = spec.dtype == "float16" or model.stored_dtype == "float16"
    fragile = overflows_float16(model)
    if can_bfloat16(device) and (fragile or not wants_float16):
        return _Choice("bf16", "full fine-tuning with float32 weights, computed in bfloat16 under autocast")
    if fragile:
        return _Choice(
            "", f"float32 throughout: no bfloat16 here, and {model.model_type} is known to overflow in float16"
        )
    return _Choice("fp16", "full fine-tuning with float32 weights, computed in float16 under autocast")


def _adapter_dtype(spec: JobSpec, load_dtype: str, *, is_quantized: bool) -> _Choice:
    if is_full(spec):
        return _Choice("", "full fine-tuning: there is no adapter")
    if is_quantized and load_dtype == "bfloat16":
        return _Choice(
            "bfloat16", "QLoRA's own recommendation, and what SFTTrainer casts a quantized model's adapters to"
        )
    if load_dtype == "float16":
        return _Choice("float32", "a GradScaler cannot unscale half-precision gradients")
    if load_dtype == "bfloat16":
        return _Choice("float32", "small updates would be lost in bfloat16; peft keeps adapters so by default")
    return _Choice("float32", "as the model")


def _attention(
    spec: JobSpec, model: BaseModelInfo, device: Device, load_dtype: str, quantization: str, *, has_flash_attn: bool
) -> _Choice:
    asked = spec.attn_implementation
    if asked == "flash_attention_2":
        _check_flash_attention(device, load_dtype, has_flash_attn=has_flash_attn)
        warning = ""
        if quantization != "none":
            warning = (
                "attn_implementation: FlashAttention beside quantized weights has failed in the field; sdpa has not"
            )
        return _Choice(asked, "as the job asks", warning)
    eager_reason = next((EAGER_ONLY[family] for family in _families(model) if family in EAGER_ONLY), None)
    if eager_reason is None and NO_SDPA.intersection(_families(model)):
        eager_reason = f"transformers has no other for {model.model_type}"
    if asked == "auto" and eager_reason:
        return _Choice("eager", eager_reason)
    if asked == "auto":
        return _Choice("sdpa", "torch's own, in every dtype and on every device")
    warning = f"attn_implementation: {eager_reason}" if asked == "sdpa" and eager_reason else ""
    return _Choice(asked, "as the job asks", warning)


def _check_flash_attention(device: Device, load_dtype: str, *, has_flash_attn: bool) -> None:
    reasons = {
        f"FlashAttention runs on NVIDIA GPUs alone, and this is {device.name}": device.kind != "cuda",
        f"FlashAttention 2 needs compute capability 8.0; {_device_words(device)} has less": device.kind == "cuda"
        and not can_bfloat16(device),
        f"FlashAttention takes half precision, and the model is loaded in {load_dtype}": load_dtype not in HALF,
        "the package flash_attn is not installed": not has_flash_attn,
    }
    for reason, holds in reasons.items():
        if holds:
            raise SpecError(f"attn_implementation: {reason}", hint="attn_implementation: auto takes sdpa")
