"""Paths that lie where a model should: each is reported as what it is, with the model's path where that is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.inputs import basemodel
from honed.system.error import ModelError

CONFIG = {"config.json": '{"model_type": "llama"}'}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
HASH = "0123456789abcdef0123456789abcdef01234567"


def make(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def model(*places: str) -> dict[str, str]:
    return {f"{place}/config.json": CONFIG["config.json"] for place in places}


def adapter(place: str, base: str | None) -> dict[str, str]:
    return {f"{place}/adapter_config.json": json.dumps({"base_model_name_or_path": base, "r": 8})}


@pytest.mark.parametrize(
    ("files", "place", "said", "hint", "fix"),
    [
        ({"m/model.Q4_K_M.gguf": "GGUF"}, "m", "GGUF, which is for inference", "it was converted from", {}),
        ({"m.gguf": "GGUF"}, "m.gguf", "a file in GGUF", "it was converted from", {}),
        ({"m/model_index.json": "{}", "m/unet/config.json": "{}"}, "m", "diffusers", "not supported", {}),
        (
            model("m/checkpoint-500", "m/checkpoint-1000"),
            "m",
            "a Trainer's output",
            "checkpoint-1000",
            {"base_model": "m/checkpoint-1000"},
        ),
        (
            adapter("m/checkpoint-500", "org/base"),
            "m",
            "with an adapter in its checkpoints",
            "base_model: org/base",
            {"base_model": "org/base", "adapter": "m/checkpoint-500", "lora": None},
        ),
        (
            {f"m/snapshots/{HASH}/config.json": "{}", f"m/snapshots/{'f' * 40}/config.json": "{}", "m/refs/main": HASH},
            "m",
            "the hub cache of a model",
            HASH,
            {"base_model": f"m/snapshots/{HASH}"},
        ),
        (
            {f"m/snapshots/{HASH}/config.json": "{}"},
            "m",
            "the hub cache of a model",
            HASH,
            {"base_model": f"m/snapshots/{HASH}"},
        ),
        (
            {f"hub/models--a--b/snapshots/{HASH}/config.json": "{}"},
            "hub",
            "a hub cache of models",
            HASH,
            {"base_model": f"hub/models--a--b/snapshots/{HASH}"},
        ),
        (
            {f"hub/models--a--{n}/snapshots/{HASH}/config.json": "{}" for n in "bc"},
            "hub",
            "a hub cache of models",
            "a/b, a/c",
            {},
        ),
        (
            adapter("m", "/srv/models/base"),
            "m",
            "an adapter (adapter_config.json",
            "base_model: /srv/models/base",
            {"base_model": "/srv/models/base", "adapter": "m", "lora": None},
        ),
        (adapter("m", None), "m", "an adapter (adapter_config.json", "set `adapter:`", {}),
        (model("m/qwen"), "m", "a directory that contains a model", "m/qwen", {"base_model": "m/qwen"}),
        (model("m/qwen", "m/llama"), "m", "2 models in it", "use one of them", {}),
        (
            {"m/config.json": "{}", "m/model.safetensors": "x"},
            "m/model.safetensors",
            "a file of a model",
            "its directory",
            {"base_model": "m"},
        ),
        ({"m/pytorch_model.pt": "x"}, "m", "torch's own format", "safetensors", {}),
        ({"m.pth": "x"}, "m.pth", "a file in torch's own format", "safetensors", {}),
        (
            {"m/params.json": "{}", "m/consolidated.00.pth": "x"},
            "m",
            "the vendor's own format",
            "Hugging Face format",
            {},
        ),
        ({"m/model.onnx": "x"}, "m", "ONNX", "it was converted from", {}),
        ({"m/weights.npz": "x"}, "m", "MLX's format", "converted from", {}),
        ({"m.zip": "x"}, "m.zip", "an archive", "unpack it", {}),
        ({"m/.hidden": "x"}, "m", "the directory is empty", "copy or fetch", {}),
        (
            {"m/model.safetensors": "x", "m/tokenizer.json": "{}"},
            "m",
            "weights without a config.json",
            "config.json",
            {},
        ),
        ({"m/config.json": LFS}, "m", "a Git LFS pointer", "lfs pull", {}),
        (
            {"m/config.json": CONFIG["config.json"], "m/model.safetensors": LFS},
            "m",
            "a Git LFS pointer",
            "lfs pull",
            {},
        ),
        (
            {"m/README.md": "x", "m/gguf/it-Q4_K_M.gguf": "x"},
            "m",
            "contains gguf/it-Q4_K_M.gguf, GGUF",
            "converted from",
            {},
        ),
        ({"m/readme.txt": "x"}, "m", "config.json: no such file", "save_pretrained", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_base_model_is_named_and_the_model_with_it(
    tmp_path: Path, files: dict[str, str], place: str, said: str, hint: str, fix: dict[str, str | None]
) -> None:
    make(tmp_path, files)
    with pytest.raises(ModelError) as caught:
        basemodel.inspect(tmp_path / place)
    assert said in caught.value.message
    assert hint in caught.value.hint
    in_place: Callable[[str | None], str | None] = lambda value: (  # noqa: E731
        str(tmp_path / value) if value is not None and (tmp_path / value).exists() else value
    )
    assert caught.value.fix == {key: in_place(value) for key, value in fix.items()}


@pytest.mark.parametrize(
    ("files", "said", "fix"),
    [
        (
            adapter("m/checkpoint-20", "org/base") | adapter("m/checkpoint-3", "org/base"),
            "a Trainer's output",
            {"adapter": "m/checkpoint-20"},
        ),
        (model("m"), "a full model", {}),
        (adapter("m/mine", "org/base"), "a directory that contains a model", {"adapter": "m/mine"}),
        ({}, "the directory is empty", {}),
    ],
)
def test_what_is_no_adapter_is_named_too(tmp_path: Path, files: dict[str, str], said: str, fix: dict[str, str]) -> None:
    (tmp_path / "m").mkdir()
    make(tmp_path, files)
    with pytest.raises(ModelError, match=said) as caught:
        basemodel.inspect_adapter(tmp_path / "m")
    assert caught.value.fix == {key: str(tmp_path / value) for key, value in fix.items()}


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    shards = {f"w{n}": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    make(tmp_path, {**CONFIG, "model.safetensors.index.json": json.dumps({"weight_map": shards})})
    with pytest.raises(ModelError, match=r"00001-of-00003.*missing \(3 of 3 are missing\)"):
        basemodel.inspect(tmp_path)
