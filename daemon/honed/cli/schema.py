"""The JSON Schema of job files, for editors: names, types, ranges and choices of single keys, with their descriptions.

It is more lenient than `honectl check`, which alone knows the forms of texts, the keys that go together, and what the
files named in a job contain; a file that `check` accepts is never rejected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import honed
from honed.spec.docstring import docstrings
from honed.spec.document import HOLDERS
from honed.spec.field import Section
from honed.spec.spec import JobSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from honed.cli.instance import Instance

#: The name of the file in etc/, and next to the installed examples.
NAME = "honed-job.schema.json"


def schema(_instance: Instance, _options: argparse.Namespace) -> int:
    """Print the schema."""
    sys.stdout.write(text())
    return 0


def line() -> str:
    """Return the comment that names the installed schema to editors; empty if it is not installed."""
    data_dir = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    sources = Path(honed.__file__).resolve().parents[2]
    directories = (data_dir / "doc/honed", Path("/usr/share/doc/honed"), sources / "etc")
    path = next((directory / NAME for directory in directories if (directory / NAME).is_file()), None)
    return f"# yaml-language-server: $schema={path.as_uri()}\n" if path else ""


def text() -> str:
    """Return the schema as it is stored in etc/."""
    return json.dumps(made(), indent=1, ensure_ascii=False) + "\n"


def made() -> dict[str, Any]:
    """Return the schema as data."""
    whole = JobSpec.model_json_schema(by_alias=True)
    inner = whole.pop("$defs", {})
    models = {subclass.__name__: subclass for subclass in Section.__subclasses__()}
    for name, section in {"JobSpec": whole, **inner}.items():
        if name in models:
            _describe(section, models[name])
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job file of honed",
        "$comment": "Made by `python scripts/reference.py --write docs`.",
    }
    # Top-level keys that hold YAML anchors are not part of the job.
    holders: dict[str, Any] = {f"^({'|'.join(holder.replace('.', '[.]') for holder in HOLDERS)})": {}}
    others = {"merge": "adapter", "evaluate": "eval_datasets"}
    needs = [{"if": _of_kind({"const": kind}), "then": {"required": [key]}} for kind, key in others.items()] + [
        {"if": _of_kind({"enum": [*others]}), "else": {"required": ["datasets"]}}
    ]
    made: dict[str, Any] = _plain({**whole, **head, "patternProperties": holders, "allOf": needs, "$defs": inner})
    return made


def _of_kind(values: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"kind": values}, "required": ["kind"]}


def _describe(section: dict[str, Any], model: type[BaseModel]) -> None:
    section.pop("description", None)
    for name, words in docstrings(model).items():
        section["properties"][name]["description"] = " ".join(words.split())


def _plain(value: Any, *, is_names: bool = False) -> Any:
    """Return a schema without the titles that repeat the names of keys, and without sections of defaults."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    noise = {key for key, item in value.items() if key == "default" and isinstance(item, dict)}
    noise |= {"title"} if "$schema" not in value else set()
    kept = {key: item for key, item in value.items() if is_names or key not in noise}
    return {key: _plain(item, is_names=key in ("properties", "$defs")) for key, item in kept.items()}
