"""Each rung of memory trains in a worker of its own with the optimizer that the plan chose, within its estimate."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from worker.conftest import MakeJob

#: The largest estimate for what a job takes, in units of its peak.
MOST = 1.3
#: Large enough that weights, gradients and states outweigh all else; rows are short.
MODEL: dict[str, Any] = {"hidden_size": 512, "num_layers": 3, "dtype": "bfloat16"}
#: In a worker, before its first import: torch's record of each allocation, from the end of loading to that of training.
RECORDER = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "honed.worker.train.usage":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def loaded(module):
            load(module)
            record(module.Usage)
        spec.loader.exec_module = loaded
        return spec
def record(usage):
    from torch.profiler import ProfilerActivity, profile
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    built, trained = usage.built, usage.trained
    def begin(self, model):
        built(self, model)
        recorder.__enter__()
    def end(self, model):
        recorder.__exit__(None, None, None)
        now = most = 0
        for each in recorder.profiler.kineto_results.events():
            if each.name() == "[memory]":
                now += each.nbytes()
                most = max(most, now)
        open(PLACE, "w").write(str(most + self.held["weights_bytes"] + self.held["adapter_bytes"]))
        return trained(self, model)
    usage.built, usage.trained = begin, end
if "honed.worker" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
"""


def _full(kept: str, chosen: str, dtype: str = "auto", **training: Any) -> dict[str, Any]:
    return {"master_weights": kept, "dtype": dtype, "planned": (kept, chosen), "training": training}


def _adapter(quantization: str, dtype: str, **training: Any) -> dict[str, Any]:
    keys = {"quantization": quantization, "dtype": dtype, "training": training}
    return {"lora": {"r": 64}, "planned": (None, None), **keys}


#: Each rung in each dtype: what the job asks for, and what the plan is to choose.
CELLS = {
    "float32, bf16": _full("float32", "adamw_torch_fused"),
    "float32": _full("float32", "adamw_torch_fused", "float32"),
    "float32 8-bit, bf16": _full("float32", "adamw_8bit"),
    "float32 8-bit": _full("float32", "adamw_8bit", "float32"),
    "compensated": _full("compensated", "adamw_8bit"),
    "compensated, AdamW": _full("compensated", "adamw_torch_fused", optim="adamw_torch_fused"),
    "none": _full("none", "adamw_torch_fused"),
    "none 8-bit": _full("none", "adamw_8bit", optim="adamw_8bit"),
    **{
        f"LoRA {quantization}, {dtype}": _adapter(quantization, dtype)
        for quantization in ("none", "8bit", "4bit")
        for dtype in ("bfloat16", "float32")
    },
    "LoRA 4bit, 8-bit AdamW": _adapter("4bit", "bfloat16", optim="adamw_8bit"),
}
ALWAYS = ("float32 8-bit, bf16", "compensated")


@pytest.mark.parametrize(
    "cell", [pytest.param(each, marks=[] if each in ALWAYS else [pytest.mark.exhaustive]) for each in CELLS]
)
def test_a_rung_trains_and_takes_what_was_planned(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cell: str
) -> None:
    keys = dict(CELLS[cell])
    kept, optim = keys.pop("planned")
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "max_length": 32} | keys.pop("training")
    job = make_job("qwen3", model=MODEL, training=training, predictions={"sample_frequency": "off"}, **keys)
    if kept == "float32" and optim == "adamw_8bit":  # the plan's choice where AdamW's states do not fit
        job = make_job(
            "qwen3", model=MODEL, training=training | {"optim": optim}, predictions={"sample_frequency": "off"}, **keys
        )
        spec = job.plan["spec"]
        job.change_plan(spec=spec | {"training": spec["training"] | {"optim": "adamw_torch_fused"}})
    place = tmp_path / "peak"
    (tmp_path / "sitecustomize.py").write_text(RECORDER.replace("PLACE", repr(str(place))))
    monkeypatch.syspath_prepend(tmp_path)  # which WorkerJob.start hands on
    precision, estimate = job.plan["precision"], job.plan["memory"]["total_bytes"]
    assert (precision["master_weights"], precision["optim"] if kept else None) == (kept, optim)
    ended = job.wait(job.start(popen=subprocess.Popen))
    assert (ended.status, ended.result["outcome"]) == (0, "succeeded"), job.log()[-3000:]
    peak = int(place.read_text())
    print(f"\nRUNG | {cell} | {peak / 2**20:.1f} | {estimate / 2**20:.1f} | {estimate / peak:.2f}")
    assert peak <= estimate <= MOST * peak, (peak, estimate, job.plan["memory"])
