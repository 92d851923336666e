"""Comparison of a prediction's prompt with the prompt that training used.

    asked     …2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n
    trained   …2+2?<|im_end|>\\n<|im_start|>assistant\\n⟦<think>\\ntwo and two\\n</think>\\n\\n4<|im_end|>⟧

A template's generation prompt may differ from what it writes before a turn: Qwen3.5's says that there is no reasoning,
whatever the rows have. Predictions, and any server of the model, then use a prompt that was not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from honed.spec.problem import shown
from honed.text.span import common, squeeze

#: Characters of the two texts that are shown: before the place where they differ, and in all.
_NUM_BEFORE, _NUM_SHOWN = 24, 48


@dataclass(frozen=True)
class Mismatch:
    """A generation prompt that differs from the text before the turn; both begin a little before the difference."""

    asked: str
    trained: str

    def __str__(self) -> str:
        return f"the generation prompt ends in {shown(self.asked)}, but the row has {shown(self.trained)} there"


@dataclass
class Mismatches:
    """Rows whose generation prompt differs from the prompt that they were trained with."""

    num_rows: int = 0
    first: str = ""
    example: Any = None  #: the first such row

    def add(self, where: str, mismatch: Mismatch | None, example: Any) -> None:
        if mismatch is None:
            return
        self.num_rows += 1
        if self.example is None:
            self.first, self.example = f"{where}: {mismatch}", example

    def __add__(self, other: Mismatches) -> Mismatches:
        first = self if self.num_rows else other
        return Mismatches(self.num_rows + other.num_rows, first.first, first.example)

    def message(self, num_rows: int, advice: str) -> str:
        """Return a message for the rows' owner; empty where all prompts are as trained."""
        if not self.num_rows:
            return ""
        return (
            f"the generation prompt differs from the training rows in {self.num_rows} of {num_rows} rows (the first: "
            f"{self.first}); {advice}"
        )


#: Advice where there is nothing more specific.
ADVICE = (
    "predictions and scores use a prompt that was not trained: use a template whose generation prompt equals the "
    "start of its turns (`chat_template:`)"
)


def compare(asked: str, text: str, start: int) -> Mismatch | None:
    """Compare `asked` with `text`, whose trained part begins at `start`; both begin with the same conversation.

    Return None if they agree. A prompt that reaches into the turn, and equals its beginning, is as trained. White space
    further up does not matter: Hermes' template writes it after a tool's answer only where a turn follows.
    """
    n = common(asked, text)
    if n == len(asked) and (n >= start or not text[n:start].strip()):
        return None
    if squeeze(asked) == squeeze(text[:start]) and _trail(asked) == _trail(text[:start]):
        return None
    begin = max(0, min(n, start) - _NUM_BEFORE)
    return Mismatch(asked[begin : begin + _NUM_SHOWN], text[begin : begin + _NUM_SHOWN])


def _trail(text: str) -> str:
    return text[len(text.rstrip()) :]


def compare_tails(asked: str, text: str, start: int, said: str) -> Mismatch | None:
    """Compare texts of two templates in the same way, from the end of `said`, the last message, in both."""
    if not said or said not in asked or said not in text[:start]:
        return None
    at = text.rindex(said, 0, start) + len(said)
    return compare(asked[asked.rindex(said) + len(said) :], text[at:], start - at)


def said_before(messages: Sequence[Mapping[str, Any]], i: int) -> str:
    """Return the text of the message before message i; empty where that is no plain text."""
    content = messages[i - 1].get("content") if i else None
    return content.strip() if isinstance(content, str) else ""
