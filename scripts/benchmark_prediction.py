"""Benchmark of sixteen predictions in one batch against one at a time: the speed-up, and whether the texts agree.

python scripts/benchmark_prediction.py DIR [--runs N]     DIR has the quickstart's model and rows; prints JSON
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from honed.worker.model import torchvision

torchvision.mend()  # before the libraries are imported
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from honed.inputs.row import Example  # noqa: E402
from honed.job.plan_file import Precision  # noqa: E402
from honed.text.chat import ChatFormat  # noqa: E402
from honed.worker.stop import Stop  # noqa: E402
from honed.worker.train import prediction  # noqa: E402
from honed.worker.train.prediction import Predictor  # noqa: E402

NUM_SAMPLES, MAX_NEW_TOKENS = 16, 64


def measure(root: Path, dtype: str, runs: int) -> dict[str, Any]:
    """Time alternating pairs of runs, after one of each to warm up; count the texts that differ."""
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=getattr(torch, dtype)).eval()
    # A random model may end at its first token: with no end token every prediction has the same length.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    widths = recorded_widths(model)
    chat = ChatFormat(tokenizer)
    rows = [json.loads(line) for line in (root / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    stride = len(rows) // NUM_SAMPLES
    examples = [Example("messages", messages=row["messages"]) for row in rows[::stride][:NUM_SAMPLES]]
    questions = prediction.choose(examples, chat, num_samples=NUM_SAMPLES, seed=0)
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
    settings: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "stop": Stop(), "warn": print}

    def ask(batch_size: int) -> tuple[float, list[str | None]]:
        predictor = Predictor(chat, precision, batch_size=batch_size, **settings)
        predictor._stop_ids = []
        started = time.perf_counter()
        texts = predictor.ask(model, questions).texts
        return time.perf_counter() - started, texts

    (_, together), (_, alone) = ask(NUM_SAMPLES), ask(1)
    pairs = [(ask(NUM_SAMPLES)[0], ask(1)[0]) for _ in range(runs)]
    assert set(widths) == {MAX_NEW_TOKENS}, sorted(set(widths))
    ratios = [one / batch for batch, one in pairs]
    return {
        "batch_sec": statistics.median(pair[0] for pair in pairs),
        "one_sec": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(ratios),
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "num_different": sum(a != b for a, b in zip(together, alone, strict=True)),
    }


def recorded_widths(model: Any) -> list[int]:
    """Record the number of new tokens of each call of the model's `generate`."""
    generate, widths = model.generate, []

    def recorded(**inputs: Any) -> Any:
        output = generate(**inputs)
        widths.append(output.shape[1] - inputs["input_ids"].shape[1])
        return output

    model.generate = recorded
    return widths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    dtypes = {"float32": options.runs, "bfloat16": 1}
    print(json.dumps({dtype: measure(options.root, dtype, runs) for dtype, runs in dtypes.items()}))


if __name__ == "__main__":
    main()
