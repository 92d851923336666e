"""The rungs of full fine-tuning: the one a job is planned on, by the device's memory or by name, and its permanence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs.basemodel import BaseModelInfo, Tensor
from honed.job.plan_file import Precision
from honed.plan import plan, precision, rung
from honed.plan.plan import Plan
from honed.spec import jobfile
from honed.spec.config import Config
from honed.spec.optimizer import ADAMW, ADAMW_8BIT
from honed.spec.spec import JobSpec
from honed.system import record
from honed.system.device import Device
from honed.system.error import SpecError
from honed.system.installed import Installed

GIB = 2**30
BARE = Installed({}, frozenset())
STOCK = Installed({"bitsandbytes": "0.50.2"}, frozenset({"bitsandbytes"}))
H100 = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * GIB, 80 * GIB)
A100 = Device("cuda", "NVIDIA A100", 0, "GPU-0", (8, 0), 40 * GIB, 40 * GIB)
L4 = Device("cuda", "NVIDIA L4", 0, "GPU-0", (8, 9), 24 * GIB, 24 * GIB)
T4 = Device("cuda", "Tesla T4", 0, "GPU-0", (7, 5), 16 * GIB, 16 * GIB)
CPU = Device("cpu", "a processor", total_bytes=64 * GIB, free_bytes=60 * GIB)
MPS = Device("mps", "Apple GPU", total_bytes=64 * GIB, free_bytes=60 * GIB)
#: Hidden size, MLP, layers, key and value width, vocabulary: Llama-3.2-1B and -3B, Llama-3.1-8B.
SIZES = {
    "1B": (2048, 8192, 16, 512, 128256),
    "3B": (3072, 8192, 28, 1024, 128256),
    "8B": (4096, 14336, 32, 1024, 128256),
}


def model(size: str, stored: str = "bfloat16") -> BaseModelInfo:
    hidden, mlp, layers, kv, vocabulary = SIZES[size]
    has_head = size == "8B"
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (vocabulary, hidden)} if has_head else {}
    for number in range(layers):
        prefix = f"model.layers.{number}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, mlp),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    tensors = tuple(Tensor(name, stored, shape) for name, shape in shapes.items())
    number = sum(each.num_elements for each in tensors)
    config = {
        "model_type": "llama",
        "dtype": stored,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "vocab_size": vocabulary,
        "tie_word_embeddings": not has_head,
    }
    return BaseModelInfo(
        path=Path("/m"),
        model_type="llama",
        architectures=(),
        config=config,
        num_parameters=number,
        stored_dtypes={stored: number},
        num_weight_bytes=2 * number,
        tensors=tensors,
        is_quantized=False,
        quantization_method=None,
        chat_template=None,
        has_vision=False,
        has_audio=False,
        is_pickled=False,
    )


def spec(**keys: Any) -> JobSpec:
    return jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], **keys})


def make(
    given: BaseModelInfo, device: Device, *, here: Installed = STOCK, pinned: rung.Rung | None = None, **keys: Any
) -> Plan:
    keys = {"training": {"per_device_train_batch_size": 1}} | keys
    return plan.make(spec(**keys), given, device, config=Config(), installed=here, pinned=pinned)


def chosen(made: Plan) -> tuple[str | None, str | None]:
    return made.precision.master_weights, made.precision.optim


@pytest.mark.parametrize(
    ("size", "device", "expected"),
    [
        ("1B", H100, ("float32", ADAMW)),
        ("1B", L4, ("float32", ADAMW)),
        ("1B", T4, ("float32", ADAMW_8BIT)),
        ("1B", CPU, ("float32", ADAMW)),
        ("3B", H100, ("float32", ADAMW)),
        ("3B", A100, ("float32", ADAMW_8BIT)),
        ("3B", T4, None),
        ("3B", L4, ("none", ADAMW_8BIT)),
        ("3B", CPU, ("float32", ADAMW)),
        ("8B", H100, ("compensated", ADAMW_8BIT)),
        ("8B", A100, None),
        ("8B", L4, None),
    ],
)
def test_a_model_is_trained_on_the_best_rung_that_fits(
    size: str, device: Device, expected: tuple[str, str] | None
) -> None:
    made = make(model(size), device)
    if expected is None:
        assert not made.memory.fits, "no rung does: it is refused, or warned about"
        return
    assert chosen(made) == expected
    assert made.memory.fits
    fitting = [step.fits for step in made.rungs]
    assert fitting.index(True) == [step.is_chosen for step in made.rungs].index(True)


def test_a_gpu_without_bfloat16_has_float32_weights_under_float16_autocast_and_no_lower_rung() -> None:
    made = make(model("1B"), T4)
    assert {step.master_weights for step in made.rungs} == {"float32"}
    assert (made.precision.load_dtype, made.precision.fp16) == ("float32", True)


def test_the_plan_has_each_rung_with_its_bytes_and_says_why_the_better_ones_were_passed() -> None:
    made: dict[str, Any] = make(model("8B"), H100).as_dict()
    assert [(each["master_weights"], each["optim"], each["bytes_per_parameter"]) for each in made["rungs"]] == [
        ("float32", ADAMW, 16.0),
        ("float32", ADAMW_8BIT, 10.0),
        ("compensated", ADAMW_8BIT, 8.0),
        ("none", ADAMW_8BIT, 6.0),
    ]
    assert [each["is_chosen"] for each in made["rungs"]] == [False, False, True, False]
    assert f"float32 with {ADAMW} needs 1" in made["precision"]["reasons"]["master_weights"]


def test_a_rung_by_name_is_compared_with_itself_where_its_first_optimizer_does_not_fit() -> None:
    made = make(model("8B"), replace(H100, total_bytes=60 * GIB), master_weights="none")
    assert chosen(made) == ("none", ADAMW_8BIT)
    assert f": none with {ADAMW} needs " in made.precision.reasons["optim"]


def test_without_bitsandbytes_the_remainders_stand_beside_float32_moments() -> None:
    steps = make(model("1B"), H100, here=BARE).rungs
    assert [(each.master_weights, each.optim, each.bytes_per_parameter) for each in steps] == [
        ("float32", ADAMW, 16.0),
        ("compensated", ADAMW, 14.0),
        ("none", ADAMW, 8.0),
    ]


@pytest.mark.parametrize("optim", ["adafactor", "sgd", "lion_8bit", "adamw_torch", "paged_adamw_8bit"])
def test_an_optimizer_that_the_job_names_is_never_replaced_and_is_warned_about_where_it_loses_updates(
    optim: str,
) -> None:
    training = {"per_device_train_batch_size": 1, "optim": optim}
    assert {step.optim for step in make(model("8B"), H100, training=training).rungs} == {optim}
    made = make(model("8B"), H100, training=training, master_weights="none")
    assert chosen(made) == ("none", optim)
    assert any(f"updated by {optim}: updates below 1/256 of a weight" in warning for warning in made.warnings)
    assert not any("updates below" in text for text in make(model("1B"), H100, training=training).warnings)


@pytest.mark.parametrize(
    ("optim", "optim_args", "words"),
    [
        ("adamw_torch_8bit", "bf16_stochastic_round=True", ""),
        ("adamw_torch_8bit", None, "updates below"),
        ("adamw_anyprecision", "use_kahan_summation=True", "too coarse for an adam_beta2"),
        ("stable_adamw", None, "too coarse for an adam_beta2"),
        ("adamw_anyprecision", None, "updates below"),
    ],
)
def test_an_optimizer_that_keeps_what_rounding_takes_is_known(optim: str, optim_args: str | None, words: str) -> None:
    found = rung.loses(optim, optim_args)
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        ({"dtype": "float32"}, ("float32", False)),
        ({"dtype": "bfloat16", "master_weights": "float32"}, ("float32", True)),
        ({"dtype": "bfloat16", "master_weights": "compensated"}, ("bfloat16", True)),
        ({"dtype": "bfloat16", "master_weights": "none"}, ("bfloat16", True)),
    ],
)
@pytest.mark.parametrize("device", [H100, CPU])
def test_each_combination_of_weights_and_computing_can_be_asked_for_by_name(
    device: Device, keys: dict[str, str], flags: tuple[str, bool]
) -> None:
    found = make(model("1B"), device, **keys).precision
    assert (found.load_dtype, found.bf16) == flags
    assert found.fp16 is False
    assert found.save_dtype == "bfloat16"


def test_what_the_output_is_saved_in_is_what_was_stored_unless_the_job_says() -> None:
    for stored in ("bfloat16", "float16", "float32"):
        assert make(model("1B", stored), H100).precision.save_dtype == stored
    assert make(model("1B"), H100, save_dtype="float32").precision.save_dtype == "float32"
    assert make(model("1B", "float64"), H100).precision.save_dtype == "float32"


def test_a_rung_by_name_that_the_device_cannot_is_refused() -> None:
    for name in ("compensated", "none"):
        with pytest.raises(SpecError, match="needs bfloat16, which Tesla T4"):
            make(model("1B"), T4, master_weights=name)


def test_many_gradients_that_are_added_up_in_bfloat16_are_warned_about() -> None:
    def told(num_accumulated: int, **keys: Any) -> list[str]:
        training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": num_accumulated}
        return [
            text
            for text in make(model("1B"), H100, training=training, **keys).warnings
            if "gradients are added" in text
        ]

    for name in ("compensated", "none"):
        assert told(8, master_weights=name) == []
        [text] = told(64, master_weights=name)
        assert "64 gradients are added in bfloat16 for each step, with an error of about 0.8 %" in text
    assert told(64) == [], "float32 weights have float32 gradients"


def test_predictions_with_float32_weights_beside_compensated_ones_are_counted() -> None:
    as_stored = make(model("1B"), H100, master_weights="compensated").memory
    wide = make(model("1B"), H100, master_weights="compensated", save_dtype="float32").memory
    number = model("1B").num_parameters
    assert wide.activation_bytes == pytest.approx(2 * number, rel=0.01)
    assert as_stored.activation_bytes < wide.activation_bytes


# --- For the job's life -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "first", "then"), [("3B", H100, L4), ("3B", L4, H100), ("3B", A100, CPU), ("1B", T4, H100)]
)
def test_a_plan_that_is_made_again_keeps_the_rung(size: str, first: Device, then: Device) -> None:
    """A run that resumes with weights or an optimizer other than its checkpoint's is another run."""
    before = make(model(size), first)
    after = make(model(size), then, pinned=rung.pinned(before.precision))
    assert chosen(after) == chosen(before)
    assert after.precision.save_dtype == before.precision.save_dtype
    assert after.precision.load_dtype == before.precision.load_dtype
    assert chosen(make(model(size), then)) != chosen(before), "which it would not be, were it planned anew"


def test_a_rung_is_shown_with_who_chose_it() -> None:
    planned = make(model("1B"), H100)
    assert planned.precision.reasons["master_weights"] == "the best that fits in the device's memory"
    assert make(model("1B"), H100, master_weights="float32").precision.reasons["master_weights"] == "as the job asks"
    again = make(model("1B"), H100, pinned=rung.pinned(planned.precision))
    assert "first planned, and kept" in again.precision.reasons["master_weights"]


def test_a_job_planned_with_bfloat16_weights_does_not_move_to_a_gpu_without() -> None:
    before = make(model("8B"), H100)
    assert before.precision.load_dtype == "bfloat16"
    with pytest.raises(SpecError, match="planned with bfloat16 weights"):
        make(model("8B"), T4, pinned=rung.pinned(before.precision))


@pytest.mark.parametrize(("load_dtype", "kept"), [("bfloat16", "none"), ("float32", "float32")])
def test_a_job_planned_before_there_were_rungs_keeps_what_it_has(load_dtype: str, kept: str) -> None:
    now = make(model("1B"), H100).precision.as_dict() | {"load_dtype": load_dtype}
    new = {"master_weights", "optim", "save_dtype"}
    old = record.read(Precision, {key: value for key, value in now.items() if key not in new})
    found = make(model("1B"), H100, pinned=rung.pinned(old)).precision
    assert (found.load_dtype, found.master_weights, found.optim, found.save_dtype) == (load_dtype, kept, None, None)


@pytest.mark.parametrize(
    ("earlier", "device", "keys", "expected"),
    [
        ("bfloat16", H100, {}, "bfloat16"),
        ("bfloat16", T4, {}, "float32"),  # which has no bfloat16
        ("bfloat16", H100, {"adapter_dtype": "float32"}, "float32"),
        ("float32", H100, {}, "float32"),
        (None, H100, {}, "float32"),
    ],
)
def test_an_adapter_planned_in_bfloat16_before_float32_was_the_default_stays_so(
    earlier: str | None, device: Device, keys: dict[str, Any], expected: str
) -> None:
    job = spec(lora={}, quantization="4bit", **keys)
    made = plan.make(job, model("1B"), device, config=Config(), installed=STOCK, adapter_dtype=earlier)
    assert made.precision.adapter_dtype == expected


def test_an_adapters_plan_has_no_rung() -> None:
    made = make(model("1B"), H100, lora={})
    assert rung.pinned(made.precision) is None
    assert made.precision.master_weights is None
    assert made.rungs == ()


# --- What goes together -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lora": {}, "master_weights": "float32"}, "master_weights: is only for full fine-tuning"),
        ({"adapter": "/a", "save_dtype": "float32"}, "save_dtype: is only for full fine-tuning"),
        ({"dtype": "float32", "master_weights": "none"}, "the weights are then float32"),
        ({"dtype": "float16", "master_weights": "compensated"}, "float16 weights cannot be trained"),
        ({"master_weights": "compensated", "training": {"optim": "adafactor"}}, "adafactor is not compatible with"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(**keys)


def test_flash_attention_goes_with_float32_weights_under_autocast() -> None:
    """FlashAttention was rejected for a model loaded in float32, although the model is computed in bfloat16."""
    job = spec(attn_implementation="flash_attention_2")
    found = precision.decide(job, model("1B"), H100, has_flash_attn=True)
    assert (found.load_dtype, found.attn_implementation) == ("float32", "flash_attention_2")
