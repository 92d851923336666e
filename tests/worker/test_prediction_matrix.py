"""A run with predictions learns the same as one without: every precision, both backends, every frequency, sampled
answers too, with dropout in the adapter.

The losses depend on the random state there, so one draw too many in a round of predictions shows at the next step.
Imports take most of the time: there is one process for each backend, and a fork for each job.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker.conftest import Ended, MakeJob, WorkerJob, read_events

REPOSITORY = Path(__file__).parents[2]
#: Seconds for an import and a dozen short jobs.
TIMEOUT_SEC = 600
#: Runs what the worker's main does in a fork of one process that has imported; as scripts/gpu_matrix.py does it.
FORKS = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu_matrix
backend, *directories = sys.argv[2:]
gpu_matrix.import_libraries(backend)
for job_dir in map(Path, directories):
    (job_dir / "attempts/1").mkdir(parents=True)
    def work(job_dir=job_dir):
        os.chdir(job_dir)
        sys.argv = ["honed.worker", str(job_dir), "1"]
        return gpu_matrix.worker_main()
    status, _ = gpu_matrix.in_child(work, job_dir / "attempts/1/worker.log", timeout_sec=600)
    (job_dir / "status").write_text(str(status))
"""
#: The events that are compared with those of a run without predictions.
WAYS: dict[str, dict[str, Any]] = {
    "eval": {"predictions": {"sample_frequency": "eval"}},
    "epoch": {"predictions": {"sample_frequency": "epoch"}},
    "each step": {"predictions": {"sample_frequency": 1}},
    "every third, drawn": {"predictions": {"sample_frequency": 3, "sample": {"temperature": 2.0, "top_p": 0.9}}},
    "own prompts": {"predictions": {"sample_frequency": 2, "prompts": ["And you?", "What is the capital of Peru?"]}},
    "guard": {"guard": {"metric": "token_f1", "max_drop": 1, "patience": 9}},
}
#: The steps with predictions in a run of eight steps, four an epoch.
STEPS = {
    "eval": [0, 2, 4, 6, 8],
    "epoch": [0, 4, 8],
    "each step": [0, 1, 2, 3, 4, 5, 6, 7, 8],
    "every third, drawn": [0, 3, 6, 8],
    "own prompts": [0, 2, 4, 6, 8],
    "guard": [0, 2, 4, 6, 8],
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "4bit": {"quantization": "4bit"},
    "4bit in float32": {"quantization": "4bit", "dtype": "float32"},
    "8bit": {"quantization": "8bit"},
}
#: The others are rejected on a CPU: Unsloth would load something else.
UNSLOTHS = ("float32", "bfloat16", "4bit", "4bit in float32")
CELLS = [("transformers", name) for name in PRECISIONS] + [("unsloth", name) for name in UNSLOTHS]


def run_all(jobs: dict[str, WorkerJob], backend: str) -> dict[str, Ended]:
    directories = [str(job.dir) for job in jobs.values()]
    command = [sys.executable, "-c", FORKS, str(REPOSITORY / "scripts"), backend, *directories]
    cwd = next(iter(jobs.values())).dir  # Unsloth leaves a cache where it is imported
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = {}
    for name, job in jobs.items():
        status = int((job.dir / "status").read_text())
        assert status == 0, (name, job.log()[-3000:])
        ended[name] = Ended(status, {}, read_events(job.events_path(1)))
    return ended


@pytest.mark.timeout(TIMEOUT_SEC + 60)
@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_losses_with_predictions_are_those_without_step_by_step(
    make_job: MakeJob, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "unsloth" and importlib.util.find_spec("unsloth") is None:
        pytest.skip("needs Unsloth")
    jobs: dict[str, WorkerJob] = {}
    whole = request.config.getoption("--all")
    precisions = [name for each, name in CELLS if each == backend]
    for place, precision in enumerate(precisions):
        # By default each precision meets a way of its own: with transformers all six, with Unsloth the last four.
        ways = [way for n, way in enumerate(WAYS) if whole or n == (place + 2) % len(WAYS)]
        off = {"predictions": {"sample_frequency": "off"}}
        for way, keys in {"off": off, **{way: WAYS[way] for way in ways}}.items():
            predictions = {"num_samples": 3, "max_new_tokens": 6} | keys.get("predictions", {})
            jobs[f"{precision}, {way}"] = make_job(
                backend=backend,
                num_rows=11,
                eval_split=0.25,
                **PRECISIONS[precision],
                lora={"r": 8, "lora_dropout": 0.2},
                predictions=predictions,
                guard=keys.get("guard"),
                training={
                    "max_steps": 8,
                    "eval_strategy": "steps",
                    "eval_steps": 2,
                    "learning_rate": 2e-2,
                    "gradient_accumulation_steps": 1,
                },
            )
    ended = run_all(jobs, backend)
    for name, run in ended.items():
        precision, _, way = name.partition(", ")
        silent = ended[f"{precision}, off"]
        assert list(silent.losses) == [*range(1, 9)], name
        assert run.losses == silent.losses, name
        told = [item["step"] for item in run.of("predictions")]
        assert told == ([] if way == "off" else STEPS[way]), name
        assert not [item for item in run.of("predictions") if item["num_failed"]], name
        [evaluated, wanted] = [
            [item["metrics"]["eval_loss"] for item in each.of("evaluation")] for each in (run, silent)
        ]
        assert evaluated == wanted, name
        assert (way == "guard") == bool(run.of("guard")), name
    drawn = [run for name, run in ended.items() if name.endswith("drawn")]
    assert drawn, "answers that are drawn are among them"
    # The comparison can fail: runs of two precisions differ.
    assert len({tuple(run.losses.values()) for name, run in ended.items() if name.endswith("off")}) > 1
