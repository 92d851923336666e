"""The table of SFTConfig's fields, compared with the installed SFTConfig."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest

from honed.spec.field import choices, kinds
from honed.spec.synonym import NAMES
from honed.spec.training import OWNED, TrainingSpec
from worker.conftest import MakeJob

trl = pytest.importorskip("trl")


def _fields() -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(trl.SFTConfig):
        has_factory = field.default_factory is not dataclasses.MISSING
        fields[field.name] = field.default_factory() if has_factory else field.default
    return fields


def test_each_field_is_known_or_owned_or_gone() -> None:
    known = set(TrainingSpec.model_fields)
    assert not known & set(OWNED)
    assert set(_fields()) - known - set(OWNED) - set(NAMES) == set()


def test_no_field_is_known_that_sft_config_lacks() -> None:
    if importlib.metadata.version("trl") != "1.14.2":
        pytest.skip("the table is that of trl 1.14.2")
    assert set(TrainingSpec.model_fields) - set(_fields()) == set()
    assert set(OWNED) - set(_fields()) == set()


def test_the_defaults_are_sft_configs_own() -> None:
    fields = _fields()
    ours = {name: info.get_default() for name, info in TrainingSpec.model_fields.items()}
    assert ours == {name: getattr(fields[name], "value", fields[name]) for name in ours}


def test_the_enumerations_are_the_libraries_own() -> None:
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
    from transformers.training_args import OptimizerNames

    annotations = kinds(TrainingSpec)
    for name, enum in {
        "optim": OptimizerNames,
        "lr_scheduler_type": SchedulerType,
        "eval_strategy": IntervalStrategy,
        "save_strategy": SaveStrategy,
        "logging_strategy": IntervalStrategy,
    }.items():
        assert set(choices(annotations[name])) == {member.value for member in enum}, name


def test_sft_config_takes_what_the_spec_takes(tmp_path: Any) -> None:
    loaded = TrainingSpec.model_validate(
        {"learning_rate": 1e-4, "warmup_steps": 0.1, "save_steps": 25, "max_length": None}
    )
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **loaded.as_kwargs()
    )
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.save_steps) == (1e-4, 0.1, 25)


def test_the_worker_tells_of_settings_that_its_steps_are_too_few_for(make_job: MakeJob) -> None:
    training = {"max_steps": -1, "num_train_epochs": 1, "warmup_steps": 50, "packing": True, "save_steps": 3}
    job = make_job(lora={"r": 4}, predictions={"sample_frequency": "off"}, training=training)
    job.change_plan(warnings=["training.save_steps: said at the check"])
    ended = job.run()
    assert ended.status == 0, ended.result
    [told] = ended.messages("warning")
    assert told.startswith(f"training.warmup_steps: 50 of {max(ended.losses)} step")
