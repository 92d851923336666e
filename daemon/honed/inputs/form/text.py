"""Rows with one answer, or one text: what supervised fine-tuning trains on.

messages            messages (or conversations): [{role, content, tool_calls?, reasoning_content?, weight?}], tools?
prompt_completion   prompt, completion: two strings, or two lists of messages
alpaca              instruction, input?, output, system?, history?
sharegpt            conversations (or conversation): [{from, value}], system?, tools?
text                text
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from honed.inputs import attachment, misfit
from honed.inputs.attachment import RowError
from honed.inputs.form.base import TURNS, Form, Format, Row, turns
from honed.inputs.message import (
    RefusedRowError,
    conversation,
    kind_of,
    message_of,
    require_answer,
    string,
    tool_call,
    tools_of,
    unpacked,
    weight_of,
)
from honed.spec.problem import shown

#: ShareGPT's names of roles.
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
}
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def _from_messages(row: Row, *, has_chat_template: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    messages = conversation(next((row[name] for name in TURNS if name in row), None), "messages")
    require_answer(messages)
    return [{"kind": "messages", "messages": messages, "tools": tools_of(row)}]


def from_prompt_completion(row: Row, *, has_chat_template: bool) -> list[dict[str, Any]]:
    is_conversation = _may_attach(row, has_chat_template=has_chat_template)
    prompt, completion = unpacked(row.get("prompt")), unpacked(row.get("completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = conversation(prompt, "prompt"), conversation(completion, "completion")
        if named := [n for n, message in enumerate(before, start=1) if message.get("weight")]:
            raise RefusedRowError(
                f"message {named[0]} of the `prompt` is set to be trained on, but a prompt never is",
                hint="write the row as `messages`: every assistant turn is trained on, except those with weight 0",
            )
        require_answer(after)
        fields = {"kind": "messages", "messages": [*before, *after], "tools": tools_of(row)}
        return [fields | {"num_prompt_messages": len(before)}]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("`prompt` and `completion` must both be strings or both be lists of messages")
    completion, asked = string(row, "completion"), string(row, "prompt", may_be_empty=True)
    if is_conversation:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": completion}]
        return [{"kind": "messages", "messages": messages, "num_prompt_messages": 1}]
    return [{"kind": "prompt_completion", "prompt": asked, "completion": completion}]


def _from_alpaca(row: Row, *, has_chat_template: bool) -> list[dict[str, Any]]:
    _may_attach(row, has_chat_template=has_chat_template)
    instruction, output = string(row, "instruction"), string(row, "output")
    given = string(row, "input", may_be_empty=True)
    system, history = string(row, "system", may_be_empty=True), unpacked(row.get("history")) or []
    if not has_chat_template:
        if history:
            raise RowError("`history` needs a chat template; set one with `chat_template:`")
        template = _ALPACA_WITH_INPUT if given.strip() else _ALPACA
        lead = f"{system}\n\n" if system else ""
        prompt = lead + template.format(instruction=instruction, input=given)
        return [{"kind": "prompt_completion", "prompt": prompt, "completion": output}]
    messages = [{"role": "system", "content": system}] if system else []
    if not isinstance(history, list):
        raise RowError("`history` must be a list of instruction/answer pairs")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError("`history` must be a list of instruction/answer pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return [{"kind": "messages", "messages": messages}]


def _from_sharegpt(row: Row, *, has_chat_template: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    listed = unpacked(next((row[key] for key in ("conversations", "conversation", "messages") if key in row), None))
    if not isinstance(listed, list):
        raise RowError(f"`conversations` must be a list of turns, this is {kind_of(listed)}")
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    messages += [_sharegpt_turn(turn, n) for n, turn in enumerate(listed, start=1)]
    require_answer(messages)
    return [{"kind": "messages", "messages": messages, "tools": tools_of(row)}]


def _sharegpt_turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise RowError(f"turn {number} has no `from`")
    role = _SHAREGPT_ROLES.get(turn["from"].lower())
    if role is None:
        raise RowError(f"turn {number}: `from` is {shown(turn['from'])}, not one of {', '.join(_SHAREGPT_ROLES)}")
    if turn["from"].lower() in ("function_call", "tool_call"):
        calls = unpacked(turn.get("value"))
        listed = calls if isinstance(calls, list) else [calls]
        called = {"role": role, "content": "", "tool_calls": [tool_call(call, number) for call in listed]}
        return called | weight_of(turn, role, number)
    return message_of(
        {**{k: v for k, v in turn.items() if k not in ("from", "value")}, "role": role, "content": turn.get("value")},
        number,
    )


def _from_text(row: Row, *, has_chat_template: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    if attached := _attached(row):
        raise RowError(f"`{attached}` next to `text`, but no turn to put it in; such rows must be conversations")
    return [{"kind": "text", "text": string(row, "text")}]


def _attached(row: Row) -> str | None:
    return next((key for key in attachment.COLUMNS if attachment.is_given(row.get(key))), None)


def _may_attach(row: Row, *, has_chat_template: bool) -> bool:
    """Return True if media lie next to a row's text. Raises RowError if no template can place them."""
    if (attached := _attached(row)) and not has_chat_template:
        raise RowError(f"`{attached}` next to the text needs a chat template; set one with `chat_template:`")
    return attached is not None


def _is_sharegpt(row: Row) -> bool:
    first = (turns(row) or [None])[0]
    return isinstance(first, dict) and "from" in first


def _has(*columns: str) -> Callable[[Row], bool]:
    return lambda row: turns(row) is None and all(name in row for name in columns)


FORM = Form(
    {
        "messages": Format(
            "`messages`",
            ("tools", "chat_template_kwargs"),
            lambda row: turns(row) is not None and not _is_sharegpt(row),
            _from_messages,
            has_turns=True,
        ),
        "prompt_completion": Format(
            "`prompt` and `completion`",
            ("prompt", "completion", "tools", "chat_template_kwargs"),
            _has("prompt", "completion"),
            from_prompt_completion,
        ),
        "alpaca": Format(
            "`instruction` and `output`",
            ("instruction", "input", "output", "system", "history", "chat_template_kwargs"),
            _has("instruction", "output"),
            _from_alpaca,
        ),
        "sharegpt": Format(
            "`conversations` of from/value",
            ("system", "tools", "chat_template_kwargs"),
            _is_sharegpt,
            _from_sharegpt,
            has_turns=True,
        ),
        "text": Format("`text`", ("text",), _has("text"), _from_text),
    },
    misfit=misfit.of,
)
