"""Signs that a run is past saving: losses or gradients that are not numbers, exploding gradients, lost weights.

Small batches are noisy, a warm-up begins with large gradients, and the loss of ordered data rises when they change. So
an explosion is both at once, several steps in a row: a gradient norm far above its median, and a loss above twice that
of the last steps and of the first, when the model knew nothing yet. If it knew the first rows by heart, from another
training, that says little: the loss must also come near that of a guess. A run can also be lost slowly, and the medians
with it: then the loss ends far above that of a model that cannot distinguish tokens. Steps that a GradScaler skipped
change nothing and do not count, unless it skips them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any, TypedDict

from honed.job.plan_file import Precision
from honed.spec.spec import DivergenceSpec
from honed.system.error import DivergedError
from honed.worker.model import division

#: Consecutive losses or gradients that are not numbers, after which the run has diverged.
MAX_BAD = 2
#: Steps over which the medians are taken, and the fewest that they need.
NUM_RECENT, MIN_RECENT = 100, 20
#: Factor by which the loss has to rise above both medians.
LOSS_FACTOR = 2.0
#: Factor over the loss of a guess among all tokens at which a run is lost, and the share of that loss that an explosion
#: has to exceed: what is new to a language model is far below.
GUESS_FACTOR, GUESS_SHARE = 1.5, 0.5
#: Consecutive steps that a GradScaler may skip: it begins at 2^16 and halves its scale every time.
MAX_SKIPPED = 40
#: Significant digits of the values that are kept, so that a manifest stays short.
PLACES = 6


class Kept(TypedDict, total=False):
    """State that must outlive an attempt, as plain data."""

    steps: list[list[Any]]  #: [loss, gradient norm] of the last good steps
    first: list[float]  #: losses of the first steps
    num_bad: int
    num_exploding: int


class Divergence:
    """Check of every step, made once."""

    def __init__(self, spec: DivergenceSpec, kept: Kept, suspect: str, *, vocab_size: int) -> None:
        """Start the checks. `suspect` names the precision, where it may be to blame; see `suspicion`."""
        self._guess_loss = math.log(max(vocab_size, 2))
        self._spec = spec
        self._suspect = suspect
        self._kept = kept
        kept.setdefault("steps", [])
        kept.setdefault("first", [])
        kept.setdefault("num_bad", 0)
        kept.setdefault("num_exploding", 0)
        self._num_skipped = 0
        self._good_step = 0

    @property
    def is_suspicious(self) -> bool:
        """True while the steps since the last good one may begin a divergence: no checkpoint is to be made."""
        return bool(self._kept["num_bad"] or self._kept["num_exploding"])

    def look(self, step: int, loss: float, grad_norm: float | None, *, was_skipped: bool) -> DivergedError | None:
        """Return the error that ends the run after this step; None while it is well, or not yet known to be lost."""
        is_finite = math.isfinite(loss) and (grad_norm is None or math.isfinite(grad_norm) or was_skipped)
        self._num_skipped = self._num_skipped + 1 if was_skipped else 0
        kept = self._kept
        if not is_finite:
            kept["num_bad"] += 1
            what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {grad_norm}"
            return self._lost(what, step, kept["num_bad"]) if kept["num_bad"] >= MAX_BAD else None
        kept["num_bad"] = 0
        if self._num_skipped >= MAX_SKIPPED:
            return self._lost("every gradient overflows and its step is skipped", step, self._num_skipped)
        if was_skipped:
            return None
        if (words := self._explosion(loss, grad_norm)) is not None:
            kept["num_exploding"] += 1
            return self._lost(words, step, kept["num_exploding"]) if self._is_over else None
        kept["num_exploding"] = 0
        self._good_step = step
        self._keep(loss, grad_norm)
        return None

    @property
    def _is_over(self) -> bool:
        return bool(self._kept["num_exploding"] >= self._spec.num_steps)

    def _explosion(self, loss: float, grad_norm: float | None) -> str | None:
        factor, steps = self._spec.grad_norm_factor, self._kept["steps"]
        if len(steps) < MIN_RECENT:
            return None
        first = sorted(self._kept["first"])[len(self._kept["first"]) * 3 // 4]
        if loss > max(GUESS_FACTOR * self._guess_loss, LOSS_FACTOR * first):
            return f"the loss is {loss:.4g}; it was {first:.4g} at first, and a random guess has {self._guess_loss:.4g}"
        norms = [norm for _, norm in steps if norm]
        if factor is None or grad_norm is None or len(norms) < MIN_RECENT:
            return None
        usual, before = median(norms), max(median(step for step, _ in steps), first)
        if grad_norm <= factor * usual or loss <= max(LOSS_FACTOR * before, GUESS_SHARE * self._guess_loss):
            return None
        return f"the gradient's norm is {grad_norm:.4g}, after {usual:.4g}; the loss is {loss:.4g}, after {before:.4g}"

    def _keep(self, loss: float, grad_norm: float | None) -> None:
        kept = self._kept
        short = float(f"{loss:.{PLACES}g}")
        figures = [short, None if grad_norm is None else float(f"{grad_norm:.{PLACES}g}")]
        kept["steps"] = [*kept["steps"], figures][-NUM_RECENT:]
        if len(kept["first"]) < MIN_RECENT:
            kept["first"] = [*kept["first"], short]

    def _lost(self, what: str, step: int, count: int) -> DivergedError:
        steps = self._kept["steps"]
        until = f"; the loss was {steps[-1][0]:.4g} until step {self._good_step}" if self._good_step else ""
        return DivergedError(
            f"{what} at step {step}, {count} times in a row{until}{'; ' if self._suspect else ''}{self._suspect}",
            hint=_hint(self._suspect),
        )

    def lost_weights(self, names: list[str], step: int) -> DivergedError:
        """Return the error for a run with weights that are no longer numbers."""
        return DivergedError(
            f"{len(names)} trained weights are not finite at step {step}, the first is {names[0]}: nothing is "
            f"saved{'; ' if self._suspect else ''}{self._suspect}",
            hint=_hint(self._suspect),
        )


def _hint(suspect: str) -> str:
    lower = "use a lower learning_rate, more warmup_steps, or max_grad_norm; the last good checkpoint is kept"
    return f"use dtype: bfloat16 or float32; otherwise {lower}" if suspect else lower


def suspicion(precision: Precision, model_type: str) -> str:
    """Return the suspicion that the precision is to blame; empty where there is none."""
    from honed.plan.precision import OVERFLOWS_FLOAT16

    dtypes = {precision.load_dtype, precision.compute_dtype}
    if precision.quantization == "8bit" and model_type.startswith(OVERFLOWS_FLOAT16):
        return f"8bit converts every input to float16, in which {model_type} is known to overflow"
    if not precision.fp16 and "float16" not in dtypes:
        return ""
    if model_type.startswith(OVERFLOWS_FLOAT16):
        return f"float16 is the likely cause: {model_type} is known to overflow in it"
    return "float16 may be the cause: its largest number is 65504"


def not_finite(parameters: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the names of the trained weights that hold values which are not finite; of parts, this rank's own."""
    import torch

    return [
        name
        for name, parameter in parameters
        if parameter.requires_grad
        and parameter.is_floating_point()
        and not bool(torch.isfinite(division.part_of(parameter.detach())).all())
    ]
