"""Advice for keys of other tools, depending on their values: a hint for people and a fix of the job file.

    take     our key has another name: write the value under it, converted where they differ
    switch   their key is on or off, and a value of our key means the same
    drop     the key can be left out without any loss
    never    honed does not support it: no fix keeps the meaning

A null value, and a value that switches off what is off by default, is always left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from honed.spec.problem import rewritten, shown
from honed.system import quote

#: Maximum number of characters of a value in a hint.
MAX_WRITTEN = 60

_ON, _OFF = ("true", "yes", "on", "1", "all"), ("false", "no", "off", "0", "none", "null", "disabled", "never", "")
_DATA_FILE = re.compile(r"(?:~?\.{0,2}/|[A-Za-z]:\\)|.*\.(?:jsonl?|csv|tsv|parquet|arrow|txt)(?:\.gz|\.zst)?$")


@dataclass(frozen=True)
class Asked:
    """An unknown key of a job file, with its value and position."""

    key: str  #: lower case, with underscores
    value: Any
    section: str = ""  #: dotted; empty for the top level
    data: Mapping[str, Any] = field(default_factory=dict)  #: the whole file
    path: str = ""  #: dotted, as in the file


@dataclass(frozen=True)
class Advice:
    """A hint, and the edits to make besides removing the key; `fix` is None if no edit keeps the meaning."""

    hint: str
    fix: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Synonym:
    key: str  #: our key, dotted; empty if there is none
    advise: Callable[[Asked], Advice]


class Unsaid(Exception):  # noqa: N818 - signals that our key has no such value
    """Raised by a conversion, with the hint, for a value that our key does not have."""


def is_on(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in _ON)


def is_off(value: Any) -> bool:
    return value is None or value is False or value == 0 or (isinstance(value, str) and value.lower() in _OFF)


def is_data_file(value: Any) -> bool:
    """Tell whether a text names a file or a directory, not a data set by name."""
    return isinstance(value, str) and _DATA_FILE.match(value) is not None


def trains_adapter(data: Mapping[str, Any]) -> bool:
    """Tell whether a file asks for LoRA, with honed's keys or another tool's."""
    if data.get("adapter") or isinstance(data.get("lora"), dict) or is_on(data.get("use_peft")):
        return True
    words = ("finetuning_type", "training_type", "train_type", "tuner_type")
    if any("lora" in str(data.get(word)).lower() for word in words):
        return True
    return any(data.get(key) for key in ("lora_r", "lora_rank", "load_in_4bit", "load_in_8bit", "quantization_bit"))


def settings(data: Mapping[str, Any], *names: str) -> Any:
    """Return the first of several keys that is set, at the top level or under `training`."""
    training = data.get("training")
    places = (data, training if isinstance(training, dict) else {})
    return next((place[name] for name in names for place in places if place.get(name) is not None), None)


# --- Kinds of advice --------------------------------------------------------------------------------------------------


def _place(key: str, asked: Asked) -> str:
    return key if "." in key or not asked.section else f"{key} at the top level"


def _words(key: str, value: Any, asked: Asked) -> str:
    text = rewritten(value)
    shortly = len(quote.show(text)) <= MAX_WRITTEN and (not isinstance(value, dict) or value)
    name, _, rest = _place(key, asked).partition(" ")
    text_of_it = f"write {name}: {text}{f' {rest}' if rest else ''}"
    return text_of_it if shortly else f"write {_place(key, asked)}"


def take(key: str, convert: Callable[[Any], Any] = lambda value: value, *, note: str = "") -> Synonym:
    """Advise to use our key. `convert` returns the value for it, or raises Unsaid."""

    def advise(asked: Asked) -> Advice:
        if asked.value is None:
            return Advice("remove it", {})
        target = _target(key, asked)
        try:
            value = convert(asked.value)
        except Unsaid as problem:
            return Advice(str(problem))
        except (TypeError, ValueError, KeyError, AttributeError):
            return Advice(f"write {_place(key, asked)}")
        if value is None:
            return Advice(f"remove it{f': {note}' if note else ''}", {})
        words = _words(key, value, asked)
        return Advice(f"{words}: {note}" if note else words, {target: value})

    return Synonym(key, advise)


def _target(key: str, asked: Asked) -> str:
    """Return the key to write; a key of a data set refers to the data set that contains the foreign key."""
    home, _, name = key.rpartition(".")
    return f"{asked.path.rpartition('.')[0]}.{name}" if home == asked.section and home else key


def switch(
    on: Mapping[str, Any], off: Mapping[str, Any] | None = None, *, note: str = "", off_note: str = "", key: str = ""
) -> Synonym:
    """Advise to write `on` or `off`; `off` is None if honed's default is off."""

    def advise(asked: Asked) -> Advice:
        if is_off(asked.value):
            if off and asked.value is not None:
                return Advice(_instruction(off, asked), off)
            return Advice(f"remove it{f': {off_note}' if off_note else ''}", {})
        if is_on(asked.value):
            if not on:
                return Advice(f"remove it: {note}", {})
            return Advice(_instruction(on, asked) + (f": {note}" if note else ""), on)
        return Advice(f"true is {_instruction(on, asked).removeprefix('write ')}" if on else f"remove it: {note}")

    return Synonym(key or next(iter(on or off or {}), ""), advise)


def _instruction(fix: Mapping[str, Any], asked: Asked) -> str:
    words = [_words(key, value, asked).removeprefix("write ") for key, value in fix.items() if value is not None]
    return f"write {' and '.join(words)}" if words else "remove it"


def drop(why: str) -> Synonym:
    return Synonym("", lambda asked: Advice("remove it" if asked.value is None else f"remove it: {why}", {}))


def never(what: str, remedy: str = "", *, unless: Callable[[Any], bool] = lambda _value: False) -> Synonym:
    """Advise that a feature is not supported. The key is left out if it is off, or if `unless` accepts its value."""

    def advise(asked: Asked) -> Advice:
        if is_off(asked.value) or asked.value in ([], {}):
            return Advice("remove it", {})
        if unless(asked.value):
            return Advice("remove it: honed does so anyway", {})
        return Advice(f"{what} is not supported yet{f': {remedy}' if remedy else ''}")

    return Synonym("", advise)


def hinted(key: str, hint: str) -> Synonym:
    """Advise with a hint only: the right value depends on more than this value."""
    return Synonym(key, lambda asked: Advice("remove it", {}) if asked.value is None else Advice(hint))


def by(advise: Callable[[Asked], Advice], key: str = "") -> Synonym:
    """Advise through a function; null is always left out."""
    return Synonym(key, lambda asked: Advice("remove it", {}) if asked.value is None else advise(asked))


def one_of(values: Mapping[Any, Any], key: str = "") -> Callable[[Any], Any]:
    """Return a conversion by a table, ignoring case. Other values are reported as not supported."""

    def convert(value: Any) -> Any:
        word = value.lower() if isinstance(value, str) else value
        if word not in values:
            raise Unsaid(f"honed has no {shown(value)}{f'; write {key}: …' if key else ''}")
        return values[word]

    return convert


def negated(value: Any) -> Any:
    return not is_on(value) if is_on(value) or is_off(value) else value


def flag(value: Any) -> Any:
    return True if is_on(value) else False if is_off(value) else value
