"""A custom model with unknown modules: the job names its parts, and trains those that it wants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from honed.check import target
from honed.inputs import basemodel, modality
from honed.plan import parameter
from honed.spec import jobfile
from honed.system.error import ModelError, SpecError
from honed.worker import assignment as assignments
from honed.worker.model import load
from worker.conftest import MakeJob
from zoo.vision import build_vision_checkpoint

#: LLaVA with renamed vision encoder and projector, as in custom models.
MODELING = """
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaModel

NAMES = {"vision_tower": "retina", "multi_modal_projector": "bridge"}


class GraftConfig(LlavaConfig):
    model_type = "graft"


class GraftInner(LlavaModel):
    def __init__(self, config):
        super().__init__(config)
        for known, own in NAMES.items():
            setattr(self, own, self._modules.pop(known))

    def __getattr__(self, name):
        return super().__getattr__(NAMES.get(name, name))


class GraftForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = GraftConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = GraftInner(config)
        self.post_init()
"""
PARTS = {"vision": "retina", "projector": "bridge"}
RUN: dict[str, Any] = {
    "trust_remote_code": True,
    "training": {"max_steps": 2, "learning_rate": 2e-2},
    "predictions": {"sample_frequency": "off"},
}


@pytest.fixture(scope="module")
def grafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlavaForConditionalGeneration

    root = tmp_path_factory.mktemp("graft")
    plain, base = build_vision_checkpoint(root / "llava", "llava"), root / "graft"
    shutil.copytree(plain, base)
    (base / "modeling_graft.py").write_text(MODELING)
    config = json.loads((base / "config.json").read_text()) | {
        "model_type": "graft",
        "architectures": ["GraftForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "modeling_graft.GraftConfig",
            "AutoModelForImageTextToText": "modeling_graft.GraftForConditionalGeneration",
        },
    }
    (base / "config.json").write_text(json.dumps(config))
    weights = LlavaForConditionalGeneration.from_pretrained(plain).state_dict()
    renamed = {
        name.replace("vision_tower", "retina").replace("multi_modal_projector", "bridge"): value.clone()
        for name, value in weights.items()
    }
    from safetensors.torch import save_file

    for old in base.glob("*.safetensors*"):
        old.unlink()
    save_file(renamed, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    colors = ("red", "green", "blue", "yellow")
    for color in colors:
        Image.new("RGB", (32, 40), color).save(tmp_path / f"{color}.png")
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": str(tmp_path / f"{color}.png")},
                        {"type": "text", "text": "What is it?"},
                    ],
                },
                {"role": "assistant", "content": f"It is {color}."},
            ]
        }
        for color in colors * 2
    ]


def kind_of(name: str) -> str:
    return "vision" if "retina" in name else "projector" if "bridge" in name else "language"


@pytest.mark.parametrize("wanted", [["projector"], ["language", "projector"], ["language", "vision", "projector"]])
def test_full_fine_tuning_trains_the_parts_that_are_asked_for_and_no_other(
    make_job: MakeJob, grafted: Path, rows: list[dict[str, Any]], wanted: list[str]
) -> None:
    job = make_job(model=grafted, rows=rows, parts=PARTS, train_parts=wanted, **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    before, after = load_file(grafted / "model.safetensors"), load_file(job.output_dir / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name].to(before[name].dtype))}
    assert {kind_of(name) for name in changed} == set(wanted)
    counts = {each["role"] for each in ended.of("audit")[-1]["counts"]}
    assert counts >= {"vision", "projector", "base"}
    trained = sum(value.numel() for name, value in before.items() if kind_of(name) in wanted)
    assert job.plan["checkpoint"]["num_trained"] == trained


def test_an_adapter_and_quantization_go_by_the_parts_that_are_named(
    make_job: MakeJob, grafted: Path, rows: list[dict[str, Any]]
) -> None:
    lora = {"r": 4, "finetune_projector": True, "finetune_language_layers": False}
    job = make_job(model=grafted, rows=rows, parts=PARTS, lora=lora, quantization="4bit", **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    made = load_file(job.output_dir / "adapter_model.safetensors")
    assert {kind_of(name) for name in made} == {"projector"}
    counts = {each["role"]: each["dtype"] for each in ended.of("audit")[-1]["counts"]}
    assert counts["vision"] == counts["projector"] != counts["quantized"]


def test_an_expression_that_matches_nothing_is_refused_with_names_near_it(grafted: Path) -> None:
    model = basemodel.inspect(grafted)

    def check(**keys: Any) -> None:
        spec = jobfile.validate({"base_model": str(grafted), "datasets": [{"path": "/d.jsonl"}], **keys})
        with modality.naming(spec.parts.patterns):
            target.check(spec, model)

    with pytest.raises(SpecError, match=r"parts\.vision: no module ") as raised:
        check(parts={"vision": "retinna"})
    assert "'retinna'" in raised.value.shown
    assert "retina" in raised.value.hint
    with pytest.raises(SpecError, match="known to belong to its projector part"):
        check(train_parts=["projector"])
    check(parts=PARTS, train_parts=["projector", "vision"])
    check(parts={"vision": r"^model\.retina\."}, lora={"r": 4})
    check(parts={"vision": r"^retina$"})


def test_parts_that_only_the_loaded_model_lacks_are_refused_then(
    make_job: MakeJob, grafted: Path, checkpoint_of: Callable[..., Path]
) -> None:
    for keys, match in (
        ({"parts": {"vision": "never"}}, r"parts\.vision: GraftForConditionalGeneration has no such part"),
        ({"train_parts": ["audio"]}, r"train_parts: audio: GraftForConditionalGeneration has no such part"),
    ):
        job = assignments.read(make_job(model=grafted, **RUN, **keys).dir, 1)
        with modality.naming(job.spec.parts.patterns), pytest.raises(ModelError, match=match):
            load.freeze(load.choose("transformers").load_base(job), job)


def test_what_a_job_names_is_forgotten_after_it() -> None:
    with modality.naming({"vision": "retina", "projector": r"retina\.out"}):
        assert modality.part("base_model.model.model.retina.out.lora_A.default.weight") == "projector"
        assert modality.part("retina.block.0.fc.weight") == "vision"
        with modality.naming({"language": "visual_words"}):
            assert modality.part("visual_words.fc.weight") == "language"
            assert modality.part("retina.fc.weight") == "language"
        assert modality.part("visual.fc.weight") == "vision"
    assert modality.part("retina.fc.weight") == "language"


def test_memory_is_estimated_for_the_parts_that_are_trained(grafted: Path) -> None:
    model = basemodel.inspect(grafted)

    def num_trained(**keys: Any) -> int:
        spec = jobfile.validate({"base_model": str(grafted), "datasets": [{"path": "/d.jsonl"}], **keys})
        with modality.naming(spec.parts.patterns):
            return parameter.trained(spec, model).num_parameters

    assert 0 < num_trained(parts=PARTS, train_parts=["projector"]) < num_trained(parts=PARTS)
    assert num_trained(parts=PARTS) < num_trained() == sum(tensor.num_elements for tensor in model.tensors)
