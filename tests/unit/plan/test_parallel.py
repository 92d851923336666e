"""The division of a job between devices: what the plan decides for several GPUs, and what it refuses by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.inputs.basemodel import BaseModelInfo
from honed.job.plan_file import PlanFile
from honed.plan import parallel, plan, remedy
from honed.plan.plan import Plan
from honed.spec import jobfile
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.system import device as devices
from honed.system.device import Device
from honed.system.error import BackendError, MemoryShortError, SpecError
from honed.system.installed import Installed
from zoo import plain

GIB, MIB = 2**30, 2**20
GPU = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * GIB, 80 * GIB)
NO_RESERVE = Config.model_validate({"device": {"reserve_bytes": 0}})
WITH_8BIT = Installed({"torch": "2.13.0"}, frozenset({"torch", "bitsandbytes"}))
UNSLOTH = Installed(
    {"torch": "2.13.0", "unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9"},
    frozenset({"torch", "unsloth", "unsloth_zoo"}),
)


@pytest.fixture
def model(tmp_path: Path) -> BaseModelInfo:
    return basemodel.inspect(plain.write_base_model(tmp_path / "model"))


def spec_of(gpus: int = 1, **keys: Any) -> JobSpec:
    keys = {"lora": {"r": 4}, "resources": {"gpus": gpus}, **keys}
    return jobfile.validate(
        {"base_model": "/m", "datasets": [{"path": "/d.jsonl"}]} | {k: v for k, v in keys.items() if v is not None}
    )


def make(model: BaseModelInfo, gpus: int = 1, device: Device = GPU, **keys: Any) -> Plan:
    return plan.make(spec_of(gpus, **keys), model, device, config=Config(), installed=UNSLOTH)


def test_a_job_uses_one_gpu_unless_it_asks_for_more(model: BaseModelInfo) -> None:
    made = make(model, training={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    assert (made.parallel.mode, made.parallel.num_ranks, made.parallel.effective_batch) == ("none", 1, 8)
    made = make(model, 2, training={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    assert (made.parallel.mode, made.parallel.ranks_per_node, made.parallel.effective_batch) == ("ddp", 2, 16)
    assert "fits on each GPU" in made.parallel.reasons["mode"]
    assert made.memory.exchange_bytes == made.memory.gradient_bytes > 0


@pytest.mark.parametrize(("gpus", "steps"), [(1, 8), (2, 4), (4, 2)])
def test_an_effective_batch_is_kept_over_any_number_of_gpus(model: BaseModelInfo, gpus: int, steps: int) -> None:
    made = make(model, gpus, batch={"effective": 32}, training={"per_device_train_batch_size": 4})
    assert (made.parallel.gradient_accumulation_steps, made.parallel.effective_batch) == (steps, 32)


def test_an_effective_batch_survives_the_plan_and_its_second_reading() -> None:
    spec = spec_of(2, batch={"effective": 32}, training={"per_device_train_batch_size": 4})
    again = jobfile.validate(spec.model_dump(exclude_unset=True, by_alias=True))
    assert again.training.gradient_accumulation_steps == spec.training.gradient_accumulation_steps == 4


def test_a_plan_of_an_earlier_version_has_no_division(model: BaseModelInfo) -> None:
    made = make(model, 2)
    assert PlanFile(made.as_dict()).parallel == made.parallel
    assert PlanFile(made.as_dict()).memory == made.memory


def test_unsloth_trains_on_one_gpu(model: BaseModelInfo) -> None:
    assert make(model).backend.name == "unsloth"
    assert make(model, 2).backend.name == "transformers"
    with pytest.raises(BackendError, match="one GPU"):
        make(model, 2, backend="unsloth")


def test_a_model_that_fits_on_no_card_is_divided(model: BaseModelInfo) -> None:
    whole = make(model, 2, lora=None).memory
    short = replace(GPU, total_bytes=whole.total_bytes - 1)
    made = plan.make(
        spec_of(2, lora=None, master_weights="float32", training={"optim": "adamw_torch"}), model, short,
        config=NO_RESERVE, installed=UNSLOTH,
    )  # fmt: skip
    assert made.parallel.mode == "fsdp"
    assert made.memory.optimizer_bytes < whole.optimizer_bytes
    assert "divided" in made.parallel.reasons["mode"]


def test_a_job_whose_best_rung_fits_only_divided_is_divided(model: BaseModelInfo) -> None:
    best = make(model, 2, lora=None).memory
    short = replace(GPU, total_bytes=best.total_bytes - 1)
    made = plan.make(spec_of(2, lora=None), model, short, config=NO_RESERVE, installed=WITH_8BIT)
    assert (made.parallel.mode, made.precision.master_weights, made.num_passed) == ("fsdp", "float32", 0)
    assert "only with weights or an optimizer that are rounded" in made.parallel.reasons["mode"]


def test_a_divided_model_is_computed_under_autocast_and_the_plan_says_so(model: BaseModelInfo) -> None:
    keys = {"lora": None, "dtype": "bfloat16", "master_weights": "float32"}
    made = make(model, 2, parallel="fsdp", **keys)
    assert made.precision.bf16
    assert "FSDP's own mixed precision, which is not autocast, is not used" in made.precision.reasons["bf16"]
    assert "FSDP" not in make(model, 2, parallel="ddp", **keys).precision.reasons["bf16"]


@pytest.mark.parametrize(
    ("keys", "config", "words"),
    [
        ({}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "8-bit weights"),
        ({}, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "weights as uint8"),
        ({"dtype": "float16"}, {}, "GradScaler"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name_and_never_chosen(
    tmp_path: Path, keys: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    model = basemodel.inspect(plain.write_base_model(tmp_path / "model"))
    method = "bitsandbytes" if config else None
    model = replace(model, config=model.config | config, is_quantized=bool(config), quantization_method=method)
    with pytest.raises(SpecError, match=words) as caught:
        make(model, 2, parallel="fsdp", **keys)
    assert caught.value.fix == {"parallel": "ddp"}
    small = replace(GPU, total_bytes=MIB)
    assert make(model, 2, small, **keys).parallel.mode == "ddp"


def test_rows_with_media_are_not_divided(model: BaseModelInfo) -> None:
    assert parallel.modes(spec_of(2), model, GPU) == ("ddp", "fsdp")
    assert parallel.modes(spec_of(2), model, GPU, has_media=True) == ("ddp",)
    with pytest.raises(SpecError, match="images, videos or sounds"):
        parallel.modes(spec_of(2, parallel="fsdp"), model, GPU, has_media=True)


def test_4_bit_weights_may_be_divided_if_they_are_packed_into_floating_numbers(model: BaseModelInfo) -> None:
    whole, part = (make(model, 2, parallel=mode, quantization="4bit").memory for mode in ("ddp", "fsdp"))
    assert whole.weights_bytes / 2 < part.weights_bytes < whole.weights_bytes  # the scales are whole on each
    assert part.total_bytes >= whole.weights_bytes  # each device quantizes all of it first
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
    packed = replace(
        model,
        config={**model.config, "quantization_config": stored},
        is_quantized=True,
        quantization_method="bitsandbytes",
    )
    assert parallel.why_whole(spec_of(2), packed) == ""


def test_more_gpus_are_a_remedy_where_they_are_there(tmp_path: Path) -> None:
    model = basemodel.inspect(plain.write_base_model(tmp_path / "model", num_layers=16))
    keys = {"lora": None, "training": {"per_device_train_batch_size": 1, "max_length": 8, "optim": "adamw_torch"}}
    keys |= {"master_weights": "float32"}
    spec = spec_of(**keys)

    def estimate(changed: JobSpec, total: int = 0) -> Any:
        device = replace(GPU, total_bytes=total)
        return plan.make(changed, model, device, config=NO_RESERVE, installed=UNSLOTH).memory

    on_two = estimate(spec_of(4, **keys, parallel="fsdp"))
    short = replace(GPU, total_bytes=on_two.total_bytes)
    with pytest.raises(MemoryShortError) as caught:
        remedy.check(
            spec, estimate(spec, short.total_bytes), short, lambda one: estimate(one, short.total_bytes), num_devices=4
        )
    assert "resources: {gpus: 4} with parallel: fsdp" in caught.value.hint


def test_more_gpus_than_the_machine_has_are_refused() -> None:
    parallel.check_devices(spec_of(4), 4, 4)
    with pytest.raises(SpecError, match="8 GPUs are wanted, but this machine has 4 GPUs, at most 3 of them alike"):
        parallel.check_devices(spec_of(8), 3, 4)
    with pytest.raises(SpecError, match="has no GPU"):
        parallel.check_devices(spec_of(2), 0, 0)
    with pytest.raises(SpecError, match="need a cluster"):
        parallel.check(spec_of(2, resources={"gpus": 2, "nodes": 2}))


def test_devices_are_alike_by_generation_and_memory() -> None:
    other = replace(GPU, uuid="GPU-1", total_bytes=int(79.5 * GIB))
    old, small = replace(GPU, compute_capability=(8, 0)), replace(GPU, total_bytes=40 * GIB)
    assert devices.alike([GPU, old, other, small]) == [[GPU, other], [old], [small]]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gpus": 1, "parallel": "fsdp"}, "between several GPUs"),
        ({"gpus": 0, "parallel": "fsdp"}, "trains on the CPU"),
        ({"parallel": "fsdp", "quantization": "8bit"}, "8bit is not supported"),
        ({"parallel": "fsdp", "training": {"optim": "adamw_8bit"}}, "adamw_8bit is not supported with parallel: fsdp"),
        ({"parallel": "fsdp", "trial": True}, "not supported on several GPUs"),
        ({"parallel": "fsdp", "lora": None, "master_weights": "compensated"}, "not supported with parallel: fsdp"),
        ({"training": {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "lora": None},
         "on several GPUs"),
        ({"parallel": "fsdp", "trial": True}, "not supported on several GPUs"),
        ({"training": {"label_smoothing_factor": 0.1}}, "is not supported on several GPUs"),
        ({"batch": {"effective": 9}}, "not a multiple"),
        ({"batch": {"effective": 32},
          "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}}, "is not 16"),
    ],
)  # fmt: skip
def test_a_pair_that_misleads_is_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec_of(**{"gpus": 2, **keys})
