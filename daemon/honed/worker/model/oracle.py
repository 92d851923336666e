"""A second computation of what a merge writes: base plus delta, by the papers' formulas, without peft's merge.

    LoRA              W + s·B·A, with s = alpha / r, or alpha / sqrt(r) for rsLoRA; biases b + s·b_B
    DoRA              m · V / |V|, with V = W + s·B·A, and the norm of every output's row
    stacked experts   the same for every expert's matrix
    trained tokens    their rows in place of the base's
    saved modules     the adapter's own tensors

Every number that is written is compared with it, rounded to the same dtype; at the end every tensor of the adapter must
have been used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from honed.system import quote
from honed.system.error import ModelError

#: Numbers of a block that is compared at once.
MAX_BLOCK = 16 * 1024**2
#: Share of numbers in half precision that may be rounded to the other neighbor: sums differ in their last bits.
MAX_FLIPPED = 0.005
#: Difference that float32 may have, in parts of the largest number of a block.
MAX_ROUNDING = 4e-6
BUG = "this is a bug: please report it; the adapter is kept where a training made it"

#: Places in a tensor, and what is expected there.
Blocks = Iterator[tuple[Any, Any]]


class Oracle:
    """The expected tensors of one merge."""

    def __init__(self, model: Any, is_used: Callable[[Any], bool], *, is_rslora: bool) -> None:
        """`is_used` is true for the parameters that come from the adapter."""
        self._is_rslora = is_rslora
        self._left = {id(parameter): name for name, parameter in model.named_parameters() if is_used(parameter)}

    def check(self, name: str, written: Any, blocks: Blocks) -> None:
        """Raise ModelError if a tensor in its output's dtype is not the expected one."""
        for block, expected in blocks:
            if (fault := _difference(written[block], expected)) is not None:
                raise ModelError(f"{name}: the merged tensor is not base plus adapter: {fault}", hint=BUG)

    def check_all_used(self) -> None:
        """Raise ModelError if a tensor of the adapter is in none of those that were compared."""
        if self._left:
            names = quote.first(sorted(self._left.values()), 3)
            raise ModelError(f"the merged model lacks what the adapter trained: {names}", hint=BUG)

    def trained(self, parameter: Any) -> Blocks:
        """Yield a tensor that the adapter replaces as a whole."""
        yield ..., self._take(parameter)  # a buffer may be one number

    def wrapped(self, part: Any, leaf: str, start: Callable[[], Any]) -> Blocks:
        """Yield the expected tensor of a layer in blocks; `start` reads what the training began with."""
        from peft.tuners.lora import layer as lora
        from peft.utils.other import TrainableTokensWrapper

        self._take_loaded(part, leaf)
        if isinstance(part, TrainableTokensWrapper):
            yield slice(None), self._tokens(part, start().float())
        elif isinstance(part, lora.Embedding):
            yield from self._embedding(part, start())
        elif leaf == "bias":
            added = part.lora_B["default"].bias
            yield slice(None), start().float() + (0 if added is None else self._scale(part) * self._take(added))
        elif isinstance(part, lora.ParamWrapper) and part.num_experts > 1:
            yield from self._experts(part, start())
        else:
            yield from self._matrix(part, start())

    def _take_loaded(self, part: Any, leaf: str) -> None:
        """Note that the base's own tensor, which peft saves beside some adapters, is used as the start."""
        if hasattr(part, "get_base_layer") and (loaded := getattr(part.get_base_layer(), leaf, None)) is not None:
            self._left.pop(id(loaded), None)

    def _take(self, parameter: Any) -> Any:
        self._left.pop(id(parameter), None)
        return parameter.detach().float()

    def _scale(self, part: Any) -> float:
        alpha, rank = part.lora_alpha["default"], part.r["default"]
        return float(alpha / rank**0.5 if self._is_rslora else alpha / rank)

    def _tokens(self, part: Any, weight: Any) -> Any:
        layer = part.token_adapter
        weight = weight.clone()
        weight[layer.token_indices["default"]] = self._take(layer.trainable_tokens_delta["default"])
        return weight

    def _embedding(self, part: Any, weight: Any) -> Blocks:
        scale = self._scale(part)
        first, second = self._take(part.lora_embedding_A["default"]), self._take(part.lora_embedding_B["default"])
        if "default" in part.lora_magnitude_vector:
            whole = weight.float() + scale * (first.T @ second.T)
            yield slice(None), whole / whole.norm(dim=0) * self._take(part.lora_magnitude_vector["default"].weight)
            return
        for rows in _blocks(weight):
            yield rows, weight[rows].float() + scale * (first[:, rows].T @ second.T)

    def _matrix(self, part: Any, weight: Any) -> Blocks:
        """Yield a linear layer's weight, or a convolution's as the matrix that it is."""
        scale, is_turned = self._scale(part), bool(getattr(part, "fan_in_fan_out", False))
        first, second = (self._take(item["default"].weight).flatten(1) for item in (part.lora_A, part.lora_B))
        magnitude = None
        if "default" in part.lora_magnitude_vector:
            magnitude = self._take(part.lora_magnitude_vector["default"].weight).flatten()
        if is_turned or second.shape[0] != weight.shape[0]:
            weight = weight.T
        for rows in _blocks(weight):
            block = weight[rows].float().flatten(1) + scale * (second[rows] @ first)
            if magnitude is not None:
                block *= (magnitude[rows] / block.norm(dim=1))[:, None]
            if weight.dim() == 2 and weight.stride(0) == 1 and is_turned:
                yield (slice(None), rows), block.T
            else:
                yield rows, block.reshape(weight[rows].shape)

    def _experts(self, part: Any, weight: Any) -> Blocks:
        """Yield the matrices of stacked experts one by one: A is stacked by expert, B has an expert's columns apart."""
        number, scale = part.num_experts, self._scale(part)
        first, second = (self._take(item["default"].weight) for item in (part.lora_A, part.lora_B))
        rank = first.shape[0] // number
        for expert in range(number):
            delta = scale * (second[:, expert::number] @ first[expert * rank : (expert + 1) * rank])
            block = weight[expert].float()
            yield slice(expert, expert + 1), (block + (delta if part._did_swap_in_out_features else delta.T))[None]


def _blocks(weight: Any) -> Iterator[slice]:
    size = max(1, MAX_BLOCK // max(1, weight[0].numel()))
    for begin in range(0, weight.shape[0], size):
        yield slice(begin, begin + size)


def _difference(written: Any, expected: Any) -> str | None:
    """Say how two tensors differ by more than rounding; None if they do not."""
    import torch

    if written.shape != expected.shape:
        return f"its shape is {list(written.shape)}, not {list(expected.shape)}"
    if not expected.numel():
        return None
    other = written != expected.to(written.dtype)
    if not other.any():
        return None
    number, actual, wanted = int(other.sum()), written[other].float(), expected[other]
    apart = (actual - wanted).abs()
    allowed = torch.full_like(apart, MAX_ROUNDING * float(torch.linalg.vector_norm(expected, ord=float("inf"))))
    is_few = True
    if written.dtype in (torch.float16, torch.bfloat16):
        is_few = int((apart > allowed).sum()) <= max(2.0, MAX_FLIPPED * expected.numel())
        allowed += wanted.abs() * torch.finfo(written.dtype).eps
    if is_few and not (apart > allowed).any():
        return None
    return f"up to {float(apart.max()):.3g} apart, in {number:,} of {expected.numel():,} numbers"
