"""Precision, decided once, before anything is loaded: a pure function of the spec, the checkpoint and the device.

    load dtype ──► the trainer's bf16/fp16 ──► the adapter's dtype
        └──► bitsandbytes' compute dtype (the same) and the attention implementation

Every choice carries its reason. A request by name that cannot be met is refused, never silently replaced; `auto` is
resolved here. tests/unit/plan/test_precision.py names the failure that every rule prevents.
"""

from __future__ import annotations

from dataclasses import dataclass

from honed.inputs.basemodel import BaseModelInfo
from honed.job.plan_file import Precision
from honed.plan.rung import Rung, accumulates, candidates, loses
from honed.spec import kind
from honed.spec.media import Part
from honed.spec.spec import JobSpec
from honed.system.device import Device
from honed.system.error import ModelError, SpecError

#: bfloat16 in hardware begins with Ampere, and so does FlashAttention 2.
BFLOAT16_CAPABILITY = (8, 0)
#: LLM.int8() multiplies on the int8 tensor cores that Turing introduced. On a V100 the loss is silently 0.0
#: (bitsandbytes#343), and its authors say that a V100 supports 4-bit, not 8-bit (bitsandbytes#529).
INT8_CAPABILITY = (7, 5)
#: Families, by the beginning of their model_type, that exceed float16's range (65504): some in their activations, so
#: that the loss is not a number, others in the backward pass alone, so that gradients are not and steps are skipped.
OVERFLOWS_FLOAT16 = (
    *("gemma", "embedding_gemma", "recurrent_gemma", "shieldgemma", "vaultgemma"),
    *("t5", "mt5", "umt5", "longt5"),
    *("gpt_oss", "glm4_moe", "qwen3_5", "qwen3_moe"),
)
#: Architectures that scaled_dot_product_attention computes wrongly or not at all, each with the reason.
EAGER_ONLY = {
    "doge": "doge's sdpa sees later tokens where a batch has no padding",
    "gemma2": "gemma2 caps its attention scores, which sdpa does not",
    "gpt_oss": "gpt_oss has attention sinks, which sdpa does not support",
    "mimo_v2_flash": "mimo_v2_flash has attention sinks, which sdpa does not support",
}
#: Architectures without scaled_dot_product_attention in transformers; a test checks the list.
NO_SDPA = frozenset(
    {
        "big_bird",
        "bigbird_pegasus",
        "bloom",
        "codegen",
        "cpmant",
        "deepseek_v4",
        "falcon_mamba",
        "git",
        "got_ocr2",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "mamba",
        "mamba2",
        "megatron-bert",
        "mimo_v2_flash",
        "mpt",
        "mvp",
        "openai-gpt",
        "prophetnet",
        "reformer",
        "rembert",
        "roformer",
        "rwkv",
        "trocr",
        "xglm",
        "xlm",
        "xlnet",
        "xlstm",
    }
)
#: The reason for bitsandbytes' compute dtype, for every quantization.
COMPUTE_REASONS = {
    "none": "nothing is quantized",
    "4bit": "bitsandbytes computes in the dtype of the other weights: two dtypes would meet in one product",
    "8bit": "LLM.int8() converts its inputs to float16 and returns the dtype of the other weights",
}
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class _Choice:
    value: str
    reason: str
    warning: str = ""


def decide(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    *,
    has_flash_attn: bool = False,
    rung: Rung | None = None,
    adapter_dtype: str | None = None,
) -> Precision:
    """Decide all of a job's precision. Raises SpecError or ModelError where a request cannot be met here.

    `rung`: how full fine-tuning keeps the weights; by default the best that the job may be trained on.
    `adapter_dtype`: the one that an earlier plan of the job chose.
    """
    quantization = _quantization(spec, model, device)
    if is_full(spec) and rung is None:
        rung = rungs(spec, model, device)[0]
    load = _load_dtype(spec, model, device, rung, is_quantized=quantization.value != "none")
    flag = _flag(spec, model, device, load.value)
    adapter = _adapter_dtype(spec, load.value, adapter_dtype)
    attention = _attention(
        spec,
        model,
        device,
        load.value,
        quantization.value,
        has_flash_attn=has_flash_attn,
        has_autocast=flag.value != "",
    )
    master, optim, save = _kept(spec, model, rung)
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
            "bf16": "never together with fp16" if flag.value == "fp16" else flag.reason,
            "fp16": "never together with bf16" if flag.value == "bf16" else flag.reason,
            "adapter_dtype": adapter.reason,
            "quantization": quantization.reason,
            "attn_implementation": attention.reason,
            "master_weights": master.reason,
            "optim": optim.reason,
            "save_dtype": save.reason,
        },
        warnings=tuple(
            choice.warning
            for choice in (quantization, load, flag, adapter, attention, master, optim, save)
            if choice.warning
        ),
        master_weights=master.value or None,
        optim=optim.value or None,
        save_dtype=save.value or None,
    )
    _check(precision, device)
    return precision


def _check(precision: Precision, device: Device) -> None:
    """Assert the invariants of every precision; a failure here is a bug in honed."""
    assert not (precision.bf16 and precision.fp16)
    assert not (precision.load_dtype == "bfloat16" and precision.fp16)
    assert not (precision.load_dtype == "float16" and precision.bf16)
    assert not precision.fp16 or device.kind == "cuda"
    assert not precision.fp16 or precision.adapter_dtype == "float32" or precision.load_dtype == "float32"
    assert precision.compute_dtype in (None, precision.load_dtype)
    # A float32 model gets no flag, except full fine-tuning under autocast.
    assert (
        precision.load_dtype != "float32" or precision.adapter_dtype is None or not (precision.bf16 or precision.fp16)
    )
    assert precision.master_weights is None or precision.adapter_dtype is None
    assert (precision.master_weights == "float32") == (
        precision.load_dtype == "float32" and precision.master_weights is not None
    )


def is_full(spec: JobSpec) -> bool:
    """Return True for full fine-tuning: no new adapter, and none to continue from."""
    return kind.of(spec).trains and spec.lora is None and not spec.adapter


#: For each part of a model, the key under `lora:` that says whether it gets an adapter.
PART_KEYS: dict[Part, str] = {
    "language": "finetune_language_layers",
    "vision": "finetune_vision_layers",
    "audio": "finetune_audio_layers",
    "projector": "finetune_projector",
}


def trained_parts(spec: JobSpec) -> frozenset[Part]:
    """Return the parts of a model that are trained, with `lora` through adapters; by default the language model."""
    if spec.lora is None:
        return frozenset(spec.train_parts)
    return frozenset(part for part, key in PART_KEYS.items() if getattr(spec.lora, key))


def can_bfloat16(device: Device) -> bool:
    """Return True if the device computes in bfloat16: any CPU (slowly), Apple from macOS 14, NVIDIA from Ampere on.

    torch.cuda.is_bf16_supported() is no help: it returns True on a T4, which emulates bfloat16.
    """
    if device.kind == "mps":
        return device.has_bfloat16
    return device.kind != "cuda" or (device.compute_capability or (0, 0)) >= BFLOAT16_CAPABILITY


def can_int8(device: Device) -> bool:
    return device.kind != "cuda" or (device.compute_capability or (0, 0)) >= INT8_CAPABILITY


def overflows_float16(model: BaseModelInfo) -> bool:
    return any(family.startswith(OVERFLOWS_FLOAT16) for family in _families(model))


def _families(model: BaseModelInfo) -> tuple[str, ...]:
    """Return the model's own type and that of the language model in it: PaliGemma has Gemma's range of numbers."""
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
            f"{model.path / 'config.json'}: training {model.quantization_method} checkpoints is not supported",
            hint="use the unquantized checkpoint, with quantization: 4bit if memory is short",
        )
    if stored is not None:
        return _stored_quantization(spec, model, device, stored)
    if asked == "none":
        return _Choice("none", "not requested, and the checkpoint is not quantized")
    if device.kind == "mps":
        why = f"bitsandbytes has no {asked} kernels for Apple GPUs: full precision instead"
        return _Choice("none", why, f"quantization: {why}")
    if asked == "8bit" and not can_int8(device):
        raise SpecError(
            f"quantization: 8bit needs compute capability 7.5, which {_device_words(device)} does not have",
            hint="quantization: 4bit works on it",
            fix={"quantization": "4bit"},
        )
    return _Choice(asked, "as the job asks", _int8_warning(asked, model))


def _int8_warning(quantization: str, model: BaseModelInfo) -> str:
    if quantization != "8bit" or not overflows_float16(model):
        return ""
    return (
        f"quantization: 8bit converts every input to float16, in which {model.model_type} is known to overflow; 4bit "
        "does not"
    )


def _stored_quantization(spec: JobSpec, model: BaseModelInfo, device: Device, stored: str) -> _Choice:
    where = f"{model.path / 'config.json'}: the checkpoint is quantized to {stored}"
    if is_full(spec):
        raise ModelError(
            f"{where}, so only an adapter can be trained on it",
            hint="add `lora:`, or use the unquantized checkpoint",
            fix={"lora": {}},
        )
    if spec.quantization not in ("none", stored):
        raise ModelError(
            f"{where}, not {spec.quantization}",
            hint="remove quantization, or use the unquantized checkpoint",
            fix={"quantization": None},
        )
    if device.kind == "mps":
        raise ModelError(
            f"{where}, but bitsandbytes does not support Apple GPUs", hint="use the unquantized checkpoint"
        )
    if stored == "8bit" and not can_int8(device):
        raise ModelError(
            f"{where}, which needs compute capability 7.5, but this is {_device_words(device)}",
            hint="use the unquantized checkpoint, with quantization: 4bit if memory is short",
        )
    return _Choice(stored, "as stored in the checkpoint", _int8_warning(stored, model))


def _load_dtype(
    spec: JobSpec, model: BaseModelInfo, device: Device, rung: Rung | None, *, is_quantized: bool
) -> _Choice:
    if rung is not None:
        return _full_dtype(spec, model, device, rung)
    if spec.dtype != "auto":
        return _asked_dtype(spec, model, device)
    stored = "float32" if model.stored_dtype == "float64" else model.stored_dtype
    fragile = overflows_float16(model)
    if stored == "bfloat16" or (stored == "float16" and not fragile):
        if stored == "float16" or can_bfloat16(device):
            return _Choice(stored, f"the checkpoint stores {stored}")
        return _without_bfloat16(model, device, stored)
    if can_bfloat16(device):
        if stored == "float16":
            return _Choice("bfloat16", f"stored in float16, in which {model.model_type} is known to overflow")
        what = "the unquantized part" if is_quantized else "a frozen base"
        return _Choice("bfloat16", f"stored in {stored}; {what} uses half of that memory without loss in training")
    return _without_bfloat16(model, device, stored)


def _without_bfloat16(model: BaseModelInfo, device: Device, stored: str) -> _Choice:
    why = f"stored in {stored}; {_device_words(device)} does not support bfloat16"
    if overflows_float16(model):
        return _Choice("float32", f"{why}, and {model.model_type} is known to overflow in float16")
    return _Choice("float16", f"{why}, so float16")


def rungs(spec: JobSpec, model: BaseModelInfo, device: Device, *, has_bitsandbytes: bool = False) -> tuple[Rung, ...]:
    """Return the ways to keep the weights in full fine-tuning here, the best first. Raises SpecError if there is none.

    Raises ModelError for a quantized checkpoint. float16 weights are never among the ways: their gradients cannot be
    unscaled.
    """
    if model.quantization is not None:
        raise ModelError(
            f"{model.path / 'config.json'}: the checkpoint is quantized, so only an adapter can be trained on it",
            hint="add `lora:`, or use the unquantized checkpoint",
            fix={"lora": {}},
        )
    _check_bfloat16(spec, device)
    can_half = can_bfloat16(device) and spec.dtype in ("auto", "bfloat16")
    if device.kind == "mps" and spec.master_weights == "compensated":
        raise SpecError(
            "master_weights: compensated is not tested on Apple GPUs",
            hint="master_weights: float32, or none",
            fix={"master_weights": "float32"},
        )
    rungs = candidates(spec, can_half=can_half, has_8bit=has_bitsandbytes and device.kind != "mps")
    if device.kind == "mps":
        rungs = tuple(item for item in rungs if item.master_weights != "compensated")
    if not rungs:
        raise SpecError(
            f"master_weights: {spec.master_weights} needs bfloat16, which {_device_words(device)} does not support",
            hint="master_weights: auto uses float32 on this device",
            fix={"master_weights": "auto"},
        )
    return rungs


def _full_dtype(spec: JobSpec, model: BaseModelInfo, device: Device, rung: Rung) -> _Choice:
    """Choose the weights' dtype in full fine-tuning."""
    stored = model.stored_dtype
    if rung.master_weights == "float32":
        what = "full fine-tuning keeps float32 weights: half precision would round small updates away"
        return _Choice("float32", "as the job asks" if spec.dtype == "float32" else what)
    if not can_bfloat16(device):
        raise SpecError(
            f"this job was planned with bfloat16 weights, which {_device_words(device)} does not support",
            hint="run it on a device with bfloat16",
        )
    what = "bfloat16 weights, " + (
        "with a float32 remainder for each" if rung.master_weights == "compensated" else "without a master copy"
    )
    if stored in ("bfloat16", "float16") or rung.is_pinned:
        return _Choice("bfloat16", what)
    return _Choice(
        "bfloat16", what, f"the checkpoint stores {stored}; bfloat16 weights keep only 8 bits of the mantissa"
    )


def _kept(spec: JobSpec, model: BaseModelInfo, rung: Rung | None) -> tuple[_Choice, _Choice, _Choice]:
    """Choose how full fine-tuning keeps the weights, the optimizer, and the dtype of the output."""
    is_asked = "optim" in spec.training.model_fields_set
    if kind.of(spec).freezes_base:
        nothing = _Choice("", "nothing is trained")
        return nothing, nothing, nothing
    if rung is None:
        optim_reason = "as the job asks" if is_asked else "the default of training.optim"
        nothing = _Choice("", "the base is frozen")
        return nothing, _Choice("", optim_reason), _Choice("", "an adapter is saved in the dtype it was trained in")
    if rung.is_pinned:
        chosen = "chosen when the job was first planned, and kept"
    else:
        chosen = "as the job asks" if spec.master_weights != "auto" else "the best that fits in the device's memory"
    name = rung.optim or spec.training.optim
    warning = loses(name, spec.training.optim_args) if rung.master_weights == "none" else ""
    master = _Choice(rung.master_weights, chosen, f"master_weights: {warning}" if warning else "")
    added = accumulates(rung, spec.training.gradient_accumulation_steps)
    optim = _Choice(rung.optim or "", "as the job asks" if is_asked else chosen, added)
    return master, optim, _save_dtype(spec, model, rung)


def _save_dtype(spec: JobSpec, model: BaseModelInfo, rung: Rung) -> _Choice:
    if rung.is_pinned:
        return _Choice(rung.save_dtype or "", "chosen when the job was first planned")
    if spec.save_dtype != "auto":
        return _Choice(spec.save_dtype, "as the job asks")
    if model.stored_dtype in (*HALF, "float32"):
        return _Choice(model.stored_dtype, "the dtype of the stored checkpoint: weights are cast once, after training")
    return _Choice("float32", f"the checkpoint stores {model.stored_dtype}")


def _asked_dtype(spec: JobSpec, model: BaseModelInfo, device: Device) -> _Choice:
    asked = spec.dtype
    _check_bfloat16(spec, device)
    if asked == "float16" and overflows_float16(model):
        return _Choice(asked, "as the job asks", f"dtype: {model.model_type} is known to overflow in float16")
    return _Choice(asked, "as the job asks")


def _check_bfloat16(spec: JobSpec, device: Device) -> None:
    if spec.dtype == "bfloat16" and not can_bfloat16(device):
        raise SpecError(
            f"dtype: bfloat16 needs {'macOS 14' if device.kind == 'mps' else 'compute capability 8.0'}, which "
            f"{_device_words(device)} does not have",
            hint="use dtype: auto",
            fix={"dtype": "auto"},
        )


def _flag(spec: JobSpec, model: BaseModelInfo, device: Device, load_dtype: str) -> _Choice:
    match load_dtype:
        case "bfloat16":
            return _Choice("bf16", "a bfloat16 model gets its own flag")
        case "float16" if device.kind == "cuda":
            return _Choice("fp16", "a float16 model gets its own flag")
        case "float16":
            return _Choice("", "float16 autocast exists only on CUDA")
        case _ if is_full(spec) and spec.dtype != "float32":
            return _full_autocast(spec, model, device)
        case _ if is_full(spec):
            return _Choice("", "float32 throughout, as the job asks")
        case _:
            return _Choice("", "a float32 model gets no flag")


def _full_autocast(spec: JobSpec, model: BaseModelInfo, device: Device) -> _Choice:
    """Choose autocast for float32 weights: bfloat16 where the checkpoint's numbers have its range, or float32's."""
    wants_float16 = spec.dtype == "float16" or (spec.dtype == "auto" and model.stored_dtype == "float16")
    fragile = overflows_float16(model)
    if device.kind == "mps":
        what = "autocast on Apple GPUs is not tested"
        return _Choice("", f"float32 throughout: {what}", _no_float16(spec, what))
    if device.kind == "cpu" and (wants_float16 or (spec.dtype == "auto" and model.stored_dtype != "bfloat16")):
        what = "float16 autocast exists only on CUDA" if wants_float16 else "autocast would have no benefit here"
        return _Choice("", f"float32 throughout: {what}", _no_float16(spec, what))
    if can_bfloat16(device) and (fragile or not wants_float16):
        why = "full fine-tuning with float32 weights, computed in bfloat16 under autocast"
        return _Choice("bf16", why, _no_float16(spec, f"bfloat16 instead: {model.model_type} is known to overflow"))
    if fragile:
        why = (
            f"float32 throughout: this device does not support bfloat16, and {model.model_type} is known to overflow "
            "in float16"
        )
        return _Choice("", why, _no_float16(spec, why))
    return _Choice("fp16", "full fine-tuning with float32 weights, computed in float16 under autocast")


def _no_float16(spec: JobSpec, why: str) -> str:
    return f"dtype: float16: {why}" if spec.dtype == "float16" else ""


def _adapter_dtype(spec: JobSpec, load_dtype: str, pinned: str | None) -> _Choice:
    """Choose the dtype of what is trained beside a frozen base: float32 by default, whatever the dtype of the base."""
    if is_full(spec):
        return _Choice("", "full fine-tuning: there is no adapter")
    if kind.of(spec).freezes_base and not spec.adapter:
        return _Choice("float32", "there is no adapter: nothing of the model is trained")
    if spec.adapter_dtype == "bfloat16":
        if load_dtype != "bfloat16":
            raise SpecError(
                f"adapter_dtype: bfloat16 needs a bfloat16 model, but this one is loaded in {load_dtype}",
                hint="adapter_dtype: auto keeps adapters in float32",
                fix={"adapter_dtype": "auto"},
            )
        why = "adapters in bfloat16 lose updates smaller than 1/256 of a weight; see docs/precision.md"
        return _Choice("bfloat16", "as the job asks", f"adapter_dtype: {why}")
    if spec.adapter_dtype == "float32":
        return _Choice("float32", "as the job asks")
    if pinned == "bfloat16" and load_dtype == "bfloat16":
        return _Choice("bfloat16", "chosen when the job was first planned, and kept")
    if load_dtype == "float16":
        return _Choice("float32", "a GradScaler cannot unscale half-precision gradients")
    if load_dtype == "bfloat16":
        return _Choice("float32", "small updates would be lost in bfloat16, and an adapter needs little memory")
    return _Choice("float32", "as for the model")


def _attention(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    load_dtype: str,
    quantization: str,
    *,
    has_flash_attn: bool,
    has_autocast: bool,
) -> _Choice:
    asked = spec.attn_implementation
    if asked == "flash_attention_2":
        _check_flash_attention(device, load_dtype, has_flash_attn=has_flash_attn, has_autocast=has_autocast)
        warning = ""
        if quantization != "none":
            warning = "attn_implementation: FlashAttention with quantized weights has failed in practice; sdpa has not"
        return _Choice(asked, "as the job asks", warning)
    eager_reason = next((EAGER_ONLY[family] for family in _families(model) if family in EAGER_ONLY), None)
    if eager_reason is None and NO_SDPA.intersection(_families(model)):
        eager_reason = f"transformers supports no other for {model.model_type}"
    if asked == "auto" and eager_reason:
        return _Choice("eager", eager_reason)
    if asked == "auto":
        return _Choice("sdpa", "torch's own, which works with every dtype and device")
    warning = f"attn_implementation: {eager_reason}" if asked == "sdpa" and eager_reason else ""
    return _Choice(asked, "as the job asks", warning)


def _check_flash_attention(device: Device, load_dtype: str, *, has_flash_attn: bool, has_autocast: bool) -> None:
    reasons = {
        f"FlashAttention needs an NVIDIA GPU, but this is {device.name}": device.kind != "cuda",
        f"FlashAttention 2 needs compute capability 8.0, which {_device_words(device)} does not have": device.kind
        == "cuda"
        and not can_bfloat16(device),
        f"FlashAttention needs half precision, but the model is loaded in {load_dtype}": load_dtype not in HALF
        and not has_autocast,
        "the package flash_attn is not installed": not has_flash_attn,
    }
    for reason, holds in reasons.items():
        if holds:
            raise SpecError(
                f"attn_implementation: {reason}",
                hint="use attn_implementation: auto, which selects sdpa",
                fix={"attn_implementation": None},
            )
