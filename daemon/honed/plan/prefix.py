"""Prefix language models, which see a prompt as a whole, and the rows that they can be trained on.

Such a model is made for one prompt and one answer. In a row with two trained answers, the second prompt contains the
first answer: in training each of its tokens would see only those before it, in a prediction all of them.
"""

from __future__ import annotations

from honed.system.error import DatasetError

#: Families whose `token_type_ids` are 0 for the prefix and 1 for what follows.
FAMILIES = frozenset({"paligemma"})


def check_row(model_type: str | None, place: str, num_trained_turns: int) -> None:
    """Raise DatasetError for a row with more than one answer to train on. `place` names the row."""
    if model_type in FAMILIES and num_trained_turns > 1:
        raise DatasetError(
            f"{place}: {num_trained_turns} turns of the assistant are trained on, but {model_type} is made for one "
            "answer: in training it would see the later prompts differently than in predictions",
            hint="set `weight: 0` on all turns of the assistant but the last, and add a row for each earlier answer "
            "that is to be trained on, which ends with it",
        )
