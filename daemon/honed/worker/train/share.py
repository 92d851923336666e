"""What each of a step's batches counts for, so that a step that is divided has the gradient of one batch.

A step's loss is the mean over all its trained tokens, whatever batches, ranks and accumulation they come in. Most
models are passed the step's number of tokens, and need no help. Two kinds of loss do:

- Some classes take the mean over a batch's own tokens (`accepts_loss_kwargs = False`: qwen2_5_vl, qwen3_vl, …).
  transformers averages these means. Here each counts by its tokens.
- A mixture of experts adds a loss for unbalanced routing, computed from the tokens of one forward pass. transformers
  adds it once for every batch of a step, so that it grows with accumulation. Here each counts by its tokens, padding
  left out, and the sum is one such loss. It is not exactly that of the undivided batch: which experts are overloaded is
  judged in every forward pass by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from honed.text.maskcheck import IGNORED
from honed.worker.parallel import Ranks

#: TRL's metrics, each a mean over one batch's trained tokens.
_TOKEN_MEANS = ("entropy", "mean_token_accuracy")
#: Attributes of models with the coefficient of the loss for unbalanced routing.
_COEFFICIENTS = {"router_aux_loss_coef", "aux_loss_coef"}


class Shares:
    """The batches of the present step, one of which is the present one: that whose loss is computed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: list[tuple[int, int]] = []  #: of this rank's batches: the tokens that are trained, and all
        self._every: list[tuple[int, int]] = []  #: the same of all ranks' batches at every position
        self._place = -1
        self._excess: Any = 0.0  #: by how much the present batch's loss, as computed, is more than is trained

    def begin(self, batches: Sequence[Mapping[str, Any]]) -> int:
        """Begin a step; all ranks have as many batches. Return the number of its trained tokens."""
        self._own = [(num_trained(batch), _num_seen(batch)) for batch in batches]
        sums = self._ranks.sum(*(float(count) for counts in self._own for count in counts)) if self._own else []
        self._every = [(int(trained), int(seen)) for trained, seen in zip(sums[::2], sums[1::2], strict=True)]
        self._place = -1
        return sum(trained for trained, _ in self._every)

    def next(self) -> None:
        """Go on to the next batch of the step."""
        self._place += 1
        self._excess = 0.0

    @property
    def num_batches(self) -> int:
        """The number of this rank's batches in the step."""
        return len(self._own)

    def weight(self, kind: int) -> float:
        """Return what the mean over the present batch counts for, beside those of the other batches and ranks.

        `kind`: 0 for a mean over trained tokens, 1 for one over all. Over all batches these weights add up to their
        number, and so to one once the trainer has divided by it.
        """
        total = sum(counts[kind] for counts in self._every)
        return self._own[self._place][kind] * len(self._every) * self._ranks.world / max(1, total)

    def weigh_balance(self, balance: Any, weight: float, scaler: Any) -> None:
        """Have the loss for unbalanced routing count by `weight` in the backward pass.

        Its coefficient has another name in every family. But its gradient is the coefficient, times everything by which
        the trainer multiplies the loss; `scaler` does so after the loss is reported.
        """
        value = balance.detach()

        def weigh(gradient: Any) -> Any:
            reported = gradient / scaler.get_scale() if scaler is not None else gradient
            self._excess = (1 - weight) * reported * value
            return gradient * weight

        balance.register_hook(weigh)

    def reported(self, loss: Any) -> Any:
        """Return the loss of the present batch as it was trained."""
        return loss - self._excess

    def weigh(self, metrics: Mapping[str, list[float]], lengths: Mapping[str, int]) -> None:
        """Weigh the metrics that the present batch has added, beyond the `lengths` that they had before."""
        for kind, names in enumerate((_TOKEN_MEANS, ("aux_loss",))):
            total = sum(counts[kind] for counts in self._every)
            factor = self._every[self._place][kind] * len(self._every) / max(1, total)
            for name in names:
                if len(metrics.get(name, ())) > lengths.get(name, 0):
                    metrics[name][-1] *= factor


def set_coefficient(model: Any, coefficient: float) -> None:
    """Give the loss for unbalanced routing the job's coefficient.

    TRL puts it into the config, which a text model has read when it was built.
    """
    for module in model.modules():
        for name in _COEFFICIENTS & vars(module).keys():
            setattr(module, name, coefficient)


def num_trained(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens of a batch that are trained on."""
    return int((batch["labels"][..., 1:] != IGNORED).sum())


def _num_seen(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens of a batch, without padding."""
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None and mask.dim() == 2 else int(batch["labels"].numel())
