"""The training variants of chat templates that the installed TRL ships.

    trl/chat_templates/qwen3.jinja            the template as shipped with models
                       qwen3_training.jinja   its variant: shows earlier turns' reasoning, marks the generated text

Like TRL, this module identifies a template by its whole text; it reads TRL's files without importing TRL.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from honed.system.error import SpecError, said

_ENDING = "_training"
#: A tokenizer's chat template: one text, or several by name.
Template = str | Mapping[str, str] | None
#: The value of `training_chat_template` that asks for TRL's variant.
ASKED = "trl"


def read(asked: str | None, template: Template) -> str | None:
    """Return the text that the key asks for; None if it is not set. Raises SpecError."""
    if asked is None:
        return None
    path = locate(asked, template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(
            f"training_chat_template: {path}: {said(error)}", hint="it must be UTF-8 and readable"
        ) from error


def locate(asked: str, template: Template) -> Path:
    """Return the file that the key asks for. Raises SpecError if TRL ships none for the base model's template."""
    if asked != ASKED:
        return Path(asked)
    if (path := find(template)) is None:
        raise SpecError(
            "training_chat_template: trl: the installed TRL has no training variant of the chat template",
            hint=f"remove it, or use a file; TRL has variants of {', '.join(names()) or 'none'}",
            fix={"training_chat_template": None},
        )
    return path


def find(template: Template) -> Path | None:
    """Return the file with a template's training variant; None if TRL ships none, or is not installed."""
    text = template.get("default") if isinstance(template, Mapping) else template
    return _variants().get(text or "")


def names() -> list[str]:
    """Return the names of the templates that have a variant."""
    return sorted(path.stem.removesuffix(_ENDING) for path in _variants().values())


@functools.cache
def _variants() -> dict[str, Path]:
    package = importlib.util.find_spec("trl")
    directories = list(package.submodule_search_locations or []) if package else []
    variants: dict[str, Path] = {}
    for path in (
        path for directory in directories for path in Path(directory).glob(f"chat_templates/*{_ENDING}.jinja")
    ):
        base = path.with_name(f"{path.stem.removesuffix(_ENDING)}.jinja")
        if base.is_file():
            variants[base.read_text(encoding="utf-8")] = path
    return variants
