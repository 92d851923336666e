"""TENSORS.json: digests of the tensors in a checkpoint's or an adapter's files, by file and name, taken from memory.

A file's hash shows that it is as it was written. It does not show that what was written, or what a loader made of it,
is what the model had. The digests do, at the speed of memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from honed.system import quote
from honed.system.error import ModelError

NAME = "TENSORS.json"
#: So many tensors may be copied to main memory at a time, to be hashed.
MAX_THREADS = 4
#: Names in a message, at most.
_MAX_NAMED = 5


def data(tensor: Any) -> memoryview:
    """Return a tensor's bytes in main memory, in the order of its elements."""
    return memoryview(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


def is_same(held: Any, stored: Any) -> bool:
    """Compare the bits of two tensors, in the dtype and on the device of the first. One without data is like any."""
    if held.device.type == "meta" or stored.device.type == "meta":
        return True
    return equal_bits(held, stored.to(held))


def equal_bits(one: Any, other: Any) -> bool:
    """Compare the bits of two tensors of one shape, dtype and device."""
    flat = [item.detach().contiguous().reshape(-1) for item in (one, other)]
    # torch compares as many elements in a second, whatever their size: bytes take six times as long.
    for word in (torch.int64, torch.int32, torch.int16):
        if all(_divides(item, word.itemsize) for item in flat):
            break
    else:
        word = torch.uint8
    return torch.equal(*(item.view(word) for item in flat))


def _divides(flat: Any, size: int) -> bool:
    """Return whether a flat tensor can be viewed as words of a size."""
    return bool(flat.nbytes % size == 0 and flat.storage_offset() * flat.element_size() % size == 0)


def digest(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of tensors, taken by a few threads at a time: the hash releases Python's lock."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return dict(zip(tensors, pool.map(lambda tensor: digest(data(tensor)), tensors.values()), strict=True))


def write(directory: Path, digests_by_part: Mapping[str, Mapping[str, str]]) -> None:
    """Write the digests of every file's tensors."""
    (directory / NAME).write_text(json.dumps(digests_by_part, indent=0) + "\n", encoding="utf-8")


def read(path: Path, *, hint: str) -> dict[str, str] | None:
    """Return the digests of a file's tensors; None where another program wrote the file."""
    try:
        return dict(json.loads((path.parent / NAME).read_bytes())[path.name])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path.parent / NAME} is damaged, or not of {path.name}", hint=hint) from error


def require(path: Path, *, hint: str) -> None:
    """Raise ModelError unless a file of tensors is there."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}", hint=hint)


def compare_names(what: Path | str, stored: set[str], held: set[str], *, hint: str) -> None:
    """Raise ModelError, naming them, for tensors that only the files or only the model have."""
    for names, words in ((held - stored, "has no weights for"), (stored - held, "has weights that have no place:")):
        if names:
            raise ModelError(f"{what} {words} {quote.first(sorted(names), _MAX_NAMED)}", hint=hint)


def compare(what: Path | str, wanted: Mapping[str, str], held: Mapping[str, Any], *, hint: str) -> None:
    """Raise ModelError, naming them, unless tensors have just the digests that were taken."""
    compare_names(what, set(wanted), set(held), hint=hint)
    if wrong := [name for name, actual in digests(held).items() if actual != wanted[name]]:
        named = quote.first(sorted(wrong), _MAX_NAMED)
        raise ModelError(f"{what}: after loading, {named} differ from what was saved", hint=hint)
