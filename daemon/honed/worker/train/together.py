"""Predictions of a divided model, for which every rank has to make every forward pass.

    rank 0     chooses, asks, scores and reports, as for any model ──► broadcasts every round's questions
    the rest   answer the same questions in the same batches, and drop the answers

All stop at the same batch, and generate until the last rank has ended its answers. A batch that fails on one rank
leaves the others within it: it ends the run, where for a whole model it would cost its answers alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from honed.system.error import InterruptedRunError
from honed.worker.parallel import Asked, Ranks
from honed.worker.train.prediction import Answers, Predictor, Question


class TogetherPredictor(Predictor):
    """Generation of answers by all ranks at once."""

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._generating = {"synced_gpus": True}

    def ask(self, model: Any, questions: Sequence[Question]) -> Answers:
        """Answer every question, on rank 0, while the others are in `Ranks.by_zero` with `helper`."""
        self._ranks.broadcast(Asked(questions))
        try:
            return super().ask(model, questions)
        except InterruptedRunError:
            raise  # by all ranks
        except BaseException:
            self._ranks.is_out_of_step = True
            raise

    def helper(self, model: Any) -> Callable[[Any], None]:
        """Return what another rank does when rank 0 asks."""

        def answer(questions: Sequence[Question]) -> None:
            with contextlib.suppress(InterruptedRunError):  # rank 0 raises it for all
                Predictor.ask(self, model, questions)

        return answer

    def _is_over(self) -> bool:
        self._ranks.check(self._stop)
        return False  # a divided model is trained, and a training ends between two steps

    def _ask_batch(self, model: Any, questions: Sequence[Question]) -> list[str | None]:
        return list(self._generate(model, questions))
