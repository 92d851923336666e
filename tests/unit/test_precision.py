"""Every precision rule, each with the failure that it prevents; then the invariants over the whole space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed import precision
from honed import spec as job_spec
from honed.basemodel import BaseModelInfo, Tensor
from honed.device import Device
from honed.error import HonedError, ModelError, SpecError
from honed.precision import Precision
from honed.spec import JobSpec

GIB = 2**30
DEVICES = {
    "H100": Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * GIB, 80 * GIB),
    "A100": Device("cuda", "NVIDIA A100", 0, "GPU-0", (8, 0), 40 * GIB, 40 * GIB),
    "L4": Device("cuda", "NVIDIA L4", 0, "GPU-0", (8, 9), 24 * GIB, 24 * GIB),
    "T4": Device("cuda", "Tesla T4", 0, "GPU-0", (7, 5), 16 * GIB, 16 * GIB),
    "V100": Device("cuda", "Tesla V100", 0, "GPU-0", (7, 0), 32 * GIB, 32 * GIB),
    "CPU": Device("cpu", "a processor", total_bytes=24 * GIB, free_bytes=20 * GIB),
    "MPS": Device("mps", "Apple GPU", total_bytes=32 * GIB, free_bytes=20 * GIB),
}
NEW = ("H100", "A100", "L4")  #: CUDA with bfloat16
OLD = ("T4", "V100")  #: CUDA without
HALF = ("bfloat16", "float16")


def model(stored: str = "bfloat16", model_type: str = "qwen3", **fields: Any) -> BaseModelInfo:
    """A base model of 1000 parameters, stored in that dtype."""
    known: dict[str, Any] = {
        "path": Path("/m"), "model_type": model_type, "architectures": (), "config": {"dtype": stored},
        "num_parameters": 1000, "stored_dtypes": {stored: 1000}, "num_weight_bytes": 2000,
        "tensors": (Tensor("a.weight", stored, (10, 100)),), "is_quantized": False, "quantization_method": None,
        "chat_template": None, "has_vision": False, "has_audio": False, "is_pickled": False,
    }  # fmt: skip
    return BaseModelInfo(**(known | fields))


def quantized(method: str = "bitsandbytes", **quantization: Any) -> BaseModelInfo:
    config = {"dtype": "float16", "quantization_config": {"quant_method": method, **quantization}}
    return model(
        config=config, is_quantized=True, quantization_method=method, stored_dtypes={"uint8": 900, "float32": 9}
    )


def spec(*, full: bool = False, **keys: Any) -> JobSpec:
    tuning = {} if full or "adapter" in keys else {"lora": {}}
    return job_spec.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], **tuning, **keys})


def decide(device: str, given: BaseModelInfo, **keys: Any) -> Precision:
    return precision.decide(spec(**keys), given, DEVICES[device])


def flags(found: Precision) -> str:
    return "bf16" * found.bf16 + "fp16" * found.fp16 or "none"


# name: (devices, stored, model_type, keys of the spec) → load dtype, flags, adapter dtype
RULES: list[tuple[tuple[str, ...], str, str, dict[str, Any], tuple[str, str, str | None]]] = [
    # The model is in bfloat16 and the flag says fp16: Unsloth's mismatch error (seed 000).
    ((*NEW, "CPU", "MPS"), "bfloat16", "qwen3", {}, ("bfloat16", "bf16", "float32")),
    (NEW, "float16", "qwen3", {}, ("float16", "fp16", "float32")),
    # A frozen base in float32 takes twice the memory for nothing.
    ((*NEW, "CPU"), "float32", "qwen3", {}, ("bfloat16", "bf16", "float32")),
    ((*NEW, "CPU"), "float64", "qwen3", {}, ("bfloat16", "bf16", "float32")),
    # bfloat16 on a T4 or V100 is emulated or refused; half-precision adapters cannot be unscaled by GradScaler.
    (OLD, "bfloat16", "qwen3", {}, ("float16", "fp16", "float32")),
    (OLD, "float32", "llama", {}, ("float16", "fp16", "float32")),
    # Gemma and T5 overflow in float16: the loss is not a number.
    (OLD, "bfloat16", "gemma2", {}, ("float32", "none", "float32")),
    (OLD, "float16", "gemma3_text", {}, ("float32", "none", "float32")),
    (NEW, "float16", "gemma2", {}, ("bfloat16", "bf16", "float32")),
    (OLD, "bfloat16", "gemma", {"quantization": "4bit"}, ("float32", "none", "float32")),
    # accelerate takes fp16 on a CPU, and does nothing.
    (("CPU", "MPS"), "float16", "qwen3", {}, ("float16", "none", "float32")),
    (("CPU",), "bfloat16", "qwen3", {"dtype": "float16"}, ("float16", "none", "float32")),
    # QLoRA: SFTTrainer casts the adapters of a quantized model to bfloat16, which fp16's GradScaler cannot unscale.
    ((*NEW, "CPU"), "bfloat16", "qwen3", {"quantization": "4bit"}, ("bfloat16", "bf16", "bfloat16")),
    ((*NEW, "CPU"), "float32", "qwen3", {"quantization": "8bit"}, ("bfloat16", "bf16", "bfloat16")),
    (OLD, "bfloat16", "llama", {"quantization": "4bit"}, ("float16", "fp16", "float32")),
    (NEW, "float16", "llama", {"quantization": "4bit"}, ("float16", "fp16", "float32")),
    (NEW, "bfloat16", "llama", {"quantization": "4bit", "dtype": "float16"}, ("float16", "fp16", "float32")),
    (("CPU",), "bfloat16", "llama", {"quantization": "4bit", "dtype": "float32"}, ("float32", "none", "float32")),
    # Asked by name: as asked, whatever is stored.
    (tuple(DEVICES), "bfloat16", "qwen3", {"dtype": "float32"}, ("float32", "none", "float32")),
    (tuple(DEVICES), "float16", "qwen3", {"dtype": "float32", "full": True}, ("float32", "none", None)),
    ((*NEW, "CPU", "MPS"), "float32", "qwen3", {"dtype": "bfloat16", "full": True}, ("bfloat16", "bf16", None)),
    # Going on from an adapter is no full fine-tuning.
    (NEW, "bfloat16", "qwen3", {"adapter": "/a"}, ("bfloat16", "bf16", "float32")),
    # Full fine-tuning: float16 weights have gradients that cannot be unscaled.
    ((*NEW, "CPU", "MPS"), "bfloat16", "qwen3", {"full": True}, ("bfloat16", "bf16", None)),
    ((*NEW, *OLD), "float16", "qwen3", {"full": True}, ("float32", "fp16", None)),
    (("CPU", "MPS"), "float16", "qwen3", {"full": True}, ("float32", "none", None)),
    (OLD, "bfloat16", "qwen3", {"full": True}, ("float32", "fp16", None)),
    (OLD, "bfloat16", "gemma2", {"full": True}, ("float32", "none", None)),
    (NEW, "float16", "gemma2", {"full": True}, ("bfloat16", "bf16", None)),
    (NEW, "float32", "qwen3", {"full": True}, ("float32", "bf16", None)),
    (OLD, "float32", "qwen3", {"full": True}, ("float32", "fp16", None)),
    (("CPU", "MPS"), "float32", "qwen3", {"full": True}, ("float32", "none", None)),
    ((*NEW, *OLD), "bfloat16", "qwen3", {"full": True, "dtype": "float16"}, ("float32", "fp16", None)),
    (("CPU",), "bfloat16", "qwen3", {"full": True, "dtype": "float16"}, ("float32", "none", None)),
    (OLD, "float32", "gemma2", {"full": True, "dtype": "float16"}, ("float32", "none", None)),
]
CELLS = [(device, *rule) for devices, *rule in RULES for device in devices]


@pytest.mark.parametrize(("device", "stored", "model_type", "keys", "expected"), CELLS, ids=str)
def test_precision_follows_the_rule(
    device: str, stored: str, model_type: str, keys: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    found = decide(device, model(stored, model_type), **keys)
    assert (found.load_dtype, flags(found), found.adapter_dtype) == expected
    assert all(found.reasons.values())


def test_a_dtype_that_the_device_has_not_is_refused_and_not_replaced() -> None:
    with pytest.raises(SpecError, match=r"Tesla T4 \(compute capability 7\.5\) has less") as raised:
        decide("T4", model(), dtype="bfloat16")
    assert "dtype: auto" in raised.value.hint


def test_full_fine_tuning_in_float16_is_warned_about() -> None:
    assert "float32 weights" in decide("CPU", model(), full=True, dtype="float16").warnings[0]


def test_float16_by_name_for_a_family_that_overflows_is_warned_about() -> None:
    assert "gemma2" in decide("H100", model("bfloat16", "gemma2"), dtype="float16").warnings[0]


def test_apple_gpus_get_full_precision_with_a_warning_for_quantization() -> None:
    found = decide("MPS", model(), quantization="4bit")
    assert found.quantization == "none"
    assert found.compute_dtype is None
    assert "no 4bit kernels" in found.warnings[0]


def test_a_checkpoint_quantized_by_bitsandbytes_stays_so() -> None:
    found = precision.decide(spec(), quantized(load_in_4bit=True), DEVICES["T4"])
    assert (found.quantization, found.compute_dtype, found.load_dtype) == ("4bit", "float16", "float16")
    assert precision.decide(spec(), quantized(load_in_8bit=True), DEVICES["T4"]).quantization == "8bit"


@pytest.mark.parametrize(
    ("given", "device", "keys", "message"),
    [
        (quantized(load_in_4bit=True), "H100", {"full": True}, "only an adapter"),
        (quantized(load_in_4bit=True), "H100", {"quantization": "8bit"}, "not 8bit"),
        (quantized(load_in_4bit=True), "MPS", {}, "does not run on Apple GPUs"),
        (quantized("gptq", bits=4), "H100", {}, "gptq checkpoints are not trained by this version"),
        (quantized("awq"), "CPU", {}, "awq checkpoints"),
        (quantized("fp8"), "H100", {"full": True}, "fp8 checkpoints"),
    ],
)
def test_a_quantized_checkpoint_that_cannot_be_trained_so_is_refused(
    given: BaseModelInfo, device: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        precision.decide(spec(**keys), given, DEVICES[device])
    assert raised.value.hint


@pytest.mark.parametrize("name", ["H100", "T4", "CPU", "MPS"])
def test_attention_is_sdpa_unless_asked(name: str) -> None:
    found = precision.decide(spec(), model(), DEVICES[name], has_flash_attn=True)
    assert found.attn_implementation == "sdpa"


def test_attention_that_sdpa_computes_wrongly_is_eager() -> None:
    assert decide("H100", model(model_type="gemma2")).attn_implementation == "eager"
    asked = decide("H100", model(model_type="gemma2"), attn_implementation="sdpa")
    assert asked.attn_implementation == "sdpa"
    assert "caps its attention scores" in asked.warnings[0]


@pytest.mark.parametrize(
    ("device", "keys", "has_flash_attn", "message"),
    [
        ("CPU", {}, True, "NVIDIA GPUs alone"),
        ("MPS", {}, True, "NVIDIA GPUs alone"),
        ("T4", {}, True, "compute capability 8.0"),
        ("A100", {"dtype": "float32"}, True, "loaded in float32"),
        ("A100", {}, False, "flash_attn is not installed"),
    ],
)
def test_flash_attention_that_cannot_be_is_refused(
    device: str, keys: dict[str, Any], has_flash_attn: bool, message: str
) -> None:
    asked = spec(attn_implementation="flash_attention_2", **keys)
    with pytest.raises(SpecError, match=message):
        precision.decide(asked, model(), DEVICES[device], has_flash_attn=has_flash_attn)


def test_flash_attention_by_name_is_had_where_it_can_be_and_warned_about_beside_quantized_weights() -> None:
    asked = spec(attn_implementation="flash_attention_2")
    assert precision.decide(asked, model(), DEVICES["A100"], has_flash_attn=True).warnings == ()
    asked = spec(attn_implementation="flash_attention_2", quantization="4bit")
    found = precision.decide(asked, model(), DEVICES["A100"], has_flash_attn=True)
    assert found.attn_implementation == "flash_attention_2"
    assert "quantized" in found.warnings[0]


@settings(max_examples=400, deadline=None)
@given(
    device=st.sampled_from(list(DEVICES)),
    stored=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    model_type=st.sampled_from(["qwen3", "llama", "gemma2", "gemma3_text", "gpt2"]),
    asked=st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
    quantization=st.sampled_from(["none", "4bit", "8bit"]),
    full=st.booleans(),
    attention=st.sampled_from(["auto", "sdpa", "eager", "flash_attention_2"]),
    has_flash_attn=st.booleans(),
)
def test_whatever_is_asked_the_choices_fit_together(
    device: str, stored: str, model_type: str, asked: str, quantization: str, full: bool, attention: str,
    has_flash_attn: bool,
) -> None:  # fmt: skip
    keys = {"dtype": asked, "attn_implementation": attention}
    job = spec(full=True, **keys) if full else spec(quantization=quantization, **keys)
    found_device = DEVICES[device]
    try:
        found = precision.decide(job, model(stored, model_type), found_device, has_flash_attn=has_flash_attn)
    except HonedError as error:
        assert error.hint
        assert asked == "bfloat16" or attention == "flash_attention_2", "auto is never refused"
        return
    assert not (found.bf16 and found.fp16)
    if found.load_dtype == "bfloat16":
        assert found.bf16
        assert precision.can_bfloat16(found_device)
    if found.load_dtype == "float16":
        assert found.fp16 == (found_device.kind == "cuda")
        assert not full, "float16 weights cannot be trained"
    if found.load_dtype == "float32" and not full:
        assert not found.bf16
        assert not found.fp16
    if found.fp16:
        assert found_device.kind == "cuda"
        assert found.adapter_dtype == ("float32" if not full else None)
    if found.bf16:
        assert precision.can_bfloat16(found_device)
    if asked != "auto" and not (full and asked == "float16"):
        assert found.load_dtype == asked
    if asked == "auto" and precision.overflows_float16(model_type):
        assert found.load_dtype != "float16" and not found.fp16
    assert found.compute_dtype == (found.load_dtype if found.quantization != "none" else None)
    assert (found.adapter_dtype is None) == full
    if found.attn_implementation == "flash_attention_2":
        assert found.load_dtype in HALF
    fields = set(Precision.__dataclass_fields__) - {"reasons", "warnings"}
    assert set(found.reasons) == fields
    assert all(found.reasons.values())
