"""A round of predictions leaves the model and the run unchanged, and uses the same examples for the job's life."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from honed.inputs.row import Example
from honed.job.plan_file import Precision
from honed.text.chat import ChatFormat
from honed.worker.stop import Stop
from honed.worker.train import prediction
from honed.worker.train.prediction import Predictor
from worker.conftest import MakeJob

PRECISION = Precision(
    load_dtype="float32",
    compute_dtype="float32",
    bf16=False,
    fp16=False,
    adapter_dtype=None,
    quantization="none",
    attn_implementation="sdpa",
    reasons={},
)


def predictor_of(chat: ChatFormat, told: list[str], **keys: Any) -> Predictor:
    return Predictor(chat, PRECISION, max_new_tokens=6, stop=Stop(), warn=told.append, **keys)


def test_float32_weights_meet_flash_attention_under_autocast_alone(checkpoint_of: Callable[..., Path]) -> None:
    """FlashAttention supports only float16 and bfloat16."""
    path = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))
    whole = replace(PRECISION, bf16=True, compute_dtype=None)
    for precision, is_on in (
        (whole, False),
        (replace(whole, attn_implementation="flash_attention_2"), True),
        (replace(whole, attn_implementation="flash_attention_2", load_dtype="bfloat16"), False),
    ):
        predictor = Predictor(chat, precision, max_new_tokens=2, stop=Stop(), warn=print)
        seen: list[bool] = []
        hook = model.lm_head.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))  # noqa: B023
        model.to(getattr(torch, precision.load_dtype)).requires_grad_(False)
        predictor.ask(model, [prediction.Question("Name it.", [5, 6, 7], "Paris")])
        hook.remove()
        assert set(seen) == {is_on}


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()]


@pytest.mark.parametrize("fails", [False, True], ids=["as it should", "with a model that fails"])
def test_a_round_leaves_modes_cache_checkpointing_and_random_state_as_they_were(
    checkpoint_of: Callable[..., Path], fails: bool
) -> None:
    path = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    model.model.layers[0].eval()  # one that somebody froze
    widths: list[int] = []

    def watch(_module: Any, inputs: tuple[Any, ...]) -> None:
        widths.append(inputs[0].shape[1])
        if fails and len(widths) % 3 == 0:
            raise RuntimeError("expected scalar type Float but found BFloat16")

    model.lm_head.register_forward_pre_hook(watch)
    told: list[str] = []
    sample = type("Sample", (), {"temperature": 1.5, "top_p": 1.0, "seed": 7})()
    predictor = predictor_of(chat, told, sample=sample)
    modes, before = {name: module.training for name, module in model.named_modules()}, states()
    answers = predictor.ask(model, prediction.from_prompts(["One", "Two, which is longer", "Three"], chat))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert states() == before
    assert model.config.use_cache is False
    assert model.is_gradient_checkpointing
    assert (answers.num_failed > 0, bool(told)) == (fails, fails)
    if not fails:
        assert len(widths) > 1
        assert set(widths) == {1}, "the last place of the prompt, then a token at a time: the cache holds the rest"


def test_the_cache_is_used_though_training_has_none(checkpoint_of: Callable[..., Path]) -> None:
    path = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    widths: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, inputs: widths.append(inputs[0].shape[1]))
    predictor_of(chat, []).ask(model, prediction.from_prompts(["How far is it to the sea?"], chat))
    assert widths[0] > 5
    assert set(widths[1:]) == {1}, "each token alone, not the whole text anew"


def test_the_samples_are_chosen_by_the_seed_alone(checkpoint_of: Callable[..., Path]) -> None:
    chat = ChatFormat(AutoTokenizer.from_pretrained(checkpoint_of("llama")))
    rows = [{"role": "user", "content": f"Question {n}?"} for n in range(40)]
    answer = {"role": "assistant", "content": "Yes."}
    examples = [Example("messages", messages=[row, answer]) for row in rows]

    def chosen(seed: int) -> list[str]:
        random.seed()  # as it may be at any moment of a run
        return [question.prompt for question in prediction.choose(examples, chat, num_samples=5, seed=seed)]

    assert chosen(1) == chosen(1) != chosen(2)
    assert len(set(chosen(1))) == 5
    few = prediction.choose(examples[:3], chat, num_samples=5, seed=1)
    assert len(few) == 3


def test_a_row_is_followed_through_all_steps_and_attempts(make_job: MakeJob) -> None:
    job = make_job(
        lora={"r": 4},
        num_rows=16,
        eval_split=0.5,
        predictions={"num_samples": 3, "max_new_tokens": 4},
        training={"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2},
    )
    first = job.stopped_at(3)
    second = job.run(2)
    rounds = [item for ended in (first, second) for item in ended.of("predictions")]
    assert [item["step"] for item in rounds] == [0, 2, 4, 6]
    asked = {
        tuple((row["sample_index"], row["prompt"], row["ground_truth"]) for row in item["rows"]) for item in rounds
    }
    assert len(asked) == 1
    assert len(next(iter(asked))) == 3


@pytest.mark.parametrize(
    ("error", "flags", "remedy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), {}, "predictions.batch_size"),
        (RuntimeError("expected m1 and m2 to have the same dtype"), {"bf16": True}, "{autocast: match}"),
        (RuntimeError("expected m1 and m2 to have the same dtype"), {}, "its traceback is in worker.log"),
        (IndexError("index out of range in self"), {"bf16": True}, "its traceback is in worker.log"),
    ],
    ids=["memory", "dtypes, with autocast", "dtypes, without", "whatever else"],
)
def test_a_prediction_that_failed_is_told_with_what_helps(
    checkpoint_of: Callable[..., Path], capfd: pytest.CaptureFixture[str], error: Exception, flags: Any, remedy: str
) -> None:
    path = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))

    def fail(*_: Any) -> None:
        raise error

    model.lm_head.register_forward_pre_hook(fail)
    told: list[str] = []
    predictor = Predictor(chat, replace(PRECISION, **flags), max_new_tokens=6, stop=Stop(), warn=told.append)
    answers = predictor.ask(model, prediction.from_prompts(["One", "Two"], chat))
    [said] = told
    assert remedy in said
    assert "in fail" in capfd.readouterr().err, "the traceback is where it is said to be"
    assert answers.fault is not None
    assert (answers.num_failed, answers.fault.code) == (2, "error")
    assert remedy in answers.fault.hint
