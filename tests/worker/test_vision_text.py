"""Vision models trained on rows of text: whole families, each in one way, with frozen vision encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from honed.inputs import modality
from worker.conftest import MakeJob
from zoo.vision import build_vision_checkpoint

RUN: dict[str, Any] = {
    "eval_split": 0.2,
    "training": {"max_steps": 2},
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
}


@pytest.mark.parametrize(
    ("family", "quantization"), [("gemma3", "none"), ("llava", "4bit"), ("idefics3", "8bit"), ("qwen2_5_vl", "none")]
)
def test_an_adapter_is_the_language_models_alone(
    make_job: MakeJob, tmp_path: Path, family: str, quantization: str
) -> None:
    job = make_job(
        model=build_vision_checkpoint(tmp_path / "base", family), lora={"r": 4}, quantization=quantization, **RUN
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0]
    assert {each["role"] for each in ended.of("audit")[-1]["counts"]} >= {"adapter", "base", "vision"}
    trained = load_file(job.output_dir / "adapter_model.safetensors")
    assert len(trained) == 2 * 2 * 7  # A and B of each linear layer of two decoder layers
    assert {modality.part(name) for name in trained} == {"language"}


def test_full_fine_tuning_leaves_the_eyes_as_they_were(make_job: MakeJob, tmp_path: Path) -> None:
    base = build_vision_checkpoint(tmp_path / "base", "gemma3")
    job = make_job(model=base, **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    before, after = load_file(base / "model.safetensors"), load_file(job.output_dir / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("language_model" in name for name in changed)
    assert {modality.part(name) for name in changed} == {"language"}
    again = make_job(model=job.output_dir, lora={"r": 4}, **RUN).run()  # the output is a complete base model
    assert again.status == 0, again.result


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_base_without_its_processors_files_trains_on_text(make_job: MakeJob, tmp_path: Path, family: str) -> None:
    base = build_vision_checkpoint(tmp_path / "base", family)
    for path in base.glob("*processor_config.json"):
        path.unlink()
    ended = make_job(model=base, lora={"r": 4}, save_merged="bfloat16", **RUN).run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0]
    again = make_job(model=Path(ended.result["artifacts"]["merged"]), lora={"r": 4}, **RUN).run()
    assert again.status == 0, again.result


def test_a_template_in_the_processors_own_file_is_used_for_training(make_job: MakeJob, tmp_path: Path) -> None:
    import json

    base = build_vision_checkpoint(tmp_path / "base", "llava")
    template = base / "chat_template.jinja"
    (base / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    ended = make_job(
        model=base, lora={"r": 4}, training={"max_steps": 1}, predictions={"sample_frequency": "off"}
    ).run()
    assert ended.status == 0, ended.result
    trained = "".join(part["text"] for part in ended.of("example")[0]["segments"] if part["trained"])
    assert trained.startswith("Paris.<|im_end|>")
