"""Predictions in a batch are those that the model makes one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from honed.chat import ChatFormat
from honed.precision import Precision
from honed.worker import prediction
from honed.worker.prediction import Predictor
from honed.worker.stop import Stop

#: Of very different lengths, so that most are padded.
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
        load_dtype=dtype, compute_dtype=dtype, bf16=False, fp16=False, adapter_dtype=None, quantization="none",
        attn_implementation="sdpa", reasons={},
    )  # fmt: skip
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
