"""Generated files: docs/job-spec.md, docs/configuration.md etc/honed.toml and etc/honed-job.schema.json from the types;
docs/database.md; man pages and completions, see manual.py.

python scripts/reference.py --write docs/    writes them
python scripts/reference.py --check docs/    exits with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import manual
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from honed.cli import schema
from honed.job import views
from honed.spec import setting
from honed.spec.config import Config
from honed.spec.docstring import docstrings
from honed.spec.field import MANY, choices, describe, keys, kinds, members
from honed.spec.spec import JobSpec
from honed.spec.training import OWNED

_SPEC_INTRODUCTION = """\
# The job spec

<!-- Made by `python scripts/reference.py --write docs/`; change daemon/honed/spec/spec.py instead. -->

A job is one file in YAML, JSON or TOML; all three have the same keys with the same meaning. Keys keep the spelling of
the library that owns them (transformers, trl, peft). An unknown key is rejected with the nearest known key as a
suggestion; each error names the key and the line. `honectl check FILE` reports all errors of the file itself, and the
first error of its inputs (models, data, memory, disk). With `--json`, an error that an edit can fix has this edit as
`fix`: a key and its new value, or null to remove the key. Paths are absolute; `honectl submit` and `check` resolve
relative ones against the file's directory. YAML anchors and merge keys are expanded; a top-level key that begins with
`x-`, `_` or `.` may hold an anchor. Do not put secrets into a job file.

```yaml
{sample}```

More examples are in `etc/examples/`. Editors with a YAML language server check keys and values while you type, and
complete them, by the first line of each example: it names the JSON Schema `honed-job.schema.json`, which is installed
beside the examples; `honectl schema` prints it.
"""

_TRAINING_NOTE = """\
Fields of SFTConfig (TRL 1.14.2), with its defaults; the same defaults apply under Unsloth.
"""

_CONFIG_INTRODUCTION = """\
# The configuration

<!-- Made by `python scripts/reference.py --write docs/`; change daemon/honed/spec/config.py instead. -->

honed reads `/etc/honed/honed.toml`, then `/etc/honed/honed.toml.d/*.toml` by name; later files win. An unknown key or
an invalid value is rejected, and the current configuration stays in force; a key that only an earlier version read is
ignored with a warning. `systemctl reload honed` reloads the files.
"""

_TOML_INTRODUCTION = """\
# honed's configuration. Every key is here, commented out, with its default.
# Later files win: put changes into honed.toml.d/, such as honed.toml.d/50-local.toml.
# Made by `python scripts/reference.py --write docs/`.
"""


_ROWS = """\
## Rows

Columns of each format. `honectl check` lists columns that are not read; they are no error.

| Format | Columns | Trained text |
|---|---|---|
| `messages` | `messages` (or `conversations`): a list of messages; `tools` | each assistant turn |
| `prompt_completion` | `prompt` and `completion`: two strings, or two lists of messages | the completion |
| `alpaca` | `instruction`, `input`, `output`, `system`, `history` | the output, and the answers in the history |
| `sharegpt` | `conversations`: a list of `from` and `value`; `system`, `tools` | each assistant turn |
| `text` | `text` | the whole text |

A message has `role` and `content`, and optionally `tool_calls` and `reasoning_content`. The arguments of a call are an
object or its JSON, and the content of its message may be null: the template gets the form that it renders. In a
.parquet or .arrow file, null arguments of an object are left out and counted, as a table pads calls with them.

**The end of a turn** is trained with the turn, so that the model learns to stop: `<|im_end|>`, or the next turn's mark
if the template has nothing else (GLM: `<|user|>`, `<|observation|>`). If the template writes nothing after the last
turn, that mark is added there. Predictions stop at it. honed warns about a template that ends turns with no token.
docs/masks.md compares the trained text with TRL's, template by template.

**To exclude a turn from training**, set `weight: 0` in its message, as in OpenAI's files; `train`, `training` and
`loss` (false) and `masked` (true) mean the same. The turn and its end stay in the context, but count neither in
training nor in `eval_loss`; predictions are made for the last turn that is trained on. A row without a trained turn is
skipped and counted. Any other number, and a 1 on a turn that is not the assistant's, is rejected with its line.

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

Files of the first three rows may be compressed, with `.gz`, `.zst`, `.bz2` or `.xz` after their suffix. If the name is
wrong, the beginning of the content decides: lines in a `.json` file, a list in a `.jsonl` file, an uncompressed file
named `.gz`, UTF-16 with a byte order mark. An object with the same key twice makes its row unusable; a column that
occurs twice, a web page and a Git LFS pointer are rejected.

**A directory** stands for its files, ordered by name; if it has none, for the files below it (`data/`, or a directory
for each split). A directory that `save_to_disk` wrote stands for its tables in their order. Words at the beginning or
the end of a name mark its split: `train` and `training`; `validation`, `valid`, `val` and `dev`; `test`, `testing`,
`eval`, `evaluation`, `heldout` and `holdout`. A directory with held-out files (validation or test) beside others is
rejected until `split` selects one:

```yaml
datasets:
  - path: /srv/data/capitals          # train-00000-of-00001.parquet, test-00000-of-00001.parquet
    split: train
eval_datasets:
  - path: /srv/data/capitals
    split: test
```

The same applies to a data set from the hub, by its id; `name` is its configuration, `policy.hub` allows the download:

```yaml
datasets:
  - path: openai/gsm8k
    name: main
    split: train
    columns: {prompt: question, completion: answer}
```

**Duplicate rows** are counted in the `data` event and warned about: `num_twice` counts training rows that repeat an
earlier row, `num_in_both` held-out rows that are also trained on. `eval_split` keeps duplicates on one
side.
"""


def pages(root: Path) -> dict[Path, str]:
    """Return the content of each generated file, by path. The sample job is read from the tree below `root`."""
    sample = (root / "etc/examples/lora.yaml").read_text(encoding="utf-8")
    return {
        root / "docs/job-spec.md": job_spec(sample),
        root / "docs/configuration.md": configuration(),
        root / "docs/database.md": views.page(),
        root / "etc/honed.toml": configuration_sample(),
        root / "etc" / schema.NAME: schema.text(),
        **{
            root / "docs/man" / name: text
            for name, text in manual.man_pages(
                ((f"[{name}]", _note(model), model) for name, model in _config_sections()), _spec_sections()
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
    sections = (_section(f"[{name}]", f"{_note(model)}\n", model) for name, model in _config_sections())
    return "\n".join([_CONFIG_INTRODUCTION, *sections])


def configuration_sample() -> str:
    """Return honed.toml with every key commented out."""
    lines = [_TOML_INTRODUCTION]
    for section, model in _config_sections():
        lines += [f"# {note}" for note in [_note(model)] if note]
        lines.append(f"[{section}]" if section in Config.model_fields else f"#[{section}]")
        told = docstrings(model)
        for name, info in model.model_fields.items():
            if name in setting.tables_in(model):
                continue  # a section of its own
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
    for name, section in setting.sections(Config):
        of_many = "." in name or get_origin(Config.model_fields[name].annotation) is dict
        yield (f"{name}.NAME" if of_many else name), section


def _note(section: type[BaseModel]) -> str:
    """Return the description of a section of honed.toml, without its name."""
    note = " ".join(inspect.cleandoc(section.__doc__ or "").partition("]: ")[2].split())
    return note[:1].upper() + note[1:]


def _section(title: str, note: str, model: type[BaseModel]) -> str:
    annotations, told = kinds(model), docstrings(model)
    above = [note] if note.strip() else []
    lines = [f"## {title}\n", *above]
    lines += [
        _item(name, annotations[name], info, told.get(name))
        for name, info in keys(model).items()
        if name not in setting.tables_in(model)
    ]
    lines += [
        f"\nValues of `{name}`: {', '.join(f'`{word}`' for word in words)}."
        for name, annotation in annotations.items()
        if len(words := choices(annotation)) > MANY
    ]
    return "\n".join(lines) + "\n"


def _item(name: str, annotation: Any, info: FieldInfo, told: str | None) -> str:
    takes = re.sub(r", at least (\S+) and at most (\S+)", r" from \1 to \2", describe(annotation))
    value = [takes.removesuffix(", or null"), *_default(info)]
    if value[0] == "true or false" and len(value) > 1:
        del value[0]  # the default says it
    return f"- `{name}` ({'; '.join(value)}): {_plain(told)}"


def _default(info: FieldInfo) -> list[str]:
    default = info.get_default(call_default_factory=True)
    match default:
        case value if value is PydanticUndefined:
            return ["**required**"]
        case None | BaseModel() | [] | {}:
            return []
        case str():
            return [f"default `{default}`"]
        case _:
            return [f"default `{json.dumps(default)}`"]


def _plain(description: str | None) -> str:
    assert description, "every key has its doc"
    return " ".join(description.split())


def _owned() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in OWNED.items():
        by_reason.setdefault(reason, []).append(name)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason.items()]
    return (
        "\n".join(["SFTConfig's other fields cannot be set here:\n", "| Field | Instead |", "|---|---|", *rows]) + "\n"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/reference.py", description="Write or check the reference pages."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", metavar="DOCS", type=Path, help="write the pages")
    action.add_argument("--check", metavar="DOCS", type=Path, help="exit with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    made = pages((options.write or options.check).resolve().parent)
    if options.write:
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} is stale: python scripts/reference.py --write {options.check}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
