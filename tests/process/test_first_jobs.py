"""The first hour: settings of another tool, or a model and data alone, become trained models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import RealInstance

from honed.cli import convert
from honed.spec import problem, spec
from zoo import settings
from zoo.model import build_checkpoint, write_facts

#: A file of each tool, and the way of training that it asks for.
OTHERS = {
    "axolotl_lora.yml": "8bit",
    "llamafactory_lora.yaml": "lora",
    "trl_peft.yaml": "4bit",
    "unsloth_chat.py": "lora",
    "openai_method.json": "full",
}
#: Family, format and method of a job made by `init`; the unit tests check the others.
OURS: dict[str, tuple[str, Any, str]] = {
    "gemma": ("gemma3_text", "alpaca", "full"),
    "qwen": ("qwen3", "text", "lora"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = settings.write(tmp_path_factory.mktemp("first"), num_rows=12)
    build_checkpoint(made / "model", "llama")
    request = json.loads((made / "openai_method.json").read_text())
    del request["integrations"]  # nobody is logged in to wandb here
    (made / "openai_method.json").write_text(json.dumps(request))
    for name, (family, data_format, _) in OURS.items():
        build_checkpoint(made / name, family)
        write_facts(made / f"{name}.jsonl", 16, format=data_format)
    return made


def settled(real: RealInstance, path: Path) -> None:
    """Name a converted job after its file, and apply the corrections that `check` proposes, at most twice."""
    data = {**spec.read(path).data, "name": path.stem}
    path.write_text(convert.yaml_of(data))
    for _ in range(2):
        (answer,) = json.loads(real.honectl("check", "--json", str(path)).stdout)
        if answer["ok"]:
            return
        assert answer["error"]["fix"], answer["error"]
        data = problem.mended(data, answer["error"]["fix"])
        path.write_text(convert.yaml_of(data))


def test_settings_of_each_tool_and_files_of_init_are_trained(real: RealInstance, place: Path) -> None:
    ways = {name.partition("_")[0]: way for name, way in OTHERS.items()} | {
        name: each[2] for name, each in OURS.items()
    }
    jobs = {name: real.root / f"{name}.yaml" for name in ways}
    for name in OTHERS:
        job = jobs[name.partition("_")[0]]
        done = real.honectl("convert", str(place / name), "-o", str(job))
        assert done.returncode == 0, done.stderr
        settled(real, job)
    for name, (_, _, method) in OURS.items():
        words = ("--model", str(place / name), "--data", str(place / f"{name}.jsonl"), "--method", method)
        done = real.honectl("init", *words, "-o", str(jobs[name]))
        assert done.returncode == 0, done.stderr
    sent = real.honectl("submit", *map(str, jobs.values()))
    assert sent.returncode == 0, sent.stdout + sent.stderr
    real.start("--drain")
    assert real.wait(deadline_sec=500) == 0
    assert real.rejected() == {}
    for name, way in ways.items():
        shown = real.show(name)
        assert shown["state"] == "succeeded", f"{name}: {shown['error']}\n{real.log}"
        output = Path(shown["artifacts"]["output_dir"])
        assert (output / ("model.safetensors" if way == "full" else "adapter_model.safetensors")).is_file()
        assert shown["plan"]["precision"]["quantization"] == (way if way.endswith("bit") else "none")
