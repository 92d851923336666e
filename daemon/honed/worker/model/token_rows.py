"""Single tokens whose vectors are trained beside an adapter (`trainable_token_indices`).

peft puts its own lookup and its own product in place of the embedding's and the head's. Families may do more in these
two, and peft ties a head by the config alone. So each is compared with the module that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from honed.system import quote
from honed.system.error import ModelError

#: Tokens in a message.
MAX_NAMED = 8
_MERGED = "train a new adapter: what this one was trained with is not the base model"
KEY = "lora.trainable_token_indices"


def check(model: Any, *, is_new: bool = True) -> None:
    """Raise ModelError if peft computes anything else than the model's own modules do with the trained vectors.

    `is_new`: the job makes the adapter, and does not continue one.
    """
    from peft.utils.other import TrainableTokensWrapper

    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, TrainableTokensWrapper)}
    if not wrappers:
        return
    base = model.get_base_model()
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if _is_tied(embedding, head) and len({isinstance(item, TrainableTokensWrapper) for item in (embedding, head)}) > 1:
        raise ModelError(
            f"{KEY}: the head shares the embedding's weights, and peft trains tokens of one of them alone",
            hint="remove it; modules_to_save trains an embedding in full" if is_new else _MERGED,
            fix={KEY: None} if is_new else {},
        )
    for name, wrapper in wrappers.items():
        if _differs(wrapper):
            raise ModelError(
                f"{KEY}: {name.removeprefix('base_model.model.')} computes more than peft's copy of it does "
                f"({type(wrapper.token_adapter.base_layer).__name__})",
                hint="remove it; modules_to_save trains an embedding in full" if is_new else _MERGED,
                fix={KEY: None} if is_new else {},
            )


def remarks(model: Any, lacking: Callable[[Sequence[int]], list[int]]) -> Iterator[str]:
    """Yield warnings about tokens of which little or nothing is learned.

    `lacking` returns those that occur in no training row.
    """
    if not hasattr(model, "peft_config"):
        return
    import torch
    from peft.utils.other import TrainableTokensWrapper

    for module in model.modules():
        if not isinstance(module, TrainableTokensWrapper):
            continue
        layer = module.token_adapter
        ids = layer.token_indices[layer.active_adapters[0]]
        if not isinstance(layer.base_layer, torch.nn.Embedding):
            continue
        if absent := lacking(ids):
            listed = quote.first([str(item) for item in sorted(absent)], MAX_NAMED)
            yield f"{KEY}: {len(absent)} of {len(ids)} tokens occur in no training row: {listed}"
        if layer.base_layer.padding_idx in ids:
            yield (
                f"{KEY}: {layer.base_layer.padding_idx} is the padding token of the embedding, which learns nothing "
                "about it from rows that contain it"
            )


def _is_tied(embedding: Any, head: Any) -> bool:
    plain = [getattr(item, "original_module", item) for item in (embedding, head) if item is not None]
    return len(plain) > 1 and getattr(plain[0], "weight", None) is getattr(plain[1], "weight", 0)


def _differs(wrapper: Any) -> bool:
    """Return whether a wrapped module's output is not that of the module with the trained vectors in its weight; a bias
    is left out even where it is zero as yet."""
    import torch
    from torch.func import functional_call

    layer = wrapper.token_adapter
    base, ids = layer.base_layer, layer.token_indices["default"]
    if getattr(base, "bias", None) is not None:
        return True
    if base.weight.is_meta:
        return False
    with torch.no_grad():
        weight = layer.get_merged_weights(["default"])
        if isinstance(base, torch.nn.Embedding):
            given = torch.tensor([[ids[0], 0]], device=weight.device)
        else:
            given = torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        expected = functional_call(base, {"weight": weight}, (given,))
        return not torch.allclose(wrapper(given), expected, rtol=1e-3, atol=1e-6)
