"""A prefix language model sees a whole prompt, and no token of an answer before it has been predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from honed.inputs.media import Media
from honed.spec.media import MediaLimits
from honed.text.maskcheck import IGNORED
from honed.worker.rows import prefix
from honed.worker.rows.collator import Collator, Source
from honed.worker.rows.processor import Processor
from zoo.paligemma import build_paligemma

#: Returns the logits of a batch: each row a prompt and an answer, `<image>` in the prompt where there is one.
Seen = Callable[..., torch.Tensor]


def test_the_prefix_ends_where_the_answer_begins() -> None:
    labels = torch.tensor([[IGNORED, IGNORED, 7, IGNORED, 8]])
    model = SimpleNamespace(config=SimpleNamespace(model_type="paligemma"))
    assert prefix.trained(model, {"labels": labels})["token_type_ids"].tolist() == [[0, 0, 1, 1, 1]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paligemma(tmp_path_factory.mktemp("paligemma") / "base")


@pytest.fixture(scope="module")
def seen(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (40, 40), "red").save(path)
    tokenizer = AutoTokenizer.from_pretrained(base)
    processor = Processor(AutoProcessor.from_pretrained(base), tokenizer, MediaLimits())
    model = AutoModelForImageTextToText.from_pretrained(base).eval()

    def logits(*asked: tuple[str, str]) -> torch.Tensor:
        rows, sources = [], []
        for prompt, answer in asked:
            source = -1
            ids, num_asked = [
                tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt + answer, prompt)
            ]
            if "<image>" in prompt:
                media, source = (Media("image", path),), len(sources)
                ids, num_asked = (
                    processor.process(text, media).expanded.input_ids for text in (prompt + answer, prompt)
                )
                sources.append(Source("row", prompt + answer, media, len(ids)))
            labels = [IGNORED] * len(num_asked) + ids[len(num_asked) :]
            rows.append({"input_ids": ids, "labels": labels, "source": source})
        batch = Collator(processor, sources, dtype="float32", pad_token_id=0)(rows)
        batch = prefix.trained(model, batch)
        del batch["labels"]
        with torch.no_grad():
            return torch.as_tensor(model(**batch).logits)

    return logits


@pytest.mark.parametrize("prompt", ["<image>Which is it?\n", "Which is it?\n"])
def test_an_answer_does_not_see_itself(seen: Seen, prompt: str) -> None:
    one, other = seen((prompt, "Paris. Rome."))[0], seen((prompt, "Paris. Oslo."))[0]
    is_same = [bool(torch.equal(*pair)) for pair in zip(one, other, strict=False)]
    assert is_same.index(False) > len(["Which", "is", "it?"])


def test_a_row_in_a_batch_is_the_same_row(seen: Seen) -> None:
    rows = [("<image>Which is it?\n", "Paris."), ("What is the capital of Italy?\n", "Rome. Oslo. Lima.")]
    together = seen(*rows)
    for row, logits in zip(rows, together, strict=True):
        alone = seen(("<image>?\n", "no"), row)[1] if "<image>" not in row[0] else seen(row)[0]
        torch.testing.assert_close(alone[: len(logits)], logits[: len(alone)], atol=1e-5, rtol=1e-4)
