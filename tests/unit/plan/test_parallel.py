"""The division of a job between devices: what the plan decides for several GPUs, and what it refuses by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.inputs.basemodel import BaseModelInfo
from honed.job.plan_file import Parallel, PlanFile
from honed.plan import parallel, plan, remedy
from honed.plan.plan import Plan
from honed.spec import spec as job_spec
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.system import device as devices
from honed.system.device import Device
from honed.system.error import BackendError, MemoryShortError, SpecError
from honed.system.installed import Installed
from zoo import plain

GIB, MIB = 2**30, 2**20
GPU = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * GIB, 80 * GIB)
UNSLOTH = Installed(
    {"torch": "2.13.0", "unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9"},
    frozenset({"torch", "unsloth", "unsloth_zoo"}),
)


@pytest.fixture
def model(tmp_path: Path) -> BaseModelInfo:
    return basemodel.inspect(plain.write_base_model(tmp_path / "model"))


@pytest.fixture
def divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker divide models."""
    monkeypatch.setattr(parallel, "SUPPORTED", frozenset({"none", "ddp", "fsdp"}))


@pytest.fixture
def does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker keep models whole."""
    monkeypatch.setattr(parallel, "SUPPORTED", frozenset({"none", "ddp"}))


def spec_of(gpus: int = 1, **keys: Any) -> JobSpec:
    keys = {"lora": {"r": 4}, "resources": {"gpus": gpus}, **keys}
    return job_spec.validate(
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
    again = job_spec.validate(spec.model_dump(exclude_unset=True, by_alias=True))
    assert again.training.gradient_accumulation_steps == spec.training.gradient_accumulation_steps == 4


def test_a_plan_of_an_earlier_version_has_no_division(model: BaseModelInfo) -> None:
    assert PlanFile({}).parallel == Parallel("none", 1)
    made = make(model, 2)
    assert PlanFile(made.as_dict()).parallel == made.parallel
    assert PlanFile(made.as_dict()).memory == made.memory


def test_unsloth_trains_on_one_gpu(model: BaseModelInfo) -> None:
    assert make(model).backend.name == "unsloth"
    assert make(model, 2).backend.name == "transformers"
    with pytest.raises(BackendError, match="one GPU"):
        make(model, 2, backend="unsloth")


@pytest.mark.usefixtures("divides")
def test_a_model_that_fits_on_no_card_is_divided(model: BaseModelInfo) -> None:
    whole = make(model, 2, lora=None).memory
    short = replace(GPU, total_bytes=whole.total_bytes - 1)
    made = plan.make(
        spec_of(2, lora=None, master_weights="float32", training={"optim": "adamw_torch"}), model, short,
        config=Config.model_validate({"device": {"reserve_bytes": 0}}), installed=UNSLOTH,
    )  # fmt: skip
    assert made.parallel.mode == "fsdp"
    assert made.memory.optimizer_bytes < whole.optimizer_bytes
    assert "divided" in made.parallel.reasons["mode"]


@pytest.mark.usefixtures("does_not_divide")
def test_what_the_worker_cannot_do_is_neither_chosen_nor_accepted(model: BaseModelInfo) -> None:
    with pytest.raises(SpecError, match="fsdp is not supported yet"):
        make(model, 2, parallel="fsdp")
    small = replace(GPU, total_bytes=MIB)
    assert make(model, 2, small).parallel.mode == "ddp"


@pytest.mark.usefixtures("divides")
def test_more_gpus_are_a_remedy_where_they_are_there(model: BaseModelInfo) -> None:
    keys = {"lora": None, "training": {"per_device_train_batch_size": 1, "max_length": 8, "optim": "adamw_torch"}}
    keys |= {"master_weights": "float32"}
    spec, no_reserve = spec_of(**keys), Config.model_validate({"device": {"reserve_bytes": 0}})

    def estimate(changed: JobSpec, total: int = 0) -> Any:
        device = replace(GPU, total_bytes=total)
        return plan.make(changed, model, device, config=no_reserve, installed=UNSLOTH).memory

    on_two = estimate(spec_of(4, **keys, parallel="fsdp"))
    short = replace(GPU, total_bytes=on_two.total_bytes)
    with pytest.raises(MemoryShortError) as caught:
        remedy.check(
            spec, estimate(spec, short.total_bytes), short, lambda one: estimate(one, short.total_bytes), num_devices=4
        )
    assert "with parallel: fsdp" in caught.value.hint


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
        ({"parallel": "fsdp", "eval_split": 0.1, "training": {"load_best_model_at_end": True}}, "loaded as one"),
        ({"parallel": "fsdp", "training": {"optim": "adamw_8bit"}}, "adamw_torch_8bit"),
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
