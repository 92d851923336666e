"""Sweeps: a job file with `sweep:` stands for one job for every combination of the values in it.

    sweep:
      training.learning_rate: [1.0e-4, 2.0e-4]
      lora.r: [8, 16]                             four jobs; with `random: 3`, three of them, drawn by `seed`
      halving: {min_steps: 50, eta: 2}            hopeless ones are ended early, see daemon/halving.py

The combinations of a file are always the same, in the same order: the last key changes fastest.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from honed.spec import problem
from honed.spec.problem import KeyPath, dotted, fault, line_of, shown
from honed.system.error import SpecError

KEY = "sweep"
#: Keys that honed itself gives the jobs of a sweep.
_OWN = ("name", KEY, "group")
#: Combinations of values from which some are drawn.
MAX_COMBINATIONS = 2**53
#: Bytes of all job files that a sweep becomes.
MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Member:
    """One job of a sweep."""

    document: dict[str, Any]  #: the content of its job file, without the sweep
    values: dict[str, Any]  #: dotted key → value
    halving: dict[str, int] | None = None  #: `min_steps` and `eta`, if hopeless jobs are ended early

    @property
    def words(self) -> str:
        return ", ".join(f"{key}: {problem.written(value)}" for key, value in self.values.items())


def is_in(data: Mapping[str, Any]) -> bool:
    """Return True if a job file is a sweep."""
    return data.get(KEY) is not None


def first(data: Mapping[str, Any], lines: Mapping[KeyPath, int] | None = None) -> Member:
    """Return the first job of a sweep. Raises SpecError, as `members` does."""
    asked = _Asked.of(data, lines or {})
    return asked.member(data, 1, {key: value[0] for key, value in asked.values.items()})


def members(data: Mapping[str, Any], lines: Mapping[KeyPath, int], *, max_jobs: int) -> list[Member]:
    """Return the jobs of a sweep. Raises SpecError for a sweep that is none, or that has too many jobs."""
    asked = _Asked.of(data, lines)
    num_combinations = math.prod(map(len, asked.values.values()))
    num_jobs = num_combinations if asked.num_random is None else asked.num_random
    if num_combinations > MAX_COMBINATIONS:
        raise asked.fault((), "too many combinations to draw from", "use fewer values")
    if num_jobs > num_combinations:
        raise asked.fault(("random",), f"there are only {num_combinations} combinations", f"write {num_combinations}")
    if num_jobs > max_jobs:
        raise asked.fault(
            (),
            f"{num_jobs} jobs, but a sweep may have at most {max_jobs} (spool.max_sweep_jobs)",
            f"use fewer values, or random: {max_jobs}, which draws as many combinations",
        )
    chosen = range(num_combinations)
    if asked.num_random is not None:
        chosen = sorted(random.Random(asked.seed).sample(chosen, num_jobs))  # type: ignore[assignment]
    made = [asked.member(data, number, asked.combination(place)) for number, place in enumerate(chosen, 1)]
    if sum(len(json.dumps(item.document, default=str)) for item in made) > MAX_BYTES:
        raise asked.fault((), f"the job files of its {num_jobs} jobs have more than {MAX_BYTES} bytes", "use fewer")
    return made


def _put(content: Any, path: KeyPath, value: Any, lines: Mapping[KeyPath, int]) -> None:
    """Set a value in a job file's content. Raises SpecError for an item that a list does not have."""
    for part, below in zip(path, [*path[1:], None], strict=True):
        if isinstance(content, list) and not (isinstance(part, int) and part < len(content)):
            raise _fault((dotted(path),), lines, f"the list has no item {part}", "list items are counted from 0")
        if not isinstance(content, dict | list):  # a value, such as the path of a data set in its short form
            raise _fault((dotted(path),), lines, "its parent is a value, without keys", "write it as a mapping")
        at: Any = int(part) if isinstance(content, list) else part
        if below is None:
            content[at] = copy.deepcopy(value)
        elif isinstance(content, list):
            content = content[at]
        else:
            if not isinstance(content.get(part), dict | list):
                content[part] = {}
            content = content[part]


@dataclass(frozen=True)
class _Asked:
    """The section `sweep:`."""

    values: dict[str, list[Any]]  #: dotted key → values
    num_random: int | None
    seed: int
    halving: dict[str, int] | None
    lines: Mapping[KeyPath, int]

    @classmethod
    def of(cls, data: Mapping[str, Any], lines: Mapping[KeyPath, int]) -> _Asked:
        section = data[KEY]
        if not isinstance(section, dict):
            raise _fault((), lines, f"expected a mapping of keys to lists of values, got {shown(section)}", _EXAMPLE)
        rest = {key: value for key, value in section.items() if key not in ("random", "seed", "halving")}
        values: dict[str, list[Any]] = {}
        for path, given in _leaves((), rest):
            key = ".".join(map(str, path))
            if not isinstance(given, list) or not given:
                hint = f"jobs are ended early by {_HALVING}" if path[0] in _EARLY else _EXAMPLE
                raise _fault(path, lines, f"expected a list of values, got {shown(given)}", hint)
            if key.partition(".")[0] in _OWN:
                raise _fault(path, lines, "a sweep sets it itself", "remove it")
            if len({json.dumps(item, sort_keys=True, default=str) for item in given}) < len(given):
                raise _fault(path, lines, "the same value twice", "remove one of them")
            if any(other.startswith(f"{key}.") or key.startswith(f"{other}.") or other == key for other in values):
                raise _fault(path, lines, "the same key twice, or a key within another", "remove one of them")
            values[key] = given
        if not values:
            raise _fault((), lines, "has no values", _EXAMPLE)
        number, seed = section.get("random"), section.get("seed", 0)
        if number is not None and (type(number) is not int or number < 1):
            raise _fault(("random",), lines, f"expected a number of jobs, got {shown(number)}", "random: 8")
        if type(seed) is not int:
            raise _fault(("seed",), lines, f"expected an integer, got {shown(seed)}", "seed: 0")
        if "seed" in section and number is None:
            raise _fault(("seed",), lines, "is only for random", "add random: 8, or remove it")
        return cls(values, number, seed, _halving(section.get("halving"), lines), lines)

    def member(self, data: Mapping[str, Any], number: int, values: Mapping[str, Any]) -> Member:
        """Return the job with these values."""
        document = copy.deepcopy({key: value for key, value in data.items() if key != KEY})
        for key, value in values.items():
            _put(document, problem.as_path(key), value, self.lines)
        if isinstance(place := document.get("output_dir"), str) and "output_dir" not in values:
            document["output_dir"] = f"{place}/{number}"
        return Member(document, dict(values), self.halving)

    def combination(self, place: int) -> dict[str, Any]:
        """Return the values at a place in the order of all combinations."""
        values = {}
        for key, given in reversed(self.values.items()):
            place, at = divmod(place, len(given))
            values[key] = given[at]
        return dict(reversed(values.items()))

    def fault(self, path: KeyPath, message: str, hint: str) -> SpecError:
        return _fault(path, self.lines, message, hint)


def _halving(given: Any, lines: Mapping[KeyPath, int]) -> dict[str, int] | None:
    """Return the settings of `halving`; None without it. Raises SpecError for a value that is none."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _fault(("halving",), lines, f"expected a mapping, got {shown(given)}", _HALVING)
    for key in given:
        if key not in ("min_steps", "eta"):
            raise _fault(("halving", key), lines, "unknown key", f"it has min_steps and eta: {_HALVING}")
    min_steps, eta = given.get("min_steps"), given.get("eta", MIN_ETA)
    if type(min_steps) is not int or not 1 <= min_steps <= MAX_STEPS:
        what = "is missing" if min_steps is None else f"expected a number of steps, got {shown(min_steps)}"
        raise _fault(("halving", "min_steps"), lines, what, _HALVING)
    if type(eta) is not int or not MIN_ETA <= eta <= MAX_ETA:
        why = f"expected a number from {MIN_ETA} to {MAX_ETA}, got {shown(eta)}"
        raise _fault(("halving", "eta"), lines, why, "eta: 2 lets the better half go on")
    return {"min_steps": min_steps, "eta": eta}


#: Names of `halving` in other tools.
_EARLY = {"early_terminate", "early_stopping", "stop", "asha", "hyperband", "pruner", "scheduler"}
_HALVING = "halving: {min_steps: 50, eta: 2}"
#: The reduction factor of `halving`, and the highest first rung.
MIN_ETA, MAX_ETA, MAX_STEPS = 2, 16, 10**9
_EXAMPLE = "sweep: {training.learning_rate: [1.0e-4, 2.0e-4]}"


def _fault(path: KeyPath, lines: Mapping[KeyPath, int], message: str, hint: str) -> SpecError:
    whole = (KEY, *path)
    return fault(message, line=line_of(whole, lines), key=dotted(whole), hint=hint)


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what is no mapping below a value, with its path; a key may be dotted, too."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    elif path:
        yield path, value


def halving_fault(lines: Mapping[KeyPath, int], key: str, message: str, hint: str) -> SpecError:
    """Return the error for a sweep whose jobs `halving` cannot end."""
    return _fault(("halving", *filter(None, [key])), lines, message, hint)


def lines_of(member: Member, lines: Mapping[KeyPath, int]) -> dict[KeyPath, int]:
    """Return the lines of a member's keys: those of the file, and of `sweep` for the keys that it sets."""
    at = line_of((KEY,), lines)
    swept = {problem.as_path(key): at for key in member.values} if at is not None else {}
    return {path: line for path, line in itertools.chain(lines.items(), swept.items()) if path[:1] != (KEY,)}
