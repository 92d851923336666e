"""Rows that fit no format: error messages that name their kind, and the change that makes them usable.

prompt, chosen, rejected        preference data
prompt                          questions without answers
question, answer                a prompt and its completion under other names
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from honed.system import quote
from honed.system.error import Fix

#: Names of columns with questions, and with answers; the first that exists counts.
ASKS = (
    "prompt",
    "question",
    "instruction",
    "query",
    "input",
    "inputs",
    "problem",
    "user",
    "request",
    "human",
    "source",
)
ANSWERS = (
    "completion",
    "answer",
    "output",
    "outputs",
    "response",
    "solution",
    "target",
    "assistant",
    "reply",
    "summary",
    "chosen",
)


@dataclass(frozen=True)
class Misfit:
    """The kind of rows that fit no format, and the remedy."""

    message: str
    hint: str
    columns: dict[str, str] = field(default_factory=dict)  #: a value of the data set's `columns:` that would work

    @property
    def fix(self) -> Fix:
        return {"columns": self.columns} if self.columns else {}


def of(row: Mapping[str, Any]) -> Misfit | None:
    """Return the apparent kind of a row that fits no format; None if it is unknown."""
    names = {str(name).strip().lower(): str(name) for name in row}
    if "chosen" in names and "rejected" in names:
        return _preference(row, names)
    if "preferred_output" in names or "non_preferred_output" in names:  # OpenAI's form
        return Misfit(
            "preference data (DPO) is not supported yet: rows have `preferred_output` and `non_preferred_output`",
            "messages can be trained on: append the preferred output's messages to the input's",
        )
    if _is_table(names) or not (asks := _first(ASKS, names)):
        return None
    answers = _first(ANSWERS, names)
    if answers is None:
        ours, first, wants = (
            ("alpaca", "instruction", "output")
            if asks == "instruction"
            else ("prompt_completion", "prompt", "completion")
        )
        return Misfit(
            f"rows have questions but no answers: they have `{names[asks]}`, but nothing to train on",
            f"a row of {ours} needs `{first}` and `{wants}`; if the answers have another column name, set `columns: "
            f"{{{wants}: …}}`",
        )
    columns = {"prompt": names[asks], "completion": names[answers]}
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if not columns or not all(isinstance(row[names[name]], str) for name in (asks, answers)):
        return None
    return Misfit(
        f"no format has the columns {quote.names(map(str, list(row)[:20]), '`{}`')}",
        f"if `{names[asks]}` is the question and `{names[answers]}` the answer, write {_written(columns)} below the "
        "data set's path",
        columns,
    )


def unpaired(row: Mapping[str, Any]) -> bool:
    """Return True if a row of prompt and completion has a boolean label, as KTO's rows have."""
    return isinstance(row.get("label"), bool) and {"prompt", "completion"} <= row.keys()


def _preference(row: Mapping[str, Any], names: Mapping[str, str]) -> Misfit:
    chosen = names["chosen"]
    columns = {}
    if isinstance(row[chosen], list):
        columns = {"messages": chosen}
        if (asks := _first(("prompt",), names)) and isinstance(row[names[asks]], list):
            columns = {"completion": chosen}
    elif isinstance(row[chosen], str) and (asks := _first(ASKS, names)) and isinstance(row[names[asks]], str):
        columns = {"prompt": names[asks], "completion": chosen}
        columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    alone = f"{_written(columns)} below the data set's path trains only on the chosen answers, " if columns else ""
    return Misfit(
        f"preference data (DPO) is not supported yet: rows have `{chosen}` and `{names['rejected']}`",
        alone + ("and ignores the rejected ones" if columns else "prompt/completion rows can be trained on"),
        columns,
    )


def _written(columns: Mapping[str, str]) -> str:
    return f"`columns: {{{', '.join(f'{ours}: {_plain(theirs)}' for ours, theirs in columns.items())}}}`"


def _plain(name: str) -> str:
    return name if name.replace("_", "").isalnum() and not name.isdigit() else repr(name)


def _first(wanted: Iterable[str], names: Mapping[str, str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _is_table(names: Mapping[str, str]) -> bool:
    """Return True if there are turns or text, which other formats read."""
    return any(name in names for name in ("messages", "conversations", "conversation", "text"))
