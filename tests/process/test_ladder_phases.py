"""Running out of memory in predictions or in an evaluation makes their batches smaller, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from limited import LimitedInstance, check_stepped_down

from honed.job import event
from honed.system.personpath import PersonPath
from zoo.model import build_checkpoint

#: Words of a prompt, each a token. The attention scores of all heads use nearly all the memory.
LENGTH, NUM_HEADS = 1200, 16
#: Bytes by which a worker may grow. Measured: 1.2 GiB with five rows at a time, 0.7 with two, and less in a training
#: step.
LIMIT_BYTES = int(0.88 * 2**30)


def write_long_prompts(path: Path, num_rows: int = 5) -> Path:
    rows = [{"prompt": f"What is {n}?" + " is" * LENGTH, "completion": " Paris"} for n in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_predictions_and_then_evaluations_go_on_in_smaller_batches_where_memory_ran_out_in_them(
    limited: LimitedInstance, tmp_path: Path
) -> None:
    limited.model = build_checkpoint(
        tmp_path / "attentive",
        "llama",
        hidden_size=2 * NUM_HEADS,
        num_layers=1,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=2048,
    )
    limited.dataset = write_long_prompts(tmp_path / "long.jsonl")
    training = {
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "max_length": 2048,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": False,
        "per_device_eval_batch_size": 5,
    }
    limited.drop(
        "long",
        lora={"r": 2},
        dtype="float32",
        backend="transformers",
        attn_implementation="eager",
        eval_datasets=[{"path": str(write_long_prompts(tmp_path / "held-out.jsonl"))}],
        predictions={"num_samples": 5, "max_new_tokens": 2},
        retry={"max_attempts": 1},
        training=training,
    )
    limited.run(LIMIT_BYTES)
    texts = ["predictions.batch_size 5 → 2", "training.per_device_eval_batch_size 5 → 2"]
    job = check_stepped_down(limited, "long", *texts)
    attempts = [limited.layout.job(job.id).attempt(number) for number in (1, 2, 3)]
    results = [json.loads(each.result_path.read_text()) for each in attempts]
    assert [result["phase"] for result in results[:2]] == ["predict", "evaluate"]
    told = [event.read(PersonPath.own(each.events_path), 0).events for each in attempts]
    assert [(item.kind, item.data["step"]) for item in told[2] if item.kind in {"resumed", "evaluation"}] == [
        ("resumed", 1),
        ("evaluation", 2),
    ]
    rounds = [
        (item.data["step"], len(item.data["rows"]), item.data["num_failed"])
        for items in told
        for item in items
        if item.kind == "predictions"
    ]
    assert rounds == [(0, 5, 0), (2, 5, 0)], "as many as were asked for, all of them answered"
