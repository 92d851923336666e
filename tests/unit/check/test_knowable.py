"""Faults found before the model is loaded instead of after: packages, schedules, losses, positions."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from honed.check import packagecheck
from honed.inputs import basemodel
from honed.inputs.basemodel import AdapterInfo, BaseModelInfo
from honed.plan import loss, plan, position
from honed.spec import jobfile, rule
from honed.spec.field import choices, kinds
from honed.spec.spec import JobSpec
from honed.spec.training import TrainingSpec
from honed.system import installed
from honed.system.device import Device, cpu
from honed.system.error import DatasetError, EnvironmentInvalidError, SpecError
from zoo import plain

GPU = Device("cuda", "NVIDIA H100", total_bytes=80 * 2**30, free_bytes=80 * 2**30, compute_capability=(9, 0))
APPLE = Device("mps", "Apple GPU", total_bytes=64 * 2**30, free_bytes=60 * 2**30)


def job(*, lora: dict[str, Any] | None = None, **training: Any) -> JobSpec:
    return jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d"}], "lora": lora, "training": training})


def model(tmp_path: Path, **config: Any) -> BaseModelInfo:
    path = plain.write_base_model(tmp_path / "base") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return basemodel.inspect(path.parent)


# --- What keys must say together --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "lr_scheduler_kwargs: cosine_with_min_lr needs one of min_lr and",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6, "min_lr_rate": 0.1}},
            "needs one of min_lr and min_lr_rate",
        ),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "warmup_stable_decay needs num_decay_steps"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "linear does not accept num_cycles"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, "constant does not accept a"),
        ({"optim": "galore_adamw"}, "optim_target_modules: missing: galore_adamw needs the names of the modules"),
        (
            {
                "optim": "apollo_adamw_layerwise",
                "optim_target_modules": "all-linear",
                "gradient_accumulation_steps": 2,
            },
            "gradient_accumulation_steps: apollo_adamw_layerwise makes a step in each backward pass",
        ),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args: 'momentum' is not a list of key=value"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,"}, "is not a list of key=value"),
        (
            {"loss_type": "dft", "label_smoothing_factor": 0.1},
            "label_smoothing_factor: loss_type: dft does not support label",
        ),
    ],
)
def test_keys_that_end_a_run_once_the_model_is_loaded_are_refused(training: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        job(**training)
    assert f"training.{said}" in refused.value.shown or said in refused.value.shown


@pytest.mark.parametrize(
    "training",
    [
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}},
        {"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=64, scale=0.25"},
        {"loss_type": "nll", "label_smoothing_factor": 0.1},
    ],
)
def test_keys_that_fit_together_are_taken(training: dict[str, Any]) -> None:
    job(**training)


def test_what_schedules_take_is_what_transformers_builds_them_with() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    torch = pytest.importorskip("torch")
    filled = {"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}
    builders = {member.value: build for member, build in optimization.TYPE_TO_SCHEDULER_FUNCTION.items()}
    builders["reduce_lr_on_plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau.__init__
    builders["greedy"] = optimization.GreedyLR.__init__
    taken = {name: frozenset(inspect.signature(build).parameters) - filled for name, build in builders.items()}
    assert taken == rule.SCHEDULE_KWARGS


# --- Packages ---------------------------------------------------------------------------------------------------------


def test_an_optimizer_without_its_package_is_refused_by_name(tmp_path: Path) -> None:
    base = model(tmp_path)
    spec = job(optim="grokadamw")
    with pytest.raises(EnvironmentInvalidError, match=r"training\.optim: grokadamw needs grokadamw, which is not"):
        packagecheck.check(spec, base, GPU, installed.look())
    packagecheck.check(job(optim="adafactor"), base, cpu(), installed.look())
    packagecheck.check(job(optim="paged_adamw_8bit"), base, cpu(), installed.look())


@pytest.mark.parametrize(
    ("optim", "device", "instead"),
    [
        ("paged_ademamix_8bit", cpu(), "ademamix_8bit"),
        ("paged_ademamix_32bit", cpu(), "ademamix"),
        ("adamw_8bit", APPLE, "adamw_torch"),
        ("paged_lion_32bit", APPLE, "adamw_torch"),
    ],
)
def test_an_optimizer_without_a_kernel_on_its_device_is_refused(
    tmp_path: Path, optim: str, device: Device, instead: str
) -> None:
    """Such jobs failed in the first step: bitsandbytes' AdEMAMix requires paged memory on a CPU, too."""
    base = model(tmp_path)
    with pytest.raises(SpecError, match=r"training\.optim: bitsandbytes") as refused:
        packagecheck.check(job(optim=optim), base, device, installed.look())
    assert refused.value.fix == {"training.optim": instead}
    for kept in (instead, "lion_32bit"):
        packagecheck.check(job(optim=kept), base, device, installed.look())


def test_states_that_are_not_paged_on_a_cpu_are_warned_about() -> None:
    [text] = packagecheck.unpaged(job(optim="paged_adamw_8bit"), cpu())
    assert "on this device they stay in memory" in text
    assert packagecheck.unpaged(job(optim="paged_adamw_8bit"), GPU) == []
    assert packagecheck.unpaged(job(optim="adamw_8bit"), cpu()) == []


def test_every_optimizer_is_torchs_own_or_has_a_package() -> None:
    own = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}
    optimizers = {str(each) for each in choices(kinds(TrainingSpec)["optim"])}
    packaged = {
        each for each in optimizers if each.startswith(tuple(row[0] for row in packagecheck.OPTIMIZER_PACKAGES))
    }
    quantized = {each for each in optimizers if packagecheck._of_bitsandbytes(each)}
    assert optimizers == own | packaged | quantized
    assert not own & (packaged | quantized)


def test_ligers_kernels_need_their_package_and_a_gpu(tmp_path: Path) -> None:
    spec = job(use_liger_kernel=True)
    with pytest.raises(SpecError, match=r"training\.use_liger_kernel: Liger's kernels run only on GPUs"):
        packagecheck.check(spec, model(tmp_path), cpu(), installed.look())
    if installed.version("liger-kernel") is None and not str(installed.version("torch")).endswith("+cpu"):
        with pytest.raises(EnvironmentInvalidError, match=r"use_liger_kernel needs liger-kernel, which is not"):
            packagecheck.check(spec, model(tmp_path), GPU, installed.look())


# --- Losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "training", "why"),
    [
        (None, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"target_modules": ["q_proj", "lm_head"]}, {}, "the head in lora.target_modules"),
        ({"target_modules": ".*(q_proj|lm_head)"}, {}, "the head in lora.target_modules"),
        ({"target_modules": "all-linear"}, {}, None),
        ({"target_modules": ["q_proj"]}, {}, None),
        (None, {}, None),
    ],
)
def test_the_chunked_loss_is_not_taken_where_it_fails(
    tmp_path: Path, lora: dict[str, Any] | None, training: dict[str, Any], why: str | None
) -> None:
    assert loss.why_whole(job(lora=lora, **training), None) == why
    asked = job(lora=lora, loss_type="chunked_nll", **training)
    if why is None:
        loss.check(asked, model(tmp_path), None)
    else:
        with pytest.raises(SpecError, match=r"training\.loss_type: chunked_nll is not compatible with") as refused:
            loss.check(asked, model(tmp_path), None)
        assert "write nll" in refused.value.hint


def test_trl_is_left_its_own_loss_on_a_gpu_alone_and_where_it_does(tmp_path: Path) -> None:
    base = model(tmp_path)
    assert plan.choose_loss(job(), base, GPU, None).type is None
    assert plan.choose_loss(job(), base, cpu(), None).type == "nll"
    assert plan.choose_loss(job(label_smoothing_factor=0.1), base, GPU, None).type == "nll"


def test_an_adapter_on_the_head_counts_too(tmp_path: Path) -> None:
    adapter = AdapterInfo(tmp_path, {"target_modules": ["lm_head"]}, 0, 0)
    with pytest.raises(SpecError, match="an adapter on the head"):
        loss.check(job(loss_type="chunked_nll"), model(tmp_path), adapter)


def test_labels_that_transformers_would_smooth_unmoved_are_refused(tmp_path: Path) -> None:
    smoothed = job(label_smoothing_factor=0.1)
    loss.check(smoothed, model(tmp_path), None)
    loss.check(job(), model(tmp_path, model_type="qwen2_5_vl"), None)
    for config in (
        {"model_type": "qwen2_5_vl"},
        {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}},
    ):
        with pytest.raises(SpecError, match=r"training\.label_smoothing_factor: for [^,]*, transformers would smooth"):
            loss.check(smoothed, model(tmp_path, **config), None)


def test_the_models_whose_labels_stay_unmoved_are_those_that_transformers_has() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    taken = {**auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **causal, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    found = {each for each, name in taken.items() if name not in causal.values()}
    assert installed.unshifted_model_types() == found
    assert "llava" in found
    assert "llama" not in found


# --- Positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "longest", "is_told"),
    [
        ({"max_length": 128}, 100, True),
        ({"max_length": None}, 100, True),
        ({"max_length": 128}, 60, False),
        ({"max_length": 64}, 100, False),
        ({"max_length": 128, "packing": True}, 10, False),
    ],
)
def test_rows_that_may_go_beyond_a_table_of_positions_are_told(
    tmp_path: Path, training: dict[str, Any], longest: int, is_told: bool
) -> None:
    told = position.check(job(**training), model(tmp_path, model_type="gpt2", n_positions=64), longest)
    assert ["a longer row ends the job: max_length: 64 truncates it" in each for each in told] == [True] * is_told


def test_rows_that_packing_makes_longer_than_a_table_of_positions_are_refused(tmp_path: Path) -> None:
    wrapped = job(max_length=128, packing=True, packing_strategy="wrapped")
    with pytest.raises(SpecError, match=r"training\.max_length: 128: .* has 64 positions") as told:
        position.check(wrapped, model(tmp_path, model_type="gpt2", n_positions=64), 10)
    assert told.value.fix == {"training.max_length": 64}


def test_a_model_that_turns_by_the_position_is_warned_of(tmp_path: Path) -> None:
    base = model(tmp_path, max_position_embeddings=64)
    (told,) = position.check(job(), base, 2000)
    assert "rows have up to about 1024 tokens" in told
    assert position.check(job(), base, 64) == []


def test_rows_are_counted_before_the_first_step() -> None:
    position.check_rows(job(), "gpt2", {"n_positions": 64}, 64)
    position.check_rows(job(), "llama", {"max_position_embeddings": 64}, 65)
    split = job(packing=True, packing_strategy="bfd_split", max_length=64)
    position.check_rows(split, "gpt2", {"n_positions": 64}, 200)
    with pytest.raises(DatasetError, match="the longest row has 65 tokens, but the model has only 64 positions"):
        position.check_rows(job(), "gpt2", {"n_positions": 64}, 65)
