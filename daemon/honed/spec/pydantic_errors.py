"""Conversion of pydantic's errors into messages for people: key, line, what was expected, and the right name."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from honed.spec.advice import Asked, Synonym, is_off, is_on
from honed.spec.field import MEMBER, REFUSED, Section, choices, describe, keys, kinds, members
from honed.spec.problem import (
    MAX_PROBLEMS,
    KeyPath,
    Problem,
    as_path,
    at,
    dotted,
    key_words,
    line_of,
    mended,
    rewritten,
    shown,
    written,
)
from honed.spec.synonym import NAMES, SECRETS, SECTIONS, VALUES, find, not_supported
from honed.spec.training import OWNED
from honed.system import quote
from honed.system.error import Fix


@dataclass(frozen=True)
class Refusal:
    """One rejected value or key."""

    path: KeyPath
    message: str
    hint: str = ""
    meant: KeyPath | None = None  #: the key that was probably meant by an unknown one
    fix: Mapping[str, Any] = field(default_factory=dict)
    is_unknown: bool = False  #: the key, not its value, is rejected

    @property
    def touched(self) -> tuple[KeyPath, ...]:
        """The paths about which no further error is reported."""
        return (self.path, self.meant) if self.meant else (self.path,)

    def problem(self, lines: Mapping[KeyPath, int]) -> Problem:
        return Problem(dotted(self.path), line_of(self.path, lines), self.message, self.hint, self.fix)


def refusals(error: ValidationError, data: Any, model: type[BaseModel]) -> list[Refusal]:
    """Convert all errors of a validation, at most one per key."""
    by_path: dict[KeyPath, Refusal] = {}
    for index, details in enumerate(error.errors(include_url=False)):
        # In a file with thousands of unknown keys, only the first ones get a search for the nearest name.
        path = _real_path(details["loc"], data)
        by_path.setdefault(path, _refusal(path, details, model, data, is_shown=index < MAX_PROBLEMS))
    meant = {refusal.meant for refusal in by_path.values()} | {
        as_path(key) for refusal in by_path.values() for key, value in refusal.fix.items() if value is not None
    }
    # A required key is not missing if it is present under another name.
    return [item for path, item in by_path.items() if path not in meant or not item.message.startswith(_MISSING)]


def places(error: ValidationError, data: Any) -> list[Refusal]:
    """Return the paths of all errors of a validation, without messages."""
    return [Refusal(_real_path(details["loc"], data), "") for details in error.errors(include_url=False)]


_MISSING = "missing: "


#: Values for required keys whose own value was rejected; no rule reads them.
_STAND_INS: Mapping[str | int, str] = {"base_model": "/", "path": "/", "metric": "exact_match"}


def without(data: Any, refusals: Sequence[Refusal]) -> Any:
    """Return a copy of the data without the rejected values, so that the rules can check the rest."""
    rest = copy.deepcopy(data)
    for path in sorted((item.path for item in refusals), key=_index_last_first):
        _drop(rest, path)
    return rest


def _index_last_first(path: KeyPath) -> tuple[Any, ...]:
    """Sort key: later list items first, so that earlier indices stay valid."""
    return tuple((0, -part) if isinstance(part, int) else (1, part) for part in path)


def _drop(rest: Any, path: KeyPath) -> None:
    """Remove the value at a path; a required key gets a stand-in instead."""
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
    """Return pydantic's location without the parts that are not keys, such as a union's member."""
    path: list[str | int] = []
    for part in location:
        if isinstance(part, str) and part.startswith(MEMBER):
            continue
        if isinstance(data, dict) or _holds(data, part):
            path.append(part)
            data = data[part] if _holds(data, part) else None
    return tuple(path)


def _refusal(path: KeyPath, details: ErrorDetails, model: type[BaseModel], data: Any, *, is_shown: bool) -> Refusal:
    match details["type"]:
        case "extra_forbidden":
            if not is_shown:
                return Refusal(path, "unknown key", is_unknown=True)
            return replace(_checked(_unknown(path, model, data), model, data), is_unknown=True)
        case "missing":
            return Refusal(path, f"{_MISSING}expected {describe(annotation(path, model))}")
        case kind if kind == REFUSED:
            context = details["ctx"]
            fix = context["fix"] or ({} if context["write"] is None else {dotted(path): context["write"]})
            own = Refusal(path, context["message"], context["hint"], fix=fix)
            return _checked(own, model, data) if context["fix"] else own
    taken = annotation(path, model)
    value = details["input"]
    message = f"expected {describe(taken)}, got {shown(value)}"
    if value is None and path and path[-1] not in _STAND_INS and isinstance(path[-1], str) and _is_plain(path):
        return Refusal(path, message, "remove it to use the default", fix={dotted(path): None})
    hint, meant = _value_hint(taken, value, str(path[-1]) if path else "") if is_shown else ("", None)
    fix = {} if meant is None or not _is_plain(path) else {dotted(path): meant}
    return _checked(Refusal(path, message, hint, fix=fix), model, data)


def _checked(refusal: Refusal, model: type[BaseModel], data: Any) -> Refusal:
    """Drop a rejection's fix if it would itself be rejected, or override a value set elsewhere in the file."""
    own = dotted(refusal.path)
    new = {key: value for key, value in refusal.fix.items() if value is not None and key != own}
    if (kept := _overruled(new, data)) is not None:
        rest = {key: value for key, value in refusal.fix.items() if key not in new}
        hint = f"remove it: {kept} is also set, to another value"
        if rest.get(own) is not None:
            hint = f"write {own}: {rewritten(rest[own])}, and keep {kept}"
        return replace(refusal, hint=hint, fix=rest)
    if not refusal.fix or not isinstance(data, dict):
        return refusal
    tops = {key.partition(".")[0] for key in refusal.fix}
    part = {"base_model": "/"} | {key: value for key, value in data.items() if key in tops}
    content = mended(part, refusal.fix)
    try:
        model.model_validate(content)
    except ValidationError as error:
        wrong = [
            details for details in error.errors(include_url=False, include_input=False) if _concerns(details, refusal)
        ]
        if wrong:
            inner = [
                _refusal(_real_path(item["loc"], content), item, model, content, is_shown=True)
                for item in error.errors(include_url=False)
                if _concerns(item, refusal)
            ]
            key = next((key for key in new), own)
            if all(item.fix for item in inner):
                last = mended(content, {name: value for item in inner for name, value in item.fix.items()})
                fix = {name: None for name, value in refusal.fix.items() if value is None} | _difference(part, last)
                said = ", ".join(f"{name}: {rewritten(value)}" for name, value in fix.items() if value is not None)
                return replace(refusal, hint=f"write {said}" if said else refusal.hint, fix=fix)
            if wrong[0]["type"] == REFUSED:
                return replace(refusal, hint=f"{refusal.hint.partition(': ')[0]}; but {inner[0].message}", fix={})
            words = describe(annotation(tuple(wrong[0]["loc"]), model))
            return replace(
                refusal,
                hint=f"{refusal.hint.partition(': ')[0]}, which takes {words}" if key != own else refusal.hint,
                fix={},
            )
    return refusal


def _concerns(details: ErrorDetails, refusal: Refusal) -> bool:
    """Tell whether an error concerns a value that the fix writes. Unknown keys below it are reported separately."""
    place = tuple(part for part in details["loc"] if not (isinstance(part, str) and part.startswith(MEMBER)))
    paths = [as_path(key) for key, value in refusal.fix.items() if value is not None]
    return details["type"] != "extra_forbidden" and any(place[: len(path)] == path for path in paths)


def _overruled(new: Mapping[str, Any], data: Any) -> str | None:
    """Return the first key of a fix that the file sets to another value."""
    for key, value in new.items():
        there = at(data, as_path(key))
        if there is not None and there != value and not (isinstance(there, dict) and isinstance(value, dict)):
            return key
    return None


def _is_plain(path: KeyPath) -> bool:
    """Tell whether a path survives conversion to a dotted key and back."""
    return as_path(dotted(path)) == path


def annotation(path: KeyPath, annotation: Any) -> Any:
    """Return the annotation of the value at a path."""
    for part in path:
        for member in members(annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                annotation = kinds(member).get(str(part), Any)
            elif get_origin(member) in (list, dict):
                annotation = get_args(member)[-1]
    return annotation


def _difference(before: Any, after: Any, home: str = "") -> Fix:
    """Return the fix that turns one content into the other."""
    fix: Fix = {}
    for key in [*before, *(key for key in after if key not in before)]:
        name, old, new = _join(home, key), before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            fix |= _difference(old, new, name)
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            fix |= _difference(
                {str(n): item for n, item in enumerate(old)}, {str(n): item for n, item in enumerate(new)}, name
            )
        else:
            fix[name] = new
    return fix


def _value_hint(annotation: Any, value: Any, key: str = "") -> tuple[str, Any]:
    """Return the hint for a value and the value to write, if known."""
    words, taken = choices(annotation), members(annotation)
    if isinstance(value, str):
        if "sft" in words and (said := not_supported(value)):
            return said, None
        if meant := next((word for word in VALUES.get(value.lower(), ()) if word in words), None):
            return f"write {meant}", meant
        if near := difflib.get_close_matches(value[:64].lower(), words, n=1):
            return f"did you mean {near[0]}?", near[0]
        if bool in taken and (is_on(value) or is_off(value)) and value:
            return f"write {written(is_on(value))}", is_on(value)
        if bool in taken and value.lower() in ("unsloth", "offload", "offload_disk"):  # kinds of gradient checkpointing
            return "write true", True
        hint = _number_hint(taken, value.strip(), key)
        return hint if any(hint) else _list_hint(annotation, value)
    if isinstance(value, bool):
        word = next((word for word in ("no", "off", "none") if word in words), None)
        return (f"write {word}", word) if word and not value else ("", None)
    if isinstance(value, int) and bool in taken and value in (0, 1):
        return f"write {written(bool(value))}", bool(value)
    if (
        isinstance(value, int)
        and str(value) in VALUES
        and (meant := next((word for word in VALUES[str(value)] if word in words), None))
    ):
        return f"write {meant}", meant
    if isinstance(value, int | float) and str in taken and type(value) not in taken:
        return "put it in quotes", str(value)
    if isinstance(value, float) and value.is_integer() and int in taken:
        return f"write {quote.mark(str(int(value)))}", int(value)
    return _list_hint(annotation, value)


def _list_hint(annotation: Any, value: Any) -> tuple[str, Any]:
    """Suggest a list for a single data set or path, or a mapping for a path."""
    if isinstance(value, str) and any(
        isinstance(item, type) and issubclass(item, BaseModel) and "path" in item.model_fields
        for item in members(annotation)
    ):
        return f"write {{path: {quote.mark(value)}}}", {"path": value}
    inner = next((get_args(member)[0] for member in members(annotation) if get_origin(member) is list), None)
    if not (isinstance(inner, type) and issubclass(inner, BaseModel) and "path" in inner.model_fields):
        return "", None
    if isinstance(value, dict) and "path" in value:
        return "a list: begin it with - ", [value]
    if isinstance(value, str):
        return f"write [{{path: {quote.mark(value)}}}]", [{"path": value}]
    return "", None


def _number_hint(taken: tuple[Any, ...], value: str, key: str) -> tuple[str, Any]:
    if not {int, float} & set(taken):
        return "", None
    if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKmM])", value):
        thousand = 1024 if re.search("length|tokens|pixels", key) else 1000
        number = float(match[1]) * thousand ** (1 if match[2] in "kK" else 2)
        return f"write {quote.mark(str(int(number)))}", int(number)
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value)) and float in taken:
        return f"write {quote.mark(f'{float(match[1]) / 100:g}')}", float(f"{float(match[1]) / 100:g}")
    if re.fullmatch(r"\d{1,3}(_\d{3})+|\d{1,3}(,\d{3})+", value) and int in taken:
        number = int(re.sub("[_,]", "", value))
        return f"write {quote.mark(str(number))}", number
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        number = float(value)
        is_whole = number.is_integer() and (int in taken or re.fullmatch(r"[-+]?\d+", value) is not None)
        return "without quotes", int(number) if is_whole else number
    return ("use a decimal point, not a comma" if re.fullmatch(r"[-+]?[\d.,]+([eE][-+]?\d+)?", value) else ""), None


# --- Unknown keys -----------------------------------------------------------------------------------------------------


def _unknown(path: KeyPath, model: type[BaseModel], data: Any) -> Refusal:
    section = _section(path[:-1])
    key = _normal(str(path[-1]))
    removal = {dotted(path): None} if _is_plain(path) else {}
    if SECRETS.fullmatch(key):
        hint = "they are set as systemd credentials or files"
        return Refusal(path, "a job file must not contain secrets", hint, fix=removal)
    what = "cannot be set" if section == "training" and key in OWNED else "unknown key"
    if unnested := _unnested(path, key, what, model, data):
        return unnested
    if synonym := find(key, section):
        return _advised(path, what, synonym, Asked(key, at(data, path), section, data, dotted(path)))
    if what != "unknown key":
        return Refusal(path, what, OWNED[key])
    known = _known(model)
    if key in known.get(section, ()):  # written in another style: learning-rate, learningRate
        return _suggest(path, section, key, section, data)
    homes = [name for name, keys in known.items() if key in keys]
    if homes:
        return _belongs(path, homes, key, section, data)
    if key in OWNED:
        return Refusal(path, what, OWNED[key])
    return _nearest(path, key, section, known, data)


#: Maximum number of keys and levels of another tool's section that is converted.
_MAX_UNNESTED, _MAX_DEPTH = 60, 3


def _unnested(path: KeyPath, key: str, what: str, model: type[BaseModel], data: Any) -> Refusal | None:
    """Convert another tool's section key by key, as if each were in its own place; None for anything else."""
    value = at(data, path)
    if key not in SECTIONS or not isinstance(value, dict) or not _is_plain(path) or len(value) > _MAX_UNNESTED:
        return None
    if _depth(value) > _MAX_DEPTH or not value:
        return None
    home, renamed = SECTIONS[key]
    given = {_join(home, renamed.get(_normal(str(name)), str(name))): item for name, item in value.items()}
    content = mended(data, {dotted(path): None})
    if home == "lora":
        content.setdefault("lora", {})
    if (kept := _overruled(given, content)) is not None:
        hint = f"its keys belong {f'under {home}:' if home else 'at the top level'}, where {kept} is also set"
        return Refusal(path, what, hint)
    content = mended(content, {name: item for name, item in given.items() if item is not None})
    ours, hints = {as_path(name) for name in given}, []
    for _ in range(_MAX_DEPTH):
        nested = [fault for fault in _faults(content, model) if any(fault.path[: len(name)] == name for name in ours)]
        if not nested:
            break
        for item in nested:
            if not item.fix:
                return Refusal(path, what, f"{key_words(dotted(item.path))}: {item.hint or item.message}")
            if all(new is None for new in item.fix.values()):
                hints.append(f"{quote.name(str(item.path[-1]))}: {item.hint.removeprefix('remove it: ')}")
        fix = {name: new for item in nested for name, new in item.fix.items()}
        ours |= {as_path(name) for name in fix}
        content = mended(content, fix)
    fix = {dotted(path): None} | _difference(
        {name: item for name, item in data.items() if name != path[0]}
        if len(path) == 1
        else mended(data, {dotted(path): None}),
        content,
    )
    said = ", ".join(f"{name}: {rewritten(new)}" for name, new in fix.items() if new is not None)
    hint = f"write {said}" if len(quote.show(said)) <= MAX_PROBLEMS * 8 else "its keys belong elsewhere"
    return Refusal(path, what, "; ".join([hint if said else "remove it", *hints]), fix=fix)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _faults(content: Any, model: type[BaseModel]) -> list[Refusal]:
    try:
        model.model_validate(content)
    except ValidationError as error:
        return refusals(error, content, model)
    return []


def _advised(path: KeyPath, what: str, synonym: Synonym, asked: Asked) -> Refusal:
    advice = synonym.advise(asked)
    removal = {dotted(path): None} if _is_plain(path) else {}
    fix = {} if advice.fix is None or not removal else {**removal, **advice.fix}
    return Refusal(path, what, advice.hint, meant=_meant(path, synonym.key, asked.section), fix=fix)


def _belongs(path: KeyPath, homes: list[str], key: str, section: str, data: Any) -> Refusal:
    home = homes[0]
    where = " or ".join(f"under {name}:" for name in homes if name) if home else "at the top level"
    target = _join(home, key)
    is_clear = len(homes) == 1 or (home == "training" and not section)  # as in the flat files of TRL and axolotl
    fix = {} if home.startswith("datasets") or not is_clear else _moved(path, target, data)
    return Refusal(path, "unknown key here", f"belongs {where}", meant=_meant(path, target, section), fix=fix)


def _moved(path: KeyPath, target: str, data: Any) -> Fix:
    """Return the fix that moves a key's value to its place; a null value is only removed."""
    value = at(data, path)
    if not _is_plain(path):
        return {}
    return {dotted(path): None} | ({} if value is None else {target: value})


def _nearest(path: KeyPath, key: str, section: str, known: Mapping[str, Sequence[str]], data: Any) -> Refusal:
    if len(key) > 64:
        return Refusal(path, "unknown key")
    if near := difflib.get_close_matches(key, known.get(section, ()), n=1, cutoff=0.7):
        return _suggest(path, section, near[0], section, data)
    elsewhere = {name: home for home, names in known.items() for name in names}
    if near := difflib.get_close_matches(key, [*elsewhere, *NAMES], n=1, cutoff=0.8):
        if near[0] in NAMES:
            asked = Asked(near[0].rpartition(".")[2], at(data, path), section, data, dotted(path))
            return _advised(path, "unknown key", NAMES[near[0]], asked)
        return _suggest(path, elsewhere[near[0]], near[0], section, data)
    if near := difflib.get_close_matches(key, known.get(section, ()), n=1, cutoff=0.6):
        return _suggest(path, section, near[0], section, data)
    return Refusal(path, "unknown key")


def _suggest(path: KeyPath, home: str, key: str, section: str, data: Any) -> Refusal:
    name = key if home == section else _join(home, key)
    meant = _meant(path, _join(home, key), section)
    fix = (
        {}
        if meant is None
        or not _is_plain(path)
        or home.startswith("datasets") != (home == section and section.startswith("datasets"))
        else _moved(path, dotted(meant), data)
    )
    return Refusal(path, "unknown key", f"did you mean {name}?", meant=meant, fix=fix)


def _meant(path: KeyPath, key: str, section: str) -> KeyPath | None:
    """Return the path of one of our keys; in the current section it keeps the list index."""
    home, _, name = key.rpartition(".")
    if not key:
        return None
    return (*path[:-1], name) if home == section else tuple(key.split("."))


def _section(path: KeyPath) -> str:
    """Return the section of a path as named in NAMES: all data sets share one, whatever their index."""
    return re.sub(r"^eval_datasets(?=\.|$)", "datasets", ".".join(part for part in path if isinstance(part, str)))


def _normal(key: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key[:200])
    return re.sub(r"[-\s]+", "_", snake).lower().strip("_")


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


@functools.cache
def _known(model: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    return dict(_sections(model, ""))


def _sections(model: type[BaseModel], name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield name, tuple(keys(model))
    for key, annotation in kinds(model).items():
        for member in members(annotation):
            inner = get_args(member)[0] if get_origin(member) is list else member
            if isinstance(inner, type) and issubclass(inner, Section) and key != "eval_datasets":
                yield from _sections(inner, _join(name, key))
