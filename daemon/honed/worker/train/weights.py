"""The weights of a checkpoint: what it restores is compared with what the model had when it was written.

    checkpoint-N/model.safetensors    full fine-tuning: the model's state, under its family's published names
    checkpoint-N/rest.safetensors     tensors that cannot be copied back from there, under the module's names
    checkpoint-N/TENSORS.json         the digest of each of these tensors (model/tensorfile.py)

transformers' Trainer reads a checkpoint with `load_state_dict(strict=False)`, by the module's names, and leaves what is
published otherwise (split experts, renamed parts of vision models) as it was. Here a stored tensor is copied into the
live model's memory where published.py finds it. Adapters are read and written by model/adapter.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from honed.inputs.basemodel import DTYPES
from honed.system.error import ModelError, PrecisionError
from honed.worker.model import published, tensorfile

WEIGHTS, REST = "model.safetensors", "rest.safetensors"
#: safetensors' name for a dtype.
_WORDS = {getattr(torch, name): word for word, (name, _) in DTYPES.items() if hasattr(torch, name)}


def write(directory: Path, model: Any) -> None:
    """Write a model's whole state, one tensor after another: at most one is copied to main memory at a time."""
    held = published.of(model)
    digests = {WEIGHTS: _write_file(directory / WEIGHTS, held.tensors)}
    if held.rest:
        digests[REST] = _write_file(directory / REST, held.rest)
    tensorfile.write(directory, digests)


def load(directory: Path, model: Any) -> None:
    """Load a model's whole state in place. Raises ModelError or PrecisionError, naming what does not match."""
    held = published.of(model)
    _copy(directory / WEIGHTS, held.tensors, skip=held.copies)
    if held.rest:
        _copy(directory / REST, held.rest)
    check(directory, model)  # once all are copied: two names could be of one place


def check(directory: Path, model: Any) -> None:
    """Raise ModelError, naming the tensors, where a model is not what it was when a checkpoint of it was written."""
    held = published.of(model)
    _check(directory / WEIGHTS, held.tensors)
    if held.rest:
        _check(directory / REST, held.rest)


def hint(directory: Path) -> str:
    """Return the remedy for a checkpoint that is not what it was."""
    return f"remove {directory} and requeue the job: it resumes from the checkpoint before, or starts again"


def _write_file(path: Path, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Write a file of tensors; return their digests, taken of the same bytes meanwhile."""
    # Larger elements first, so that every tensor lies at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    digests: dict[str, str] = {}
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, tensor in ordered.items():
            data = tensorfile.data(tensor)
            digest = pool.submit(tensorfile.digest, data)
            file.write(data)
            digests[name] = digest.result()
    return digests


def _copy(path: Path, tensors: Mapping[str, Any], *, skip: Collection[str] = ()) -> None:
    """Copy a file's tensors into those of the model, of the same names."""
    from safetensors import safe_open

    directory = path.parent
    tensorfile.require(path, hint=hint(directory))
    with safe_open(path, framework="pt") as file, torch.no_grad():
        tensorfile.compare_names(directory.name, set(file.keys()), set(tensors), hint=hint(directory))
        for name in tensors.keys() - skip:
            read, tensor = file.get_tensor(name), tensors[name]
            if read.dtype != tensor.dtype:
                raise PrecisionError(
                    f"{directory.name} has {name} in {read.dtype}, but it is trained in {tensor.dtype}",
                    hint=hint(directory),
                )
            if read.shape != tensor.shape:
                raise ModelError(
                    f"{directory.name}: {name} has the shape {tuple(read.shape)} instead of {tuple(tensor.shape)}",
                    hint=hint(directory),
                )
            tensor.copy_(read)


def _check(path: Path, tensors: Mapping[str, Any]) -> None:
    digests = tensorfile.read(path, hint=hint(path.parent))
    if digests is None:
        raise ModelError(f"{path.parent} has no {tensorfile.NAME}", hint=hint(path.parent))
    tensorfile.compare(path.parent.name, digests, tensors, hint=hint(path.parent))
