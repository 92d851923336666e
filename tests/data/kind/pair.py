"""Rows with two answers, the first of which is preferred.

preference          prompt, chosen, rejected: three strings, or three lists of messages
"""

from __future__ import annotations

from typing import Any

from honed.inputs.form import text
from honed.inputs.form.base import Form, Format, Row

_COLUMNS = ("prompt", "chosen", "rejected")


def _answers(row: Row, *, has_chat_template: bool) -> list[dict[str, Any]]:
    """Convert a row to a prompt with each of its answers."""
    pairs = ({**row, "completion": row[name]} for name in ("chosen", "rejected"))
    return [made for pair in pairs for made in text.from_prompt_completion(pair, has_chat_template=has_chat_template)]


FORM = Form(
    {
        "preference": Format(
            "`prompt`, `chosen` and `rejected`",
            (*_COLUMNS, "tools", "chat_template_kwargs"),
            lambda row: all(name in row for name in _COLUMNS),
            _answers,
        )
    },
    num_answers=2,
)
