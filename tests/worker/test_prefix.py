"""A prefix language model sees a whole prompt, and no token of an answer before it has been predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from honed.inputs.media import Media
from honed.inputs.row import Example
from honed.spec import jobfile
from honed.spec.media import MediaLimits
from honed.system.error import DatasetError
from honed.text.chat import ChatFormat
from honed.text.maskcheck import IGNORED
from honed.worker.preview import preview
from honed.worker.rows import prefix
from honed.worker.rows.collator import Collator, Source
from honed.worker.rows.processor import Processor
from worker.conftest import MakeJob
from zoo.paligemma import TEMPLATE, build_paligemma
from zoo.vision import write_pictures

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


GUIDE = Path(__file__).parents[2] / "docs/guides/vision.md"
NEWLINE = {
    "after the prompt": TEMPLATE,
    "nowhere": TEMPLATE.replace("else '\n'", "else ''"),
    "before the answer": "{% for m in messages %}{{ '\n' if m['role'] == 'assistant' else '' }}"
    + TEMPLATE.replace("else '\n'", "else ''").partition("%}")[2],
    "nowhere, as documented": GUIDE.read_text().partition("```jinja\n")[2].partition("```")[0],
}


@pytest.mark.parametrize("written", NEWLINE)
@pytest.mark.parametrize("asked", ["Which is it?", " two\nlines\n"])
def test_a_row_is_what_the_processor_makes_of_a_prefix_and_a_suffix(
    base: Path, tmp_path: Path, written: str, asked: str
) -> None:
    """The processor ends a prompt with a newline, wherever the template has one."""
    pictures = [tmp_path / f"{color}.png" for color in ("red", "blue")]
    for path in pictures:
        Image.new("RGB", (40, 40), path.stem).save(path)
    own, tokenizer = AutoProcessor.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = NEWLINE[written]
    processor, chat = Processor(own, tokenizer, MediaLimits()), ChatFormat(tokenizer)
    chat.places.expand_with(processor.expand, prompt_end=processor.prompt_end)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": asked}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Paris. Rome."}]
    row = Example("messages", messages=messages, media=tuple(Media("image", path) for path in pictures))

    encoded, (prompt, media, _) = chat.encode(row), chat.asked(row)
    source = Source("row", encoded.rendered, row.media, len(encoded.input_ids))
    given = {"input_ids": encoded.input_ids, "labels": encoded.labels, "source": 0}
    batch = Collator(processor, [source], dtype="float32", pad_token_id=0)([given])
    batch = prefix.trained(SimpleNamespace(config=SimpleNamespace(model_type="paligemma")), batch)
    images, text = [[Image.open(path).convert("RGB") for path in pictures]], [f"<image><image>{asked}"]
    expected = own(images=images, text=text, suffix=["Paris. Rome."], return_tensors="pt")
    assert {name: value.tolist() for name, value in batch.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert processor.process(prompt, media).expanded.input_ids == own(images=images, text=text)["input_ids"][0]


@pytest.mark.parametrize("written", NEWLINE)
def test_a_later_answer_has_the_context_that_it_is_predicted_in(base: Path, tmp_path: Path, written: str) -> None:
    """Earlier answers of weight 0 are a part of the prefix, and one newline ends it: before the last answer."""
    path = tmp_path / "red.png"
    Image.new("RGB", (40, 40), "red").save(path)
    own, tokenizer = AutoProcessor.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = NEWLINE[written]
    processor, chat = Processor(own, tokenizer, MediaLimits()), ChatFormat(tokenizer)
    chat.places.expand_with(processor.expand, prompt_end=processor.prompt_end)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which is it?"}]},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Rome."},
    ]
    row = Example("messages", messages=messages, media=(Media("image", path),), untrained=(1,))

    encoded, (prompt, media, truth) = chat.encode(row), chat.asked(row)
    source = Source("row", encoded.rendered, row.media, len(encoded.input_ids))
    given = {"input_ids": encoded.input_ids, "labels": encoded.labels, "source": 0}
    model = SimpleNamespace(config=SimpleNamespace(model_type="paligemma"))
    batch = prefix.trained(model, Collator(processor, [source], dtype="float32", pad_token_id=0)([given]))
    text = prompt.removesuffix("\n")
    expected = own(images=[[Image.open(path)]], text=[text], suffix=[truth], return_tensors="pt")
    assert {name: value.tolist() for name, value in batch.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    asked = prefix.asked(model, processor.process(prompt, media).tensors)
    seen = own(images=[[Image.open(path)]], text=[text], return_tensors="pt")
    assert asked["input_ids"].tolist() == seen["input_ids"].tolist()
    assert asked["token_type_ids"].tolist() == seen["token_type_ids"].tolist()


def test_a_row_with_two_trained_answers_ends_the_job_before_training(make_job: MakeJob, base: Path) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "No: 4."},
    ]
    rows = [{"messages": messages[:2]}] * 4 + [{"messages": messages}]
    job = make_job(model=base, rows=rows, lora={"r": 4})
    with pytest.raises(DatasetError, match="row 5: 2 turns of the assistant are trained on"):
        preview(jobfile.validate(job.plan["spec"]), num_rows=1)
    ended = job.run()
    assert ended.result["outcome"] != "succeeded"
    assert "row 5: 2 turns of the assistant are trained on" in ended.result["error"]["message"]
    assert not ended.losses

    rows[-1] = {"messages": [messages[0], {**messages[1], "weight": 0}, *messages[2:]]}  # as the hint says
    job = make_job(model=base, rows=rows, lora={"r": 4}, training={"max_steps": 1})
    assert len(preview(jobfile.validate(job.plan["spec"]), num_rows=5)) == 5
    ended = job.run()
    assert ended.status == 0, ended.result


def test_a_job_with_pictures_has_the_loss_of_the_processors_own_batch(
    make_job: MakeJob, base: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in write_pictures(tmp_path / "rows.jsonl", 4).read_text().splitlines()]
    for row in rows:
        row["messages"][0]["content"][0]["image"] = str(tmp_path / row["messages"][0]["content"][0]["image"])
    job = make_job(
        model=base,
        rows=rows,
        dtype="float32",
        lora={"r": 4},
        training={"max_steps": 1, "per_device_train_batch_size": 4},
        predictions={"num_samples": 2, "max_new_tokens": 4},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0]

    own, model = AutoProcessor.from_pretrained(base), AutoModelForImageTextToText.from_pretrained(base)
    images = [[Image.open(row["messages"][0]["content"][0]["image"])] for row in rows]
    answers = [row["messages"][1]["content"] for row in rows]
    batch = own(images=images, text=["<image>Which color?"] * 4, suffix=answers, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert ended.losses[1] == pytest.approx(float(model(**batch).loss), abs=2e-4)
