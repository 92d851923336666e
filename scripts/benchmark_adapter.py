"""Adapters in float32 compared with bfloat16: QLoRA at 2e-4 with decay, two tasks, through honed's own worker.

    capitals   the quickstart's: 48 facts, asked in eight ways, held out in two more
    numbers    60 people's four digits, asked in three ways, held out in one more: a name says nothing about its number

Each run is one job of the transformers backend on the CPU, on a 4-bit base that computes in float32: the two runs of a
seed differ only in the adapter's dtype. (With bfloat16 throughout, as on a GPU, a CPU that emulates it needs hours.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import demonstration
import plan_document

from honed.system.personpath import PersonPath

DTYPES = ("float32", "bfloat16")
LEARNING_RATE = 2e-4
#: Default number of steps of each task.
STEPS = {"capitals": 150, "numbers": 300}
ASKED = ("Which number does {} have?", "What is the number of {}?", "Tell me the number of {}.")
HELD_OUT = ("Do you know the number of {}?",)
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def numbers(count: int = 60) -> list[tuple[str, str]]:
    """Return names and digits, the same in each run."""
    draw = random.Random(1)
    names: dict[str, str] = {}
    while len(names) < count:
        name = "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(3)).capitalize()
        names.setdefault(name, f"{draw.randrange(10_000):04}")
    return list(names.items())


def asked(pairs: list[tuple[str, str]], questions: tuple[str, ...] | list[str]) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": question.format(key)}, {"role": "assistant", "content": value}]}
        for question in questions
        for key, value in pairs
    ]


def tasks() -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Return each task's rows: trained on, and held out."""
    facts = demonstration.facts()
    return {
        "capitals": (asked(facts, demonstration.QUESTIONS), asked(facts, demonstration.HELD_OUT_QUESTIONS)),
        "numbers": (asked(numbers(), ASKED), asked(numbers(), HELD_OUT)),
    }


def job(root: Path, task: str, dtype: str, seed: int, steps: int) -> Path:
    """Create a job's directory with its plan, as the daemon does."""
    from honed.inputs import basemodel
    from honed.plan import plan
    from honed.spec import jobfile
    from honed.spec.config import Config
    from honed.system import installed
    from honed.system.device import cpu

    directory = root / f"{task}-{dtype}-{seed}"
    directory.mkdir()
    parsed = jobfile.validate(
        {
            "base_model": str(root / "model"),
            "quantization": "4bit",
            "dtype": "float32",
            "backend": "transformers",
            "lora": {"r": 16, "lora_alpha": 512},  # a random model has far to go at this learning rate
            "datasets": [{"path": str(root / f"{task}.jsonl")}],
            "eval_datasets": [{"path": str(root / f"{task}-held-out.jsonl")}],
            "training": {
                "max_steps": steps,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 10,
                "per_device_train_batch_size": 32,
                "per_device_eval_batch_size": 64,
                "gradient_checkpointing": False,
                "eval_strategy": "steps",
                "eval_steps": steps,
                "logging_steps": 20,
                "seed": seed,
                "save_strategy": "no",
            },
            "save_interval_sec": None,
            "predictions": {"num_samples": 96, "max_new_tokens": 8, "batch_size": 96},
            "resources": {"gpus": 0},
        }
    )
    info = basemodel.inspect(root / "model")
    planned = plan.make(parsed, info, cpu(), config=Config(), installed=installed.look())
    choices = planned.as_dict()["precision"] | {"adapter_dtype": dtype}
    plan_document.write(directory, parsed, planned, precision=choices)
    return directory


def train(directory: Path) -> dict[str, float]:
    """Return the last training loss, and the loss and the share of right answers on the held-out rows."""
    from honed.job import event
    from honed.worker.run import run

    if run(directory, 1) != 0:
        raise SystemExit((directory / "attempts/1/result.json").read_text())
    events = event.read(PersonPath.own(directory / "attempts/1/events.jsonl"), 0).events
    losses = [item.data["loss"] for item in events if item.kind == "step" and item.data.get("loss") is not None]
    scores = [item.data["scores"] for item in events if item.kind == "predictions"][-1]
    evaluated = [item.data["metrics"]["eval_loss"] for item in events if item.kind == "evaluation"][-1]
    return {"train": losses[-1], "eval": evaluated, "right": scores["exact_match"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--task", choices=list(tasks()), action="append")
    options = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    with tempfile.TemporaryDirectory(prefix="honed-adapter-") as temporary:
        root = Path(temporary)
        subprocess.run([sys.executable, demonstration.__file__, str(root)], check=True, stdout=subprocess.DEVNULL)
        for name, (trained, held_out) in tasks().items():
            for path, rows in ((f"{name}.jsonl", trained), (f"{name}-held-out.jsonl", held_out)):
                (root / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
        print("| task | adapters | last loss | held-out loss | right answers |\n| --- | --- | --- | --- | --- |")
        for task in options.task or tasks():
            for dtype in DTYPES:
                began = time.monotonic()
                found = [
                    train(job(root, task, dtype, seed, options.steps or STEPS[task]))
                    for seed in range(1, options.seeds + 1)
                ]
                cells = [
                    f"{statistics.mean(each[name] for each in found):{form}}"
                    + f" ({', '.join(format(each[name], form) for each in found)})"
                    for name, form in (("train", ".4f"), ("eval", ".4f"), ("right", ".0%"))
                ]
                print(f"| {task} | {dtype} | {' | '.join(cells)} |", flush=True)
                print(f"{task}, {dtype}: {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
