"""Problems of honed.toml, reported like those of job files: key, line, what was expected, and the right name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from honed.spec import toml_lines
from honed.spec.field import describe, keys, kinds
from honed.spec.problem import MAX_PROBLEMS, KeyPath, Problem, dotted, shown

#: Keys that an earlier version read, as `section.key`, and what to write instead. They are ignored with a warning: an
#: upgrade does not stop honed over a line that was valid before it.
GONE: dict[str, str] = {}


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the line of every key, as far as the text is valid TOML."""
    lines: dict[KeyPath, int] = {}

    def note(path: KeyPath, line: int) -> None:
        lines.setdefault(path, line)

    toml_lines.scan(text, note)
    return lines


def take_gone(data: Mapping[str, Any], text: str) -> list[Problem]:
    """Remove the keys in `GONE`, and return a problem per key."""
    gone = []
    for key, instead in GONE.items():
        section, name = key.split(".")
        table = data.get(section)
        if isinstance(table, dict) and name in table:
            del table[name]
            line = lines_of(text).get((section, name))
            gone.append(Problem(key, line, "is no longer a key; it is ignored", instead))
    return gone


def problems(error: ValidationError, model: type[BaseModel], lines: Mapping[KeyPath, int]) -> list[Problem]:
    """Return all problems that a validation found, in line order."""
    by_path: dict[KeyPath, Problem] = {}
    for details in error.errors(include_url=False)[: MAX_PROBLEMS + 1]:
        path = details["loc"]
        line = next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)
        # Each member of a union reports an error; report the key once.
        key = path[: 2 + _num_names(model, path)]
        by_path.setdefault(key, _problem(key, line, details, model))
    return sorted(by_path.values(), key=lambda problem: problem.line or 0)


def _problem(path: KeyPath, line: int | None, details: ErrorDetails, model: type[BaseModel]) -> Problem:
    if details["type"] == "extra_forbidden":
        return Problem(dotted(path), line, "unknown key", _hint(path, model))
    got = shown(details["input"])
    if details["type"] == "value_error":
        return Problem(dotted(path), line, f"{details['ctx']['error']}, got {got}")
    annotation: Any = model
    for part in path:
        annotation = section_of(annotation) if get_origin(annotation) is dict else kinds(annotation)[str(part)]
    return Problem(dotted(path), line, f"expected {describe(annotation)}, got {got}")


def _hint(path: KeyPath, model: type[BaseModel]) -> str:
    """Return a hint with the name that was probably meant; empty if none is similar."""
    import difflib  # noqa: PLC0415 - the daemon, which stays small, mostly has a valid configuration

    key = str(path[-1])[:64].replace("-", "_").lower()
    section, known = str(path[0]) if len(path) > 1 else "", {name: tuple(keys(item)) for name, item in sections(model)}
    if len(path) > 3:
        section = f"{path[0]}.{path[1]}"
    if len(path) == 1 and (near := difflib.get_close_matches(key, known, n=1)):
        return f"did you mean [{near[0]}]?"
    if near := difflib.get_close_matches(key, known.get(section, ()), n=1):
        return f"did you mean {near[0]}?"
    homes = {name: home for home, names in reversed(known.items()) for name in names}
    if key in homes:
        return f"belongs under [{homes[key]}]"
    if near := difflib.get_close_matches(key, homes, n=1, cutoff=0.75):
        return f"did you mean {near[0]} under [{homes[near[0]]}]?"
    return ""


def sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section's name and type; for a table of tables, such as [classes.NAME], the type of one of them."""
    for name, annotation in kinds(model).items():
        section = section_of(annotation)
        yield name, section
        yield from ((f"{name}.{key}", section_of(kinds(section)[key])) for key in tables_in(section))


def tables_in(section: type[BaseModel]) -> list[str]:
    """Return the keys of a section that are tables of tables, such as `profiles` of the cluster's."""
    return [key for key, kind in kinds(section).items() if _is_table_of_tables(kind)]


def section_of(annotation: Any) -> Any:
    """Return the type of a section, or of every table in a table of tables."""
    return get_args(annotation)[1] if get_origin(annotation) is dict else annotation


def _is_table_of_tables(annotation: Any) -> bool:
    of = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return isinstance(of, type) and issubclass(of, BaseModel)


def _num_names(model: type[BaseModel], path: KeyPath) -> int:
    """Return how many names of tables, and of keys above them, are in a path besides its section and its key."""
    first = kinds(model).get(str(path[0]))
    if first is None or _is_table_of_tables(first):
        return int(first is not None)
    return 2 if len(path) > 1 and str(path[1]) in tables_in(first) else 0
