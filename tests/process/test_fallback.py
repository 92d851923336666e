"""The real daemon, the real worker and the real Unsloth, which cannot train the model here."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ColdInstance

from honed.job import event
from honed.job.job import Job, State
from honed.system.personpath import PersonPath
from zoo.model import build_checkpoint, write_facts
from zoo.vision import build_vision_checkpoint, write_pictures

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth"),
]

SHORT: dict[str, Any] = {
    "training": {"max_steps": 2, "per_device_train_batch_size": 2},
    "lora": {"r": 4},
    "predictions": {"sample_frequency": "off"},
}
#: Makes every Python process of the instance record its imported modules at its end.
SITECUSTOMIZE = """
import atexit, json, os, sys
def tell():
    if "honed.worker.run" in sys.modules:
        with open(os.path.join({directory!r}, f"{{os.getpid()}}.json"), "w") as file:
            json.dump(sorted(name for name in sys.modules if "." not in name), file)
atexit.register(tell)
"""


class WatchedInstance(ColdInstance):
    """A daemon with packages of its own before all others, which records the modules that each worker imported."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.site_dir, self.modules_dir = root / "site", root / "modules"
        self.site_dir.mkdir()
        self.modules_dir.mkdir()
        (self.site_dir / "sitecustomize.py").write_text(SITECUSTOMIZE.format(directory=str(self.modules_dir)))
        path = [str(self.site_dir), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.environment["PYTHONPATH"] = os.pathsep.join(path)

    def hold(self, name: str, model: Path, **keys: Any) -> Job:
        """Drop a job that is held, and wait for its plan."""
        self.drop(f"{name}.hold", base_model=str(model), **SHORT, **keys)
        return self.wait_state(name, State.HELD)

    def plan(self, job: Job) -> dict[str, Any]:
        return dict(json.loads(self.layout.job(job.id).plan_path.read_bytes()))

    def forget(self, job: Job) -> None:
        """Set the plan's backend to unsloth, as if it were not known that Unsloth cannot train the model."""
        plan = self.plan(job)
        plan["backend"] = {"name": "unsloth", "reasons": []}
        self.layout.job(job.id).plan_path.write_text(json.dumps(plan))

    def run(self, *jobs: Job) -> None:
        for job in jobs:
            self.client.ask("release", id=str(job.id))
        for job in jobs:
            self.wait_over(job)

    def wait_over(self, job: Job) -> None:
        from waiting import wait_for

        wait_for(lambda: self.show(str(job.id))["state"] in {"succeeded", "failed"}, what=job.name, deadline_sec=600)

    def starts_with_modules(self, job: Job) -> list[tuple[str, set[str]]]:
        """Return the backend of each of the job's processes, and the modules imported in it at its end."""
        path = self.layout.job(job.id).attempt(1).events_path
        started = [item.data for item in event.read(PersonPath.own(path), 0).events if item.kind == "started"]
        return [
            (item["backend"], set(json.loads((self.modules_dir / f"{item['pid']}.json").read_text())))
            for item in started
        ]


@pytest.fixture
def real(tmp_path: Path) -> Iterator[WatchedInstance]:
    made = WatchedInstance(tmp_path)
    write_facts(made.dataset, 6)
    yield made
    made.end()


def check_fell_back(real: WatchedInstance, job: Job, reason: str) -> None:
    """Check for one attempt of two processes, the second without Unsloth, and for no counted failure."""
    shown = real.show(job.name)
    assert shown["state"] == "succeeded", f"{shown['error']}\n{real.log}"
    [attempt] = shown["attempts"]
    assert (attempt["backend"], attempt["num_starts"], attempt["outcome"]) == ("transformers", 2, "succeeded")
    now = real.job(job.name)
    assert now is not None
    assert now.num_failures == 0
    [fallback] = [item for item in shown["events"] if item["event"] == "fallback"]
    assert (fallback["from"], fallback["to"]) == ("unsloth", "transformers")
    assert reason in fallback["reason"]
    (first, before), (second, after) = real.starts_with_modules(job)
    assert (first, second) == ("unsloth", "transformers")
    assert "unsloth" in before or "cannot find any torch accelerator" in reason  # a module that raised is taken out
    assert not {"unsloth", "unsloth_zoo"} & after
    assert {"transformers", "trl", "peft"} <= after
    assert (Path(shown["artifacts"]["output_dir"]) / "adapter_model.safetensors").exists()
    assert f"falls back to transformers: Unsloth cannot train this model: {reason}" in real.log


def test_a_model_that_unsloth_refuses_or_cannot_load_is_trained_by_a_fresh_process(real: WatchedInstance) -> None:
    vision = build_vision_checkpoint(real.root / "vision", "qwen2_5_vl")
    pictures = write_pictures(real.root / "pictures.jsonl", 6)
    alias = build_checkpoint(real.root / "alias", "llama")
    config = json.loads((alias / "config.json").read_text())
    (alias / "config.json").write_text(json.dumps(config | {"model_type": "code_llama"}))
    real.start()
    sees, named = real.hold("sees", vision, datasets=[{"path": str(pictures)}]), real.hold("alias", alias)
    assert real.plan(sees)["backend"] == {
        "name": "transformers",
        "reasons": ["without an NVIDIA GPU, Unsloth does not train vision or audio models"],
    }
    assert real.plan(named)["backend"]["name"] == "transformers"
    assert "model_type (code_llama)" in real.plan(named)["backend"]["reasons"][0]
    for job in (sees, named):
        real.forget(job)
    real.run(sees, named)
    check_fell_back(real, sees, "NotImplementedError: Unsloth: vision / audio models are not supported on the CPU")
    check_fell_back(real, named, "ValueError")
    said = real.honectl("show", "sees", check=True).stdout
    assert "fell back from unsloth to transformers" in said
    assert "audit (built): model bfloat16" in said
    assert "vision" in said


def test_an_unsloth_that_cannot_be_imported_is_done_without_unless_the_job_names_it(real: WatchedInstance) -> None:
    broken = real.site_dir / "unsloth"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise NotImplementedError('Unsloth cannot find any torch accelerator?')\n")
    model = build_checkpoint(real.root / "plain", "llama")
    real.start()
    auto, named = real.hold("auto", model), real.hold("named", model, backend="unsloth")
    assert real.plan(named)["backend"] == {"name": "unsloth", "reasons": ["as the job asks"]}
    real.forget(auto)
    real.run(auto, named)
    check_fell_back(real, auto, "NotImplementedError: Unsloth cannot find any torch accelerator?")
    shown = real.show("named")
    assert (shown["state"], shown["error"]["code"]) == ("failed", "backend_unavailable")
    assert [attempt["num_starts"] for attempt in shown["attempts"]] == [1]
    assert not any(item["event"] == "fallback" for item in shown["events"])
    [(backend, modules)] = real.starts_with_modules(named)
    assert backend == "unsloth"
    assert not {"transformers", "trl", "peft"} & modules  # nothing came before Unsloth
