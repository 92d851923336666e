"""The gate of a staged worker: before it no device is used, and what it does there is what any worker does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from honed.job.ahead import STAGED_VARIABLE, Pass
from honed.system.error import InterruptedRunError
from honed.system.layout import JobFiles, JobLayout
from honed.system.personpath import PersonPath
from honed.worker import gate as gates
from honed.worker.gate import NVML_CHECK, Gate, read_ahead
from honed.worker.run import run
from honed.worker.stop import Stop
from worker.conftest import MakeJob, read_events

LORA = {"r": 4}


class Foreground:
    """Work ahead that yields to nobody: the tests below go on in pytest's own session."""

    def hurry(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture(autouse=True)
def foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "Background", Foreground)


def gate_of(job: JobLayout, environment: dict[str, str], **parts: Any) -> Gate:
    job.plan_path.touch()
    return Gate(job, 1, environment, **parts)


def test_a_worker_that_was_not_staged_has_no_gate(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    gate = gate_of(JobLayout(tmp_path), environment)
    assert not gate.is_closed
    gate.wait()
    assert environment == {}


def test_only_the_pass_of_this_start_opens_the_gate_and_names_the_device(tmp_path: Path) -> None:
    layout, looks = JobLayout(tmp_path), []
    environment = {STAGED_VARIABLE: "2", "CUDA_VISIBLE_DEVICES": "GPU-a"}

    def beat() -> None:
        looks.append(1)
        match len(looks):
            case 2:
                layout.gate_path.write_text("{half of a")
            case 4:
                Pass(1, 1, {"CUDA_VISIBLE_DEVICES": "GPU-x"}).write(JobFiles(PersonPath(layout.dir)))
            case 6:
                Pass(2, 2, {"CUDA_VISIBLE_DEVICES": "GPU-y"}).write(JobFiles(PersonPath(layout.dir)))
            case 8:
                assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"
                Pass(1, 2, {"CUDA_VISIBLE_DEVICES": "GPU-b"}).write(JobFiles(PersonPath(layout.dir)))

    gate = gate_of(layout, environment, beat=beat)
    assert STAGED_VARIABLE not in environment  # no child waits, too
    assert gate.is_closed
    gate.wait()
    assert not gate.is_closed
    assert len(looks) == 8
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-b", NVML_CHECK: "1"}


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    stop = Stop()
    gate = gate_of(JobLayout(tmp_path), {STAGED_VARIABLE: "1"}, beat=stop.check)
    stop.is_set = True
    with pytest.raises(InterruptedRunError):
        gate.wait()


def test_the_wait_ends_with_the_job(tmp_path: Path) -> None:
    gate = gate_of(JobLayout(tmp_path), {STAGED_VARIABLE: "1"})
    JobLayout(tmp_path).plan_path.unlink()
    with pytest.raises(InterruptedRunError):
        gate.wait()


def test_the_weights_of_a_model_are_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    (tmp_path / "config.json").write_text("{}")
    assert read_ahead(tmp_path) == 5000
    assert read_ahead(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    "keys", [{}, {"quantization": "4bit"}, {"backend": "unsloth"}], ids=["lora", "4bit", "unsloth"]
)
def test_no_worker_initialises_cuda_before_its_gate(make_job: MakeJob, keys: dict[str, Any]) -> None:
    job = make_job("llama", lora=LORA, **keys)
    environment = {
        **os.environ,
        STAGED_VARIABLE: "1",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    job.events_path(1).parent.mkdir(parents=True, exist_ok=True)
    with (job.events_path(1).parent / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gatedworker.py")), str(job.dir), "1"],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=job.dir,
            start_new_session=True,  # it lowers the nice value of its session
        )
    job.wait_for(lambda events: any(each.data.get("stage") == "staged" for each in events), process)
    touched = job.dir / "touched"
    assert not touched.exists(), touched.read_text()
    process.terminate()
    ended = job.wait(process)
    assert (ended.status, ended.result["error"]["code"]) == (75, "interrupted")
    assert not touched.exists(), touched.read_text()


def test_a_staged_run_is_the_run_that_it_would_have_been(make_job: MakeJob) -> None:
    plain, staged = make_job("llama", lora=LORA, eval_split=0.2), make_job("llama", lora=LORA, eval_split=0.2)
    expected = plain.run()
    layout = JobLayout(staged.dir)

    def open_gate() -> None:
        while not any(each.data.get("stage") == "staged" for each in read_events(staged.events_path(1))):
            pass
        Pass(1, 1).write(JobFiles(PersonPath(layout.dir)))

    opener = threading.Thread(target=open_gate)
    opener.start()
    stop = Stop()
    status = run(staged.dir, 1, stop=stop, gate=Gate(layout, 1, {STAGED_VARIABLE: "1"}, beat=stop.check))
    opener.join()
    assert status == 0
    events = read_events(staged.events_path(1))
    assert [each.data["stage"] for each in events if each.kind == "stage"][:4] == ["prepare", "data", "staged", "load"]
    losses = {each.data["step"]: each.data["loss"] for each in events if each.kind == "step"}
    assert losses == expected.losses
    manifests = [json.loads((each.output_dir / "honed.json").read_text())["data"] for each in (plain, staged)]
    assert list(manifests[0].values()) == list(manifests[1].values())


def test_rows_that_are_too_long_for_the_model_end_a_staged_worker_at_once(make_job: MakeJob) -> None:
    row = {"prompt": "Say it again.", "completion": " again" * 200}
    job = make_job("gpt2", model={"n_positions": 64}, rows=[row] * 4, lora=LORA, training={"max_length": 4096})
    assert run(job.dir, 1, gate=Gate(JobLayout(job.dir), 1, {STAGED_VARIABLE: "1"})) != 0
    result = json.loads((job.dir / "attempts/1/result.json").read_text())
    assert (result["error"]["code"], result["phase"]) == ("dataset_invalid", "data"), result
    assert "64 positions" in result["error"]["message"]


def test_a_pass_of_the_jobs_own_user_opens_nothing(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to write a file as another user")
    layout, looks = JobLayout(tmp_path), []

    def beat() -> None:
        looks.append(1)
        if len(looks) == 1:
            Pass(1, 1, {"LD_PRELOAD": "/tmp/mine.so"}).write(JobFiles(PersonPath(layout.dir)))
            os.chown(layout.gate_path, 4321, 4321)
        elif len(looks) == 4:
            Pass(1, 1, {"CUDA_VISIBLE_DEVICES": "GPU-b"}).write(JobFiles(PersonPath(layout.dir)))

    environment = {STAGED_VARIABLE: "1"}
    gate_of(layout, environment, beat=beat).wait()
    assert len(looks) == 4
    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-b", NVML_CHECK: "1"}


@pytest.mark.parametrize("has_pass", [False, True], ids=["waiting", "let through"])
@pytest.mark.parametrize("changed", ["rows.jsonl", "plan.json", "missing"])
def test_a_worker_ends_if_a_file_has_changed_that_it_has_read(tmp_path: Path, changed: str, has_pass: bool) -> None:
    layout, rows, looks = JobLayout(tmp_path), tmp_path / "rows.jsonl", []
    rows.write_text("{}\n")

    def beat() -> None:
        looks.append(1)
        if len(looks) == 4:
            Pass(1, 1).write(JobFiles(PersonPath(layout.dir)))

    gate = gate_of(layout, {STAGED_VARIABLE: "1"}, beat=beat)
    gate.watch([rows, tmp_path / "missing"])
    gate.wait()  # nothing has changed
    assert len(looks) == 4
    gate = gate_of(layout, {STAGED_VARIABLE: "1" if has_pass else "2"})
    gate.watch([rows, tmp_path / "missing"])
    (tmp_path / changed).write_text("{ }\n")
    with pytest.raises(InterruptedRunError, match=f"{changed} has changed"):
        gate.wait()
    assert gate.is_closed


def test_a_worker_that_waits_ends_soon_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "FILES_INTERVAL_SEC", 0.0)
    rows, looks = tmp_path / "rows.jsonl", []
    rows.write_text("{}\n")

    def beat() -> None:
        looks.append(1)
        if len(looks) == 3:
            rows.unlink()

    gate = gate_of(JobLayout(tmp_path), {STAGED_VARIABLE: "1"}, beat=beat)
    gate.watch([rows])
    with pytest.raises(InterruptedRunError, match=r"rows\.jsonl has changed"):
        gate.wait()
    assert len(looks) == 3


def test_a_worker_in_which_cuda_is_initialised_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gate = gate_of(JobLayout(tmp_path), {STAGED_VARIABLE: "1"})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(InterruptedRunError, match="CUDA"):
        gate.wait()
