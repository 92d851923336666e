"""AdamW for bfloat16 weights that keeps what rounding removes.

    float32 master   sign, exponent, 7 bits of mantissa | 16 bits of mantissa
    the weight       bfloat16: the master rounded to nearest
    its remainder    int16: added to the weight's bits, 16 places down, to restore the master

The two together are the float32 master, bit for bit, in 4 bytes. A step widens a slice of a weight and of its
gradient at a time, computes in float32, and splits the weight again: no random number is drawn. `CompensatedAdamW`
has float32 moments (14 bytes a parameter, gradient included); `eight_bit()` is the same with those of bitsandbytes (8
bytes).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from honed.spec.optimizer import EIGHT_BIT, SLICE_ELEMENTS

#: Elements for every scale of bitsandbytes' 8-bit states.
BLOCK_OPTIMIZER = 256
#: The name of the remainder in the state of a parameter.
REMAINDER = "remainder"
_HALF_PLACE = 0x8000
#: Key under which bitsandbytes stores values of another shape or dtype than the parameter's.
_BITSANDBYTES_NESTED = "__bnb_optimizer_quant_state__"


def part(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a float32 tensor into bfloat16, rounded to nearest (a tie away from zero), and the int16 remainder."""
    bits = master.contiguous().view(torch.int32)
    # CUDA's NaN has every bit set: rounded up it would become zero, which would hide that the weight is lost.
    high = torch.where(master.isnan(), bits, bits + _HALF_PLACE) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 master of a weight and its remainder."""
    bits = (weight.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    return bits.view(torch.float32)


def master(parameter: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """Return a parameter's value, with its remainder if the optimizer (which may be None) keeps one."""
    state = optimizer.state.get(parameter) if optimizer is not None else None
    return join(parameter.data, state[REMAINDER]) if state and REMAINDER in state else parameter.data


def take_remainders(optimizer: Any, path: Path) -> None:
    """Replace the remainders by those of a checkpoint whose weights are loaded; `path`: its optimizer.pt."""
    stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = stored["state"].get(number, {})
        state |= state.get(_BITSANDBYTES_NESTED, {})
        if (kept := optimizer.state.get(parameter, {}).get(REMAINDER)) is not None:
            kept.copy_(state[REMAINDER]) if REMAINDER in state else kept.zero_()


def _slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield parts of tensors of one shape, whole if they do not lie in one piece: a step is the same either way."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    yield from zip(*(tensor.view(-1).split(SLICE_ELEMENTS) for tensor in tensors), strict=True)


def _put(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    high, low = part(master)
    weight.copy_(high)
    remainder.copy_(low)


class CompensatedAdamW(torch.optim.Optimizer):
    """torch's AdamW, computed in float32 for bfloat16 weights; other dtypes have no remainder."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """Make one step, one parameter at a time."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, is_parted = self.state[parameter], parameter.dtype == torch.bfloat16
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if is_parted:
                state[REMAINDER] = torch.zeros_like(parameter, dtype=torch.int16)
        state["step"] += 1
        assert parameter.grad is not None
        moments = (state["exp_avg"], state["exp_avg_sq"], *((state[REMAINDER],) if is_parted else ()))
        for item in _slices(parameter.data, parameter.grad, *moments):
            self._update_slice(group, state["step"], *item)

    def _update_slice(
        self,
        group: dict[str, Any],
        number: int,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        remainder: torch.Tensor | None = None,
    ) -> None:
        gradient = gradient.float()
        master = weight if remainder is None else join(weight, remainder)
        (beta1, beta2), rate = group["betas"], group["lr"]
        master.mul_(1 - rate * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = (square.sqrt() / (1 - beta2**number) ** 0.5).add_(group["eps"])
        master.addcdiv_(mean, divisor, value=-rate / (1 - beta1**number))
        if remainder is not None:
            _put(master, weight, remainder)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without torch's cast to the parameter's dtype.

        The cast would round the moments and treat the remainders as numbers.
        """
        dtypes = {
            number: {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, dtype in dtypes.get(number, {}).items():
                if self.state[parameter][name].dtype != dtype:
                    stored = state_dict["state"][number][name]
                    self.state[parameter][name] = copy.deepcopy(stored).to(parameter.device)


def eight_bit() -> type[torch.optim.Optimizer]:
    """Return bitsandbytes' 8-bit AdamW with remainders: a weight is float32 during its step. Imports bitsandbytes."""
    import bitsandbytes

    class CompensatedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.non_castable_tensor_keys |= {REMAINDER}

        def update_step(self, group: dict[str, Any], p: Any, gindex: int, pindex: int) -> None:
            if p.dtype != torch.bfloat16:
                super().update_step(group, p, gindex, pindex)
                return
            state = self.state[p]
            if REMAINDER not in state:
                state[REMAINDER] = torch.zeros_like(p.data, dtype=torch.int16)
            alike = (p.data, p.grad, state[REMAINDER], state["state1"], state["state2"])
            for index, (weight, gradient, remainder, *states) in enumerate(_slices(*alike)):
                of_slice = {**state, "state1": states[0], "state2": states[1]}
                if "absmax1" in state and weight.numel() < p.numel():
                    first = index * SLICE_ELEMENTS // BLOCK_OPTIMIZER
                    blocks = slice(first, first + SLICE_ELEMENTS // BLOCK_OPTIMIZER)
                    of_slice |= {name: state[name][blocks] for name in ("absmax1", "absmax2")}
                master = join(weight, remainder)
                master.grad = gradient.float()
                self.state[master] = of_slice
                super().update_step(group, master, gindex, pindex)
                del self.state[master]
                _put(master, weight, remainder)
            state["step"] += 1

    return CompensatedAdamW8bit


def compensated(args: Any, optim: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that keeps remainders for an optimizer of that name, and its arguments, for a trainer."""
    kwargs = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return (eight_bit() if optim in EIGHT_BIT else CompensatedAdamW), kwargs


def keep_embeddings_wide(model: Any) -> None:
    """Have bitsandbytes keep 32-bit moments for embeddings, as transformers does for its own 8-bit optimizers."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
