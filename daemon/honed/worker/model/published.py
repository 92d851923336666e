"""A live model's tensors under the names in which its family is published, as views of the model's own memory.

transformers converts names and shapes when it loads a checkpoint (experts are fused, parts of vision models renamed),
and back when it writes one. The way back, applied to the live model, mostly returns views of its memory: so it shows
where every stored tensor belongs, for writing, reading and comparing alike. A few families are converted by copies
(rotated heads, for instance): their tensors are named, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True)
class Published:
    """A model's persistent state, converted."""

    tensors: dict[str, Any]  #: by published name; ends of a tie, which are one tensor, are there once
    copies: frozenset[str]  #: of these, those that are no views of the model's memory
    rest: dict[str, Any]  #: the model's own tensors, by module name, that the views do not wholly cover


class _Views(TorchFunctionMode):
    """Leave parts of a tensor where they are: transformers copies every part of fused experts, for its layout alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def of(model: Any) -> Published:
    """Return a model's state under its published names; nothing is copied where the conversion renames and cuts."""
    return convert(model, dict(state(model)))


def convert(model: Any, held: Mapping[str, Any]) -> Published:
    """Convert tensors of a model, by module name."""
    tensors = renamed(model, held)
    whole, covered = Counter[int](), Counter[int]()
    for tensor in held.values():
        whole[_storage(tensor)] += tensor.numel()
    copies = frozenset(name for name, tensor in tensors.items() if _storage(tensor) not in whole)
    for name in tensors.keys() - copies:
        covered[_storage(tensors[name])] += tensors[name].numel()
    rest = {name: item for name, item in held.items() if covered[_storage(item)] < whole[_storage(item)]}
    return Published(tensors, copies, rest)


def renamed(model: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """Convert tensors of a model, by module name, without looking at what became of them."""
    if getattr(model, "_weight_conversions", None) == []:  # none was used in its load
        return dict(held)
    with _Views():
        return dict(revert_weight_conversion(model, dict(held)))


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def state(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's parameters and persistent buffers, each once: the ends of a tie are one tensor."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in itertools.chain(model.named_parameters(), buffers(model)):
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        yield name, tensor.detach()


def buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers that belong to a model's state."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)
