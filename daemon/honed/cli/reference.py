"""Generated files: docs/job-spec.md, docs/configuration.md and etc/honed.toml from the types, docs/database.md, the
journal's catalog, units/honed.catalog, from message.py; man pages and completions, see manual.py.

python -m honed.cli.reference --write docs/    writes them
python -m honed.cli.reference --check docs/    exits with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from honed.cli import manual
from honed.cli.manual import docstrings
from honed.job import views
from honed.spec.config import Config
from honed.spec.field import MANY, choices, describe, kinds, members
from honed.spec.spec import JobSpec
from honed.spec.training import OWNED
from honed.system.message import catalog

_SPEC_INTRODUCTION = """\
# The job spec

<!-- Made by `python -m honed.cli.reference --write docs/`; change daemon/honed/spec/spec.py instead. -->

A job is one file, in YAML, JSON or TOML, with the same keys and the same meaning. Keys keep the spelling of the library
that owns them (transformers, trl, peft). An unknown key is refused with the nearest known one, and every refusal names
the key and the line. `honectl check FILE` shows all faults of the file itself at once, and the first of what it names
(models, data, memory, disk); with `--json` each fault has its `fix`, the edit that mends it: a key and its new value,
or null to take the key out. Paths are absolute; `honectl submit` and `check` take relative ones from the file's place.
YAML's anchors and merge keys are written out; a key at the top that begins with `x-`, `_` or `.` may hold an anchor.
Secrets never stand in a spec.

```yaml
{sample}```

More of them are in `etc/examples/`.
"""

_TRAINING_NOTE = """\
SFTConfig's own fields, as of TRL 1.14.2, with its own defaults, which hold under Unsloth, too.
"""

_CONFIG_INTRODUCTION = """\
# The configuration

<!-- Made by `python -m honed.cli.reference --write docs/`; change daemon/honed/spec/config.py instead. -->

`/etc/honed/honed.toml`, then `/etc/honed/honed.toml.d/*.toml` in the order of their names; later files win. An unknown
key or a wrong value is refused, and the configuration in force stays. `systemctl reload honed` reads it again.
"""

_TOML_INTRODUCTION = """\
# honed's configuration. Every key is here, commented out, with its default.
# Later files win: put changes into honed.toml.d/, such as honed.toml.d/50-local.toml.
# Made by `python -m honed.cli.reference --write docs/`.
"""


_ROWS = """\
## Rows

What each format's rows hold. A column that is not read is named by `honectl check`; nothing is refused for it.

| Format | Columns | Trained on |
|---|---|---|
| `messages` | `messages` (or `conversations`): a list of messages; `tools` | each turn of the assistant |
| `prompt_completion` | `prompt` and `completion`: two strings, or two lists of messages | the completion |
| `alpaca` | `instruction`, `input`, `output`, `system`, `history` | the output, and the answers of the history |
| `sharegpt` | `conversations`: a list of `from` and `value`; `system`, `tools` | each turn of the assistant |
| `text` | `text` | all of it |

A message has `role` and `content`, and where there are any `tool_calls` and `reasoning_content`. A call's arguments are
an object or its JSON, and its content may be null: the template gets the form that it shows.

**What ends a turn** is trained with it, so that the model learns to stop: `<|im_end|>`, or the next turn's mark where
a template has nothing else (GLM: `<|user|>`, `<|observation|>`). Where it writes nothing after the last turn, that mark
is added there. Predictions stop at it. Under a template that ends turns with no token, this is told as a warning.
docs/masks.md compares the trained text with TRL's, template by template.

**A turn that is not to be trained on** has `weight: 0` in its message, as in OpenAI's files; `train`, `training` and
`loss` (false) and `masked` (true) mean the same. The turn and its end stay in the context, and count neither in
training nor in `eval_loss`; what is predicted is the last turn that is trained on. A row without a turn to train on is
left out and counted. Any other number, and a 1 on a turn that is not the assistant's, is refused with its line.

```json
{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5", "weight": 0},
              {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "No: 4."}]}
```
"""

_FILES = """\
## Data files

| Name | Rows |
|---|---|
| `.jsonl`, `.ndjson` | an object on each line |
| `.json` | a list of objects, or an object with such a list as `data` |
| `.csv` | a header, fields separated by commas |
| `.parquet` | a table |
| `.arrow` | a table, as `save_to_disk` of datasets writes it |

The first three may be packed, with `.gz`, `.zst`, `.bz2` or `.xz` behind their suffix. What a file begins with decides
where its name is wrong: lines called `.json`, a list called `.jsonl`, a packed file that is not, UTF-16 with its mark.
An object with a key twice is a row that cannot be used; a column that occurs twice, a web page and a pointer of
Git LFS are refused.

**A directory** is its files by name; where it has none, those below it (`data/`, or a directory for each split), and
one that `save_to_disk` wrote is its tables in their order. Words at the beginning or the end of a name say its split:
`train` and `training`; `validation`, `valid`, `val` and `dev`; `test`, `testing`, `eval`, `evaluation`, `heldout` and
`holdout`. A directory with files of the latter beside others is refused until `split` says which are meant:

```yaml
datasets:
  - path: /srv/data/capitals          # train-00000-of-00001.parquet, test-00000-of-00001.parquet
    split: train
eval_datasets:
  - path: /srv/data/capitals
    split: test
```

The same goes for a data set of the hub, by its id; `name` is its configuration, and `policy.hub` allows the download:

```yaml
datasets:
  - path: openai/gsm8k
    name: main
    split: train
    columns: {prompt: question, completion: answer}
```

**Rows that say the same** are counted (`num_twice` and, of held-out rows that are trained on, `num_in_both` in the
`data` event), and warned about. `eval_split` keeps them on one side; a job that was planned before honed did so keeps
its split.
"""


def pages(root: Path) -> dict[Path, str]:
    """Return the content of each generated file, by path. The sample job is read from the tree below `root`."""
    sample = (root / "etc/examples/lora.yaml").read_text(encoding="utf-8")
    return {
        root / "docs/job-spec.md": job_spec(sample),
        root / "docs/configuration.md": configuration(),
        root / "docs/database.md": views.page(),
        root / "etc/honed.toml": configuration_sample(),
        root / "units/honed.catalog": catalog(),
        **{
            root / "docs/man" / name: text
            for name, text in manual.man_pages(
                ((f"[{name}]", "", model) for name, model in _config_sections()), _spec_sections()
            ).items()
        },
        **{root / "etc/completions" / name: text for name, text in manual.completions().items()},
    }


def job_spec(sample: str) -> str:
    parts = [_SPEC_INTRODUCTION.format(sample=sample)]
    for title, note, model in _spec_sections():
        parts.append(_section(title, note, model))
        if title == "training":
            parts.append(_owned())
        if title == "datasets":
            parts += [_FILES, _ROWS]
    return "\n".join(parts)


def configuration() -> str:
    sections = (_section(f"[{name}]", "", model) for name, model in _config_sections())
    return "\n".join([_CONFIG_INTRODUCTION, *sections])


def configuration_sample() -> str:
    """Return honed.toml with every key commented out."""
    lines = [_TOML_INTRODUCTION]
    for section, model in _config_sections():
        lines.append(f"[{section}]")
        told = docstrings(model)
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            value = "… (not set)" if default is None else json.dumps(default)
            lines += [f"# {_plain(told.get(name))}", f"#{name} = {value}", ""]
    return "\n".join(lines)


def _spec_sections() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Yield title, note and type of each section of a spec, the top level first."""
    yield "Top level", "", JobSpec
    yield from _inner_sections(JobSpec, "")


def _inner_sections(model: type[BaseModel], above: str) -> Iterator[tuple[str, str, type[BaseModel]]]:
    for name, annotation in kinds(model).items():
        for member in members(annotation):
            inner = get_args(member)[0] if get_origin(member) is list else member
            if name != "eval_datasets" and isinstance(inner, type) and issubclass(inner, BaseModel):
                note = _TRAINING_NOTE if name == "training" else f"{inspect.cleandoc(inner.__doc__ or '')}\n"
                yield f"{above}{name}", note, inner
                yield from _inner_sections(inner, f"{above}{name}.")


def _config_sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in Config.model_fields.items():
        assert isinstance(info.annotation, type)
        yield name, info.annotation


def _section(title: str, note: str, model: type[BaseModel]) -> str:
    annotations, told = kinds(model), docstrings(model)
    lines = [f"## {title}\n", *([note] if note else []), "| Key | Takes | Default | Meaning |", "|---|---|---|---|"]
    lines += [_row(name, annotations[name], info, told.get(name)) for name, info in model.model_fields.items()]
    lines += [
        f"\n`{name}` takes {', '.join(f'`{word}`' for word in words)}."
        for name, annotation in annotations.items()
        if len(words := choices(annotation)) > MANY
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, annotation: Any, info: FieldInfo, told: str | None) -> str:
    takes = describe(annotation).removesuffix(", or null").replace("|", "\\|")
    return f"| `{name}` | {takes} | {_default(info)} | {_plain(told)} |"


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
        prog="python -m honed.cli.reference", description="Write or check the reference pages."
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
        print(f"{path} is stale: python -m honed.cli.reference --write {options.check}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
