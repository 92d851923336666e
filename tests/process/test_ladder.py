"""A job that runs out of memory goes down the ladder until it fits, and learns what it would have learned."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from cgroup import limited_to
from harness import ColdInstance, Instance
from limited import LimitedInstance, check_stepped_down
from PIL import Image

import warm
from honed.job import event
from honed.job.job import State
from honed.system.personpath import PersonPath
from zoo.model import build_checkpoint
from zoo.vision import build_vision_checkpoint

#: Tokens of a row and of the vocabulary: a row's logits and the loss's copies of them use nearly all the memory.
LENGTH, VOCABULARY = 512, 65_536
#: Bytes by which a worker may grow. Measured: 3.5 GiB with batches of 8, 2.0 with 4, 1.2 with 2.
LIMIT_BYTES = int(1.55 * 2**30)
#: Resident bytes allowed for honed and its children. A worker with batches of 7 needs more; one with single rows was
#: measured at 1.1 GiB.
CGROUP_BYTES = 2 << 30
#: Pixels of a picture at first, and bytes by which a worker that reads it may grow. Measured: 2.8 GiB in all, 1.7 with
#: half of the pixels, which are half of the tokens, and 0.6 before it reads any.
MAX_PIXELS, SEEING_LIMIT_BYTES = 1 << 20, int(1.75 * 2**30)


def write_long_rows(path: Path, num_rows: int = 8) -> Path:
    rows = [{"prompt": "What is the capital?", "completion": f" Paris {n}" * LENGTH} for n in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with hardly any weights and a large vocabulary."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("large") / "model"
    build_checkpoint(place, "llama", hidden_size=16, num_layers=1, max_position_embeddings=1024)
    model = AutoModelForCausalLM.from_pretrained(place)
    model.resize_token_embeddings(VOCABULARY)
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision model with hardly any weights, a large vocabulary, and an encoder that accepts large pictures."""
    from transformers import AutoModelForImageTextToText

    warm.address("seeing")
    place = tmp_path_factory.mktemp("seeing") / "model"
    build_vision_checkpoint(place, "qwen2_5_vl", max_position_embeddings=4096)
    model = AutoModelForImageTextToText.from_pretrained(place)
    model.resize_token_embeddings(2 * VOCABULARY)
    model.save_pretrained(place)
    settings = json.loads((place / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 2 * MAX_PIXELS
    (place / "preprocessor_config.json").write_text(json.dumps(settings))
    return place


def write_picture(path: Path) -> Path:
    """Write rows with a picture of the maximum number of pixels."""
    size = math.isqrt(MAX_PIXELS)
    Image.new("RGB", (size, size), "blue").save(path.with_suffix(".png"))
    parts = [{"type": "image", "image": f"{path.stem}.png"}, {"type": "text", "text": "Which color?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "blue"}]}
    path.write_text(f"{json.dumps(row)}\n" * 2)
    return path


KEYS: dict[str, Any] = {
    "lora": {"r": 2},
    "dtype": "float32",
    "backend": "transformers",
    "predictions": {"sample_frequency": "off"},
    "retry": {"max_attempts": 1},
    "training": {"max_steps": 1, "per_device_train_batch_size": 8, "max_length": LENGTH, "learning_rate": 1e-2},
}


def test_a_job_that_cannot_fit_at_first_fits_after_two_steps_down(
    limited: LimitedInstance, large_model: Path, tmp_path: Path
) -> None:
    limited.model, limited.dataset = large_model, write_long_rows(tmp_path / "long.jsonl")
    limited.drop("long", **KEYS)
    limited.run(LIMIT_BYTES)
    texts = [
        "per_device_train_batch_size 8 → 4, gradient_accumulation_steps 1 → 2",
        "per_device_train_batch_size 4 → 2, gradient_accumulation_steps 2 → 4",
    ]
    check_stepped_down(limited, "long", *texts)
    shown = limited.show("long")
    assert [each["text"] for each in shown["adjustments"]] == texts


def test_a_worker_that_the_kernel_kills_for_want_of_memory_goes_down_the_ladder_and_honed_lives_on(
    cold: ColdInstance, large_model: Path, tmp_path: Path
) -> None:
    """honed is in the same cgroup that is out of memory; the kernel kills the largest process, which is the worker."""
    cold.model, cold.dataset = large_model, write_long_rows(tmp_path / "long.jsonl")
    cold.configure("[device]\ngpus = []\n")
    cold.drop("long", **{**KEYS, "training": {**KEYS["training"], "per_device_train_batch_size": 7}})
    with limited_to(CGROUP_BYTES, "ladder") as cgroup:
        enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
        cold.command = ("sh", "-c", enter, "sh", *ColdInstance.command)
        cold.start("--drain")
        assert cold.wait(deadline_sec=800.0) == 0
    text = "per_device_train_batch_size 7 → 1, gradient_accumulation_steps 1 → 7"
    job = check_stepped_down(cold, "long", text)
    ended = json.loads(cold.layout.job(job.id).attempt(1).exit_path.read_text())
    assert (ended["signal"], ended["was_out_of_memory"]) == (signal.SIGKILL, True)
    assert cold.log.count(" ready: ") == 1


def seeing_keys(model: Path, rows: Path) -> dict[str, Any]:
    training = {"max_steps": 1, "per_device_train_batch_size": 1, "max_length": None}
    media = {"base_model": str(model), "datasets": [{"path": str(rows)}], "media": {"max_pixels": MAX_PIXELS}}
    return {**KEYS, **media, "training": training}


def test_pictures_become_smaller_where_the_job_allows_it(
    limited: LimitedInstance, seeing_model: Path, tmp_path: Path
) -> None:
    keys = seeing_keys(seeing_model, write_picture(tmp_path / "seen.jsonl"))
    limited.drop("seen", **{**keys, "retry": {"max_attempts": 1, "may_shrink_media": True}})
    limited.run(SEEING_LIMIT_BYTES)
    text = f"media.max_pixels {MAX_PIXELS} → {MAX_PIXELS // 2}"
    seen = check_stepped_down(limited, "seen", text)
    assert "averages its loss per batch" not in limited.log, "no batch was divided"
    before, after = (
        event.read(PersonPath.own(limited.layout.job(seen.id).attempt(number).events_path), 0).events
        for number in (1, 2)
    )
    assert [step["text"] for each in after if each.kind == "adjusted" for step in each.data["steps"]] == [text]
    num_before, num_after = (
        next(each.data["num_tokens"] for each in events if each.kind == "data") for events in (before, after)
    )
    assert num_after < 0.6 * num_before, "the model sees less"
    assert text in limited.layout.job(seen.id).report_path.read_text(encoding="utf-8")


def test_where_pictures_may_not_become_smaller_the_job_is_told_of_it(
    instance: Instance, seeing_model: Path, tmp_path: Path
) -> None:
    """Its worker is a fake one: what a real one says when it runs out of memory is in the test above."""
    instance.drop("sharp", name="shrink-1", **seeing_keys(seeing_model, write_picture(tmp_path / "seen.jsonl")))
    assert instance.drain() == 0
    sharp = instance.job("shrink-1")
    assert sharp is not None
    assert (sharp.state, sharp.outcome, len(sharp.attempts)) == (State.FAILED, "out_of_memory", 1), instance.log
    assert sharp.error is not None
    assert "in train, no step of the ladder helps here" in sharp.error["message"]
    assert "retry.may_shrink_media: true" in sharp.error["hint"]
