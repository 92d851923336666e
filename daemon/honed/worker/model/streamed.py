"""Models that compute from their files: a layer's weights are read when it is called, and dropped when it has returned.

So a model takes the memory of one layer and of what is in none: embeddings, head, norms.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.worker.model import names
from honed.worker.model.stored import Base


@dataclass
class Streamed:
    """A model with placeholders of NaN for its weights, and the places of these weights in its files."""

    model: Any
    base: Base
    beat: Callable[[], None]  #: called before every layer; may raise, to stop
    step: float = 0.0  #: weights are moved up or down by it, relative to their size, at random

    def __post_init__(self) -> None:
        self._ties: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        self._places = names.read(self.model, self.base.tensors)
        self._stored = {parameter: name for name, parameter in self._places.whole.items()}
        shapes = {name: tensor.shape for name, tensor in self.base.tensors.items()}
        self._first = {
            item: first for first, made in self._places.built(shapes, self.model).items() for item in made
        }  #: of every parameter that is built with others
        self._names: dict[int, str] = {}
        self._dtypes: dict[str, Any] = {}
        self._layers = _layers(self.model)
        self._hollow()
        held = dict(self.model.named_buffers())
        for name, parameter in self._places.whole.items():
            if parameter in held:
                held[parameter].copy_(self.base.read(name))

    def _hollow(self) -> None:
        import torch

        placeholders: dict[int, Any] = {}
        for prefix, module in self.model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{leaf}" if prefix else leaf
                if id(parameter) not in placeholders:
                    nothing = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
                    placeholders[id(parameter)] = placeholder = torch.nn.Parameter(nothing, requires_grad=False)
                    self._names[id(placeholder)] = name
                    self._dtypes[name] = parameter.dtype
                module.register_parameter(leaf, placeholders[id(parameter)])
        self._kept = list(placeholders.values())  # an id is one of what lives

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest layer, and of what is in none."""
        sizes = {id(item): item.numel() * item.element_size() for item in self._kept}
        layers = [{id(parameter) for parameter in layer.parameters()} for layer in self._layers]
        rest = sizes.keys() - set().union(*layers)
        return max((sum(map(sizes.__getitem__, ids)) for ids in layers), default=0) + sum(map(sizes.__getitem__, rest))

    @contextlib.contextmanager
    def streaming(self, wrapped: Any) -> Iterator[None]:
        """Let the model, or it in the adapter that wraps it now, compute."""
        hooks = []
        within: set[int] = set()
        for layer in self._layers:
            slots = self._slots(layer)
            within |= {id(module) for module in layer.modules()}
            hooks.append(layer.register_forward_pre_hook(lambda _layer, _given, slots=slots: self._enter(slots)))
            hooks.append(layer.register_forward_hook(lambda _layer, _given, _made, slots=slots: _leave(slots)))
        rest = [slot for slot in self._slots(wrapped) if id(slot[0]) not in within]
        try:
            self._enter(rest)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            _leave(rest)

    def _slots(self, module: Any) -> list[tuple[Any, str, Any]]:
        """Return where a module and those in it have the placeholders."""
        return [
            (item, leaf, parameter)
            for item in module.modules()
            for leaf, parameter in item.named_parameters(recurse=False)
            if id(parameter) in self._names
        ]

    def _enter(self, slots: list[tuple[Any, str, Any]]) -> None:
        import torch

        self.beat()
        filled: dict[int, Any] = {}
        made: dict[str, dict[str, Any]] = {}
        for module, leaf, placeholder in slots:
            if id(placeholder) not in filled:
                value = self._read(self._names[id(placeholder)], made)
                filled[id(placeholder)] = torch.nn.Parameter(value, requires_grad=False)
            module._parameters[leaf] = filled[id(placeholder)]

    def _read(self, name: str, made: dict[str, dict[str, Any]]) -> Any:
        """Read a parameter; `made` has those that were built with others. Raises KeyError if it is not stored."""
        source = self._ties.get(name, name)
        alike = [name, source, *(target for target, other in self._ties.items() if other == source)]
        stored = next((item for item in alike if item in self._stored or item in self._first), name)
        if stored in self._stored:
            value = self.base.read(self._stored[stored])
        else:
            first = self._first[stored]
            if first not in made:
                made[first] = self._places.groups[first].convert(first, self.base.read, self.model)
            value = made[first].pop(stored)
        return self._moved(value.to(self._dtypes[name]), name)

    def _moved(self, value: Any, name: str) -> Any:
        import torch

        if not self.step or not value.is_floating_point():
            return value
        source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        factors = torch.empty_like(value).bernoulli_(0.5, generator=source)
        return factors.mul_(2 * self.step).add_(1 - self.step).mul_(value)


def _leave(slots: list[tuple[Any, str, Any]]) -> None:
    for module, leaf, placeholder in slots:
        module._parameters[leaf] = placeholder


def _layers(model: Any) -> list[Any]:
    """Return the modules in the outermost lists of modules, each once."""
    import torch

    layers: dict[int, Any] = {}
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{item}.") for item in lists):
            lists.append(name)
            layers |= {id(item): item for item in module}
    return list(layers.values())


@contextlib.contextmanager
def opened(
    directory: Path,
    config: Any,
    dtype: str,
    *,
    attn_implementation: str | None,
    trust_remote_code: bool,
    beat: Callable[[], None],
) -> Iterator[Streamed]:
    """Open a model's files, and yield it without weights. Its buffers are as a load makes them."""
    import torch
    from accelerate import init_empty_weights

    from honed.worker.model.config import model_class

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with init_empty_weights(include_buffers=False):
        model = model_class(config).from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, **attention
        )
    base = Base(directory, str(config.model_type))
    with base.opened():
        yield Streamed(model.eval(), base, beat)
