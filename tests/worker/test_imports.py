"""The modules that a worker imports: only those its job needs, since imports take most of the time before step 1."""

from __future__ import annotations

import gc
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from honed.worker import assignment as assignments
from honed.worker import imports
from worker.conftest import MakeJob, WorkerJob
from zoo.vision import build_vision_checkpoint

BNB = "bitsandbytes"
HIDEABLE = ("wandb", "aiohttp", "torchvision", BNB)


def hidden(job: WorkerJob) -> set[str]:
    read = assignments.read(job.dir, 1)
    return set(imports.hidden(read.plan, read.backend))


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"lora": {}}, set()),
        ({"lora": {}, "report_to": ["wandb"]}, {"wandb"}),
        ({"lora": {}, "quantization": "4bit"}, {BNB}),
        ({"training": {"optim": "adamw_8bit"}}, {BNB}),
        ({"training": {"optim": "adamw_torch"}}, set()),
        ({"training": {"torch_compile": True}}, {"aiohttp", "torchvision", BNB}),
        ({"lora": {}, "backend": "unsloth"}, {"aiohttp", "torchvision", BNB}),
    ],
)
def test_what_the_job_does_not_use_is_hidden(make_job: MakeJob, keys: dict[str, Any], shown: set[str]) -> None:
    assert hidden(make_job(**keys)) == set(HIDEABLE) - shown


@pytest.mark.parametrize(("kept", "optim"), [("float32", "adamw_8bit"), ("compensated", None), ("none", None)])
def test_the_optimizer_that_the_plan_chose_is_not_hidden(make_job: MakeJob, kept: str, optim: str | None) -> None:
    job = make_job(master_weights=kept)
    if optim is not None:  # as for a device on which AdamW's states do not fit
        job.change_plan(precision=job.plan["precision"] | {"optim": optim})
    planned = job.plan["precision"]["optim"]
    assert (BNB in hidden(job)) == ("8bit" not in planned)


def test_a_vision_model_s_worker_has_torchvision(make_job: MakeJob, tmp_path: Path) -> None:
    model = build_vision_checkpoint(tmp_path / "base", "qwen2_5_vl")
    assert "torchvision" not in hidden(make_job(model=model, lora={}))


@pytest.mark.parametrize(
    ("keys", "loaded"),
    [
        ({"lora": {}}, []),
        ({}, []),
        ({"lora": {}, "quantization": "4bit"}, [BNB]),
    ],
)
def test_a_worker_loads_only_what_its_job_needs(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: dict[str, Any], loaded: list[str]
) -> None:
    told = tmp_path / "modules.json"
    code = f"""if True:
        import atexit, json, sys
        names = {["trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", *HIDEABLE]!r}
        tell = lambda: json.dump([name for name in names if sys.modules.get(name)], open({str(told)!r}, "w"))
        "honed.worker" in sys.orig_argv and atexit.register(tell)
    """
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # which WorkerJob.start hands on
    job = make_job(training={"max_steps": 1}, **keys)
    ended = job.wait(job.start(popen=subprocess.Popen))
    assert (ended.status, ended.result["outcome"]) == (0, "succeeded"), job.log()
    assert json.loads(told.read_text()) == ["trl.trainer.sft_trainer", *loaded]


def test_a_worker_ends_with_its_exit_functions_but_takes_no_module_apart(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"""if True:
        import atexit, sys
        from pathlib import Path
        class Kept:
            def __del__(self, touch=Path({str(tmp_path / "apart")!r}).touch):
                touch()
        if "honed.worker" in sys.orig_argv:
            kept = Kept()
            atexit.register(Path({str(tmp_path / "ended")!r}).touch)
    """
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    job = make_job()
    job.change_plan(base_model_path=str(tmp_path / "none"))
    ended = job.wait(job.start(popen=subprocess.Popen))
    assert ended.status not in {0, 1} and ended.result["outcome"] == "failed", job.log()
    assert (tmp_path / "ended").exists() and not (tmp_path / "apart").exists()


def test_collections_go_on_after_imports_as_before() -> None:
    with imports.quick():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with imports.quick():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
