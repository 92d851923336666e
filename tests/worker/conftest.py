"""Jobs for the worker, as the daemon would start them, on tiny real models that are built once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import warm
from honed.inputs import basemodel, modality
from honed.job import event
from honed.job.event import Event
from honed.plan import plan
from honed.spec import jobfile
from honed.spec.config import Config
from honed.system import installed
from honed.system.device import cpu
from honed.system.personpath import PersonPath
from honed.worker.model import torchvision
from honed.worker.run import run
from honed.worker.stop import Stop
from waiting import wait_for
from zoo.model import Format, build_checkpoint, write_facts

#: Seconds for a worker in a process of its own: nearly all of it is imports.
WORKER_TIMEOUT_SEC = 600.0
INSTALLED = installed.look()
Process = warm.WorkerPopen | subprocess.Popen[bytes]
torchvision.mend()  # tests import the libraries before a worker does


@dataclass(frozen=True)
class Ended:
    """One finished attempt."""

    status: int
    result: dict[str, Any]
    events: list[Event]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [item.data for item in self.events if item.kind == kind]

    @property
    def losses(self) -> dict[int, float]:
        return {item["step"]: item["loss"] for item in self.of("step")}

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.result["metrics"])

    def messages(self, level: str) -> list[str]:
        """Return the log's messages as users who may read the job see them."""
        return [item.get("evidence") or item["message"] for item in self.of("log") if item["level"] == level]


class StopAtStep(Stop):
    """A stop request that is set as soon as the step's event is written."""

    def __init__(self, events_path: Path, step: int) -> None:
        self._events_path = events_path
        self._step = step
        self.beat = lambda: None

    @property
    def is_set(self) -> bool:  # type: ignore[override]
        return any(
            item.data.get("step") == self._step for item in read_events(self._events_path) if item.kind == "step"
        )


@dataclass(frozen=True)
class WorkerJob:
    """One job's directory."""

    dir: Path

    @property
    def plan(self) -> dict[str, Any]:
        return dict(json.loads((self.dir / "plan.json").read_text()))

    @property
    def output_dir(self) -> Path:
        return Path(self.plan["output_dir"])

    def change_plan(self, **keys: Any) -> None:
        (self.dir / "plan.json").write_text(json.dumps(self.plan | keys))

    def events_path(self, attempt: int) -> Path:
        return self.dir / f"attempts/{attempt}/events.jsonl"

    def run(self, attempt: int = 1, *, stop: Stop | None = None) -> Ended:
        """Run the worker in this process."""
        return self._ended(run(self.dir, attempt, stop=stop), attempt)

    def stopped_at(self, step: int, *, attempt: int = 1) -> Ended:
        return self.run(attempt, stop=StopAtStep(self.events_path(attempt), step))

    def start(self, attempt: int = 1, *arguments: str, popen: Callable[..., Any] = warm.WorkerPopen) -> Process:
        """Start the worker in a process of its own, as the runner does; `subprocess.Popen` starts it without warm
        imports."""
        attempt_dir = self.dir / f"attempts/{attempt}"
        attempt_dir.mkdir(parents=True, exist_ok=True)
        with (attempt_dir / "worker.log").open("ab") as log:
            return popen(
                [sys.executable, "-m", "honed.worker", str(self.dir), str(attempt), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.dir,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )

    def wait(self, process: Process, attempt: int = 1) -> Ended:
        try:
            return self._ended(process.wait(WORKER_TIMEOUT_SEC), attempt)
        finally:
            process.kill()

    def log(self, attempt: int = 1) -> str:
        return (self.dir / f"attempts/{attempt}/worker.log").read_text(errors="replace")

    def wait_for(self, is_there: Callable[[list[Event]], bool], process: Process, attempt: int = 1) -> None:
        """Wait, with a deadline, until the worker's events meet the condition."""

        def look() -> bool:
            is_over = process.poll() is not None
            found = is_there(read_events(self.events_path(attempt)))
            assert found or not is_over, self.log(attempt)[-3000:]
            return found

        wait_for(look, WORKER_TIMEOUT_SEC, what="its events", account=lambda: self.log(attempt)[-3000:])

    def _ended(self, status: int, attempt: int) -> Ended:
        result_path = self.dir / f"attempts/{attempt}/result.json"
        result = json.loads(result_path.read_text()) if result_path.exists() else {}
        return Ended(status, result, read_events(self.events_path(attempt)))


class Cutter:
    """A process that has imported the libraries of a backend and forks workers, which it may end; see cutter.py."""

    def __init__(self, backend: str) -> None:
        answers_fd, answering_fd = os.pipe()
        self._process = {"transformers": warm.RankPopen, "unsloth": warm.UnslothPopen}[backend](
            [sys.executable, str(Path(__file__).with_name("cutter.py")), backend],
            stdin=subprocess.PIPE,
            stdout=answering_fd,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(answering_fd)
        self._answers = os.fdopen(answers_fd)

    def run(self, job: WorkerJob, attempt: int = 1, **cut: Any) -> Ended:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job_dir": str(job.dir), "attempt": attempt, **cut}).encode() + b"\n")
        return job._ended(json.loads(self._answers.readline())["status"], attempt)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()


def read_events(path: Path) -> list[Event]:
    return event.read(PersonPath.own(path), 0).events


def plan_job(directory: Path, document: dict[str, Any], *, number: int = 1) -> WorkerJob:
    """Write the plan of a job into its directory, ready for the worker. Raises what refuses the job."""
    spec = jobfile.validate(document)
    base = Path(spec.base_model)
    info = basemodel.inspect(base, model_type=spec.model_type)
    adapter = basemodel.inspect_adapter(Path(spec.adapter)) if spec.adapter else None
    with modality.naming(spec.parts.patterns):
        planned = plan.make(spec, info, cpu(), config=Config(), installed=INSTALLED, adapter=adapter)
    contents = {
        "job": {"id": number, "name": "facts", "user_id": "1000", "instance": "/spool"},
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "spec": spec.model_dump(mode="json"),
        "base_model_path": str(base),
        "output_dir": spec.output_dir or str(directory / "output"),
        **planned.as_dict(),
    }
    (directory / "plan.json").write_text(json.dumps(contents))
    return WorkerJob(directory)


MakeJob = Callable[..., WorkerJob]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that builds a base model by its family and settings, once."""
    built: dict[str, Path] = {}

    def build(family: str, **settings: Any) -> Path:
        key = json.dumps([family, settings], sort_keys=True)
        if key not in built:
            built[key] = build_checkpoint(tmp_path_factory.mktemp(family) / "model", family, **settings)
        return built[key]

    return build


@pytest.fixture
def make_job(tmp_path: Path, checkpoint_of: Callable[..., Path]) -> MakeJob:
    """A function that makes a job with its plan, ready for the worker; any key of a spec may be given."""
    jobs: list[WorkerJob] = []

    def make(
        family: str = "qwen3",
        *,
        model: Path | dict[str, Any] | None = None,
        format: Format = "messages",  # noqa: A002
        num_rows: int = 12,
        backend: str = "transformers",
        rows: list[dict[str, Any]] | None = None,
        **keys: Any,
    ) -> WorkerJob:
        directory = tmp_path / f"job{len(jobs) + 1}"
        directory.mkdir()
        base = model if isinstance(model, Path) else checkpoint_of(family, **(model or {}))
        data_path = directory / "facts.jsonl"
        if rows is None:
            write_facts(data_path, num_rows, format=format)
        else:
            data_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        training = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 2e-3} | keys.pop("training", {})
        document = {
            "base_model": str(base),
            "datasets": [{"path": str(data_path)}],
            "training": training,
            "backend": backend,
            "predictions": {"max_new_tokens": 8} | keys.pop("predictions", {}),
            **keys,
        }
        jobs.append(plan_job(directory, document, number=len(jobs) + 1))
        return jobs[-1]

    return make


@pytest.fixture
def warm_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials begin with their imports done."""
    monkeypatch.setattr(subprocess, "Popen", warm.warm_popen)


@pytest.fixture(scope="session")
def learned_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learned") / "model"


@pytest.fixture
def learned(make_job: MakeJob, learned_dir: Path) -> Path:
    """A tiny model that knows its four capitals, trained once."""
    if learned_dir.exists():
        return learned_dir
    job = make_job(
        "llama",
        num_rows=4,
        dtype="float32",
        predictions={"sample_frequency": "off"},
        training={"max_steps": 60, "learning_rate": 5e-3, "per_device_train_batch_size": 4},
    )
    assert job.run().status == 0
    return job.output_dir.rename(learned_dir)


@pytest.fixture(scope="session")
def cutter_of() -> Iterator[Callable[[str], Cutter]]:
    """A function that returns the process that forks workers of a backend."""
    cutters: dict[str, Cutter] = {}

    def find(backend: str) -> Cutter:
        if backend not in cutters:
            cutters[backend] = Cutter(backend)
        return cutters[backend]

    yield find
    for cutter in cutters.values():
        cutter.end()
