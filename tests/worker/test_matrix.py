"""Every way of training through both backends, whose imports take most of the time: all workers are forks of one
process for each backend.

A run that is cut at any kind of moment, by SIGTERM or SIGKILL, and resumed by a new worker is the same run. So is one
with predictions: every precision, every frequency, sampled answers too. The losses depend on the random state there, so
one draw too many in a round of predictions shows at the next step.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from worker.conftest import Cutter, Ended, MakeJob, WorkerJob
from zoo.model import write_facts

#: 20 rows are drawn from two data sets, 5 steps an epoch; the last epoch is cut short.
KEYS: dict[str, Any] = {
    "eval_split": 0.25,
    "early_stopping_patience": 50,
    "guard": {"metric": "exact_match", "max_drop": 1.0, "patience": 50, "num_samples": 2},
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
    "training": {
        "max_steps": 11,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "eval_steps": 4,
        "per_device_eval_batch_size": 2,
        "save_steps": 4,
        "load_best_model_at_end": True,
    },
}
LORA = {"r": 4, "lora_dropout": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "lora-float32": {"lora": LORA, "dtype": "float32"},
    "lora-bfloat16": {"lora": LORA, "dtype": "bfloat16"},
    "lora-float16": {"lora": LORA, "dtype": "float16"},
    "lora-4bit": {"lora": LORA, "quantization": "4bit"},
    "lora-8bit": {"lora": LORA, "quantization": "8bit"},
    "full-float32": {"dtype": "float32"},
    "full-bfloat16": {"dtype": "bfloat16"},
}
#: The ways of training that a backend supports on a CPU.
BACKENDS = {
    "transformers": list(WAYS),
    "unsloth": ["lora-float32", "lora-bfloat16", "lora-4bit"],
}
#: The step at which each cut is made, all of them in the middle of an epoch: its end is test_resume_state.py's.
CUTS = {"accumulation": 6, "evaluation": 8, "predictions": 8, "checkpoint": 8, "put": 8, "export": 11, "place": 11}
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}

CELLS = [
    (backend, way, cut, name) for backend, ways in BACKENDS.items() for way in ways for cut in CUTS for name in SIGNALS
]
#: Each way and each cut, with each backend and each signal, once at least.
SAMPLE = {
    ("transformers", "lora-float32", "accumulation", "SIGKILL"),
    ("transformers", "lora-bfloat16", "evaluation", "SIGTERM"),
    ("transformers", "lora-float16", "put", "SIGKILL"),
    ("transformers", "lora-4bit", "predictions", "SIGTERM"),
    ("transformers", "lora-8bit", "checkpoint", "SIGKILL"),
    ("transformers", "full-float32", "place", "SIGKILL"),
    ("transformers", "full-bfloat16", "checkpoint", "SIGTERM"),
    ("unsloth", "lora-float32", "export", "SIGKILL"),
    ("unsloth", "lora-4bit", "accumulation", "SIGTERM"),
    ("unsloth", "lora-bfloat16", "evaluation", "SIGKILL"),
}
#: Ways of which cells are resumed by a worker that starts and imports as in an installation, all others by a fork, as
#: they began. By default that is one cell: Unsloth takes long to import, and test_unsloth.py has such a worker of it.
FRESH = {("transformers", "lora-4bit"), ("unsloth", "lora-float32")}
#: Metrics that depend on the clock, not on the run.
TIMED = ("_runtime", "_per_second")


@dataclass
class Course:
    """The course of a run, step by step, all its attempts together."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    predictions: dict[int, Any] = field(default_factory=dict)
    guard: dict[int, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, ended: Ended) -> None:
        """Add an attempt's events. A step that is repeated must have the same results."""
        for item in ended.of("step"):
            self._put(self.steps, item["step"], {key: value for key, value in item.items() if key != "eta_sec"})
        for item in ended.of("evaluation"):
            self._put(self.evaluations, item["step"], untimed(item["metrics"]))
        for item in ended.of("predictions"):
            self._put(self.predictions, item["step"], (item["rows"], item["scores"], item["num_failed"]))
        for item in ended.of("guard"):
            self._put(self.guard, item["step"], (item["scores"], item["line"]))

    @staticmethod
    def _put(place: dict[int, Any], step: int, what: Any) -> None:
        assert place.setdefault(step, what) == what, f"step {step} was another when it was done again"

    def end(self, job: WorkerJob, ended: Ended) -> None:
        assert ended.status == 0, (ended.result, ended.of("log"))
        self.metrics = untimed(ended.metrics)
        [path] = job.output_dir.glob("*model.safetensors")
        self.weights = load_file(path)


def untimed(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.endswith(TIMED)}


def course_of(job: WorkerJob, *attempts: Ended) -> Course:
    course = Course()
    for ended in attempts:
        course.add(ended)
    course.end(job, attempts[-1])
    return course


def assert_same(found: Course, undisturbed: Course) -> None:
    assert found.steps == undisturbed.steps
    assert found.evaluations == undisturbed.evaluations
    assert found.predictions == undisturbed.predictions
    assert found.guard == undisturbed.guard
    assert found.metrics == undisturbed.metrics
    assert found.weights.keys() == undisturbed.weights.keys()
    for name, weight in found.weights.items():
        assert weight.dtype == undisturbed.weights[name].dtype
        assert torch.equal(weight, undisturbed.weights[name]), name


def new_job(make_job: MakeJob, backend: str, way: str, **keys: Any) -> WorkerJob:
    """Return a job on a mixture of two data sets."""
    job = make_job(backend=backend, **{**KEYS, **WAYS[way], **keys})
    paths = [write_facts(job.dir / f"facts{n}.jsonl", num_rows) for n, num_rows in enumerate((18, 12))]
    spec = job.plan["spec"]
    mixture = [
        spec["datasets"][0] | {"path": str(path), "fraction": share}
        for path, share in zip(paths, (0.7, 0.3), strict=True)
    ]
    job.change_plan(spec=spec | {"datasets": mixture})
    return job


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, str], Course]:
    """A cache of uncut runs, one for each way of training, each made when it is first needed."""
    return {}


def marks(cell: tuple[str, ...]) -> list[Any]:
    is_there = importlib.util.find_spec(cell[0]) is not None
    needed = pytest.mark.skipif(not is_there, reason=f"needs {cell[0]}")
    return [needed] if cell in SAMPLE else [needed, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("backend", "way", "cut", "name"), [pytest.param(*cell, id="-".join(cell), marks=marks(cell)) for cell in CELLS]
)
def test_a_run_that_is_cut_and_resumed_is_the_undisturbed_run(
    make_job: MakeJob,
    cutter_of: Callable[[str], Cutter],
    undisturbed: dict[tuple[str, str], Course],
    backend: str,
    way: str,
    cut: str,
    name: str,
) -> None:
    if (backend, way) not in undisturbed:
        whole = new_job(make_job, backend, way)
        undisturbed[backend, way] = course_of(whole, cutter_of(backend).run(whole))
        assert len(undisturbed[backend, way].steps) == 11
        assert list(undisturbed[backend, way].predictions) == [0, 4, 8, 11]
    job = new_job(make_job, backend, way)
    first = cutter_of(backend).run(job, cut=cut, step=CUTS[cut], signal=SIGNALS[name])
    if name == "SIGTERM" and cut in {"export", "place"}:
        assert_same(course_of(job, first), undisturbed[backend, way])  # an export ends before it could be interrupted
        return
    assert first.status == (75 if name == "SIGTERM" else -signal.SIGKILL), (first.result, job.log()[-3000:])
    is_fresh = (backend, way) in FRESH and not (backend == "unsloth" and (backend, way, cut, name) in SAMPLE)
    second = job.wait(job.start(2), 2) if is_fresh else cutter_of(backend).run(job, 2)
    assert second.status == 0, (second.result, job.log(2)[-3000:])
    assert len(second.of("resumed")) == 1
    assert_same(course_of(job, first, second), undisturbed[backend, way])


#: Ways of asking for predictions, each of which is compared with a run without.
ASKED: dict[str, dict[str, Any]] = {
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
ASKED_OF = [("transformers", name) for name in PRECISIONS] + [("unsloth", name) for name in UNSLOTHS]


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_losses_with_predictions_are_those_without_step_by_step(
    make_job: MakeJob, cutter_of: Callable[[str], Cutter], backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "unsloth" and importlib.util.find_spec("unsloth") is None:
        pytest.skip("needs Unsloth")
    jobs: dict[str, WorkerJob] = {}
    whole = request.config.getoption("--all")
    precisions = [name for each, name in ASKED_OF if each == backend]
    for place, precision in enumerate(precisions):
        # By default each precision meets a way of its own: with transformers all six, with Unsloth the last four.
        ways = [way for n, way in enumerate(ASKED) if whole or n == (place + 2) % len(ASKED)]
        off = {"predictions": {"sample_frequency": "off"}}
        for way, keys in {"off": off, **{way: ASKED[way] for way in ways}}.items():
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
    ended = {name: cutter_of(backend).run(job) for name, job in jobs.items()}
    for name, run in ended.items():
        assert run.status == 0, (name, jobs[name].log()[-3000:])
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
