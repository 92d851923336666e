"""Directories that are no base model or adapter: error messages that name their kind, and the model's real place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from honed.system import durable, quote
from honed.system.error import ModelError

#: First bytes of a file that git-lfs has not fetched yet.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: Entries of a directory that are listed, at most.
MAX_ENTRIES = 1000
MAX_NAMED = 3
#: Directories below it that are searched for a model's file.
MAX_BELOW = 50

_GGUF = ("GGUF, which is for inference", "use the directory of the checkpoint that it was converted from")
_TORCH = (
    "torch's own format, which can run code when it is loaded",
    "use a directory with config.json and safetensors: load the model on a machine where you trust it, and save it "
    "with save_pretrained",
)
#: File suffix → the file's kind, and the remedy.
_FILES = {
    ".gguf": _GGUF,
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".pkl"), _TORCH),
    ".onnx": ("ONNX, which is for inference", "use the directory of the checkpoint that it was converted from"),
    ".npz": ("MLX's format", "use the checkpoint that it was converted from"),
    ".nemo": ("NeMo's format", "convert it to the Hugging Face format first"),
    **dict.fromkeys((".zip", ".gz", ".tgz", ".tar", ".zst", ".7z"), ("an archive", "unpack it, and use the directory")),
}


def refuse_file(path: Path, key: str) -> ModelError:
    """Return the refusal of a file given instead of a directory."""
    parent = path.parent
    marker = "adapter_config.json" if key == "adapter" else "config.json"
    if path.suffix in (".safetensors", ".json", ".bin") and (parent / marker).is_file():
        return ModelError(
            f"{key}: {path} is a file of a model, not its directory",
            hint=f"use its directory: write {key}: {parent}",
            fix={key: str(parent)},
        )
    what, hint = _FILES.get(path.suffix.lower(), ("a file", f"use the directory that contains {marker}"))
    return ModelError(f"{key}: {path} is {'' if what.startswith('a ') else 'a file in '}{what}", hint=hint)


def refuse(path: Path, key: str = "base_model") -> ModelError | None:
    """Return the refusal of a directory without config.json (for an adapter: adapter_config.json); None if its kind is
    unknown."""
    is_adapter = key == "adapter"
    if not is_adapter and (path / "adapter_config.json").is_file():
        return _adapter(path, path, "an adapter (adapter_config.json, no config.json), not a base model")
    if is_adapter and (path / "config.json").is_file():
        return ModelError(
            f"{path}: a full model (config.json, no adapter_config.json), not an adapter",
            hint=f"to train it, set it as base_model and remove adapter: {path}",
        )
    if (path / "model_index.json").is_file():
        return ModelError(
            f"{path}: an image generation model (diffusers: model_index.json)",
            hint="training such models is not supported: honed trains language models",
        )
    if meant := _below(path, key):
        return meant
    names = sorted(_names(path))
    if not names:
        return ModelError(f"{path}: the directory is empty", hint="copy or fetch the model there first")
    if is_adapter:
        return None
    if (path / "params.json").is_file() and any(name.startswith("consolidated") for name in names):
        return ModelError(
            f"{path}: weights in the vendor's own format (params.json, consolidated.*)",
            hint="use the same model in the Hugging Face format, with config.json",
        )
    below = (f"{name}/{item}" for name in names[:MAX_BELOW] for item in sorted(_names(path / name)))
    files = [*names, *(file for file in below if file.lower().endswith(".gguf"))]
    for suffix, (what, hint) in _FILES.items():
        if file := next((name for name in files if name.lower().endswith(suffix)), None):
            return ModelError(f"{path}: contains {file}, {what}, and no config.json", hint=hint)
    if any(name.endswith(".safetensors") for name in names):
        return ModelError(
            f"{path}: weights without a config.json, so the architecture is unknown",
            hint="copy config.json and the tokenizer's files from the model's source",
        )
    return None


def _below(path: Path, key: str) -> ModelError | None:
    """Return a refusal with the model's place if the directory is above it: a Trainer's output, a hub cache, or its
    parent."""
    children = [path / name for name in sorted(_names(path))]
    if found := _checkpoints(path, [child for child in children if re.fullmatch(r"checkpoint-\d+", child.name)], key):
        return found
    if snapshot := _snapshot(path):
        return _elsewhere(path, snapshot, key, "the hub cache of a model, not the model itself")
    cached = [child for child in children if child.name.startswith("models--") and child.is_dir()]
    if cached:
        snapshots = [item for item in map(_snapshot, cached) if item is not None]
        if len(snapshots) == 1:
            return _elsewhere(path, snapshots[0], key, "a hub cache of models")
        ids = [item.name.removeprefix("models--").replace("--", "/") for item in cached]
        return ModelError(f"{path}: a hub cache of models", hint=f"use one of their ids: {quote.first(ids, MAX_NAMED)}")
    marker = "adapter_config.json" if key == "adapter" else "config.json"
    models = [child for child in children if (child / marker).is_file()]
    if len(models) == 1:
        return _elsewhere(path, models[0], key, "a directory that contains a model, not the model itself")
    if models:
        return ModelError(
            f"{path}: a directory with {len(models)} models in it",
            hint=f"use one of them: {quote.first([str(model) for model in models], MAX_NAMED)}",
        )
    return None


def _checkpoints(path: Path, checkpoints: list[Path], key: str) -> ModelError | None:
    """Return a refusal that names the newest checkpoint, if the directory is a Trainer's output."""
    newest_first = sorted(checkpoints, key=lambda item: -int(item.name.rpartition("-")[2]))
    names = quote.first([item.name for item in newest_first], MAX_NAMED)
    what = f"a Trainer's output, with the model in its checkpoints ({names})"
    for item in newest_first:
        is_adapter = (item / "adapter_config.json").is_file()
        if (item / "config.json").is_file() or (key == "adapter" and is_adapter):
            return _elsewhere(path, item, key, what)
        if is_adapter:
            return _adapter(path, item, what.replace("the model", "an adapter"))
    return None


def _elsewhere(path: Path, real: Path, key: str, what: str) -> ModelError:
    return ModelError(f"{path}: {what}", hint=f"write {key}: {real}", fix={key: str(real)})


def _adapter(path: Path, adapter: Path, what: str) -> ModelError:
    """Return the refusal of an adapter given as base model; the adapter's own file names its base."""
    base = _json(adapter / "adapter_config.json").get("base_model_name_or_path")
    is_known = isinstance(base, str) and base and (base.startswith("/") or re.fullmatch(r"[\w.-]+/[\w.-]+", base))
    if is_known and base != str(path):
        hint = f"write adapter: {adapter} and base_model: {base} (the model it was trained on), and remove lora:"
        return ModelError(f"{path}: {what}", hint=hint, fix={"base_model": base, "adapter": str(adapter), "lora": None})
    return ModelError(
        f"{path}: {what}", hint=f"set `adapter:` to it ({adapter}), and `base_model:` to the model it was trained on"
    )


def _snapshot(path: Path) -> Path | None:
    """Return the snapshot in a model's directory of a hub cache: that of `main`, else the only one."""
    snapshots = path / "snapshots"
    if not snapshots.is_dir():
        return None
    reference = path / "refs/main"
    commit = reference.read_text(errors="replace").strip()[:64] if reference.is_file() else ""
    if re.fullmatch(r"[0-9a-f]+", commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    paths = [snapshots / name for name in _names(snapshots)]
    return paths[0] if len(paths) == 1 else None


def _names(path: Path) -> Iterator[str]:
    try:
        for number, entry in enumerate(path.iterdir()):
            if number >= MAX_ENTRIES:
                return
            if not entry.name.startswith("."):
                yield entry.name
    except OSError:
        return


def _json(path: Path) -> dict[str, Any]:
    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(1024 * 1024)

    return durable.json_object(read)
