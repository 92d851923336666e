"""One row of any format, converted into the form that is trained on: the `Example`.

The columns of every format are in form/, one file per form of rows. All formats but text may have
chat_template_kwargs, the chat template's arguments for that row, which take precedence over the job's. They may also
have images, videos and sounds (see attachment.py). Such a row is always a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from honed.inputs import attachment
from honed.inputs.attachment import RowError
from honed.inputs.form import base as forms
from honed.inputs.media import Media
from honed.inputs.message import WEIGHTS, kind_of, unpacked
from honed.spec.media import Kind
from honed.system import quote
from honed.system.error import DatasetError

#: Columns of a row that a message names, at most.
MAX_COLUMNS = 20
#: The columns with a row's tags, and characters of a tag; a longer text is no tag.
_TAGS = ("tag", "tags")
MAX_TAG_LENGTH = 64


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
    others: tuple[
        dict[str, Any], ...
    ] = ()  #: its further answers: the fields in which each differs from this, the first

    @property
    def answers(self) -> tuple[Example, ...]:
        """The row once for each of its answers, with that one alone."""
        return tuple(replace(self, others=(), **other) for other in ({}, *self.others))

    @property
    def trained_turns(self) -> list[int]:
        """Indices of the messages that are trained on: the assistant's, except in the prompt and those of weight 0."""
        turns = range(self.num_prompt_messages, len(self.messages))
        return [i for i in turns if self.messages[i]["role"] == "assistant" and i not in self.untrained]


def recognise(row: Mapping[str, Any], columns: Mapping[str, str] | None = None, *, form: str = "text") -> str:
    """Return a row's format by its columns. Raises DatasetError, which lists the columns of the row and those of each
    format of the form."""
    named = _renamed(row, columns)
    for name, item in forms.of(form).formats.items():
        if item.fits(named):
            return name
    shown = quote.names(map(str, list(row)[:MAX_COLUMNS])) or "none"
    shown += f", and {len(row) - MAX_COLUMNS} more" if len(row) > MAX_COLUMNS else ""
    raise DatasetError(
        f"the format cannot be determined from the columns ({shown})",
        hint=f"{forms.of(form).hint}; `columns` maps these names to yours, as in {{prompt: question}}",
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
        needs = forms.of_format(format).needs
        raise DatasetError(f"row {row_index + 1}: {error}", hint=f"{format} needs {needs}") from error
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
    named = {key: unpacked(value) if key in attachment.COLUMNS else value for key, value in named.items()}
    answers = forms.of_format(format).answers(named, has_chat_template=has_chat_template)
    made, *others = [_finished(answer, named, directories) for answer in answers]
    if others:
        if any(answer.get("media") for answer in (made, *others)):
            raise RowError("images, videos and sounds are not supported in rows with several answers")
        made["others"] = tuple({key: answer[key] for key in answer if answer[key] != made[key]} for answer in others)
    made["tags"] = _tags(named)
    return made


def _finished(
    made: dict[str, Any], named: Mapping[str, Any], directories: Mapping[Kind, Path] | None
) -> dict[str, Any]:
    """Add to an answer's fields what all formats have in common. Raises RowError."""
    if made["kind"] == "messages":
        made["chat_template_kwargs"] = _template_kwargs(named.get("chat_template_kwargs"))
        made["untrained"] = tuple(i for i, message in enumerate(made["messages"]) if message.get("weight") is False)
        made["messages"] = [{key: message[key] for key in message if key != "weight"} for message in made["messages"]]
        made["messages"], made["media"] = attachment.place(named, made["messages"], directories)
    _check_text({key: value for key, value in made.items() if key != "media"})
    return made


def _tags(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's tags: the texts in its columns `tag` and `tags`. Other values there are no tags."""
    given = [row.get("tag"), *(tags if isinstance(tags := unpacked(row.get("tags")), list) else [tags])]
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


def _template_kwargs(value: Any) -> dict[str, Any]:
    """Return a row's arguments for the chat template, without nulls, which parquet has for arguments of other rows."""
    kwargs = unpacked(value)
    if kwargs is None or kwargs == "":
        return {}
    if not isinstance(kwargs, dict):
        raise RowError(f"`chat_template_kwargs` must be an object, this is {kind_of(kwargs)}")
    if reserved := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise RowError(f"`chat_template_kwargs` has `{reserved[0]}`, which cannot be passed to a chat template")
    return {str(key): item for key, item in kwargs.items() if item is not None}


def unread(row: Mapping[str, Any], format: str, columns: Mapping[str, str]) -> list[str]:  # noqa: A002
    """Return the columns of a row that are not read, by their names in the file."""
    its = forms.of_format(format)
    ours = {*its.reads, *attachment.COLUMNS, *_TAGS}
    if its.has_turns:
        ours.add(next((key for key in forms.TURNS if key in row or key in columns), forms.TURNS[0]))
    read = ours | {theirs for name, theirs in columns.items() if name in ours}
    return [key for key, value in row.items() if key not in read and attachment.is_given(value)]


def unread_message(names: Sequence[str], format: str) -> str:  # noqa: A002
    """Return a sentence on columns that are not read; it explains `weight` if one of them looks like a weight."""
    named = quote.names(names[:MAX_COLUMNS], "`{}`")
    named += f", and {len(names) - MAX_COLUMNS} more" if len(names) > MAX_COLUMNS else ""
    if not (weights := [name for name in names if name in (*WEIGHTS, "weights", "mask")]):
        return f"unused columns: {named}"
    instead = (
        "to exclude an assistant turn from training, set `weight: 0` in its message"
        if forms.of_format(format).has_turns
        else "to exclude a row from training, remove it from the file"
    )
    return f"unused columns: {named}. `{weights[0]}` of a row has no effect: {instead}"


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> Mapping[str, Any]:
    if not columns:
        return row
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
