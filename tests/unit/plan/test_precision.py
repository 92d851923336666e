"""Every precision rule, with the failure that it prevents; then the invariants over the whole space."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.inputs.basemodel import BaseModelInfo, Tensor
from honed.job.plan_file import Precision
from honed.plan import plan, precision, remedy
from honed.spec import jobfile
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.system.device import Device
from honed.system.error import HonedError, MemoryShortError, ModelError, SpecError
from honed.system.installed import Installed

GIB = 2**30
INSTALLED = Installed({"unsloth": None, "unsloth_zoo": None, "flash_attn": None}, frozenset())
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
    """Return a base model of 1000 parameters, stored in that dtype."""
    known: dict[str, Any] = {
        "path": Path("/m"),
        "model_type": model_type,
        "architectures": (),
        "config": {"dtype": stored},
        "num_parameters": 1000,
        "stored_dtypes": {stored: 1000},
        "num_weight_bytes": 2000,
        "tensors": (Tensor("a.weight", stored, (10, 100)),),
        "is_quantized": False,
        "quantization_method": None,
        "chat_template": None,
        "has_vision": False,
        "has_audio": False,
        "is_pickled": False,
    }
    return BaseModelInfo(**(known | fields))


def quantized(method: str = "bitsandbytes", **quantization: Any) -> BaseModelInfo:
    config = {"dtype": "float16", "quantization_config": {"quant_method": method, **quantization}}
    return model(
        config=config, is_quantized=True, quantization_method=method, stored_dtypes={"uint8": 900, "float32": 9}
    )


def spec(*, full: bool = False, **keys: Any) -> JobSpec:
    tuning = {} if full or "adapter" in keys else {"lora": {}}
    return jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], **tuning, **keys})


def decide(device: str, given: BaseModelInfo, **keys: Any) -> Precision:
    return precision.decide(spec(**keys), given, DEVICES[device])


def flags(found: Precision) -> str:
    return "bf16" * found.bf16 + "fp16" * found.fp16 or "none"


#: The failure that each rule prevents; then devices, stored dtype, model_type, keys of the spec; then load dtype, flags
#: and the dtype of what is trained beside a frozen base.
Rule = tuple[str, tuple[str, ...], str, str, dict[str, Any], tuple[str, str, str | None]]
FLAG = "a flag of another dtype than the model's: Unsloth's and accelerate's mismatch error"
RULES: list[Rule] = [
    (FLAG, (*NEW, "CPU", "MPS"), "bfloat16", "qwen3", {}, ("bfloat16", "bf16", "float32")),
    (FLAG, NEW, "float16", "qwen3", {}, ("float16", "fp16", "float32")),
    (FLAG, (*NEW, "CPU"), "float32", "qwen3",
     {"dtype": "bfloat16", "full": True, "master_weights": "none"}, ("bfloat16", "bf16", None)),
    ("SFTConfig's own default: bf16 for a float32 model", tuple(DEVICES), "bfloat16", "qwen3",
     {"dtype": "float32"}, ("float32", "none", "float32")),
    ("float32 asked for by name and computed in float16, for want of bfloat16", tuple(DEVICES), "float16", "qwen3",
     {"dtype": "float32", "full": True}, ("float32", "none", None)),
    ("a frozen base in float32: twice the memory for nothing", (*NEW, "CPU", "MPS"), "float32", "qwen3",
     {}, ("bfloat16", "bf16", "float32")),
    ("a frozen base in float64: four times the memory", (*NEW, "CPU"), "float64", "qwen3",
     {}, ("bfloat16", "bf16", "float32")),
    ("bfloat16 where it is emulated, though torch says that it is supported", OLD, "bfloat16", "qwen3",
     {}, ("float16", "fp16", "float32")),
    ("float32 at full size where float16 would do", OLD, "float32", "llama", {}, ("float16", "fp16", "float32")),
    # Activations beyond 65504: the loss is not a number.
    ("Gemma overflows in float16", OLD, "bfloat16", "gemma2", {}, ("float32", "none", "float32")),
    ("Gemma 3 overflows in float16", OLD, "float16", "gemma3_text", {}, ("float32", "none", "float32")),
    ("Gemma overflows in float16, quantized too", OLD, "bfloat16", "gemma",
     {"quantization": "4bit"}, ("float32", "none", "float32")),
    ("Gemma stored in float16 overflows in it", NEW, "float16", "gemma2", {}, ("bfloat16", "bf16", "float32")),
    ("T5 overflows in float16", OLD, "float32", "t5", {}, ("float32", "none", "float32")),
    ("mT5 overflows in float16", OLD, "bfloat16", "mt5", {"full": True}, ("float32", "none", None)),
    # Gradients beyond 65504: the loss is finite, and every step is skipped.
    ("Gemma 4's gradients overflow in float16", OLD, "bfloat16", "gemma4_text", {}, ("float32", "none", "float32")),
    ("Qwen3-MoE's gradients overflow in float16", OLD, "bfloat16", "qwen3_moe", {}, ("float32", "none", "float32")),
    ("GLM-4's gradients overflow in float16", OLD, "bfloat16", "glm4_moe", {}, ("float32", "none", "float32")),
    ("gpt-oss overflows in float16", OLD, "bfloat16", "gpt_oss", {}, ("float32", "none", "float32")),
    # accelerate takes fp16 on a CPU, and does nothing.
    ("an fp16 flag that does nothing", ("CPU", "MPS"), "float16", "qwen3", {}, ("float16", "none", "float32")),
    ("an fp16 flag that does nothing", ("CPU",), "bfloat16", "qwen3",
     {"dtype": "float16"}, ("float16", "none", "float32")),
    ("an fp16 flag that does nothing", ("CPU", "MPS"), "float16", "qwen3", {"full": True}, ("float32", "none", None)),
    ("an fp16 flag that does nothing", ("CPU",), "bfloat16", "qwen3",
     {"full": True, "dtype": "float16"}, ("float32", "none", None)),
    ("updates of QLoRA's adapters lost: SFTTrainer would round these to bfloat16", (*NEW, "CPU"), "bfloat16", "qwen3",
     {"quantization": "4bit"}, ("bfloat16", "bf16", "float32")),
    ("updates of QLoRA's adapters lost: SFTTrainer would round these to bfloat16", (*NEW, "CPU"), "float32", "qwen3",
     {"quantization": "8bit"}, ("bfloat16", "bf16", "float32")),
    ("an adapter's dtype that is asked for and replaced", (*NEW, "CPU"), "bfloat16", "qwen3",
     {"adapter_dtype": "bfloat16"}, ("bfloat16", "bf16", "bfloat16")),
    ("an adapter's dtype that is asked for and replaced", (*NEW, "CPU"), "bfloat16", "qwen3",
     {"adapter": "/a", "adapter_dtype": "bfloat16", "quantization": "4bit"}, ("bfloat16", "bf16", "bfloat16")),
    # _amp_foreach_non_finite_check_and_unscale_cuda not implemented for 'BFloat16'
    ("bfloat16 adapters under fp16, which GradScaler has no kernel for", OLD, "bfloat16", "llama",
     {"quantization": "4bit"}, ("float16", "fp16", "float32")),
    ("bfloat16 adapters under fp16, which GradScaler has no kernel for", NEW, "bfloat16", "llama",
     {"quantization": "4bit", "dtype": "float16"}, ("float16", "fp16", "float32")),
    ("Attempting to unscale FP16 gradients: of adapters", NEW, "float16", "llama",
     {"quantization": "4bit"}, ("float16", "fp16", "float32")),
    ("Attempting to unscale FP16 gradients: of full weights", (*NEW, *OLD), "float16", "qwen3",
     {"full": True}, ("float32", "fp16", None)),
    ("Attempting to unscale FP16 gradients: of full weights", OLD, "bfloat16", "qwen3",
     {"full": True}, ("float32", "fp16", None)),
    ("Attempting to unscale FP16 gradients: of full weights", (*NEW, *OLD), "bfloat16", "qwen3",
     {"full": True, "dtype": "float16"}, ("float32", "fp16", None)),
    ("expected scalar type Float but found BFloat16: a quantized model in one dtype, its rest in another", ("CPU",),
     "bfloat16", "llama", {"quantization": "4bit", "dtype": "float32"}, ("float32", "none", "float32")),
    ("an adapter to go on from, taken for full fine-tuning", NEW, "bfloat16", "qwen3",
     {"adapter": "/a"}, ("bfloat16", "bf16", "float32")),
    ("updates that bfloat16 weights round away", (*NEW, "CPU"), "bfloat16", "qwen3",
     {"full": True}, ("float32", "bf16", None)),
    ("updates that bfloat16 weights round away", (*NEW, "CPU"), "float32", "qwen3",
     {"dtype": "bfloat16", "full": True}, ("float32", "bf16", None)),
    ("autocast that nobody has seen work", ("MPS",), "bfloat16", "qwen3", {"full": True}, ("float32", "none", None)),
    ("a standard recipe that cannot be had by name", NEW, "bfloat16", "qwen3",
     {"full": True, "dtype": "bfloat16", "master_weights": "float32"}, ("float32", "bf16", None)),
    ("pure bfloat16 that cannot be had by name", (*NEW, "CPU", "MPS"), "bfloat16", "qwen3",
     {"full": True, "master_weights": "none"}, ("bfloat16", "bf16", None)),
    ("remainders that cannot be had by name", (*NEW, "CPU"), "bfloat16", "qwen3",
     {"full": True, "master_weights": "compensated"}, ("bfloat16", "bf16", None)),
    ("full fine-tuning of Gemma computed in float16", OLD, "bfloat16", "gemma2",
     {"full": True}, ("float32", "none", None)),
    ("full fine-tuning of Gemma computed in float16", NEW, "float16", "gemma2",
     {"full": True}, ("float32", "bf16", None)),
    ("full fine-tuning of Gemma computed in float16", OLD, "float32", "gemma2",
     {"full": True, "dtype": "float16"}, ("float32", "none", None)),
    ("float32 weights rounded before they are trained", NEW, "float32", "qwen3",
     {"full": True}, ("float32", "bf16", None)),
    ("float32 weights rounded before they are trained", OLD, "float32", "qwen3",
     {"full": True}, ("float32", "fp16", None)),
    ("autocast where it gains nothing", ("CPU", "MPS"), "float32", "qwen3", {"full": True}, ("float32", "none", None)),
]  # fmt: skip
CELLS = [
    pytest.param(device, *rule, id=f"{failure} - {device} {rule[0]} {rule[1]} {rule[2]}")
    for failure, devices, *rule in RULES
    for device in devices
]


@pytest.mark.parametrize(("device", "stored", "model_type", "keys", "expected"), CELLS)
def test_precision_follows_the_rule(
    device: str, stored: str, model_type: str, keys: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    found = decide(device, model(stored, model_type), **keys)
    assert (found.load_dtype, flags(found), found.adapter_dtype) == expected
    assert all(found.reasons.values())


@pytest.mark.parametrize(("device", "dtype"), [("H100", "float16"), ("T4", "auto"), ("CPU", "float32")])
def test_a_bfloat16_adapter_beside_a_model_in_another_dtype_is_refused(device: str, dtype: str) -> None:
    """Under fp16 a GradScaler cannot unscale its gradients; with float32 weights nobody can want this dtype."""
    with pytest.raises(SpecError, match="adapter_dtype: bfloat16 needs a bfloat16 model") as raised:
        decide(device, model(), dtype=dtype, adapter_dtype="bfloat16")
    assert "adapter_dtype: auto" in raised.value.hint


def test_every_rule_names_the_failure_it_prevents() -> None:
    assert all(len(failure.split()) > 2 for failure, *_ in RULES)


def test_eight_bits_on_a_gpu_whose_loss_would_silently_be_zero_are_refused() -> None:
    with pytest.raises(SpecError, match=r"which Tesla V100 \(compute capability 7\.0\) does not have") as raised:
        decide("V100", model(), quantization="8bit")
    assert "4bit" in raised.value.hint
    with pytest.raises(ModelError, match=r"compute capability 7\.5"):
        precision.decide(spec(), quantized(load_in_8bit=True), DEVICES["V100"])
    assert decide("T4", model(), quantization="8bit").quantization == "8bit"
    assert decide("V100", model(), quantization="4bit").quantization == "4bit"


def test_eight_bits_that_overflow_on_their_way_through_float16_are_warned_about() -> None:
    found = decide("A100", model("bfloat16", "gemma2"), quantization="8bit")
    assert "converts every input to float16" in found.warnings[0]
    assert "inputs to float16" in found.reasons["compute_dtype"]
    assert not decide("A100", model("bfloat16", "gemma2"), quantization="4bit").warnings
    assert not decide("A100", model("bfloat16", "llama"), quantization="8bit").warnings


def test_quantization_on_an_apple_gpu_is_full_precision_where_that_fits_and_else_refused() -> None:
    """bitsandbytes does not run there: the field report's 4-bit model silently took 8 GB instead of 2."""
    config = {
        "dtype": "bfloat16",
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    small = model(config=config)
    huge = dataclasses.replace(
        small, num_parameters=70_000_000_000, tensors=(Tensor("a.weight", "bfloat16", (70_000, 1_000_000)),)
    )
    job, mac = spec(quantization="4bit"), DEVICES["MPS"]

    def made(base: BaseModelInfo) -> Callable[[JobSpec], plan.Plan]:
        return lambda changed: plan.make(changed, base, mac, config=Config(), installed=INSTALLED)

    fitting = made(small)(job)
    assert fitting.precision.quantization == "none"
    assert "no 4bit kernels" in fitting.warnings[0]
    remedy.check(job, fitting.memory, mac, lambda changed: made(small)(changed).memory)
    with pytest.raises(MemoryShortError) as raised:
        remedy.check(job, made(huge)(job).memory, mac, lambda changed: made(huge)(changed).memory)
    assert "4bit" not in raised.value.hint, "what this device has not is no remedy"


def test_a_dtype_that_the_device_has_not_is_refused_and_not_replaced() -> None:
    """Prevent "Your setup doesn't support bf16/gpu" or, worse, emulated bfloat16."""
    with pytest.raises(SpecError, match=r"which Tesla T4 \(compute capability 7\.5\) does not have") as raised:
        decide("T4", model(), dtype="bfloat16")
    assert "dtype: auto" in raised.value.hint


def test_an_apple_gpu_has_bfloat16_from_macos_14_on() -> None:
    """Prevent "Your setup doesn't support bf16/gpu"."""
    old = dataclasses.replace(DEVICES["MPS"], has_bfloat16=False)
    with pytest.raises(SpecError, match="needs macOS 14"):
        precision.decide(spec(dtype="bfloat16"), model(), old)
    found = precision.decide(spec(), model(), old)
    assert (found.load_dtype, flags(found), found.adapter_dtype) == ("float16", "none", "float32")


def test_full_fine_tuning_in_float16_is_warned_about_where_it_is_not_computed_in_it() -> None:
    """Prevent an fp16 flag without effect. On a GPU float16 under a GradScaler is standard, without a warning."""
    assert "float16 autocast exists only on CUDA" in decide("CPU", model(), full=True, dtype="float16").warnings[0]
    assert "bfloat16 instead" in decide("L4", model("float16", "gemma2"), full=True, dtype="float16").warnings[0]
    assert decide("T4", model(), full=True, dtype="float16").warnings == ()


def test_float16_by_name_for_a_family_that_overflows_is_warned_about() -> None:
    """Prevent a NaN loss."""
    assert "gemma2" in decide("H100", model("bfloat16", "gemma2"), dtype="float16").warnings[0]


def test_apple_gpus_get_full_precision_with_a_warning_for_quantization() -> None:
    """Prevent a silent use of four times the memory asked for."""
    found = decide("MPS", model(), quantization="4bit")
    assert found.quantization == "none"
    assert found.compute_dtype is None
    assert "no 4bit kernels" in found.warnings[0]


def test_a_checkpoint_quantized_by_bitsandbytes_stays_so() -> None:
    """Prevent a compute dtype from the checkpoint's config that differs from the load dtype."""
    found = precision.decide(spec(), quantized(load_in_4bit=True), DEVICES["T4"])
    assert (found.quantization, found.compute_dtype, found.load_dtype) == ("4bit", "float16", "float16")
    assert precision.decide(spec(), quantized(load_in_8bit=True), DEVICES["T4"]).quantization == "8bit"


@pytest.mark.parametrize(
    ("given", "device", "keys", "message"),
    [
        (quantized(load_in_4bit=True), "H100", {"full": True}, "only an adapter"),
        (quantized(load_in_4bit=True), "H100", {"quantization": "8bit"}, "not 8bit"),
        (quantized(load_in_4bit=True), "MPS", {}, "does not support Apple GPUs"),
        (quantized("gptq", bits=4), "H100", {}, "training gptq checkpoints is not supported"),
        (quantized("awq"), "CPU", {}, "awq checkpoints"),
        (quantized("fp8"), "H100", {"full": True}, "fp8 checkpoints"),
    ],
)
def test_a_quantized_checkpoint_that_cannot_be_trained_so_is_refused(
    given: BaseModelInfo, device: str, keys: dict[str, Any], message: str
) -> None:
    """Prevent a failure after the model is loaded."""
    with pytest.raises(ModelError, match=message) as raised:
        precision.decide(spec(**keys), given, DEVICES[device])
    assert raised.value.hint


@pytest.mark.parametrize("name", ["H100", "T4", "CPU", "MPS"])
def test_attention_is_sdpa_unless_asked(name: str) -> None:
    """Prevent FlashAttention with quantized weights, chosen only because it is installed."""
    found = precision.decide(spec(), model(), DEVICES[name], has_flash_attn=True)
    assert found.attn_implementation == "sdpa"


def test_attention_that_sdpa_computes_wrongly_is_eager() -> None:
    """Prevent training with attention scores that differ from the model's own."""
    assert decide("H100", model(model_type="gemma2")).attn_implementation == "eager"
    asked = decide("H100", model(model_type="gemma2"), attn_implementation="sdpa")
    assert asked.attn_implementation == "sdpa"
    assert "caps its attention scores" in asked.warnings[0]


@pytest.mark.parametrize(
    ("device", "keys", "has_flash_attn", "message"),
    [
        ("CPU", {}, True, "needs an NVIDIA GPU"),
        ("MPS", {}, True, "needs an NVIDIA GPU"),
        ("T4", {}, True, "compute capability 8.0"),
        ("A100", {"dtype": "float32"}, True, "loaded in float32"),
        ("A100", {}, False, "flash_attn is not installed"),
    ],
)
def test_flash_attention_that_cannot_be_is_refused(
    device: str, keys: dict[str, Any], has_flash_attn: bool, message: str
) -> None:
    """Prevent "RuntimeError: FlashAttention only support fp16 and bf16 data type"."""
    asked = spec(attn_implementation="flash_attention_2", **keys)
    with pytest.raises(SpecError, match=message):
        precision.decide(asked, model(), DEVICES[device], has_flash_attn=has_flash_attn)


def test_flash_attention_by_name_is_had_where_it_can_be_and_warned_about_beside_quantized_weights() -> None:
    """QLoRA with FlashAttention fails if norms or adapters were cast to float32."""
    asked = spec(attn_implementation="flash_attention_2")
    assert precision.decide(asked, model(), DEVICES["A100"], has_flash_attn=True).warnings == ()
    asked = spec(attn_implementation="flash_attention_2", quantization="4bit")
    found = precision.decide(asked, model(), DEVICES["A100"], has_flash_attn=True)
    assert found.attn_implementation == "flash_attention_2"
    assert "quantized" in found.warnings[0]


# --- Invariants -------------------------------------------------------------------------------------------------------

FAMILIES = ("qwen3", "llama", "mistral", "gemma2", "gemma3_text", "gpt2", "t5", "qwen3_moe", "gpt_oss")
STORED = ("bfloat16", "float16", "float32", "float64")
ASKED = ("auto", "bfloat16", "float16", "float32")
#: Keys of a spec: a new adapter, on a base in any form; one to go on from; every parameter.
TUNINGS: tuple[dict[str, Any], ...] = (
    {},
    {"quantization": "4bit"},
    {"quantization": "8bit"},
    {"adapter": "/a"},
    {"adapter": "/a", "quantization": "4bit"},
    {"full": True},
)


def check_invariants(job: JobSpec, given: BaseModelInfo, device: Device, *, has_flash_attn: bool = False) -> None:
    """Check that the choices fit together and fit the device, or that the job is rejected with a hint."""
    asked, full = job.dtype, precision.is_full(job)
    try:
        found = precision.decide(job, given, device, has_flash_attn=has_flash_attn)
    except HonedError as error:
        assert error.hint
        reasons = (
            asked == "bfloat16" and not precision.can_bfloat16(device),
            job.attn_implementation == "flash_attention_2",
            job.quantization == "8bit" and not precision.can_int8(device),
        )
        assert any(reasons), "auto is never refused, nor what the device can"
        return
    fragile = precision.overflows_float16(given)
    assert not (found.bf16 and found.fp16)
    match found.load_dtype:
        case "bfloat16":
            assert found.bf16
        case "float16":
            assert found.fp16 == (device.kind == "cuda")
            assert not full, "float16 weights cannot be trained"
        case "float32" if not full:
            assert not found.bf16
            assert not found.fp16
    if found.bf16 or found.load_dtype == "bfloat16":
        assert precision.can_bfloat16(device)
    if found.fp16:
        assert device.kind == "cuda"
        trained = found.load_dtype if full else found.adapter_dtype
        assert trained == "float32", "GradScaler unscales float32 gradients alone"
    if asked != "auto" and not full:
        assert found.load_dtype == asked
    if full:
        assert found.load_dtype == "float32", "the best rung, where none is named"
        assert found.master_weights == "float32"
    if asked == "float32":
        assert not found.fp16, "float32 by name is not computed in less"
        assert not found.bf16
    if asked == "auto" and fragile:
        assert found.load_dtype != "float16"
        assert not found.fp16
    if asked == "float16" and (fragile or (full and not found.fp16)):
        assert found.warnings, "what is not done as asked, or is known to fail, is said"
    assert found.quantization == ("none" if device.kind == "mps" else job.quantization)
    assert (found.quantization == job.quantization) or "quantization" in found.warnings[0]
    assert found.compute_dtype == (found.load_dtype if found.quantization != "none" else None)
    assert (found.adapter_dtype is None) == full
    assert found.adapter_dtype in (None, "float32", found.load_dtype)
    if found.attn_implementation == "flash_attention_2":
        computes_half = found.load_dtype in HALF or found.bf16 or found.fp16
        assert (computes_half, device.kind, has_flash_attn) == (True, "cuda", True)
    assert set(found.reasons) == set(Precision.__dataclass_fields__) - {"reasons", "warnings"}
    assert all(found.reasons.values())
    assert Precision(**found.as_dict()) == dataclasses.replace(found, warnings=()), "plan.json keeps it whole"


@pytest.mark.parametrize("device", DEVICES)
def test_the_whole_product_fits_together(device: str) -> None:
    for tuning, asked in itertools.product(TUNINGS, ASKED):
        job = spec(dtype=asked, **tuning)
        for stored, family in itertools.product(STORED, FAMILIES):
            check_invariants(job, model(stored, family), DEVICES[device])


@settings(max_examples=200)
@given(
    device=st.sampled_from(list(DEVICES.values()))
    | st.builds(lambda *it: Device("cuda", "a GPU", 0, "GPU-0", it), st.integers(3, 12), st.integers(0, 9)),
    stored=st.dictionaries(st.sampled_from([*STORED, "uint8", "int64"]), st.integers(1, 10**12), min_size=1),
    family=st.sampled_from(FAMILIES) | st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), max_size=12),
    asked=st.sampled_from(ASKED),
    tuning=st.sampled_from(TUNINGS),
    attention=st.sampled_from(["auto", "sdpa", "eager", "flash_attention_2"]),
    has_flash_attn=st.booleans(),
)
def test_whatever_is_asked_of_whatever_is_stored_on_whatever_there_is_the_choices_fit_together(
    device: Device,
    stored: dict[str, int],
    family: str,
    asked: str,
    tuning: dict[str, Any],
    attention: str,
    has_flash_attn: bool,
) -> None:
    job = spec(dtype=asked, attn_implementation=attention, **tuning)
    check_invariants(job, model(model_type=family, stored_dtypes=stored), device, has_flash_attn=has_flash_attn)


@pytest.mark.parametrize("outer", ["paligemma", "some_wrapper"])
def test_a_model_around_gemma_has_gemmas_numbers(outer: str) -> None:
    """Gemma's float16 overflow and its capped attention scores remain inside another model."""
    wrapped = model(model_type=outer, config={"dtype": "bfloat16", "text_config": {"model_type": "gemma2"}})
    found = decide("T4", wrapped)
    assert (found.load_dtype, found.fp16, found.attn_implementation) == ("float32", False, "eager")
