"""The training variants of chat templates that the installed TRL ships.

    trl/chat_templates/qwen3.jinja            as models come with it
                       qwen3_training.jinja   its variant: shows earlier turns' reasoning, marks what is generated

TRL tells a template by its whole text, and so does this, from the files alone: nothing of TRL is imported.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from honed.system.error import SpecError, said

_ENDING = "_training"
#: A tokenizer's: its text, or several by name.
Template = str | Mapping[str, str] | None
#: How the key `training_chat_template` asks for TRL's variant.
ASKED = "trl"


def read(asked: str | None, template: Template) -> str | None:
    """The text that the key asks for beside the base's template; None where it asks for nothing. Raises SpecError."""
    if asked is None:
        return None
    path = locate(asked, template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"training_chat_template: {path}: {said(error)}", hint="it is UTF-8, and readable") from error


def locate(asked: str, template: Template) -> Path:
    """The file that the key asks for. Raises SpecError where TRL ships none for the base's template."""
    if asked != ASKED:
        return Path(asked)
    if (path := find(template)) is None:
        raise SpecError(
            "training_chat_template: trl: the installed TRL ships no training variant of the chat template",
            hint=f"leave it out, or name a file; it ships those of {', '.join(names()) or 'none'}",
            fix={"training_chat_template": None},
        )
    return path


def find(template: Template) -> Path | None:
    """The file with the training variant of a template; None where TRL ships none, or is not installed."""
    text = template.get("default") if isinstance(template, Mapping) else template
    return _variants().get(text or "")


def names() -> list[str]:
    """The templates with a variant, by TRL's names."""
    return sorted(path.stem.removesuffix(_ENDING) for path in _variants().values())


@functools.cache
def _variants() -> dict[str, Path]:
    found = importlib.util.find_spec("trl")
    directories = list(found.submodule_search_locations or []) if found else []
    variants: dict[str, Path] = {}
    for path in (
        path for directory in directories for path in Path(directory).glob(f"chat_templates/*{_ENDING}.jinja")
    ):
        base = path.with_name(f"{path.stem.removesuffix(_ENDING)}.jinja")
        if base.is_file():
            variants[base.read_text(encoding="utf-8")] = path
    return variants
