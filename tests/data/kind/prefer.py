"""Direct preference optimization: the preferred answer becomes likelier than the other, beside a frozen reference.

The reference is a copy of the model as it was loaded, before any checkpoint of an earlier attempt.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from honed.worker.assignment import Assignment
from honed.worker.recipe import build, output, start, train
from honed.worker.recipe.base import Run

if TYPE_CHECKING:
    from honed.worker.train.watched import Watched

#: How far the model may move from the reference: less the larger it is.
BETA = 0.5


def run(this: Run, job: Assignment, attempt: int) -> None:
    """Train, from the last checkpoint if there is one, and write the output."""
    begun = start.begin(this, job, attempt)
    rows = start.read_rows(this, begun)
    built = build.build(this, begun, rows, _trainer_class)
    build.check_rows(this, rows, built)
    build.check_padding(this, begun, rows, built)
    figures = train.train(this, begun, built)
    if not job.is_trial:
        output.write(this, begun, rows, built, figures)


def _trainer_class() -> type[Watched]:
    import torch
    from torch.nn.functional import logsigmoid

    from honed.worker.train.evaluation import TokenMeans
    from honed.worker.train.trainer import WatchedTrainer

    def scores(model: Any, inputs: dict[str, Any]) -> Any:
        """Return the log-probability of each answer."""
        seen = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        logits, labels = model(**seen, use_cache=False).logits[:, :-1].float(), inputs["labels"][:, 1:]
        is_trained = labels != -100
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (chosen * is_trained).sum(-1)

    class RowMeans(TokenMeans):
        """Means over pairs, whatever their number of tokens."""

        def count(self, labels: Any) -> None:
            self._counts.append(labels.new_tensor(len(labels) // 2))

    class PreferenceTrainer(WatchedTrainer):
        def __init__(self, **parts: Any) -> None:
            self._reference = copy.deepcopy(parts["loaded"].model).eval().requires_grad_(False)
            super().__init__(**parts)
            self._means = RowMeans(None, self._ranks)
            self.model_accepts_loss_kwargs = False  # the loss is a mean over a batch's own rows

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            del num_items_in_batch
            with torch.no_grad():
                expected = scores(self._reference, inputs)
            rewards = BETA * (scores(model, inputs) - expected)
            margins = rewards[0::2] - rewards[1::2]  # the collator puts the answers of a row one after the other
            self._metrics["train" if model.training else "eval"]["reward_margin"].append(float(margins.detach().mean()))
            loss = -logsigmoid(margins).mean()
            return (loss, {"margins": margins}) if return_outputs else loss

    return PreferenceTrainer
