"""A small job on the model of the fixture `model`, evaluated twice."""

from __future__ import annotations

from typing import Any


def evaluated(name: str, *, num_steps: int) -> dict[str, Any]:
    """Return its spec: evaluations and predictions half-way and at the end."""
    return {
        "name": name,
        "base_model": "/srv/models/tiny",
        "backend": "transformers",
        "lora": {"r": 4, "lora_alpha": 8},
        "datasets": [{"path": "/srv/data/facts.jsonl"}],
        "eval_split": 0.1,
        "training": {
            "max_steps": num_steps,
            "per_device_train_batch_size": 2,
            "max_length": 128,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": num_steps // 2,
        },
        "predictions": {"sample_frequency": "eval", "num_samples": 2, "max_new_tokens": 4},
    }
