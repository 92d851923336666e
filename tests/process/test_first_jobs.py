"""The first hour: settings of another tool, or a model and data alone, become trained models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import RealInstance

import warm
from honed.cli import convert
from honed.spec import jobfile, problem
from zoo import settings
from zoo.model import Format, build_checkpoint, write_facts

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
    warm.address("quantized")
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
    data = {**jobfile.read(path).data, "name": path.stem}
    path.write_text(convert.yaml_of(data))
    for _ in range(2):
        (answer,) = json.loads(real.honectl("check", "--json", str(path)).stdout)
        if answer["ok"]:
            return
        assert answer["error"]["fix"], answer["error"]
        data = problem.mended(data, answer["error"]["fix"])
        path.write_text(convert.yaml_of(data))


def train(real: RealInstance, jobs: Iterable[Path], *, deadline_sec: float) -> None:
    """Submit these jobs, each named after its file, and wait until all have succeeded."""
    sent = real.honectl("submit", *map(str, jobs))
    assert sent.returncode == 0, sent.stdout + sent.stderr
    real.start("--drain")
    assert real.wait(deadline_sec=deadline_sec) == 0
    assert real.rejected() == {}
    for job in jobs:
        shown = real.show(job.stem)
        assert shown["state"] == "succeeded", f"{job.stem}: {shown['error']}\n{real.log}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_settings_file_and_every_format_and_family_is_trained(real: RealInstance, place: Path) -> None:
    """The unit tests check each of these files; here each becomes a model."""
    jobs = []
    for name in settings.FILES:
        if name == "openai_hyperparameters.json":  # its model and data are at OpenAI
            continue
        jobs.append(real.root / f"{name.replace('.', '-')}.yaml")
        done = real.honectl("convert", str(place / name), "-o", str(jobs[-1]))
        assert done.returncode == 0, done.stderr
        settled(real, jobs[-1])
    for family in ("llama", "qwen3", "mistral"):
        build_checkpoint(place / family, family)
        for data_format in get_args(Format):
            jobs.append(real.root / f"{family}-{data_format.replace('/', '-')}.yaml")
            rows = write_facts(place / f"{jobs[-1].stem}.jsonl", 16, format=data_format)
            words = ("--model", str(place / family), "--data", str(rows), "--name", jobs[-1].stem)
            done = real.honectl("init", *words, "-o", str(jobs[-1]))
            assert done.returncode == 0, done.stderr
    assert len(jobs) == 17 + 15
    train(real, jobs, deadline_sec=3000)


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
    train(real, jobs.values(), deadline_sec=500)
    for name, way in ways.items():
        shown = real.show(name)
        output = Path(shown["artifacts"]["output_dir"])
        assert (output / ("model.safetensors" if way == "full" else "adapter_model.safetensors")).is_file()
        assert shown["plan"]["precision"]["quantization"] == (way if way.endswith("bit") else "none")
