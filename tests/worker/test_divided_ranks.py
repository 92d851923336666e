"""A model that is divided between two ranks (FSDP2): the run of one process, with a part of each weight on each."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from worker.conftest import Ended, MakeJob, WorkerJob
from worker.test_ranks import BF16, END_SEC, KEYS, MEMORY, STOP, Run, assert_the_same_course, over_two, with_keys

OFF = {"sample_frequency": "off"}
KEPT = {"gradient_checkpointing": False}
WITH_TOKENS = {"r": 4, "trainable_token_indices": [270, 427]}
ON_ENDS = {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}


def divided(job: WorkerJob, *, num_accumulated: int = 1) -> WorkerJob:
    over_two(job, mode="fsdp")
    size = 2 // num_accumulated
    batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": num_accumulated}
    job.change_plan(parallel={**job.plan["parallel"], **batch})
    return job


def gathered(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What the ranks held together when they wrote a checkpoint."""
    parts = [torch.load(path, weights_only=True)["weights"] for path in sorted(checkpoint.glob("part-*-of-*.pt"))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def check_output(job: WorkerJob, dtype: torch.dtype) -> None:
    """Compare an output with the parts of the checkpoint of its last step."""
    held = gathered(job.dir / "checkpoints/checkpoint-6")
    is_adapter = (job.output_dir / "adapter_model.safetensors").exists()
    output = load_file(job.output_dir / ("adapter_model.safetensors" if is_adapter else "model.safetensors"))
    held = {name.replace(".default", "") if is_adapter else name: tensor for name, tensor in held.items()}
    held = {name.replace(".modules_to_save", ""): tensor for name, tensor in held.items()}
    assert held.keys() <= output.keys()
    for name, tensor in held.items():
        assert output[name].dtype == dtype
        assert torch.equal(output[name], tensor.to(dtype)), name


def check_memory(one: Ended, two: Ended) -> None:
    """Compare what one process held with what each rank holds of it: half, and of 4-bit weights all scales."""
    for name in ("weights_bytes", "adapter_bytes", "gradient_bytes", "optimizer_bytes"):
        if whole := one.of("memory")[-1][name]:
            assert two.of("memory")[-1][name] == pytest.approx(whole / 2, rel=0.1), name


# By default each kind of weights and each dtype once. Other tests here compare adapters and whole models in float32.
@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        pytest.param(
            {"dtype": "float32", "training": KEPT, "lora": WITH_TOKENS},
            5e-7,
            id="lora-fp32",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({**BF16, "lora": ON_ENDS}, 3e-4, id="lora-bf16"),
        pytest.param({"lora": None, "dtype": "float32"}, 5e-7, id="full-fp32", marks=pytest.mark.exhaustive),
        pytest.param({"lora": None, **BF16, "master_weights": "float32"}, 3e-4, id="full-autocast"),
        pytest.param({"quantization": "4bit", "training": KEPT}, 5e-7, id="4bit-fp32"),
        pytest.param({"quantization": "4bit", **BF16}, 3e-4, id="4bit-bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_a_divided_model_trains_as_a_whole_one_does(make_job: MakeJob, keys: dict[str, Any], tolerance: float) -> None:
    is_full = keys.get("lora", {}) is None
    rate = 2e-4 if is_full else 2e-3
    training = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3, "learning_rate": rate}
    training |= keys.get("training", {})
    asked = with_keys(
        eval_split=1 / 3, predictions={"num_samples": 2, "max_new_tokens": 8}, **{**keys, "training": training}
    )
    asked = {name: value for name, value in asked.items() if value is not None}
    one = make_job(**asked).run()
    assert one.status == 0
    two = Run(divided(make_job(**asked), num_accumulated=2 if is_full else 1))
    ended = two.end()
    assert ended.status == 0, two.log[-4000:]
    assert ended.losses == pytest.approx(one.losses, abs=tolerance)
    for before, now in zip(one.of("evaluation"), ended.of("evaluation"), strict=True):
        for name in ("eval_loss", "eval_mean_token_accuracy"):
            assert now["metrics"][name] == pytest.approx(before["metrics"][name], abs=10 * tolerance), name
    assert ended.metrics["num_trained_tokens"] == one.metrics["num_trained_tokens"]
    num_alike = 9 if tolerance < 1e-6 else 1  # later answers are those of weights that were rounded otherwise
    assert [[row["prediction"] for row in each["rows"]] for each in ended.of("predictions")[:num_alike]] == [
        [row["prediction"] for row in each["rows"]] for each in one.of("predictions")[:num_alike]
    ]
    for before, now in zip(one.of("audit"), ended.of("audit"), strict=True):
        assert [{**each, "dtype": each["role"] != "quantized" and each["dtype"]} for each in now["counts"]] == [
            {**each, "dtype": each["role"] != "quantized" and each["dtype"]} for each in before["counts"]
        ]
    check_output(two.job, torch.float32)
    check_memory(one, ended)


#: Rank 0 may be sealing the checkpoint before this one when rank 1 comes here.
KILL_IN_SAVE = """
import os, sys, time
from honed.worker.train import parts
write = parts.write
def written(directory, *args):
    write(directory, *args)
    if directory.name == "checkpoint-4":
        while not os.path.exists(os.path.join(sys.argv[1], "checkpoints", "checkpoint-2")):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
parts.write = written
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_divided_run_that_ends_on_one_rank_resumes_to_the_same_bits(make_job: MakeJob, is_killed: bool) -> None:
    """An adapter with dropout, that is stopped, and a whole model, that is killed inside a save."""
    lora, rate = (None, 2e-4) if is_killed else ({"r": 4, "lora_dropout": 0.2}, 2e-3)
    asked = with_keys(lora=lora, training={"logging_steps": 1, "learning_rate": rate})
    asked = {name: value for name, value in asked.items() if value is not None}
    whole = Run(divided(make_job(**asked)))
    whole_ended = whole.end()
    assert whole_ended.status == 0, whole.log[-3000:]
    if is_killed:  # it has no dropout, and no predictions, before which parts are put back
        # Sums in another order: a float32 has steps of 5e-7 here, and the losses were two of them apart.
        assert whole_ended.losses == pytest.approx(make_job(**asked).run().losses, abs=2e-6)
    job = divided(make_job(**asked))
    first = Run(job, HONED_TEST_RANK_1=KILL_IN_SAVE if is_killed else STOP)
    ended = first.end(END_SEC)
    if is_killed:
        assert (first.exit["rank"], first.exit["signal"], ended.result) == (1, signal.SIGKILL, {}), first.log[-3000:]
    else:
        assert (ended.status, ended.result["outcome"]) == (75, "interrupted"), first.log[-3000:]
    second = Run(job, 2)
    again = second.end()
    assert again.status == 0, second.log[-3000:]
    assert again.of("resumed")[0]["step"] == (2 if is_killed else 3)
    assert {**ended.losses, **again.losses} == whole_ended.losses
    ends = [gathered(each.job.dir / "checkpoints/checkpoint-6") for each in (whole, second)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_divided_run_goes_on_with_another_number_of_ranks_and_not_undivided(make_job: MakeJob) -> None:
    one = make_job(**KEYS).run()
    job = divided(make_job(**KEYS))
    first = Run(job, HONED_TEST_RANK_0=STOP)
    interrupted = first.end(END_SEC)
    assert interrupted.result["outcome"] == "interrupted", first.log[-3000:]
    plan = job.plan["parallel"]
    job.change_plan(parallel={"mode": "none"})
    refused = job.run(2)
    assert (refused.status, refused.result["error"]["code"]) == (78, "spec_invalid")
    assert "in parts, with parallel: fsdp" in refused.result["error"]["message"]
    job.change_plan(
        parallel={**plan, "num_ranks": 4, "ranks_per_node": 4, "per_device_train_batch_size": 1, "effective_batch": 4}
    )
    third = Run(job, 3, num_ranks=4)
    ended = third.end()
    assert ended.status == 0, third.log[-3000:]
    assert any("is of 2 processes" in text for text in ended.messages("warning"))
    assert {**interrupted.losses, **ended.losses} == pytest.approx(one.losses, abs=5e-7)


def test_guards_evaluations_and_the_best_model_of_a_divided_run_are_those_of_one_process(make_job: MakeJob) -> None:
    asked = with_keys(
        eval_split=1 / 3,
        early_stopping_patience=5,
        save_interval_sec=0.01,
        guard={"metric": "exact_match", "num_samples": 3, "max_drop": 1.0, "patience": 3},
        predictions={"num_samples": 3, "max_new_tokens": 4, "batch_size": 2},
        training={
            "max_steps": 12,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 3,
            "learning_rate": 3e-2,
            "logging_steps": 3,
            "loss_type": "chunked_nll",
        },
    )
    one = make_job(**asked).run()
    run = Run(divided(make_job(**asked)))
    ended = run.end()
    assert_the_same_course(one, run, ended)
    assert [each["when"] for each in ended.of("audit")] == [each["when"] for each in one.of("audit")]


FULL = """
import errno
from honed.worker.train import parts
write = parts.write
def written(directory, *args):
    if directory.name != "checkpoint-2":
        raise OSError(errno.ENOSPC, "No space left on device")
    write(directory, *args)
parts.write = written
"""
UNSAVED = """
from peft import PeftModel
save = PeftModel.save_pretrained
def saved(self, *args, **kwargs):
    import torch
    with torch.no_grad():
        next(weight for name, weight in self.named_parameters() if "lora_B" in name).view(-1)[0] += 1
    save(self, *args, **kwargs)
    with torch.no_grad():
        next(weight for name, weight in self.named_parameters() if "lora_B" in name).view(-1)[0] -= 1
PeftModel.save_pretrained = saved
"""
FAILED = """
from honed.worker.train.together import TogetherPredictor
def generate(self, *_):
    raise ValueError("no answer from the second rank")
TogetherPredictor._generate = generate
"""


@pytest.mark.parametrize(
    ("rank", "code", "words", "broken"),
    [
        pytest.param(1, "out_of_memory", "the second rank's", MEMORY, id="memory"),
        pytest.param(1, "disk_insufficient", "a checkpoint needs", FULL, id="disk"),
        pytest.param(0, "model_invalid", "other weights than the adapter in memory", UNSAVED, id="export"),
        pytest.param(1, "error", "ValueError", FAILED, id="prediction"),
    ],
)
def test_an_error_of_one_rank_ends_a_divided_run(
    make_job: MakeJob, rank: int, code: str, words: str, broken: str
) -> None:
    asked = with_keys(predictions={"num_samples": 1} if broken == FAILED else OFF)
    run = Run(divided(make_job(**asked)), **{f"HONED_TEST_RANK_{rank}": broken})
    ended = run.end()
    assert (ended.result["error"]["code"], run.took_sec < END_SEC) == (code, True), run.log[-3000:]
    assert words in ended.result["error"]["message"]
    assert not (run.job.output_dir / "adapter_model.safetensors").exists()
