"""An instance as people have it, for looking at honed-web: jobs that ended, a sweep, jobs that run and that wait."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

from harness import Instance

from honed.job.event import EventWriter
from honed.job.job import State
from waiting import wait_for

GPUS = [
    {
        "uuid": "GPU-0",
        "free_bytes": 80 << 30,
        "used_bytes": 49 << 30,
        "busy_percent": 97,
        "power_watts": 612.0,
        "temperature_celsius": 64,
    },
    {
        "uuid": "GPU-1",
        "free_bytes": 80 << 30,
        "used_bytes": 1 << 29,
        "busy_percent": 0,
        "power_watts": 71.0,
        "temperature_celsius": 33,
    },
]
FACTS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Iceland": "Reykjavik"}
#: The jobs that ended: name, learning rate, rank, model, and how well the job learned, 0 to 1.
ENDED = (
    ("capitals", 2e-4, 16, "Qwen/Qwen3-1.7B", 0.8),
    ("support-replies", 1e-4, 32, "Qwen/Qwen3-4B", 0.65),
    ("capitals-lr-1e-4", 1e-4, 16, "Qwen/Qwen3-1.7B", 0.6),
    ("capitals-lr-5e-4", 5e-4, 16, "Qwen/Qwen3-1.7B", 1.0),
    ("capitals-r64", 2e-4, 64, "Qwen/Qwen3-1.7B", 0.9),
)
SHARED = "[policy]\nshare_results = true\n"


def furnish(instance: Instance, *, steps: int = 300) -> None:
    """Fill the instance: jobs 1 to 5 succeeded, 6 failed, 7 runs, 8 and 9 wait. honed is left running."""
    gpus = instance.root / "gpus.json"
    gpus.write_text(json.dumps(GPUS))
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    instance.configure(SHARED)
    for number, (_, rate, rank, *_) in enumerate(ENDED):
        instance.drop(f"{number}", name=f"succeed.{number}", lora={"r": rank}, training={"learning_rate": rate})
        assert instance.drain() == 0
    instance.drop("explain")
    assert instance.drain() == 0
    for number, (name, _, _, model, skill) in enumerate(ENDED, 1):
        _rename(instance, State.SUCCEEDED, number, name=name, model=model)
        tell(instance, number, skill, steps=steps)
    _rename(instance, State.FAILED, 6, name="code-review", model="Qwen/Qwen3-8B")
    instance.layout.database_path.unlink()
    instance.start()
    instance.client.ask("pause")
    for name, more in (("slow-4000.a", {}), ("succeed.b", {"depends_on": ["slow-4000.a"]}), ("succeed.c", {})):
        instance.drop(name, **more)
        instance.wait_state(name, State.QUEUED, State.HELD)
    instance.stop()
    for number, name in enumerate(("medical-summaries", "medical-summaries-2", "summaries-translated"), 7):
        _rename(instance, State.QUEUED, number, name=name, model="mistralai/Ministral-3-8B")
    instance.start()
    instance.client.ask("drain", id="1", reason="a new fan")
    instance.client.ask("resume")
    wait_for(lambda: instance.client.ask("show", id="7")["progress"]["step"], what="steps")


def _rename(instance: Instance, state: State, number: int, **keys: Any) -> None:
    """Give an entry a name that people would give it; that of its plan decides what the fake worker does."""
    path: Path = instance.layout.spool_dir / state / f"{number}.json"
    entry = json.loads(path.read_bytes())
    for attempt in entry["attempts"]:
        attempt["took_sec"] = 60.0 * (5 + 3 * number)
    path.write_text(json.dumps({**entry, **keys}))


def tell(instance: Instance, number: int, skill: float, *, steps: int) -> None:
    """Replace a job's events by those of a training that went well, as far as the skill goes."""
    chance = random.Random(number)
    path = instance.layout.job(number).attempt(1).events_path
    path.unlink()
    now = [time.time() - 7200.0]

    def clock() -> float:
        now[0] += 2.0
        return now[0]

    events = EventWriter(path, clock=clock)
    versions = {"torch": "2.13.0", "transformers": "5.17.0", "trl": "1.14.0", "peft": "0.21.0"}
    events.emit("started", pid=1, versions=versions, backend="transformers")
    events.emit(
        "data", num_train=1520, num_eval=80, num_tokens=91_204, datasets=[{"num_rows": 1600, "num_taken": 1600}]
    )
    for step in range(steps + 1):
        share = step / steps
        learned = skill * (1 - math.exp(-5 * share))
        if step:
            loss = 3.4 * (1 - 0.85 * learned) + chance.gauss(0, 0.12)
            rate = 2e-4 * min(1.0, 10 * share) * (1 - share)
            events.emit(
                "step",
                step=step,
                num_steps=steps,
                epoch=3 * share,
                loss=max(loss, 0.05),
                learning_rate=rate,
                grad_norm=1.2 + chance.random() / (1 + 4 * share),
                eta_sec=2.0 * (steps - step),
            )
        if step % (steps // 6) == 0:
            events.emit("evaluation", step=step, epoch=3 * share, metrics={"eval_loss": 3.5 * (1 - 0.8 * learned)})
            rows = [
                {
                    "sample_index": index,
                    "prompt": f"user: What is the capital of {land}?\nassistant:",
                    "ground_truth": town,
                    "prediction": town
                    if (index + 0.5) / len(FACTS) < learned
                    else f"{town[:3]}is, the capital of {land}",
                }
                for index, (land, town) in enumerate(FACTS.items())
            ]
            right = sum(row["prediction"] == row["ground_truth"] for row in rows) / len(rows)
            scores = {"exact_match": right, "token_f1": 0.2 + 0.8 * right, "rouge_l": 0.0, "exact_match_parsable": 1.0}
            events.emit("predictions", step=step, epoch=3 * share, num_failed=0, rows=rows, scores=scores)
    events.emit("memory", when="trained", weights_bytes=3 << 30, adapter_bytes=9 << 20, device_peak_bytes=11 << 30)
    events.emit("artifact", name="output", path=str(instance.layout.job(number).output_dir))
    events.close()
