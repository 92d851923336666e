"""The main use case with nothing left out: real files dropped into the spool become trained adapters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from pathlib import Path
from typing import Any

import fakehub
import pytest
import yaml
from fakehub import Repository
from harness import RealInstance

import warm
from honed.job.job import State
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

TRAINING = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "gradient_checkpointing": False,
}
LORA = {"r": 4, "target_modules": "all-linear"}
#: Family, template, format and way of training: together they cover every family, format and way.
JOBS: dict[str, dict[str, Any]] = {
    "lora": {"family": "llama", "format": "messages", "lora": LORA},
    "full": {"family": "qwen2", "format": "prompt_completion"},
    "4bit": {"family": "mistral", "format": "alpaca", "lora": LORA, "quantization": "4bit"},
    "8bit": {"family": "gemma2", "format": "sharegpt", "lora": LORA, "quantization": "8bit", "dtype": "bfloat16"},
    "text": {"family": "gpt2", "format": "text", "lora": LORA},
    "phi": {"family": "phi3", "template": "llama2", "format": "messages", "lora": LORA, "dtype": "float32"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and a data set for each job."""
    warm.address("quantized")
    directory = tmp_path_factory.mktemp("models")
    for name, job in JOBS.items():
        build_checkpoint(directory / name, job["family"], template=job.get("template"))
        write_facts(directory / f"{name}.jsonl", 12, format=job["format"])
    return directory


def spec_of(models: Path, name: str, **keys: Any) -> dict[str, Any]:
    job = {key: value for key, value in JOBS[name].items() if key not in {"family", "template", "format"}}
    spec = {
        "base_model": str(models / name),
        "datasets": [{"path": str(models / f"{name}.jsonl")}],
        "eval_split": 0.25,
        "training": TRAINING,
        "predictions": {"num_samples": 2, "max_new_tokens": 4},
        **job,
    }
    return {**spec, **keys}


@pytest.mark.quick
def test_each_family_format_and_way_of_training_ends_with_output_metrics_and_predictions(
    real: RealInstance, models: Path
) -> None:
    real.configure("[policy]\nhub = true\n")
    with fakehub.running() as hub:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        real.environment = {**inherited, "HF_ENDPOINT": hub.url}
        hub.repositories["datasets/org/text"] = Repository({"data/train.jsonl": (models / "text.jsonl").read_bytes()})
        for name in JOBS:
            path = real.root / f"{name}.yaml"
            keys = {"datasets": [{"path": "org/text"}]} if name == "text" else {}
            path.write_text(yaml.safe_dump(spec_of(models, name, **keys)))
            shutil.copy(path, real.incoming_dir)  # as `cp` does
        real.start("--drain")
        assert real.wait(deadline_sec=500) == 0
    assert real.rejected() == {}
    db = sqlite3.connect(real.layout.database_path)
    for name, settings in JOBS.items():
        shown = real.show(name)
        assert shown["state"] == "succeeded", f"{name}: {shown['error']}\n{real.log}"
        output = Path(shown["artifacts"]["output_dir"])
        weights = "adapter_model.safetensors" if "lora" in settings else "model.safetensors"
        for file in (weights, "tokenizer.json", "README.md", "honed.json"):
            assert (output / file).is_file(), f"{name}: {file}"
        manifest = json.loads((output / "honed.json").read_text())
        assert manifest["spec"]["base_model"] == str(models / name)
        commits = {key: found["commit"] for key, found in manifest["plan"]["hub_datasets"].items()}
        assert commits == ({"datasets.0": "1" * 40} if name == "text" else {})
        assert ("- `org/text` at 1111" in (output / "README.md").read_text()) == (name == "text")
        assert {"train_loss", "eval_loss"} <= set(shown["metrics"])
        steps = {
            row[0] for row in db.execute("SELECT step FROM metrics WHERE job_id = ? AND name = 'loss'", (shown["id"],))
        }
        assert steps == {1, 2, 3, 4}
        predicted = db.execute(
            "SELECT step, count(*) FROM training_predictions WHERE job_id = ? GROUP BY step", (shown["id"],)
        )
        assert dict(predicted) == {0: 2, 2: 2, 4: 2}, name
    assert "Traceback" not in real.log


#: It waits in its thirty-fifth step until it is asked to stop, or a file `go` is in its directory.
HOLD = """
import os, sys, time
from honed.worker.train.trainer import WatchedTrainer
step = WatchedTrainer.training_step
def training_step(self, *args, **kwargs):
    while self.state.global_step == 34 and not (self._stop.is_set or os.path.exists(os.path.join(sys.argv[1], "go"))):
        time.sleep(0.02)
    return step(self, *args, **kwargs)
WatchedTrainer.training_step = training_step
"""


def test_a_real_worker_killed_and_a_real_honed_stopped_lose_no_step(real: RealInstance, models: Path) -> None:
    training = {**TRAINING, "max_steps": 40, "eval_strategy": "no", "save_steps": 5}
    spec = spec_of(models, "lora", training=training, eval_split=None, predictions={"sample_frequency": "off"})
    (real.root / "long.yaml").write_text(yaml.safe_dump(spec))
    real.environment["HONED_TEST_RANK_0"] = HOLD
    real.start()
    shutil.copy(real.root / "long.yaml", real.incoming_dir)
    real.wait_state("long", State.RUNNING)
    step = lambda: real.show("long")["progress"]["step"] or 0  # noqa: E731
    wait_for(lambda: step() >= 12, what="twelve steps", deadline_sec=300)
    job = real.job("long")
    assert job is not None
    record = json.loads((real.layout.job(job.id).attempt(1).dir / "lock").read_text())
    os.kill(record["worker_pid"], signal.SIGKILL)
    wait_for(
        lambda: any(event["event"] == "resumed" for event in real.show("long")["events"]),
        what="resumed",
        deadline_sec=300,
    )
    wait_for(lambda: step() >= 20, what="twenty steps", deadline_sec=300)
    real.kill(signal.SIGTERM)
    stopped = real.job("long")
    assert stopped is not None
    assert (stopped.state, stopped.attempt.outcome, stopped.num_failures) == (State.QUEUED, "interrupted", 1)
    real.go("long")
    real.start()
    wait_for(lambda: real.show("long")["state"] == "succeeded", what="success", deadline_sec=300)
    shown = real.show("long")
    resumed = [event["step"] for event in shown["events"] if event["event"] == "resumed"]
    assert len(resumed) == 2
    assert resumed[0] % 5 == 0
    assert resumed[1] == stopped.attempt.step
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["killed", "interrupted", "succeeded"]
