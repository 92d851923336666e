"""A model that is divided between ranks (torch's FSDP2): every rank holds a part of every weight.

    every layer    one group: whole from just before its forward or backward pass until just after it
    the rest      embeddings, norms, head: one group, whole from the begin of a forward pass to the end of a backward

Weights, gradients and optimizer states are parts along the first dimension. The arithmetic is that of a whole model:
under the trainer's autocast, where the plan has one. FSDP's own mixed precision, which rounds norms and biases, too,
is not used. All ranks make the same calls in the same order; `whole` and `part_of` are what others need to know of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from honed.system.error import ModelError

#: Advice for a model that cannot be divided.
_WHOLE = "use parallel: ddp, or a GPU with more memory for one that fits"
#: The name under which a part keeps the class that bitsandbytes gave to the weight.
_CLASS = "honed_class"


def divide(model: Any, device: Any) -> None:
    """Divide a model in place between all ranks, layer by layer. Raises ModelError for one that cannot be.

    A model in main memory reaches the device in parts, and no more than one layer is whole on it at a time.
    """
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    layers = _layers(model)
    _check(model, layers)
    kinds = {name: type(weight).__name__ for name, weight in model.named_parameters()}
    mesh = init_device_mesh(torch.device(device).type, (distributed.get_world_size(),))
    for layer in reversed(layers):  # those within others first
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name, weight in model.named_parameters():
        setattr(weight, _CLASS, kinds[name])
    register_fsdp_forward_method(model, "generate")


def _layers(model: Any) -> list[Any]:
    """Return the modules that transformers itself never splits between devices, the outer ones first."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names and module is not base]
    return [module for module in layers if any(True for _ in module.parameters())]


def _check(model: Any, layers: list[Any]) -> None:
    """Raise ModelError for weights that FSDP2 cannot divide; torch would say so in the first forward pass."""
    if not layers:
        raise ModelError(f"parallel: fsdp: {type(model).__name__} has no layers that transformers names", hint=_WHOLE)
    numbers = [name for name, weight in model.named_parameters() if weight.dim() == 0]
    if numbers:
        raise ModelError(f"parallel: fsdp cannot divide {numbers[0]}, which is a single number", hint=_WHOLE)
    owners: dict[int, set[str]] = {}
    within = {id(module): str(number) for number, layer in enumerate(layers) for module in layer.modules()}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                owners.setdefault(id(weight), set()).add(within.get(id(module), ""))
    if any(len(names) > 1 for names in owners.values()):
        raise ModelError("parallel: fsdp cannot divide a model whose layers share weights", hint=_WHOLE)
    dtypes = Counter(str(weight.dtype) for weight in model.parameters() if weight.requires_grad)
    if len(dtypes) > 1:
        counts = ", ".join(f"{number} weights in {dtype}" for dtype, number in dtypes.items())
        raise ModelError(f"parallel: fsdp needs one dtype for all trained weights, but there are {counts}", hint=_WHOLE)
    for weight in model.parameters():
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()


def is_divided(model: Any) -> bool:
    return any(is_part(weight) for weight in model.parameters())


def part_of(tensor: Any) -> Any:
    """Return this rank's part of a divided tensor; any other is returned as it is."""
    return tensor.to_local() if is_part(tensor) else tensor


def gathered(tensor: Any) -> Any:
    """Return a divided tensor whole, from all ranks; any other is returned as it is."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def class_of(weight: Any) -> str:
    """Return the name of a weight's class, for a part that of the whole weight."""
    return str(getattr(weight, _CLASS, None) or type(weight).__name__)


def is_part(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor"  # a worker of one rank has not imported it


def _is_group(module: Any) -> bool:
    return any(item.__name__ == "FSDPModule" for item in type(module).__mro__)


def reshard(model: Any) -> None:
    """Give back what a forward pass without a backward pass has left whole: every weight is a part again."""
    for module in model.modules():
        if _is_group(module):
            module.reshard()


def as_whole(part: Any, tensor: Any) -> Any:
    """Return a divided tensor of the same kind as `part`, from this rank's part of it."""
    from torch.distributed.tensor import DTensor

    if not is_part(part):
        return tensor
    own, mesh, shape, stride = tensor.to(part.device), part.device_mesh, part.shape, part.stride()
    return DTensor.from_local(own, mesh, part.placements, run_check=False, shape=shape, stride=stride)


@contextlib.contextmanager
def whole(model: Any, *, is_zero: bool) -> Iterator[bool]:
    """Have rank 0 hold what will be saved whole, in main memory, and yield True there; the parts are back afterwards.

    Beside an adapter that is what was trained and the embeddings, which peft saves with some; else every weight. A
    model that is not divided is yielded as it is, on any rank.
    """
    import torch

    if not is_divided(model):
        yield True
        return
    reshard(model)
    is_adapter = hasattr(model, "peft_config")
    ends = [item for item in (model.get_input_embeddings(), model.get_output_embeddings()) if item is not None]
    embeddings = {module for end in ends for module in end.modules()}
    kept: list[tuple[Any, str, Any]] = []
    made: dict[int, Any] = {}  # a weight that two modules share stays one
    try:
        for module in model.modules():
            for name, part in list(module._parameters.items()):
                if part is None or not is_part(part):
                    continue
                if is_adapter and not part.requires_grad and module not in embeddings:
                    continue
                if id(part) not in made:
                    full = part.detach().full_tensor()  # from all ranks
                    made[id(part)] = torch.nn.Parameter(full.cpu(), part.requires_grad) if is_zero else None
                    del full
                if is_zero:
                    kept.append((module, name, part))
                    module._parameters[name] = made[id(part)]
        yield is_zero
    finally:
        for module, name, part in kept:
            module._parameters[name] = part


@contextlib.contextmanager
def cast_in_use(model: Any, dtypes: Mapping[int, Callable[[Any], Any]]) -> Iterator[None]:
    """Have every group of weights be cast once it is whole, without gradients; `dtypes`: by the id of the part."""
    import torch

    reshard(model)
    casts = {
        (id(module), name): dtypes[id(part)]
        for module in model.modules()
        for name, part in module._parameters.items()
        if part is not None and id(part) in dtypes
    }
    groups = {module for module in model.modules() if _is_group(module)}

    def managed(root: Any) -> Iterator[Any]:
        yield root
        for child in root.children():
            if child not in groups:
                yield from managed(child)

    def hook(root: Any, _arguments: Any) -> None:
        made: dict[int, Any] = {}
        for module in managed(root):
            for name, weight in module._parameters.items():
                if weight is not None and (cast := casts.get((id(module), name))) is not None:
                    if id(weight) not in made:
                        made[id(weight)] = torch.nn.Parameter(cast(weight.detach()), requires_grad=False)
                    module._parameters[name] = made[id(weight)]

    handles = [group.register_forward_pre_hook(hook) for group in groups]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        reshard(model)
