"""The weights of a checkpoint: what it restores is compared with what the model had when it was written.

    checkpoint-N/model.safetensors    full fine-tuning: the model's state, under its family's published names
    checkpoint-N/rest.safetensors     tensors that cannot be copied back from there, under the module's names
    checkpoint-N/TENSORS.json         the digest of each tensor that is restored, taken from the model's memory

transformers' Trainer reads a checkpoint with `load_state_dict(strict=False)`, by the module's names, and leaves what is
published otherwise (split experts, renamed parts of vision models) as it was. Here a stored tensor is copied into the
live model's memory where published.py finds it. An adapter's file is peft's; its digests are of all that is trained.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from honed.inputs.basemodel import DTYPES
from honed.system import quote
from honed.system.error import ModelError, PrecisionError
from honed.worker.model import published

WEIGHTS, REST, DIGESTS = "model.safetensors", "rest.safetensors", "TENSORS.json"
#: safetensors' name for a dtype.
_WORDS = {getattr(torch, name): word for word, (name, _) in DTYPES.items() if hasattr(torch, name)}


def write(directory: Path, model: Any) -> None:
    """Write a model's whole state, one tensor after another: at most one is copied to main memory at a time."""
    held = published.of(model)
    _write_file(directory / WEIGHTS, held.tensors)
    if held.rest:
        _write_file(directory / REST, held.rest)
    _write_digests(directory, {name: _digest(_bytes(tensor)) for name, tensor in published.state(model)})


def load(directory: Path, model: Any) -> None:
    """Load a model's whole state in place. Raises ModelError or PrecisionError, naming what does not match."""
    held = published.of(model)
    _copy(directory / WEIGHTS, held.tensors, skip=held.copies)
    if held.rest:
        _copy(directory / REST, held.rest)


def _write_file(path: Path, tensors: Mapping[str, Any]) -> None:
    # Larger elements first, so that each tensor lies at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in ordered.values():
            file.write(_bytes(tensor))


def _copy(path: Path, tensors: Mapping[str, Any], *, skip: Collection[str] = ()) -> None:
    """Copy a file's tensors into those of the model, of the same names."""
    from safetensors import safe_open

    directory = path.parent
    with safe_open(path, framework="pt") as file, torch.no_grad():
        _compare_names(directory, set(file.keys()), set(tensors))
        for name in tensors.keys() - skip:
            read, tensor = file.get_tensor(name), tensors[name]
            if read.dtype != tensor.dtype:
                raise PrecisionError(
                    f"{directory.name} has {name} in {read.dtype}, but it is trained in {tensor.dtype}",
                    hint=_hint(directory),
                )
            if read.shape != tensor.shape:
                raise ModelError(
                    f"{directory.name}: {name} has the shape {tuple(read.shape)} instead of {tuple(tensor.shape)}",
                    hint=_hint(directory),
                )
            tensor.copy_(read)


def write_digests(directory: Path, model: Any) -> None:
    """Write the digests of what is trained, beside an adapter's file."""
    _write_digests(directory, {name: _digest(_bytes(tensor)) for name, tensor in _trained(model)})


def check(directory: Path, model: Any) -> None:
    """Raise ModelError, naming the tensors, if a model that a checkpoint was loaded into is not the one it was of."""
    found = json.loads((directory / DIGESTS).read_bytes())
    held = dict(_trained(model) if _is_adapted(model) else published.state(model))
    _compare_names(directory, set(found), set(held))
    wrong = [name for name, tensor in held.items() if _digest(_bytes(tensor)) != found[name]]
    if wrong:
        raise ModelError(
            f"{directory.name}: after loading, {quote.first(wrong, 5)} differ from what the run had",
            hint=_hint(directory),
        )


def _compare_names(directory: Path, stored: set[str], held: set[str]) -> None:
    for names, what in ((held - stored, "has no weights for"), (stored - held, "has weights that have no place:")):
        if names:
            raise ModelError(f"{directory.name} {what} {quote.first(sorted(names), 5)}", hint=_hint(directory))


def _hint(directory: Path) -> str:
    return f"remove {directory} and requeue the job: it resumes from the checkpoint before, or starts again"


def _is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _trained(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, weight.detach()) for name, weight in model.named_parameters() if weight.requires_grad)


def _bytes(tensor: Any) -> memoryview:
    """Return a tensor's bytes in main memory, in the order of its elements."""
    return memoryview(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


def _digest(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _write_digests(directory: Path, digests: dict[str, str]) -> None:
    (directory / DIGESTS).write_text(json.dumps(digests, indent=0) + "\n", encoding="utf-8")
