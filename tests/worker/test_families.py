"""Every vision or audio family: trained on its own kind of rows, quantized or not, and the output loads again."""

from __future__ import annotations

import math
import re
import struct
import sys
import wave
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, BitsAndBytesConfig

import warm
from honed.inputs import basemodel, modality
from honed.job.plan_file import Checkpoint, Parallel, PlanFile
from honed.plan import parameter, precision
from honed.spec import jobfile
from honed.system.device import cpu
from honed.system.error import BackendError, ModelError
from honed.worker.model import load, transformers_backend, unsloth_backend
from honed.worker.model.config import load_config
from worker.conftest import MakeJob
from zoo.vision import FAMILIES, SAMPLING_RATE, build_speaking_checkpoint, build_vision_checkpoint

COLORS = ("red", "green", "blue", "yellow")
_QUANTIZED = ("Params4bit", "Int8Params")
RUN: dict[str, Any] = {
    "eval_split": 0.25,
    "training": {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 2e-2},
    "predictions": {"num_samples": 2, "max_new_tokens": 4},
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that builds one checkpoint a family."""
    built: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in built:
            built[family] = build_vision_checkpoint(tmp_path_factory.mktemp(family) / "base", family)
        return built[family]

    return build


def rows_of(kinds: tuple[str, ...], directory: Path, number: int = 8) -> list[dict[str, Any]]:
    """Return rows with one medium of each kind: a color to see, a tone to hear."""
    directory.mkdir()
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        *({"type": kind, kind: _media(kind, directory / f"{n}", n)} for kind in kinds),
                        {"type": "text", "text": "What is it?"},
                    ],
                },
                {"role": "assistant", "content": f"It is {COLORS[n % len(COLORS)]}."},
            ]
        }
        for n in range(number)
    ]


def _media(kind: str, path: Path, n: int) -> Any:
    color, size = COLORS[n % len(COLORS)], (30 + 7 * n, 40)
    match kind:
        case "image":
            Image.new("RGB", size, color).save(path.with_suffix(".png"))
            return f"{path}.png"
        case "video":
            frames = [path.with_name(f"{path.name}-{each}.png") for each in range(4)]
            for frame in frames:
                Image.new("RGB", size, color).save(frame)
            return [str(frame) for frame in frames]
        case _:
            samples = (0.4 * math.sin(2 * math.pi * (200 + 100 * n) * t / SAMPLING_RATE) for t in range(8000 + 400 * n))
            with wave.open(f"{path}.wav", "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(SAMPLING_RATE)
                file.writeframes(b"".join(struct.pack("<h", int(32767 * each)) for each in samples))
            return f"{path}.wav"


def asked(family: str) -> tuple[str, ...]:
    """Return the kinds of media in a row of the family: all that it accepts except video."""
    return tuple(kind for kind in FAMILIES[family].media if kind != "video")


#: Those whose quantized form is trained by default: eyes, ears, and both. All are loaded so below.
QUANTIZED = {"qwen2_5_vl", "qwen2_audio", "qwen2_5_omni_thinker"}


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        pytest.param(family, each, marks=[pytest.mark.exhaustive] if each == "4bit" and family not in QUANTIZED else [])
        for family in FAMILIES
        for each in ("none", "4bit")
    ],
)
def test_a_family_trains_and_what_it_makes_loads_again(
    make_job: MakeJob, base_of: Callable[[str], Path], tmp_path: Path, family: str, quantization: str
) -> None:
    from transformers import AutoProcessor

    rows = rows_of(asked(family), tmp_path / "media")
    job = make_job(model=base_of(family), rows=rows, lora={"r": 4}, quantization=quantization, **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert ended.of("data")[0]["num_train"] == 6
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0]
    assert math.isfinite(ended.metrics["eval_loss"])
    dtypes = {each["role"]: each["dtype"] for each in ended.of("audit")[-1]["counts"]}
    towers = {role for role in dtypes if role in ("vision", "audio", "projector")}
    assert {dtypes[role] for role in towers} == {"bfloat16"}  # quantized or not
    assert towers >= {"vision" if "image" in asked(family) else "audio"}
    trained = load_file(job.output_dir / "adapter_model.safetensors")
    assert {modality.part(name) for name in trained} == {"language"}
    assert all(value.any() for name, value in trained.items() if "lora_B" in name)
    made_with = type(AutoProcessor.from_pretrained(base_of(family)))
    assert type(AutoProcessor.from_pretrained(job.output_dir)) is made_with
    task = {("image",): "image-text-to-text", ("audio",): "audio-text-to-text"}.get(asked(family), "any-to-any")
    assert f"pipeline_tag: {task}\n" in (job.output_dir / "README.md").read_text()
    again = make_job(
        model=base_of(family),
        rows=rows,
        adapter=str(job.output_dir),
        quantization=quantization,
        **(RUN | {"training": RUN["training"] | {"max_steps": 1}}),
    ).run()
    assert again.status == 0, again.result
    assert again.of("predictions")[0]["rows"] == ended.of("predictions")[-1]["rows"]


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "qwen2_audio"])
def test_a_family_trains_whole_and_is_a_base_model_again(
    make_job: MakeJob, base_of: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    rows = rows_of(asked(family), tmp_path / "media")
    job = make_job(model=base_of(family), rows=rows, **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    before, after = (load_file(each / "model.safetensors") for each in (base_of(family), job.output_dir))
    assert before.keys() == after.keys()
    changed = {modality.part(name) for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"language"}  # vision and audio encoders stay frozen
    again = make_job(model=job.output_dir, rows=rows, **(RUN | {"training": {"max_steps": 1}})).run()
    assert again.status == 0, again.result
    assert again.of("predictions")[0]["rows"] == ended.of("predictions")[-1]["rows"]


def test_what_is_saved_merged_sees_as_the_adapter_did(
    make_job: MakeJob, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = rows_of(("image",), tmp_path / "media")
    parts = {"finetune_vision_layers": True, "finetune_projector": True}
    job = make_job(model=base_of("idefics3"), rows=rows, lora={"r": 4, **parts}, save_merged="bfloat16", **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    again = make_job(model=job.output_dir / "merged", rows=rows, lora={"r": 4}, **RUN).run()
    assert again.status == 0, again.result
    first, last = again.of("predictions")[0]["rows"], ended.of("predictions")[-1]["rows"]
    assert [row["prediction"] for row in first] == [row["prediction"] for row in last]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"])
def test_a_family_trains_on_videos(
    make_job: MakeJob, base_of: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    ended = make_job(
        model=base_of(family),
        rows=rows_of(("video",), tmp_path / "media"),
        lora={"r": 4},
        media={"num_frames": 2},
        training={"max_steps": 1},
        predictions={"sample_frequency": "off"},
    ).run()
    assert ended.status == 0, ended.result
    assert ended.of("data")[0]["num_train"] == 8


def test_of_a_model_that_speaks_the_thinker_is_trained(make_job: MakeJob, tmp_path: Path) -> None:
    base = build_speaking_checkpoint(tmp_path / "base")
    rows = rows_of(("image", "audio"), tmp_path / "media")
    job = make_job(model=base, rows=rows, lora={"r": 4}, quantization="4bit", **RUN)
    ended = job.run()
    assert ended.status == 0, ended.result
    thinker = [each for each in basemodel.inspect(base).tensors if each.name.startswith("thinker.")]
    held = sum(each["num_parameters"] for each in ended.of("audit")[0]["counts"])
    assert held == sum(each.num_elements for each in thinker)  # the speaking parts are not loaded
    assert job.plan["memory"]["weights_bytes"] == pytest.approx(ended.result["memory"]["weights_bytes"], rel=0.05)
    again = make_job(model=base, rows=rows, adapter=str(job.output_dir), quantization="4bit", **RUN).run()
    assert again.of("predictions")[0]["rows"] == ended.of("predictions")[-1]["rows"]


#: The part that each key adds to the language model's 14 layers, and its minimum of tensors: A and B of a layer.
PARTS = [
    (family, keys, parts)
    for family in FAMILIES
    for keys, parts in (
        ({}, {"language"}),
        ({"finetune_vision_layers": True}, {"language", "vision"}),
        ({"finetune_projector": True, "finetune_language_layers": False}, {"projector"}),
        ({"finetune_audio_layers": True, "finetune_projector": True}, {"language", "audio", "projector"}),
    )
    if not ("vision" in parts and "image" not in FAMILIES[family].media)
    and not ("audio" in parts and "audio" not in FAMILIES[family].media)
    and not ("projector" in parts and family == "gemma3")
]


def loaded(base: Path, quantization: str = "none", **lora: Any) -> tuple[Any, Any]:
    """Return a model with its adapter, loaded by the real backend, and the assignment."""
    spec = jobfile.validate(
        {
            "base_model": str(base),
            "datasets": [{"path": "/d.jsonl"}],
            "lora": {"r": 4, **lora},
            "quantization": quantization,
        }
    )
    choices = precision.decide(spec, basemodel.inspect(base), cpu())
    stored = Checkpoint(0, 0, "", {}, 0, None, (), None, has_chat_template=True, has_vision=True, is_pickled=False)
    plan = PlanFile({"parallel": asdict(Parallel()), "checkpoint": asdict(stored)})
    job: Any = SimpleNamespace(spec=spec, precision=choices, base_model_path=base, plan=plan, seed=0)
    model = transformers_backend.load_base(job, load_config(job))
    load.freeze(model, job)
    return transformers_backend.attach_adapter(model, job), job


@pytest.mark.parametrize(("family", "keys", "parts"), PARTS)
def test_the_keys_say_which_parts_get_an_adapter(
    base_of: Callable[[str], Path], family: str, keys: dict[str, bool], parts: set[str]
) -> None:
    model, job = loaded(base_of(family), **keys)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {modality.part(name) for name in names} == parts
    assert all("lora_" in name for name in names)
    # Unsloth gets the same layers, one by one.
    chosen = {name.partition(".lora_A")[0].removeprefix("base_model.model.") for name in names if ".lora_A" in name}
    plain = transformers_backend.load_base(job, load_config(job))
    pattern = transformers_backend.target_pattern(plain, transformers_backend.lora_options(plain, job))
    assert {name for name, _ in plain.named_modules() if re.fullmatch(pattern, name)} == chosen


def test_a_part_that_is_not_there_or_takes_no_adapter_is_refused_by_name(base_of: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"lora.finetune_audio_layers: .* has no such part"):
        loaded(base_of("llava"), finetune_audio_layers=True)
    with pytest.raises(ModelError, match=r"lora.finetune_projector: .* has no linear layer") as refused:
        loaded(base_of("gemma3"), finetune_projector=True)
    assert "lora.modules_to_save: [multi_modal_projector]" in str(refused.value.hint)
    with pytest.raises(ModelError, match=r"finetune_vision_layers: target_modules contains no layer .*: .*qkv"):
        loaded(base_of("qwen2_5_vl"), finetune_vision_layers=True, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ModelError, match=r"lora.modules_to_save: .* has no module 'lm_haed'") as refused:
        loaded(base_of("llava"), modules_to_save=["lm_haed"])
    assert "lm_head" in str(refused.value.hint)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantization_leaves_eyes_and_ears_alone(base_of: Callable[[str], Path], family: str) -> None:
    for quantization in ("4bit", "8bit"):
        model, _ = loaded(base_of(family), quantization)
        quantized = [name for name, each in model.named_parameters() if type(each).__name__ in _QUANTIZED]
        assert len(quantized) == 14
        assert {modality.part(name) for name in quantized} == {"language"}
        assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_eyes_that_unsloth_would_quantize_are_its_fault(base_of: Callable[[str], Path]) -> None:
    how = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "visual", "vision_tower"])
    model = AutoModelForImageTextToText.from_pretrained(base_of("idefics3"), quantization_config=how)
    with pytest.raises(BackendError, match=r"Unsloth has quantized the vision or audio encoder, .*vision_model"):
        unsloth_backend.check_senses(model)
    unsloth_backend.check_senses(loaded(base_of("idefics3"), "4bit")[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_eyes_are_not_gone_back_through(base_of: Callable[[str], Path], family: str) -> None:
    model, _ = loaded(base_of(family))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    reached = {}

    def note(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
            reached[name] = first.requires_grad

        return hook

    for name, kind in transformers_backend.roots(model.base_model.model).items():
        if kind in ("vision", "audio"):
            model.base_model.model.get_submodule(name).register_forward_hook(note(name))
    batch = one_batch(base_of(family), asked(family))
    model.train()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert reached
    assert not any(reached.values())
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if "image" in kind.media])
def test_an_images_tokens_are_estimated_as_the_processor_counts_them(
    base_of: Callable[[str], Path], family: str
) -> None:
    senses = basemodel.inspect(base_of(family)).senses
    processor = AutoProcessor.from_pretrained(base_of(family))
    without = len(processor.tokenizer(processor.apply_chat_template(question(()), tokenize=False))["input_ids"])
    for size in ((30, 30), (60, 90), (200, 100), (500, 500)):
        text = processor.apply_chat_template(question(("image",)), tokenize=False)
        counted = len(processor(text=[text], images=[Image.new("RGB", size)])["input_ids"][0]) - without
        assert 0 <= counted - senses.image(*size).tokens <= 4, size  # the signs before and after


def question(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    parts = [*({"type": kind} for kind in kinds), {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


def one_batch(base: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    processor = AutoProcessor.from_pretrained(base)
    media: dict[str, Any] = {}
    if "image" in kinds:
        media["images"] = [Image.new("RGB", (60, 40), "red")]
    if "audio" in kinds:
        media["audio"] = [torch.randn(SAMPLING_RATE).numpy()]
    text = processor.apply_chat_template(question(kinds), tokenize=False)
    batch = processor(text=[text], return_tensors="pt", **media)
    return {name: each.bfloat16() if each.is_floating_point() else each for name, each in batch.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_on_every_part_is_estimated_as_peft_builds_it(base_of: Callable[[str], Path], family: str) -> None:
    sees, hears = "image" in FAMILIES[family].media, "audio" in FAMILIES[family].media
    keys = {"finetune_vision_layers": sees, "finetune_audio_layers": hears, "finetune_projector": family != "gemma3"}
    model, job = loaded(base_of(family), **keys)
    estimated = parameter.trained(job.spec, basemodel.inspect(base_of(family))).num_parameters
    assert estimated == sum(each.numel() for each in model.parameters() if each.requires_grad)


def test_a_processor_that_wants_what_is_not_installed_says_so(base_of: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text(
        "import sys; assert sys.modules['torchvision'] is None  # which a worker of a text model hides\n"
        "from types import SimpleNamespace\n"
        "from honed.system.error import EnvironmentInvalidError\n"
        "from honed.worker.rows import processor\n"
        "job = SimpleNamespace(base_model_path=sys.argv[1], spec=SimpleNamespace(trust_remote_code=False))\n"
        "try: processor.load(job, None, None)\n"
        "except EnvironmentInvalidError as error: print(error.message)\n"
    )
    command = [sys.executable, str(tmp_path / "load.py"), str(base_of("qwen2_5_vl"))]
    said = warm.run(command, check=True, timeout=600, popen=warm.WorkerPopen).stdout
    assert "its processor cannot be loaded: Qwen2VLVideoProcessor requires the Torchvision library" in said
