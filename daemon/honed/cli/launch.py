"""Command lines that start another tool's training, in a shell script or as a text. Nothing of them runs.

    trl sft --model_name_or_path M --dataset_name D …     also with accelerate launch, torchrun or python -m before it
    llamafactory-cli train FILE [KEY=VALUE …] | --KEY VALUE …
    axolotl train FILE [--KEY VALUE …]

The settings are those of the file that is named, if there is one, with those of the command line over them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_SETTINGS = (".yaml", ".yml", ".json")
#: What the shell computes, innermost first; the number before a redirection.
_COMPUTED = re.compile(r"\$\([^()]*\)|\$\(\([^()]*\)\)|`[^`]*`")
_NUMBERED = re.compile(r"(?<=\s)[0-9](?=>)")
#: Characters that are words of the shell's own.
_SIGNS = ";&|()<>"
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
#: Options of launchers that say how many devices train.
_DEVICES = {"--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node", "--nproc"}
#: Other names of TRL's options: abbreviations that it accepts, or that are written by habit.
_OF_TRL = {"model": "model_name_or_path", "model_name": "model_name_or_path", "dataset": "dataset_name"}


@dataclass
class Launch:
    """A training that a command line starts."""

    tool: str
    config: Path | None = None  #: the settings file that it names
    data: dict[str, Any] = field(default_factory=dict)  #: settings of the command line itself
    place: Path = field(default_factory=Path.cwd)  #: the directory in which it is started
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


def find(text: str, place: Path, name: str) -> Launch:
    """Find the training that a text starts in a directory; `name` is the text's, for errors."""
    variables: dict[str, str] = {}
    found: list[Launch] = []
    scripts: list[str] = []
    for command in _commands(text):
        words = [_expanded(word, variables) for word in command]
        if words[0] == "export":
            del words[0]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            variables[match[1]] = match[2]
            del words[0]
        if words[:1] == ["cd"] and len(words) == 2 and "$" not in words[1]:
            place = place / Path(words[1]).expanduser()
        elif (start := _start(words)) is not None:
            found.append(_launch(*start, words, place))
        else:
            scripts += [word for word in words if word.endswith(".py")]
    if not found:
        named = f"; it starts {scripts[0]}" if scripts else ""
        raise SpecError(
            f"{name}: no command in it that starts a training of trl, llamafactory or axolotl{named}", hint=HINT
        )
    first, *others = found
    if others:
        first.notes.append(("other commands", f"{len(others)} more that start a training: convert each by itself"))
    return first


# -- the shell --------------------------------------------------------------------------------------------------------


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command."""
    pending, until = "", ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        if until:  # within a here-document
            until = "" if line.strip() == until else until
            continue
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = _words(pending)
        except ValueError:  # a quote that ends on a later line
            continue
        if here := _HEREDOC.search(pending):
            until = here[1]
        pending = ""
        command: list[str] = []
        is_redirected = False
        for word in [*words, ";"]:
            if not set(word) <= set(_SIGNS):
                command += [] if is_redirected else [word]
                is_redirected = False
            elif is_redirected := bool(set(word) & set("<>")):
                pass  # the next word is a file, or the number of one
            elif command:
                yield command
                command = []


def _words(line: str) -> list[str]:
    while (computed := _COMPUTED.sub("$computed", line)) != line:
        line = computed
    lexer = shlex.shlex(_NUMBERED.sub("", line), posix=True, punctuation_chars=_SIGNS)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    return list(lexer)


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Put in the values of variables that the script sets, and defaults; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[3] if match[3] is not None else match[0])

    return _VARIABLE.sub(value, word)


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
    """Return the tool that a command starts, and the place of its first argument. Raises SpecError if it trains what
    honed has not."""
    for place, word in enumerate(words):
        program, following = word.rsplit("/", 1)[-1], words[place + 1] if words[place + 1 :] else ""
        tool, verb = _PROGRAMS.get(program, ("", ""))
        if tool and following == verb:
            return tool, place + 2
        if tool == "trl" and (why := synonym.not_supported(following)):
            raise SpecError(f"trl {following}: {why}")
        for name, of in _MODULES.items():
            if word == name or word.endswith(f"/{name}"):
                return of, place + 1
    return None


def _launch(tool: str, start: int, words: Sequence[str], place: Path) -> Launch:
    made = Launch(tool, place=place)
    for number, word in enumerate(words[:start]):
        option, _, value = word.partition("=")
        count = value or (words[number + 1] if number + 1 < start else "")
        if option in _DEVICES and count.isdecimal() and int(count) > 1:
            made.notes.append((option, f"write resources: {{gpus: {count}}} for as many GPUs"))
    rest = [*words[start:]]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            _take_plain(made, word)
            continue
        key, sign, text = word[2:].partition("=")
        values = [text] if sign else []
        while not sign and rest and not re.match(r"--?[A-Za-z]", rest[0]):
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


def _take_plain(made: Launch, word: str) -> None:
    """Take a word that is no option: the settings file, or KEY=VALUE."""
    match = _ASSIGNMENT.fullmatch(word)
    if match and made.tool == "llamafactory":
        _take(made, match[1], [match[2]])
    elif word.endswith(_SETTINGS) and made.config is None:
        made.config = made.place / Path(word).expanduser()
    else:
        made.notes.append((word, "no option and no settings file"))


def _take(made: Launch, key: str, values: list[str]) -> None:
    if made.tool == "trl":
        key = _OF_TRL.get(key, key)
    if key == "config" and values and made.tool == "trl":
        made.config = made.place / Path(values[0]).expanduser()
    elif unknown := [value for value in values if "$" in value or "`" in value]:
        made.notes.append((key, f"the shell computes it{_name_of(unknown[0])}: write its value"))
    elif not values and key.startswith("no_"):
        made.data[key.removeprefix("no_")] = False
    else:
        read = [_value(value) for value in values]
        made.data[key] = True if not read else read[0] if len(read) == 1 else read


def _name_of(word: str) -> str:
    return "" if "$computed" in word else f" ({word[:60]})"


def _value(text: str) -> Any:
    """Return a value as a settings file would have it: 2e-4 is a number, and a text that is no YAML is itself."""
    try:
        data = document.parse(f"value: {text}\n".encode(), ".yaml").data
    except HonedError:
        return text
    return data["value"] if set(data) == {"value"} and data["value"] is not None else text
