"""Predictions in a batch equal those that the model makes one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.job.plan_file import Precision
from honed.text.chat import ChatFormat
from honed.worker.stop import Stop
from honed.worker.train import prediction
from honed.worker.train.prediction import Predictor
from worker.test_prediction_state import predictor_of

#: Prompts of very different lengths, so that most are padded.
PROMPTS = [f"{'Say it again. ' * (number % 5)}What is number {number}?" for number in range(16)]
#: Near-ties of a random model fall one way or the other in half precision, with the shape of the batch.
MAX_DIFFERENT = {"float32": 0, "bfloat16": 8}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_writes_what_each_prompt_gets_alone(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = checkpoint_of(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))
    precision = Precision(
        load_dtype=dtype,
        compute_dtype=dtype,
        bf16=False,
        fp16=False,
        adapter_dtype=None,
        quantization="none",
        attn_implementation="sdpa",
        reasons={},
    )
    told: list[str] = []
    predictor = Predictor(chat, precision, max_new_tokens=24, stop=Stop(), warn=told.append)
    questions = prediction.from_prompts(PROMPTS, chat)
    texts = {}
    for size in (16, 1):
        predictor._batch_size = size
        texts[size] = predictor.ask(model, questions).texts
    assert told == []
    assert all(texts[16])
    num_different = sum(a != b for a, b in zip(texts[16], texts[1], strict=True))
    print(f"{family}, {dtype}: {num_different} of 16 differ")
    assert num_different <= MAX_DIFFERENT[dtype], list(zip(texts[16], texts[1], strict=True))


def test_questions_of_similar_length_share_a_batch_and_answers_come_in_the_order_of_questions(
    checkpoint_of: Callable[..., Path],
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = checkpoint_of("qwen3")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))
    batches: list[Any] = []
    generate = model.generate

    def recorded(**inputs: Any) -> Any:
        batches.append(inputs["attention_mask"])
        return generate(**inputs)

    model.generate = recorded
    questions = prediction.from_prompts(PROMPTS, chat)
    told: list[str] = []
    alone = predictor_of(chat, told, batch_size=1).ask(model, questions).texts
    assert len(set(alone)) > 4, "the answers tell the questions apart"
    del batches[:]
    assert predictor_of(chat, told, batch_size=4).ask(model, questions).texts == alone
    lengths = sorted((len(question.input_ids) for question in questions), reverse=True)
    assert [mask.shape[1] for mask in batches] == lengths[::4], (
        "the longest first, and each batch as short as it can be"
    )
    assert [length for mask in batches for length in mask.sum(1).tolist()] == lengths
    assert told == []


@pytest.fixture
def narrow(checkpoint_of: Callable[..., Path]) -> Callable[[int], tuple[Any, ChatFormat]]:
    """A function that makes a model with memory for so many prompts at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def make(size: int) -> tuple[Any, ChatFormat]:
        path = checkpoint_of("qwen3")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

        def look(_module: Any, inputs: tuple[Any, ...]) -> None:
            if inputs[0].shape[0] > size:
                torch.empty(1 << 60)

        model.get_input_embeddings().register_forward_pre_hook(look)
        return model, ChatFormat(AutoTokenizer.from_pretrained(path))

    return make


@pytest.mark.parametrize("has_ladder", [True, False])
def test_memory_that_runs_out_in_a_batch_is_for_the_ladder_where_the_job_has_one(
    narrow: Callable[[int], tuple[Any, ChatFormat]], has_ladder: bool
) -> None:
    model, chat = narrow(1)
    told: list[str] = []
    predictor = predictor_of(chat, told, has_ladder=has_ladder)
    questions = prediction.from_prompts(PROMPTS[:3], chat)
    if has_ladder:
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            predictor.ask(model, questions)
        assert told == []
    else:
        assert all(predictor.ask(model, questions).texts), "one by one"
        assert len(told) == 1


def test_a_prompt_for_which_alone_there_is_no_memory_fails_by_itself(
    narrow: Callable[[int], tuple[Any, ChatFormat]],
) -> None:
    model, chat = narrow(0)
    told: list[str] = []
    predictor = predictor_of(chat, told, has_ladder=True, batch_size=1)
    assert predictor.ask(model, prediction.from_prompts(PROMPTS[:2], chat)).texts == [None, None]
    assert "can't allocate memory" in told[0]
