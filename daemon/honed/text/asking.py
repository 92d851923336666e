"""The prompt of a prediction, compared with the prompt that training used.

    asked     …2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n
    trained   …2+2?<|im_end|>\\n<|im_start|>assistant\\n⟦<think>\\ntwo and two\\n</think>\\n\\n4<|im_end|>⟧

A template's generation prompt need not be what it writes before a turn: Qwen3.5's says that there is no reasoning,
whatever the rows have. Predictions, and whoever serves the model, then ask for what was not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from honed.spec.problem import shown
from honed.text.span import common, squeeze

#: Characters of the two texts that are shown, from a little before the place where they part.
_NUM_BEFORE, _NUM_SHOWN = 24, 48


@dataclass(frozen=True)
class Mismatch:
    """A generation prompt that is not what stands before the turn in its row, from a little before they part."""

    asked: str
    trained: str

    def __str__(self) -> str:
        return f"the generation prompt ends in {shown(self.asked)}, and the row has {shown(self.trained)} there"


@dataclass
class Mismatches:
    """Rows whose turns are asked for otherwise than they are trained."""

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

    def told(self, num_rows: int, advice: str) -> str:
        """In words, for the rows' owner; empty where all is asked as it is trained."""
        if not self.num_rows:
            return ""
        return (
            f"the model is asked otherwise than it is trained in {self.num_rows} of {num_rows} rows (the first: "
            f"{self.first}); {advice}"
        )


#: What helps where nothing better was found.
ADVICE = (
    "predictions and scores are made with a prompt that was not trained: name a template whose generation prompt is "
    "what stands before its turns (`chat_template:`)"
)


def compare(asked: str, text: str, start: int) -> Mismatch | None:
    """`asked` beside `text`, of which what is trained begins at `start`; both begin with the same conversation.

    A prompt that reaches into the turn gives what the turn begins with, and is as trained. White space further up, as
    Hermes' template has it behind a tool's answer only where a turn follows, is no matter.
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
    """The same of two templates' texts, from where both have shown what was said last."""
    if not said or said not in asked or said not in text[:start]:
        return None
    at = text.rindex(said, 0, start) + len(said)
    return compare(asked[asked.rindex(said) + len(said) :], text[at:], start - at)


def said_before(messages: Sequence[dict[str, Any]], i: int) -> str:
    """What is said right before message i; empty where that is no plain text."""
    content = messages[i - 1].get("content") if i else None
    return content.strip() if isinstance(content, str) else ""
