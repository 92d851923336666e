"""Training continues from adapters of every kind that a job can make, and one that fits only in part is rejected."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors import safe_open

from worker.conftest import MakeJob

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": ({}, {"use_dora": True}),
    "tied embeddings, whole": ({"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
    "on embeddings": ({}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "in the last layer": ({}, {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
    "all in the last layer": ({}, {"layers_to_transform": [1]}),
    "some in the last layer": ({}, {"target_modules": r".*\.(q|v)_proj", "layers_to_transform": [1]}),
}
RUN: dict[str, Any] = {
    "eval_split": 0.25,
    "training": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 2e-2},
    "predictions": {"sample_frequency": "off"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_gone_on_from_where_it_was(make_job: MakeJob, kind: str) -> None:
    model, lora = KINDS[kind]
    first = make_job("llama", model=model, lora={"r": 4} | lora, **RUN)
    ended = first.run()
    assert ended.status == 0, ended.result
    again = make_job("llama", model=model, adapter=str(first.output_dir), **RUN).run()
    assert again.status == 0, again.result
    if "layers_to_transform" in lora:
        with safe_open(first.output_dir / "adapter_model.safetensors", "pt") as file:
            names = set(file.keys())
        assert names
        assert all(".layers.1." in name for name in names)
    before, after = ([item["metrics"]["eval_loss"] for item in each.of("evaluation")] for each in (ended, again))
    assert before[-1] < before[0] - 0.01
    assert after[0] == pytest.approx(before[-1], abs=1e-3)
