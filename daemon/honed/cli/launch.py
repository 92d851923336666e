"""Command lines that start another tool's training, in a shell script or as a text. Nothing of them runs.

    trl sft --model_name_or_path M --dataset_name D …     also with accelerate launch, torchrun or python -m before it
    llamafactory-cli train FILE [KEY=VALUE …] | --KEY VALUE …
    axolotl train FILE [--KEY VALUE …]

The settings are those of the file that is named, if there is one, with those of the command line over them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.cli import shell
from honed.spec import document, synonym
from honed.system.error import HonedError, SpecError

SUFFIXES = (".sh", ".bash", ".zsh", ".sbatch", ".slurm", ".txt", "")
HINT = (
    "give the line that starts the training, in quotes ('trl sft --model_name_or_path …', 'llamafactory-cli train "
    "FILE', 'axolotl train FILE'), the tool's settings file, or an Unsloth script"
)
#: Bytes of a script.
MAX_BYTES = 256 * 1024
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SETTINGS = (".yaml", ".yml", ".json")
#: Options of launchers, and variables, that say how many devices train, or machines.
_DEVICES = {"num_processes", "nproc_per_node", "nproc", "num_gpus", "include", "NPROC_PER_NODE"}
_MACHINES = {"nnodes", "num_machines", "num_nodes", "nodes", "NNODES"}
_IN_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES", "FORCE_TORCHRUN")
_BATCH = "the batch of a step is as many times larger"
#: Other names of TRL's options: abbreviations that it accepts, or that are written by habit.
_OF_TRL = {"model": "model_name_or_path", "model_name": "model_name_or_path", "dataset": "dataset_name"}


@dataclass
class Launch:
    """A training that a command line starts."""

    tool: str
    config: Path | None = None  #: the settings file that it names
    data: dict[str, Any] = field(default_factory=dict)  #: settings of the command line itself
    directory: Path = field(default_factory=Path.cwd)  #: the directory in which it is started
    notes: list[tuple[str, str]] = field(default_factory=list)  #: a word, and why it has no equal here


def is_script(path: Path) -> bool:
    """Tell whether a file is a shell script, by its suffix or its first line."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES[:-2]:
        return True
    with path.open("rb") as file:
        return suffix in SUFFIXES and (file.read(2) == b"#!" or suffix == ".txt")


def read(path: Path) -> Launch:
    """Find the training in a shell script. Raises SpecError if there is none that honed can do."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as a shell script: {error}") from None
    return find(text, path.absolute().parent, str(path))


def find(text: str, directory: Path, name: str) -> Launch:
    """Find the training that a text starts in a directory; `name` is the text's, for errors."""
    launches: list[Launch] = []
    scripts, within = list[str](), list[str]()
    for command in shell.commands(text, name):
        words = command.words
        if words[:1] == ["cd"] and len(words) == 2 and "$" not in words[1]:
            directory = directory / Path(words[1]).expanduser()
        elif (start := _start(words)) is not None:
            launches.append(_launch(*start, command, directory))
        else:
            scripts += [word for word in words if word.endswith(".py")]
            within += [words[0] for word in words if " " in word and _start(word.split()) is not None]
    if not launches:
        named = f"; it starts {scripts[0]}" if scripts else ""
        named = f"; what {within[0]} is given as one word is not read" if within else named
        raise SpecError(
            f"{name}: no command in it that starts a training of trl, llamafactory or axolotl{named}", hint=HINT
        )
    first, *others = launches
    if others:
        first.notes.append(("other commands", f"{len(others)} more that start a training: convert each by itself"))
    return first


# -- the tools --------------------------------------------------------------------------------------------------------

#: Programs, and the word after them that starts a training.
_PROGRAMS = {
    "trl": ("trl", "sft"),
    "llamafactory-cli": ("llamafactory", "train"),
    "lmf": ("llamafactory", "train"),
    "axolotl": ("axolotl", "train"),
}
#: Modules and scripts that are one by themselves, by the end of their name.
_MODULES = {
    "trl.scripts.sft": "trl",
    "trl/scripts/sft.py": "trl",
    "axolotl.cli.train": "axolotl",
    "llamafactory/launcher.py": "llamafactory",
    "src/train.py": "llamafactory",
    "src/train_bash.py": "llamafactory",
}


def _start(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the tool that a command starts, and the index of its first argument. Raises SpecError if it trains what
    honed has not."""
    for index, word in enumerate(words):
        program, following = word.rsplit("/", 1)[-1], words[index + 1] if words[index + 1 :] else ""
        tool, verb = _PROGRAMS.get(program, ("", ""))
        if tool and following == verb:
            return tool, index + 2
        if tool == "trl" and (why := synonym.not_supported(following)):
            raise SpecError(f"trl {following}: {why}")
        for name, of in _MODULES.items():
            if word == name or word.endswith(f"/{name}"):
                return of, index + 1
    return None


def _launch(tool: str, start: int, command: shell.Command, directory: Path) -> Launch:
    words = command.words
    made = Launch(tool, directory=directory, notes=[*_counts(words[:start], command.variables)])
    rest = [*words[start:]]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            _take_plain(made, word)
            continue
        key, sign, text = word[2:].partition("=")
        values = [text] if sign else []
        while not sign and rest and not re.match(r"--?[A-Za-z]|\$([@*]|\{\w+\[)", rest[0]):
            if tool != "trl" and values and (rest[0].endswith(_SETTINGS) or _ASSIGNMENT.fullmatch(rest[0])):
                break
            values.append(rest.pop(0))
        if (
            not sign
            and len(values) == 1
            and tool == "axolotl"
            and made.config is None
            and values[0].endswith(_SETTINGS)
        ):
            _take_plain(made, values.pop())  # after an option without a value
        _take(made, key.replace("-", "_"), values)
    return made


def _counts(words: Sequence[str], variables: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield a note per number of devices and machines that stands before a training, or in the environment."""
    counts: dict[str, str | None] = {}
    for number, word in enumerate(words):
        option, sign, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_") if option.startswith("--") else option if sign else ""
        counts |= {name: value if sign else "".join(words[number + 1 : number + 2])} if name else {}
    counts = {**{name: variables[name] for name in _IN_ENVIRONMENT if name in variables}, **counts}
    machines = next((count for name, count in counts.items() if name in _MACHINES and _number(count)), None)
    if _DEVICES & counts.keys() or "CUDA_VISIBLE_DEVICES" in counts:
        counts.pop("FORCE_TORCHRUN", None)
    if _DEVICES & counts.keys():
        counts.pop("CUDA_VISIBLE_DEVICES", None)
    for name, count in counts.items():
        if name not in _DEVICES | _MACHINES and name not in _IN_ENVIRONMENT:
            continue
        num = _number(count)
        if name == "CUDA_VISIBLE_DEVICES":
            num = None if count is None or "$" in count else count.count(",") + 1
        elif name == "FORCE_TORCHRUN":
            num = None
        elif name == "num_processes" and num and machines:  # accelerate counts those of all machines
            num //= _number(machines) or 1
        if num is None or num > 1:
            key, things = ("nodes", "machines of a cluster") if name in _MACHINES else ("gpus", "GPUs")
            yield (
                name if name.isupper() else f"--{name}",
                f"write resources: {{{key}: {num or 'N'}}} for as many {things}; {_BATCH}",
            )


def _number(count: str | None) -> int | None:
    return int(count) if count is not None and count.isascii() and count.isdecimal() else None


def _take_plain(made: Launch, word: str) -> None:
    """Take a word that is no option: the settings file, or KEY=VALUE."""
    match = _ASSIGNMENT.fullmatch(word)
    if match and made.tool == "llamafactory":
        _take(made, match[1], [match[2]])
    elif word.endswith(_SETTINGS) and made.config is None:
        made.config = made.directory / Path(word).expanduser()
    elif "$" in word:
        made.notes.append((word, "the shell computes it: write what it stands for"))
    else:
        made.notes.append((word, "no option and no settings file"))


def _take(made: Launch, key: str, values: list[str]) -> None:
    if made.tool == "trl":
        key = _OF_TRL.get(key, key)
    if key == "config" and values and made.tool == "trl":
        made.config = made.directory / Path(values[0]).expanduser()
    elif unknown := [value for value in values if "$" in value or "`" in value]:
        variable = "" if shell.COMPUTED in unknown[0] else f" ({unknown[0][:60]})"
        made.notes.append((key, f"the shell computes it{variable}: write its value"))
    elif not values and key.startswith("no_"):
        made.data[key.removeprefix("no_")] = False
    else:
        read = [_value(value) for value in values]
        made.data[key] = True if not read else read[0] if len(read) == 1 else read


def _value(text: str) -> Any:
    try:
        data = document.parse(f"value: {text}\n".encode(), ".yaml").data
    except HonedError:
        return text
    return data["value"] if set(data) == {"value"} and data["value"] is not None else text
