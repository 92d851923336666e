"""The real Unsloth, in processes of its own, since it patches libraries permanently. Most are forks of one that has
imported it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import warm
from worker.conftest import Cutter, Ended, MakeJob
from zoo.model import build_checkpoint

pytestmark = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth")

KEYS: dict[str, Any] = {
    "lora": {"r": 8},
    "eval_split": 0.2,
    "backend": "unsloth",
    "training": {"max_steps": 4},
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
}


def story(ended: Ended) -> list[tuple[Any, ...]]:
    """Return the events of a run without the parts that may differ between backends."""
    keys = {
        "stage": ("stage",),
        "audit": ("when", "counts", "model_dtype", "config_dtype", "quantization", "mended"),
        "step": ("step", "num_steps"),
        "evaluation": ("step",),
        "checkpoint": ("step",),
        "predictions": ("step", "num_failed"),
        "data": ("num_train", "num_trained_tokens"),
        "example": ("segments",),
        "finished": ("outcome", "step"),
    }
    return [
        (item.kind, *(item.data[key] for key in keys.get(item.kind, ()))) for item in ended.events if item.kind != "log"
    ]


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_both_backends_tell_the_same_story_of_the_same_job(
    make_job: MakeJob, cutter_of: Callable[[str], Cutter], quantization: str
) -> None:
    job = make_job(**KEYS, quantization=quantization)
    if quantization == "4bit":  # a count that differs from the plan's is told, and changes nothing
        checkpoint = job.plan["checkpoint"]
        job.change_plan(checkpoint={**checkpoint, "num_trained": checkpoint["num_trained"] + 1})
    ended = job.wait(job.start(popen=subprocess.Popen)) if quantization == "none" else cutter_of("unsloth").run(job)
    assert ended.status == 0, (ended.result, job.log()[-3000:])
    assert "unsloth" in ended.of("started")[0]["versions"]
    assert "Unsloth" in job.log()
    assert len([each for each in ended.messages("warning") if "as planned" in each]) == (quantization == "4bit")
    other = make_job(**(KEYS | {"backend": "transformers"}), quantization=quantization)
    plain = other.run()
    assert story(ended) == story(plain)
    assert ended.metrics["num_trained_tokens"] == plain.metrics["num_trained_tokens"]
    # Before the first step the adapter changes nothing, so both backends answer with the same model.
    asked, before = ended.of("predictions"), plain.of("predictions")
    assert asked[0]["rows"] == before[0]["rows"]
    facts = [[(row["prompt"], row["ground_truth"]) for row in item["rows"]] for item in asked]
    assert facts == [[(row["prompt"], row["ground_truth"]) for row in item["rows"]] for item in before]
    assert ended.losses == pytest.approx(plain.losses, abs=0.1)
    weights = [load_file(each.output_dir / "adapter_model.safetensors") for each in (job, other)]
    assert {name: value.shape for name, value in weights[0].items()} == {n: v.shape for n, v in weights[1].items()}


def test_a_fork_of_one_that_has_imported_unsloth_has_the_variables_that_it_set() -> None:
    code = (
        "import os, sys; assert 'unsloth' in sys.modules; print(os.environ['UNSLOTH_IS_PRESENT'], os.environ['MINE'])"
    )
    assert warm.run([sys.executable, "-c", code], env={"MINE": "2"}, popen=warm.UnslothPopen).stdout == "1 2\n"


def test_nothing_of_the_training_stack_is_imported_before_unsloth(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told.json"
    package = tmp_path / "site/unsloth"
    package.mkdir(parents=True)
    code = f"import json, sys\njson.dump(sorted(sys.modules), open({str(told)!r}, 'w'))\nraise ImportError('seen')\n"
    (package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(package.parent))
    job = make_job(**KEYS)
    assert job.wait(job.start(popen=subprocess.Popen)).status == 69
    heavy = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "unsloth_zoo"}
    assert heavy & set(json.loads(told.read_text())) == set()


def test_what_unsloth_changes_silently_is_a_precision_mismatch(
    make_job: MakeJob, cutter_of: Callable[[str], Cutter]
) -> None:
    job = make_job(**(KEYS | {"backend": "transformers"}), quantization="8bit")  # the planner would refuse it
    job.change_plan(backend={"name": "unsloth", "reasons": []})
    ended = cutter_of("unsloth").run(job)
    assert ended.status == 80
    assert "8bit" in ended.result["error"]["message"]
    assert not ended.of("step")


def test_an_unsloth_that_cannot_be_imported_ends_the_process_with_its_own_status(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "site/unsloth"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise NotImplementedError('Unsloth cannot find any torch accelerator?')\n")
    monkeypatch.syspath_prepend(str(broken.parent))
    job = make_job(**KEYS)
    ended = job.wait(job.start(popen=subprocess.Popen))
    assert ended.status == 69
    assert ended.result["error"]["code"] == "backend_unavailable"
    assert "torch accelerator" in ended.result["error"]["message"]
    again = job.wait(job.start(1, "--backend", "transformers"))  # the same attempt, as the daemon falls back
    assert again.status == 0, again.result
    assert [item["backend"] for item in again.of("started")] == ["unsloth", "transformers"]
    assert "unsloth" not in again.of("started")[1]["versions"]


def test_weights_that_are_missing_are_not_drawn_at_random(
    make_job: MakeJob, tmp_path: Path, checkpoint_of: Callable[..., Path], cutter_of: Callable[[str], Cutter]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("qwen3"), base)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    job = make_job(model=base, **KEYS)
    ended = cutter_of("unsloth").run(job)
    assert ended.status == 66, ended.result
    assert "no weights for model.layers.1.mlp.up_proj.weight" in ended.result["error"]["message"]


def test_weights_that_the_layers_have_no_place_for_are_refused_under_unsloth_too(
    make_job: MakeJob, tmp_path: Path, cutter_of: Callable[[str], Cutter]
) -> None:
    import torch

    weights = build_checkpoint(tmp_path / "base", "llama") / "model.safetensors"
    foreign = {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    save_file(load_file(weights) | foreign, weights, metadata={"format": "pt"})
    job = make_job(model=tmp_path / "base", **KEYS)
    error = cutter_of("unsloth").run(job).result["error"]
    assert error["code"] == "model_invalid"
    assert "do not exist in its layers: model.layers.0.self_attn.q_norm.weight" in error["message"]


def test_a_checkpoint_stored_in_4_bits_computes_in_the_planned_dtype(
    make_job: MakeJob, tmp_path: Path, cutter_of: Callable[[str], Cutter]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = build_checkpoint(tmp_path / "plain", "llama", dtype="bfloat16")
    stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=stored, dtype=torch.bfloat16)
    shutil.copytree(plain, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(tmp_path / "base")
    job = make_job(model=tmp_path / "base", **KEYS)
    ended = cutter_of("unsloth").run(job)
    assert ended.status == 0, (ended.result, job.log()[-3000:])
    assert ended.of("audit")[0]["mended"] == ["14 4-bit layers computed in float16, now bfloat16"]


def test_a_load_that_fails_in_unsloth_is_the_backends_fault(
    make_job: MakeJob, cutter_of: Callable[[str], Cutter]
) -> None:
    job = make_job(**(KEYS | {"lora": {"r": 8, "target_modules": ["no_such_module"]}}))
    ended = cutter_of("unsloth").run(job)
    assert ended.status == 69
    assert "no_such_module" in ended.result["error"]["message"]
