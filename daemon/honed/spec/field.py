"""The types of values in a spec, each with a description: error messages and the reference use the same words.

A type is an annotation. `describe` converts any of them to text. If bounds or unions would read badly, an `Expected` in
the metadata has the text instead; a validator that calls `refuse` has its own message.
"""

from __future__ import annotations

import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from honed.system import quote

#: Up to this many choices are listed in a message; the reference has them all.
MANY = 8
#: The type of errors raised by `refuse`; their message is reported unchanged.
REFUSED = "refused"
#: Prefix of the tags of a union's members. Such a tag appears in an error's location, and no key begins with it.
MEMBER = "\0"


class Section(BaseModel):
    """A mapping with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, serialize_by_alias=True)


@dataclass(frozen=True)
class Expected:
    """Description of the values that a key takes, to follow "expected"."""

    words: str


@dataclass(frozen=True)
class Place:
    """Marker in a key's metadata: its value names a file or a directory, or may."""


def names_place(annotation: Any) -> bool:
    """Tell whether a key's value names a file or a directory."""
    return isinstance(annotation, Place) or any(names_place(arg) for arg in get_args(annotation))


def refuse(message: str, hint: str = "", *, write: Any = None, fix: Mapping[str, Any] | None = None) -> NoReturn:
    """Reject a value from within a validator with its own message. `write` is the intended value, if known; `fix` lists
    the edits of the job file, if more than this key must change.
    """
    # Braces in the message would be parsed as placeholders.
    raise PydanticCustomError(REFUSED, "{message}", {"message": message, "hint": hint, "write": write, "fix": fix})


def describe(annotation: Any) -> str:
    """Describe an annotation: `Annotated[int, Ge(1)] | None` is "a whole number, at least 1, or null"."""
    base, metadata = _apart(annotation)
    if expected := next((item for item in metadata if isinstance(item, Expected)), None):
        return expected.words
    bounds = " and ".join(words for item in metadata if (words := _bound_words(item)))
    return _base_words(base) + (f", {bounds}" if bounds else "")


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a value may have: the members of a union without null and metadata, or the single type."""
    base, _ = _apart(annotation)
    if get_origin(base) not in (typing.Union, types.UnionType):
        return (base,)
    return tuple(item for member in get_args(base) if member is not type(None) for item in members(member))


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words of an enumeration; empty for any other type."""
    return tuple(word for member in members(annotation) if get_origin(member) is Literal for word in get_args(member))


def keys(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a section's keys, as they are written in files, with their fields."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


@functools.cache
def kinds(section: type[BaseModel]) -> Mapping[str, Any]:
    """Return a section's keys with their full annotations."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {info.alias or name: hints[name] for name, info in section.model_fields.items()}


def _apart(annotation: Any) -> tuple[Any, list[Any]]:
    if get_origin(annotation) is not Annotated:
        return annotation, []
    base, *metadata = get_args(annotation)
    return base, [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _base_words(base: Any) -> str:
    words = {int: "an integer", float: "a number", str: "text", bool: "true or false", Any: "any value"}
    if base in words:
        return words[base]
    origin, args = get_origin(base), get_args(base)
    if origin in (typing.Union, types.UnionType):
        words_of = [describe(member) for member in args if member is not type(None)]
        return " or ".join(words_of) + (", or null" if type(None) in args else "")
    if origin is Literal:
        args_shown = [*args[:MANY], "…"] if len(args) > MANY else args
        return f"one of {', '.join(args_shown)}" if len(args) > 1 else str(args[0])
    if origin is tuple:
        return f"a list of {len(args)} items, each {describe(args[0])}"
    if origin is list:
        return f"a list, each item {describe(args[0])}"
    if isinstance(base, type) and issubclass(base, BaseModel):
        return "a mapping"
    if origin is dict and args[1] is not Any:
        return f"a mapping, each value {describe(args[1])}"
    return "a mapping of keys to values"


def _bound_words(bound: Any) -> str:
    match bound:
        case Ge(ge=limit):
            return f"at least {limit}"
        case Gt(gt=limit):
            return f"more than {limit}"
        case Le(le=limit):
            return f"at most {limit}"
        case Lt(lt=limit):
            return f"less than {limit}"
        case MinLen(min_length=1):
            return "not empty"
        case _:
            return ""


# --- Kinds ------------------------------------------------------------------------------------------------------------

#: YAML 1.1 read these as booleans, and people still write them.
_FLAG_WORDS = {"yes": True, "on": True, "no": False, "off": False}


def _flag(value: Any) -> Any:
    return _FLAG_WORDS.get(value.lower(), value) if isinstance(value, str) else value


def any_of(is_right: Callable[[Any], bool], *kinds: type, schema: Any = None) -> PlainValidator:
    """Return the validator of a key that takes values of several types; its `Expected` describes them. `schema` is the
    type that the JSON Schema has, if it can say more than `kinds`.
    """

    def validate(value: Any) -> Any:
        if type(value) not in kinds or not is_right(value):
            raise ValueError
        return value

    return PlainValidator(validate, json_schema_input_type=schema or functools.reduce(operator.or_, kinds))


def is_texts(value: Any) -> bool:
    return bool(value) and all(isinstance(item, str) and item for item in value)


def _is_steps(value: float) -> bool:
    return 0 < value < 1 or (value >= 1 and value == int(value))


#: A shell variable.
VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")
#: The hint for a relative path in a file whose original directory is unknown.
RELATIVE = "begin with /; honectl submit resolves relative paths against the job file's directory"


def absolute(value: str) -> str:
    """Return a normalised absolute path; rejects a relative one."""
    if value.startswith("~"):
        refuse(
            f"paths must be absolute, {_shown(value)} begins with ~",
            "honed does not know that home directory: write it out, or use honectl submit",
        )
    if match := VARIABLE.match(value):
        refuse(
            f"paths must be absolute, {_shown(value)} begins with a shell variable",
            f"{quote.mark(match[0])} is not set: write it out, or set it and use honectl submit",
        )
    if not value.startswith("/"):
        refuse(f"paths must be absolute, got {_shown(value)}", RELATIVE)
    if _BREAK.search(value):
        refuse(f"a path must not contain a line break or control character, got {_shown(value)}", "rename the file")
    return str(PurePosixPath(value))


#: Characters that no path needs and that would end a line of a unit file, a log or a list of files. U+0080 to U+009F
#: begin escape sequences, too.
_BREAK = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _shown(value: str) -> str:
    return quote.mark(repr(value if len(value) < 60 else value[:59] + "…"))


FlagWord = Annotated[str, Field(pattern="^([Yy][Ee][Ss]|[Oo][Nn]|[Nn][Oo]|[Oo][Ff][Ff])$")]
Flag = Annotated[bool, BeforeValidator(_flag, json_schema_input_type=bool | FlagWord)]
Count = Annotated[int, Ge(1)]
Share = Annotated[float, Gt(0), Lt(1)]
#: 0 is stored as null: no held-out share.
ShareOrZero = Annotated[float, Ge(0), Lt(1), AfterValidator(lambda value: value or None)]
Seconds = Annotated[float, Gt(0), Expected("a number of seconds, more than 0")]
#: Types for the JSON Schema alone.
NotEmpty = Annotated[str, MinLen(1)]
NotEmptyList = Annotated[list[NotEmpty], MinLen(1)]
AnySteps = Annotated[int, Ge(1)] | Annotated[float, Gt(0), Lt(1)]
Texts = Annotated[list[str], any_of(is_texts, list, schema=NotEmptyList), Expected("a list of strings")]
AbsolutePath = Annotated[str, AfterValidator(absolute), Expected("an absolute path"), Place()]
#: Steps as in TRL and transformers: a number of steps, or below 1 a share of the run.
Steps = Annotated[
    float,
    any_of(_is_steps, int, float, schema=AnySteps),
    Expected("an integer number of steps, or a share of the run below 1"),
]
StepsOrZero = Annotated[
    float,
    any_of(lambda value: value == 0 or _is_steps(value), int, float, schema=AnySteps | Literal[0]),
    Expected("an integer number of steps, 0 for none, or a share of the run below 1"),
]


def form(pattern: str) -> AfterValidator:
    """Return the validator of a text with a fixed pattern; its `Expected` describes it."""
    compiled = re.compile(pattern)

    def validate(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError
        return value

    return AfterValidator(validate)
