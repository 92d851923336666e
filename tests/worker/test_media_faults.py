"""Odd and broken files of every kind in one data set: usable ones are trained on, the rest are counted and named."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from honed.worker import preview
from worker.conftest import MakeJob
from zoo.vision import build_vision_checkpoint


def write_torn_jpeg(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1500])


def write_moving_gif(path: Path) -> None:
    pictures = [Image.new("RGB", (40, 30), (20 * n, 0, 0)) for n in range(4)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)


def write_sound(path: Path, num_samples: int) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(b"\1\2" * num_samples)


#: Skipped rows, and the words of the warning.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing.png": (Path, "no such file"),
    "torn.jpg": (write_torn_jpeg, "a broken image: image file is truncated"),
    "strip.png": (
        lambda path: Image.new("L", (20000, 20)).save(path),
        "20000×20: one side is more than 200 times as long as the other",
    ),
    "text.png": (lambda path: path.write_text("no picture\n"), "not a readable image: it is text"),
    "silent.wav": (lambda path: write_sound(path, 0), "sound of zero length"),
}
#: Odd rows that are trained on.
ODD: dict[str, Callable[[Path], Any]] = {
    "dot.png": lambda path: Image.new("RGB", (1, 1), "red").save(path),
    "cmyk.jpg": lambda path: Image.new("CMYK", (40, 30), (0, 255, 255, 0)).save(path),
    "deep.png": lambda path: Image.fromarray(np.full((30, 40), 40000, dtype=np.uint16)).save(path),
    "moving.gif": write_moving_gif,
    "sound.wav": lambda path: write_sound(path, 8000),
}


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_vision_checkpoint(tmp_path_factory.mktemp("omni") / "base", "qwen2_5_omni_thinker")


def test_odd_files_are_trained_on_and_broken_ones_left_out_counted_and_named(
    make_job: MakeJob, omni: Path, tmp_path: Path
) -> None:
    pictures, sounds = tmp_path / "pictures", tmp_path / "sounds"
    pictures.mkdir()
    sounds.mkdir()
    rows = []
    for name, write in {**{name: write for name, (write, _) in BROKEN.items()}, **ODD}.items():
        is_sound = name.endswith(".wav")
        write((sounds if is_sound else pictures) / name)
        asked = "<audio>What is it?" if is_sound else "<image>What is it?"
        turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": "It is odd."}]
        rows.append({"conversations": turns, "audio" if is_sound else "image": name})
    found = {"path": str(tmp_path / "job1/facts.jsonl"), "media_dir": {"image": str(pictures), "audio": str(sounds)}}
    job = make_job(
        model=omni,
        rows=rows,
        datasets=[found],
        lora={"r": 4},
        training={"max_steps": 2, "per_device_train_batch_size": 5},
        predictions={"sample_frequency": "off"},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    counts = ended.of("data")[0]
    assert (counts["num_train"], counts["num_broken"], counts["num_dropped"]) == (len(ODD), len(BROKEN), len(BROKEN))
    (told,) = [text for text in ended.messages("warning") if "rows are skipped" in text]
    assert told.startswith(f"{len(BROKEN)} rows are skipped because of an unusable file: ")
    for name, (_, words) in BROKEN.items():
        assert f"/{name}: {words}" in told


def test_a_sound_of_which_the_processor_drops_the_end_is_left_out_and_named(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whisper silently cuts off everything after its 30 seconds (2 in this model)."""
    ears = build_vision_checkpoint(tmp_path / "ears", "qwen2_audio")
    rows = []
    for name, seconds in (("whole", 2.0), ("long", 2.5), ("short", 0.5)):
        write_sound(tmp_path / f"{name}.wav", int(seconds * 16000))
        messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A hum."}]
        rows.append({"messages": messages, "audio": str(tmp_path / f"{name}.wav")})
    keys: dict[str, Any] = {"lora": {"r": 4}, "training": {"max_steps": 1}, "predictions": {"sample_frequency": "off"}}
    job = make_job(model=ears, rows=rows, **keys)
    ended = job.run()
    assert ended.status == 0, ended.result
    counts = ended.of("data")[0]
    assert (counts["num_train"], counts["num_too_long"], counts["num_dropped"]) == (2, 1, 1)
    words = f"data set 1, row 2: {tmp_path}/long.wav: 2.5 seconds of sound, but the processor reads only the first 2"
    assert any(text.startswith("1 row is skipped") and words in text for text in ended.messages("warning"))
    refused = make_job(model=ears, rows=rows, media={"too_long": "refuse"}, **keys).run()
    assert refused.result["error"]["code"] == "dataset_invalid"
    assert refused.result["error"]["message"] == words
    spec_path = tmp_path / "job.json"
    spec_path.write_text(json.dumps(job.plan["spec"]))
    assert preview.main([str(spec_path)]) == 0
    assert f"preview: {words}: the row is skipped" in capsys.readouterr().err
