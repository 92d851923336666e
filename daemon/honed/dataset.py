"""Data sets: files of rows in any of five formats, read into one kind of thing, the `Example`.

    messages            messages (or conversations): [{role, content, tool_calls?, reasoning_content?}], tools?
    prompt_completion   prompt, completion: two strings, or two lists of messages
    alpaca              instruction, input?, output, system?, history?
    sharegpt            conversations (or conversation): [{from, value}], system?, tools?
    text                text

Rows are read one at a time, never a file at once where its form allows it. A row that cannot be used is counted and the
first ones are named; a file that cannot be read is an error that names the place.
"""

from __future__ import annotations

import csv
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from honed.error import DatasetError

if TYPE_CHECKING:
    from honed.spec import DatasetSpec

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
#: How many of a data set's bad rows are named; the rest is counted.
MAX_NAMED = 5

_WANTED = {
    "messages": "`messages`",
    "prompt_completion": "`prompt` and `completion`",
    "alpaca": "`instruction` and `output`",
    "sharegpt": "`conversations` of from/value",
    "text": "`text`",
}
_FORMATS_HINT = "formats: " + "; ".join(f"{name} has {wanted}" for name, wanted in _WANTED.items())

#: Columns whose contents a model would have to see or hear; to train on the text alone would teach it to guess.
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")

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


@dataclass(frozen=True)
class Inspection:
    """What a data set looks like from its first rows."""

    format: str
    num_files: int
    num_bytes: int
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    bad: tuple[str, ...]


@dataclass(frozen=True)
class Counts:
    """What became of one data set's rows."""

    path: str
    format: str
    num_rows: int  #: in the files, bad ones included
    num_taken: int
    num_bad: int
    bad: tuple[str, ...]  #: the first few bad rows, each with its place and reason


@dataclass(frozen=True)
class Mixture:
    """All examples of a job, in the order of its data sets and their rows."""

    examples: list[Example]
    counts: list[Counts]


class _RowError(Exception):
    """Why one row cannot be used."""


# --- files -----------------------------------------------------------------------------------------------------------


def files(path: Path, *, split: str | None = None) -> list[Path]:
    """The data files of a data set: the file itself, or those of a directory by name, hidden ones left out.

    With a split, those of its directory `<split>/`, or those whose names begin with the word. Raises DatasetError where
    there is none.
    """
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DatasetError(
                f"{path}: not a kind of data file that is read here", hint=f"one of {' '.join(SUFFIXES)}"
            )
        if split is not None:
            raise DatasetError(f"{path}: `split` is for a directory with several, and this is a file")
        return [path]
    if not path.is_dir():
        raise DatasetError(f"{path}: no such file or directory", hint="paths are absolute, on the machine that trains")
    if split is not None and (path / split).is_dir():
        return files(path / split)
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    found = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in SUFFIXES]
    if split is not None:
        found = [entry for entry in found if re.split(r"[^0-9A-Za-z]", entry.name, maxsplit=1)[0] == split]
    if not found:
        names = ", ".join(entry.name for entry in entries[:8]) or "nothing"
        what = "data file" if split is None else f"data file of split {split!r}"
        raise DatasetError(
            f"{path}: no {what} in this directory (there is: {names})", hint=f"data files end in {' '.join(SUFFIXES)}"
        )
    return found


def read(path: Path, *, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one file. Raises DatasetError, which names the file, the place, and what to do."""
    for n, (row, place) in enumerate(_read_any(path)):
        if limit is not None and n >= limit:
            return
        if not isinstance(row, dict):
            raise DatasetError(f"{path}: {place}: a row is an object with columns, this is {_kind(row)}")
        yield row


def _read_any(path: Path) -> Iterator[tuple[Any, str]]:
    """Each row, or what stands in its place, with where it lies."""
    try:
        match path.suffix.lower():
            case ".jsonl":
                yield from _read_jsonl(path)
            case ".json":
                yield from _read_json(path)
            case ".csv":
                yield from _read_csv(path)
            case ".parquet":
                yield from _read_parquet(path)
            case suffix:
                raise DatasetError(f"{path}: cannot read {suffix or 'a file without suffix'}", hint=" ".join(SUFFIXES))
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: not UTF-8 at byte {error.start}", hint="convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode().rstrip())
            except UnicodeDecodeError as error:
                raise DatasetError(f"{path}: line {number}: not UTF-8 at byte {error.start + 1} of the line") from error
            except (json.JSONDecodeError, RecursionError) as error:
                raise DatasetError(
                    f"{path}: line {number}{_column(error)}: not JSON: {_json_words(error)}",
                    hint="a .jsonl file has one JSON object on each line",
                ) from error
            yield row, f"line {number}"


def _read_json(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}, column {error.colno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise DatasetError(
            f"{path}: {where}not JSON: {_json_words(error)}", hint="one object on each line is a .jsonl file"
        ) from error
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise DatasetError(f"{path}: a .json file holds a list of rows, or an object with such a list as `data`")
    yield from ((row, f"row {number}") for number, row in enumerate(rows, start=1))


def _read_csv(path: Path) -> Iterator[tuple[Any, str]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            if not reader.fieldnames:
                raise DatasetError(f"{path}: empty", hint="the first line of a .csv file names its columns")
            for row in reader:
                if None in row or None in row.values():
                    raise DatasetError(
                        f"{path}: line {reader.line_num}: not the header's number of fields ({len(reader.fieldnames)})",
                        hint="text with commas, quotes or line breaks stands in double quotes",
                    )
                yield row, f"line {reader.line_num}"
        except csv.Error as error:
            raise DatasetError(f"{path}: line {reader.line_num}: not CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        import pyarrow  # noqa: PLC0415  (heavy, and only where there is such a file)
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise DatasetError(
            f"{path}: reading .parquet needs pyarrow", hint="pip install pyarrow, or use .jsonl"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield _without_nulls(row), f"row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: not a readable .parquet file: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Parquet gives each object all the keys that any of them has, so null there means absent."""
    match value:
        case dict():
            return {key: _without_nulls(each) for key, each in value.items() if each is not None}
        case list():
            return [_without_nulls(each) for each in value]
        case _:
            return value


def _column(error: Exception) -> str:
    return f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""


def _json_words(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


# --- formats ---------------------------------------------------------------------------------------------------------


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
    found = ", ".join(map(str, row)) or "none"
    raise DatasetError(
        f"the format cannot be told from the columns ({found})",
        hint=f"{_FORMATS_HINT}; `columns` maps these names to yours, as in {{prompt: question}}",
    )


def convert(
    row: Mapping[str, Any],
    format: str,  # noqa: A002  (the spec's own word)
    *,
    columns: Mapping[str, str] | None = None,
    dataset_index: int = 0,
    row_index: int = 0,
    has_chat_template: bool = True,
) -> Example:
    """One row as an Example. Raises DatasetError for a row that cannot be used, and says why."""
    try:
        fields = _fields(_renamed(row, columns), format, has_chat_template=has_chat_template)
    except _RowError as error:
        raise DatasetError(f"row {row_index + 1}: {error}", hint=f"{format} has {_WANTED.get(format, '?')}") from error
    return Example(**fields, dataset_index=dataset_index, row_index=row_index)


def _fields(row: Mapping[str, Any], format: str, *, has_chat_template: bool) -> dict[str, Any]:  # noqa: A002
    if seen := next((key for key in _MEDIA_COLUMNS if row.get(key) not in (None, "", [])), None):
        raise _RowError(f"`{seen}` beside the text: not trained by this version, text only")
    match format:
        case "messages":
            return _from_messages(row)
        case "prompt_completion":
            return _from_prompt_completion(row)
        case "alpaca":
            return _from_alpaca(row, has_chat_template=has_chat_template)
        case "sharegpt":
            return _from_sharegpt(row)
        case "text":
            return {"kind": "text", "text": _string(row, "text")}
        case _:
            raise DatasetError(f"no such format: {format}", hint=_FORMATS_HINT)


def _from_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = next((row[key] for key in ("messages", "conversations", "conversation") if key in row), None)
    messages = _messages(turns, "messages")
    _require_answer(messages)
    return {"kind": "messages", "messages": messages, "tools": _tools(row)}


def _from_prompt_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = _unpacked(row.get("prompt")), _unpacked(row.get("completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        _require_answer(after)
        fields = {"kind": "messages", "messages": [*before, *after], "tools": _tools(row)}
        return fields | {"num_prompt_messages": len(before)}
    if isinstance(prompt, list) != isinstance(completion, list):
        raise _RowError("`prompt` and `completion` are two strings or two lists of messages, not one of each")
    completion = _string(row, "completion")
    return {"kind": "prompt_completion", "prompt": _string(row, "prompt", may_be_empty=True), "completion": completion}


def _from_alpaca(row: Mapping[str, Any], *, has_chat_template: bool) -> dict[str, Any]:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    given = _string(row, "input", may_be_empty=True)
    system, history = _string(row, "system", may_be_empty=True), _unpacked(row.get("history")) or []
    if not has_chat_template:
        if history:
            raise _RowError("`history` needs a chat template; name one with `chat_template:`")
        template = _ALPACA_WITH_INPUT if given.strip() else _ALPACA
        lead = f"{system}\n\n" if system else ""
        return {
            "kind": "prompt_completion",
            "prompt": lead + template.format(instruction=instruction, input=given),
            "completion": output,
        }
    messages = [{"role": "system", "content": system}] if system else []
    if not isinstance(history, list):
        raise _RowError("`history` is a list of pairs of instruction and answer")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _RowError("`history` is a list of pairs of instruction and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return {"kind": "messages", "messages": messages}


def _from_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = _unpacked(next((row[key] for key in ("conversations", "conversation", "messages") if key in row), None))
    if not isinstance(turns, list):
        raise _RowError(f"`conversations` is a list of turns, this is {_kind(turns)}")
    system = row.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    messages += [_sharegpt_turn(turn, n) for n, turn in enumerate(turns, start=1)]
    _require_answer(messages)
    return {"kind": "messages", "messages": messages, "tools": _tools(row)}


def _sharegpt_turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise _RowError(f"turn {number} has no `from`")
    role = _SHAREGPT_ROLES.get(turn["from"].lower())
    if role is None:
        raise _RowError(f"turn {number}: `from` is {turn['from']!r}, not one of {', '.join(_SHAREGPT_ROLES)}")
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
        raise _RowError(f"`{name}` is a list of messages, this is {'empty' if turns == [] else _kind(turns)}")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int) -> dict[str, Any]:
    """A message as templates take it; keys that are null (as parquet has them) are left out."""
    if not isinstance(turn, dict):
        raise _RowError(f"message {number} is {_kind(turn)}, not an object with role and content")
    role = turn.get("role")
    if role not in _ROLES:
        raise _RowError(f"message {number}: the role is {role!r}, not one of {', '.join(_ROLES)}")
    message = {key: value for key, value in turn.items() if value is not None}
    calls = _unpacked(message.pop("tool_calls", None)) or []
    if not isinstance(calls, list):
        raise _RowError(f"message {number}: `tool_calls` is a list, this is {_kind(calls)}")
    if calls:
        message["tool_calls"] = [_tool_call(call, number) for call in calls]
    message["content"] = _content(turn.get("content"), number, is_optional=bool(calls) or role == "assistant")
    return message


def _content(content: Any, number: int, *, is_optional: bool) -> str:
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _RowError(f"message {number}: the content is {_kind(content)}, not a string")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise _RowError(f"message {number} has a part of type {kind}: not trained by this version, text only")
    return "".join(texts)


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates take."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _RowError(f"message {number}: a tool call has a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise _RowError(f"message {number}: the arguments of {function['name']} are not JSON") from error
    outer = {key: value for key, value in call.items() if key != "function"} if "function" in call else {}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments or {}}}


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = _unpacked(row.get("tools"))
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _RowError("`tools` is a list of objects, or a JSON string of one")
    return tools


def _require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise _RowError("no turn of the assistant")
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise _RowError("the assistant's turns are empty")


def _string(row: Mapping[str, Any], key: str, *, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise _RowError(f"`{key}` is {_kind(value) if key in row else 'missing'}, not a string")
    if not may_be_empty and not value.strip():
        raise _RowError(f"`{key}` is empty")
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
        except (json.JSONDecodeError, RecursionError):
            return value
    return value


# --- data sets -------------------------------------------------------------------------------------------------------


def inspect(dataset: DatasetSpec, *, num_rows: int = 20) -> Inspection:
    """A look at a data set's first rows. Raises DatasetError where they cannot be read, or half of them not be used."""
    paths = files(Path(dataset.path), split=dataset.split)
    collected = _Collector(dataset, 0, has_chat_template=True)
    rows: list[dict[str, Any]] = []
    for path in paths:
        for row, place in _read_any(path):
            if collected.num_rows >= num_rows:
                break
            collected.add(row, path, place)
            rows += [row] if isinstance(row, dict) else []
    collected.check()
    return Inspection(
        format=collected.format,
        num_files=len(paths),
        num_bytes=sum(path.stat().st_size for path in paths),
        columns=tuple(dict.fromkeys(str(key) for row in rows for key in row)),
        rows=rows,
        bad=tuple(collected.bad),
    )


def load(datasets: Sequence[DatasetSpec], *, seed: int, has_chat_template: bool) -> Mixture:
    """Every row of the data sets, or the shares of them that `fraction` asks for.

    Fractions are shares of the mixture, normalised to one; the mixture is as large as can be with no row drawn twice.
    Which rows of a data set are drawn depends on the seed alone; they stay in their order.
    """
    collected = [_collect(dataset, n, has_chat_template=has_chat_template) for n, dataset in enumerate(datasets)]
    drawn = _draw([each.examples for each in collected], [dataset.fraction for dataset in datasets], seed)
    counts = [
        Counts(str(dataset.path), each.format, each.num_rows, len(examples), each.num_bad, tuple(each.bad))
        for dataset, each, examples in zip(datasets, collected, drawn, strict=True)
    ]
    return Mixture([example for examples in drawn for example in examples], counts)


def split(examples: Sequence[Example], eval_split: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Those to train on and those held out, in order, each at least one. Raises DatasetError for a single example."""
    if len(examples) < 2:
        raise DatasetError("one example cannot be split in two", hint="leave out eval_split, or add rows")
    num_held = min(max(round(len(examples) * eval_split), 1), len(examples) - 1)
    held = set(random.Random(seed).sample(range(len(examples)), num_held))
    train = [example for n, example in enumerate(examples) if n not in held]
    return train, [example for n, example in enumerate(examples) if n in held]


def _draw(sets: list[list[Example]], fractions: Sequence[float | None], seed: int) -> list[list[Example]]:
    given = [fraction for fraction in fractions if fraction is not None]
    if not given:
        return sets
    if len(given) < len(fractions):
        raise DatasetError("`fraction` is set for some data sets and not for others", hint="set it for all or none")
    weights = [fraction / sum(given) for fraction in given]
    total = min(len(examples) / weight for examples, weight in zip(sets, weights, strict=True) if weight > 0)
    return [
        _sample(examples, round(weight * total), random.Random(f"{seed} {n}"))
        for n, (examples, weight) in enumerate(zip(sets, weights, strict=True))
    ]


def _sample(examples: list[Example], number: int, rng: random.Random) -> list[Example]:
    return [examples[n] for n in sorted(rng.sample(range(len(examples)), min(number, len(examples))))]


def _collect(dataset: DatasetSpec, index: int, *, has_chat_template: bool) -> _Collector:
    collected = _Collector(dataset, index, has_chat_template=has_chat_template)
    for path in files(Path(dataset.path), split=dataset.split):
        for row, place in _read_any(path):
            if dataset.max_rows is not None and collected.num_rows >= dataset.max_rows:
                break
            collected.add(row, path, place)
    collected.check()
    return collected


class _Collector:
    """One data set's rows as they are read: the examples, and the bad ones with their places."""

    def __init__(self, dataset: DatasetSpec, index: int, *, has_chat_template: bool) -> None:
        self._dataset, self._index, self._has_chat_template = dataset, index, has_chat_template
        self.format: str = "" if dataset.format == "auto" else dataset.format
        self.examples: list[Example] = []
        self.num_rows = 0
        self.num_bad = 0
        self.bad: list[str] = []

    def add(self, row: Any, path: Path, place: str) -> None:
        self.num_rows += 1
        try:
            self.examples.append(self._example(row))
        except _RowError as error:
            self.num_bad += 1
            if len(self.bad) < MAX_NAMED:
                self.bad.append(f"{path.name}, {place}: {error}")

    def check(self) -> None:
        """Raises DatasetError where no row is good, or more than half are bad."""
        if not self.num_rows:
            raise DatasetError(f"{self._dataset.path}: there is no row in it")
        if self.num_bad * 2 > self.num_rows or not self.examples:
            raise DatasetError(
                f"{self._dataset.path}: {self.num_bad} of {self.num_rows} rows cannot be used"
                f"{f' as {self.format}' if self.format else ''}: {'; '.join(self.bad)}",
                hint=f"`format` and `columns` of a data set say how its rows are read. {_FORMATS_HINT}",
            )

    def _example(self, row: Any) -> Example:
        if not isinstance(row, dict):
            raise _RowError(f"a row is an object with columns, this is {_kind(row)}")
        columns = self._dataset.columns
        if not self.format:
            try:
                self.format = recognise(row, columns)
            except DatasetError as error:
                raise _RowError(error.message) from error
        fields = _fields(_renamed(row, columns), self.format, has_chat_template=self._has_chat_template)
        return Example(**fields, dataset_index=self._index, row_index=self.num_rows - 1)
