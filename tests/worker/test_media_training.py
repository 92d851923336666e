"""Training on pictures: what the model learns from them, and the faults that end a job before its first step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from honed.worker import preview
from honed.worker.model import load
from honed.worker.rows.collator import Collator
from honed.worker.stop import Stop
from worker.conftest import MakeJob, read_events
from zoo.vision import build_vision_checkpoint

COLORS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (40, 60, 220), "yellow": (235, 220, 40)}
SHAPES = ("circle", "square")


def draw(path: Path, color: str, shape: str, rng: random.Random) -> Path:
    """Draw a colored shape somewhere on gray, in an image of some size."""
    width, height = rng.randint(40, 64), rng.randint(40, 64)
    image = Image.new("RGB", (width, height), (rng.randint(110, 140),) * 3)
    size = rng.randint(24, 36)
    left, top = rng.randint(0, width - size), rng.randint(0, height - size)
    fill = tuple(min(255, max(0, value + rng.randint(-15, 15))) for value in COLORS[color])
    box = (left, top, left + size, top + size)
    getattr(ImageDraw.Draw(image), {"circle": "ellipse", "square": "rectangle"}[shape])(box, fill=fill)
    image.save(path)
    return path


def colored_rows(directory: Path, number: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return pictures, and their colors."""
    rng, rows = random.Random(seed), []
    directory.mkdir(exist_ok=True)
    for n in range(number):
        color = list(COLORS)[n % len(COLORS)]
        path = draw(directory / f"{seed}-{n}.png", color, rng.choice(SHAPES), rng)
        parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": "Which color?"}]
        rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": color}]})
    return rows


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision_checkpoint(tmp_path_factory.mktemp("qwen") / "base", "qwen2_5_vl")


def test_a_model_trains_on_pictures(make_job: MakeJob, qwen: Path, tmp_path: Path) -> None:
    job = make_job(
        model=qwen,
        rows=colored_rows(tmp_path / "images", 12),
        lora={"r": 4},
        eval_split=0.25,
        training={"max_steps": 3, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2},
        predictions={"num_samples": 2, "max_new_tokens": 4},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert ended.of("data")[0]["num_media"] == 12
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0, 0]
    assert f"[image {tmp_path}/images/" in ended.of("predictions")[0]["rows"][0]["prompt"]
    trained = "".join(part["text"] for part in ended.of("example")[0]["segments"] if part["trained"])
    assert trained.removesuffix("<|im_end|>") in COLORS


def test_a_tiny_model_learns_the_colors_of_pictures_that_it_has_never_seen(
    make_job: MakeJob, qwen: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in colored_rows(tmp_path / "images", 40, seed=1)))
    job = make_job(
        model=qwen,
        rows=colored_rows(tmp_path / "images", 160),
        eval_datasets=[{"path": str(held_out)}],
        training={
            "max_steps": 80,
            "per_device_train_batch_size": 16,
            "learning_rate": 3e-3,
            "eval_strategy": "no",
            "lr_scheduler_type": "cosine",
        },
        predictions={"sample_frequency": "epoch", "num_samples": 40, "max_new_tokens": 4},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    before, *_, after = [share_of_right_answers(item["rows"]) for item in ended.of("predictions")]
    assert before <= 0.4
    assert after >= 0.9, [share_of_right_answers(item["rows"]) for item in ended.of("predictions")]


def share_of_right_answers(rows: list[dict[str, Any]]) -> float:
    return sum(row["prediction"] == row["ground_truth"] for row in rows) / len(rows)


def rows_of(directory: Path, number: int = 12, **change: Any) -> list[dict[str, Any]]:
    return [row | change for row in colored_rows(directory, number)]


def test_a_mask_counted_without_the_images_ends_the_job_before_its_first_step(
    make_job: MakeJob, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: training starts after as many tokens as the prompt has without its image."""
    collate = Collator.__call__

    def miscount(self: Collator, rows: Any) -> Any:
        batch = collate(self, rows)
        tokenizer = self._processor._tokenizer
        for n, row in enumerate(rows):
            text = self._sources[row["source"]].text.partition("<|im_end|>\n<|im_start|>assistant")[0]
            text = text.replace("<|vision_start|><|image_pad|><|vision_end|>", "").replace("Which color?", "")
            length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            batch["labels"][n] = batch["input_ids"][n]
            batch["labels"][n, :length] = -100
        batch["labels"][batch["attention_mask"] == 0] = -100
        return batch

    monkeypatch.setattr(Collator, "__call__", miscount)
    ended = make_job(model=qwen, rows=rows_of(tmp_path / "images")).run()
    assert ended.status == 81, ended.result
    assert ended.result["error"]["code"] == "mask_invalid"
    assert "'<|image_pad|>'" in ended.result["error"]["evidence"]
    assert "'<|vision_end|>'" in ended.result["error"]["evidence"]
    assert not ended.of("step")
    assert not ended.of("predictions")


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [
        ("bfloat16", {"lora": {"r": 4}}),
        ("float16", {"lora": {"r": 4}}),
        ("bfloat16", {"lora": {"r": 4}, "quantization": "4bit"}),
        ("float32", {}),
    ],
)
def test_no_floating_input_reaches_the_model_in_another_dtype(
    make_job: MakeJob, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, keys: dict[str, Any]
) -> None:
    seen: dict[str, set[tuple[str, bool]]] = {}
    real = load.load

    def load_with_a_hook(*arguments: Any) -> Any:
        loaded = real(*arguments)
        inner = loaded.model.get_base_model() if "lora" in keys else loaded.model
        inner.register_forward_pre_hook(look, with_kwargs=True)
        return loaded

    def look(model: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            if torch.is_tensor(value) and value.is_floating_point():
                seen.setdefault(name, set()).add((str(value.dtype), model.training))

    monkeypatch.setattr(load, "load", load_with_a_hook)
    job = make_job(
        model=qwen,
        rows=rows_of(tmp_path / "images"),
        dtype=dtype,
        eval_split=0.25,
        predictions={"num_samples": 2, "max_new_tokens": 2},
        training={"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
        **keys,
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0, 0]
    assert seen == {"pixel_values": {(f"torch.{dtype}", True), (f"torch.{dtype}", False)}}


def test_a_picture_that_vanishes_ends_the_run_with_its_name_and_a_checkpoint(
    make_job: MakeJob, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(tmp_path / "images")
    whole = make_job(model=qwen, rows=rows, lora={"r": 4}, training={"max_steps": 6}).run()
    job = make_job(model=qwen, rows=rows, lora={"r": 4}, training={"max_steps": 6})
    files = sorted((tmp_path / "images").iterdir())
    events_path = job.events_path(1)
    collate = Collator.__call__

    def collate_until_gone(self: Collator, given: Any) -> Any:
        if any(event.kind == "step" for event in read_events(events_path)):
            for file in filter(Path.exists, files):
                file.rename(file.with_suffix(".away"))
        return collate(self, given)

    monkeypatch.setattr(Collator, "__call__", collate_until_gone)
    ended = job.run()
    assert ended.status == 65, ended.result
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert f"{tmp_path}/images/0-" in ended.result["error"]["message"]
    step = ended.result["step"]
    assert 0 < step < 6
    assert ended.of("checkpoint")[-1]["step"] == step
    monkeypatch.undo()
    for file in files:
        file.with_suffix(".away").rename(file)
    resumed = job.run(2)
    assert resumed.status == 0, resumed.result
    assert ended.losses | resumed.losses == whole.losses


def test_a_picture_that_changes_is_named_by_a_loader_in_another_process(
    make_job: MakeJob, qwen: Path, tmp_path: Path
) -> None:
    """Torch passes on an exception of a loader's process as one text, with its traceback."""
    job = make_job(
        model=qwen,
        rows=rows_of(tmp_path / "images"),
        lora={"r": 4},
        training={"max_steps": 400, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 1},
        predictions={"sample_frequency": "off"},
    )
    files = list((tmp_path / "images").iterdir())

    def change_after_a_step() -> None:
        while files and any(event.kind == "step" for event in read_events(job.events_path(1))):
            other = tmp_path / "other.png"
            Image.new("RGB", (112, 112)).save(other)
            other.replace(files.pop())  # in one step: half a file would be another fault

    ended = job.run(stop=Stop(change_after_a_step))
    assert ended.result["error"]["code"] == "dataset_invalid", ended.result
    message = ended.result["error"]["message"]
    assert message.startswith("data set 1, row ")
    assert message.endswith(".png has changed")
    assert "\n" not in message


def test_rows_whose_files_are_broken_are_left_out_counted_and_named(
    make_job: MakeJob, qwen: Path, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path / "images", 12)
    files = [Path(row["messages"][0]["content"][0]["image"]) for row in rows]
    files[1].unlink()
    files[4].write_bytes(files[4].read_bytes()[:60])
    files[7].write_text("no picture\n")
    off: dict[str, Any] = {"predictions": {"sample_frequency": "off"}, "training": {"max_steps": 1}}
    ended = make_job(model=qwen, rows=rows, lora={"r": 4}, **off).run()
    assert ended.status == 0, ended.result
    counts = ended.of("data")[0]
    assert (counts["num_train"], counts["num_dropped"], counts["num_broken"]) == (9, 3, 3)
    (told,) = [text for text in ended.messages("warning") if "an unusable file" in text]
    assert all(str(files[n]) in told for n in (1, 4, 7))
    refused = make_job(model=qwen, rows=rows, lora={"r": 4}, media={"broken": "refuse"}, **off).run()
    assert refused.status == 65
    assert str(files[1]) in refused.result["error"]["message"]


def test_evaluation_rows_that_are_all_lost_end_the_job_and_say_why(
    make_job: MakeJob, qwen: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    rows = rows_of(tmp_path / "elsewhere", 4)
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in (tmp_path / "elsewhere").iterdir():
        file.unlink()
    ended = make_job(
        model=qwen,
        rows=rows_of(tmp_path / "images", 4),
        lora={"r": 4},
        eval_datasets=[{"path": str(held_out)}],
        training={"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1},
    ).run()
    assert ended.result["error"]["code"] == "dataset_invalid", ended.result
    assert ended.result["error"]["message"].startswith(
        "no row is left to evaluate on, of 4; the first: data set 1, row"
    )
    assert "media_dir" in ended.result["error"]["hint"]


def test_rows_that_would_be_cut_through_an_image_are_left_out_and_counted(
    make_job: MakeJob, qwen: Path, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path / "images", 4)
    content = rows[2]["messages"][0]["content"]
    Image.new("RGB", (112, 112)).save(content[0]["image"])
    content[:0] = content[:1] * 2  # three large ones
    off: dict[str, Any] = {"predictions": {"sample_frequency": "off"}, "lora": {"r": 4}}
    training = {"max_steps": 1, "max_length": 44}
    ended = make_job(model=qwen, rows=rows, training=training, **off).run()
    assert ended.status == 0, ended.result
    counts = ended.of("data")[0]
    assert (counts["num_train"], counts["num_too_long"]) == (3, 1)
    assert any("max_length" in text for text in ended.messages("warning"))
    refused = make_job(model=qwen, rows=rows, training=training, media={"too_long": "refuse"}, **off).run()
    assert refused.status == 65
    assert "data set 1, row 3" in refused.result["error"]["message"]


def test_rows_with_and_without_pictures_share_a_batch(make_job: MakeJob, qwen: Path, tmp_path: Path) -> None:
    text = [
        {"messages": [{"role": "user", "content": f"What is {n} and 1?"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(4)
    ]
    for family in ("qwen2_5_vl", "gemma3"):
        ended = make_job(
            model=build_vision_checkpoint(tmp_path / family, family),
            rows=[*rows_of(tmp_path / "images", 4), *text],
            lora={"r": 4},
            eval_split=0.5,
            training={"max_steps": 4, "per_device_train_batch_size": 1},
            predictions={"num_samples": 4, "max_new_tokens": 3},
        ).run()
        assert ended.status == 0, ended.result
        assert {item["num_failed"] for item in ended.of("predictions")} == {0}


def test_a_stopped_run_on_pictures_goes_on_as_if_nothing_had_been(make_job: MakeJob, tmp_path: Path) -> None:
    qwen = build_vision_checkpoint(tmp_path / "base", "qwen2_5_vl", dtype="bfloat16")
    keys: dict[str, Any] = {"lora": {"r": 4, "lora_dropout": 0.1}, "predictions": {"num_samples": 2}}
    rows = rows_of(tmp_path / "images")
    whole = make_job(model=qwen, rows=rows, **keys).run()
    job = make_job(model=qwen, rows=rows, **keys)
    stopped = job.stopped_at(2)
    assert stopped.losses | job.run(2).losses == whole.losses


@pytest.mark.parametrize("key", ["packing", "padding_free"])
def test_pictures_are_not_packed(make_job: MakeJob, qwen: Path, tmp_path: Path, key: str) -> None:
    job = make_job(model=qwen, rows=rows_of(tmp_path / "images", 4), lora={"r": 4}, training={"max_length": 64})
    plan = job.plan
    plan["spec"]["training"][key] = True
    job.change_plan(**plan)
    ended = job.run()
    assert ended.result["error"]["code"] == "spec_invalid", ended.result
    assert f"training.{key}" in ended.result["error"]["message"]


def test_a_text_model_refuses_rows_with_pictures(make_job: MakeJob, tmp_path: Path) -> None:
    ended = make_job(rows=rows_of(tmp_path / "images", 4), lora={"r": 4}).run()
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert "no processor" in ended.result["error"]["message"]


def test_a_preview_shows_images_by_their_size(
    make_job: MakeJob, qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(tmp_path / "images", 2)
    for row in rows:
        Image.new("RGB", (112, 84)).save(row["messages"][0]["content"][0]["image"])
    job = make_job(model=qwen, rows=rows, lora={"r": 4})
    spec_path = tmp_path / "job.json"
    spec_path.write_text(json.dumps(job.plan["spec"]))
    assert preview.main([str(spec_path)]) == 0
    shown = capsys.readouterr().out
    assert "[image 4×3 tokens]Which color?" in shown
    assert "⟦red<|im_end|>⟧" in shown
