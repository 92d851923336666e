"""One row, whatever its format, as the kind of thing that is trained on: the `Example`.

    messages            messages (or conversations): [{role, content, tool_calls?, reasoning_content?}], tools?
    prompt_completion   prompt, completion: two strings, or two lists of messages
    alpaca              instruction, input?, output, system?, history?
    sharegpt            conversations (or conversation): [{from, value}], system?, tools?
    text                text

Beside the last they may have images, videos and sounds (see attachment.py). Such a row is always a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from honed import attachment
from honed.attachment import RowError
from honed.error import DatasetError
from honed.media import Kind, Media
from honed.problem import shown

_WANTED = {
    "messages": "`messages`",
    "prompt_completion": "`prompt` and `completion`",
    "alpaca": "`instruction` and `output`",
    "sharegpt": "`conversations` of from/value",
    "text": "`text`",
}
FORMATS_HINT = "formats: " + "; ".join(f"{name} has {wanted}" for name, wanted in _WANTED.items())

#: Columns of a row that are named.
MAX_COLUMNS = 20
_ROLES = ("system", "developer", "user", "assistant", "tool")
#: ShareGPT's words for who speaks.
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "bard": "assistant", "bing": "assistant", "function_call": "assistant", "tool_call": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool", "function": "tool",
}  # fmt: skip

_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Example:
    """One row, whatever its format was."""

    kind: Literal["messages", "prompt_completion", "text"]
    messages: list[dict[str, Any]] = field(default_factory=list)  #: as chat templates take them
    tools: list[Any] | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    dataset_index: int = 0
    row_index: int = 0
    num_prompt_messages: int = 0  #: turns of the assistant among the first so many are not trained on
    media: tuple[Media, ...] = ()  #: what the parts of its messages show, in order


def words(message: Mapping[str, Any]) -> str:
    """What a message says: its content, or the texts of its parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def recognise(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> str:
    """The format of a row by its columns. Raises DatasetError, which lists those found and those each format wants."""
    named = _renamed(row, columns)
    turns = next((_unpacked(named[key]) for key in ("messages", "conversations", "conversation") if key in named), None)
    if isinstance(turns, list):
        first = turns[0] if turns else {}
        return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if "prompt" in named and "completion" in named:
        return "prompt_completion"
    if "instruction" in named and "output" in named:
        return "alpaca"
    if "text" in named:
        return "text"
    found = ", ".join(shown(key).strip("'\"") for key in list(row)[:MAX_COLUMNS]) or "none"
    found += f", and {len(row) - MAX_COLUMNS} more" if len(row) > MAX_COLUMNS else ""
    raise DatasetError(
        f"the format cannot be told from the columns ({found})",
        hint=f"{FORMATS_HINT}; `columns` maps these names to yours, as in {{prompt: question}}",
    )


def convert(
    row: Mapping[str, Any],
    format: str,  # noqa: A002  (the spec's own word)
    *,
    columns: Mapping[str, str] | None = None,
    dataset_index: int = 0,
    row_index: int = 0,
    has_chat_template: bool = True,
    directories: Mapping[Kind, Path] | None = None,
) -> Example:
    """One row as an Example. Raises DatasetError for a row that cannot be used, and says why.

    `directories` are those that the paths of its images, videos and sounds start from.
    """
    try:
        made = fields(row, format, columns, has_chat_template=has_chat_template, directories=directories)
    except RowError as error:
        raise DatasetError(f"row {row_index + 1}: {error}", hint=f"{format} has {_WANTED.get(format, '?')}") from error
    return Example(**made, dataset_index=dataset_index, row_index=row_index)


def fields(
    row: Mapping[str, Any],
    format: str,  # noqa: A002
    columns: Mapping[str, str] | None,
    *,
    has_chat_template: bool,
    directories: Mapping[Kind, Path] | None,
) -> dict[str, Any]:
    """An Example's fields, but for where it comes from. Raises RowError."""
    named = _renamed(row, columns)
    named = {key: _unpacked(value) if key in attachment.COLUMNS else value for key, value in named.items()}
    made = _of_format(named, format, has_chat_template=has_chat_template)
    if made["kind"] == "messages":
        made["messages"], made["media"] = attachment.place(named, made["messages"], directories)
    _check_text({key: value for key, value in made.items() if key != "media"})
    return made


def _check_text(made: dict[str, Any]) -> None:
    """JSON can carry halves of surrogate pairs; no tokenizer takes them, nor what is nested without end."""
    try:
        json.dumps(made, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RowError("a half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    except RecursionError:
        raise RowError("nested too deeply") from None


def _of_format(row: Mapping[str, Any], format: str, *, has_chat_template: bool) -> dict[str, Any]:  # noqa: A002
    attached = next((key for key in attachment.COLUMNS if attachment.is_given(row.get(key))), None)
    if attached and format in ("alpaca", "prompt_completion") and not has_chat_template:
        raise RowError(f"`{attached}` beside the text needs a chat template; name one with `chat_template:`")
    match format:
        case "messages":
            return _from_messages(row)
        case "prompt_completion":
            return _from_prompt_completion(row, is_conversation=attached is not None)
        case "alpaca":
            return _from_alpaca(row, has_chat_template=has_chat_template)
        case "sharegpt":
            return _from_sharegpt(row)
        case "text" if attached:
            raise RowError(
                f"`{attached}` beside `text`, and no turn that it could stand in; such rows are conversations"
            )
        case "text":
            return {"kind": "text", "text": _string(row, "text")}
        case _:
            raise DatasetError(f"no such format: {format}", hint=FORMATS_HINT)


def _from_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = next((row[key] for key in ("messages", "conversations", "conversation") if key in row), None)
    messages = _messages(turns, "messages")
    _require_answer(messages)
    return {"kind": "messages", "messages": messages, "tools": _tools(row)}


def _from_prompt_completion(row: Mapping[str, Any], *, is_conversation: bool) -> dict[str, Any]:
    prompt, completion = _unpacked(row.get("prompt")), _unpacked(row.get("completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        _require_answer(after)
        fields = {"kind": "messages", "messages": [*before, *after], "tools": _tools(row)}
        return fields | {"num_prompt_messages": len(before)}
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("`prompt` and `completion` are two strings or two lists of messages, not one of each")
    completion, asked = _string(row, "completion"), _string(row, "prompt", may_be_empty=True)
    if is_conversation:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": completion}]
        return {"kind": "messages", "messages": messages, "num_prompt_messages": 1}
    return {"kind": "prompt_completion", "prompt": asked, "completion": completion}


def _from_alpaca(row: Mapping[str, Any], *, has_chat_template: bool) -> dict[str, Any]:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    given = _string(row, "input", may_be_empty=True)
    system, history = _string(row, "system", may_be_empty=True), _unpacked(row.get("history")) or []
    if not has_chat_template:
        if history:
            raise RowError("`history` needs a chat template; name one with `chat_template:`")
        template = _ALPACA_WITH_INPUT if given.strip() else _ALPACA
        lead = f"{system}\n\n" if system else ""
        return {
            "kind": "prompt_completion",
            "prompt": lead + template.format(instruction=instruction, input=given),
            "completion": output,
        }
    messages = [{"role": "system", "content": system}] if system else []
    if not isinstance(history, list):
        raise RowError("`history` is a list of pairs of instruction and answer")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError("`history` is a list of pairs of instruction and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return {"kind": "messages", "messages": messages}


def _from_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = _unpacked(next((row[key] for key in ("conversations", "conversation", "messages") if key in row), None))
    if not isinstance(turns, list):
        raise RowError(f"`conversations` is a list of turns, this is {kind_of(turns)}")
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    messages += [_sharegpt_turn(turn, n) for n, turn in enumerate(turns, start=1)]
    _require_answer(messages)
    return {"kind": "messages", "messages": messages, "tools": _tools(row)}


def _sharegpt_turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise RowError(f"turn {number} has no `from`")
    role = _SHAREGPT_ROLES.get(turn["from"].lower())
    if role is None:
        raise RowError(f"turn {number}: `from` is {shown(turn['from'])}, not one of {', '.join(_SHAREGPT_ROLES)}")
    if turn["from"].lower() in ("function_call", "tool_call"):
        calls = _unpacked(turn.get("value"))
        listed = calls if isinstance(calls, list) else [calls]
        return {"role": role, "content": "", "tool_calls": [_tool_call(call, number) for call in listed]}
    return _message(
        {**{k: v for k, v in turn.items() if k not in ("from", "value")}, "role": role, "content": turn.get("value")},
        number,
    )


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    turns = _unpacked(value)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"`{name}` is a list of messages, this is {'empty' if turns == [] else kind_of(turns)}")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int) -> dict[str, Any]:
    """A message as templates take it; keys that are null (as parquet has them) are left out."""
    if not isinstance(turn, dict):
        raise RowError(f"message {number} is {kind_of(turn)}, not an object with role and content")
    role = turn.get("role")
    if role not in _ROLES:
        raise RowError(f"message {number}: the role is {shown(role)}, not one of {', '.join(_ROLES)}")
    message = {key: value for key, value in turn.items() if value is not None}
    calls = _unpacked(message.pop("tool_calls", None)) or []
    if not isinstance(calls, list):
        raise RowError(f"message {number}: `tool_calls` is a list, this is {kind_of(calls)}")
    if calls:
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    message["content"] = _content(turn.get("content"), number, is_optional=bool(calls) or role == "assistant")
    return message


def _content(content: Any, number: int, *, is_optional: bool) -> str | list[dict[str, Any]]:
    """A string; a list of parts only where one of them is no text."""
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"message {number}: the content is {kind_of(content)}, not a string")
    parts = [_part(part, number) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, number: int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, dict) and (attached := attachment.part(part, number)):
        return attached
    kind = f"of type {shown(part.get('type'))}" if isinstance(part, dict) else f"that is {kind_of(part)}"
    raise RowError(f"message {number} has a part {kind}: parts are text, image, video or audio")


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates take."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"message {number}: a tool call has a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RowError(f"message {number}: the arguments of {shown(function['name'])} are not JSON") from error
    outer = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments or {}}}


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = _unpacked(row.get("tools"))
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("`tools` is a list of objects, or a JSON string of one")
    return tools


def _require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise RowError("no turn of the assistant")
    if not any(words(message).strip() or message.get("tool_calls") for message in answers):
        raise RowError("the assistant's turns are empty")


def _string(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise RowError(f"`{key}` is {kind_of(value) if key in row else 'missing'}, not a string")
    if not may_be_empty and not value.strip():
        raise RowError(f"`{key}` is empty")
    return value


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> Mapping[str, Any]:
    """The row under our names; `columns` says, for a name of ours, which column of theirs holds it."""
    if not columns:
        return row
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}


def _unpacked(value: Any) -> Any:
    """A list or object that a column holds as a JSON string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def kind_of(value: Any) -> str:
    """A value's type in JSON's words."""
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")
