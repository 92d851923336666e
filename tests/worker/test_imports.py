"""The modules that a worker imports: only those its job needs, since imports take most of the time before step 1."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import MakeJob
from honed.worker import assignment as assignments
from honed.worker import imports

BNB = "bitsandbytes"


@pytest.mark.parametrize(
    ("keys", "hidden"),
    [
        ({"lora": {}}, {"wandb", BNB}),
        ({"lora": {}, "report_to": ["wandb"]}, {BNB}),
        ({"lora": {}, "quantization": "4bit"}, {"wandb"}),
        ({"training": {"optim": "adamw_8bit"}}, {"wandb"}),
        ({"training": {"optim": "adamw_torch"}}, {"wandb", BNB}),
        ({"lora": {}, "backend": "unsloth"}, {"wandb"}),
    ],
)
def test_what_the_job_does_not_use_is_hidden(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], hidden: set[str]
) -> None:
    for name in ("wandb", BNB):
        monkeypatch.setitem(sys.modules, name, sys)  # put back afterwards, whatever it was
        del sys.modules[name]
    imports.hide_unused(assignments.read(make_job(**keys).dir, 1))
    assert {name for name in ("wandb", BNB) if name in sys.modules} == hidden
    assert all(sys.modules[name] is None for name in hidden)


def test_a_worker_loads_none_of_what_is_hidden(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "modules.json"
    code = f"""if True:
        import atexit, json, sys
        names = ("wandb", "bitsandbytes", "torch._inductor.lowering", "peft", "trl.trainer.sft_trainer")
        tell = lambda: json.dump([name for name in names if sys.modules.get(name)], open({str(told)!r}, "w"))
        "honed.worker" in sys.orig_argv and atexit.register(tell)
    """
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # which WorkerJob.start hands on
    job = make_job(lora={}, training={"max_steps": 1})
    ended = job.wait(job.start(popen=subprocess.Popen))
    assert (ended.status, ended.result["outcome"]) == (0, "succeeded"), job.log()
    assert json.loads(told.read_text()) == ["peft", "trl.trainer.sft_trainer"]


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
