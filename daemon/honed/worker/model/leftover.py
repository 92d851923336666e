"""Tensors of a base model that transformers does not read, such as heads that predict several tokens (`mtp.*`).

The model in memory lacks them, so that a full fine-tuning would leave them out, though the output's config declares
them and other programs use them. They are copied from the base's files, byte for byte, into a file of their own:

    model.safetensors  ──►  model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, …index.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.system import quote
from honed.system.error import ModelError
from honed.worker.model import config_file, names

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Buffers that older versions stored, and that every load makes anew.
_REMADE = re.compile(r"inv_freq$|position_ids$|masked_bias$|attn\.bias$|attention\.bias$")
_FLOATS = ("F64", "F32", "F16", "BF16")
_CHUNK_BYTES = 16 * 1024**2
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    path: Path
    dtype: str  #: safetensors' name
    shape: tuple[int, ...]
    begin: int  #: offset in the file
    end: int


def files(directory: Path) -> list[Path]:
    """Return the files of weights that a checkpoint is loaded from."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if not (directory / INDEX).exists():
        return []
    index = json.loads((directory / INDEX).read_bytes())
    return [directory / name for name in sorted(set(index["weight_map"].values()))]


def stored(directory: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name, from the headers of its files; empty for pickled weights."""
    tensors: dict[str, Stored] = {}
    for path in files(directory):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        start = _LENGTH_BYTES + length
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
    return tensors


def complete(base_dir: Path, made: Path, model: Any) -> list[str]:
    """Copy what the model does not read from its base into an output; return the changes, for the model card.

    Where that cannot be done, as from pickled files or from quantized layers beside others, the output's config no
    longer declares such layers.
    """
    if config_file.is_part_of(base_dir, model.config):  # what it does not read belongs to the other parts
        return []
    base, have = stored(base_dir), stored(made)
    placed = names.read(model, base)
    unread = [name for name in base if placed.parameter(name) is None and name not in have and not _REMADE.search(name)]
    if not base or not all(base[name].dtype in _FLOATS for name in unread):
        return config_file.declare_no_drafts(made)
    if not unread:
        return []
    copy(base_dir, made, unread)
    return [f"{len(unread)} weights that transformers does not read are the base's own: {quote.first(unread, 2)}"]


def copy(base_dir: Path, made: Path, unread: Iterable[str]) -> None:
    """Copy tensors of the base into an output, in a further file of weights, and write the index anew."""
    tensors = stored(base_dir)
    wanted = {name: tensors[name] for name in sorted(unread)}
    have = stored(made)
    paths = files(made)
    number = len(paths) + 1
    places = {path: f"model-{index:05}-of-{number:05}.safetensors" for index, path in enumerate(paths, 1)}
    added = f"model-{number:05}-of-{number:05}.safetensors"
    _write(made / added, wanted)
    for path, name in places.items():
        path.rename(made / name)
    weight_map = {name: places[item.path] for name, item in have.items()} | dict.fromkeys(wanted, added)
    num_bytes = sum(item.end - item.begin for item in (*have.values(), *wanted.values()))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (made / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a safetensors file; the library would need all of its tensors in memory."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.end - tensor.begin
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for tensor in tensors.values():
            for chunk in chunks(tensor):
                file.write(chunk)


def chunks(tensor: Stored) -> Iterator[bytes]:
    """Yield a tensor's bytes."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ModelError(f"{tensor.path}: truncated", hint="copy the base model again")
            left -= len(chunk)
            yield chunk


def is_same(one: Stored, other: Stored) -> bool:
    """Return whether two tensors are the same, bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(chunks(one), chunks(other), strict=True))
