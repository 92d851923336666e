"""From what pydantic finds to what a person reads: the key, its line, what was expected, and the right name."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from honed.field import MEMBER, REFUSED, Section, choices, describe, kinds, members
from honed.problem import MAX_PROBLEMS, KeyPath, Problem, dotted, line_of, shown
from honed.synonym import NAMES, SECRETS, VALUES
from honed.training import OWNED


@dataclass(frozen=True)
class Refusal:
    """One value, or one key, that is refused."""

    path: KeyPath
    message: str
    hint: str = ""
    meant: KeyPath | None = None  #: the key that an unknown one was probably meant for

    @property
    def touched(self) -> tuple[KeyPath, ...]:
        """The paths of which nothing more can be said."""
        return (self.path, self.meant) if self.meant else (self.path,)

    def problem(self, lines: Mapping[KeyPath, int]) -> Problem:
        return Problem(dotted(self.path), line_of(self.path, lines), self.message, self.hint)


def refusals(error: ValidationError, data: Any, model: type[BaseModel]) -> list[Refusal]:
    """Everything that a validation found, in words, without what says the same key twice."""
    found: dict[KeyPath, Refusal] = {}
    for index, details in enumerate(error.errors(include_url=False)):
        # A file with thousands of unknown keys gets no thousands of searches for the nearest.
        path = _real_path(details["loc"], data)
        found.setdefault(path, _refusal(path, details, model, is_told=index < MAX_PROBLEMS))
    return list(found.values())


#: Values for the keys that must be there, where theirs was refused; no rule reads them.
_STAND_INS: Mapping[str | int, str] = {"base_model": "/", "path": "/", "metric": "exact_match"}


def without(data: Any, found: Sequence[Refusal]) -> Any:
    """A copy of the data without what was refused, for the rules; its other values are as they were."""
    rest = copy.deepcopy(data)
    for path in sorted((item.path for item in found), key=_index_last_first):
        _drop(rest, path)
    return rest


def _index_last_first(path: KeyPath) -> tuple[Any, ...]:
    """Later list items first, so that earlier numbers stay true."""
    return tuple((0, -part) if isinstance(part, int) else (1, part) for part in path)


def _drop(rest: Any, path: KeyPath) -> None:
    """Take what stands at a path out; a key that must be there gets another value."""
    for part in path[:-1]:
        if not _holds(rest, part):
            return
        rest = rest[part]
    if path and isinstance(rest, dict) and path[-1] in _STAND_INS:
        rest[path[-1]] = _STAND_INS[path[-1]]
    elif path and _holds(rest, path[-1]):
        del rest[path[-1]]


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _real_path(location: Sequence[int | str], data: Any) -> KeyPath:
    """Pydantic's location without the parts that are no keys, such as a union's member."""
    path: list[str | int] = []
    for part in location:
        if isinstance(part, str) and part.startswith(MEMBER):
            continue
        if isinstance(data, dict) or _holds(data, part):
            path.append(part)
            data = data[part] if _holds(data, part) else None
    return tuple(path)


def _refusal(path: KeyPath, details: ErrorDetails, model: type[BaseModel], *, is_told: bool) -> Refusal:
    match details["type"]:
        case "extra_forbidden":
            return _unknown(path, model) if is_told else Refusal(path, "unknown key")
        case "missing":
            return Refusal(path, f"missing: expected {describe(_annotation(path, model))}")
        case kind if kind == REFUSED:
            context = details["ctx"]
            return Refusal(path, context["message"], context["hint"])
    annotation = _annotation(path, model)
    value = details["input"]
    return Refusal(path, f"expected {describe(annotation)}, got {shown(value)}", _value_hint(annotation, value))


def _annotation(path: KeyPath, annotation: Any) -> Any:
    """The annotation of the value at a path."""
    for part in path:
        for member in members(annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                annotation = kinds(member).get(str(part), Any)
            elif get_origin(member) in (list, dict):
                annotation = get_args(member)[-1]
    return annotation


def _value_hint(annotation: Any, value: Any) -> str:
    if isinstance(value, str):
        words = choices(annotation)
        if meant := next((word for word in VALUES.get(value.lower(), ()) if word in words), None):
            return f"write {meant}"
        if near := difflib.get_close_matches(value[:64].lower(), words, n=1):
            return f"did you mean {near[0]}?"
        return _number_hint(annotation, value)
    kinds_taken = members(annotation)
    if type(value) in (int, float) and str in kinds_taken and type(value) not in kinds_taken:
        return "put it in quotes"
    if isinstance(value, float) and value.is_integer() and int in kinds_taken:
        return f"write {int(value)}"
    return ""


def _number_hint(annotation: Any, value: str) -> str:
    if not {int, float} & set(members(annotation)):
        return ""
    if re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value):
        return "without quotes"
    return "a decimal point, no comma" if re.fullmatch(r"[-+]?[\d.,]+([eE][-+]?\d+)?", value) else ""


# --- Unknown keys -----------------------------------------------------------------------------------------------------


def _unknown(path: KeyPath, model: type[BaseModel]) -> Refusal:
    section = _section(path[:-1])
    key = _normal(str(path[-1]))
    if SECRETS.fullmatch(key):
        return Refusal(path, "secrets never stand in a spec", "they come as systemd credentials or files")
    if section == "training" and key in OWNED:
        return Refusal(path, "is not set here", OWNED[key])
    if synonym := NAMES.get(f"{section}.{key}") or NAMES.get(key):
        return Refusal(path, "unknown key", synonym.hint, meant=_meant(path, synonym.key, section))
    known = _known(model)
    if key in known.get(section, ()):  # written in another way: learning-rate, learningRate
        return _suggest(path, section, key, section)
    homes = [name for name, keys in known.items() if key in keys]
    if homes:
        return _belongs(path, homes, key, section)
    if key in OWNED:
        return Refusal(path, "unknown key", OWNED[key])
    return _nearest(path, key, section, known)


def _belongs(path: KeyPath, homes: list[str], key: str, section: str) -> Refusal:
    home = homes[0]
    where = " or ".join(f"under {name}:" for name in homes if name) if home else "at the top level"
    return Refusal(path, "unknown key here", f"belongs {where}", meant=_meant(path, _join(home, key), section))


def _nearest(path: KeyPath, key: str, section: str, known: Mapping[str, Sequence[str]]) -> Refusal:
    if len(key) > 64:
        return Refusal(path, "unknown key")
    if near := difflib.get_close_matches(key, known.get(section, ()), n=1, cutoff=0.7):
        return _suggest(path, section, near[0], section)
    elsewhere = {name: home for home, names in known.items() for name in names}
    if near := difflib.get_close_matches(key, [*elsewhere, *NAMES], n=1, cutoff=0.8):
        if near[0] in NAMES:
            return Refusal(path, "unknown key", NAMES[near[0]].hint, meant=_meant(path, NAMES[near[0]].key, section))
        return _suggest(path, elsewhere[near[0]], near[0], section)
    if near := difflib.get_close_matches(key, known.get(section, ()), n=1, cutoff=0.6):
        return _suggest(path, section, near[0], section)
    return Refusal(path, "unknown key")


def _suggest(path: KeyPath, home: str, key: str, section: str) -> Refusal:
    name = key if home == section else _join(home, key)
    return Refusal(path, "unknown key", f"did you mean {name}?", meant=_meant(path, _join(home, key), section))


def _meant(path: KeyPath, key: str, section: str) -> KeyPath | None:
    """The path of one of our keys; in the section at hand, it keeps the list's number."""
    home, _, name = key.rpartition(".")
    if not key:
        return None
    return (*path[:-1], name) if home == section else tuple(key.split("."))


def _section(path: KeyPath) -> str:
    """The section that a path lies in, as its name in NAMES: data sets have one, whatever their number."""
    name = ".".join(part for part in path if isinstance(part, str))
    return re.sub(r"^eval_datasets(?=\.|$)", "datasets", name)


def _normal(key: str) -> str:
    """`learningRate`, `Learning-Rate`, `--learning_rate` as `learning_rate`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key[:200])
    return re.sub(r"[-\s]+", "_", snake).lower().strip("_")


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


@functools.cache
def _known(model: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Every section and its keys; the top level is the empty name."""
    return dict(_sections(model, ""))


def _sections(model: type[BaseModel], name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield name, tuple(model.model_fields)
    for key, annotation in kinds(model).items():
        for member in members(annotation):
            inner = get_args(member)[0] if get_origin(member) is list else member
            if isinstance(inner, type) and issubclass(inner, Section) and key != "eval_datasets":
                yield from _sections(inner, _join(name, key))
