"""Unsloth's changes to TRL on a GPU, with its real SFTConfig and SFTTrainer on a CPU: none of them breaks a job."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from honed.system.error import BackendError, OutOfMemoryError, SpecError
from honed.worker import assignment as assignments
from honed.worker.model.unsloth_backend import UNCUT_LENGTH, UnslothBackend, max_seq_length
from worker.conftest import Ended, MakeJob, WorkerJob, read_events

needs_unsloth = pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth")
OFF = {"sample_frequency": "off"}


class GpuLike:
    """Workers with Unsloth's own classes, each in a fork of one process that has imported them; see gpulike.py."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory  # where Unsloth writes its classes
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "worker.gpulike"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(directory / "log").open("wb"),
            cwd=directory,
            text=True,
        )

    def run(self, *arguments: str | Path) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([*map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "0\n", (self.dir / "log").read_text()[-3000:]


@pytest.fixture(scope="module")
def gpulike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuLike]:
    started = GpuLike(tmp_path_factory.mktemp("gpulike"))
    yield started
    started.process.kill()
    started.process.wait()


# --- Unsloth's own classes --------------------------------------------------------------------------------------------


def ended_of(job: WorkerJob) -> Ended:
    result = json.loads((job.dir / "attempts/1/result.json").read_text())
    return Ended(0, result, read_events(job.events_path(1)))


def with_defaults(job: WorkerJob, **training: Any) -> WorkerJob:
    """Replace the job's training arguments, without the defaults of `make_job`."""
    job.change_plan(spec=job.plan["spec"] | {"training": training})
    return job


@needs_unsloth
def test_unsloths_own_trainer_does_what_the_job_says_or_gives_way(make_job: MakeJob, gpulike: GpuLike) -> None:
    # A prompt longer than max_length, which equals TRL's default: Unsloth would treat that as not set.
    predictions = {"prompts": ["word " * 300], "max_new_tokens": 2}
    keys: dict[str, Any] = {
        "lora": {"r": 8, "lora_dropout": 0.1},
        "dtype": "bfloat16",
        "eval_split": 0.4,
        "num_rows": 40,
        "predictions": predictions,
    }
    training = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "max_length": 1024,
        "per_device_train_batch_size": 4,
    }
    job, plain = with_defaults(make_job(**keys, backend="unsloth"), **training), make_job(**keys)
    lowered, refused = make_job(**keys, backend="unsloth"), make_job(**keys, backend="unsloth")
    refused.change_plan(precision=refused.plan["precision"] | {"bf16": False, "fp16": True})
    gpulike.run(job.dir)
    gpulike.run(refused.dir)
    gpulike.run("UNSLOTH_MIXED_PRECISION=bfloat16", lowered.dir)

    # Keys that the job omits have the documented defaults. Unsloth would use another learning rate, warmup, batch,
    # accumulation, optimizer, decay, seed and batch of evaluations.
    assert (gpulike.dir / "unsloth_compiled_cache/UnslothSFTTrainer.py").exists()
    ended, wanted = ended_of(job), with_defaults(plain, **training).run()
    assert ended.result["outcome"] == wanted.result["outcome"] == "succeeded", (ended.result, wanted.result)
    # In bfloat16 steps differ by rounding, on some processors more than on others; other rows in a batch would make
    # them differ by more.
    close, spread = 2e-3, max(wanted.losses.values()) - min(wanted.losses.values())
    assert ended.losses == pytest.approx(wanted.losses, abs=close), ended.result
    assert spread > 5 * close, "else the test could not tell"
    assert [item["learning_rate"] for item in ended.of("step")] == [item["learning_rate"] for item in wanted.of("step")]
    evaluated = [item["metrics"]["eval_loss"] for item in ended.of("evaluation")]
    assert evaluated == pytest.approx([item["metrics"]["eval_loss"] for item in wanted.of("evaluation")], abs=close)
    [built] = [item for item in ended.of("audit") if item["when"] == "built"]
    assert built["mended"] == [
        "the trainer had set bf16_full_eval to True, now False",
        "the trainer had set per_device_eval_batch_size to 4, now 8",
        "the trainer had set eval_accumulation_steps to 1, now None",
    ]
    assert ended.messages("warning") == wanted.messages("warning")

    # A trainer that Unsloth cannot build counts as its fault, like a model that it cannot load.
    assert ended_of(refused).result["error"]["code"] == "backend_unavailable"
    assert "TypeError: Unsloth: Model is in bfloat16" in ended_of(refused).result["error"]["evidence"]

    # A trainer built without autocast, as for full fine-tuning of a bfloat16 model, is found before the first step.
    found = ended_of(lowered).result
    assert (found["error"]["code"], found["step"]) == ("precision_mismatch", 0)
    assert found["error"]["message"] == "planned bf16=True fp16=False, but the trainer has bf16=False fp16=False"
    assert found["error"]["hint"].startswith("backend: transformers, or backend: auto")


@needs_unsloth
def test_float32_weights_keep_their_autocast_under_unsloths_own_trainer_and_get_one_that_is_not_planned(
    make_job: MakeJob, gpulike: GpuLike
) -> None:
    """The reason why, on a GPU, the plan uses Unsloth for float32 weights under autocast and not for those without."""
    keys: dict[str, Any] = {
        "lora": {"r": 4},
        "dtype": "float32",
        "backend": "unsloth",
        "predictions": OFF,
        "training": {"max_steps": 1},
    }
    under, without = make_job(**keys), make_job(**keys)
    under.change_plan(precision=under.plan["precision"] | {"bf16": True})  # as full fine-tuning's
    gpulike.run(under.dir)
    gpulike.run(without.dir)
    assert ended_of(under).result["outcome"] == "succeeded", ended_of(under).result
    found = ended_of(without).result["error"]
    assert found["code"] == "precision_mismatch"
    assert re.match(
        r"planned bf16=False fp16=False, but the trainer has (bf16=True|bf16=False fp16=True)", found["message"]
    )


@needs_unsloth
def test_unsloth_trains_whole_weights_in_float32_where_it_is_told_to(
    checkpoint_of: Callable[..., Path], gpulike: GpuLike, tmp_path: Path
) -> None:
    """Run the last preparation of Unsloth's GPU loader, with and without the parameter that the backend passes."""
    base, told_path = checkpoint_of("llama", dtype="bfloat16"), tmp_path / "told.json"
    script = f"""
import json, os, unsloth, torch
from transformers import AutoModelForCausalLM
from unsloth_zoo.training_utils import prepare_model_for_training
told = []
for is_mixed in (True, False):
    model = AutoModelForCausalLM.from_pretrained({str(base)!r}, dtype=torch.bfloat16)
    before = {{name: each.detach().float() for name, each in model.named_parameters()}}
    prepare_model_for_training(model, use_gradient_checkpointing=False, use_reentrant=False, full_finetuning=True,
                               float32_mixed_precision=is_mixed)
    same = all(torch.equal(before[name], each.detach().float()) for name, each in model.named_parameters())
    dtypes = sorted({{str(each.dtype) for each in model.parameters()}})
    told.append([dtypes, os.environ["UNSLOTH_MIXED_PRECISION"], same])
json.dump(told, open({str(told_path)!r}, "w"))
"""
    (tmp_path / "prepare.py").write_text(script)
    gpulike.run(tmp_path / "prepare.py")
    mixed, other = json.loads(told_path.read_text())
    assert mixed == [["torch.float32"], "float32", True]
    assert other == [["torch.bfloat16"], "bfloat16", True]  # by which its trainer turns autocast off


def test_what_another_backend_would_meet_too_is_not_unsloths_fault() -> None:
    for problem in (SpecError("x"), OutOfMemoryError("x"), MemoryError("x")):
        with pytest.raises(type(problem)), UnslothBackend().building():
            raise problem
    with pytest.raises(BackendError) as raised, UnslothBackend().building():
        raise TypeError("x")
    assert raised.value.shown.endswith("TypeError: x")
    assert raised.value.message.endswith("TypeError: …")  # it has seen rows, and may quote them


# --- a trainer that changes its arguments, as Unsloth's does ----------------------------------------------------------


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes SFTTrainer change arguments when it is built."""

    def change(**changes: Any) -> None:
        real = trl.SFTTrainer.__init__

        def build(self: Any, *parts: Any, args: Any, **keys: Any) -> None:
            for name, value in changes.items():
                setattr(args, name, value)
            real(self, *parts, args=args, **keys)

        monkeypatch.setattr(trl.SFTTrainer, "__init__", build)

    return change


#: The last step is evaluated after training alone, when transformers would cast a model for it.
EVALUATED: dict[str, Any] = {
    "lora": {"r": 4},
    "dtype": "float32",
    "eval_split": 0.2,
    "predictions": OFF,
    "training": {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 100, "max_grad_norm": 0.5},
}


def test_full_evaluations_in_half_are_turned_off_and_what_is_not_as_the_job_says_is_told(
    make_job: MakeJob, meddle: Callable[..., None]
) -> None:
    from safetensors.torch import load_file

    plain = make_job(**EVALUATED)
    plain.run()
    meddle(bf16_full_eval=True, max_grad_norm=0.25)
    job = make_job(**EVALUATED)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert "audit (built): the trainer had set bf16_full_eval to True, now False" in ended.messages("info")
    assert "training.max_grad_norm: the job sets 0.5, but transformers changes it to 0.25" in ended.messages("warning")
    weights, wanted = (load_file(each.output_dir / "adapter_model.safetensors") for each in (job, plain))
    assert {str(value.dtype) for value in weights.values()} == {"torch.float32"}
    rounded = [name for name, value in weights.items() if torch.equal(value, value.bfloat16().float())]
    assert rounded == [name for name, value in wanted.items() if torch.equal(value, value.bfloat16().float())] == []


def test_weights_that_were_cast_after_training_are_never_saved(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trl.SFTTrainer.train

    def train(self: Any, *parts: Any, **keys: Any) -> Any:
        ended = real(self, *parts, **keys)
        self.args.bf16_full_eval = True
        return ended

    monkeypatch.setattr(trl.SFTTrainer, "train", train)
    job = make_job(**EVALUATED)
    ended = job.run()
    assert (ended.status, ended.result["error"]["code"], ended.result["step"]) == (80, "precision_mismatch", 3)
    assert "was float32 and is bfloat16" in ended.result["error"]["message"]
    assert ended.result["error"]["hint"] == "its last checkpoint is not affected"  # no other backend: this is the other
    assert not job.output_dir.exists()


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_unsloth_is_never_told_to_stretch_a_models_positions(
    make_job: MakeJob, checkpoint_of: Callable[..., Path]
) -> None:
    for positions, max_length, wanted in ((512, 4096, 512), (512, 64, 64), (4096, None, UNCUT_LENGTH)):
        base = checkpoint_of("llama", max_position_embeddings=positions)
        job = make_job(model=base, training={"max_length": max_length})
        assert max_seq_length(assignments.read(job.dir, 1)) == wanted


def test_unsloth_lets_rows_and_prompts_through_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    for module in (model, model[0]):
        module.max_seq_length = 64  # each layer that cuts has its own
    UnslothBackend().make_room(model, 100)
    assert (model.max_seq_length, model[0].max_seq_length) == (100, 100)
    assert not hasattr(model[1], "max_seq_length")
    UnslothBackend().make_room(model, 10)
    assert model.max_seq_length == 100


def test_a_prompt_that_is_asked_without_its_beginning_is_told_once(
    make_job: MakeJob, checkpoint_of: Callable[..., Path]
) -> None:
    job = make_job(
        model=checkpoint_of("llama", max_position_embeddings=128),
        lora={"r": 4},
        training={"max_steps": 1},
        predictions={"prompts": ["word " * 400], "max_new_tokens": 8},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    told = [text for text in ended.messages("warning") if "truncated at its start" in text]
    assert len(told) == 1
    assert "only 120 positions" in told[0]
    assert len(ended.of("predictions")) > 1
