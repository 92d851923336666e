"""A model that is divided between two ranks (FSDP2): the run of one process, with a part of each weight on each rank."""

from __future__ import annotations

from typing import Any

import pytest

from worker.conftest import MakeJob
from worker.test_ranks import BF16, Run, over_two, with_keys


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        pytest.param({"dtype": "float32"}, 5e-7, id="lora-fp32"),
        pytest.param(BF16, 3e-4, id="lora-bf16"),
        pytest.param({"lora": None, "training": {"learning_rate": 2e-4}}, 5e-7, id="full-fp32"),
        pytest.param({"lora": None, "dtype": "auto", "training": {"learning_rate": 2e-4}}, 3e-4, id="full-autocast"),
        pytest.param({"quantization": "4bit"}, 5e-7, id="4bit-fp32"),
        pytest.param({"quantization": "4bit", **BF16}, 3e-4, id="4bit-bf16"),
    ],
)
def test_a_divided_model_trains_as_a_whole_one_does(make_job: MakeJob, keys: dict[str, Any], tolerance: float) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3}
    asked = with_keys(
        **{
            "eval_split": 1 / 3,
            "predictions": {"num_samples": 2, "max_new_tokens": 8},
            **keys,
            "training": {**evaluation, **keys.get("training", {})},
        }
    )
    if asked["lora"] is None:
        del asked["lora"]
    one = make_job(**asked).run()
    assert one.status == 0
    two = Run(over_two(make_job(**asked), mode="fsdp"))
    ended = two.end()
    assert ended.status == 0, two.log[-4000:]
    print(one.losses, ended.losses)
    assert ended.losses == pytest.approx(one.losses, abs=tolerance)
