"""Directories that are no base model or adapter: error messages that name their kind, and the model's real place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from honed.system.error import ModelError

#: First bytes of a file that git-lfs has not fetched yet.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: Entries of a directory that are listed, at most.
MAX_ENTRIES = 1000
MAX_NAMED = 3
#: Directories below it that are searched for a model's file.
MAX_BELOW = 50

_GGUF = ("GGUF, which is for inference", "name the directory of the checkpoint that it was made from")
_TORCH = (
    "torch's own format, which runs code when it is read",
    "name a directory with config.json and safetensors: load it where you trust it, and save_pretrained it",
)
#: File suffix → the file's kind, and the remedy.
_FILES = {
    ".gguf": _GGUF,
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".pkl"), _TORCH),
    ".onnx": ("ONNX, which is for inference", "name the directory of the checkpoint that it was made from"),
    ".npz": ("MLX's format", "name the checkpoint that it was converted from"),
    ".nemo": ("NeMo's format", "convert it to the Hugging Face form first"),
    **dict.fromkeys(
        (".zip", ".gz", ".tgz", ".tar", ".zst", ".7z"), ("an archive", "unpack it, and name the directory")
    ),
}


def refuse_file(path: Path, key: str) -> ModelError:
    """Return the refusal of a file given instead of a directory."""
    parent = path.parent
    marker = "adapter_config.json" if key == "adapter" else "config.json"
    if path.suffix in (".safetensors", ".json", ".bin") and (parent / marker).is_file():
        return ModelError(
            f"{key}: {path} is a file of a model",
            hint=f"name its directory: write {key}: {parent}",
            fix={key: str(parent)},
        )
    what, hint = _FILES.get(path.suffix.lower(), ("a file", f"name the directory with {marker} in it"))
    return ModelError(f"{key}: {path} is {'' if what.startswith('a ') else 'a file in '}{what}", hint=hint)


def refuse(path: Path, key: str = "base_model") -> ModelError | None:
    """Return the refusal of a directory without config.json (for an adapter: adapter_config.json); None if its kind is
    unknown."""
    is_adapter = key == "adapter"
    if not is_adapter and (path / "adapter_config.json").is_file():
        return _adapter(path, path, "an adapter (adapter_config.json, no config.json), not a base model")
    if is_adapter and (path / "config.json").is_file():
        return ModelError(
            f"{path}: a whole model (config.json, no adapter_config.json), not an adapter",
            hint=f"to train it, name it as base_model in place of an adapter: {path}",
        )
    if (path / "model_index.json").is_file():
        return ModelError(
            f"{path}: a model of images (diffusers: model_index.json)",
            hint="training such models is not supported yet: honed trains those that write text",
        )
    if found := _below(path, key):
        return found
    names = sorted(_names(path))
    if not names:
        return ModelError(f"{path}: the directory is empty", hint="copy or fetch the model there first")
    if is_adapter:
        return None
    if (path / "params.json").is_file() and any(name.startswith("consolidated") for name in names):
        return ModelError(
            f"{path}: weights in their maker's own format (params.json, consolidated.*)",
            hint="name the same model in the Hugging Face form, with config.json and safetensors",
        )
    below = (f"{name}/{each}" for name in names[:MAX_BELOW] for each in sorted(_names(path / name)))
    files = [*names, *(file for file in below if file.lower().endswith(".gguf"))]
    for suffix, (what, hint) in _FILES.items():
        if file := next((name for name in files if name.lower().endswith(suffix)), None):
            return ModelError(f"{path}: holds {file}, {what}, and no config.json", hint=hint)
    if any(name.endswith(".safetensors") for name in names):
        return ModelError(
            f"{path}: weights without a config.json, which says what they are of",
            hint="copy config.json and the tokenizer's files from where the model came from",
        )
    return None


def _below(path: Path, key: str) -> ModelError | None:
    """Return a refusal with the model's place if the directory is above it: a Trainer's output, a hub cache, or its
    parent."""
    children = [path / name for name in sorted(_names(path))]
    if found := _checkpoints(path, [each for each in children if re.fullmatch(r"checkpoint-\d+", each.name)], key):
        return found
    if snapshot := _snapshot(path):
        return _elsewhere(path, snapshot, key, "the cache of a model from the hub, not the model")
    cached = [each for each in children if each.name.startswith("models--") and each.is_dir()]
    if cached:
        snapshots = [each for each in map(_snapshot, cached) if each is not None]
        if len(snapshots) == 1:
            return _elsewhere(path, snapshots[0], key, "a cache of models from the hub")
        ids = [each.name.removeprefix("models--").replace("--", "/") for each in cached]
        return ModelError(f"{path}: a cache of models from the hub", hint=f"name one of them by its id: {_listed(ids)}")
    marker = "adapter_config.json" if key == "adapter" else "config.json"
    models = [each for each in children if (each / marker).is_file()]
    if len(models) == 1:
        return _elsewhere(path, models[0], key, "a directory with a model in it, not the model")
    if models:
        return ModelError(
            f"{path}: a directory with {len(models)} models in it",
            hint=f"name one: {_listed([str(each) for each in models])}",
        )
    return None


def _checkpoints(path: Path, found: list[Path], key: str) -> ModelError | None:
    """Return a refusal that names the newest checkpoint, if the directory is a Trainer's output."""
    newest_first = sorted(found, key=lambda each: -int(each.name.rpartition("-")[2]))
    for each in newest_first:
        names = _listed([each.name for each in newest_first])
        what = f"a Trainer's output, and the model lies in its checkpoints ({names})"
        if key == "adapter" and (each / "adapter_config.json").is_file():
            return _elsewhere(path, each, key, what)
        if (each / "config.json").is_file():
            return _elsewhere(path, each, key, what)
        if (each / "adapter_config.json").is_file():
            return _adapter(path, each, what.replace("the model lies", "an adapter lies"))
    return None


def _elsewhere(path: Path, real: Path, key: str, what: str) -> ModelError:
    return ModelError(f"{path}: {what}", hint=f"write {key}: {real}", fix={key: str(real)})


def _adapter(path: Path, adapter: Path, what: str) -> ModelError:
    """Return the refusal of an adapter given as base model; the adapter's own file names its base."""
    base = _json(adapter / "adapter_config.json").get("base_model_name_or_path")
    is_known = isinstance(base, str) and base and (base.startswith("/") or re.fullmatch(r"[\w.-]+/[\w.-]+", base))
    if is_known and base != str(path):
        hint = f"write adapter: {adapter} and base_model: {base}, which it was trained on, without lora:"
        return ModelError(f"{path}: {what}", hint=hint, fix={"base_model": base, "adapter": str(adapter), "lora": None})
    return ModelError(
        f"{path}: {what}", hint=f"name it as `adapter:` ({adapter}), and the model it was trained on as `base_model:`"
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
    found = [snapshots / name for name in _names(snapshots)]
    return found[0] if len(found) == 1 else None


def _names(path: Path) -> Iterator[str]:
    try:
        for number, entry in enumerate(path.iterdir()):
            if number >= MAX_ENTRIES:
                return
            if not entry.name.startswith("."):
                yield entry.name
    except OSError:
        return


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(1024 * 1024))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
