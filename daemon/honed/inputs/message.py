"""The messages of a row, converted into the form in which chat templates take them, and values of its columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from honed.inputs import attachment
from honed.inputs.attachment import RowError
from honed.spec.problem import shown

#: Keys of a message that select it for training, and their value that excludes it. `weight` is OpenAI's.
WEIGHTS: Mapping[str, bool] = {"weight": False, "train": False, "training": False, "loss": False, "masked": True}
#: The same keys for parts of a message, in axolotl's rows.
_DETAILS = ("train_detail", "training_detail")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Arguments(dict[str, Any]):
    """A tool call's arguments as an object, with the row's JSON text: some templates render the text unchanged."""

    def __init__(self, values: Mapping[str, Any], written: str) -> None:
        super().__init__(values)
        self.written = written


class RefusedRowError(RowError):
    """A row that asks for something unsupported. With or without the row, training would differ from what it asks, so
    the job is refused."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class NoAnswerError(RowError):
    """A row without an answer, so that there is nothing to learn from it."""


def words(message: Mapping[str, Any]) -> str:
    """Return a message's text: its content, or the texts of its parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def conversation(value: Any, name: str) -> list[dict[str, Any]]:
    turns = unpacked(value)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"`{name}` must be a list of messages, this is {'empty' if turns == [] else kind_of(turns)}")
    return [message_of(turn, number) for number, turn in enumerate(turns, start=1)]


def message_of(turn: Any, number: int) -> dict[str, Any]:
    """Return a message in templates' format; null keys (as parquet has them) are left out."""
    if not isinstance(turn, dict):
        raise RowError(f"message {number} is {kind_of(turn)}, not an object with role and content")
    role = turn.get("role")
    if role not in _ROLES:
        raise RowError(f"message {number}: the role is {shown(role)}, not one of {', '.join(_ROLES)}")
    weight = weight_of(turn, role, number)
    message = {key: value for key, value in turn.items() if value is not None and key not in WEIGHTS} | weight
    calls = unpacked(message.pop("tool_calls", None)) or []
    if not isinstance(calls, list):
        raise RowError(f"message {number}: `tool_calls` must be a list, this is {kind_of(calls)}")
    if calls:
        message["tool_calls"] = [tool_call(call, number) for call in calls]
    message["content"] = _content(turn.get("content"), number, is_optional=bool(calls) or role == "assistant")
    return message


def weight_of(turn: Mapping[str, Any], role: str, number: int) -> dict[str, bool]:
    """Return `{"weight": bool}` if a message says whether it is trained on; else an empty dict."""
    if detail := next((key for key in _DETAILS if attachment.is_given(turn.get(key))), None):
        raise RefusedRowError(
            f"message {number}: `{detail}` applies to parts of a turn, but a turn is trained on either completely or "
            "not at all",
            hint="remove it, and set `weight: 0` on turns that are not to be trained on",
        )
    weights = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    for key, value in weights.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RefusedRowError(
                f"message {number}: `{key}` is {shown(value)}, but must be 1 or 0",
                hint="write 1 or 0 (true or false), or remove it: every assistant turn is trained on by default",
            )
    trained = {key: bool(value) != WEIGHTS[key] for key, value in weights.items()}
    if len(set(trained.values())) > 1:
        keys = " and ".join(f"`{key}: {shown(weights[key])}`" for key in trained)
        raise RefusedRowError(f"message {number}: {keys} contradict each other", hint="keep only one of them")
    if any(trained.values()) and role != "assistant":
        key = next(iter(trained))
        raise RefusedRowError(
            f"message {number}: `{key}: {shown(weights[key])}` on a turn of the {role}: only assistant turns are "
            "trained on",
            hint="remove it there; to train on the full text, use `text` rows",
        )
    return dict.fromkeys(["weight"] if trained else [], any(trained.values()))


def _content(content: Any, number: int, *, is_optional: bool) -> str | list[dict[str, Any]]:
    """Return the content as a string; as a list of parts only if one of them is not text."""
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"message {number}: the content must be a string, this is {kind_of(content)}")
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
    raise RowError(f"message {number} has a part {kind}: parts must be text, image, video or audio")


def tool_call(call: Any, number: int) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates expect it."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"message {number}: a tool call must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(written := arguments, str):
        try:
            arguments = json.loads(written or "{}")
        except (ValueError, RecursionError) as error:
            raise RowError(f"message {number}: the arguments of {shown(function['name'])} are not JSON") from error
        if isinstance(arguments, dict):
            arguments = Arguments(arguments, written)
    outer = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments or {}}}


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    tools = unpacked(row.get("tools"))
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("`tools` must be a list of objects, or a JSON string of one")
    return tools


def require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise NoAnswerError("no assistant turn")
    # If none of them is trained on, the row is left out and counted when it is encoded.
    answers = [message for message in answers if message.get("weight") is not False] or answers
    if not any(words(message).strip() or message.get("tool_calls") for message in answers):
        raise RowError("the assistant turns are empty")


def string(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise RowError(f"`{key}` must be a string, but is {kind_of(value) if key in row else 'missing'}")
    if not may_be_empty and not value.strip():
        raise RowError(f"`{key}` is empty")
    return value


def unpacked(value: Any) -> Any:
    """Decode a list or object that a column holds as a JSON string; other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def kind_of(value: Any) -> str:
    """Return a value's type in JSON's terms."""
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")
