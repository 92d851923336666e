"""`honectl convert`: another tool's settings as a job file, with a comment per key that has no equal here.

The advice that a rejected job file gets (spec/synonym.py) is applied until the file is a valid job; foreign.py has what
is peculiar to a tool.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.cli import foreign, launch, schema, terminal
from honed.cli.foreign import UNKNOWN, Foreign
from honed.cli.instance import Instance
from honed.spec import jobfile, problem, relative, synonym
from honed.spec.advice import is_off
from honed.spec.problem import InvalidSpecError, Problem, as_path, at, mended, written
from honed.spec.spec import JobSpec
from honed.system import quote
from honed.system.error import SpecError, UsageError

#: Rounds of advice after which a file would still not be valid for a reason of its own.
MAX_ROUNDS = 10
#: Keys without which the job would train something else: they are not left out.
_MEANING = {"kind"}
#: Stands for the name of a command line that was given as a text.
_LINE = "the command line"
_OUTPUT = "honed writes into the job's own directory; an output_dir needs policy.allowed_paths"
_REMOTE_CODE = "code that comes with a model runs only where the administrator allows it (policy.trust_remote_code)"


@dataclass
class Converted:
    """A job, and notes on the settings that it was made of."""

    tool: str
    data: dict[str, Any]
    lost: dict[str, str] = field(default_factory=dict)  #: key -> why honed cannot do as it says
    notes: dict[str, str] = field(default_factory=dict)  #: key -> why it is not needed here, or what it was taken as
    unneeded: list[str] = field(default_factory=list)  #: keys that are off or empty
    written: dict[str, Any] = field(default_factory=dict)  #: the tool's defaults
    missing: dict[str, str] = field(default_factory=dict)  #: keys to fill in

    @property
    def is_whole(self) -> bool:
        return not self.missing


def convert(_instance: Instance, options: argparse.Namespace) -> int:
    """Print the job file, or write it to -o. Exit status 1 if something has to be filled in."""
    source: Path | str = Path(options.file)
    if not Path(options.file).is_file() and len(options.file.split()) > 1:
        source = options.file
    made = converted(source, options.tool)
    text = rendered(made, source)
    if options.output is None:
        sys.stdout.write(text)
    else:
        write_new(options.output, text)
        terminal.say(f"{options.output}: written; honectl check {options.output} tells whether it can be trained")
    for key, why in made.missing.items():
        print(terminal.plain(f"honectl: {key}: {why}"), file=sys.stderr)
    return int(not made.is_whole)


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path}: exists already", hint="give another -o, or delete that file") from error
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or '').lower()}") from error


def converted(source: Path | str, tool: str | None = None) -> Converted:
    """Convert a settings file or script, or the text of a command line. Raises SpecError for settings that train what
    honed does not."""
    if isinstance(source, str):
        theirs = foreign.started(launch.find(source, Path.cwd(), _LINE), tool, _LINE)
    else:
        theirs = foreign.read(source, tool)
    made = Converted(theirs.tool, _absolute(theirs, theirs.directory or Path(source).absolute().parent))
    made.written = dict(theirs.stated)
    for note in theirs.notes:
        (made.lost if note.is_lost else made.notes)[note.key] = note.why
    made.unneeded = [key for key, value in made.data.items() if value is None]
    made.data = {key: value for key, value in made.data.items() if value is not None}
    _settle(made)
    _add_defaults(made, theirs.defaults)
    unknown = (path for path, value in problem.texts(made.data) if value.startswith(f"{UNKNOWN}/"))
    made.missing |= {problem.dotted(path): "write the path" for path in unknown}
    return made


def _absolute(theirs: Foreign, directory: Path) -> dict[str, Any]:
    """Return the settings with absolute paths: below the file's directory, or where the tool was started from."""
    text, changes = relative.absolute(json.dumps(theirs.data).encode(), ".json", directory)
    data: dict[str, Any] = json.loads(text)
    for change in changes:
        if not Path(change.made).exists() and (here := Path.cwd() / change.given).exists():
            data = mended(data, {change.key: str(here)})
    return data


# --- Advice, until it is a job ----------------------------------------------------------------------------------------


def _settle(made: Converted) -> None:
    for key, why in (("output_dir", _OUTPUT), ("trust_remote_code", _REMOTE_CODE)):
        for dotted in (key, f"training.{key}"):
            if (value := at(made.data, as_path(dotted))) is not None:
                made.data = mended(made.data, {dotted: None})
                if is_off(value):
                    made.unneeded.append(dotted)
                else:
                    made.lost[dotted] = f"{written(value)}: {why}" if isinstance(value, str) else why
    for _ in range(MAX_ROUNDS):
        try:
            jobfile.validate(made.data)
        except InvalidSpecError as error:
            _apply(made, error.problems)
        else:
            return
    raise SpecError(
        f"these settings of {made.tool} could not be converted", hint="write the job file with honectl init"
    )


def _apply(made: Converted, problems: tuple[Problem, ...]) -> None:
    """Apply the advice for every problem; a key without any is left out and noted."""
    fix: dict[str, Any] = {}
    # In a file with many problems, only the first ones get advice: the others wait for the next round.
    advised = [
        item for item in problems if item.fix or item.hint or item.message not in ("unknown key", "unknown key here")
    ]
    for item in advised or problems:
        value = _at(made.data, item.key)
        words = quote.show(item.hint or item.message)
        if not item.fix:
            fix.setdefault(item.key, _leave_out(made, item, words))
            continue
        for key, new in item.fix.items():
            if isinstance(new, dict) and isinstance(fix.get(key), dict):
                fix[key] = new | fix[key]
            fix.setdefault(key, new)
        new_keys = [key for key, new in item.fix.items() if new is not None]
        if not new_keys:
            _note_removal(made, item.key, value, words)
        elif _is_typo(item):
            made.notes[item.key] = f"taken as {', '.join(f'{key}: {written(item.fix[key])}' for key in new_keys)}"
        elif "; " in words:
            made.notes[item.key] = words.partition("; ")[2]
    fix = {key: new for key, new in fix.items() if new is not None or _at(made.data, key, Ellipsis) is not Ellipsis}
    # The removal of a list's item changes the numbers of those after it: the rest waits for the next round.
    items = {key: None for key, new in fix.items() if new is None and isinstance(as_path(key)[-1], int)}
    made.data = mended(made.data, items or fix)
    for key, placeholder in (("base_model", f"{UNKNOWN}/model"), ("datasets", [{"path": f"{UNKNOWN}/rows.jsonl"}])):
        if not made.data.get(key) and any(item.key == key for item in problems):
            made.data[key] = placeholder
            made.lost.pop(key, None)


def _leave_out(made: Converted, unsolved: Problem, words: str) -> str | None:
    """Note a key that is left out. Returns the value that is written instead, if there must be something."""
    name, section = (
        unsolved.key.rpartition(".")[2],
        ".".join(p for p in unsolved.key.split(".")[:-1] if not p.isdecimal()),
    )
    advice = synonym.find(name, section)
    is_preference = "preference" in words or "reward" in words or "classification" in words
    if (advice is not None and advice.key in _MEANING) or (is_preference and name in ("type", "model_type", "rl")):
        raise SpecError(f"{unsolved.key}: {words}")
    if unsolved.key == "base_model" or (name == "path" and "datasets" in section):
        made.missing[unsolved.key] = words
        return f"{UNKNOWN}/{'model' if name == 'base_model' else 'rows.jsonl'}"
    if unsolved.message.startswith("missing"):
        return None
    made.lost[unsolved.key] = "no key that honed knows" if words == "unknown key" else words
    return None


def _note_removal(made: Converted, key: str, value: Any, words: str) -> None:
    why = words.removeprefix("remove it").removeprefix(": ")
    if is_off(value) or value in ([], {}):
        made.unneeded.append(key)
    else:
        made.notes[key] = why or "honed needs no such key"


def _is_typo(unsolved: Problem) -> bool:
    if quote.show(unsolved.hint).startswith("did you mean"):
        return True
    name = unsolved.key.rpartition(".")[2].lower().replace("-", "_")
    section = ".".join(part for part in unsolved.key.split(".")[:-1] if not part.isdecimal())
    is_key = unsolved.message.startswith("unknown key") and "belongs" not in unsolved.hint
    return is_key and synonym.find(name, section) is None and name not in synonym.SECTIONS


def _at(data: Any, key: str, default: Any = None) -> Any:
    above = at(data, as_path(key)[:-1]) if "." in key else data
    part = as_path(key)[-1]
    with contextlib.suppress(KeyError, IndexError, TypeError):
        return above[part]
    return default


def _add_defaults(made: Converted, defaults: Mapping[str, Any]) -> None:
    """Write the tool's own defaults where they differ from honed's and the file says nothing."""
    for key, value in defaults.items():
        is_moot = key == "training.num_train_epochs" and (_at(made.data, "training.max_steps") or -1) > 0
        if key.startswith("lora.") and not isinstance(made.data.get("lora"), dict):
            is_moot = True
        if is_moot or _at(made.data, key, Ellipsis) is not Ellipsis:
            continue
        made.written[key] = value(made.data) if callable(value) else value
        made.data = mended(made.data, {key: made.written[key]})
    with contextlib.suppress(InvalidSpecError):
        jobfile.validate(made.data)
        return
    _settle(made)


# --- The job file -----------------------------------------------------------------------------------------------------


def rendered(made: Converted, source: Path | str) -> str:
    """Return the job file's text."""
    name = one_line(source.name) if isinstance(source, Path) else _LINE
    lines = [f"# Converted from {name} ({made.tool}) by honectl convert."]
    if made.missing:
        lines += ["#", "# To be filled in:", *(f"#   {key}: {one_line(why)}" for key, why in made.missing.items())]
    for title, notes in (("Without an equal here, and left out:", made.lost), ("Not needed here:", made.notes)):
        if notes:
            lines += ["#", f"# {title}", *(f"#   {key}: {one_line(why)}" for key, why in notes.items())]
    if made.written:
        defaults = (f"#   {key}: {one_line(written(value))}" for key, value in made.written.items())
        lines += ["#", f"# Defaults of {made.tool} that differ from honed's, written out below:", *defaults]
    if made.unneeded:
        lines += ["#", f"# Off or empty, and so not needed: {', '.join(made.unneeded)}"]
    return schema.line() + "\n".join([*lines, ""]) + yaml_of(made.data)


def one_line(text: str) -> str:
    """Return a text for a comment in a job file."""
    return re.sub(r"\s+", " ", terminal.plain(text))


def yaml_of(data: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return a job as YAML, its keys in the order of the reference. `comments` are written above their keys."""
    order = [info.alias or name for name, info in JobSpec.model_fields.items()]
    keys = sorted(data, key=lambda key: order.index(key) if key in order else len(order))
    lines: list[str] = []
    for key in keys:
        lines += [f"# {line}" for line in (comments or {}).get(key, "").splitlines()]
        lines += _yaml(key, data[key], comments or {}, key, 0)
    return "\n".join([*lines, ""])


def _yaml(key: str, value: Any, comments: Mapping[str, str], dotted: str, depth: int) -> list[str]:
    pad = "  " * depth
    name = key if re.fullmatch(r"[A-Za-z_][\w-]*", key) else json.dumps(key)
    if isinstance(value, dict) and value:
        lines = [f"{pad}{name}:"]
        for inner, item in value.items():
            inner_key = f"{dotted}.{inner}"
            lines += [f"{pad}  # {line}" for line in comments.get(inner_key, "").splitlines()]
            lines += _yaml(str(inner), item, comments, inner_key, depth + 1)
        return lines
    if isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
        lines = [f"{pad}{name}:"]
        for number, item in enumerate(value):
            inner_lines = [
                line
                for inner, one in item.items()
                for line in _yaml(str(inner), one, comments, f"{dotted}.{number}.{inner}", depth + 2)
            ]
            lines += [f"{pad}  - {inner_lines[0].lstrip()}", *inner_lines[1:]]
        return lines
    return [f"{pad}{name}: {written(value)}"]
