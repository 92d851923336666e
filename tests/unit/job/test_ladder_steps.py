"""The order of the adjustments when memory runs out; the effective batch size never changes."""

from __future__ import annotations

from typing import Any

import pytest

from honed.job import out_of_memory
from honed.job.job import Adjustment, Job, State
from honed.job.out_of_memory import Media
from honed.job.plan_file import Memory
from honed.spec.spec import JobSpec, PredictionSpec, RetrySpec
from honed.spec.training import TrainingSpec


def steps(phase: str = "train", *, seen: Media = Media(), is_sure: bool = True, **spec: Any) -> list[str]:  # noqa: B008
    """Return the texts of all steps of the ladder, from the top to the bottom."""
    taken: list[Adjustment] = []
    while (
        step := out_of_memory.next_step(
            out_of_memory.adjusted(spec, taken), attempt=len(taken) + 1, phase=phase, is_sure=is_sure, media=seen
        )
    ) is not None:
        taken.append(step)
        assert len(taken) < 50
    return [each.text for each in taken]


def test_the_train_batch_is_divided_down_to_one_and_then_activations_are_computed_again() -> None:
    training = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "gradient_checkpointing": False}
    assert steps(training=training) == [
        "per_device_train_batch_size 4 → 2, gradient_accumulation_steps 3 → 6",
        "per_device_train_batch_size 2 → 1, gradient_accumulation_steps 6 → 12",
        "gradient_checkpointing off → on",
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 12, 15, 30, 97])
def test_the_rows_of_a_step_stay_the_same_whatever_the_size(size: int) -> None:
    spec: dict[str, Any] = {"training": {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2}}
    while (step := out_of_memory.next_step(spec, attempt=1, phase="train")) is not None:
        spec = out_of_memory.adjusted(spec, [step])
        training = spec["training"]
        assert training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] == 2 * size
    assert spec["training"]["per_device_train_batch_size"] == 1


@pytest.mark.parametrize("keys", [{"dataloader_drop_last": True}, {"train_sampling_strategy": "batch_rebalance"}])
def test_a_batch_whose_division_would_change_the_rows_is_not_divided(keys: dict[str, Any]) -> None:
    assert steps(training={"per_device_train_batch_size": 8, **keys}) == []


def test_what_is_smaller_in_the_phase_where_memory_ran_out_comes_first() -> None:
    spec = {"eval_split": 0.1, "training": {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}}
    assert steps("evaluate", **spec) == [
        "training.per_device_eval_batch_size 4 → 2",
        "training.per_device_eval_batch_size 2 → 1",
    ]
    assert steps("predict", predictions={"batch_size": 2}, **spec) == ["predictions.batch_size 2 → 1"]
    assert steps("train", **spec) == ["per_device_train_batch_size 2 → 1, gradient_accumulation_steps 1 → 2"]


@pytest.mark.parametrize(
    ("predictions", "guard", "first"),
    [
        ({}, None, 5),
        ({"num_samples": 40}, None, 16),
        ({"num_samples": 40, "batch_size": 32}, None, 32),
        ({"prompts": ["a", "b"]}, None, 2),
        ({"num_samples": 3}, {"metric": "exact_match", "num_samples": 9}, 9),
        ({"sample_frequency": "off"}, {"metric": "exact_match", "num_samples": 9}, 9),
        ({"num_samples": 1}, None, None),
        ({"sample_frequency": "off"}, None, None),
    ],
)
def test_predictions_are_halved_from_as_many_as_are_asked_at_a_time(
    predictions: dict[str, Any], guard: dict[str, Any] | None, first: int | None
) -> None:
    """A step that makes no batch smaller would be a useless restart."""
    spec = JobSpec.model_validate(
        {"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], "predictions": predictions, "guard": guard}
    ).model_dump(mode="json")
    found = steps("predict", **spec)
    assert found[:1] == ([] if first is None else [f"predictions.batch_size {first} → {first // 2}"])
    assert first is None or found[-1].endswith(" → 1")


def test_where_nobody_said_what_it_was_at_everything_is_tried() -> None:
    spec = {"eval_split": 0.1, "training": {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}}
    found = steps("evaluate", is_sure=False, predictions={"batch_size": 2}, **spec)
    assert [text.split()[0] for text in found] == [
        "training.per_device_eval_batch_size",
        "per_device_train_batch_size",
        "predictions.batch_size",
    ]


@pytest.mark.parametrize("phase", ["prepare", "load", "audit", "export"])
def test_no_step_helps_a_model_that_does_not_even_load(phase: str) -> None:
    assert steps(phase, is_sure=False) == []


def test_frames_and_pixels_are_only_touched_with_leave() -> None:
    spec: dict[str, Any] = {"training": {"per_device_train_batch_size": 1}, "media": {"max_pixels": 70_000}}
    seen = Media(("image", "video"), num_frames=4)
    assert steps(seen=seen, **spec) == []
    assert out_of_memory.leave(spec, Media(("image",))) == (
        "retry.may_shrink_media: true, which lets honed retry with fewer frames and pixels"
    )
    assert out_of_memory.leave(spec, Media()) is None
    assert out_of_memory.leave({**spec, "retry": {"may_shrink_media": True}}, Media(("image",))) is None
    assert steps(seen=seen, retry={"may_shrink_media": True}, **spec) == [
        "media.num_frames 4 → 2",
        "media.num_frames 2 → 1",
        "media.max_pixels 70000 → 35000",
        "media.max_pixels 35000 → 17500",
    ]


@pytest.mark.parametrize(("num_pixels", "first"), [(12_000_000, 12_000_000), (150_528, 150_528), (0, 1024 * 1024)])
def test_without_a_limit_pixels_are_halved_from_those_that_there_are(num_pixels: int, first: int) -> None:
    seen = Media.of(Memory(0, 0, 0, 0, 0, 0, 1, 8, media=("image",), num_pixels=num_pixels))
    training = {"per_device_train_batch_size": 1}
    (step, *_) = steps(seen=seen, training=training, retry={"may_shrink_media": True})
    assert step == f"media.max_pixels {first} → {first // 2}"


def test_what_the_ladder_takes_for_a_default_is_the_specs() -> None:
    assert {name: getattr(TrainingSpec(), name) for name in out_of_memory.DEFAULTS} == out_of_memory.DEFAULTS
    assert RetrySpec().on_out_of_memory == "adjust"
    assert PredictionSpec().num_samples == out_of_memory.NUM_SAMPLES


def test_an_entry_keeps_its_steps_and_an_old_one_has_none() -> None:
    job = Job(
        id=1,
        name="a",
        submitted_at=0.0,
        source="a.yaml",
        uid=0,
        output_dir="/o",
        adjustments=(Adjustment(2, "text", {"training.x": 1}),),
        needs_bytes=7,
    )
    assert Job.from_json(job.to_json(), State.QUEUED) == job
    old = Job.from_json(
        b'{"id": 1, "name": "a", "submitted_at": 0, "source": "a", "uid": 0, "output_dir": "/o", "attempts": []}',
        State.HELD,
    )
    assert (old.adjustments, old.needs_bytes) == ((), 0)
