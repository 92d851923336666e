"""A step down the ladder changes how a step is computed, not what is learned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from honed.job import out_of_memory
from honed.job.job import Adjustment
from worker.conftest import MakeJob, WorkerJob

#: Tolerance of losses against the undisturbed run's: floats are summed in another order.
TOLERANCE = 1e-4
#: Of the model that the jobs train.
NUM_LAYERS = 2
TRAINING = {"max_steps": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 1e-3}
KEYS: dict[str, Any] = {
    "lora": {"r": 4},
    "dtype": "float32",
    "num_rows": 14,
    "predictions": {"sample_frequency": "off"},
    "training": TRAINING,
}


def step_down(job: WorkerJob, *, phase: str = "train") -> Adjustment:
    """Take one step down the ladder, as the daemon does."""
    path = job.dir / "adjustments.json"
    taken = tuple(Adjustment(**item) for item in json.loads(path.read_text())) if path.exists() else ()
    step = out_of_memory.next_step(out_of_memory.adjusted(job.plan["spec"], taken), attempt=len(taken) + 1, phase=phase)
    assert step is not None
    path.write_text(json.dumps([dataclasses.asdict(each) for each in (*taken, step)]))
    return step


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The rows of each optimizer step, as the model received them."""
    from honed.worker.train.trainer import Trainer

    rows: list[list[tuple[int, ...]]] = []
    fetch = Trainer.get_batch_samples

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = fetch(self, *args, **kwargs)
        pairs = [pair for batch in batches for pair in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
        rows.append(sorted(tuple(ids[mask.bool()].tolist()) for ids, mask in pairs))
        return batches, num_items

    monkeypatch.setattr(Trainer, "get_batch_samples", watched)
    return rows


@pytest.mark.parametrize("num_steps_down", [1, 2])
@pytest.mark.parametrize("cut_at", [2, 4])  # in the middle of an epoch, and at its end: 14 rows are 4 steps
def test_a_run_on_smaller_batches_sees_the_same_rows_and_has_the_same_losses(
    make_job: MakeJob, seen: list[Any], cut_at: int, num_steps_down: int
) -> None:
    undisturbed = make_job(**KEYS).run()
    assert undisturbed.status == 0, undisturbed.result
    expected = list(seen)
    assert len(expected) == 8
    seen.clear()
    job = make_job(**KEYS)
    assert job.stopped_at(cut_at).status == 75
    for _ in range(num_steps_down):
        step = step_down(job)
    seen.clear()
    second = job.run(2)
    assert second.status == 0, second.result
    assert seen == expected[cut_at:]
    assert list(second.losses) == list(range(cut_at + 1, 9))
    for number, loss in second.losses.items():
        assert loss == pytest.approx(undisturbed.losses[number], rel=TOLERANCE)
    told = second.of("adjusted")[0]["steps"]
    assert [each["text"] for each in told][-1] == step.text
    assert (job.output_dir / "adapter_model.safetensors").exists()
    print("largest difference:", max(abs(loss - undisturbed.losses[n]) for n, loss in second.losses.items()))


def test_an_accumulation_that_the_job_has_already_is_multiplied(make_job: MakeJob, seen: list[Any]) -> None:
    keys = KEYS | {"training": TRAINING | {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}}
    undisturbed = make_job(**keys).run()
    expected = list(seen)
    job = make_job(**keys)
    job.stopped_at(3)
    assert step_down(job).changes == {
        "training.per_device_train_batch_size": 1,
        "training.gradient_accumulation_steps": 6,
    }
    seen.clear()
    second = job.run(2)
    assert seen == expected[3:]
    assert second.losses == pytest.approx(
        {step: loss for step, loss in undisturbed.losses.items() if step > 3}, rel=TOLERANCE
    )


def test_a_batch_of_one_goes_on_with_activations_that_are_computed_again_and_has_the_same_losses(
    make_job: MakeJob,
) -> None:
    keys = KEYS | {"training": TRAINING | {"per_device_train_batch_size": 1, "gradient_checkpointing": False}}
    undisturbed = make_job(**keys).run()
    job = make_job(**keys)
    assert job.stopped_at(2).status == 75
    assert step_down(job).text == "gradient_checkpointing off → on"
    forwards: list[str] = []

    def look(module: Any, _inputs: Any) -> None:
        if module.training and type(module).__name__ == "Qwen3MLP":
            forwards.append(type(module).__name__)

    handle = register_module_forward_pre_hook(look)
    try:
        second = job.run(2)
    finally:
        handle.remove()
    assert second.status == 0, second.result
    assert len(forwards) == 6 * NUM_LAYERS * 2, "once more for the backward pass"
    assert second.losses == pytest.approx(
        {step: loss for step, loss in undisturbed.losses.items() if step > 2}, rel=TOLERANCE
    )


def test_the_output_says_with_which_batches_it_was_made(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(**(KEYS | {"training": TRAINING | {"max_steps": 1}}))
    step = step_down(job)
    assert job.run().status == 0
    manifest = json.loads((job.output_dir / "honed.json").read_text())
    assert step.text in json.dumps(manifest, ensure_ascii=False)
