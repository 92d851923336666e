"""The reference pages, made from the types: docs/job-spec.md, docs/configuration.md, docs/database.md, and
etc/honed.toml; and the journal's catalog, units/honed.catalog, from message.py; man pages and completions, see
manual.py.

python -m honed.reference --write docs/    writes them
python -m honed.reference --check docs/    ends with 1 where one is not what it would write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from honed import manual, view
from honed.config import Config
from honed.field import MANY, choices, describe, kinds, members
from honed.message import catalog
from honed.spec import JobSpec
from honed.training import OWNED

_SPEC_INTRODUCTION = """\
# The job spec

<!-- Made by `python -m honed.reference --write docs/`; change daemon/honed/spec.py instead. -->

A job is one file, in YAML, JSON or TOML, with the same keys and the same meaning. Keys keep the spelling of the library
that owns them (transformers, trl, peft). An unknown key is refused with the nearest known one, and every refusal names
the key and the line. `honectl check FILE` shows all faults of the file itself at once, and the first of what it names
(models, data, memory, disk). Paths are absolute. Secrets never stand in a spec.

```yaml
{sample}```

More of them are in `etc/examples/`.
"""

_TRAINING_NOTE = """\
SFTConfig's own fields, as of TRL 1.14.2, with its own defaults, which hold under Unsloth, too.
"""

_CONFIG_INTRODUCTION = """\
# The configuration

<!-- Made by `python -m honed.reference --write docs/`; change daemon/honed/config.py instead. -->

`/etc/honed/honed.toml`, then `/etc/honed/honed.toml.d/*.toml` in the order of their names; later files win. An unknown
key or a wrong value is refused, and the configuration in force stays. `systemctl reload honed` reads it again.
"""

_TOML_INTRODUCTION = """\
# honed's configuration. Every key is here, commented out, with its default.
# Later files win: put changes into honed.toml.d/, such as honed.toml.d/50-local.toml.
# Made by `python -m honed.reference --write docs/`.
"""


def pages(root: Path) -> dict[Path, str]:
    """What each generated file holds. The sample in it is read from the tree below `root`."""
    sample = (root / "etc/examples/lora.yaml").read_text(encoding="utf-8")
    return {
        root / "docs/job-spec.md": job_spec(sample),
        root / "docs/configuration.md": configuration(),
        root / "docs/database.md": view.page(),
        root / "etc/honed.toml": configuration_sample(),
        root / "units/honed.catalog": catalog(),
        **{
            root / "docs/man" / name: text
            for name, text in manual.man_pages(((f"[{name}]", "", model) for name, model in _config_sections()),
                                               _spec_sections()).items()
        },
        **{root / "etc/completions" / name: text for name, text in manual.completions().items()},
    }  # fmt: skip


def job_spec(sample: str) -> str:
    parts = [_SPEC_INTRODUCTION.format(sample=sample)]
    for title, note, model in _spec_sections():
        parts.append(_section(title, note, model))
        if title == "training":
            parts.append(_owned())
    return "\n".join(parts)


def configuration() -> str:
    sections = (_section(f"[{name}]", "", model) for name, model in _config_sections())
    return "\n".join([_CONFIG_INTRODUCTION, *sections])


def configuration_sample() -> str:
    """honed.toml with every key commented out."""
    lines = [_TOML_INTRODUCTION]
    for section, model in _config_sections():
        lines.append(f"[{section}]")
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            value = "… (not set)" if default is None else json.dumps(default)
            lines += [f"# {_plain(info.description)}", f"#{name} = {value}", ""]
    return "\n".join(lines)


def _spec_sections() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Title, note and type of each section of a spec, the top level first."""
    yield "Top level", "", JobSpec
    yield from _inner_sections(JobSpec, "")


def _inner_sections(model: type[BaseModel], above: str) -> Iterator[tuple[str, str, type[BaseModel]]]:
    for name, annotation in kinds(model).items():
        for member in members(annotation):
            inner = get_args(member)[0] if get_origin(member) is list else member
            if name != "eval_datasets" and isinstance(inner, type) and issubclass(inner, BaseModel):
                note = _TRAINING_NOTE if name == "training" else f"{inner.__doc__}\n"
                yield f"{above}{name}", note, inner
                yield from _inner_sections(inner, f"{above}{name}.")


def _config_sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in Config.model_fields.items():
        assert isinstance(info.annotation, type)
        yield name, info.annotation


def _section(title: str, note: str, model: type[BaseModel]) -> str:
    annotations = kinds(model)
    lines = [f"## {title}\n", *([note] if note else []), "| Key | Takes | Default | Meaning |", "|---|---|---|---|"]
    lines += [_row(name, annotations[name], info) for name, info in model.model_fields.items()]
    lines += [
        f"\n`{name}` takes {', '.join(f'`{word}`' for word in words)}."
        for name, annotation in annotations.items()
        if len(words := choices(annotation)) > MANY
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, annotation: Any, info: FieldInfo) -> str:
    takes = describe(annotation).removesuffix(", or null").replace("|", "\\|")
    return f"| `{name}` | {takes} | {_default(info)} | {_plain(info.description)} |"


def _default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True)
    match default:
        case value if value is PydanticUndefined:
            return "**must be given**"
        case None | BaseModel() | [] | {}:
            return "–"
        case str():
            return f"`{default}`"
        case _:
            return f"`{json.dumps(default)}`"


def _plain(description: str | None) -> str:
    assert description, "every key has its doc"
    return " ".join(description.split())


def _owned() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in OWNED.items():
        by_reason.setdefault(reason, []).append(name)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason.items()]
    return (
        "\n".join(["SFTConfig's other fields are not set there:\n", "| Field | Instead |", "|---|---|", *rows]) + "\n"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m honed.reference", description="Write or check the reference pages."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", metavar="DOCS", type=Path, help="write the pages")
    action.add_argument("--check", metavar="DOCS", type=Path, help="end with 1 where a page is stale")
    options = parser.parse_args(arguments)
    made = pages((options.write or options.check).resolve().parent)
    if options.write:
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} is stale: python -m honed.reference --write {options.check}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
