"""One row of any format, converted into the form that is trained on: the `Example`.

    messages            messages (or conversations): [{role, content, tool_calls?, reasoning_content?, weight?}], tools?
    prompt_completion   prompt, completion: two strings, or two lists of messages
    alpaca              instruction, input?, output, system?, history?
    sharegpt            conversations (or conversation): [{from, value}], system?, tools?
    text                text

All but the last may have chat_template_kwargs, the chat template's arguments for that row, which take precedence over
the job's. They may also have images, videos and sounds (see attachment.py). Such a row is always a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from honed.inputs import attachment
from honed.inputs.attachment import RowError
from honed.inputs.media import Media
from honed.spec.media import Kind
from honed.spec.problem import shown
from honed.system import quote
from honed.system.error import DatasetError

_WANTED = {
    "messages": "`messages`",
    "prompt_completion": "`prompt` and `completion`",
    "alpaca": "`instruction` and `output`",
    "sharegpt": "`conversations` of from/value",
    "text": "`text`",
}
FORMATS_HINT = "formats: " + "; ".join(f"{name} needs {wanted}" for name, wanted in _WANTED.items())

#: Columns of a row that a message names, at most.
MAX_COLUMNS = 20
#: The columns with a row's tags, and characters of a tag; a longer text is no tag.
_TAGS = ("tag", "tags")
MAX_TAG_LENGTH = 64
#: The columns that a format reads; of `_TURNS`, which hold the turns, the first that exists.
_TURNS = ("messages", "conversations", "conversation")
_READ: Mapping[str, tuple[str, ...]] = {
    "messages": ("tools", "chat_template_kwargs"),
    "prompt_completion": ("prompt", "completion", "tools", "chat_template_kwargs"),
    "alpaca": ("instruction", "input", "output", "system", "history", "chat_template_kwargs"),
    "sharegpt": ("system", "tools", "chat_template_kwargs"),
    "text": ("text",),
}
#: Names that are not arguments of a chat template: honed, or another key, passes them to the renderer.
RESERVED_KWARGS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
#: Keys of a message that select it for training, and their value that excludes it. `weight` is OpenAI's.
_WEIGHTS: Mapping[str, bool] = {"weight": False, "train": False, "training": False, "loss": False, "masked": True}
#: The same keys for parts of a message, in axolotl's rows.
_DETAILS = ("train_detail", "training_detail")
_ROLES = ("system", "developer", "user", "assistant", "tool")
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


class Arguments(dict[str, Any]):
    """A tool call's arguments as an object, with the row's JSON text: some templates render the text unchanged."""

    def __init__(self, values: Mapping[str, Any], written: str) -> None:
        super().__init__(values)
        self.written = written


@dataclass(frozen=True)
class Example:
    """One row, independent of its format."""

    kind: Literal["messages", "prompt_completion", "text"]
    messages: list[dict[str, Any]] = field(default_factory=list)  #: as chat templates take them
    tools: list[Any] | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    dataset_index: int = 0
    row_index: int = 0
    num_prompt_messages: int = 0  #: the assistant's turns among these first messages are not trained on
    media: tuple[Media, ...] = ()  #: media in the parts of its messages, in order
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  #: the row's own, which override the job's
    untrained: tuple[int, ...] = ()  #: messages of weight 0, which are only context
    tags: tuple[str, ...] = ()  #: the row's own, in order, each once; metrics are also computed for each

    @property
    def trained_turns(self) -> list[int]:
        """Indices of the messages that are trained on: the assistant's, except in the prompt and those of weight 0."""
        turns = range(self.num_prompt_messages, len(self.messages))
        return [i for i in turns if self.messages[i]["role"] == "assistant" and i not in self.untrained]


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


def recognise(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> str:
    """Return a row's format by its columns. Raises DatasetError, which lists the columns found and those of each
    format."""
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
    found = quote.names(map(str, list(row)[:MAX_COLUMNS])) or "none"
    found += f", and {len(row) - MAX_COLUMNS} more" if len(row) > MAX_COLUMNS else ""
    raise DatasetError(
        f"the format cannot be determined from the columns ({found})",
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
    """Return a row as an Example. Raises DatasetError, with the reason, for an unusable row.

    `directories` are the base directories of its images', videos' and sounds' paths.
    """
    try:
        made = fields(row, format, columns, has_chat_template=has_chat_template, directories=directories)
    except RowError as error:
        raise DatasetError(
            f"row {row_index + 1}: {error}", hint=f"{format} needs {_WANTED.get(format, '?')}"
        ) from error
    return Example(**made, dataset_index=dataset_index, row_index=row_index)


def fields(
    row: Mapping[str, Any],
    format: str,  # noqa: A002
    columns: Mapping[str, str] | None,
    *,
    has_chat_template: bool,
    directories: Mapping[Kind, Path] | None,
) -> dict[str, Any]:
    """Return an Example's fields, except for its origin. Raises RowError."""
    named = _renamed(row, columns)
    named = {key: _unpacked(value) if key in attachment.COLUMNS else value for key, value in named.items()}
    made = _of_format(named, format, has_chat_template=has_chat_template)
    if made["kind"] == "messages":
        made["chat_template_kwargs"] = _template_kwargs(named.get("chat_template_kwargs"))
        made["untrained"] = tuple(i for i, message in enumerate(made["messages"]) if message.get("weight") is False)
        made["messages"] = [{key: message[key] for key in message if key != "weight"} for message in made["messages"]]
        made["messages"], made["media"] = attachment.place(named, made["messages"], directories)
    _check_text({key: value for key, value in made.items() if key != "media"})
    made["tags"] = _tags(named)
    return made


def _tags(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's tags: the texts in its columns `tag` and `tags`. Other values there are no tags."""
    given = [row.get("tag"), *(tags if isinstance(tags := _unpacked(row.get("tags")), list) else [tags])]
    return tuple(sorted({text for item in given if isinstance(item, str) and _is_tag(text := item.strip())}))


def _is_tag(text: str) -> bool:
    return 0 < len(text) <= MAX_TAG_LENGTH and text.isprintable()


_as_json = json.JSONEncoder(ensure_ascii=False, default=str).encode


def _check_text(made: dict[str, Any]) -> None:
    """Check the text: JSON can contain lone surrogates and endless nesting, which no tokenizer accepts."""
    try:
        _as_json(made).encode()
    except UnicodeEncodeError:
        raise RowError("an unpaired surrogate (\\ud800 to \\udfff), which is not valid text") from None
    except RecursionError:
        raise RowError("nested too deeply") from None


def _of_format(row: Mapping[str, Any], format: str, *, has_chat_template: bool) -> dict[str, Any]:  # noqa: A002
    attached = next((key for key in attachment.COLUMNS if attachment.is_given(row.get(key))), None)
    if attached and format in ("alpaca", "prompt_completion") and not has_chat_template:
        raise RowError(f"`{attached}` next to the text needs a chat template; set one with `chat_template:`")
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
            raise RowError(f"`{attached}` next to `text`, but no turn to put it in; such rows must be conversations")
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
        if named := [n for n, message in enumerate(before, start=1) if message.get("weight")]:
            raise RefusedRowError(
                f"message {named[0]} of the `prompt` is set to be trained on, but a prompt never is",
                hint="write the row as `messages`: every assistant turn is trained on, except those with weight 0",
            )
        _require_answer(after)
        fields = {"kind": "messages", "messages": [*before, *after], "tools": _tools(row)}
        return fields | {"num_prompt_messages": len(before)}
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("`prompt` and `completion` must both be strings or both be lists of messages")
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
            raise RowError("`history` needs a chat template; set one with `chat_template:`")
        template = _ALPACA_WITH_INPUT if given.strip() else _ALPACA
        lead = f"{system}\n\n" if system else ""
        return {
            "kind": "prompt_completion",
            "prompt": lead + template.format(instruction=instruction, input=given),
            "completion": output,
        }
    messages = [{"role": "system", "content": system}] if system else []
    if not isinstance(history, list):
        raise RowError("`history` must be a list of instruction/answer pairs")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError("`history` must be a list of instruction/answer pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return {"kind": "messages", "messages": messages}


def _from_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = _unpacked(next((row[key] for key in ("conversations", "conversation", "messages") if key in row), None))
    if not isinstance(turns, list):
        raise RowError(f"`conversations` must be a list of turns, this is {kind_of(turns)}")
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
        called = {"role": role, "content": "", "tool_calls": [_tool_call(call, number) for call in listed]}
        return called | _weight(turn, role, number)
    return _message(
        {**{k: v for k, v in turn.items() if k not in ("from", "value")}, "role": role, "content": turn.get("value")},
        number,
    )


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    turns = _unpacked(value)
    if not isinstance(turns, list) or not turns:
        raise RowError(f"`{name}` must be a list of messages, this is {'empty' if turns == [] else kind_of(turns)}")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int) -> dict[str, Any]:
    """Return a message in templates' format; null keys (as parquet has them) are left out."""
    if not isinstance(turn, dict):
        raise RowError(f"message {number} is {kind_of(turn)}, not an object with role and content")
    role = turn.get("role")
    if role not in _ROLES:
        raise RowError(f"message {number}: the role is {shown(role)}, not one of {', '.join(_ROLES)}")
    weight = _weight(turn, role, number)
    message = {key: value for key, value in turn.items() if value is not None and key not in _WEIGHTS} | weight
    calls = _unpacked(message.pop("tool_calls", None)) or []
    if not isinstance(calls, list):
        raise RowError(f"message {number}: `tool_calls` must be a list, this is {kind_of(calls)}")
    if calls:
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    message["content"] = _content(turn.get("content"), number, is_optional=bool(calls) or role == "assistant")
    return message


def _weight(turn: Mapping[str, Any], role: str, number: int) -> dict[str, bool]:
    """Return `{"weight": bool}` if a message says whether it is trained on; else an empty dict."""
    if detail := next((key for key in _DETAILS if attachment.is_given(turn.get(key))), None):
        raise RefusedRowError(
            f"message {number}: `{detail}` applies to parts of a turn, but a turn is trained on either completely or "
            "not at all",
            hint="remove it, and set `weight: 0` on turns that are not to be trained on",
        )
    said = {key: turn[key] for key in _WEIGHTS if turn.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RefusedRowError(
                f"message {number}: `{key}` is {shown(value)}, but must be 1 or 0",
                hint="write 1 or 0 (true or false), or remove it: every assistant turn is trained on by default",
            )
    trained = {key: bool(value) != _WEIGHTS[key] for key, value in said.items()}
    if len(set(trained.values())) > 1:
        told = " and ".join(f"`{key}: {shown(said[key])}`" for key in trained)
        raise RefusedRowError(f"message {number}: {told} contradict each other", hint="keep only one of them")
    if any(trained.values()) and role != "assistant":
        key = next(iter(trained))
        raise RefusedRowError(
            f"message {number}: `{key}: {shown(said[key])}` on a turn of the {role}: only assistant turns are "
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


def _tool_call(call: Any, number: int) -> dict[str, Any]:
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


def _template_kwargs(value: Any) -> dict[str, Any]:
    """Return a row's arguments for the chat template, without nulls, which parquet has for arguments of other rows."""
    kwargs = _unpacked(value)
    if kwargs is None or kwargs == "":
        return {}
    if not isinstance(kwargs, dict):
        raise RowError(f"`chat_template_kwargs` must be an object, this is {kind_of(kwargs)}")
    if reserved := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise RowError(f"`chat_template_kwargs` has `{reserved[0]}`, which cannot be passed to a chat template")
    return {str(key): item for key, item in kwargs.items() if item is not None}


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = _unpacked(row.get("tools"))
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("`tools` must be a list of objects, or a JSON string of one")
    return tools


def _require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise NoAnswerError("no assistant turn")
    # If none of them is trained on, the row is left out and counted when it is encoded.
    answers = [message for message in answers if message.get("weight") is not False] or answers
    if not any(words(message).strip() or message.get("tool_calls") for message in answers):
        raise RowError("the assistant turns are empty")


def unread(row: Mapping[str, Any], format: str, columns: Mapping[str, str]) -> list[str]:  # noqa: A002
    """Return the columns of a row that are not read, by their names in the file."""
    ours = {*_READ.get(format, ()), *attachment.COLUMNS, *_TAGS}
    if format in ("messages", "sharegpt"):
        ours.add(next((key for key in _TURNS if key in row or key in columns), _TURNS[0]))
    read = ours | {theirs for name, theirs in columns.items() if name in ours}
    return [key for key, value in row.items() if key not in read and attachment.is_given(value)]


def told_unread(names: Sequence[str], format: str) -> str:  # noqa: A002
    """Return a sentence on columns that are not read; it explains `weight` if one of them looks like a weight."""
    named = quote.names(names[:MAX_COLUMNS], "`{}`")
    named += f", and {len(names) - MAX_COLUMNS} more" if len(names) > MAX_COLUMNS else ""
    if not (weights := [name for name in names if name in (*_WEIGHTS, "weights", "mask")]):
        return f"unused columns: {named}"
    instead = (
        "to exclude an assistant turn from training, set `weight: 0` in its message"
        if format in ("messages", "sharegpt")
        else "to exclude a row from training, remove it from the file"
    )
    return f"unused columns: {named}. `{weights[0]}` of a row has no effect: {instead}"


def _string(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise RowError(f"`{key}` must be a string, but is {kind_of(value) if key in row else 'missing'}")
    if not may_be_empty and not value.strip():
        raise RowError(f"`{key}` is empty")
    return value


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> Mapping[str, Any]:
    """Return the row under our names; `columns` maps our names to those of the data set."""
    if not columns:
        return row
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}


def _unpacked(value: Any) -> Any:
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
